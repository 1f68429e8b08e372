"""How large the KV cache is: from the limits asked for, the memory there is, and the model's shape."""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

import torch

from astrai_core.config.model import ModelConfig
from astrai_core.errors import ConfigError
from astrai_core.model.transformer import CausalLM
from astrai_infer.cache.storage import KVSpec
from astrai_infer.config import EngineConfig

logger = logging.getLogger(__name__)

CPU_SHARE = 0.25
"""Part of a CPU machine's memory that the cache may take (its pages are committed as they are written)."""


@dataclass(frozen=True)
class CachePlan:
    """Size of the pool."""

    specs: tuple[KVSpec, ...]
    """Groups of layers."""
    n_pages: tuple[int, ...]
    """Pages of each group."""
    page_size: int
    n_rows: int
    """Requests that can run at once."""
    max_seq_len: int
    draft_specs: tuple[KVSpec, ...] = ()
    """The same groups of the draft model."""


def context_len(model: ModelConfig, config: EngineConfig) -> int:
    """Return the longest sequence in tokens: ``max_seq_len`` if it is given, else the model's context.

    Raises
    ------
    ConfigError
        If ``max_seq_len`` exceeds the model's context.
    """
    context = model.max_position_embeddings
    if config.max_seq_len is not None and config.max_seq_len > context:
        raise ConfigError(f"max_seq_len is {config.max_seq_len}, the model's context is {context}; lower it")
    return config.max_seq_len or context


def resolve_kv_dtype(config: EngineConfig, model_dtype: torch.dtype) -> torch.dtype:
    """Return the type of keys and values in the pool."""
    return model_dtype if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)


def cache_specs(
    model: CausalLM, config: EngineConfig, draft: CausalLM | None
) -> tuple[tuple[KVSpec, ...], tuple[KVSpec, ...]]:
    """Describe the groups of layers of a model and of its draft model, which have the same windows in the same order."""
    whole = config.cache_mode == "contiguous" or config.prefix_cache
    dtype = resolve_kv_dtype(config, model.dtype)
    specs = KVSpec.groups(model.config, dtype, whole=whole)
    if draft is None:
        return specs, ()
    dtype_of_draft = resolve_kv_dtype(config, draft.dtype)
    windows = dict.fromkeys(s.window for s in (*specs, *KVSpec.groups(draft.config, dtype_of_draft, whole=whole)))
    return (
        KVSpec.groups(model.config, dtype, whole=whole, windows=tuple(windows)),
        KVSpec.groups(draft.config, dtype_of_draft, whole=whole, windows=tuple(windows)),
    )


def plan_cache(model: CausalLM, config: EngineConfig, taken_bytes: int = 0, draft: CausalLM | None = None) -> CachePlan:
    """Size the KV cache of a loaded model.

    Parameters
    ----------
    draft
        A draft model, whose keys and values lie beside the model's.
    taken_bytes
        Of the memory that the engine may use, what its steps take; ``kv_cache_bytes`` counts without it.

    Raises
    ------
    ConfigError
        If ``max_seq_len`` exceeds the model's context, or one sequence of it does not fit into the memory.
    """
    wanted_len = context_len(model.config, config)
    contiguous = config.cache_mode == "contiguous"
    specs, draft_specs = cache_specs(model, config, draft)
    models = [specs, draft_specs] if draft_specs else [specs]
    token_bytes = [sum(spec.token_bytes for spec in group) for group in zip(*models, strict=True)]
    page_size = -(-wanted_len // 16) * 16 if contiguous else config.page_size
    budget = config.kv_cache_bytes or _available_bytes(model.device, config) - taken_bytes
    chunk_len = min(config.max_batch_tokens, wanted_len)

    def pages_of_one(n_tokens: int) -> list[int]:
        return [spec.pages_for(n_tokens, page_size, chunk_len) for spec in specs]

    def n_bytes(n_pages: list[int]) -> int:
        return sum(n * each * page_size for n, each in zip(n_pages, token_bytes, strict=True))

    lens = range(page_size, wanted_len + page_size, page_size)
    n_fitting = bisect_right(lens, budget, key=lambda n_tokens: n_bytes(pages_of_one(n_tokens)))
    if n_fitting == 0:
        raise ConfigError(
            f"the KV cache has {budget} bytes, one page needs {n_bytes(pages_of_one(1))}; raise "
            + ("memory_fraction" if config.kv_cache_bytes is None else "kv_cache_bytes")
        )
    one = pages_of_one(lens[n_fitting - 1])
    if n_fitting < len(lens):
        fits = lens[n_fitting - 1]
        if config.max_seq_len is not None and config.kv_cache_bytes is None:
            raise ConfigError(
                f"max_seq_len {wanted_len} needs {n_bytes(pages_of_one(wanted_len)) >> 20} MiB of KV cache, "
                f"{budget >> 20} MiB are there ({fits} tokens); lower max_seq_len or raise memory_fraction"
            )
        logger.warning("the KV cache holds %d tokens, fewer than the context of %d", fits, wanted_len)
        n_pages = one
    else:
        # What one sequence leaves is shared out in proportion to what the others would need, so that all groups are
        # full at the same number of sequences.
        every = [
            spec.pages_for_all(config.max_num_seqs, wanted_len, page_size, config.max_batch_tokens) for spec in specs
        ]
        more = [n - n_one for n, n_one in zip(every, one, strict=True)]
        share = min(Fraction(budget - n_bytes(one), max(n_bytes(more), 1)), Fraction(1))
        n_pages = [n_one + int(n * share) for n, n_one in zip(more, one, strict=True)]
    n_rows = n_pages[0] if contiguous else config.n_rows
    return CachePlan(specs, tuple(n_pages), page_size, n_rows, wanted_len, draft_specs)


def can_hold_packed(model: CausalLM) -> bool:
    """Whether a CPU machine has room for a second copy of the weights: they take a quarter of its memory at most."""
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return model.device.type == "cpu" and n_bytes <= CPU_SHARE * _physical_bytes()


def _available_bytes(device: torch.device, config: EngineConfig) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * config.memory_fraction)
    return int(_physical_bytes() * CPU_SHARE)


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
