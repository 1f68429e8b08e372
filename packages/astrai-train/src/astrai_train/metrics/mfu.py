"""Model FLOPs utilisation: what the model's arithmetic needs over what the device could do.

Convention (PaLM, arXiv 2204.02311, appendix B): a token costs 6 FLOPs for every weight of a matrix product (forward
and backward; the output projection counts, the embedding look-up does not) and ``12 * layers * heads * head_dim`` for
every key of its document, as if attention were not causal. Recomputation counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from astrai_core.model.transformer import CausalLM

CONVENTION = "6 N + 12 L H T FLOPs a token (PaLM, appendix B; whole documents, not causal halves; no recomputation)"
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


class FlopsCounter:
    """Counts the FLOPs that training on a batch needs.

    Parameters
    ----------
    model
        Whose matrices and attention layers count.
    """

    def __init__(self, model: CausalLM) -> None:
        config = model.config
        self.matrix_weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        self.attention_factor = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim

    def of(self, document_lens: Sequence[int]) -> float:
        """Return the FLOPs of forward and backward over documents of these lengths in tokens."""
        tokens, pairs = sum(document_lens), sum(length * length for length in document_lens)
        return 6.0 * self.matrix_weights * tokens + self.attention_factor * pairs
