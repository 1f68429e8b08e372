"""The ops door: every fused op of the model, by kernel where one can run, else by its torch twin.

An op uses the kernel when its input is on a CUDA device, no gradient is recorded (row K11), torch.compile is not at
work, and the kernels wheel fits (:func:`astrai_core.kernels.status`). The twins below are the reference in every other
case and in training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core import kernels

if TYPE_CHECKING:
    from astrai_core.attention.rotary import Rope


def _by_kernel(x: Tensor) -> bool:
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return kernels.status().available


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467).

    Statistics in fp32; the normalised value is rounded to ``x.dtype`` before the weight multiplies it.

    Parameters
    ----------
    x
        ``[..., hidden]``.
    weight
        ``[hidden]``.
    """
    if _by_kernel(x):
        return kernels.module("fused").rms_norm(x, weight, eps)
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).to(x.dtype)  # fp32 master weights leave bf16 activations what they are


OVERLAP = True
"""Whether a step's norms, and the launch that writes keys and values, read what is older than the product ahead of them
(the residual stream; positions, slots and angles) while that still runs."""


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum.

    Parameters
    ----------
    x
        ``[..., hidden]``, the output of the last sublayer.
    residual
        ``[..., hidden]``, or None before the first layer, where `x` itself starts the stream.
    overlap
        The caller's word that a kernel which is no product has started since the residual was written.

    Returns
    -------
    (normalised ``[..., hidden]``, new residual ``[..., hidden]``)
    """
    if residual is None:
        return rms_norm(x, weight, eps), x
    if _by_kernel(x):
        return kernels.module("fused").add_rms_norm(x, residual, weight, eps, overlap=overlap)
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the leading ``rotary_dim`` dimensions of each head (RoFormer, arXiv 2104.09864), in fp32.

    Parameters
    ----------
    x
        ``[tokens, n_heads, head_dim]``.
    rope
        Of these tokens.
    """
    if _by_kernel(x):
        apply = kernels.module("rotary").apply_rotary
        return apply(x, None, rope.cos, rope.sin, rope.position_ids, interleaved=rope.interleaved)[0]
    cos, sin = rope.of_tokens()
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim].float()
    partner = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if rope.interleaved else part.roll(rotary_dim // 2, -1)
    turned = torch.addcmul(part * cos, partner, sin).to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), -1)


