"""Training a tokenizer: its files are what transformers and astrai load alike, and any text comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core import Tokenizer
from astrai_core.errors import AstraiError, ChatTemplateError, ConfigError, DataError
from astrai_train.data.tokenizer_training import SpecialTokens, bytes_per_token, train_tokenizer

TEXT = "The cat sat on the mat. The dog sat on the log, and the cat looked at the dog. " * 20
TEXT += "Whatever bears affinity to cunning is despicable. " * 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def chatml(corpus: Path) -> Tokenizer:
    return train_tokenizer([str(corpus)], 300, chat_template="chatml", special=SpecialTokens(further=("<|tool|>",)))


def test_the_vocabulary_is_of_the_text(chatml: Tokenizer, corpus: Path) -> None:
    """Special tokens come first, then 256 bytes, then the merges; what is frequent becomes one token."""
    assert chatml.vocab_size == 300
    assert [chatml.id_to_token(i) for i in range(4)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool|>"]
    assert len(chatml.encode(" cat")) == 1
    few = train_tokenizer([str(corpus)], 5000, min_frequency=10)
    assert 280 < few.vocab_size < 300, "no pair of the second sentence occurs ten times"
    n_tokens = len(chatml.encode(TEXT))
    assert bytes_per_token(chatml, [str(corpus)]) == len(TEXT) / n_tokens > 2.5


@settings(max_examples=60)
@given(st.text())
def test_any_text_comes_back(chatml: Tokenizer, text: str) -> None:
    assert chatml.decode(chatml.encode(text), skip_special_tokens=False) == text


def test_digits_stand_alone(chatml: Tokenizer) -> None:
    assert [chatml.decode(i) for i in chatml.encode("2026")] == ["2", "0", "2", "6"]


def test_transformers_loads_the_directory(chatml: Tokenizer, tmp_path: Path) -> None:
    """The same ids, special tokens and chats there, in astrai before, and in astrai after loading."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    chatml.save_pretrained(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    mine = Tokenizer.from_pretrained(tmp_path)
    for text in ("The cat <|tool|> sat", "Größe 12\n\n  日本", "<|im_start|>user\nHi<|im_end|>"):
        assert other(text)["input_ids"] == mine.encode(text) == chatml.encode(text)
    assert (other.eos_token, other.pad_token, other.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert sorted(other.all_special_ids) == sorted(mine.all_special_ids) == [0, 1, 2, 3]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The cat"}]
    for ask in (False, True):
        expected = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        assert mine.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask) == expected
    assert expected.endswith("The cat<|im_end|>\n<|im_start|>assistant\n")


def test_the_same_files_give_the_same_tokenizer(chatml: Tokenizer, corpus: Path) -> None:
    again = train_tokenizer([str(corpus)], 300, chat_template="chatml", special=SpecialTokens(further=("<|tool|>",)))
    assert again.backend.to_str() == chatml.backend.to_str()


def test_tokens_by_name_and_records(tmp_path: Path) -> None:
    """BOS, EOS and padding as asked for; text of JSON lines by its field, of a file and of a pattern."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in TEXT.split(".")))
    special = SpecialTokens(bos="<s>", eos="</s>", pad="</s>")
    made = train_tokenizer([str(tmp_path / "*.jsonl")], 280, field="body", special=special)
    assert (made.bos_token, made.eos_token, made.pad_token, made.chat_template) == ("<s>", "</s>", "</s>", None)
    assert made.encode("</s><s>") == [made.eos_token_id, made.bos_token_id]


def test_a_template_of_ones_own(corpus: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}")
    made = train_tokenizer([str(corpus)], 280, chat_template=str(template))
    shown = made.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert shown == "[user]Hi<|endoftext|>"
    template.write_text("{% for m in messages %}")
    with pytest.raises(ChatTemplateError):
        train_tokenizer([str(corpus)], 280, chat_template=str(template))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"vocab_size": 258}, ConfigError, "field 'vocab_size': 258 has no room for 256 bytes and 3 special tokens"),
        ({"chat_template": "chat-ml"}, ConfigError, "field 'chat_template': 'chat-ml' is neither chatml nor a file"),
        ({"special": SpecialTokens(further=(" ",))}, ConfigError, "field 'special_token': one is empty"),
        ({"paths": ["nowhere/*.txt"]}, DataError, "nowhere/*.txt: no such file"),
        ({"field": "body", "paths": ["rows.jsonl"]}, DataError, r"rows.jsonl:1: no text in 'body'"),
        ({"paths": ["broken.jsonl"]}, DataError, r"broken.jsonl:2: not valid JSON"),
        ({"paths": ["empty.txt"]}, DataError, "empty.txt: the files hold no text"),
        ({"paths": ["one.txt"]}, DataError, "one.txt: there is no pair of characters to merge"),
    ],
)
def test_mistakes_are_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, kind: type[AstraiError], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "x"}\n')
    Path("broken.jsonl").write_text('{"text": "x"}\n{"text"\n')
    Path("empty.txt").write_text("")
    Path("one.txt").write_text("x")
    arguments = {"paths": [str(corpus)], "vocab_size": 300, "chat_template": "chatml", **options}
    with pytest.raises(kind) as caught:
        train_tokenizer(**arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)
