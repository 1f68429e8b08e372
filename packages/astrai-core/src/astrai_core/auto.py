"""``AutoModel`` and ``AutoTokenizer``: from a name or path to a model or tokenizer in one call."""

from __future__ import annotations

from pathlib import Path

import torch

from astrai_core.checkpoint.hf_adapter import load_tensors
from astrai_core.checkpoint.source import ModelSource, open_source
from astrai_core.config.model import ModelConfig
from astrai_core.errors import BackendError, ConfigError
from astrai_core.model.transformer import CausalLM, ModelFactory
from astrai_core.tokenizer.tokenizer import Tokenizer

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device asked for; None and "auto" mean CUDA if there is any, else the CPU.

    Raises
    ------
    BackendError
        If the name is not a device, or that device is not here.
    """
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise BackendError(f"device {device!r} is not known; use auto, cpu, cuda or cuda:N") from None
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise BackendError(
            f"device {device!r} is not here ({torch.cuda.device_count()} CUDA devices are visible); use cpu or auto"
        )
    return resolved


def resolve_dtype(dtype: str | torch.dtype | None, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype asked for; None and "auto" mean fp32 on a CPU, else the checkpoint's own (bf16 if silent)."""
    if isinstance(dtype, torch.dtype):
        if dtype in _DTYPES.values():
            return dtype
        raise ConfigError(f"dtype {dtype} is not supported; use float32, bfloat16 or float16")
    if dtype is None or dtype == "auto":
        return torch.float32 if device.type == "cpu" else _DTYPES[config.dtype or "bfloat16"]
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Build a model whose weights have memory and no values."""
    with torch.device("meta"):
        model = ModelFactory.create(config.model_type, config)
    assert isinstance(model, CausalLM), "every family registers CausalLM"
    # Module.to_empty but for its empty_like, which on the meta device imports sympy: half a second.
    model.to(dtype)._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    model.tie_weights()
    return model


def load_model(
    source: ModelSource,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> CausalLM:
    """Build the model without memory (meta device), then stream the weights to where they stay."""
    config = source.config()
    place = resolve_device(device)
    model = _allocate(config, resolve_dtype(dtype, config, place), place)
    load_tensors(model, source.tensors(), source.path)
    return model.eval()


class AutoModel:
    """Loads a :class:`~astrai_core.model.transformer.CausalLM` of any supported family."""

    @staticmethod
    def from_pretrained(
        model: str | Path,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> CausalLM:
        """Load a model in evaluation mode.

        Parameters
        ----------
        model
            A directory, a .gguf file, a Hugging Face id, or ``smollm2``.
        dtype
            Of the weights; by default fp32 on a CPU and the checkpoint's own elsewhere.
        device
            By default CUDA if there is any, else the CPU.

        Raises
        ------
        CheckpointError, ConfigError
            One line naming the file or field and the remedy.
        """
        return load_model(open_source(model), dtype, device)

    @staticmethod
    def from_config(
        config: ModelConfig,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> CausalLM:
        """Build a freshly initialised model in training mode."""
        place = resolve_device(device)
        model = _allocate(config, resolve_dtype(dtype, config, place), place)
        model.init_weights(generator)
        return model


class AutoTokenizer:
    """Loads a :class:`~astrai_core.tokenizer.tokenizer.Tokenizer`."""

    @staticmethod
    def from_pretrained(model: str | Path) -> Tokenizer:
        """Load the tokenizer of a directory, a .gguf file, a Hugging Face id, or ``smollm2``."""
        return open_source(model).tokenizer()
