"""Experts: the balance of their load, where transformers' loss has its own; parity of logits is with the families."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from astrai_core import AutoModel, ModelConfig
from astrai_core.errors import ConfigError
from astrai_core.model.moe import RouterStats, SparseMoE

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


def test_documents_count_for_themselves_and_padding_not_at_all() -> None:
    """Training rule 8: padding never enters the statistics."""
    other = VECTOR[:, [1, 0, 3, 2]] * 0.5 + 0.125
    padding = torch.tensor([[0.97, 0.01, 0.01, 0.01]] * 3)
    found = routed(stats([0] * 4 + [99] * 3 + [1] * 2), torch.cat([VECTOR, padding, other[:2]]))
    alone = [routed(stats([0] * 4), VECTOR), routed(stats([0] * 2), other[:2])]
    torch.testing.assert_close(found, torch.cat(alone))


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
