"""Attention through the CUDA kernels, which read keys and values in the pool itself (row A2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from astrai_core import kernels, ops
from astrai_core.attention.backend import AttentionBackend, AttentionSpec
from astrai_core.attention.gather import leading_decodes

if TYPE_CHECKING:
    from astrai_core.attention.metadata import AttentionMetadata, KVCache
    from astrai_core.attention.rotary import Rope

MIN_CAPABILITY = (8, 0)
"""mma.sync on bf16 and cp.async."""
DTYPES = (torch.float16, torch.bfloat16)

ONE_LAUNCH_ROWS = {64: 8, 128: 8}
"""By head size, most requests whose qk-norm, rotation and KV write are part of the attention launch: each thread block that
reads keys of a request does its queries again. A step of the 1.2B preset on an H200 so and in two launches: one request 903
and 950 us, eight 998 and 1,015, 32 the same. With heads of 128 (Qwen3 0.6B): one 777 and 771, eight 906 and 910."""

FIXED_LEN = 1024
"""Keys of a chunk of decode attention in deterministic mode (``torch.use_deterministic_algorithms``): a row's result then
depends on that row and its keys alone, and not on how the work of all was cut. A step of the 1.2B preset on an H200 with 576
keys a request, in us, 1,024 and 256 keys: one request 955 and 910, eight 1,027 and 974, 32 1,267 and 1,380, 128 1,918 and
2,352."""


@dataclass(frozen=True)
class _StepPlan:
    """A step of one group of layers."""

    decode: Mapping[int | None, Any]
    """By attention window: the kernel's plan for the leading requests with one query each."""
    n_decode: int
    is_mixed: bool
    """Whether requests with more queries follow."""


