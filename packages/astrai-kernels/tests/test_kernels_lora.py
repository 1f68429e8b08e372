"""LoRA's two halves without a GPU: argument checks, the torch side, the reference twin."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from astrai_kernels import lora_expand, lora_shrink, reference


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


X, A, IDS = meta(4, 64), meta(3, 16, 64), meta(4, dtype=torch.int64)
BASE, HIDDEN, B, SCALING = meta(4, 48), meta(4, 16, dtype=torch.float32), meta(3, 48, 16), meta(3, dtype=torch.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lora_shrink(torch.ones(4, 64).half(), A, IDS), ValueError, "x is on cpu, expected a CUDA device"),
        (lambda: lora_shrink(meta(4, 64, dtype=torch.float32), A, IDS), TypeError, "x has dtype torch.float32"),
        (
            lambda: lora_shrink(meta(4, 60), meta(3, 16, 60), IDS),
            ValueError,
            r"x has shape \(4, 60\), .* multiple of 8",
        ),
        (lambda: lora_shrink(meta(2, 2, 64), A, IDS), ValueError, r"x has shape \(2, 2, 64\), expected \[rows, in_fe"),
        (lambda: lora_shrink(X, meta(3, 16, 32), IDS), ValueError, r"a has shape \(3, 16, 32\), .* in_features 64"),
        (lambda: lora_shrink(X, meta(16, 64), IDS), ValueError, r"a has shape \(16, 64\), expected \[adapters, rank"),
        (lambda: lora_shrink(X, meta(3, 16, 64, dtype=torch.half), IDS), TypeError, "a has dtype torch.float16"),
        (lambda: lora_shrink(X, meta(3, 12, 64), IDS), ValueError, "a has rank 12, expected a multiple of 8 up to 64"),
        (lambda: lora_shrink(X, meta(3, 72, 64), IDS), ValueError, "a has rank 72, .* pad smaller ranks with zeros"),
        (
            lambda: lora_shrink(X, A, meta(5, dtype=torch.int64)),
            ValueError,
            r"adapter_ids has shape \(5,\), expected \(4",
        ),
        (lambda: lora_shrink(X, A, meta(4, dtype=torch.int16)), TypeError, "adapter_ids has dtype torch.int16"),
        (lambda: lora_shrink(X, A, IDS, out=meta(4, 16)), TypeError, "out has dtype torch.bfloat16, expected torch.fl"),
        (lambda: lora_shrink(X, A, IDS, out=meta(4, 8, dtype=torch.float32)), ValueError, r"out has shape \(4, 8\)"),
        (
            lambda: lora_shrink(X, A, IDS, out=meta(16, dtype=torch.float32).expand(4, 16)),
            ValueError,
            "out has strides .* overlap",
        ),
        (lambda: lora_expand(meta(4, 2, 48), HIDDEN, B, IDS, SCALING), ValueError, r"base has shape \(4, 2, 48\)"),
        (
            lambda: lora_expand(BASE, HIDDEN, meta(3, 40, 16), IDS, SCALING),
            ValueError,
            r"b has shape .* out_features 48",
        ),
        (lambda: lora_expand(BASE, meta(4, 16), B, IDS, SCALING), TypeError, "hidden has dtype torch.bfloat16"),
        (
            lambda: lora_expand(BASE, meta(4, 8, dtype=torch.float32), B, IDS, SCALING),
            ValueError,
            r"hidden has shape \(4, 8\), expected \(4, 16\)",
        ),
        (
            lambda: lora_expand(BASE, HIDDEN, B, IDS, SCALING[:2]),
            ValueError,
            r"scaling has shape \(2,\), expected \(3,",
        ),
        (lambda: lora_expand(BASE, HIDDEN, B, IDS, meta(3)), TypeError, "scaling has dtype torch.bfloat16"),
        (lambda: lora_expand(BASE, HIDDEN, B, IDS, SCALING, out=meta(4, 47)), ValueError, r"out has shape \(4, 47\)"),
        (
            lambda: lora_expand(meta(48, 4).t(), HIDDEN, B, IDS, SCALING),
            ValueError,
            "base has stride 4 in its last dim",
        ),
    ],
)
def test_arguments(call, error, message):
    """Kernel rule "Wrong device, dtype, shape, stride raises in Python", with the argument's name."""
    with pytest.raises(error, match=message):
        call()


def test_outputs():
    with FakeTensorMode():
        x, a, base, b = (torch.empty(t.shape, dtype=torch.float16, device="cuda:0") for t in (X, A, BASE, B))
        ids, scaling = torch.empty(4, dtype=torch.int32, device="cuda:0"), torch.empty(3, device="cuda:0")
        hidden = lora_shrink(x, a, ids)
        assert (hidden.shape, hidden.dtype, hidden.device) == ((4, 16), torch.float32, x.device)
        out = lora_expand(base, hidden, b, ids, scaling)
        assert (out.shape, out.dtype) == (base.shape, torch.float16)
        assert lora_expand(base, hidden, b, ids, scaling, out=base) is base


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("lora_shrink", (X, A, IDS)),
        ("lora_shrink_out", (X, A, IDS, HIDDEN)),
        ("lora_expand", (BASE, HIDDEN, B, IDS, SCALING)),
        ("lora_expand_out", (BASE, HIDDEN, B, IDS, SCALING, meta(4, 48))),
    ],
)
def test_opcheck_on_meta_tensors(name, arguments):
    """Its schema test compares values, which meta tensors do not have; the GPU tests run all of opcheck."""
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.astrai, name).default, arguments, test_utils=checks)


def test_compiles_without_graph_breaks():
    """Kernel rule: torch.compile(fullgraph=True) keeps the ops, in place over the projection too."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, a, ids, base, b, scaling):
        lora_expand(base, lora_shrink(x, a, ids), b, ids, scaling, out=base)
        return base

    with torch.no_grad():
        assert step(X, A, IDS, meta(4, 48), B, SCALING).shape == (4, 48)


def test_gradients_are_refused_not_lost():
    """Row K11."""
    a = meta(3, 16, 64).requires_grad_()
    with pytest.raises(RuntimeError, match="a requires a gradient, and this kernel has no backward"):
        lora_shrink(X, a, IDS)
    with torch.no_grad():
        lora_shrink(X, a, IDS)


def test_twin_is_the_formula_of_each_row():
    """y + scaling * B A x of the row's adapter (arXiv:2106.09685); y itself without one; NaN for one that is not there."""
    x, a, b = torch.randn(5, 64), torch.randn(3, 8, 64), torch.randn(3, 48, 8)
    base, scaling = torch.randn(5, 48), torch.rand(3)
    ids = torch.tensor([2, -1, 0, 3, 2])
    hidden = reference.lora_shrink(x, a, ids)
    got = reference.lora_expand(base, hidden, b, ids, scaling)
    for row in (0, 2, 4):
        i = int(ids[row])
        merged = scaling[i] * b[i] @ a[i]
        torch.testing.assert_close(got[row], base[row] + merged @ x[row], rtol=1e-4, atol=1e-4)
    assert torch.equal(got[1], base[1])
    assert not hidden[1].any()
    assert got[3].isnan().all()
    assert hidden[3].isnan().all()
