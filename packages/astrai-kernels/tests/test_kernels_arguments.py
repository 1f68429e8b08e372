"""Argument checks: wrong device, dtype, shape, stride or value names the argument, its value and what is accepted.

They run on meta tensors (the fake kernels make the same checks) and on CPU tensors, so that no GPU is needed.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astrai_kernels import _checks, add_rms_norm, apply_rotary, apply_rotary_, rms_norm


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


W = meta(64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rms_norm(torch.ones(2, 64), torch.ones(64)), ValueError, "x is on cpu, expected a CUDA device"),
        (lambda: rms_norm(meta(2, 64), torch.ones(64).bfloat16()), ValueError, "weight is on cpu, expected meta"),
        (
            lambda: rms_norm(meta(2, 64, dtype=torch.float64), W),
            TypeError,
            r"x has dtype torch.float64, expected float",
        ),
        (lambda: rms_norm(meta(2, 64), meta(64, dtype=torch.float32)), TypeError, "weight has dtype torch.float32"),
        (lambda: rms_norm(meta(2, 64), meta(32)), ValueError, r"weight has shape \(32,\), expected \(64,\)"),
        (lambda: rms_norm(meta(2, 0), meta(0)), ValueError, r"x has shape \(2, 0\)"),
        (lambda: rms_norm(meta(64, 2).t(), W), ValueError, "x has stride 2 in its last dimension, expected 1"),
        (lambda: rms_norm(meta(2, 64), meta(64, 2)[:, 0]), ValueError, "weight has stride 2"),
        (lambda: rms_norm(meta(2, 64), W, -1e-6), ValueError, "eps is -1e-06, expected a finite number"),
        (lambda: rms_norm(meta(2, 64), W, math.nan), ValueError, "eps is nan"),
        (lambda: rms_norm(meta(2, 64), W, out=meta(3, 64)), ValueError, r"out has shape \(3, 64\), expected \(2, 64\)"),
        (lambda: rms_norm(meta(2, 64), W, out=meta(2, 64, dtype=torch.half)), TypeError, "out has dtype torch.float16"),
        (lambda: rms_norm(meta(2, 64), W, out=meta(64).expand(2, 64)), ValueError, "out has strides .* overlap"),
        (lambda: add_rms_norm(meta(2, 64), meta(1, 64), W), ValueError, r"residual has shape \(1, 64\)"),
        (lambda: add_rms_norm(meta(2, 64), meta(2, 64, dtype=torch.half), W), TypeError, "residual has dtype"),
        (
            lambda: add_rms_norm(meta(2, 64), meta(2, 64), W, out=(meta(2, 64), meta(2, 63))),
            ValueError,
            r"residual_out has shape \(2, 63\)",
        ),
    ],
)
def test_norm_arguments(call, error, message):
    """Kernel rule "Wrong device, dtype, shape, stride raises in Python"; nothing is copied silently."""
    with pytest.raises(error, match=message):
        call()


def rotary_arguments(**changes: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "q": meta(5, 4, 64),
        "k": meta(5, 2, 64),
        "cos": meta(128, 32, dtype=torch.float32),
        "sin": meta(128, 32, dtype=torch.float32),
        "position_ids": meta(5, dtype=torch.int64),
    }
    return {**arguments, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.ones(5, 4, 64)}, ValueError, "q is on cpu, expected a CUDA device"),
        ({"q": meta(5, 64)}, ValueError, r"q has shape \(5, 64\), expected \[tokens, heads, head_dim\]"),
        ({"q": meta(5, 4, 64, dtype=torch.int8)}, TypeError, "q has dtype torch.int8"),
        ({"q": meta(5, 4, 128)[..., ::2]}, ValueError, "q has stride 2 in its last dimension"),
        ({"k": meta(5, 2, 64, dtype=torch.half)}, TypeError, "k has dtype torch.float16, expected torch.bfloat16"),
        ({"k": meta(6, 2, 64)}, ValueError, r"k has shape \(6, 2, 64\), expected \(5, 2, 64\)"),
        ({"k": meta(5, 2, 32)}, ValueError, r"k has shape \(5, 2, 32\)"),
        ({"cos": meta(128, 32)}, TypeError, "cos has dtype torch.bfloat16, expected torch.float32"),
        ({"cos": meta(128, 33, dtype=torch.float32)}, ValueError, r"cos has shape \(128, 33\), .*head_dim \(64\)"),
        ({"cos": meta(0, 32, dtype=torch.float32)}, ValueError, r"cos has shape \(0, 32\)"),
        ({"sin": meta(64, 32, dtype=torch.float32)}, ValueError, r"sin has shape \(64, 32\), expected \(128, 32\)"),
        ({"sin": torch.ones(128, 32)}, ValueError, "sin is on cpu, expected meta"),
        ({"position_ids": meta(4, dtype=torch.int64)}, ValueError, r"position_ids has shape \(4,\), expected \(5,\)"),
        ({"position_ids": meta(5, dtype=torch.float32)}, TypeError, "position_ids has dtype torch.float32"),
        ({"out": (meta(5, 4, 64), None)}, ValueError, "k is given but k_out is None"),
        ({"out": (meta(5, 4, 32), meta(5, 2, 64))}, ValueError, r"q_out has shape \(5, 4, 32\)"),
        ({"out": (meta(5, 4, 64), meta(5, 1, 64).expand(5, 2, 64))}, ValueError, "k_out has strides .* overlap"),
    ],
)
def test_rotary_arguments(changes, error, message):
    """Kernel rule "Wrong device, dtype, shape, stride raises in Python"."""
    with pytest.raises(error, match=message):
        apply_rotary(**rotary_arguments(**changes))


def test_rotary_in_place_checks_too():
    with pytest.raises(ValueError, match=r"q has shape \(5, 64\)"):
        apply_rotary_(**rotary_arguments(q=meta(5, 64)))


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "apply_rotary", "apply_rotary_"])
def test_gradients_are_refused_not_lost(op):
    """Row K11: with gradients on, a call that autograd would have to record is refused by name."""
    x = meta(5, 4, 64, dtype=torch.float32).requires_grad_()
    w = meta(64, dtype=torch.float32)
    calls = {
        "rms_norm": lambda: rms_norm(x, w),
        "add_rms_norm": lambda: add_rms_norm(w.expand(5, 4, 64).contiguous(), x, w),
        "apply_rotary": lambda: apply_rotary(**rotary_arguments(q=x, k=None)),
        "apply_rotary_": lambda: apply_rotary_(**rotary_arguments(q=x, k=None)),
    }
    with pytest.raises(RuntimeError, match="requires a gradient, and this kernel has no backward"):
        calls[op]()
    with torch.no_grad():
        calls[op]()


@given(
    outer=st.integers(1, 4), inner=st.integers(1, 4), hidden=st.integers(1, 5), gaps=st.tuples(*[st.integers(0, 3)] * 2)
)
def test_row_strides_address_every_row(outer, inner, hidden, gaps):
    """The two strides the kernel gets lead to each row of a strided view (kernel coverage: non-contiguous views)."""
    base = torch.arange((outer + 1) * (inner + gaps[0]) * (hidden + gaps[1]))
    view = base.as_strided((outer, inner, hidden), ((inner + gaps[0]) * (hidden + gaps[1]), hidden + gaps[1], 1))
    rows, per_outer, [(outer_stride, inner_stride)] = _checks.row_strides("op", x=view)
    assert rows == outer * inner
    for row in range(rows):
        begin = row // per_outer * outer_stride + row % per_outer * inner_stride
        assert torch.equal(base[begin : begin + hidden], view.reshape(rows, hidden)[row])


def test_rows_that_need_three_strides_are_refused():
    view = torch.empty(4, 6, 8, 16)[:2, :3, :5, :7]
    with pytest.raises(ValueError, match=r"x has strides \(768, 128, 16, 1\).*expected views that collapse"):
        _checks.row_strides("rms_norm", x=view)


def test_output_over_its_input_must_have_its_strides():
    """A shifted or differently strided output at the input's address would overwrite rows before they are read."""
    memory = torch.empty(64)
    with pytest.raises(ValueError, match=r"out starts where x does but has strides \(16, 1\)"):
        _checks.check_in_place(
            "rms_norm", "out", memory.as_strided((2, 8), (16, 1)), "x", memory.as_strided((2, 8), (8, 1))
        )
    _checks.check_in_place("rms_norm", "out", memory[:16].view(2, 8), "x", memory.as_strided((2, 8), (8, 1)))
