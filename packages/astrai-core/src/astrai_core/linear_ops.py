"""The projections behind the ops door (:mod:`astrai_core.ops`): products with a weight and what goes with them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core import kernels, ops

KERNEL_ROWS = 128
"""Rows that go to the linear kernel. A decode step of the 1.2 B preset on an H200 with it and with cuBLAS and separate
epilogues: 32 sequences 1.25 and 1.43 ms, 64 sequences 1.50 and 1.64; at 128 a layer's four projections 38 and 50 us. In
deterministic mode (``torch.use_deterministic_algorithms``) any number does: a row's bits must not depend on how many
there are."""

NORM_ROWS, NORM_BYTES = 1, 65536
"""Most rows, and bytes of them, that the linear kernel normalises itself: each of its thread blocks does it for all.
The same step: one sequence 0.92 ms so and 0.93 with a launch for the norm, eight sequences 1.03 and 1.00."""

HALVED_ROWS = range(1, 129)
"""Row counts of which a norm between two projections is shared out among them (:class:`HalfNorm`); in deterministic mode any
number, since the result has other bits than that of a norm by itself."""

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
    return ops.by_kernel(x) and _kernel_fits(x, weight, weight.shape[1])


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
    if ops.by_kernel(x):
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
    half: HalfNorm | None = None,
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
        Weight ``[in_features]`` and epsilon of an :func:`~astrai_core.ops.rms_norm` of x.
    half
        What :func:`begin_norm` has done of that norm; without residual.
    residual
        ``[..., out_features]``, added to the rounded product.
    gated
        Return :func:`~astrai_core.ops.swiglu` of the projection, ``[..., out_features / 2]``; without bias and residual.
    """
    if half is not None:
        assert norm is not None and residual is None
        after: Tensor = kernels.module("normed_projection").linear_after_norm(
            half.weighed,
            half.squares,
            weight,
            eps=norm[1],
            bias=bias,
            activation="swiglu" if gated else None,
            fixed_order=torch.are_deterministic_algorithms_enabled(),
        )
        return after
    if ops.by_kernel(x) and _kernel_takes(x, weight):
        if norm is not None and (x.numel() > NORM_ROWS * x.shape[-1] or x.nbytes > NORM_BYTES):
            x, norm = ops.rms_norm(x, *norm), None
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
    product = linear(x if norm is None else ops.rms_norm(x, *norm), weight, bias)
    if gated:
        return ops.swiglu(product)
    return product if residual is None else product + residual


class HalfNorm(NamedTuple):
    """An RMSNorm of the residual stream that the projection ahead, or the embedding, began and the one behind ends.

    ``norm(x) * weight`` is ``(x * weight) * scale`` with one scale a row, so that no launch stands between the two.
    """

    weighed: Tensor
    """``[tokens, hidden]``: the stream times the norm's weight."""
    squares: Tensor
    """``[tokens, hidden / 16]`` float32: sums of the stream's squares."""


def can_begin_norm(x: Tensor, norm_weight: Tensor) -> bool:
    """Whether :func:`begin_norm` takes rows such as `x`, where :func:`can_fuse` says yes to both projections.

    The result differs by rounding from that of a norm by itself, so in deterministic mode their number does not matter.
    """
    return (
        x.dtype == torch.bfloat16
        and x.dtype == norm_weight.dtype
        and (torch.are_deterministic_algorithms_enabled() or x.shape[0] in HALVED_ROWS)
        and norm_weight.shape[0] % 64 == 0
        and norm_weight.storage_offset() % 8 == 0
    )


def begin_norm(
    x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Tensor | None = None, *, residual: Tensor
) -> tuple[Tensor, HalfNorm]:
    """Project, add to the residual stream and do half of the norm that reads the stream next, in one launch.

    Parameters
    ----------
    x
        ``[tokens, in_features]``.
    weight
        ``[hidden, in_features]``.
    norm_weight
        ``[hidden]``.
    residual
        ``[tokens, hidden]``.

    Returns
    -------
    The stream ``[tokens, hidden]`` and the :class:`HalfNorm` for the projection that reads it.
    """
    stream, *half = kernels.module("normed_projection").linear_before_norm(
        x,
        weight,
        norm_weight,
        bias=bias,
        residual=residual,
        fixed_order=torch.are_deterministic_algorithms_enabled(),
    )
    return stream, HalfNorm(*half)


def embed_and_begin_norm(ids: Tensor, table: Tensor, norm_weight: Tensor) -> tuple[Tensor, HalfNorm]:
    """Gather rows of a table, the residual stream's first values, and do half of the norm that reads them, in one launch.

    Parameters
    ----------
    ids
        ``[tokens]`` int64.
    table
        ``[vocab, hidden]``; :func:`can_begin_norm` says yes to its rows.
    norm_weight
        ``[hidden]``.

    Returns
    -------
    As :func:`begin_norm`.
    """
    stream, *half = kernels.module("normed_projection").embedding_before_norm(ids, table, norm_weight)
    return stream, HalfNorm(*half)


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
    if x.dtype in (torch.float16, torch.bfloat16) and ops.by_kernel(x):
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
