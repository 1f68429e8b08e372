"""Experts: the balance of their load, where transformers' loss has its own, and products that read nothing back; parity of
logits is with the families."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from astrai_core import AutoModel, ModelConfig
from astrai_core.errors import ConfigError
from astrai_core.model import moe as moe_module
from astrai_core.model.moe import ExpertLinear, RouterStats, SparseMoE
from astrai_core.model.transformer import CausalLM

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "initializer_range": 0.3,
}


def stats(documents: list[int]) -> RouterStats:
    return RouterStats(torch.tensor(documents), max([d for d in documents if d < 90], default=-1) + 1)


def routed(found: RouterStats, probs: torch.Tensor, top_k: int = 2) -> torch.Tensor:
    """The balance of each document under the top k experts."""
    found.documents = found.documents.clamp(max=found.n_documents)
    found.record(0, probs, probs.topk(top_k, -1).indices)
    return found.balance()


VECTOR = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.1, 0.1], [0.3, 0.4, 0.2, 0.1]])


def test_the_vector_of_the_maths() -> None:
    """Row TR2; maths.md section 8: 1.125, and 1 where the experts share evenly."""
    assert routed(stats([0] * 4), VECTOR).tolist() == pytest.approx([1.125])
    even = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    assert routed(stats([0, 0]), even).tolist() == pytest.approx([1.0])


def test_entropy_and_the_busiest_expert() -> None:
    """maths.md section 8: 1.251961 nats and 1.5; an even load is 1, whatever the probabilities are."""
    found = stats([0] * 4)
    routed(found, VECTOR)
    assert found.spread()[:, 0].tolist() == pytest.approx([1.251961, 1.5], abs=1e-6)
    found = stats([0, 0])
    routed(found, torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]).requires_grad_())
    assert found.spread()[:, 0].tolist() == pytest.approx([math.log(2), 1.0]), "an expert without probability adds 0"
    assert not found.spread().requires_grad


def test_documents_count_for_themselves_and_padding_not_at_all() -> None:
    """Training rule 8: padding never enters the statistics."""
    other = VECTOR[:, [1, 0, 3, 2]] * 0.5 + 0.125
    padding = torch.tensor([[0.97, 0.01, 0.01, 0.01]] * 3)
    together, alone = stats([0] * 4 + [99] * 3 + [1] * 2), [stats([0] * 4), stats([0] * 2)]
    found = routed(together, torch.cat([VECTOR, padding, other[:2]]))
    expected = [routed(one, probs) for one, probs in zip(alone, (VECTOR, other[:2]), strict=True)]
    torch.testing.assert_close(found, torch.cat(expected))
    torch.testing.assert_close(together.spread(), torch.cat([one.spread() for one in alone], 1))


def test_transformers_loss_of_one_document_is_k_times_as_large() -> None:
    functions = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    logits = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)) * 2
    for top_k in (1, 2, 3):
        theirs = functions.load_balancing_loss_func((logits,), num_experts=4, top_k=top_k)
        ours = routed(stats([0] * 30), logits.softmax(-1), top_k)
        assert float(theirs) == pytest.approx(top_k * ours.item(), rel=1e-6)


def test_the_gradient_goes_through_the_probabilities_alone() -> None:
    """dL/dp = f / T for every token: 1.5, 1.5, 0.5, 0.5 over 4 tokens."""
    probs = VECTOR.clone().requires_grad_()
    routed(stats([0] * 4), probs).sum().backward()
    torch.testing.assert_close(probs.grad, torch.tensor([[1.5, 1.5, 0.5, 0.5]]).expand(4, 4) / 4)


def test_a_pass_fills_the_statistics_of_every_layer_with_experts() -> None:
    config = ModelConfig.from_dict(CONFIG | {"num_hidden_layers": 3, "mlp_only_layers": [1]})
    model = AutoModel.from_config(config, device="cpu", generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    found = RouterStats(torch.arange(2).repeat_interleave(7), 2)
    plain = model.hidden_states(ids)
    assert torch.equal(model.hidden_states(ids, router_stats=found), plain), "listening changes nothing"
    assert list(found.balances) == [0, 2]
    found.balance().sum().backward()
    gates = [layer.mlp.gate.weight for layer in model.model.layers if isinstance(layer.mlp, SparseMoE)]
    assert len(gates) == 2 and all(gate.grad.any() for gate in gates)


def test_only_chosen_experts_learn() -> None:
    config = ModelConfig.from_dict(CONFIG)
    moe = AutoModel.from_config(config, device="cpu", generator=torch.Generator().manual_seed(0)).model.layers[0].mlp
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(1))
    moe(x).square().sum().backward()
    chosen = moe.gate(x[0]).topk(2, -1).indices[0].tolist()
    for stack in (moe.experts.gate_up_proj.weight, moe.experts.down_proj.weight):
        assert [bool(grad.any()) for grad in stack.grad] == [expert in chosen for expert in range(4)]


ROUTINGS = {
    "random": [3, 1, 4, 1, 5],
    "none for some": [0, 6, 0, 0, 2],
    "all to the first": [9, 0, 0, 0, 0],
    "all to the last": [0, 0, 0, 0, 9],
    "one token": [0, 0, 1, 0, 0],
    "one each": [1, 1, 1, 1, 1],
}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
def test_shares_on_the_device_give_what_the_loop_gives(counts: list[int], dtype: torch.dtype) -> None:
    """Rule 9: the grouped product, whatever the shares."""
    linear = ExpertLinear(5, 16, {"gate_proj": 12, "up_proj": 12}).to(dtype)
    with torch.no_grad():
        linear.weight.normal_(generator=generator())
        x = torch.randn(sum(counts), 16, generator=generator()).to(dtype)
        torch.testing.assert_close(linear(x, ends_of(counts)), linear(x, counts))


@torch.no_grad()
@pytest.mark.parametrize("counts", [*ROUTINGS.values(), [40, 0, 7, 1, 30]], ids=[*ROUTINGS, "several pieces"])
def test_no_product_of_deterministic_mode_has_many_rows(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: torch chooses its kernel by the rows an expert; in deterministic mode they stay within one choice."""
    monkeypatch.setattr(moe_module, "GROUPED_ROWS", 3)
    linear = ExpertLinear(5, 16, {"down_proj": 24})
    linear.weight.normal_(generator=generator())
    x = torch.randn(sum(counts), 16, generator=generator())
    product, n_rows = torch._grouped_mm, []

    def recording(rows: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        n_rows.append(len(rows))
        return product(rows, weight, offs=offs)

    monkeypatch.setattr(torch, "_grouped_mm", recording)
    together = linear(x, ends_of(counts))
    assert n_rows == [len(x)]
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(linear(x, ends_of(counts)), together)
    finally:
        torch.use_deterministic_algorithms(False)
    assert sum(n_rows[1:]) == len(x) and max(n_rows[1:]) <= 15


def layer_of(**changes: Any) -> SparseMoE:
    """A layer with random weights, eight experts of which some get nothing."""
    config = ModelConfig.from_dict(CONFIG | {"num_experts": 8, "moe_intermediate_size": 16} | changes)
    layer = SparseMoE(config, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.3, generator=generator())
    return layer


SHARED = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24}


