"""Tokenizer files: what is read, what is written, and parity with transformers."""

from __future__ import annotations

import json
import multiprocessing
import operator
import pickle
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, processors

from astrai_core.auto import AutoTokenizer
from astrai_core.errors import ChatTemplateError, RequestError, TokenizerError
from astrai_core.tokenizer import ChatTemplate, Tokenizer

transformers = pytest.importorskip("transformers")

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|endoftext|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "normalized": False, "special": True},
    "pad_token": None,
    "additional_special_tokens": ["<|im_start|>"],
    "model_max_length": 1000000000000000019884624838656,
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


def write(path: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    """A model directory: tokenizer.json and, by their stems, further JSON files."""
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for stem, content in files.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    return path


def with_bos(backend: tokenizers.Tokenizer, token: str) -> tokenizers.Tokenizer:
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, copy.token_to_id(token))]
    )
    return copy


class TestParity:
    """Against transformers.AutoTokenizer on the same directory."""

    @pytest.fixture(scope="class", params=["byte_level", "byte_level_bos", "byte_fallback_bos"])
    def pair(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
        if request.param == "byte_fallback_bos":
            backend = with_bos(request.getfixturevalue("byte_fallback_backend"), "<s>")
            config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
        else:
            backend = request.getfixturevalue("byte_level_backend")
            backend = with_bos(backend, "<|endoftext|>") if request.param == "byte_level_bos" else backend
            config = CONFIG
        path = write(tmp_path_factory.mktemp("model"), backend, tokenizer_config=config)
        return AutoTokenizer.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)

    @settings(deadline=None, max_examples=100)
    @given(
        pieces=st.lists(
            st.one_of(st.text(max_size=8), st.sampled_from(["<s>", "<|im_start|>", "<tool call>", "  ", "\n", "▁"])),
            max_size=6,
        ),
        special=st.booleans(),
    )
    def test_encode(self, pair: tuple[Any, Any], pieces: list[str], special: bool) -> None:
        """Encodings are equal, special tokens written in the text and BOS included."""
        ours, theirs = pair
        text = "".join(pieces)
        assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)

    @settings(deadline=None, max_examples=100)
    @given(text=st.text(max_size=20), skip=st.booleans())
    def test_decode(self, pair: tuple[Any, Any], text: str, skip: bool) -> None:
        """Decoding encoded text gives what transformers gives."""
        ours, theirs = pair
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)

    def test_attributes(self, pair: tuple[Any, Any]) -> None:
        """Special tokens and sizes are equal."""
        ours, theirs = pair
        assert ours.all_special_ids == theirs.all_special_ids
        assert len(ours) == ours.vocab_size == len(theirs)
        assert ours.get_vocab() == theirs.get_vocab()
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            assert getattr(ours, name) == getattr(theirs, name)
            assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")

    @pytest.mark.parametrize("post_processor", [True, False])
    @pytest.mark.parametrize("add_bos", [None, True, False])
    @pytest.mark.parametrize("add_eos", [None, True])
    def test_add_bos_and_eos_flags(
        self,
        byte_level_backend: tokenizers.Tokenizer,
        tmp_path: Path,
        post_processor: bool,
        add_bos: bool | None,
        add_eos: bool | None,
    ) -> None:
        """tokenizer.json decides; the flags of tokenizer_config.json change what transformers lets them change."""
        backend = with_bos(byte_level_backend, "<|endoftext|>") if post_processor else byte_level_backend
        flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
        config = CONFIG | {key: value for key, value in flags.items() if value is not None}
        path = write(tmp_path, backend, tokenizer_config=config)
        expected = transformers.AutoTokenizer.from_pretrained(path).encode("fox")
        assert Tokenizer.from_pretrained(path).encode("fox") == expected

    def test_tokens_that_only_the_config_has(self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
        """Tokens that tokenizer.json lacks are added, and other flags win, as in transformers."""
        backend = byte_level_backend
        declared = {
            "0": {"content": "<|endoftext|>", "special": True, "normalized": False},
            str(backend.token_to_id("<tool call>")): {"content": "<tool call>", "special": True, "normalized": False},
            "500": {"content": "<later>", "special": False, "normalized": False, "lstrip": True},
        }
        config = CONFIG | {"added_tokens_decoder": declared, "pad_token": "<pad>", "image_token": "<image>"}
        path = write(tmp_path, backend, tokenizer_config=config, special_tokens_map={"eos_token": "<ignored>"})
        ours, theirs = Tokenizer.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
        text = "a <tool call> b  <later> c<pad><image>"
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.all_special_ids == theirs.all_special_ids
        assert len(ours) == len(theirs)
        assert ours.eos_token == "<|im_end|>"
        assert ours.special_tokens["image_token"] == "<image>"

    def test_special_tokens_map(self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
        """An old directory keeps its special tokens in special_tokens_map.json."""
        tokens = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "<|im_start|>"}
        path = write(tmp_path, byte_level_backend, tokenizer_config={}, special_tokens_map=tokens)
        ours, theirs = Tokenizer.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)
        assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id) == (2, 1)

    def test_padding_and_truncation_are_off(self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
        """Sentence-embedding models ship tokenizer.json with padding and truncation on; encode does neither."""
        backend = tokenizers.Tokenizer.from_str(byte_level_backend.to_str())
        backend.enable_truncation(3)
        backend.enable_padding(length=5)
        path = write(tmp_path, backend)
        expected = byte_level_backend.encode("The quick brown fox").ids
        assert Tokenizer.from_pretrained(path).encode("The quick brown fox") == expected


class TestFiles:
    @pytest.mark.parametrize(
        ("generation", "expected"),
        [({}, (2,)), ({"eos_token_id": 7}, (2, 7)), ({"eos_token_id": [5, 2, 5, 1]}, (2, 5, 1)), (None, (2,))],
    )
    def test_eos_ids(
        self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path, generation: Any, expected: tuple[int, ...]
    ) -> None:
        """Rule 15: stop ids are the tokenizer's EOS and generation_config's, in order, each once."""
        files = {} if generation is None else {"generation_config": generation}
        path = write(tmp_path, byte_level_backend, tokenizer_config=CONFIG, **files)
        assert Tokenizer.from_pretrained(path).eos_token_ids == expected

    def test_bare_tokenizer_json(self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
        """Without tokenizer_config.json there are no named tokens and no template, and text still encodes."""
        tokenizer = Tokenizer.from_pretrained(write(tmp_path, byte_level_backend))
        assert (tokenizer.eos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (None, (), None)
        assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
        with pytest.raises(ChatTemplateError, match=r"no chat template; put chat_template\.jinja beside"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}], chat_template="<{{ 1 }}>", tokenize=False
        )
        assert given == "<1>"

    def test_save_and_load(self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
        """What is saved loads equally here and in transformers, several templates included."""
        config = CONFIG | {"model_max_length": 77, "added_tokens_decoder": {}}
        template = ChatTemplate({"default": "D{{ eos_token }}", "tool_use": "T"})
        backend = with_bos(byte_level_backend, "<|endoftext|>")
        tokenizer = Tokenizer(backend, config=config, chat_template=template)
        tokenizer.save_pretrained(tmp_path / "new" / "model")
        loaded = Tokenizer.from_pretrained(tmp_path / "new" / "model")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new" / "model")
        text = "The fox <|im_end|> <tool call> 你"
        assert loaded.encode(text) == tokenizer.encode(text) == theirs.encode(text)
        assert loaded.chat_template == template
        assert theirs.chat_template == template.templates
        assert loaded.special_tokens == tokenizer.special_tokens == theirs.special_tokens_map
        assert loaded.all_special_ids == tokenizer.all_special_ids
        assert loaded.model_max_length == theirs.model_max_length == 77
        assert sorted(p.name for p in (tmp_path / "new" / "model").iterdir()) == [
            "additional_chat_templates",
            "chat_template.jinja",
            "tokenizer.json",
            "tokenizer_config.json",
        ]

    @pytest.mark.parametrize(
        ("file", "content", "error"),
        [
            ("tokenizer.json", "{", r"tokenizer\.json cannot be read as JSON"),
            ("tokenizer.json", '{"a": 1}', r"tokenizer\.json is not a tokenizer that tokenizers .* reads"),
            ("tokenizer.json", None, r"tokenizer\.json is missing; save the tokenizer in the fast format"),
            ("tokenizer_config.json", "[]", r"tokenizer_config\.json must hold a JSON object, not list"),
            ("tokenizer_config.json", '{"eos_token": 3}', r"tokenizer_config\.json: eos_token must be a string"),
            ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder must be an object"),
            ("tokenizer_config.json", '{"extra_special_tokens": "x"}', "extra_special_tokens must be a list"),
            ("tokenizer_config.json", '{"chat_template": 3}', r"tokenizer_config\.json: chat_template must be Jinja"),
            ("generation_config.json", '{"eos_token_id": "2"}', r"generation_config\.json: eos_token_id is '2'"),
            (
                "generation_config.json",
                '{"eos_token_id": [2, -1]}',
                r"generation_config\.json: eos_token_id is \[2, -1\]",
            ),
        ],
    )
    def test_bad_files(
        self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path, file: str, content: str | None, error: str
    ) -> None:
        """A broken file is one line that names the file and the field."""
        path = write(tmp_path, byte_level_backend, tokenizer_config=CONFIG)
        if content is None:
            (path / file).unlink()
        else:
            (path / file).write_text(content)
        with pytest.raises(TokenizerError, match=error) as caught:
            Tokenizer.from_pretrained(path)
        assert "\n" not in str(caught.value)

    def test_not_a_directory(self, tmp_path: Path) -> None:
        """A path that is no directory is named."""
        with pytest.raises(TokenizerError, match="nosuch is not a directory"):
            Tokenizer.from_pretrained(tmp_path / "nosuch")

    def test_unwritable_target(self, byte_level_backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
        """A target that cannot be written is named, and no partial file stays."""
        (tmp_path / "file").write_text("")
        with pytest.raises(TokenizerError, match="cannot be written"):
            Tokenizer(byte_level_backend).save_pretrained(tmp_path / "file")
        (tmp_path / "model" / "tokenizer.json").mkdir(parents=True)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be written"):
            Tokenizer(byte_level_backend).save_pretrained(tmp_path / "model")
        assert not list(tmp_path.glob("model/*.partial"))


class TestUse:
    def test_batches_and_tensors(self, byte_level_backend: tokenizers.Tokenizer) -> None:
        """Batches equal single calls; ids may be a tensor, an iterator or one int."""
        tokenizer = Tokenizer(byte_level_backend)
        texts = ["fox", "", "你好 dog"]
        batch = tokenizer.encode_batch(texts)
        assert batch == [tokenizer.encode(text) for text in texts]
        assert tokenizer.decode_batch(batch) == texts
        assert tokenizer.decode(torch.tensor(batch[2])) == tokenizer.decode(iter(batch[2])) == texts[2]
        assert tokenizer.decode(batch[0][0]) == tokenizer.id_to_token(batch[0][0])
        assert tokenizer.token_to_id("nosuch") is None
        assert tokenizer.id_to_token(-1) is None

    def test_vocab_size_counts_gaps(self) -> None:
        """vocab_size is the largest id + 1, as an embedding needs it."""
        backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
        assert Tokenizer(backend).vocab_size == 10

    @pytest.mark.parametrize(
        ("text", "error"),
        [("a\ud83d", "half of a surrogate pair, '\\\\ud83d', at character 1"), (None, "is a NoneType")],
    )
    def test_what_cannot_be_encoded(self, byte_level_backend: tokenizers.Tokenizer, text: Any, error: str) -> None:
        """Half a surrogate pair (JSON allows it) and non-text are the caller's error."""
        with pytest.raises(RequestError, match=error):
            Tokenizer(byte_level_backend).encode(text)

    def test_pickle(self, byte_level_backend: tokenizers.Tokenizer) -> None:
        """T2: a tokenizer that has streamed and templated pickles, and works in a spawned process."""
        tokenizer = Tokenizer(byte_level_backend, config=CONFIG, chat_template=ChatTemplate(CONFIG["chat_template"]))
        messages = [{"role": "user", "content": "fox 你"}]
        ids = tokenizer.apply_chat_template(messages)
        assert tokenizer.decode(ids) == "fox 你"
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(operator.methodcaller("apply_chat_template", messages), (tokenizer,)) == ids
        assert pickle.loads(pickle.dumps(tokenizer)).decode(ids) == "fox 你"
