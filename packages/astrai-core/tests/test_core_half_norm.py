"""A norm shared out between the projections around it (G2), with kernels that are stood in for by torch on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from astrai_core import kernels, linear_ops, ops
from astrai_core.attention.torch_native import TorchNativeBackend
from astrai_core.auto import AutoModel
from astrai_core.config.model import ModelConfig
from astrai_core.model.layers import Linear


def before(x, weight, norm_weight, *, bias=None, residual=None, fixed_order=False):
    assert fixed_order == torch.are_deterministic_algorithms_enabled()
    out = F.linear(x, weight, bias) + residual
    return out, out * norm_weight, out.float().square().view(len(x), -1, 16).sum(-1)


def embedded(ids, table, norm_weight):
    out = F.embedding(ids, table)
    return out, out * norm_weight, out.float().square().view(len(out), -1, 16).sum(-1)


def after(weighed, squares, weight, *, eps, bias=None, activation=None, fixed_order=False):
    assert fixed_order == torch.are_deterministic_algorithms_enabled()
    scale = torch.rsqrt(squares.sum(-1, keepdim=True) / weighed.shape[-1] + eps)
    product = F.linear((weighed.float() * scale).to(weighed.dtype), weight, bias)
    return product if activation is None else ops.swiglu(product)


class Same(torch.nn.Module):
    """An adapter that adds nothing."""

    def forward(self, x, output):
        return output


@pytest.fixture
def calls(monkeypatch):
    """Few rows take the road of the kernels; returns what the stand-ins were given."""
    seen = []
    halves = SimpleNamespace(
        embedding_before_norm=lambda *a: (seen.append(("before", a[2])), embedded(*a))[1],
        linear_before_norm=lambda *a, **b: (seen.append(("before", a[2])), before(*a, **b))[1],
        linear_after_norm=lambda *a, **b: (seen.append(("after", a[2])), after(*a, **b))[1],
    )
    monkeypatch.setattr(kernels, "module", {"normed_projection": halves}.__getitem__)
    monkeypatch.setattr(linear_ops, "can_fuse", lambda x, weight: True)
    return seen


def test_a_model_gives_the_same_logits(served, calls, monkeypatch):
    """Every norm of a hidden state is in halves, each with its own weight and the projection that reads it."""
    found = served(TorchNativeBackend(), dtype=torch.bfloat16, page_size=4)
    kinds = [kind for kind, _ in calls]
    assert kinds, "the road was taken"
    assert kinds == ["before", "after"] * (len(kinds) // 2), "what one began the next ended"
    n_steps = len(kinds) // 14  # two norms in each of three layers, and the final one
    norms = {id(tensor) for kind, tensor in calls if kind == "before"}
    assert len(kinds) == 14 * n_steps and len(norms) == 7
    monkeypatch.setattr(linear_ops, "HALVED_ROWS", range(0))
    expected = served(TorchNativeBackend(), dtype=torch.bfloat16, page_size=4)
    assert len(calls) == len(kinds)
    for mine, other in zip(found, expected, strict=True):
        tolerance = 6 * torch.finfo(torch.bfloat16).eps * float(other.abs().max())
        torch.testing.assert_close(mine.float(), other.float(), atol=tolerance, rtol=0)


@torch.no_grad()
def test_the_final_norm_ends_in_the_rows_whose_logits_are_wanted(calls, step_pool):
    """A row's bits do not depend on which others are wanted (G2); an adapter reads what a fused projection does not keep."""
    shape = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = ModelConfig.from_dict({"model_type": "llama", "num_attention_heads": 2} | shape)
    model = AutoModel.from_config(config, "bfloat16", "cpu", torch.Generator().manual_seed(0)).eval()

    def logits(logit_rows=None):
        pool = step_pool([None], config.num_key_value_heads, config.head_dim, 2, 8, 4, dtype=torch.bfloat16)
        ids, positions = torch.arange(5), torch.tensor([0, 1, 2, 0, 1])
        return model.forward_paged(ids, positions, pool.step({0: 3, 1: 2}), TorchNativeBackend(), logit_rows)

    wanted = torch.tensor([2, 4])
    some, every = logits(wanted), logits()
    assert [kind for kind, _ in calls] == ["before", "after"] * 6 and calls[-1][1] is model.lm_head.weight
    assert torch.equal(some, every[wanted])
    model.lm_head.adapter = Same()
    calls.clear()
    torch.testing.assert_close(logits(wanted), some, atol=0.02, rtol=0.02)
    assert [kind for kind, _ in calls] == ["before", "after"] * 2
    model.model.layers[0].self_attn.o_proj.adapter = Same()
    calls.clear()
    torch.testing.assert_close(logits(wanted), some, atol=0.02, rtol=0.02)
    assert calls == [], "nor does the embedding begin what nobody ends"


@torch.no_grad()
def test_where_a_norm_is_not_begun(calls):
    """Other types, widths that the kernel does not know, and many rows; but in deterministic mode their number does not
    matter, since a row must get the bits that it gets alone (G2)."""
    layer = Linear(32, 64, bias=False).bfloat16()

    def begun(rows, layer=layer, norm_dtype=torch.bfloat16):
        x = torch.randn(rows, layer.in_features, dtype=layer.weight.dtype)
        stream = torch.randn(rows, layer.out_features, dtype=x.dtype)
        norm = torch.nn.RMSNorm(layer.out_features, dtype=norm_dtype)
        out, half = layer.add_to(stream, x, norm)
        torch.testing.assert_close(out, F.linear(x, layer.weight) + stream)
        return half is not None

    assert begun(1) and begun(128)
    assert not begun(129)
    assert not begun(2, norm_dtype=torch.float32)
    assert not begun(2, layer=Linear(32, 64, bias=False).half())
    assert not begun(2, layer=Linear(32, 72, bias=False).bfloat16())
    torch.use_deterministic_algorithms(True)
    try:
        assert begun(1) and begun(128) and begun(129) and begun(3000)
        assert not begun(2, norm_dtype=torch.float32)
        assert not begun(2, layer=Linear(32, 64, bias=False).half())
    finally:
        torch.use_deterministic_algorithms(False)
    assert layer.add_to(torch.zeros(2, 64).bfloat16(), torch.zeros(2, 32).bfloat16(), None)[1] is None
