"""Tokenizer, chat templates and streaming detokenisation."""

from astrai_core.tokenizer.chat_template import ChatTemplate
from astrai_core.tokenizer.stream_decoder import StreamDecoder
from astrai_core.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "StreamDecoder", "Tokenizer"]
