"""What runs an engine's steps: the pool and the executor, sized to the memory there is."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass

import torch

from astrai_core.attention.backend import AttentionBackend, resolve_backend
from astrai_core.errors import ConfigError
from astrai_core.model.transformer import CausalLM
from astrai_infer.cache.pool import PagePool
from astrai_infer.cache.sizing import CachePlan, context_len, plan_cache, resolve_kv_dtype
from astrai_infer.cache.storage import KVSpec
from astrai_infer.config import EngineConfig
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.runtime.executor import Executor
from astrai_infer.runtime.graph import CudaCapture
from astrai_infer.runtime.shapes import StepShape

logger = logging.getLogger(__name__)

MOST_OUTSIDE_TORCH = 1 << 30
"""Bytes that graphs and loaded kernels take besides torch's own memory, at most."""


@dataclass(frozen=True)
class Runtime:
    """An engine's device side."""

    plan: CachePlan
    pool: PagePool
    executor: Executor | DeviceExecutor


def build_runtime(model: CausalLM, config: EngineConfig) -> Runtime:
    """Build pool and executor for a loaded model.

    Where steps can be captured, the memory that they need is measured first, the KV cache gets what is left, and the
    steps are captured then: the cache stays where it is from there on.

    Raises
    ------
    ConfigError
        If graphs are asked for where there can be none, or the cache does not fit.
    BackendError
        If the backend asked for cannot run.
    """
    kv_dtype = resolve_kv_dtype(config, model.dtype)
    backend = resolve_backend(config.backend, model.device, model.config.head_dim, model.dtype, kv_dtype)
    on_device = model.device.type == "cuda" and backend.supports_graph()
    captures = on_device and model.supports_graph
    if config.cuda_graphs and not captures:
        why = "the model is on a CPU"
        if model.device.type == "cuda":
            why = f"{type(backend).__name__ if not on_device else 'a model with experts'} cannot be captured"
        raise ConfigError(f"cuda_graphs is True but {why}; leave it out, or use the backend cuda on a CUDA device")
    for name, value in (("speculation", config.speculation), ("deterministic", config.deterministic)):
        if value and not on_device:
            raise ConfigError(f"{name} is {value!r}, which needs a CUDA device and the backend cuda; leave it out")
    if not on_device:
        plan = plan_cache(model, config)
        pool = build_pool(model, config, plan)
        return Runtime(plan, pool, Executor(model, pool, backend, plan.n_rows, config.max_batch_tokens))
    start = time.perf_counter()
    taken_bytes = step_bytes(model, config, backend) if config.kv_cache_bytes is None else 0
    plan = plan_cache(model, config, taken_bytes)
    pool = build_pool(model, config, plan)
    executor = device_executor(model, config, pool, backend, plan.n_rows)
    executor.prepare()
    torch.cuda.synchronize(model.device)
    logger.info(
        "%d graphs, %d MiB for steps, %d pages of %d tokens, ready in %.2f s",
        len(executor.graphs),
        taken_bytes >> 20,
        pool.n_pages,
        plan.page_size,
        time.perf_counter() - start,
    )
    return Runtime(plan, pool, executor)


def build_pool(model: CausalLM, config: EngineConfig, plan: CachePlan) -> PagePool:
    """Build the pool of a plan."""
    return PagePool(
        plan.specs,
        plan.n_pages,
        plan.page_size,
        plan.n_rows,
        plan.max_seq_len,
        model.device,
        chunk_len=config.max_batch_tokens,
        prefix_cache=config.prefix_cache and config.cache_mode == "paged",
        contiguous=config.cache_mode == "contiguous",
    )


def device_executor(
    model: CausalLM, config: EngineConfig, pool: PagePool, backend: AttentionBackend, n_rows: int
) -> DeviceExecutor:
    """Build the executor for a CUDA device."""
    capture = None if config.cuda_graphs is False or not model.supports_graph else CudaCapture(model.device)
    return DeviceExecutor(
        model, pool, backend, n_rows, config.max_batch_tokens, capture, deterministic=config.deterministic
    )


def step_bytes(model: CausalLM, config: EngineConfig, backend: AttentionBackend) -> int:
    """Measure what steps take besides weights and KV cache: graphs, workspaces, loaded kernels, the widest activations.

    The largest step and the largest graphs run on a pool of almost no pages, which is dropped again.
    """
    device = model.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info(device)
    held_before = torch.cuda.memory_reserved(device)
    wanted_len = context_len(model.config, config)
    contiguous = config.cache_mode == "contiguous"
    specs = KVSpec.groups(model.config, resolve_kv_dtype(config, model.dtype), whole=contiguous or config.prefix_cache)
    page_size = 1
    n_rows = config.max_num_seqs
    pool = PagePool(specs, [1] * len(specs), page_size, n_rows, wanted_len, device, prefix_cache=False)
    executor = device_executor(model, config, pool, backend, n_rows)
    n_tokens = config.max_batch_tokens
    executor.run_padding(StepShape(0, n_tokens, -(-n_tokens // wanted_len), is_bucket=False))
    for shape in executor.buckets.widest:
        for _ in range(3):
            executor.run_padding(shape)
    torch.cuda.synchronize(device)
    free_after, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - held_before
    # Graphs and loaded kernels; what other processes took or gave meanwhile looks the same, so it is bounded.
    outside_torch = min(max(free_before - free_after - held, 0), MOST_OUTSIDE_TORCH)
    decode_sizes = executor.buckets.decode_sizes
    executor.forget()
    del executor, pool
    gc.collect()
    torch.cuda.empty_cache()
    # Of the graphs that are captured later, each keeps its logits.
    logits_bytes = sum(decode_sizes[:-1]) * model.config.vocab_size * model.dtype.itemsize
    return held + outside_torch + logits_bytes
