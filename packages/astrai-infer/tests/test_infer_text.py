"""Stop strings and text assembly do not depend on how the stream was cut (inference rules 13, 14)."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from astrai_core import SamplingParams
from astrai_infer.testing import byte_tokenizer
from astrai_infer.text.detokenize import TextStream
from astrai_infer.text.stop import StopMatcher

TOKENIZER = byte_tokenizer()
letters = st.text("ab€", max_size=12)
stops = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def run(pieces: list[str], patterns: list[str]) -> tuple[str, str | None, list[str]]:
    matcher, emitted = StopMatcher(patterns), []
    for piece in pieces:
        text, stop = matcher.push(piece)
        emitted.append(text)
        if stop is not None:
            return "".join(emitted), stop, emitted
    emitted.append(matcher.flush())
    return "".join(emitted), None, emitted


@given(letters, stops, st.lists(st.integers(0, 50)))
def test_any_cut_gives_the_same_text(text, patterns, places):
    expected = run(list(text), patterns)[:2]
    assert run(cut(text, places), patterns)[:2] == expected
    found = [(text.find(p) + len(p), text.find(p), p) for p in patterns if p in text]
    assert expected == ((text[: min(found)[1]], min(found)[2]) if found else (text, None))


@given(letters, stops)
def test_only_what_could_begin_a_stop_is_held_back(text, patterns):
    matcher, emitted = StopMatcher(patterns), ""
    for i, char in enumerate(text):
        delta, stop = matcher.push(char)
        emitted += delta
        if stop is not None:
            return
        held = text[len(emitted) : i + 1]
        assert emitted + held == text[: i + 1]
        if held:
            assert any(pattern.startswith(held) for pattern in patterns)
        longer = [text[j : i + 1] for j in range(len(emitted))]
        assert not any(p.startswith(suffix) for p in patterns for suffix in longer if suffix), "held back too little"


@given(st.binary(max_size=20), stops, st.integers(0, 6), st.booleans())
def test_deltas_join_to_the_text_and_to_decode(data, patterns, min_tokens, keep):
    params = SamplingParams(stop=patterns, min_tokens=min_tokens, include_stop_str_in_output=keep)
    stream, deltas, stop = TextStream(TOKENIZER, params), [], None
    fed = 0
    for byte in data:
        delta, stop = stream.push(byte)
        deltas.append(delta)
        fed += 1
        if stop is not None:
            break
    if stop is None:
        tail, stop = stream.end()
        deltas.append(tail)
    assert "".join(deltas) == stream.text
    whole = TOKENIZER.decode(list(data[:fed]))
    if stop is None:
        assert stream.text == whole
    else:
        assert whole.startswith(stream.text)
        assert stop in whole
        assert stream.text.endswith(stop) == (keep or stream.text.endswith(stop))
        assert not keep or stream.text.endswith(stop)


def test_no_replacement_character_inside_split_characters():
    stream = TextStream(TOKENIZER, SamplingParams())
    assert [stream.push(byte)[0] for byte in "€x".encode()] == ["", "", "€", "x"]
    for byte in "€".encode()[:2]:
        assert stream.push(byte) == ("", None)
    assert stream.end() == ("\ufffd", None)
