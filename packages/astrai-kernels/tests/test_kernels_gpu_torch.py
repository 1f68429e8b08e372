"""The ops inside torch on a GPU: streams, devices, graphs, torch.compile, opcheck."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import astrai_kernels
from astrai_kernels import add_rms_norm, apply_rotary, apply_rotary_, gated_activation, rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]


class Inputs:
    """Operands of every op, on one device."""

    def __init__(self, device: str = "cuda", tokens: int = 96) -> None:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).bfloat16()

        self.x, self.residual, self.w = randn(tokens, 2048), randn(tokens, 2048), randn(2048)
        self.q, self.k = randn(tokens, 8, 64), randn(tokens, 2, 64)
        angles = torch.rand(128, 32, device=device)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.position_ids = torch.randint(0, 128, (tokens,), device=device)


def layer(i: Inputs) -> tuple[Tensor, ...]:
    """Every op once, out of place and in place."""
    normed, residual = add_rms_norm(i.x, i.residual, i.w)
    q, k = apply_rotary(i.q, i.k, i.cos, i.sin, i.position_ids)
    turned = q.clone()
    apply_rotary_(turned, None, i.cos, i.sin, i.position_ids, interleaved=True)
    gated = gated_activation(i.x)
    return normed, residual, rms_norm(normed, i.w, out=torch.empty_like(normed)), q, k, turned, gated


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"output {index} differs"


def test_the_current_stream_is_used(fresh_seed):
    """Row K10: on a stream whose earlier work is slow, a launch on any other stream would read the old input."""
    inputs = Inputs()
    expected = layer(inputs)
    late = Inputs()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        for name, value in vars(inputs).items():
            getattr(late, name).copy_(value)
        got = layer(late)
    stream.synchronize()
    assert_same(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_second_gpu(fresh_seed):
    """Row K10: the device guard covers the call and nothing else."""
    inputs, here = Inputs("cuda:1"), Inputs("cuda:1")
    for name, value in vars(inputs).items():
        setattr(here, name, value.to("cuda:0"))
    with torch.cuda.device(0):
        got = layer(inputs)
        assert torch.cuda.current_device() == 0
        assert torch.empty(1, device="cuda").device.index == 0
        expected = layer(here)
    with torch.cuda.device(1):
        assert_same(tuple(t.to("cuda:1") for t in layer(here)), tuple(t.to("cuda:1") for t in expected))
        assert torch.cuda.current_device() == 1
    assert all(tensor.device.index == 1 for tensor in got)
    assert_same(tuple(tensor.to("cuda:0") for tensor in got), expected)


def test_cuda_graph_replays_on_new_inputs(fresh_seed):
    """No allocation of our own, no sync, no host read: the ops can be captured, and replay follows the buffers."""
    static, other = Inputs(), Inputs()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(static)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(static)
    for name, value in vars(other).items():
        getattr(static, name).copy_(value)
    for tensor in captured:
        tensor.fill_(torch.nan)
    graph.replay()
    assert_same(captured, layer(other))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_keeps_the_ops(fresh_seed, dynamic):
    """torch.compile(fullgraph=True) gives the eager bits: the ops are neither decomposed nor reordered."""

    def step(x, residual, w, q, k, cos, sin, position_ids):
        x, residual = add_rms_norm(x, residual, w)
        q, k = apply_rotary(q, k, cos, sin, position_ids)
        apply_rotary_(q, k, cos, sin, position_ids, interleaved=True)
        rms_norm(x, w, out=x)
        return x, residual, q, k

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for tokens in (96, 33):
        inputs = Inputs(tokens=tokens)
        operands = tuple(vars(inputs).values())
        with torch.no_grad():
            expected = step(*(tensor.clone() for tensor in operands))
            assert_same(compiled(*(tensor.clone() for tensor in operands)), expected)


def opcheck_cases() -> dict[str, Callable[[Inputs], tuple[object, ...]]]:
    def per_row(i: Inputs) -> tuple[Tensor, ...]:
        """temperature, top_k, top_p, min_p, seed, position, then the penalties, for the rows of i.x."""
        ones = torch.ones(len(i.x), device=i.x.device)
        counts = torch.zeros(i.x.shape, dtype=torch.int32, device=i.x.device)
        whole = ones.long()
        return (ones, whole * 50, ones * 0.9, ones * 0.01, whole, whole, ones, ones, ones * 2, counts, counts > 0)

    def fused(i: Inputs) -> tuple[object, ...]:
        """Arguments of qkv_norm_rope_write; i.x is 32 heads of 64."""
        pools = [torch.zeros(200, 4, 64, dtype=i.x.dtype, device=i.x.device) for _ in "kv"]
        slots = torch.arange(len(i.x), device=i.x.device)
        norms = (i.w[:64], i.w[64:128])
        return (i.x, i.position_ids, i.cos, i.sin, *pools, slots, 24, 4, *norms, 1e-6, False, None, None, False)

    return {
        "qkv_norm_rope_write": fused,
        "qkv_norm_rope_write_out": lambda i: (*fused(i), torch.empty(len(i.x), 24, 64, dtype=i.x.dtype, device="cuda")),
        "gated_activation": lambda i: (i.x, "silu"),
        "gated_activation_out": lambda i: (i.x, "gelu", torch.empty_like(i.x[:, :1024])),
        "embedding": lambda i: (i.position_ids % len(i.x), i.x),
        "embedding_out": lambda i: (i.position_ids % len(i.x), i.x, torch.empty_like(i.x)),
        "argmax": lambda i: (i.x,),
        "argmax_out": lambda i: (i.x, torch.empty(len(i.x), dtype=torch.int64, device="cuda")),
        "sample": lambda i: (i.x, *per_row(i)),
        "sample_out": lambda i: (i.x, *per_row(i), torch.empty(len(i.x), dtype=torch.int64, device="cuda")),
        "rms_norm": lambda i: (i.x, i.w, 1e-6),
        "rms_norm_out": lambda i: (i.x, i.w, 1e-6, torch.empty_like(i.x)),
        "add_rms_norm": lambda i: (i.x, i.residual, i.w, 1e-6),
        "add_rms_norm_out": lambda i: (i.x, i.residual, i.w, 1e-6, torch.empty_like(i.x), torch.empty_like(i.x)),
        "rotary_": lambda i: (i.q, i.k, i.cos, i.sin, i.position_ids, False),
        "rotary_out": lambda i: (
            *(i.q, i.k, i.cos, i.sin, i.position_ids, True),
            *(torch.empty_like(i.q), torch.empty_like(i.k)),
        ),
    }


@pytest.mark.parametrize("name", list(opcheck_cases()))
def test_opcheck(fresh_seed, name):
    """torch.library.opcheck passes for every op: schema, autograd registration, fake kernel, dynamic tracing."""
    for public in astrai_kernels.__all__:
        getattr(astrai_kernels, public)  # registers its ops
    torch.library.opcheck(getattr(torch.ops.astrai, name).default, opcheck_cases()[name](Inputs()))


def test_inference_mode(fresh_seed):
    inputs = Inputs()
    with torch.inference_mode():
        assert_same(layer(inputs), layer(inputs))
