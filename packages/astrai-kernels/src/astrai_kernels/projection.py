"""Linear projections whose result for a row does not depend on how many rows there are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from ._loader import extension

MOST_ROWS = 1 << 28
# With norm_weight every thread block normalises all of x and keeps it in shared memory.
MOST_NORM_ROWS = 8
MOST_NORM_BYTES = 65536

_OCTET = 8


def _row_stride(name: str, tensor: Tensor) -> int:
    """Return the stride of a tensor's rows; they must be one stride apart over all leading dimensions."""
    rows, inner, [(outer_stride, _)] = checks.row_strides("linear", **{name: tensor})
    if inner != 1:
        raise ValueError(
            f"linear: {name} has strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}, expected rows one "
            "stride apart"
        )
    return tensor.shape[-1] if rows <= 1 else outer_stride


def _check_like_x(name: str, tensor: Tensor, x: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    checks.check_device("linear", name, tensor, x.device)
    checks.check_dtype("linear", name, tensor, x.dtype)
    checks.check_shape("linear", name, tensor, shape, meaning)
    checks.check_last_dim("linear", name, tensor)


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    swiglu: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> tuple[int, ...]:
    """Check the inputs and return the output's shape."""
    checks.check_device("linear", "x", x)
    checks.check_dtype("linear", "x", x, torch.float16, torch.bfloat16)
    if x.dim() < 1 or x.shape[-1] < _OCTET or x.shape[-1] % _OCTET:
        raise ValueError(
            f"linear: x has shape {tuple(x.shape)}, expected [..., in_features] with in_features a multiple of {_OCTET}"
        )
    checks.check_last_dim("linear", "x", x)
    rows = x.numel() // x.shape[-1]
    if rows > MOST_ROWS:
        raise ValueError(f"linear: x has {rows} rows, expected at most {MOST_ROWS}")
    checks.check_device("linear", "weight", weight, x.device)
    checks.check_dtype("linear", "weight", weight, x.dtype)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or (swiglu and weight.shape[0] % 2):
        expected = "[2 * out_features, in_features]" if swiglu else "[out_features, in_features]"
        raise ValueError(
            f"linear: weight has shape {tuple(weight.shape)}, expected {expected} with in_features {x.shape[-1]}"
        )
    checks.check_last_dim("linear", "weight", weight)
    features = weight.shape[0] // 2 if swiglu else weight.shape[0]
    shape = (*x.shape[:-1], features)
    if bias is not None:
        _check_like_x("bias", bias, x, (features,), "out_features of weight")
    if residual is not None:
        _check_like_x("residual", residual, x, shape, "rows of x, out_features of weight")
    if norm_weight is not None:
        _check_like_x("norm_weight", norm_weight, x, (x.shape[-1],), "in_features of x")
        if rows > MOST_NORM_ROWS or rows * x.shape[-1] * x.element_size() > MOST_NORM_BYTES:
            raise ValueError(
                f"linear: norm_weight is given with {rows} rows of {x.shape[-1]} in_features, expected at most "
                f"{MOST_NORM_ROWS} rows and {MOST_NORM_BYTES} bytes of x; for more call rms_norm first"
            )
        if not (math.isfinite(norm_eps) and norm_eps >= 0):
            raise ValueError(f"linear: norm_eps is {norm_eps}, expected a finite number of at least 0")
    return shape


def _check_aligned(name: str, tensor: Tensor, row_stride: int) -> None:
    """Check that rows start at multiples of 16 bytes: the kernel's loads have that size."""
    if tensor.data_ptr() % 16 or row_stride % _OCTET:
        raise ValueError(
            f"linear: {name} starts at {tensor.data_ptr():#x} with rows {row_stride} elements apart, expected multiples "
            f"of 16 bytes and of {_OCTET} elements; nothing is copied silently"
        )


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    swiglu: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
    out: Tensor,
    fixed_order: bool,
    squares: Tensor | None = None,
    following: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """``squares`` and ``following``, weight, rows and squares of the norm behind, are of ``normed_projection.py``."""
    if out.numel() == 0:
        return
    x_stride = _row_stride("x", x)
    weight_stride = weight.stride(0) if weight.shape[0] > 1 else weight.shape[1]
    _check_aligned("x", x, x_stride)
    _check_aligned("weight", weight, weight_stride)
    if norm_weight is not None:
        _check_aligned("norm_weight", norm_weight, _OCTET)
    extension().linear(
        checks.DTYPE_NUMBERS[x.dtype],
        x.device.index,
        torch.cuda.current_stream(x.device).cuda_stream,
        (x.data_ptr(), x_stride),
        (weight.data_ptr(), weight_stride),
        0 if bias is None else bias.data_ptr(),
        (0, 0) if residual is None else (residual.data_ptr(), _row_stride("residual", residual)),
        (out.data_ptr(), _row_stride("out", out)),
        0 if norm_weight is None else norm_weight.data_ptr(),
        norm_eps,
        0 if squares is None else squares.data_ptr(),
        (0, 0, 0) if following is None else tuple(tensor.data_ptr() for tensor in following),
        x.numel() // x.shape[-1],
        out.shape[-1],
        x.shape[-1],
        swiglu,
        fixed_order,
    )


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    swiglu: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
    fixed_order: bool = False,
) -> Tensor:
    shape = check(x, weight, bias, residual, swiglu, norm_weight, norm_eps)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    swiglu: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
    fixed_order: bool = False,
) -> Tensor:
    out = _linear_fake(x, weight, bias, residual, swiglu, norm_weight, norm_eps)
    launch(x, weight, bias, residual, swiglu, norm_weight, norm_eps, out, fixed_order)
    return out


