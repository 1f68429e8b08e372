"""A norm between two projections without a launch of its own: the one ahead and the one behind do half of it each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from .projection import MOST_ROWS as MOST_FIXED_ROWS
from .projection import check, launch

MOST_ROWS = 128
"""Without `fixed_order`."""
FEATURES_MULTIPLE = 64
HALF_WIDTH = 16
"""Features of a row that one sum of squares is of."""

_EIGHT_BYTES, _SIXTEEN_BYTES = 8, 16


def _check_rows(op: str, x: Tensor, hidden: int, name: str, fixed_order: bool) -> int:
    rows = x.numel() // x.shape[-1]
    checks.check_dtype(op, "x", x, torch.bfloat16)
    if rows > MOST_ROWS and not fixed_order:
        raise ValueError(
            f"{op}: x has {rows} rows, expected at most {MOST_ROWS}, or with fixed_order {MOST_FIXED_ROWS}"
        )
    if hidden % FEATURES_MULTIPLE:
        raise ValueError(f"{op}: {name} is {hidden}, expected a multiple of {FEATURES_MULTIPLE}")
    return rows


def _check_aligned(op: str, name: str, tensor: Tensor, multiple: int) -> None:
    if tensor.data_ptr() % multiple:
        raise ValueError(f"{op}: {name} starts at {tensor.data_ptr():#x}, expected a multiple of {multiple} bytes")


def _before_fake(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    fixed_order: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "linear_before_norm"
    shape = check(x, weight, bias, residual, False, None, 0.0)
    rows = _check_rows(op, x, shape[-1], "out_features of weight", fixed_order)
    checks.check_device(op, "norm_weight", norm_weight, x.device)
    checks.check_dtype(op, "norm_weight", norm_weight, x.dtype)
    checks.check_shape(op, "norm_weight", norm_weight, (shape[-1],), "out_features of weight")
    checks.check_last_dim(op, "norm_weight", norm_weight)
    squares = torch.empty((rows, shape[-1] // HALF_WIDTH), dtype=torch.float32, device=x.device)
    return x.new_empty(shape), x.new_empty(shape), squares


def _before(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    fixed_order: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    out, weighed, squares = _before_fake(x, weight, norm_weight, bias, residual, fixed_order)
    _check_aligned("linear_before_norm", "norm_weight", norm_weight, _EIGHT_BYTES)
    following = (norm_weight, weighed, squares)
    launch(x, weight, bias, residual, False, None, 0.0, out, fixed_order, following=following)
    return out, weighed, squares


def _after_fake(
    weighed: Tensor,
    squares: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    swiglu: bool,
    eps: float,
    fixed_order: bool = False,
) -> Tensor:
    op = "linear_after_norm"
    shape = check(weighed, weight, bias, None, swiglu, None, 0.0)
    hidden = weighed.shape[-1]
    rows = _check_rows(op, weighed, hidden, "in_features", fixed_order)
    checks.check_device(op, "squares", squares, weighed.device)
    checks.check_dtype(op, "squares", squares, torch.float32)
    checks.check_shape(op, "squares", squares, (rows, hidden // HALF_WIDTH), f"rows of x, in_features / {HALF_WIDTH}")
    if not squares.is_contiguous():
        raise ValueError(f"{op}: squares has strides {squares.stride()}, expected contiguous rows")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{op}: eps is {eps}, expected a finite number of at least 0")
    return weighed.new_empty(shape)


def _after(
    weighed: Tensor,
    squares: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    swiglu: bool,
    eps: float,
    fixed_order: bool = False,
) -> Tensor:
    out = _after_fake(weighed, squares, weight, bias, swiglu, eps, fixed_order)
    _check_aligned("linear_after_norm", "squares", squares, _SIXTEEN_BYTES)
    launch(weighed, weight, bias, None, swiglu, None, eps, out, fixed_order, squares=squares)
    return out


_before_op = register(
    "linear_before_norm(Tensor x, Tensor weight, Tensor norm_weight, Tensor? bias, Tensor? residual,"
    " bool fixed_order=False) -> (Tensor, Tensor, Tensor)",
    _before,
    _before_fake,
)
_after_op = register(
    "linear_after_norm(Tensor weighed, Tensor squares, Tensor weight, Tensor? bias, bool swiglu, float eps,"
    " bool fixed_order=False) -> Tensor",
    _after,
    _after_fake,
)


def linear_before_norm(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    fixed_order: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do :func:`linear` and the first half of an RMSNorm (arXiv 1910.07467) of its result, for :func:`linear_after_norm`.

    ``rms_norm(y) * norm_weight`` is ``(y * norm_weight) * scale`` with one scale a row, which a projection behind can apply
    to its sums. Together the two differ from :func:`rms_norm` and :func:`linear` by rounding: once instead of twice before
    the product.

    Parameters
    ----------
    x : Tensor
        ``[..., in_features]``, bfloat16, at most 128 rows without `fixed_order`; else as in :func:`linear`.
    weight : Tensor
        ``[out_features, in_features]``; out_features a multiple of 64.
    norm_weight : Tensor
        ``[out_features]``, bfloat16, at a multiple of 8 bytes.
    bias, residual : Tensor, optional
        As in :func:`linear`.
    fixed_order : bool
        A row of all three results depends on that row and the weights alone, as in :func:`linear`.

    Returns
    -------
    out : Tensor
        ``[..., out_features]``: what :func:`linear` gives.
    weighed : Tensor
        ``[..., out_features]``: the same times `norm_weight`, rounded.
    squares : Tensor
        ``[rows, out_features / 16]`` float32: the sum of squares of each 16 features of `out`.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, alignment, value or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    """
    refuse_grad("linear_before_norm", x=x, weight=weight, norm_weight=norm_weight, bias=bias, residual=residual)
    result: tuple[Tensor, Tensor, Tensor] = _before_op(x, weight, norm_weight, bias, residual, fixed_order)
    return result


def linear_after_norm(
    weighed: Tensor,
    squares: Tensor,
    weight: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    activation: str | None = None,
    fixed_order: bool = False,
) -> Tensor:
    """Do the second half of the norm that :func:`linear_before_norm` began, and :func:`linear` of it.

    Each row's sums are multiplied by ``1 / sqrt(mean(squares) + eps)`` before bias, activation and rounding.

    Parameters
    ----------
    weighed : Tensor
        ``[..., in_features]``, bfloat16, at most 128 rows without `fixed_order`; in_features a multiple of 64.
    squares : Tensor
        ``[rows, in_features / 16]`` float32, contiguous.
    weight : Tensor
        ``[out_features, in_features]``, or with ``"swiglu"`` ``[2 * out_features, in_features]``; as in :func:`linear`.
    eps : float
        Added to the mean square.
    bias : Tensor, optional
        ``[out_features]``.
    activation : {None, "swiglu"}
        As in :func:`linear`.
    fixed_order : bool
        A row's bits depend on that row, its squares and the weight alone, as in :func:`linear`.

    Returns
    -------
    Tensor
        ``[..., out_features]``

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, alignment, value or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    """
    checks.check_epilogue(bias, None, activation)
    refuse_grad("linear_after_norm", weighed=weighed, squares=squares, weight=weight, bias=bias)
    result: Tensor = _after_op(weighed, squares, weight, bias, activation is not None, eps, fixed_order)
    return result