class CudaBackend(AttentionBackend):
    """Decode and prefill kernels through the pool's table of slots; any page size.

    An instance serves one engine: it keeps the kernel's plan for each kind of layer at a fixed address, sized by the rows
    of the table, and a step overwrites it. The lengths are read on the device, so a captured step replays for any.

    Raises
    ------
    BackendError
        If the kernels cannot be used here; the message says why and what to do.
    """

    def __init__(self) -> None:
        self._decode_kernels: Any = kernels.module("attention")
        self._prefill_kernels: Any = kernels.module("prefill")
        self._qkv_kernels: Any = kernels.module("qkv_attention")
        self._plans: dict[tuple[int | None, ...], Any] = {}

    @staticmethod
    def unavailable(device: torch.device, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """Say why the kernels cannot run there: device, wheel, compute capability, type or head size."""
        if device.type != "cuda":
            return "it needs a CUDA device; use the backend torch_native"
        found = kernels.status()
        if not found.available:
            return f"{kernels.DISTRIBUTION} cannot be used: {found.reason}; {found.remedy}"
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return (
                f"the GPU has compute capability {capability[0]}.{capability[1]}, the kernels need "
                f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}; use the backend torch_native"
            )
        if dtype not in DTYPES or kv_dtype not in (dtype, torch.float8_e4m3fn):
            return (
                f"the model has dtype {dtype} and the KV cache {kv_dtype}, the kernels take float16 or bfloat16, the same "
                "for both or float8_e4m3fn for the cache; load the model in bfloat16 or use the backend torch_native"
            )
        known = kernels.module("attention").HEAD_DIMS
        if head_dim not in known:
            return (
                f"head_dim is {head_dim}, the kernels know {', '.join(map(str, known))}; use the backend torch_native"
            )
        return None

    @staticmethod
    def supports_graph() -> bool:
        """Return True: a step of single queries reads nothing from the host."""
        return True

    def plan(self, cache: KVCache, specs: Sequence[AttentionSpec], *, overlap: bool = False) -> None:
        """Cut the work of the single-query requests on the device: one launch for each kind of layer."""
        n_decode = leading_decodes(cache.groups[0])
        for metadata, of_group in cache.specs_of_groups(specs):
            metadata.plan = _StepPlan(
                decode={
                    spec.window: self._plan_decode(metadata, spec, n_decode, overlap) for spec in of_group if n_decode
                },
                n_decode=n_decode,
                is_mixed=n_decode < len(metadata.q_lens_host),
            )

    def _plan_decode(self, metadata: AttentionMetadata, spec: AttentionSpec, n_decode: int, overlap: bool) -> Any:
        rows, max_len = metadata.req_to_token.shape
        fixed_len = FIXED_LEN if torch.are_deterministic_algorithms_enabled() else None
        key = (rows, max_len, spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.window, fixed_len)
        plan = self._plans.get(key)
        if plan is None:
            fixed = {} if fixed_len is None else {"fixed_len": fixed_len, "max_tokens": rows * max_len}
            device = metadata.req_to_token.device
            plan = self._plans[key] = self._decode_kernels.DecodePlan(
                rows, spec.n_heads, spec.n_kv_heads, spec.head_dim, device, window=spec.window, **fixed
            )
        plan.update(metadata.seq_lens[:n_decode], metadata.req_indices[:n_decode], overlap=overlap)
        return plan

    def attend(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        cache: KVCache,
        rope: Rope,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values and attend: one launch for a step of few single queries, else two, of the same bits."""
        if not self._is_one_launch(qkv, spec, cache, rope, (q_norm, k_norm)):
            return super().attend(qkv, spec, cache, rope, q_norm, k_norm)
        k_buffer, v_buffer, metadata = cache.of(spec.layer)
        turned = (rope.position_ids, rope.cos, rope.sin) if spec.use_rope else (None, None, None)
        result: Tensor = self._qkv_kernels.qkv_decode_attention(
            qkv,
            *turned,
            k_buffer,
            v_buffer,
            metadata.out_cache_loc,
            metadata.plan.decode[spec.window],
            req_to_token=metadata.req_to_token,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=spec.norm_eps,
            interleaved=spec.use_rope and rope.interleaved,
            scale=spec.scale,
            # Slots, positions and the keys of earlier steps were there before the embedding, which is no product.
            overlap=ops.OVERLAP,
        )
        return result

    def _is_one_launch(
        self, qkv: Tensor, spec: AttentionSpec, cache: KVCache, rope: Rope, norms: Sequence[Tensor | None]
    ) -> bool:
        k_buffer, _, metadata = cache.of(spec.layer)
        known = self._qkv_kernels
        return (
            cache.phase == "decode"
            and qkv.shape[0] <= ONE_LAUNCH_ROWS.get(spec.head_dim, 0)
            and not metadata.reads_own_keys
            and qkv.dtype in DTYPES
            and k_buffer.dtype == qkv.dtype
            and spec.head_dim in known.HEAD_DIMS
            and spec.n_heads <= known.MAX_GROUP * spec.n_kv_heads
            and all(norm is None or norm.storage_offset() % 8 == 0 for norm in norms)
            and (not spec.use_rope or 2 * rope.cos.shape[1] % known.ROTARY_MULTIPLE == 0)
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )

    def fwd_decode(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Attend with all single-query requests in one launch."""
        return self._decode(q, spec, cache, torch.empty_like(q))

    def fwd_prefill(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Attend with the leading single-query requests in one launch, and with all chunks behind them in another."""
        k_buffer, v_buffer, metadata = cache.of(spec.layer)
        k_scale, v_scale = cache.scales(spec.layer)
        plan: _StepPlan = metadata.plan
        out = torch.empty_like(q)
        first = plan.n_decode
        if first:
            self._decode(q[:first], spec, cache, out[:first])
        if plan.is_mixed:
            self._prefill_kernels.prefill_attention(
                q,
                k_buffer,
                v_buffer,
                metadata.qo_indptr[first:],
                metadata.seq_lens[first:],
                req_to_token=metadata.req_to_token,
                req_indices=metadata.req_indices[first:],
                scale=spec.scale,
                window=spec.window,
                out=out,
                **({} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}),
            )
        return out

    def _decode(self, q: Tensor, spec: AttentionSpec, cache: KVCache, out: Tensor) -> Tensor:
        k_buffer, v_buffer, metadata = cache.of(spec.layer)
        k_scale, v_scale = cache.scales(spec.layer)
        result: Tensor = self._decode_kernels.decode_attention(
            q,
            k_buffer,
            v_buffer,
            metadata.plan.decode[spec.window],
            req_to_token=metadata.req_to_token,
            scale=spec.scale,
            out=out,
            # The launch before this one wrote the newest keys and values; the others date from earlier steps.
            overlap=not metadata.reads_own_keys,
            **({} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}),
        )
        return result
