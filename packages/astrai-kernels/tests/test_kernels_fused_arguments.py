"""Argument checks of qkv_norm_rope_write, gated_activation, embedding, argmax and sample, on meta tensors; no GPU."""

from __future__ import annotations

import math

import pytest
import torch

from astrai_kernels import argmax, embedding, gated_activation, qkv_norm_rope_write, sample

FP8 = torch.float8_e4m3fn


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int64)


def floats(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float32)


def qkv_arguments(**changes: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "qkv": meta(5, 8 * 64),
        "position_ids": ints(5),
        "cos": floats(128, 32),
        "sin": floats(128, 32),
        "k_buffer": meta(9, 2, 64),
        "v_buffer": meta(9, 2, 64),
        "out_cache_loc": ints(5),
        "n_heads": 4,
        "n_kv_heads": 2,
    }
    return {**arguments, **changes}


NARROW = {"k_buffer": meta(9, 2, 64, dtype=FP8), "v_buffer": meta(9, 2, 64, dtype=FP8)}
SCALES = {"k_scale": floats(9, 2), "v_scale": floats(9, 2)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qkv": torch.ones(5, 512)}, ValueError, "qkv is on cpu, expected a CUDA device"),
        ({"qkv": meta(5, 512, dtype=torch.int8)}, TypeError, "qkv has dtype torch.int8"),
        ({"qkv": meta(5, 510)}, ValueError, r"qkv has shape \(5, 510\), expected \[tokens, 8 \* head_dim\]"),
        ({"qkv": meta(5, 8 * 320)}, ValueError, "head_dim is 320 by qkv's shape, expected at most 256"),
        ({"qkv": meta(512, 5).t()}, ValueError, "qkv has stride 5 in its last dimension"),
        ({"n_heads": 0}, ValueError, "n_heads is 0, expected at least 1"),
        ({"n_kv_heads": -1}, ValueError, "n_kv_heads is -1"),
        ({"q_norm": meta(32)}, ValueError, r"q_norm has shape \(32,\), expected \(64,\)"),
        ({"k_norm": floats(64)}, TypeError, "k_norm has dtype torch.float32"),
        ({"eps": math.inf}, ValueError, "eps is inf"),
        ({"cos": None}, ValueError, "cos is None, expected position_ids, cos and sin together"),
        ({"position_ids": None}, ValueError, "position_ids is None"),
        ({"position_ids": ints(4)}, ValueError, r"position_ids has shape \(4,\)"),
        ({"cos": floats(128, 33)}, ValueError, r"cos has shape \(128, 33\), .*head_dim \(64\)"),
        ({"sin": floats(64, 32)}, ValueError, r"sin has shape \(64, 32\), expected \(128, 32\)"),
        ({"out_cache_loc": floats(5)}, TypeError, "out_cache_loc has dtype torch.float32"),
        ({"k_buffer": meta(9, 3, 64)}, ValueError, r"k_buffer has shape \(9, 3, 64\)"),
        ({"v_buffer": meta(8, 2, 64)}, ValueError, r"v_buffer has shape \(8, 2, 64\).*the same size for both"),
        ({"v_buffer": meta(9, 2, 64, dtype=torch.half)}, TypeError, "v_buffer has dtype torch.float16"),
        ({"k_buffer": meta(9, 2, 128)[..., ::2]}, ValueError, "k_buffer has stride 2"),
        (NARROW, ValueError, "k_buffer has dtype torch.float8_e4m3fn but k_scale and v_scale are None"),
        (SCALES, TypeError, "k_buffer has dtype torch.bfloat16, expected torch.float8_e4m3fn"),
        ({**NARROW, "k_scale": floats(9, 2)}, ValueError, "v_scale is None, expected both scales or none"),
        ({**NARROW, **SCALES, "v_scale": floats(9, 1)}, ValueError, r"v_scale has shape \(9, 1\)"),
        ({"out": meta(5, 2, 64)}, ValueError, r"out has shape \(5, 2, 64\), expected \(5, 4, 64\)"),
        ({"out": meta(5, 4, 64, dtype=torch.half)}, TypeError, "out has dtype torch.float16"),
        ({"out": meta(5, 1, 64).expand(5, 4, 64)}, ValueError, "out has strides .* overlap"),
    ],
)
def test_qkv_arguments(changes, error, message):
    """Kernel rule "Wrong device, dtype, shape, stride raises in Python"; nothing is copied silently."""
    with pytest.raises(error, match=message):
        qkv_norm_rope_write(**qkv_arguments(**changes))


