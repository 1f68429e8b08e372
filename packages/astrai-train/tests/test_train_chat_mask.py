"""Where the supervised turns of a conversation lie: training rule 3, beside transformers' own masks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from astrai_core import Tokenizer
from astrai_core.errors import ChatTemplateError, ConfigError
from astrai_core.tokenizer import ChatTemplate
from astrai_train.data.preprocess.chat_mask import ChatMasker
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.encode import Encoder, tokens_of
from astrai_train.data.preprocess.records import BadRow, Conversation
from astrai_train.data.preprocess.run import preprocess

# Written for these tests, each with one habit of a well-known family.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = (
    "<bos>{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
INST = (  # no header before an answer; a system message moves into the user's; tool calls as JSON
    "<bos>{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}[INST] {{ ns.system }}{{ m.content }} [/INST]{% set ns.system = '' %}"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}[CALL]{{ m.tool_calls | tojson }}<eos>"
    "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
)
THINKS = (  # reasoning only after the last question, where an empty one is written too
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THOUGHT = (  # the prompt of inference opens the reasoning, history does not show it
    "<bos>{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% else %}<|assistant|>{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
NO_END = (  # no end-of-turn token at all
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
SPECIAL = "<bos> <eos> <|im_start|> <|im_end|> <|start|> <|end|> <|eot|> <|user|> <|assistant|>".split()


def tokenizer_of(template: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, "aa", "ĠĠ", "ĊĊ", "Ġa"]
    merges = [("a", "a"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("Ġ", "a")]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return Tokenizer(backend, config={"eos_token": "<eos>"}, chat_template=ChatTemplate(template))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def conversation(messages: list[dict[str, Any]]) -> Conversation:
    return Conversation(messages, tuple(m["role"] == "assistant" for m in messages))


def turns(template: str, messages: list[dict[str, Any]]) -> list[str]:
    text, spans = ChatMasker(tokenizer_of(template)).spans(conversation(messages))
    assert text == tokenizer_of(template).apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
    return [text[start:stop] for start, stop in spans]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, [user("a"), answer("b"), user("c"), answer("")], ["b<|im_end|>", "<|im_end|>"]),
        (CHATML, [answer("b"), user("c"), answer("d")], ["b<|im_end|>", "d<|im_end|>"]),
        (CHATML, [user("b<|im_end|>\n"), answer("b<|im_end|>\n<|im_start|>user\nb")], None),
        (TRIMS, [user("a"), answer("  b \n"), user("b"), answer("c")], ["b<|eot|>", "c<|eot|>"]),
        (
            INST,
            [{"role": "system", "content": "s"}, user("a"), answer("b"), user("c"), answer("b")],
            [" b<eos>", " b<eos>"],
        ),
        (
            INST,
            [user("a"), answer("", tool_calls=[CALL]), {"role": "tool", "content": "2"}, answer("two")],
            ['[CALL][{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]<eos>', " two<eos>"],
        ),
        (
            THINKS,
            [user("a"), answer("b", reasoning_content="r"), user("c"), answer("d", reasoning_content="q")],
            ["b<|im_end|>", "<think>\nq\n</think>\n\nd<|im_end|>"],
        ),
        (THINKS, [user("a"), answer("b", reasoning_content="")], ["<think>\n\n</think>\n\nb<|im_end|>"]),
        (OPENS_THOUGHT, [user("a"), answer("b"), user("c"), answer("d")], ["b<eos>", "d<eos>"]),
        (NO_END, [user("a"), answer("b"), user("c"), answer("d e")], ["b", "d e"]),
    ],
)
def test_every_assistant_turn_is_found(
    template: str, messages: list[dict[str, Any]], expected: list[str] | None
) -> None:
    """Rule 3: from the end of inference's prompt to the end-of-turn token, however the template writes history."""
    expected = expected if expected is not None else [messages[-1]["content"] + "<|im_end|>"]
    assert turns(template, messages) == expected


TRICKY = st.lists(st.sampled_from([*"ab \n:", "<|im_end|>", "<|im_start|>assistant\n", "é", "🏳️‍🌈"]), max_size=8).map(
    "".join
)


@given(st.lists(TRICKY, min_size=2, max_size=6), st.sampled_from([CHATML, TRIMS]), st.integers(0, 1))
@settings(max_examples=150, deadline=None)
def test_the_short_way_finds_what_the_long_way_finds(texts: list[str], template: str, first: int) -> None:
    """One marked rendering gives the spans that rendering turn by turn gives, whatever the messages hold."""
    messages = [(user if i % 2 == 0 else answer)(text) for i, text in enumerate(texts, first)]
    if not any(m["role"] == "assistant" for m in messages):
        return
    masker, asked = ChatMasker(tokenizer_of(template)), conversation(messages)
    text, spans = masker.spans(asked)
    long_way = [masker._turn(text, asked, i) for i, m in enumerate(messages) if m["role"] == "assistant"]
    assert spans == long_way


