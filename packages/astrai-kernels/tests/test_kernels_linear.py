"""linear without a GPU: argument checks, the torch side, the reference twin."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from astrai_kernels import embedding_before_norm, linear, linear_after_norm, linear_before_norm, reference


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


X, W = meta(4, 64), meta(48, 64)
W64, N64, SQUARES = meta(64, 64), meta(64), meta(4, 4, dtype=torch.float32)
IDS = meta(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: linear(torch.ones(2, 64).half(), W), ValueError, "x is on cpu, expected a CUDA device"),
        (lambda: linear(X, torch.ones(48, 64).bfloat16()), ValueError, "weight is on cpu, expected meta"),
        (
            lambda: linear(meta(4, 64, dtype=torch.float32), W),
            TypeError,
            "x has dtype torch.float32, expected torch.fl",
        ),
        (lambda: linear(X, meta(48, 64, dtype=torch.half)), TypeError, "weight has dtype torch.float16"),
        (lambda: linear(meta(4, 60), meta(48, 60)), ValueError, r"x has shape \(4, 60\), .* a multiple of 8"),
        (lambda: linear(meta(4, 0), meta(48, 0)), ValueError, r"x has shape \(4, 0\)"),
        (lambda: linear(meta(64, 4).t(), W), ValueError, "x has stride 4 in its last dimension"),
        (lambda: linear(meta((1 << 28) + 1, 64), W), ValueError, "x has 268435457 rows, expected at most 268435456"),
        (lambda: linear(X, meta(48, 32)), ValueError, r"weight has shape \(48, 32\), .*in_features 64"),
        (lambda: linear(X, meta(64)), ValueError, r"weight has shape \(64,\)"),
        (lambda: linear(X, meta(64, 48).t()), ValueError, "weight has stride 48 in its last dimension"),
        (lambda: linear(X, meta(47, 64), activation="swiglu"), ValueError, r"expected \[2 \* out_features, in_fea"),
        (lambda: linear(X, W, activation="gelu"), ValueError, "activation is 'gelu', expected None or 'swiglu'"),
        (
            lambda: linear(X, W, bias=meta(24), activation="swiglu"),
            ValueError,
            "bias is given with activation 'swiglu'",
        ),
        (lambda: linear(X, W, residual=meta(4, 24), activation="swiglu"), ValueError, "residual is given with activ"),
        (lambda: linear(X, W, bias=meta(47)), ValueError, r"bias has shape \(47,\), expected \(48,\)"),
        (lambda: linear(X, W, residual=meta(1, 48)), ValueError, r"residual has shape \(1, 48\), expected \(4, 48\)"),
        (lambda: linear(X, W, residual=meta(4, 48, dtype=torch.half)), TypeError, "residual has dtype torch.float16"),
        (lambda: linear(X, W, norm_weight=meta(32)), ValueError, r"norm_weight has shape \(32,\), expected \(64,\)"),
        (lambda: linear(meta(9, 64), W, norm_weight=meta(64)), ValueError, "norm_weight is given with 9 rows of 64"),
        (
            lambda: linear(meta(8, 8192), meta(48, 8192), norm_weight=meta(8192)),
            ValueError,
            "at most 8 rows and 65536 bytes of x",
        ),
        (lambda: linear(X, W, norm_weight=meta(64), norm_eps=-1.0), ValueError, "norm_eps is -1.0"),
        (lambda: linear(X, W, out=meta(4, 47)), ValueError, r"out has shape \(4, 47\), expected \(4, 48\)"),
        (lambda: linear(X, W, out=meta(4, 48, dtype=torch.half)), TypeError, "out has dtype torch.float16"),
        (lambda: linear(X, W, out=meta(48).expand(4, 48)), ValueError, "out has strides .* overlap"),
        (
            lambda: linear_before_norm(meta(129, 64), W64, N64),
            ValueError,
            "x has 129 rows, expected at most 128, or with",
        ),
        (lambda: linear_before_norm(X, W, meta(48)), ValueError, "out_features of weight is 48, .* a multiple of 64"),
        (lambda: linear_before_norm(X, W64, meta(48)), ValueError, r"norm_weight has shape \(48,\), expected \(64,\)"),
        (
            lambda: linear_before_norm(X.half(), W64.half(), N64),
            TypeError,
            "x has dtype torch.float16, expected torch.bf",
        ),
        (lambda: linear_before_norm(X, W64, N64, residual=meta(4, 48)), ValueError, r"residual has shape \(4, 48\)"),
        (lambda: embedding_before_norm(IDS, W64.half(), N64), TypeError, "table has dtype torch.float16"),
        (
            lambda: embedding_before_norm(IDS, meta(9, 48), meta(48)),
            ValueError,
            "hidden of table is 48, .* multiple of 64",
        ),
        (
            lambda: embedding_before_norm(IDS, W64, meta(48)),
            ValueError,
            r"norm_weight has shape \(48,\), expected \(64,\)",
        ),
        (lambda: embedding_before_norm(IDS, W64, N64.half()), TypeError, "norm_weight has dtype torch.float16"),
        (
            lambda: embedding_before_norm(IDS[None], W64, N64),
            ValueError,
            r"ids has shape \(1, 3\), expected \[tokens\]",
        ),
        (lambda: linear_after_norm(X, meta(4, 4), W, eps=1e-6), TypeError, "squares has dtype torch.bfloat16"),
        (
            lambda: linear_after_norm(X, SQUARES[:3], W, eps=1e-6),
            ValueError,
            r"squares has shape \(3, 4\), expected \(4, 4",
        ),
        (lambda: linear_after_norm(X, SQUARES.t(), W, eps=1e-6), ValueError, "squares has strides .* contiguous"),
        (lambda: linear_after_norm(X, SQUARES, W, eps=-1.0), ValueError, "eps is -1.0"),
        (
            lambda: linear_after_norm(meta(4, 48), SQUARES, meta(64, 48), eps=1e-6),
            ValueError,
            "in_features is 48, expected a multiple of 64",
        ),
        (
            lambda: linear_after_norm(X, SQUARES, W, eps=1e-6, bias=meta(24), activation="swiglu"),
            ValueError,
            "bias is given with activation 'swiglu'",
        ),
    ],
)
def test_arguments(call, error, message):
    """Kernel rule "Wrong device, dtype, shape, stride raises in Python", with the argument's name."""
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("shape", [(64,), (4, 64), (2, 3, 64), (0, 64), (5, 200, 64)])
def test_outputs_have_the_leading_dimensions_of_x(shape):
    with FakeTensorMode():
        x, w = (torch.empty(s, dtype=torch.float16, device="cuda:0") for s in (shape, (48, 64)))
        for activation, features in ((None, 48), ("swiglu", 24)):
            y = linear(x, w, activation=activation)
            assert (y.shape, y.dtype, y.device) == ((*shape[:-1], features), x.dtype, x.device)
            assert y.is_contiguous()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("linear", (X, W, None, None, False, None, 1e-6)),
        ("linear", (X, W, None, None, True, meta(64), 1e-6)),
        ("linear", (meta(300, 64), W, None, None, False, None, 1e-6, True)),
        ("linear_out", (X, W, meta(48), meta(4, 48), False, None, 1e-6, meta(4, 48))),
        ("linear_before_norm", (X, W64, N64, None, meta(4, 64))),
        ("linear_after_norm", (X, SQUARES, W, meta(48), False, 1e-6)),
        ("embedding_before_norm", (IDS, W64, N64)),
        ("linear_before_norm", (meta(300, 64), W64, N64, None, meta(300, 64), True)),
        ("linear_after_norm", (meta(300, 64), meta(300, 4, dtype=torch.float), W, None, True, 1e-6, True)),
    ],
)
def test_opcheck_on_meta_tensors(name, arguments):
    """Its schema test compares values, which meta tensors do not have; the GPU tests run all of opcheck."""
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.astrai, name).default, arguments, test_utils=checks)


