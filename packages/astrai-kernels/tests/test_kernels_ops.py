"""The torch side of the ops without a GPU: schemas, fake kernels, tracing."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from astrai_kernels import (
    add_rms_norm,
    apply_rotary,
    apply_rotary_,
    argmax,
    embedding,
    gated_activation,
    qkv_norm_rope_write,
    rms_norm,
    sample,
)

OPS = [
    "rms_norm",
    "rms_norm_out",
    "add_rms_norm",
    "add_rms_norm_out",
    "rotary_",
    "rotary_out",
    "qkv_norm_rope_write",
    "qkv_norm_rope_write_out",
    "gated_activation",
    "gated_activation_out",
    "embedding",
    "embedding_out",
    "argmax",
    "argmax_out",
    "sample",
    "sample_out",
]


def rotary_inputs(device: str) -> tuple[torch.Tensor, ...]:
    q, k = (torch.empty(6, heads, 64, dtype=torch.bfloat16, device=device) for heads in (4, 2))
    cos, sin = (torch.empty(32, 32, device=device) for _ in range(2))
    return q, k, cos, sin, torch.empty(6, dtype=torch.int32, device=device)


def op_arguments(name: str, device: str) -> tuple[object, ...]:
    x, r, out, residual_out = (torch.empty(6, 64, dtype=torch.bfloat16, device=device) for _ in range(4))
    w = torch.empty(64, dtype=torch.bfloat16, device=device)
    q, k, cos, sin, position_ids = rotary_inputs(device)
    tokens = torch.empty(6, dtype=torch.int64, device=device)
    pool = torch.empty(9, 2, 8, dtype=torch.bfloat16, device=device)
    qkv = (x, None, None, None, pool, pool.clone(), tokens, 4, 2, w[:8], None, 1e-6, False, None, None, True)
    ones = torch.empty(6, device=device)
    drawn = (x, ones, tokens, ones, None, tokens, tokens, None, None, None, None, None)
    return {
        "qkv_norm_rope_write": qkv,
        "qkv_norm_rope_write_out": (*qkv, torch.empty(6, 4, 8, dtype=torch.bfloat16, device=device)),
        "gated_activation": (x, "silu"),
        "gated_activation_out": (x, "gelu", torch.empty(6, 32, dtype=torch.bfloat16, device=device)),
        "embedding": (tokens, x),
        "embedding_out": (tokens, x, out),
        "argmax": (x,),
        "argmax_out": (x, tokens),
        "sample": drawn,
        "sample_out": (*drawn, tokens.clone()),
        "rms_norm": (x, w, 1e-6),
        "rms_norm_out": (x, w, 1e-6, out),
        "add_rms_norm": (x, r, w, 1e-6),
        "add_rms_norm_out": (x, r, w, 1e-6, out, residual_out),
        "rotary_": (q, k, cos, sin, position_ids, False),
        "rotary_out": (q, k, cos, sin, position_ids, True, q.clone(), k.clone()),
    }[name]


@pytest.mark.parametrize("name", OPS)
def test_opcheck_on_meta_tensors(name):
    """torch.library.opcheck: autograd registration, fake kernel and dynamic-shape tracing.

    Its schema test compares values, which meta tensors do not have; the GPU tests run all of opcheck.
    """
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.astrai, name).default, op_arguments(name, "meta"), test_utils=checks)


@pytest.mark.parametrize("name", OPS)
def test_no_autograd_kernel_is_registered(name):
    """Kernel rule: inference ops carry no autograd registration (it costs every call)."""
    for key in ("Autograd", "AutogradCUDA", "CompositeImplicitAutograd"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"astrai::{name}", key)


def test_fake_outputs_have_shape_dtype_and_device():
    """Fake kernels on fake CUDA tensors, which need no CUDA; a new output is contiguous even if x is not."""
    with FakeTensorMode():
        wide = torch.empty(4, 3, 128, dtype=torch.float16, device="cuda:0")
        w = torch.empty(64, dtype=torch.float16, device="cuda:0")
        x = torch.empty_strided((4, 3, 64), wide.stride(), dtype=torch.float16, device="cuda:0")
        for result in (rms_norm(x, w), *add_rms_norm(x, x, w)):
            assert (result.shape, result.dtype, result.device) == (x.shape, x.dtype, x.device)
            assert result.is_contiguous()
        q_out, k_out = apply_rotary(*rotary_inputs("cuda:0"))
        assert (q_out.shape, k_out.shape) == ((6, 4, 64), (6, 2, 64))


def test_fake_kernels_check_arguments():
    with FakeTensorMode(), pytest.raises(ValueError, match=r"weight has shape \(32,\)"):
        rms_norm(torch.empty(2, 64, device="cuda:0"), torch.empty(32, device="cuda:0"))


def test_ops_stay_whole_in_a_traced_graph():
    """make_fx with symbolic shapes keeps one node an op, so compilers see them as they are."""
    q, k, cos, sin, position_ids = rotary_inputs("meta")

    def step(x, residual, w, q, k, cos, sin, position_ids):
        x, residual = add_rms_norm(x, residual, w)
        apply_rotary_(q, k, cos, sin, position_ids)
        return rms_norm(x, w), residual, q

    x = torch.empty(6, 64, dtype=torch.bfloat16, device="meta")
    w = torch.empty(64, dtype=torch.bfloat16, device="meta")
    graph = make_fx(step, tracing_mode="symbolic")(x, x, w, q, k, cos, sin, position_ids).graph
    called = [str(node.target) for node in graph.nodes if str(node.target).startswith("astrai.")]
    assert called == ["astrai.add_rms_norm.default", "astrai.rotary_.default", "astrai.rms_norm.default"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_wrappers_compile_without_graph_breaks(dynamic):
    """Kernel rule: torch.compile(fullgraph=True) keeps the ops, through the checked wrappers, ``out=`` included."""
    q, k, cos, sin, position_ids = rotary_inputs("meta")

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def step(x, residual, w, out, q, k):
        x, residual = add_rms_norm(x, residual, w, 1e-5)
        rms_norm(x, w, out=out)
        apply_rotary_(q, k, cos, sin, position_ids)
        return apply_rotary(q, None, cos, sin, position_ids, interleaved=True)[0], residual

    x = torch.empty(6, 64, dtype=torch.bfloat16, device="meta")
    w = torch.empty(64, dtype=torch.bfloat16, device="meta")
    with torch.no_grad():
        turned, residual = step(x, x.clone(), w, torch.empty_like(x), q, k)
    assert turned.shape == q.shape
    assert residual.shape == x.shape


def test_fused_wrappers_compile_without_graph_breaks():
    """Kernel rule: a step of these ops, ``out=`` and writes to the pools included, is one graph."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(ids, table, pools, slots, ones):
        x = embedding(ids, table)
        q = qkv_norm_rope_write(x, None, None, None, *pools, slots, 4, 2)
        gated_activation(x, "gelu", out=q.flatten(1))
        greedy = argmax(x)
        return q, sample(x, ones, None, ones, None, ids, greedy)

    ids = torch.empty(6, dtype=torch.int64, device="meta")
    table, k, v = (torch.empty(shape, device="meta") for shape in ((50, 64), (9, 2, 8), (9, 2, 8)))
    with torch.no_grad():
        q, drawn = step(ids, table, (k, v), ids, torch.empty(6, device="meta"))
    assert (q.shape, drawn.shape, drawn.dtype) == ((6, 4, 8), (6,), torch.int64)
