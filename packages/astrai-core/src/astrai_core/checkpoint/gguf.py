"""GGUF files (llama.cpp's format) as Hugging Face checkpoints: config, tokenizer, and dequantised tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astrai_core.checkpoint.gguf_config import ARCHITECTURES, ROPE_FREQS, generation_config, model_config
from astrai_core.checkpoint.gguf_reader import Header, TensorInfo
from astrai_core.checkpoint.gguf_tokenizer import build_tokenizer
from astrai_core.errors import CheckpointError, MissingDependencyError
from astrai_core.tokenizer import Tokenizer

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GGUFFile:
    """A GGUF model of the families Llama (Mistral, SmolLM), Qwen2 or Qwen3. Opening it reads the header only.

    Parameters
    ----------
    path
        The ``.gguf`` file. It stays memory-mapped; tensors are read when they are asked for.

    Attributes
    ----------
    path : Path
    architecture : str
        ``general.architecture``.
    metadata : dict
        All keys of the file.

    Raises
    ------
    MissingDependencyError
        The package gguf is not installed.
    CheckpointError
        The file is missing, damaged, truncated, one part of several, or of an architecture not listed above.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise MissingDependencyError(
                f"{path}: reading GGUF files needs the package gguf; run pip install 'astrai-core[gguf]'"
            ) from error
        self._gguf = gguf
        self.path = Path(path)
        self._header = Header(self.path, {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()})
        self.metadata: dict[str, Any] = self._header.metadata
        self.architecture = self._header.string("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: architecture {self.architecture!r} is not supported in GGUF files; supported: "
                f"{', '.join(ARCHITECTURES)}"
            )
        n_parts = self._header.integer("split.count", 1)
        if n_parts > 1:
            raise CheckpointError(f"{self.path}: is one of {n_parts} parts; merge them with llama-gguf-split --merge")
        self._names = {self._hf_name(name): info for name, info in self._header.tensors.items() if name != ROPE_FREQS}

    def _hf_name(self, name: str) -> str:
        match = _TENSOR_NAME.fullmatch(name)
        if match:
            layer, stem, kind = match.groups()
            known = _TOP_NAMES.get(stem) if layer is None else _LAYER_NAMES.get(stem)
            if known is not None:
                return f"{known}.{kind}" if layer is None else f"model.layers.{layer}.{known}.{kind}"
        raise CheckpointError(
            f"{self.path}: tensor {name!r} is unknown for a {self.architecture} model; use another file"
        )

    def config(self) -> dict[str, Any]:
        """Content of the config.json of the model that was converted.

        Rotary scaling is found in ``rope.scaling.*`` (linear, yarn) or in the tensor ``rope_freqs`` (llama3).

        Raises
        ------
        CheckpointError
            A key is missing, or the model is a variant that is not supported.
        """
        freqs = self._header.tensors.get(ROPE_FREQS)
        return model_config(self._header, None if freqs is None else self._dequantize(freqs))

    def generation_config(self) -> dict[str, Any]:
        """Content of the generation_config.json: EOS ids (a list if there are several), BOS, padding, sampling."""
        return generation_config(self._header)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with its pre-tokenizer, special tokens and chat template.

        Raises
        ------
        CheckpointError
            A key is missing.
        TokenizerError
            The vocabulary's kind or its pre-tokenizer is not supported.
        """
        return build_tokenizer(self._header)

    def storage_types(self) -> dict[str, int]:
        """How many tensors are stored in each type, the most frequent first: ``{"Q4_1": 210, "F32": 61, ...}``."""
        kinds = Counter(info.ggml_type for info in self._header.tensors.values())
        return {self._gguf.GGMLQuantizationType(kind).name: count for kind, count in kinds.most_common()}

    def tensor_names(self) -> list[str]:
        """Hugging Face names of the tensors, in file order; a tied output projection is not among them."""
        return list(self._names)

    def tensors(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the tensors one at a time, dequantised.

        Parameters
        ----------
        dtype
            Of the tensors; values are dequantised in fp32 and then rounded to it.

        Yields
        ------
        name : str
            As in the Hugging Face model; q and k of Llama files come back in the half-split rotary order.
        tensor : Tensor
            On the CPU, owning its memory.

        Raises
        ------
        CheckpointError
            A storage type cannot be dequantised, or a projection's shape does not fit the head count.
        """
        for name, info in self._names.items():
            tensor = torch.from_numpy(self._dequantize(info))
            if self.architecture == "llama" and ".self_attn." in name:
                tensor = self._half_split(name, tensor)
            yield name, tensor.to(dtype)

    def _dequantize(self, info: TensorInfo) -> np.ndarray:
        kind = self._gguf.GGMLQuantizationType(info.ggml_type)
        raw = np.frombuffer(self._header.data, np.uint8, info.n_bytes, info.offset)
        try:
            values = self._gguf.quants.dequantize(raw.reshape(*info.shape[:-1], -1), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {info.name!r} is stored as {kind.name}, which the gguf package cannot "
                "dequantise; use a file with another quantisation"
            ) from error
        values = np.asarray(values, np.float32).reshape(info.shape)
        return values if values.flags.writeable else values.copy()

    def _half_split(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undo the converter's row order of q and k: neighbouring rotary pairs -> the two halves of each head."""
        part = name.rsplit(".", 2)[-2]
        key = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(part)
        if key is None:
            return tensor
        n_heads = self._header.integer("llama.attention.head_count")
        if key == "head_count_kv":
            n_heads = self._header.integer("llama.attention.head_count_kv", n_heads)
        if n_heads <= 0 or tensor.shape[0] % (2 * n_heads):
            raise CheckpointError(
                f"{self.path}: {name} has {tensor.shape[0]} rows, which llama.attention.{key} = {n_heads} does not "
                "divide into heads; convert the model again"
            )
        pairs = tensor.unflatten(0, (n_heads, -1, 2))
        return pairs.transpose(1, 2).reshape(tensor.shape)