def test_compiles_without_graph_breaks():
    """Kernel rule: torch.compile(fullgraph=True) keeps the op, in place over the residual too."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, w, residual):
        linear(x, w, residual=residual, out=residual)
        return linear(x, w, activation="swiglu"), residual

    with torch.no_grad():
        y, residual = step(X, W, meta(4, 48))
    assert (y.shape, residual.shape) == ((4, 24), (4, 48))


def test_gradients_are_refused_not_lost():
    """Row K11."""
    w = meta(48, 64).requires_grad_()
    with pytest.raises(RuntimeError, match="weight requires a gradient, and this kernel has no backward"):
        linear(X, w)
    with torch.no_grad():
        linear(X, w)


def test_twin_is_torch():
    """The twin against the modules that models are made of."""
    x, residual = torch.randn(5, 64, dtype=torch.float64), torch.randn(5, 48, dtype=torch.float64)
    layer = torch.nn.Linear(64, 48, dtype=torch.float64)
    norm = torch.nn.RMSNorm(64, 1e-5, dtype=torch.float64)
    got = reference.linear(x, layer.weight, bias=layer.bias, residual=residual)
    torch.testing.assert_close(got, layer(x) + residual)
    gate, up = (x @ half.T for half in layer.weight.chunk(2))
    got = reference.linear(x, layer.weight, activation="swiglu")
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-6)
    got = reference.linear(x, layer.weight, norm_weight=norm.weight, norm_eps=1e-5)
    torch.testing.assert_close(got, norm(x) @ layer.weight.T, rtol=1e-5, atol=1e-5)


def test_twin_refuses_what_the_kernel_refuses():
    x, w = torch.randn(5, 64), torch.randn(48, 64)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        reference.linear(x, w, activation="relu")
    with pytest.raises(ValueError, match="bias is given with activation"):
        reference.linear(x, w, activation="swiglu", bias=torch.ones(24))
