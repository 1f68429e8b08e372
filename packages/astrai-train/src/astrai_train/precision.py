"""The numbers that losses are computed in, and the kernels that compute them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from astrai_core.errors import ConfigError
from astrai_core.model.documents import varlen_unavailable
from astrai_train.compilation import compile_training
from astrai_train.config import TrainConfig
from astrai_train.float8 import compute_in_float8
from astrai_train.recompute import recompute_activations

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM
    from astrai_train.strategy.base import BaseStrategy

_BY_NAME = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which losses are computed: bf16 products over fp32 weights, or nothing."""
    if config.precision.dtype == "bf16_mixed":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def attention(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a run computes attention by the recipe's kernels.

    It holds for the backward pass too, in which a checkpointed block must compute by the same kernel as before.
    """
    kernels = attention_kernels(config, device)
    return nullcontext() if kernels is None else sdpa_kernel(kernels, set_priority=True)


def attention_kernels(config: TrainConfig, device: torch.device) -> list[SDPBackend] | None:
    """Return what may compute the attention of rows, the best first; None leaves it to torch.

    cuDNN leads on Hopper (forward and backward 291 to 540 TFLOP/s against flash's 200 to 320), but it makes a plan for
    every new shape and its backward pass is not deterministic.
    """
    name = config.precision.attention
    if name != "auto":
        return [_BY_NAME[name]]
    if device.type != "cuda":
        return None
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    one_shape = config.data.packing != "none"
    return [SDPBackend.CUDNN_ATTENTION, *others] if one_shape and not config.precision.deterministic else others


def set_up_kernels(config: TrainConfig, model: CausalLM, strategy: BaseStrategy) -> None:
    """Choose the attention of packed rows, and set up float8, recomputation and compilation; before the model is sharded.

    Raises
    ------
    ConfigError
        If the attention kernel asked for by name or float8 cannot run here, or a module to recompute is not there.
    """
    precision, device = config.precision, model.device
    name = precision.attention
    dtype = torch.float32 if precision.dtype == "fp32" else torch.bfloat16
    if name == "cudnn" and (device.type != "cuda" or dtype == torch.float32 or precision.deterministic):
        raise ConfigError(
            "field 'precision.attention': 'cudnn' needs a CUDA device, bf16 and deterministic: false; choose 'auto'"
        )
    if name == "flash" and device.type == "cuda":
        reason = varlen_unavailable(device, dtype, model.config.head_dim, model.config.attention_dropout)
        if reason is not None:
            raise ConfigError(f"field 'precision.attention': 'flash' cannot run here: {reason}; or choose 'auto'")
        model.document_kernel = "varlen"
    elif name != "auto":
        model.document_kernel = "one_by_one"
    if precision.fp8:
        compute_in_float8(model)
    recompute_activations(
        model,
        precision.activation_checkpointing,
        modules=precision.gradient_checkpointing_modules,
        every=precision.checkpointing_every,
    )
    compile_training(model, strategy, precision.compile)
