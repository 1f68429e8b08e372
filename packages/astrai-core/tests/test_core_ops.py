"""The ops door: its twins against the formulas, when it takes a kernel, and the packed layout of a CPU's weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from astrai_core import AutoModel, ModelConfig, kernels, linear_ops, ops
from astrai_core.attention.rotary import Rope
from astrai_core.model.layers import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_before_the_weight(dtype):
    """Statistics in fp32; the normalised value takes x's dtype before the weight multiplies it, as LlamaRMSNorm does."""
    x, weight = torch.randn(3, 5, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    wide = x.float()
    expected = weight * (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0
    )
    normed, total = ops.add_rms_norm(x, x.flip(0), weight, 1e-5)
    assert torch.equal(total, x + x.flip(0))
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))
    assert ops.add_rms_norm(x, None, weight, 1e-5)[1] is x


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 33])
def test_packed_weights_give_the_same_product(rows):
    layer = Linear(48, 80, bias=True)
    x = torch.randn(rows, 48)
    expected = F.linear(x, layer.weight, layer.bias)
    layer.pack()
    assert layer.packed is not None
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


def test_a_changed_weight_is_never_answered_by_its_old_copy():
    layer = Linear(16, 16, bias=False)
    layer.pack()
    x = torch.randn(4, 16)
    layer(x).sum().backward()
    assert layer.weight.grad is not None, "gradients flow past the packed copy"
    with torch.no_grad():
        layer.weight.mul_(3.0)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight))
        layer.pack()
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight))


def test_only_fp32_on_a_cpu_is_packed():
    layer = Linear(16, 16, bias=False).bfloat16()
    layer.pack()
    assert layer.packed is None


@pytest.mark.parametrize("rotary_dim", [16, 12])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_by_their_angle(interleaved, rotary_dim):
    """Both layouts, whole and partial; the form for all tokens is made once."""
    angles = torch.outer(torch.arange(9.0), torch.rand(rotary_dim // 2))
    rope = Rope(angles.cos(), angles.sin(), torch.tensor([8, 0, 3]), interleaved)
    x = torch.randn(3, 2, 16)
    pairs = x[..., :rotary_dim].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    if not interleaved:
        pairs = pairs.transpose(-1, -2)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), angles[rope.position_ids])[:, None]
    )
    expected = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    torch.testing.assert_close(ops.rotary(x, rope), torch.cat((expected, x[..., rotary_dim:]), -1))
    assert rope.of_tokens() is rope.of_tokens()


@pytest.fixture
def taken(monkeypatch):
    """The names of the kernels that the door takes, on what pretends to be a CUDA device."""
    names = []

    def kernel(name, answer):
        return lambda *a, **b: (names.append(name), answer(*a, **b))[1]

    def linear(x, weight, *, bias, fixed_order):
        names.append("linear in fixed order" if fixed_order else "linear")
        return F.linear(x, weight, bias)

    modules = {
        "elementwise": SimpleNamespace(
            embedding=kernel("embedding", lambda ids, table: table[ids]),
            gated_activation=kernel("gated_activation", lambda x, kind: x[..., : x.shape[-1] // 2]),
        ),
        "projection": SimpleNamespace(linear=linear),
        "rotary": SimpleNamespace(apply_rotary=kernel("rotary", lambda q, k, *a, interleaved: (q, k))),
    }
    monkeypatch.setattr(kernels, "module", modules.__getitem__)
    monkeypatch.setattr(ops, "by_kernel", lambda x: not torch.is_grad_enabled())
    return names


def test_kernels_in_inference_and_twins_with_gradients(taken):
    """K11."""
    rope = Rope(torch.ones(4, 4), torch.zeros(4, 4), torch.tensor([1, 2]))

    def all_ops():
        ops.embedding(torch.tensor([1, 2]), torch.randn(4, 8))
        ops.swiglu(torch.randn(2, 16))
        ops.rotary(torch.randn(2, 1, 8), rope)
        linear_ops.linear(torch.randn(2, 16, dtype=torch.bfloat16), torch.randn(4, 16, dtype=torch.bfloat16))

    all_ops()
    assert taken == []
    with torch.no_grad():
        all_ops()
        assert taken == ["embedding", "gated_activation", "rotary", "linear"]
        ops.embedding(torch.tensor([[1, 2]]), torch.randn(4, 8))
        assert len(taken) == 4, "the kernel gathers for a list of tokens"


@torch.no_grad()
def test_linear_takes_the_kernel_where_it_can(taken):
    """Half precision, up to KERNEL_ROWS contiguous rows at multiples of 16 bytes; everything else is the library's."""
    x, weight = torch.randn(256, 64, dtype=torch.float16), torch.randn(33, 64, dtype=torch.float16)
    most = linear_ops.KERNEL_ROWS
    for ours in (x[:1], x[:most], x[3, None], x[:8].view(2, 4, 64)):
        linear_ops.linear(ours, weight)
    assert len(taken) == 4
    for other in (x[: most + 1], x[:4, :48], x[:4].float(), x.view(-1)[4 : 4 + 64][None]):
        linear_ops.linear(other, weight[:, : other.shape[1]].to(other.dtype).clone())
    linear_ops.linear(x[:4], torch.randn(64, 33, dtype=torch.float16).t())
    linear_ops.linear(x[:4, :60].clone(), weight[:, :60].clone())
    assert len(taken) == 4


@torch.no_grad()
def test_deterministic_mode_sends_every_row_to_the_kernel(taken):
    """The reduction contract: how many rows there are, and how they lie in memory, must not choose another product."""
    x, weight = torch.randn(256, 64, dtype=torch.float16), torch.randn(33, 48, dtype=torch.float16)
    torch.use_deterministic_algorithms(True)
    try:
        for ours in (x[:1, :48], x[:9, :48], x[:, :48], x[:, :48].view(2, 128, 48)):
            torch.testing.assert_close(linear_ops.linear(ours, weight), F.linear(ours, weight))
    finally:
        torch.use_deterministic_algorithms(False)
    assert taken == ["linear in fixed order"] * 4
    linear_ops.linear(x[: linear_ops.KERNEL_ROWS + 1, :48].contiguous(), weight)
    assert len(taken) == 4, "outside of it, more rows are the library's"


def test_the_model_compiles_whole():
    """Nothing in a pass over whole sequences breaks the graph that torch.compile traces, with gradients and without."""
    config = ModelConfig.from_dict(
        {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
        | {"model_type": "smollm3", "num_hidden_layers": 2, "num_attention_heads": 2, "no_rope_layer_interval": 2}
        | {"num_key_value_heads": 1, "pad_token_id": 0}
    )
    model = AutoModel.from_config(config, "float32", "cpu", torch.Generator().manual_seed(0))
    compiled, ids = torch.compile(model, fullgraph=True, backend="eager"), torch.arange(9)[None]
    assert torch.equal(compiled(ids).logits, model(ids).logits)
    with torch.no_grad():
        assert torch.equal(compiled(ids).logits, model(ids).logits)
