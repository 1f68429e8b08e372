"""Products in slices that the next norm adds up: when there are some, and that a model is the same with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from astrai_core import AutoModel, ModelConfig, kernels, ops, partial_sums
from astrai_core.attention.torch_native import TorchNativeBackend
from astrai_core.model.layers import Linear

BF16 = torch.bfloat16


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What pretends to be a CUDA device for products in slices alone; the shapes that their norms get."""
    reference = pytest.importorskip("astrai_kernels.reference")
    seen: list[tuple[int, ...]] = []
    batched = torch.bmm

    def bmm(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        # The CPU has no product of this kind; its shape-only kernel checks the arguments.
        meta = batched(left.to("meta"), right.to("meta"), out_dtype=out_dtype)
        result = batched(left.float(), right.float())
        assert (meta.shape, meta.dtype) == (result.shape, result.dtype)
        return result

    def norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float, *, overlap: bool) -> tuple[Tensor, Tensor]:
        assert overlap is ops.OVERLAP
        seen.append(tuple(parts.shape))
        return reference.add_rms_norm_partials(parts, residual, weight, eps)

    monkeypatch.setattr(
        partial_sums, "ops", SimpleNamespace(_by_kernel=lambda x: not torch.is_grad_enabled(), KERNEL_ROWS=64)
    )
    monkeypatch.setattr(kernels, "module", {"partial_norm": SimpleNamespace(add_rms_norm_partials=norm)}.__getitem__)
    monkeypatch.setattr(torch, "bmm", bmm)
    return seen


def test_the_stand_in_takes_what_the_kernel_takes() -> None:
    """What core passes to a stand-in, the kernel's own argument checks accept."""
    module = pytest.importorskip("astrai_kernels.partial_norm")
    parts = torch.empty(4, 65, 1536, device="meta")
    residual, weight = (torch.empty(*shape, 1536, dtype=BF16, device="meta") for shape in ((65,), ()))
    normed, total = module.add_rms_norm_partials(parts, residual, weight, 1e-5, overlap=True)
    assert normed.shape == total.shape == residual.shape


@pytest.mark.parametrize(
    ("out_features", "in_features", "slices"),
    [
        (1536, 6912, 4),
        (2048, 8192, 4),
        (1024, 3072, 4),
        (4096, 14336, 2),
        (8192, 28672, 1),
        (1024, 1024, 1),
        (64, 6148, 1),
    ],
)
def test_slices_follow_from_the_weight(out_features: int, in_features: int, slices: int) -> None:
    """Deep and narrow products are cut: each slice deep enough, all tiles at once on a card, parts of whole 16 bytes."""
    assert partial_sums.slices_of(out_features, in_features) == slices


@torch.no_grad()
def test_which_products_come_in_slices(shapes: list[tuple[int, ...]]) -> None:
    x, weight = torch.randn(129, 3072, dtype=BF16), torch.randn(64, 3072, dtype=BF16) * 3072**-0.5
    for rows in (65, 128):
        product = partial_sums.partial_sums(x[:rows], weight)
        assert product is not None
        assert product.parts.shape == (4, rows, 64)
        assert product.parts.dtype == torch.float32
        torch.testing.assert_close(product.parts.sum(0), x[:rows].float() @ weight.float().T)
    few, many, wide = x[:64], x, x[:80].float()
    for left, right in (
        *((few, weight), (many, weight), (wide, weight.float()), (wide, weight), (x[:80], weight[:60])),
        *((x[:80, :1024].contiguous(), weight[:, :1024].contiguous()), (x[:80, :3064], weight[:, :3064])),
        *((x[:80], weight.T.contiguous().T), (x[:80].view(2, 40, -1), weight)),
    ):
        assert partial_sums.partial_sums(left, right) is None, (left.shape, left.dtype, right.shape)
    torch.use_deterministic_algorithms(True)
    try:
        assert partial_sums.partial_sums(x[:80], weight) is None, "a row's bits must depend on that row alone"
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.enable_grad():
        assert partial_sums.partial_sums(x[:80], weight) is None, "K11"


@torch.no_grad()
def test_the_slices_are_views(shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither x nor the weight is copied: a batched product reads them where they lie."""
    given: list[Tensor] = []
    monkeypatch.setattr(torch, "bmm", lambda left, right, out_dtype: given.extend((left, right)))
    x, weight = torch.randn(80, 3072, dtype=BF16), torch.randn(64, 3072, dtype=BF16)
    partial_sums.partial_sums(x, weight)
    left, right = given
    assert (left.shape, left.stride(), left.data_ptr()) == ((4, 80, 768), (768, 3072, 1), x.data_ptr())
    assert (right.shape, right.stride(), right.data_ptr()) == ((4, 768, 64), (768, 1, 3072), weight.data_ptr())


class Plus(nn.Module):
    """An adapter that adds one."""

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        return output + 1


@torch.no_grad()
def test_a_bias_or_an_adapter_wants_the_whole_product(shapes: list[tuple[int, ...]]) -> None:
    x = torch.randn(80, 3072, dtype=BF16)
    plain, biased = (Linear(3072, 64, bias=bias).bfloat16() for bias in (False, True))
    assert isinstance(plain.unsummed(x), partial_sums.PartialSums)
    assert torch.equal(biased.unsummed(x), F.linear(x, biased.weight, biased.bias))
    plain.adapter = Plus()
    assert torch.equal(plain.unsummed(x), F.linear(x, plain.weight) + 1)


@torch.no_grad()
@pytest.mark.parametrize("experts", [False, True])
def test_a_step_is_the_same_with_sums_in_the_norms(
    experts: bool,
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    step_pool: Callable[..., Any],
) -> None:
    """A step of 100 tokens: every dense layer's last product is added up by the norm behind it, the final one included."""
    monkeypatch.setattr(partial_sums, "SLICE_DEPTH", 24)
    shape = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    mixed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": [0, 2]}
    family = {"model_type": "qwen3_moe", "head_dim": 64} | mixed if experts else {"model_type": "llama"}
    config = ModelConfig.from_dict(shape | heads | family)
    model = AutoModel.from_config(config, "bfloat16", "cpu", torch.Generator().manual_seed(0)).eval()
    positions = torch.cat((torch.arange(60), torch.arange(40)))
    ids = torch.randint(96, (100,), generator=torch.Generator().manual_seed(1))

    def run() -> Tensor:
        cache = step_pool([None] * 3, 1, 64, 2, 64, 4, dtype=BF16).step({0: 60, 1: 40})
        return model.forward_paged(ids, positions, cache, TorchNativeBackend()).last_hidden_state

    with_sums = run()
    assert shapes == [(4, 100, 128)] * (2 if experts else 3)
    monkeypatch.setattr(partial_sums, "PARTIAL_ROWS", 0)
    plain = run()
    assert len(shapes) == (2 if experts else 3), "switched off"
    torch.testing.assert_close(with_sums, plain, atol=0.06, rtol=0.06)
    assert F.cosine_similarity(with_sums.float(), plain.float(), dim=-1).min() > 0.9995