@pytest.mark.parametrize("template", [CHATML, TRIMS])
@given(texts=st.lists(st.text("ab é🏳\n", max_size=6), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_masks_equal_those_of_transformers(template: str, texts: list[str]) -> None:
    """Rule 3: ids and masks are those of apply_chat_template(return_assistant_tokens_mask=True) where the template
    marks its generation (transformers as the judge)."""
    transformers = pytest.importorskip("transformers")
    body, end = ("{{ m.content }}", "<|im_end|>") if template == CHATML else ("{{ m.content | trim }}", "<|eot|>")
    whole = body + end
    marked = "{% generation %}" + whole + "{% endgeneration %}"
    judged = template.replace(whole + "\n", whole + "{{ '\n' }}")
    judged = judged.replace(whole, "{% if m.role == 'assistant' %}" + marked + "{% else %}" + whole + "{% endif %}")
    messages = [message for text in texts for message in (user("q " + text), answer(text + "a"))]
    ours = tokenizer_of(template)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(ours.backend), eos_token="<eos>")
    wanted = theirs.apply_chat_template(
        messages, chat_template=judged, return_dict=True, return_assistant_tokens_mask=True
    )
    config = PreprocessConfig.from_dict({"inputs": [{"paths": ["x"]}], "tokenizer": "x", "format": "messages"})
    (row,) = Encoder(config, ours).encode([conversation(messages)])
    assert isinstance(row, dict)
    assert row["input_ids"].tolist() == wanted["input_ids"]
    assert row["mask"].tolist() == wanted["assistant_masks"]


def test_a_token_belongs_to_a_span_by_its_characters() -> None:
    """Several tokens of one character, and tokens across the edge of a span, are in; dropped characters are in none."""
    encode = lambda text: tokenizer_of(CHATML).backend.encode(text)
    assert tokens_of(encode("xé"), 1, 2) == range(1, 3)
    assert tokens_of(encode("🏳x"), 0, 1) == range(4)
    assert tokens_of(encode("b a"), 2, 3) == range(1, 2)
    assert tokens_of(encode("baab"), 2, 3) == range(1, 2)
    assert tokens_of(encode("ab"), 1, 1) == range(0)
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.normalizer = normalizers.Strip()
    assert tokens_of(backend.encode(" a b "), 2, 5) == range(1, 2)
    assert tokens_of(backend.encode(" a b "), 4, 5) == range(0)


def test_what_a_template_refuses_or_hides_is_a_bad_row() -> None:
    """Rule 11: one line about the messages; a template that works for no conversation stops everything."""
    refusal = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    refuses = CHATML.replace("{{ m.role }}", refusal + "{{ m.role }}")
    masker = ChatMasker(tokenizer_of(refuses))
    with pytest.raises(BadRow, match="no tools"):
        masker.spans(conversation([{"role": "tool", "content": "x"}, answer("b")]))
    hides = "{% for m in messages %}{{ m.role }} {% if loop.last %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    with pytest.raises(BadRow, match=r"messages\[0\]: the chat template does not show"):
        ChatMasker(tokenizer_of(hides)).spans(conversation([answer("a"), user("b")]))
    with pytest.raises(ChatTemplateError):
        ChatMasker(tokenizer_of("{{ raise_exception('never') }}"))


def test_a_missing_or_broken_template_stops_before_any_work(tmp_path: Path) -> None:
    """Rule 11: nothing is read or written."""
    (tmp_path / "in.jsonl").write_text("{}")
    settings = {"inputs": [{"paths": [str(tmp_path / "in.jsonl")]}], "tokenizer": "x", "format": "messages"}
    bare = Tokenizer(tokenizer_of(CHATML).backend)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        preprocess(PreprocessConfig.from_dict(settings), tmp_path / "out", bare)
    with pytest.raises(ConfigError, match="field 'chat_template': 'nowhere.jinja' is neither a file"):
        preprocess(PreprocessConfig.from_dict({**settings, "chat_template": "nowhere.jinja"}), tmp_path / "out", bare)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    (tmp_path / "mine.jinja").write_text(CHATML)
    given = PreprocessConfig.from_dict({**settings, "chat_template": str(tmp_path / "mine.jinja")})
    (row,) = Encoder(given, bare).encode([conversation([user("a"), answer("b")])])
    assert isinstance(row, dict)
    assert bare.decode(row["input_ids"][row["mask"] == 1], skip_special_tokens=False) == "b<|im_end|>"
