"""Streaming detokenisation: row T1, inference rules 13 and 14."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from tokenizers.decoders import DecodeStream

from astrai_core.checkpoint.gguf import GGUFFile
from astrai_core.errors import RequestError, TokenizerError
from astrai_core.tokenizer import Tokenizer
from astrai_core.tokenizer.stream_decoder import BYTE_OF_CHAR

relaxed = settings(deadline=None, max_examples=150)
id_lists = st.lists(st.integers(0, 470), max_size=24)
"""Both vocabularies end below 470, so that ids outside are drawn too."""


@pytest.fixture(scope="module")
def byte_level(byte_level_backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(byte_level_backend, config={"eos_token": "<|im_end|>"})


@pytest.fixture(scope="module")
def byte_fallback(byte_fallback_backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(byte_fallback_backend, config={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    byte_level_name = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    names = [byte_level_name[b] if tokenizer.token_to_id("<0x00>") is None else f"<0x{b:02X}>" for b in data]
    ids = [tokenizer.token_to_id(name) for name in names]
    assert None not in ids
    return ids  # type: ignore[return-value]


def sentencepiece_reference(data: bytes) -> str:
    """Longest valid character at each position, else U+FFFD for that byte alone."""
    text, at = "", 0
    while at < len(data):
        for width in (1, 2, 3, 4):
            try:
                text += data[at : at + width].decode()
            except UnicodeDecodeError:
                continue
            at += width
            break
        else:
            text += "\ufffd"
            at += 1
    return text


class TestEqualsWholeDecode:
    @relaxed
    @given(ids=id_lists, skip=st.booleans())
    def test_byte_level_ids(self, byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
        """T1, rule 13: joined deltas are the Rust decode of all ids, invalid bytes and special tokens included."""
        stream = byte_level.stream_decoder(skip_special_tokens=skip)
        joined = "".join([stream.step(i) for i in ids]) + stream.flush()
        assert joined == byte_level.backend.decode(ids, skip_special_tokens=skip)
        assert joined == byte_level.decode(ids, skip_special_tokens=skip)

    @relaxed
    @given(data=st.binary(max_size=12))
    def test_byte_level_bytes(self, byte_level: Tokenizer, data: bytes) -> None:
        """T1: any bytes, one per token, come out as the Unicode standard replaces them."""
        assert byte_level.decode(byte_ids(byte_level, data)) == data.decode(errors="replace")

    @relaxed
    @given(ids=id_lists, skip=st.booleans())
    def test_byte_fallback_ids(self, byte_fallback: Tokenizer, ids: list[int], skip: bool) -> None:
        """T1: a Llama-2 style tokenizer; equal to the Rust decode wherever its byte runs are UTF-8."""
        stream = byte_fallback.stream_decoder(skip_special_tokens=skip)
        joined = "".join([stream.step(i) for i in ids]) + stream.flush()
        assert joined == byte_fallback.decode(ids, skip_special_tokens=skip)
        if "\ufffd" not in joined:
            assert joined == byte_fallback.backend.decode(ids, skip_special_tokens=skip)

    @relaxed
    @given(data=st.binary(max_size=12))
    def test_byte_fallback_bytes(self, byte_fallback: Tokenizer, data: bytes) -> None:
        """T1: in a run of byte tokens only the broken bytes are lost, one U+FFFD each, as in SentencePiece."""
        ids = [byte_fallback.token_to_id("d"), *byte_ids(byte_fallback, data), byte_fallback.token_to_id("d")]
        assert byte_fallback.decode(ids) == f"d{sentencepiece_reference(data)}d"

    @relaxed
    @given(text=st.text(max_size=30))
    def test_text_survives(self, byte_level: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
        """T1: encoding and streaming give the text back, whatever the script."""
        for tokenizer in (byte_level, byte_fallback):
            if not any(token in text for token in tokenizer.get_vocab() if token.startswith("<")):
                stream = tokenizer.stream_decoder()
                ids = tokenizer.encode(text, add_special_tokens=False)
                expected = text.replace("▁", " ") if tokenizer is byte_fallback else text
                assert "".join(map(stream.step, ids)) + stream.flush() == expected

    @pytest.mark.parametrize(
        "decoder",
        [
            decoders.WordPiece(),
            decoders.WordPiece(cleanup=False),
            decoders.Metaspace(),
            decoders.Metaspace(prepend_scheme="never"),
            decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
            None,
        ],
        ids=repr,
    )
    @settings(deadline=None, max_examples=30)
    @given(ids=st.lists(st.integers(0, 7), max_size=8))
    def test_other_decoders(self, decoder: decoders.Decoder | None, ids: list[int]) -> None:
        """T1: first-token rules of WordPiece, Metaspace and no decoder at all are those of the Rust decode."""
        vocab = {token: i for i, token in enumerate(["▁", "▁a", "b", "##c", ".", "n't", "▁▁d", "é"])}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="b"))
        if decoder is not None:
            backend.decoder = decoder
        assert Tokenizer(backend).decode(ids) == backend.decode(ids)


class TestDeltas:
    @relaxed
    @given(text=st.text(max_size=20))
    def test_no_half_characters(self, byte_level: Tokenizer, text: str) -> None:
        """T1, rule 14: after each token exactly the finished characters are out; nothing is held that is certain."""
        data = text.encode()
        stream = byte_level.stream_decoder()
        emitted = ""
        for count, token_id in enumerate(byte_ids(byte_level, data), 1):
            emitted += stream.step(token_id)
            assert emitted == data[:count].decode(errors="ignore")

    @relaxed
    @given(text=st.text(max_size=30).filter(lambda text: "\ufffd" not in text))
    def test_never_behind_decode_stream(self, byte_level: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
        """T1: on valid text the deltas join to those of tokenizers' DecodeStream and never come later."""
        for tokenizer in (byte_level, byte_fallback):
            theirs, ours = "", ""
            reference = DecodeStream(skip_special_tokens=True)
            stream = tokenizer.stream_decoder()
            for token_id in tokenizer.encode(text, add_special_tokens=False):
                theirs += reference.step(tokenizer.backend, token_id) or ""
                ours += stream.step(token_id)
                assert ours.startswith(theirs)
            assert ours == theirs

    def test_invalid_bytes_wait_for_proof(self, byte_level: Tokenizer) -> None:
        """Rule 14: a truncated character is replaced when the next byte proves it broken, not before."""
        stream = byte_level.stream_decoder()
        lead, middle, letter = byte_ids(byte_level, b"\xe4\xbd") + byte_ids(byte_level, b"x")
        assert [stream.step(i) for i in (lead, middle, letter)] == ["", "", "\ufffdx"]

    def test_flush(self, byte_level: Tokenizer) -> None:
        """Rule 14: the end turns a held-back tail into U+FFFD, once, and holds nothing for whole text."""
        stream = byte_level.stream_decoder()
        assert [stream.step(i) for i in byte_ids(byte_level, b"a\xf0\x9f\xa6")] == ["a", "", "", ""]
        assert stream.flush() == "\ufffd"
        assert stream.flush() == ""
        assert stream.step(byte_ids(byte_level, b"b")[0]) == "b"

    def test_special_tokens_inside_a_character(self, byte_level: Tokenizer) -> None:
        """T1: skipped tokens do not break a character that is spread around them."""
        special = byte_level.token_to_id("<|im_start|>")
        first, second = byte_ids(byte_level, "é".encode())
        stream = byte_level.stream_decoder()
        assert [stream.step(i) for i in (first, special, second)] == ["", "", "é"]

    def test_prompt_keeps_the_leading_space(self, byte_fallback: Tokenizer) -> None:
        """T1: a text that goes on from a prompt keeps the space that a decoder strips at the start of a text."""
        word, bos = byte_fallback.token_to_id("▁"), byte_fallback.token_to_id("<s>")
        letter = byte_fallback.token_to_id("d")
        assert byte_fallback.stream_decoder().step(word) == ""
        assert byte_fallback.stream_decoder(prompt_ids=[bos]).step(word) == ""
        assert byte_fallback.stream_decoder(prompt_ids=[bos, letter, bos]).step(word) == " "
        assert byte_fallback.stream_decoder(prompt_ids=[letter] * 9).step(word) == " "

    def test_prompt_ends_inside_a_character(self, byte_level: Tokenizer) -> None:
        """T1: a character begun in the prompt is completed, not broken."""
        *prompt, last = byte_ids(byte_level, "好🦜".encode())
        assert byte_level.stream_decoder(prompt_ids=prompt).step(last) == "🦜"


