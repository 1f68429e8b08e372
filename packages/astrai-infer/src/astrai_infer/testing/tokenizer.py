"""A tokenizer whose ids are bytes."""

from __future__ import annotations

import tokenizers

from astrai_core.tokenizer.chat_template import ChatTemplate
from astrai_core.tokenizer.stream_decoder import BYTE_OF_CHAR
from astrai_core.tokenizer.tokenizer import Tokenizer

EOS_ID = 256
VOCAB_SIZE = 257
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with ids 0..255 for the bytes and :data:`EOS_ID` for the special token ``<eos>``."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, config={"eos_token": "<eos>"}, chat_template=ChatTemplate({"default": TEMPLATE}))