@pytest.mark.parametrize("extra", [{}, {"cos": None, "sin": None, "position_ids": None}, {**NARROW, **SCALES}])
def test_qkv_result(extra):
    q = qkv_norm_rope_write(**qkv_arguments(q_norm=meta(64), **extra))
    assert (q.shape, q.dtype) == ((5, 4, 64), torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gated_activation(torch.ones(2, 4)), ValueError, "x is on cpu"),
        (lambda: gated_activation(meta(2, 4), "relu"), ValueError, "kind is 'relu', expected one of silu, gelu_tanh"),
        (lambda: gated_activation(meta(2, 5)), ValueError, r"x has shape \(2, 5\), expected \[\.\.\., 2 \* width\]"),
        (lambda: gated_activation(meta(2, 4, dtype=torch.int32)), TypeError, "x has dtype torch.int32"),
        (lambda: gated_activation(meta(4, 2).t()), ValueError, "x has stride 2"),
        (
            lambda: gated_activation(meta(2, 4), out=meta(2, 4)),
            ValueError,
            r"out has shape \(2, 4\), expected \(2, 2\)",
        ),
        (lambda: gated_activation(meta(2, 4), out=floats(2, 2)), TypeError, "out has dtype torch.float32"),
        (lambda: embedding(ints(3), torch.ones(4, 8)), ValueError, "table is on cpu"),
        (lambda: embedding(ints(3), meta(8)), ValueError, r"table has shape \(8,\), expected \[vocab, hidden\]"),
        (lambda: embedding(floats(3), meta(4, 8)), TypeError, "ids has dtype torch.float32"),
        (lambda: embedding(ints(3, 1), meta(4, 8)), ValueError, r"ids has shape \(3, 1\), expected \[tokens\]"),
        (lambda: embedding(ints(3), meta(4, 8), out=meta(3, 9)), ValueError, r"out has shape \(3, 9\)"),
        (lambda: argmax(torch.ones(2, 4)), ValueError, "logits is on cpu"),
        (lambda: argmax(meta(4)), ValueError, r"logits has shape \(4,\), expected \[rows, vocab\]"),
        (lambda: argmax(meta(1, 2**21 + 1)), ValueError, "vocab between 1 and 2097152"),
        (lambda: argmax(meta(2, 4), out=meta(2)), TypeError, "out has dtype torch.bfloat16, expected torch.int64"),
        (lambda: argmax(meta(2, 4), out=ints(1).expand(2)), ValueError, "out has strides .* overlap"),
    ],
)
def test_elementwise_and_argmax_arguments(call, error, message):
    """Kernel rule "Wrong device, dtype, shape, stride raises in Python"."""
    with pytest.raises(error, match=message):
        call()


def sample_arguments(**changes: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "logits": meta(3, 100),
        "temperature": floats(3),
        "top_k": ints(3),
        "top_p": floats(3, 1),
        "min_p": None,
        "seed": ints(3),
        "position": ints(3),
    }
    return {**arguments, **changes}


PENALTIES = (floats(3, 1), floats(3), floats(3), meta(3, 100, dtype=torch.int32), meta(3, 100, dtype=torch.bool))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"temperature": meta(3)}, TypeError, "temperature has dtype torch.bfloat16, expected torch.float32"),
        ({"temperature": floats(2)}, ValueError, r"temperature has shape \(2,\), expected \[rows\] or \[rows, 1\]"),
        ({"top_k": meta(3, dtype=torch.int32)}, TypeError, "top_k has dtype torch.int32"),
        ({"top_p": floats(1, 3)}, ValueError, r"top_p has shape \(1, 3\)"),
        ({"seed": floats(3)}, TypeError, "seed has dtype torch.float32"),
        ({"position": ints(4)}, ValueError, r"position has shape \(4,\)"),
        ({"penalties": (*PENALTIES[:4], None)}, ValueError, "seen is None, expected all of presence"),
        ({"penalties": (*PENALTIES[:4], meta(3, 99, dtype=torch.bool))}, ValueError, r"seen has shape \(3, 99\)"),
        ({"penalties": (*PENALTIES[:3], ints(3, 100), PENALTIES[4])}, TypeError, "counts has dtype torch.int64"),
        ({"out": ints(4)}, ValueError, r"out has shape \(4,\)"),
    ],
)
def test_sample_arguments(changes, error, message):
    """Kernel rule "Wrong device, dtype, shape, stride raises in Python"."""
    with pytest.raises(error, match=message):
        sample(**sample_arguments(**changes))


@pytest.mark.parametrize("penalties", [None, PENALTIES])
def test_sample_result(penalties):
    ids = sample(**sample_arguments(penalties=penalties))
    assert (ids.shape, ids.dtype) == ((3,), torch.int64)
    assert argmax(meta(3, 100)).shape == (3,)


@pytest.mark.parametrize("op", ["qkv_norm_rope_write", "gated_activation", "embedding", "argmax", "sample"])
def test_gradients_are_refused_not_lost(op):
    """Row K11: with gradients on, a call that autograd would have to record is refused by name."""
    x = meta(5, 512).requires_grad_()
    calls = {
        "qkv_norm_rope_write": lambda: qkv_norm_rope_write(**qkv_arguments(qkv=x)),
        "gated_activation": lambda: gated_activation(x),
        "embedding": lambda: embedding(ints(3), x),
        "argmax": lambda: argmax(x),
        "sample": lambda: sample(x, *(f(5) for f in (floats, ints, floats, floats, ints, ints))),
    }
    with pytest.raises(RuntimeError, match=f"astrai_kernels.{op}: .* requires a gradient"):
        calls[op]()
    with torch.no_grad():
        calls[op]()
