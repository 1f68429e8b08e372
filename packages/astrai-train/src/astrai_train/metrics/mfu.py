"""Model FLOPs utilisation: what the model's arithmetic needs over what the device could do.

Convention: a token costs 6 FLOPs for every weight of a matrix product (forward and backward; the output projection
counts, the embedding look-up does not), and ``6 * layers * heads * head_dim`` for every token of its document: half of
what PaLM counts (arXiv 2204.02311, appendix B), since a causal token sees half of the others on average. Recomputation
counts nothing, and windows are not looked at. A frozen weight has no gradient of its own and costs 4; of the experts
those count that a token goes through.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from astrai_core.config.model import ModelConfig
from astrai_core.model.lora import LowRankFactors
from astrai_core.model.moe import ExpertLinear
from astrai_core.model.transformer import CausalLM

CONVENTION = "6 N + 6 L H T FLOPs a token (causal attention counted half, by document; no recomputation)"
"""What the figure means, in one line."""

_PEAK_BF16 = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
"""Dense bf16 FLOPs per second with fp32 accumulation, from the vendor's data sheets; the first name that fits counts."""


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak in FLOPs per second, or None where it is not known (a CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_BF16.items() if part in name), None)


def _matrices(module: nn.Module, config: ModelConfig) -> list[tuple[Tensor, float]]:
    """The matrices that a module itself holds, and the share of each that a token goes through."""
    if isinstance(module, nn.Linear):
        return [(module.weight, 1.0)]
    if isinstance(module, LowRankFactors):
        return [(module.lora_A, 1.0), (module.lora_B, 1.0)]
    if isinstance(module, ExpertLinear):
        return [(module.weight, (config.num_experts_per_tok or 0) / module.weight.shape[0])]
    return []


class FlopsCounter:
    """Counts the FLOPs that training on a batch needs.

    Parameters
    ----------
    model
        Whose matrices and attention layers count.
    """

    def __init__(self, model: CausalLM) -> None:
        config = model.config
        used = [(weight, share) for module in model.modules() for weight, share in _matrices(module, config)]
        self.matrix_weights = int(sum(weight.numel() * share for weight, share in used))
        self.token_factor = sum((6 if weight.requires_grad else 4) * weight.numel() * share for weight, share in used)
        self.attention_factor = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim

    def of(self, document_lens: Sequence[int]) -> float:
        """Return the FLOPs of forward and backward over documents of these lengths in tokens."""
        tokens, pairs = sum(document_lens), sum(length * length for length in document_lens)
        return float(self.token_factor * tokens) + self.attention_factor * pairs
