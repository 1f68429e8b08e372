"""A norm in front of a projection without a launch of its own: what is ahead of it, a projection or the embedding, does half
of it, and the projection the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from .elementwise import check_embedding, launch_embedding
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
    _check_features(op, name, hidden)
    return rows


def _check_features(op: str, name: str, features: int) -> None:
    if features % FEATURES_MULTIPLE:
        raise ValueError(f"{op}: {name} is {features}, expected a multiple of {FEATURES_MULTIPLE}")


def _check_norm_weight(op: str, norm_weight: Tensor, like: Tensor, features: int, name: str) -> None:
    checks.check_device(op, "norm_weight", norm_weight, like.device)
    checks.check_dtype(op, "norm_weight", norm_weight, like.dtype)
    checks.check_shape(op, "norm_weight", norm_weight, (features,), name)
    checks.check_last_dim(op, "norm_weight", norm_weight)


def _squares(rows: int, features: int, device: torch.device) -> Tensor:
    return torch.empty((rows, features // HALF_WIDTH), dtype=torch.float32, device=device)


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
    _check_norm_weight(op, norm_weight, x, shape[-1], "out_features of weight")
    return x.new_empty(shape), x.new_empty(shape), _squares(rows, shape[-1], x.device)


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


def _embedding_before_fake(ids: Tensor, table: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    op = "embedding_before_norm"
    check_embedding(op, ids, table)
    checks.check_dtype(op, "table", table, torch.bfloat16)
    hidden = table.shape[1]
    _check_features(op, "hidden of table", hidden)
    _check_norm_weight(op, norm_weight, table, hidden, "hidden of table")
    shape = (ids.shape[0], hidden)
    return table.new_empty(shape), table.new_empty(shape), _squares(*shape, table.device)


def _embedding_before(ids: Tensor, table: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    op = "embedding_before_norm"
    out, weighed, squares = _embedding_before_fake(ids, table, norm_weight)
    _check_aligned(op, "norm_weight", norm_weight, _SIXTEEN_BYTES)
    _check_aligned(op, "table", table, _SIXTEEN_BYTES)
    if table.stride(0) * table.element_size() % _SIXTEEN_BYTES:
        raise ValueError(f"{op}: rows of table are {table.stride(0)} elements apart, expected a multiple of 8")
    launch_embedding(ids, table, out, (norm_weight, weighed, squares))
    return out, weighed, squares


_embedding_before_op = register(
    "embedding_before_norm(Tensor ids, Tensor table, Tensor norm_weight) -> (Tensor, Tensor, Tensor)",
    _embedding_before,
    _embedding_before_fake,
)
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


def embedding_before_norm(ids: Tensor, table: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do :func:`embedding` and the first half of an RMSNorm of the rows, for :func:`linear_after_norm`.

    Parameters
    ----------
    ids : Tensor
        ``[tokens]`` int32 or int64. An id outside the table gives a row of NaN.
    table : Tensor
        ``[vocab, hidden]``, bfloat16, rows at multiples of 16 bytes; hidden a multiple of 64.
    norm_weight : Tensor
        ``[hidden]``, bfloat16, at a multiple of 16 bytes.

    Returns
    -------
    out, weighed, squares : Tensor
        As :func:`linear_before_norm`; `out` is what :func:`embedding` gives. A row depends on its id alone.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As :func:`linear_before_norm`.
    """
    refuse_grad("embedding_before_norm", table=table, norm_weight=norm_weight)
    result: tuple[Tensor, Tensor, Tensor] = _embedding_before_op(ids, table, norm_weight)
    return result


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
