"""Tokenizers in GGUF files: rebuilt equal to the ones they were converted from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from astrai_core.checkpoint.gguf import GGUFFile
from astrai_core.errors import CheckpointError, TokenizerError

transformers = pytest.importorskip("transformers")

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


ORIGINALS: dict[str, tuple[Any, pre_tokenizers.PreTokenizer]] = {
    "gpt-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    ),
    "llama-bpe": (None, split_then_bytes(CONTRACTIONS + r"\p{N}{1,3}" + PUNCTUATION)),
    "qwen2": (normalizers.NFC(), split_then_bytes(CONTRACTIONS + r"\p{N}" + PUNCTUATION)),
}
"""How the tokenizer.json of GPT-2, SmolLM, Llama 3 and Qwen 2 splits text."""

texts = st.lists(
    st.one_of(
        st.text(max_size=6), st.sampled_from(["the ", "fox's", "I'LL", "12345", " \n\n", "<|im_end|>", "e\u0301"])
    ),
    max_size=6,
).map("".join)
same_file = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


def repeat_token(writer: Any) -> None:
    tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
    tokens[1] = tokens[0]


class TestByteLevelTokenizer:
    @pytest.fixture(scope="class", params=ORIGINALS)
    def pair(
        self,
        request: pytest.FixtureRequest,
        byte_level_backend: tokenizers.Tokenizer,
        tmp_path_factory: pytest.TempPathFactory,
        add_byte_level: Callable[..., None],
        write_gguf: Callable[..., Path],
    ) -> tuple[Any, Any]:
        state = json.loads(byte_level_backend.to_str())
        # "Ġthe" stays in the vocabulary but no merge makes it, as some words of Llama 3, whose model ignores merges then.
        state["model"]["merges"] = [merge for merge in state["model"]["merges"] if "".join(merge) != "Ġthe"]
        assert "Ġthe" in state["model"]["vocab"]
        original = tokenizers.Tokenizer.from_str(json.dumps(state))
        if ORIGINALS[request.param][0] is not None:
            original.normalizer = ORIGINALS[request.param][0]
        original.pre_tokenizer = ORIGINALS[request.param][1]
        if request.param == "llama-bpe":
            original.model.ignore_merges = True

        def fill(writer: Any) -> None:
            add_byte_level(writer, original, request.param, padding=3)
            writer.add_bos_token_id(0)
            writer.add_eos_token_id(2)
            writer.add_add_bos_token(False)

        return original, GGUFFile(write_gguf(tmp_path_factory.mktemp("gguf") / "t.gguf", fill)).tokenizer()

    @same_file
    @given(text=texts)
    def test_encode(self, pair: tuple[Any, Any], text: str) -> None:
        """tokenizer.ggml.pre is honoured: encodings equal the original tokenizer's, on any text."""
        original, ours = pair
        assert ours.encode(text) == original.encode(text).ids

    def test_vocabulary(self, pair: tuple[Any, Any]) -> None:
        """Token types become special and added tokens; padding entries are no tokens."""
        original, ours = pair
        assert ours.get_vocab() == original.get_vocab()
        assert len(ours) == original.get_vocab_size()
        ids = original.encode("<|im_start|>a<tool call>b<|im_end|>").ids
        assert ours.decode(ids) == "a<tool call>b"
        assert (ours.bos_token, ours.eos_token, ours.eos_token_ids) == ("<|endoftext|>", "<|im_end|>", (2,))

    def test_saved_files_load_in_transformers(self, pair: tuple[Any, Any], tmp_path: Path) -> None:
        """Converted tokenizer files give transformers the same encodings and special tokens."""
        original, ours = pair
        ours.save_pretrained(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        text = "The fox's 123 <|im_end|> naïve 你好"
        assert theirs.encode(text) == ours.encode(text) == original.encode(text).ids
        assert theirs.eos_token_id == 2

    @pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
    @pytest.mark.parametrize("flag", [None, True, False])
    def test_bos(
        self,
        byte_level_backend: tokenizers.Tokenizer,
        tmp_path: Path,
        add_byte_level: Callable[..., None],
        write_gguf: Callable[..., Path],
        pre: str,
        flag: bool | None,
    ) -> None:
        """add_bos_token decides; without it Llama 3's pre-tokenizer adds BOS and GPT-2's does not."""

        def fill(writer: Any) -> None:
            add_byte_level(writer, byte_level_backend, pre)
            writer.add_bos_token_id(0)
            writer.add_eos_token_id(2)
            writer.add_add_eos_token(True)
            if flag is not None:
                writer.add_add_bos_token(flag)

        ours = GGUFFile(write_gguf(tmp_path / "t.gguf", fill)).tokenizer()
        adds = flag if flag is not None else pre == "llama-bpe"
        assert (ours.encode("fox")[0] == 0) is adds
        assert ours.encode("fox")[-1] == 2
        assert 0 not in ours.encode("fox", add_special_tokens=False)

    def test_templates_and_end_of_turn(
        self,
        byte_level_backend: tokenizers.Tokenizer,
        tmp_path: Path,
        add_byte_level: Callable[..., None],
        write_gguf: Callable[..., Path],
    ) -> None:
        """Named templates are found; the end-of-turn token that the template writes ends a generation."""

        def fill(writer: Any) -> None:
            add_byte_level(writer, byte_level_backend)
            writer.add_eos_token_id(0)
            writer.add_chat_template(
                [
                    {"name": "default", "template": "{{ messages[0].content }}<|im_end|>"},
                    {"name": "tool_use", "template": "T"},
                ]
            )

        file = GGUFFile(write_gguf(tmp_path / "t.gguf", fill))
        ours = file.tokenizer()
        assert ours.eos_token_ids == (0, 2)
        assert file.generation_config()["eos_token_id"] == [0, 2]
        messages = [{"role": "user", "content": "x"}]
        assert ours.apply_chat_template(messages, tokenize=False) == "x<|im_end|>"
        assert ours.apply_chat_template(messages, tokenize=False, tools=[{"name": "f"}]) == "T"

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            (lambda w: w.add_tokenizer_pre("kimi-k2"), r"tokenizer\.ggml\.pre 'kimi-k2' is not supported"),
            (
                lambda w: w.add_tokenizer_model("bert"),
                r"tokenizer\.ggml\.model 'bert' is not supported; supported: gpt2",
            ),
            (lambda w: w.add_token_types([1]), r"tokenizer\.ggml\.token_type has 1 entries for \d+ tokens"),
            (repeat_token, r"tokenizer\.ggml\.tokens has '<\|endoftext\|>' twice, as 0 and 1"),
            (lambda w: w.add_token_merges(["a", "b c"]), r"tokenizer\.ggml\.merges has 'a', whose parts are not"),
            (lambda w: w.add_eos_token_id(999), r"tokenizer\.ggml\.eos_token_id is 999, but there are"),
            (lambda w: w.add_add_bos_token(True), r"tokenizer\.ggml\.bos_token_id is missing, though add_bos_token"),
        ],
    )
    def test_refusals(
        self,
        byte_level_backend: tokenizers.Tokenizer,
        tmp_path: Path,
        add_byte_level: Callable[..., None],
        write_gguf: Callable[..., Path],
        change: Callable[[Any], None],
        error: str,
    ) -> None:
        """A tokenizer that cannot be rebuilt exactly is refused; the key is named."""

        def fill(writer: Any) -> None:
            add_byte_level(writer, byte_level_backend)
            change(writer)

        with pytest.raises(TokenizerError, match=rf"t\.gguf: {error}"):
            GGUFFile(write_gguf(tmp_path / "t.gguf", fill)).tokenizer()