@torch.no_grad()
@pytest.mark.parametrize(
    "changes", [{"norm_topk_prob": True}, {"num_experts_per_tok": 1}, SHARED], ids=["qwen3", "one of 8", "qwen2"]
)
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
def test_a_layer_gives_the_same_on_both_roads(
    n_tokens: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(**changes)
    x = torch.randn(n_tokens, 16, generator=generator())
    expected = layer(x)
    monkeypatch.setattr(ExpertLinear, "can_group", True)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: pytest.fail("something is read back"))
    torch.testing.assert_close(layer(x), expected)


class WithoutData(TorchDispatchMode):
    """Refuses tensors that come from the host; reading back refuses itself where there are no data."""

    n_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_ops += 1
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.dim():
                assert arg.device.type == "meta", f"{func} reads a tensor on the host"
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("changes", [{"norm_topk_prob": True}, SHARED], ids=["qwen3", "qwen2"])
def test_a_pass_needs_no_data(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 9: no result decides a shape, nothing comes from the host and nothing goes there, as a capture wants it."""
    layer, x = layer_of(**changes).to("meta"), torch.empty(6, 16, device="meta")
    with WithoutData() as mode:
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            layer(x)
        monkeypatch.setattr(ExpertLinear, "can_group", True)
        # Without data the grouped product has the device's contract: bf16 alone.
        assert layer.to(torch.bfloat16)(x.to(torch.bfloat16)).shape == x.shape
    assert mode.n_ops > 20


@pytest.mark.parametrize(
    ("capability", "dtype", "changes", "can"),
    [
        ((9, 0), torch.bfloat16, {}, True),
        ((10, 0), torch.bfloat16, {}, True),
        ((8, 0), torch.bfloat16, {}, False),
        ((12, 0), torch.bfloat16, {}, False),
        ((9, 0), torch.float16, {}, False),
        ((9, 0), torch.bfloat16, {"moe_intermediate_size": 12}, False),
        ((8, 0), torch.float16, {"mlp_only_layers": [0, 1]}, True),
    ],
)
def test_a_model_says_whether_it_can_be_captured(
    capability: tuple[int, int],
    dtype: torch.dtype,
    changes: dict[str, Any],
    can: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where experts' shares are read back there are no graphs; layers without experts read nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with torch.device("meta"):
        model = CausalLM(ModelConfig.from_dict(CONFIG | {"moe_intermediate_size": 16} | changes))
    with FakeTensorMode():
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=dtype, device="cuda"))
    assert model.supports_graph is can


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok \(5\) is more than num_experts \(4\)"),
        ({"num_experts": 0}, "num_experts"),
        ({"model_type": "qwen3", "num_experts": 4}, "unknown field 'num_experts' for model_type 'qwen3'"),
        ({"shared_expert_intermediate_size": 8}, "unknown field 'shared_expert_intermediate_size'"),
    ],
)
def test_configs_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    dense = {key: value for key, value in CONFIG.items() if "exper" not in key and "moe" not in key}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict((dense if changes.get("model_type") else CONFIG) | changes)