def _linear_out_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    swiglu: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
    out: Tensor,
    fixed_order: bool = False,
) -> None:
    shape = check(x, weight, bias, residual, swiglu, norm_weight, norm_eps)
    _check_like_x("out", out, x, shape, "rows of x, out_features of weight")
    checks.check_distinct("linear", "out", out)


def _linear_out(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    swiglu: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
    out: Tensor,
    fixed_order: bool = False,
) -> None:
    _linear_out_fake(x, weight, bias, residual, swiglu, norm_weight, norm_eps, out)
    if out.numel() > 0 and out.data_ptr() == x.data_ptr():
        raise ValueError("linear: out and x are the same memory, expected two tensors")
    if residual is not None:
        checks.check_in_place("linear", "out", out, "residual", residual)
    launch(x, weight, bias, residual, swiglu, norm_weight, norm_eps, out, fixed_order)


_ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, bool swiglu, Tensor? norm_weight, float norm_eps"
_ORDER = "bool fixed_order=False"
_linear_op = register(f"linear({_ARGUMENTS}, {_ORDER}) -> Tensor", _linear, _linear_fake)
_linear_out_op = register(f"linear_out({_ARGUMENTS}, Tensor(a!) out, {_ORDER}) -> ()", _linear_out, _linear_out_fake)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    fixed_order: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply rows by a weight, ``x @ weight.T``, with what usually follows (or precedes) in the same pass.

    fp32 accumulation and one rounding to x's type; with a residual a second one, of the rounded product plus the
    residual. Up to 16 rows, and with ``fixed_order`` for any number, a row's bits depend on that row and the weight alone:
    K is split by the weight's shape, and the parts are added in a fixed order. Up to 128 rows, where reading the weight is
    what takes the time, this is the fast way; for more there is ``torch.nn.functional.linear``.

    Parameters
    ----------
    x : Tensor
        ``[..., in_features]``, float16 or bfloat16, on a CUDA device; in_features a multiple of 8,
        rows one stride apart and at multiples of 16 bytes.
    weight : Tensor
        ``[out_features, in_features]``, of x's type, rows at multiples of 16 bytes; with ``"swiglu"``
        ``[2 * out_features, in_features]``, gate rows first. From compute capability 9.0 on it is read before the
        kernels ahead on the stream have ended: no kernel of this package may write it just before this call, or just
        before the unbroken row of ``linear`` calls that ends with this one.
    bias : Tensor, optional
        ``[out_features]``, added before the rounding.
    residual : Tensor, optional
        ``[..., out_features]``, rows one stride apart.
    activation : {None, "swiglu"}
        ``silu(gate) * up``, on fp32 (Shazeer 2020, arXiv:2002.05202); without bias and residual.
    norm_weight : Tensor, optional
        ``[in_features]``: x is first normalised, bit by bit as :func:`rms_norm` does it. At most 8 rows and 64 KiB of x.
    norm_eps : float
        Added to the mean square.
    fixed_order : bool
        The reduction contract for more than 64 rows too (deterministic mode); between 65 and 128 it costs speed.
    out : Tensor, optional
        Where to write, ``[..., out_features]``, rows one stride apart; may be ``residual`` itself.

    Returns
    -------
    Tensor
        ``out``, or a new contiguous tensor.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, alignment, value or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    ImportError
        If the compiled module is missing.
    """
    checks.check_epilogue(bias, residual, activation)
    refuse_grad("linear", x=x, weight=weight, bias=bias, residual=residual, norm_weight=norm_weight, out=out)
    swiglu = activation is not None
    if out is None:
        result: Tensor = _linear_op(x, weight, bias, residual, swiglu, norm_weight, norm_eps, fixed_order)
        return result
    _linear_out_op(x, weight, bias, residual, swiglu, norm_weight, norm_eps, out, fixed_order)
    return out
