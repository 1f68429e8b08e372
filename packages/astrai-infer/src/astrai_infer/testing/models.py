"""Models for tests: a tiny random one, and one whose next token is written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from astrai_core.attention.backend import AttentionBackend
from astrai_core.attention.metadata import KVCache
from astrai_core.auto import AutoModel
from astrai_core.config.model import ModelConfig
from astrai_core.model.transformer import CausalLM
from astrai_infer.testing.tokenizer import EOS_ID, VOCAB_SIZE


def tiny_config(**changes: Any) -> ModelConfig:
    """Return a 2-layer architecture over the byte vocabulary; `changes` are keys of config.json."""
    data = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": EOS_ID,
    }
    return ModelConfig.from_dict(data | changes)


@torch.no_grad()
def tiny_model(seed: int = 0, **changes: Any) -> CausalLM:
    """Return a random fp32 model whose greedy text wanders (large weights, so that few logits are near ties)."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModel.from_config(tiny_config(**changes), "float32", "cpu", generator).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8.0)
    return model


GPU_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "max_position_embeddings": 2048}
"""Of :func:`gpu_model`: head size 64."""


@torch.no_grad()
def gpu_model(seed: int = 0, dtype: str = "bfloat16", device: str = "cuda", **changes: Any) -> CausalLM:
    """Return a random model that the kernels take, whose greedy text wanders as that of :func:`tiny_model`."""
    generator = torch.Generator(device).manual_seed(seed)
    model = AutoModel.from_config(tiny_config(**GPU_SIZES | changes), dtype, device, generator).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4.0)
    return model


class ScriptedModel(torch.nn.Module):
    """Answers with ``script(token_id, position)``: the token that follows `token_id` at `position`. It has no weights
    and no keys or values, so a test scripts exactly what the engine sees.

    Attributes
    ----------
    n_fed
        Tokens fed so far, recomputed ones included.
    """

    def __init__(self, script: Callable[[int, int], int], **changes: Any) -> None:
        super().__init__()
        self.config = tiny_config(**changes)
        self.script = script
        self.windows: tuple[int | None, ...] = (None,)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.supports_graph = True
        self.n_fed = 0

    def pack_weights(self) -> None:
        """Do nothing: there are no weights."""

    def forward_paged(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cache: KVCache,
        backend: AttentionBackend,
        logit_rows: Tensor | None = None,
    ) -> Tensor:
        """Return logits ``[rows, vocab]``: 10 for the scripted token, 0 for the others."""
        self.n_fed += len(input_ids)
        rows = torch.arange(len(input_ids)) if logit_rows is None else logit_rows
        logits = torch.zeros(len(rows), self.config.vocab_size)
        for i, row in enumerate(rows.tolist()):
            logits[i, self.script(int(input_ids[row]), int(position_ids[row]))] = 10.0
        return logits
