"""Attention through the flash-attn package, where it is installed: FlashAttention-3 on Hopper, else FlashAttention-2."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core.attention.backend import AttentionBackend, AttentionSpec
from astrai_core.attention.gather import gather, visible_keys
from astrai_core.errors import BackendError

if TYPE_CHECKING:
    from astrai_core.attention.metadata import AttentionMetadata, KVCache

MAX_HEAD_DIM = 256
REMEDY = "pip install 'astrai-core[flash]', or use the backend torch_native"


@dataclass(frozen=True)
class Generation:
    """A generation of the package and how its interface differs."""

    module: str
    majors: range
    """Major compute capabilities that it has kernels for."""
    page_argument: str
    """What it calls the table of pages."""
    page_multiple: int
    """Page sizes that it takes are multiples of this."""


GENERATIONS = (
    Generation("flash_attn_interface", range(9, 10), "page_table", 1),
    Generation("flash_attn", range(8, 100), "block_table", 256),
)
"""In order of preference."""


@dataclass(frozen=True)
class FlashLibrary:
    """A generation that runs here, and its functions."""

    generation: Generation
    with_kvcache: Callable[..., Tensor]
    varlen: Callable[..., Tensor]


@functools.lru_cache
def probe(device: torch.device) -> tuple[FlashLibrary | None, str]:
    """Find a generation whose kernels give the right result on `device`; once per process and device (row A4).

    Returns
    -------
    (library, "") or (None, why there is none and the remedy)
    """
    major, minor = torch.cuda.get_device_capability(device)
    reasons = []
    for generation in GENERATIONS:
        if major not in generation.majors:
            continue
        try:
            module = importlib.import_module(generation.module)
            library = FlashLibrary(generation, module.flash_attn_with_kvcache, module.flash_attn_varlen_func)
        except (ImportError, AttributeError) as error:
            reasons.append(f"{generation.module} cannot be imported ({error})")
            continue
        reason = _smoke_test(library, device)
        if reason is None:
            return library, ""
        reasons.append(f"{generation.module} {reason}")
    if not reasons:
        reasons.append(f"the GPU has compute capability {major}.{minor}, flash-attn needs 8.0 or later")
    return None, f"{'; '.join(reasons)}; {REMEDY}"


def _smoke_test(library: FlashLibrary, device: torch.device) -> str | None:
    """Run both functions on a few keys; return what is wrong with them, or None."""

    def wave(*shape: int) -> Tensor:
        n = torch.Size(shape).numel()
        return torch.arange(n, device=device).mul(0.7).sin().view(shape).bfloat16()

    q, k, v = wave(1, 1, 4, 64), wave(2, 16, 2, 64), wave(2, 16, 2, 64) * 2
    lens = torch.tensor([16], dtype=torch.int32, device=device)
    indptr = torch.tensor([0, 1, 16], dtype=torch.int32, device=device)
    expected = F.scaled_dot_product_attention(
        q.transpose(1, 2), k[1:].transpose(1, 2), v[1:].transpose(1, 2), enable_gqa=True
    ).view(1, 1, 4, 64)
    try:
        in_place = library.with_kvcache(
            q, k, v, cache_seqlens=lens, cache_batch_idx=torch.ones_like(lens), causal=True, window_size=(-1, -1)
        )
        ragged = library.varlen(
            q[0],
            k[1],
            v[1],
            cu_seqlens_q=indptr[:2],
            cu_seqlens_k=indptr[::2].contiguous(),
            max_seqlen_q=1,
            max_seqlen_k=16,
            causal=True,
            window_size=(-1, -1),
        )
        right = all(torch.allclose(out, like, atol=2e-2) for out, like in ((in_place, expected), (ragged, expected[0])))
    except (RuntimeError, TypeError) as error:
        return f"does not run on {device} ({str(error).partition(chr(10))[0]})"
    return None if right else f"computes wrong results on {device}"


@dataclass(frozen=True)
class _InPlace:
    """A decode step that reads the pool as ``[n, length, n_kv_heads, head_dim]`` without a copy."""

    n: int
    length: int
    arguments: dict[str, Tensor]


@dataclass(frozen=True)
class _Ragged:
    """A step over gathered keys."""

    slots: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class FlashAttnBackend(AttentionBackend):
    """Decodes in place where the library can address the pool, and gathers elsewhere (row A3).

    In place: a contiguous pool by ``cache_batch_idx``, a paged one through its table of pages if the page size is one
    that the library takes (multiples of 256 in FlashAttention-2, any in FlashAttention-3).
    """

    @staticmethod
    def unavailable(device: torch.device, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """Say why flash-attn cannot run there: device, head size, type, compute capability or the package itself."""
        if device.type != "cuda":
            return "it needs a CUDA device; use the backend torch_native"
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            return (
                f"head_dim is {head_dim}, flash-attn takes multiples of 8 up to {MAX_HEAD_DIM}; use the backend "
                "torch_native"
            )
        if dtype not in (torch.float16, torch.bfloat16) or kv_dtype != dtype:
            return (
                f"the model has dtype {dtype} and the KV cache {kv_dtype}, flash-attn takes float16 or bfloat16, the same "
                "for both; load the model in bfloat16 or use the backend torch_native"
            )
        library, reason = probe(device)
        return reason if library is None else None

    def plan(self, cache: KVCache, specs: Sequence[AttentionSpec], *, overlap: bool = False) -> None:
        """Build the table of pages or the gather of each group and window."""
        for i, (metadata, of_group) in enumerate(cache.specs_of_groups(specs)):
            size = cache.k_buffers[cache.group_of.index(i)].shape[0]
            in_place = self._plan_in_place(metadata, size) if metadata.phase == "decode" else None
            metadata.plan = {spec.window: in_place or self._plan_ragged(metadata, spec.window) for spec in of_group}

    def fwd_decode(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Attend with one query per request, in place if the step was planned so."""
        k_buffer, v_buffer, metadata = cache.of(spec.layer)
        plan: _InPlace | _Ragged = metadata.plan[spec.window]
        if isinstance(plan, _Ragged):
            return self.fwd_prefill(q, spec, cache)
        used, shape = plan.n * plan.length, (plan.n, plan.length, spec.n_kv_heads, spec.head_dim)
        return (
            self._library(q)
            .with_kvcache(
                q.unsqueeze(1),
                k_buffer[:used].view(shape),
                v_buffer[:used].view(shape),
                softmax_scale=spec.scale,
                causal=True,
                window_size=_window_size(spec),
                **plan.arguments,
            )
            .squeeze(1)
        )

    def fwd_prefill(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Attend with all requests in one call over gathered keys."""
        k_buffer, v_buffer, metadata = cache.of(spec.layer)
        plan: _Ragged = metadata.plan[spec.window]
        keys, values = gather(k_buffer, v_buffer, plan.slots, q.dtype)
        return self._library(q).varlen(
            q,
            keys,
            values,
            cu_seqlens_q=plan.cu_seqlens_q,
            cu_seqlens_k=plan.cu_seqlens_k,
            max_seqlen_q=plan.max_seqlen_q,
            max_seqlen_k=plan.max_seqlen_k,
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window_size(spec),
        )

    @staticmethod
    def _library(tensor: Tensor) -> FlashLibrary:
        library, reason = probe(tensor.device)
        if library is None:
            raise BackendError(f"attention backend 'flash' cannot run on {tensor.device}: {reason}")
        return library

    def _plan_in_place(self, metadata: AttentionMetadata, size: int) -> _InPlace | None:
        generation = self._library(metadata.req_to_token).generation
        length = metadata.page_size
        if metadata.contiguous:
            arguments = {"cache_batch_idx": metadata.req_indices.int()}
            n = metadata.req_to_token.shape[0]
        elif length % generation.page_multiple == 0:
            # A page that a window left behind may be named here. The library masks what it reads of it, and its content
            # is finite, since this request wrote it once.
            pages = metadata.req_to_token[metadata.req_indices, ::length] // length
            arguments = {generation.page_argument: pages}
            n = size // length
        else:
            return None
        return _InPlace(n, length, arguments | {"cache_seqlens": metadata.seq_lens})

    @staticmethod
    def _plan_ragged(metadata: AttentionMetadata, window: int | None) -> _Ragged:
        keys = visible_keys(metadata, window)
        return _Ragged(keys.slots, metadata.qo_indptr, keys.indptr, max(metadata.q_lens_host), max(keys.lens))


def _window_size(spec: AttentionSpec) -> tuple[int, int]:
    return (-1, -1) if spec.window is None else (spec.window - 1, 0)
