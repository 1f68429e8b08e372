"""How large the KV cache is: from the limits asked for, the memory there is, and the model's shape."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

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

    spec: KVSpec
    n_pages: int
    page_size: int
    n_rows: int
    """Requests that can run at once."""
    max_seq_len: int


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


def plan_cache(model: CausalLM, config: EngineConfig) -> CachePlan:
    """Size the KV cache of a loaded model.

    Raises
    ------
    ConfigError
        If ``max_seq_len`` exceeds the model's context, or one sequence of it does not fit into the memory.
    """
    wanted_len = context_len(model.config, config)
    dtype = model.dtype if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)
    spec = KVSpec.of(model.config, dtype)
    contiguous = config.cache_mode == "contiguous"
    page_size = -(-wanted_len // 16) * 16 if contiguous else config.page_size
    page_bytes = spec.token_bytes * page_size
    pages_per_seq = -(-wanted_len // page_size)
    budget = config.kv_cache_bytes or _available_bytes(model.device, config)
    n_pages = min(budget // page_bytes, config.max_num_seqs * pages_per_seq)
    if n_pages < 1:
        raise ConfigError(f"the KV cache has {budget} bytes, one page needs {page_bytes}; raise kv_cache_bytes")
    if n_pages < pages_per_seq:
        fits = n_pages * page_size
        if config.max_seq_len is not None and config.kv_cache_bytes is None:
            raise ConfigError(
                f"max_seq_len {wanted_len} needs {pages_per_seq * page_bytes >> 20} MiB of KV cache, "
                f"{budget >> 20} MiB are there ({fits} tokens); lower max_seq_len or raise memory_fraction"
            )
        logger.warning("the KV cache holds %d tokens, fewer than the context of %d", fits, wanted_len)
    return CachePlan(spec, n_pages, page_size, n_pages if contiguous else config.max_num_seqs, wanted_len)


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
