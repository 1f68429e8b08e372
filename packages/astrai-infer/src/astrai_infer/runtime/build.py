"""What runs an engine's steps: the pool and the executor, sized to the memory there is."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass

import torch

from astrai_core.attention.backend import AttentionBackend, resolve_backend
from astrai_core.attention.cuda import CudaBackend
from astrai_core.errors import ConfigError
from astrai_core.model.adapter_slots import AdapterSlots
from astrai_core.model.transformer import CausalLM
from astrai_core.model.whole_step import STEP_ROWS, WholeStep
from astrai_infer.cache.pool import PagePool
from astrai_infer.cache.sizing import CachePlan, cache_specs, context_len, plan_cache, resolve_kv_dtype
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


def build_runtime(
    model: CausalLM, config: EngineConfig, adapters: AdapterSlots | None = None, draft: CausalLM | None = None
) -> Runtime:
    """Build pool and executor for a loaded model, with room for adapters on it or without, and with a draft model if
    there is one.

    Where steps can be captured, the memory that they need is measured first, the KV cache gets what is left, and the
    steps are captured then: the cache stays where it is from there on.

    Raises
    ------
    ConfigError
        If graphs or the kernel of a whole step are asked for where there can be none, or the cache does not fit.
    BackendError
        If the backend asked for cannot run.
    """
    kv_dtype = resolve_kv_dtype(config, model.dtype)
    backend = resolve_backend(config.backend, model.device, model.config.head_dim, model.dtype, kv_dtype)
    on_device = model.device.type == "cuda" and backend.supports_graph()
    captures = on_device and model.supports_graph
    if config.cuda_graphs and not captures:
        why, remedy = "the model is on a CPU", "use the backend cuda on a CUDA device"
        if on_device:
            why = f"experts in {str(model.dtype).removeprefix('torch.')} cannot be captured on this card"
            remedy = "serve them in bfloat16 on compute capability 9 or 10"
        elif model.device.type == "cuda":
            why = f"{type(backend).__name__} cannot be captured"
        raise ConfigError(f"cuda_graphs is True but {why}; leave it out, or {remedy}")
    if config.deterministic and not on_device:
        raise ConfigError("deterministic is True, which needs a CUDA device and the backend cuda; leave it out")
    step_kernel(model, config, adapters, backend)  # or a refusal, before anything is built
    if draft is not None:
        reason = type(backend).unavailable(model.device, draft.config.head_dim, draft.dtype, kv_dtype)
        if reason is not None:
            raise ConfigError(f"draft_model cannot run on the model's attention backend: {reason}")
    if not on_device:
        plan = plan_cache(model, config, draft=draft)
        pool = build_pool(model, config, plan)
        plain = Executor(model, pool, backend, plan.n_rows, config.max_batch_tokens, adapters=adapters, draft=draft)
        return Runtime(plan, pool, plain)
    start = time.perf_counter()
    taken_bytes = step_bytes(model, config, backend, adapters, draft) if config.kv_cache_bytes is None else 0
    plan = plan_cache(model, config, taken_bytes, draft)
    pool = build_pool(model, config, plan)
    executor = device_executor(model, config, pool, backend, adapters, draft)
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


def step_kernel(
    model: CausalLM, config: EngineConfig, adapters: AdapterSlots | None, backend: AttentionBackend
) -> WholeStep | None:
    """Return what runs decode steps as one kernel, or None where the settings leave the choice and it cannot or does not.

    Raises
    ------
    ConfigError
        If it is asked for and cannot; the message says why.
    """
    if config.step_kernel is False:
        return None
    reason = None
    if not isinstance(backend, CudaBackend):
        reason = "it needs a CUDA device and the backend cuda"
    elif config.deterministic:
        reason = "deterministic is True, and how the kernel cuts attention depends on how many requests there are"
    elif resolve_kv_dtype(config, model.dtype) != model.dtype:
        reason = f"kv_dtype is {config.kv_dtype!r}, the kernel reads keys and values of the model's type"
    elif adapters is not None:
        reason = "there is room for adapters (max_loras), which the kernel does not apply"
    else:
        reason = WholeStep.unavailable(model)
    if reason is None and config.step_kernel:
        return WholeStep(model)
    if reason is None:
        return WholeStep(model, STEP_ROWS) if WholeStep.pays(model) else None
    if config.step_kernel:
        raise ConfigError(f"step_kernel is True but {reason}; leave it out")
    return None


def build_pool(model: CausalLM, config: EngineConfig, plan: CachePlan) -> PagePool:
    """Build the pool of a plan."""
    return PagePool(
        plan.specs,
        plan.n_pages,
        plan.page_size,
        plan.n_rows,
        plan.max_seq_len,
        model.device,
        draft_specs=plan.draft_specs,
        chunk_len=config.max_batch_tokens,
        prefix_cache=config.prefix_cache and config.cache_mode == "paged",
        contiguous=config.cache_mode == "contiguous",
    )


def device_executor(
    model: CausalLM,
    config: EngineConfig,
    pool: PagePool,
    backend: AttentionBackend,
    adapters: AdapterSlots | None,
    draft: CausalLM | None,
) -> DeviceExecutor:
    """Build the executor for a CUDA device."""
    capture = None if config.cuda_graphs is False or not model.supports_graph else CudaCapture(model.device)
    return DeviceExecutor(
        model,
        pool,
        backend,
        pool.n_rows,
        config.max_batch_tokens,
        capture,
        deterministic=config.deterministic,
        adapters=adapters,
        draft=draft,
        max_draft_tokens=0 if config.speculation is None else config.max_draft_tokens,
        whole_step=step_kernel(model, config, adapters, backend),
    )


def step_bytes(
    model: CausalLM,
    config: EngineConfig,
    backend: AttentionBackend,
    adapters: AdapterSlots | None = None,
    draft: CausalLM | None = None,
) -> int:
    """Measure what steps take besides weights and KV cache: graphs, workspaces, loaded kernels, the widest activations.

    The largest step and the largest graphs run on a pool of almost no pages, which is dropped again.
    """
    device = model.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info(device)
    held_before = torch.cuda.memory_reserved(device)
    wanted_len = context_len(model.config, config)
    specs, draft_specs = cache_specs(model, config, draft)
    n_pages, page_size = [1] * len(specs), 1
    pool = PagePool(
        specs, n_pages, page_size, config.n_rows, wanted_len, device, draft_specs=draft_specs, prefix_cache=False
    )
    executor = device_executor(model, config, pool, backend, adapters, draft)
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