class TestLimits:
    def test_unknown_and_negative_ids(self, byte_level: Tokenizer) -> None:
        """Rule 11: padded embedding rows decode to nothing; a negative id is the caller's error, not the last token."""
        stream = byte_level.stream_decoder()
        assert stream.step(10**6) == ""
        with pytest.raises(RequestError, match="token id -1 is negative"):
            stream.step(-1)

    def test_neighbour_dependent_decoder_is_refused(self) -> None:
        """T1: a decoder whose tokens change each other cannot be streamed, and is named."""
        backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        backend.decoder = decoders.CTC()
        with pytest.raises(TokenizerError, match="decoder 'CTC'"):
            Tokenizer(backend).stream_decoder()

    def test_work_is_bounded(self, byte_level: Tokenizer) -> None:
        """T1: 60,000 invalid bytes and skipped tokens take linear time (DecodeStream re-decodes its whole window)."""
        ids = byte_ids(byte_level, b"\xff\x80") * 15_000 + [0, 1] * 15_000
        stream = byte_level.stream_decoder()
        started = time.perf_counter()
        text = "".join(map(stream.step, ids))
        assert time.perf_counter() - started < 2
        assert text == "\ufffd" * 30_000

    def test_speed(self, smollm2_gguf: Path) -> None:
        """T1: 8,000 tokens of SmolLM2 (1.1 to 3.3 ms when measured alone) beside DecodeStream in the same run."""
        pytest.importorskip("gguf")
        tokenizer = GGUFFile(smollm2_gguf).tokenizer()
        prose = "It was the best of times, it was the worst of times — 1859, Dickens; naïve café 你好 🦜.\n"
        ids = (tokenizer.encode(prose * 400))[:8000]
        assert len(ids) == 8000

        def seconds(step: Callable[[int], object]) -> float:
            started = time.thread_time()
            for token_id in ids:
                step(token_id)
            return time.thread_time() - started

        ours = min(seconds(tokenizer.stream_decoder().step) for _ in range(10))
        theirs = [DecodeStream(skip_special_tokens=True) for _ in range(3)]
        assert ours < 0.5 * min(seconds(lambda i, s=stream: s.step(tokenizer.backend, i)) for stream in theirs)
