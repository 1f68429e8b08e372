"""A decode step of a few requests as one kernel that stays on the device for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from astrai_core import kernels
from astrai_core.errors import BackendError
from astrai_core.model.layers import Linear
from astrai_core.model.mlp import SwiGLU

if TYPE_CHECKING:
    from astrai_core.attention.metadata import KVCache
    from astrai_core.model.attention import Attention
    from astrai_core.model.transformer import CausalLM


STEP_ROWS, STEP_LAYER_BYTES = 1, 48 << 20
"""Most requests of a step, and bytes of a layer's weights, for which the kernel is faster than the ops. On an H200 with 576
keys a request, in us a step, the kernel and then the ops:

======== ============ ============== ============
requests Qwen3 0.6B   1.2B preset    Llama 3.2 1B
======== ============ ============== ============
1        653 (809)    878 (903)      868 (868)
8        1,085 (975)  1,503 (998)
a layer  31 MB        75 MB          122 MB
======== ============ ============== ============

The preset's gain is not worth a second road: its layers are bound by their bytes on both.
"""


class WholeStep:
    """Runs the steps that the kernel takes: single queries of a few requests, each with keys of its own.

    It keeps the addresses of weights and pool on the device; where one of them moved, the next step that is not replayed
    tells the kernel. A graph of a step reads these addresses, so it must not outlive this object, nor :meth:`forget`.

    Parameters
    ----------
    model : CausalLM
        On a CUDA device.
    most_rows : int, optional
        Most requests of a step that it takes; None: as many as the kernel can, which is eight.

    Raises
    ------
    BackendError
        If the model cannot run so; the message says why.
    """

    def __init__(self, model: CausalLM, most_rows: int | None = None) -> None:
        reason = self.unavailable(model)
        if reason is not None:
            raise BackendError(f"the model cannot run a step in one kernel: {reason}")
        self._model = model
        self._kernels: Any = kernels.module("step")
        self.most_rows: int = self._kernels.MOST_ROWS if most_rows is None else most_rows
        self._step: Any = None
        self._addresses: tuple[int, ...] = ()

    @staticmethod
    def unavailable(model: CausalLM) -> str | None:
        """Return why a model's steps cannot be one kernel, or None if they can."""
        if model.device.type != "cuda":
            return "it needs a CUDA device"
        found = kernels.status()
        if not found.available:
            return f"{kernels.DISTRIBUTION} cannot be used: {found.reason}; {found.remedy}"
        return unsupported(model) or kernels.module("step").unavailable(
            model.config.hidden_size,
            model.config.intermediate_size,
            model.config.num_attention_heads,
            model.config.num_key_value_heads,
            model.config.head_dim,
            model.config.vocab_size,
            model.config.num_hidden_layers,
            model.device,
        )

    @staticmethod
    def pays(model: CausalLM) -> bool:
        """Whether the kernel is faster than the ops for up to :data:`STEP_ROWS` requests of a model that it serves."""
        layer = model.model.layers[0].parameters()
        return sum(parameter.numel() * parameter.element_size() for parameter in layer) <= STEP_LAYER_BYTES

    def takes(self, ids: Tensor, cache: KVCache) -> bool:
        """Whether the kernel runs a step of ``[tokens]`` ids on a cache.

        Not where guesses are checked, whose rows read what others of the step write, and not in torch's deterministic mode:
        how attention is cut depends on how many requests there are.
        """
        metadata = cache.groups[0]
        return (
            cache.phase == "decode"
            and ids.shape[0] <= self.most_rows
            and not metadata.reads_own_keys
            and cache.k_buffers[0].dtype == self._model.dtype
            and not torch.are_deterministic_algorithms_enabled()
            and not torch.is_grad_enabled()
        )

    def run(self, ids: Tensor, position_ids: Tensor, cache: KVCache) -> Tensor:
        """Return logits ``[tokens, vocab]``; write keys and values to the pool."""
        addresses = self._current_addresses(cache)
        if addresses != self._addresses:
            self._step = self._bind(cache)
            self._addresses = addresses
        metadata = cache.groups[0]
        logits: Tensor
        logits, _ = self._kernels.decode_step(
            self._step,
            ids,
            position_ids,
            metadata.out_cache_loc,
            metadata.seq_lens,
            metadata.req_to_token,
            metadata.req_indices,
        )
        return logits

    def forget(self) -> None:
        """Let go of the pool, which a step binds again."""
        self._step = None
        self._addresses = ()

    def _current_addresses(self, cache: KVCache) -> tuple[int, ...]:
        weights = (parameter.data_ptr() for parameter in self._model.parameters())
        pools = (buffer.data_ptr() for buffers in (cache.k_buffers, cache.v_buffers) for buffer in buffers)
        return (*weights, *pools, self._model.model.rotary.cos.data_ptr())

    def _bind(self, cache: KVCache) -> Any:
        decoder = self._model.model
        config = self._model.config
        layers = []
        for index, block in enumerate(decoder.layers):
            attention: Attention = block.self_attn  # type: ignore[assignment]
            mlp: SwiGLU = block.mlp  # type: ignore[assignment]
            k_buffer, v_buffer, _ = cache.of(index)
            layers.append(
                self._kernels.StepLayer(
                    input_norm=block.input_layernorm.weight,  # type: ignore[union-attr]
                    qkv=attention.qkv_proj.weight,
                    qkv_bias=attention.qkv_proj.bias,
                    q_norm=None if attention.q_norm is None else attention.q_norm.weight,
                    k_norm=None if attention.k_norm is None else attention.k_norm.weight,
                    o=attention.o_proj.weight,
                    o_bias=attention.o_proj.bias,
                    post_norm=block.post_attention_layernorm.weight,  # type: ignore[union-attr]
                    gate_up=mlp.gate_up_proj.weight,
                    down=mlp.down_proj.weight,
                    k_buffer=k_buffer,
                    v_buffer=v_buffer,
                )
            )
        return self._kernels.DecodeStep(
            layers,
            decoder.embed_tokens.weight,
            decoder.norm.weight,
            self._model.lm_head.weight,
            decoder.rotary.cos,
            decoder.rotary.sin,
            n_heads=config.num_attention_heads,
            eps=config.rms_norm_eps,
        )


def unsupported(model: CausalLM) -> str | None:
    """Return what of a model's architecture, types or adapters the kernel does not know, or None."""
    config = model.config
    if model.dtype not in (torch.float16, torch.bfloat16) or any(p.dtype != model.dtype for p in model.parameters()):
        return f"its weights are not all float16 or bfloat16 ({model.dtype})"
    if any(config.moe_layers):
        return "it has experts"
    if any(config.window(layer) is not None for layer in range(config.num_hidden_layers)):
        return "it has layers with an attention window"
    if not all(config.rope_layers) or config.rope_interleave or config.rotary_dim != config.head_dim:
        return "it does not rotate whole heads in halves in every layer"
    if config.mlp_bias:
        return "its feed-forward layers have biases"
    if any(isinstance(module, Linear) and module.adapter is not None for module in model.modules()):
        return "its projections have adapters"
    return None