def qkv_norm_rope(
    qkv: Tensor,
    n_heads: int,
    n_kv_heads: int,
    *,
    rope: Rope | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection into normed, rotated q and k and plain v, ``[tokens, heads, head_dim]`` each.

    Parameters
    ----------
    qkv
        ``[tokens, (n_heads + 2 * n_kv_heads) * head_dim]``.
    rope
        Of these tokens; None: no rotation.
    q_norm, k_norm
        ``[head_dim]`` weights of the norms of each head, both or neither.
    eps
        Of the norms.
    """
    heads = qkv.view(qkv.shape[0], n_heads + 2 * n_kv_heads, -1)
    n_rotated = n_heads + n_kv_heads
    v = heads[:, n_rotated:]
    if q_norm is None or k_norm is None:
        qk = heads[:, :n_rotated]
        if rope is not None:
            qk = rotary(qk, rope)
        return qk[:, :n_heads], qk[:, n_heads:], v
    q = rms_norm(heads[:, :n_heads], q_norm, eps)
    k = rms_norm(heads[:, n_heads:n_rotated], k_norm, eps)
    return (q, k, v) if rope is None else (rotary(q, rope), rotary(k, rope), v)


def qkv_norm_rope_write(
    qkv: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out_cache_loc: Tensor,
    n_heads: int,
    n_kv_heads: int,
    *,
    rope: Rope | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """Do :func:`qkv_norm_rope`, write k and v into the pool and return q ``[tokens, n_heads, head_dim]``.

    Parameters
    ----------
    k_buffer, v_buffer
        ``[size, n_kv_heads, head_dim]``; k and v are rounded to their dtype.
    out_cache_loc
        ``[tokens]`` int64: slot of each token.
    k_scale, v_scale
        ``[size, n_kv_heads]`` fp32, for buffers of float8_e4m3fn: set to the largest magnitude of each token and head over
        448, by which k and v are divided.
    overlap
        The caller's word that a kernel which is no product has started since `out_cache_loc` and `rope` were written.
    """
    if _by_kernel(qkv) and (k_buffer.dtype == qkv.dtype or k_scale is not None):
        return kernels.module("qkv").qkv_norm_rope_write(
            qkv,
            None if rope is None else rope.position_ids,
            None if rope is None else rope.cos,
            None if rope is None else rope.sin,
            k_buffer,
            v_buffer,
            out_cache_loc,
            n_heads,
            n_kv_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            interleaved=rope is not None and rope.interleaved,
            overlap=overlap,
            **({} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}),
        )
    q, k, v = qkv_norm_rope(qkv, n_heads, n_kv_heads, rope=rope, q_norm=q_norm, k_norm=k_norm, eps=eps)
    _write_slots(k_buffer, k_scale, out_cache_loc, k)
    _write_slots(v_buffer, v_scale, out_cache_loc, v)
    return q


def _write_slots(buffer: Tensor, scales: Tensor | None, locs: Tensor, rows: Tensor) -> None:
    if scales is None:
        buffer.index_copy_(0, locs, rows.to(buffer.dtype))
        return
    wide = rows.float()
    scale = wide.abs().amax(-1) / torch.finfo(buffer.dtype).max
    narrow = (wide * torch.where(scale > 0, 1 / scale, 0.0).unsqueeze(-1)).to(buffer.dtype)
    scales.index_copy_(0, locs, scale)
    buffer.view(torch.uint8).index_copy_(0, locs, narrow.view(torch.uint8))  # torch moves no float8 by index on a CPU


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Gather rows of a table.

    Parameters
    ----------
    ids
        ``[...]`` int64.
    table
        ``[vocab, hidden]``.

    Returns
    -------
    ``[..., hidden]``
    """
    if ids.dim() == 1 and _by_kernel(table):
        return kernels.module("elementwise").embedding(ids, table)
    return F.embedding(ids, table)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` over a fused projection (arXiv 2002.05202).

    Parameters
    ----------
    gate_up
        ``[..., 2 * intermediate]``: gate, then up.

    Returns
    -------
    ``[..., intermediate]``
    """
    if _by_kernel(gate_up):
        return kernels.module("elementwise").gated_activation(gate_up, "silu")
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


KERNEL_ROWS = 128
"""Rows that go to the linear kernel. A decode step of the 1.2 B preset on an H200 with it and with cuBLAS and separate
epilogues: 32 sequences 1.25 and 1.43 ms, 64 sequences 1.50 and 1.64; at 128 a layer's four projections 38 and 50 us. In
deterministic mode (``torch.use_deterministic_algorithms``) any number does: a row's bits must not depend on how many
there are."""

NORM_ROWS, NORM_BYTES = 1, 65536
"""Most rows, and bytes of them, that the linear kernel normalises itself: each of its thread blocks does it for all.
The same step: one sequence 0.92 ms so and 0.93 with a launch for the norm, eight sequences 1.03 and 1.00."""

PACKED_ROWS = range(1, 33)
"""Row counts for which the packed layout wins on a CPU. All products of a SmolLM2-135M step in fp32 on two cores: one row
29 ms against 45 ms, eight rows 71 ms against 97 ms on one core."""


def can_pack(weight: Tensor) -> bool:
    """Whether :func:`pack` can lay this weight out for the CPU's matrix library."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack(weight: Tensor) -> Tensor:
    """Return a copy of ``[out_features, in_features]`` in oneDNN's own layout, for few-row products."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)


def _kernel_takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel for few rows takes these types and shapes: half precision, rows at multiples of 16 bytes."""
    return x.is_contiguous() and x.storage_offset() % 8 == 0 and _kernel_fits(x, weight, x.shape[-1])


def _kernel_fits(x: Tensor, weight: Tensor, in_features: int) -> bool:
    return (
        x.dtype in (torch.float16, torch.bfloat16)
        and x.dtype == weight.dtype
        and weight.is_contiguous()
        and (torch.are_deterministic_algorithms_enabled() or x.numel() <= KERNEL_ROWS * x.shape[-1])
        and in_features % 8 == 0
        and weight.storage_offset() % 8 == 0
    )


def can_fuse(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`fused_linear` is one launch for as many rows as `x` has, of the weight's own width."""
    return _by_kernel(x) and _kernel_fits(x, weight, weight.shape[1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    On a CUDA device, up to :data:`KERNEL_ROWS` rows in half precision go through the kernel, whose result for a row
    depends on that row and the weight alone; in deterministic mode all rows do, copied first if they are not contiguous.

    Parameters
    ----------
    x
        ``[..., in_features]``.
    weight
        ``[out_features, in_features]``.
    packed
        The same weight from :func:`pack`, used where it is faster and no gradient is recorded.
    """
    if _by_kernel(x):
        fixed_order = torch.are_deterministic_algorithms_enabled()
        if fixed_order:
            x = x.contiguous()  # one row is contiguous where several are not: both must take the same way
        if _kernel_takes(x, weight):
            return kernels.module("projection").linear(x, weight, bias=bias, fixed_order=fixed_order)
    if packed is not None and x.dim() == 2 and x.shape[0] in PACKED_ROWS and not torch.is_grad_enabled():
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return F.linear(x, weight, bias)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Project with the norm before, and the gate or the addition behind: one launch where :func:`can_fuse` says so.

    Parameters
    ----------
    x
        ``[..., in_features]``.
    weight
        ``[out_features, in_features]``.
    norm
        Weight ``[in_features]`` and epsilon of an :func:`rms_norm` of x.
    residual
        ``[..., out_features]``, added to the rounded product.
    gated
        Return :func:`swiglu` of the projection, ``[..., out_features / 2]``; without bias and residual.
    """
    if _by_kernel(x) and _kernel_takes(x, weight):
        if norm is not None and (x.numel() > NORM_ROWS * x.shape[-1] or x.nbytes > NORM_BYTES):
            x, norm = rms_norm(x, *norm), None
        norm_weight, eps = norm or (None, 0.0)
        return kernels.module("projection").linear(
            x,
            weight,
            bias=bias,
            residual=residual,
            activation="swiglu" if gated else None,
            norm_weight=norm_weight,
            norm_eps=eps,
            fixed_order=torch.are_deterministic_algorithms_enabled(),
        )
    product = linear(x if norm is None else rms_norm(x, *norm), weight, bias)
    if gated:
        return swiglu(product)
    return product if residual is None else product + residual


LORA_RANK = 64
"""Widest rank of :func:`add_lora_inplace` on a CUDA device; there it is a multiple of 8, as the columns of x are."""


def add_lora_inplace(base: Tensor, x: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor, scaling: Tensor) -> None:
    """Add to each row of a projection what the row's own adapter makes of its input (arXiv 2106.09685), in fp32 and
    rounded once: ``base[row] += scaling[i] * (b[i] @ (a[i] @ x[row]))``, i = adapter_ids[row].

    Parameters
    ----------
    base
        ``[rows, out_features]``: the projection's own output, or some of its columns; overwritten.
    x
        ``[rows, in_features]``.
    a
        ``[adapters, rank, in_features]``; smaller ranks are padded with rows of zeros.
    b
        ``[adapters, out_features, rank]``; smaller ranks are padded with columns of zeros.
    adapter_ids
        ``[rows]`` int32 or int64; negative: none.
    scaling
        ``[adapters]`` float32.
    """
    if x.dtype in (torch.float16, torch.bfloat16) and _by_kernel(x):
        lora = kernels.module("lora")
        hidden = lora.lora_shrink(x, a, adapter_ids)
        lora.lora_expand(base, hidden, b, adapter_ids, scaling, out=base)
        return
    found = adapter_ids.unique().tolist()
    for i in found:
        if i < 0:
            continue
        mine = slice(None) if len(found) == 1 else adapter_ids == i
        delta = x[mine].float() @ a[i].float().T @ b[i].float().T * scaling[i]
        base[mine] = (base[mine].float() + delta).to(base.dtype)