class TestSentencePieceTokenizer:
    @pytest.fixture(scope="class", params=[True, False], ids=["prefix", "no prefix"])
    def pair(
        self,
        request: pytest.FixtureRequest,
        byte_fallback_backend: tokenizers.Tokenizer,
        tmp_path_factory: pytest.TempPathFactory,
        write_gguf: Callable[..., Path],
    ) -> tuple[Any, Any]:
        vocab = byte_fallback_backend.get_vocab()
        tokens = sorted(vocab, key=vocab.__getitem__)
        types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
        scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
        pieces = {token: i for token, i in vocab.items() if types[i] == 1}
        merges = transformers.tokenization_utils_base.generate_merges(pieces, {t: scores[i] for t, i in pieces.items()})
        original = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        original.normalizer, original.decoder = byte_fallback_backend.normalizer, byte_fallback_backend.decoder
        if not request.param:
            original.normalizer = normalizers.Replace(" ", "▁")
            original.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        original.add_special_tokens(["<unk>", "<s>", "</s>"])
        original.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])

        def fill(writer: Any) -> None:
            writer.add_tokenizer_model("llama")
            writer.add_token_list(tokens)
            writer.add_token_scores(scores)
            writer.add_token_types(types)
            if not request.param:
                writer.add_add_space_prefix(False)

        return original, GGUFFile(write_gguf(tmp_path_factory.mktemp("gguf") / "t.gguf", fill)).tokenizer()

    @same_file
    @given(text=texts)
    def test_encode_and_decode(self, pair: tuple[Any, Any], text: str) -> None:
        """Merges from scores, byte fallback, prefix space and the default BOS equal the original's, on any text."""
        original, ours = pair
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode(ids)

    def test_special_tokens(self, pair: tuple[Any, Any]) -> None:
        """Early files name no special ids; SentencePiece Llama's are taken."""
        _, ours = pair
        assert (ours.unk_token_id, ours.bos_token_id, ours.eos_token_ids) == (0, 1, (2,))
        assert ours.decode(ours.encode("<s>")) == ""

    def test_scores_are_needed(self, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
        """Without merges and scores there is no tokenizer to rebuild."""

        def fill(writer: Any) -> None:
            writer.add_tokenizer_model("llama")
            writer.add_token_list(["<unk>", "<s>", "</s>", "a"])

        with pytest.raises(CheckpointError, match=r"key 'tokenizer\.ggml\.scores' is missing"):
            GGUFFile(write_gguf(tmp_path / "t.gguf", fill)).tokenizer()


class TestRealFile:
    def test_smollm2(self, smollm2_gguf: Path) -> None:
        """Digits are split one by one; no BOS; ChatML with a default system prompt; EOS <|im_end|>."""
        tokenizer = GGUFFile(smollm2_gguf).tokenizer()
        assert len(tokenizer) == 49152
        digits = tokenizer.encode("12345")
        assert [tokenizer.id_to_token(i) for i in digits] == list("12345")
        assert tokenizer.encode("In 2024")[1:] == [tokenizer.token_to_id(t) for t in ("Ġ", "2", "0", "2", "4")]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (1, (2,), 2)
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
        assert len(prompt) == 37
        assert tokenizer.decode(prompt, skip_special_tokens=False) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        )
