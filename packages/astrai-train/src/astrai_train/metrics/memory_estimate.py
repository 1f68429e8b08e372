"""How much memory a run will need on each rank, reckoned from the recipe before a weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from astrai_core.config.model import ModelConfig
from astrai_core.model.decoder_block import DecoderBlock
from astrai_core.model.transformer import CausalLM
from astrai_train.config import DPOConfig, TrainConfig
from astrai_train.optim.groups import optimized_parameters
from astrai_train.recompute import recompute_activations, recomputed_whole
from astrai_train.strategy.build import reference_kind


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank."""

    weights: int
    """Whole or sharded weights, the copies that products are computed with, a frozen reference."""
    gradients: int
    optimizer: int
    """Moments, and what else is kept for each weight: average, gradient statistics."""
    activations: int
    """Kept for the backward pass of one micro-batch."""
    loss: int
    """Logits of a chunk, their gradient, the head's gradient."""

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss

    def line(self, device: torch.device) -> str:
        """Say it in one line, beside what is free on a GPU."""
        unit, name = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        parts = ", ".join(f"{part} {value / unit:.1f}" for part, value in vars(self).items())
        text = f"memory: about {self.total / unit:.1f} {name} ({parts})"
        free = free_bytes(device)
        return text if free is None else f"{text} of {free / 1e9:.1f} GB free on {torch.cuda.get_device_name(device)}"

    def fits(self, device: torch.device) -> bool:
        """Whether it is less than what is free; True where that is not known."""
        free = free_bytes(device)
        return free is None or self.total <= free


def free_bytes(device: torch.device) -> int | None:
    """Return what is free on a GPU; None on a CPU, whose memory is shared with everything else."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def estimate_memory(config: TrainConfig, model: CausalLM, *, ranks: int = 1) -> MemoryEstimate:
    """Reckon the memory of a run.

    Activations are within a sixth of what eager steps keep where that was counted; compiled ones keep less. The CUDA
    context (about 0.5 GB), libraries' workspaces and fragmentation come on top.

    Parameters
    ----------
    model
        A blank of what is trained (:func:`astrai_train.models.blank_model`); its modules are marked for recomputation.
    ranks
        How many there are; they share weights, gradients and optimizer state under ``fsdp``.
    """
    width, compute = model.dtype.itemsize, 4 if config.precision.dtype == "fp32" else 2
    shards = ranks if config.parallel.mode == "fsdp" else 1
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    items = optimized_parameters(model)
    n_trained = sum(item.parameter.numel() for item in items)
    trained = sum(item.parameter.nbytes for item in items)

    weights = n_weights * width // shards
    if shards > 1 and not config.parallel.reshard_after_forward:
        weights += n_weights * compute
    elif compute < width:
        weights += n_weights * compute  # casts kept for the backward pass
    if reference_kind(config) == "copy":
        weights += sum(p.nbytes for p in model.parameters() if not (config.lora and p.requires_grad))
    one_moment = config.optimizer.name != "adamw"
    moments = sum(item.parameter.nbytes * (1 if one_moment and item.role == "matrix" else 2) for item in items)
    kept = (4 if config.ema_decay is not None else 0) + (8 if "grad_snr" in config.log.metrics else 0)
    gathered = shards > 1 and not config.parallel.reshard_after_forward
    rows = config.micro_batch_size * (2 if isinstance(config.strategy, DPOConfig) else 1)
    tokens = rows * config.data.seq_len
    return MemoryEstimate(
        weights=weights,
        gradients=trained // (1 if gathered else shards),
        optimizer=(moments + n_trained * kept) // shards,
        activations=tokens * _activations(config, model, compute),
        loss=_loss(config, model.config, tokens, compute),
    )


def _activations(config: TrainConfig, model: CausalLM, compute: int) -> int:
    """Bytes a token that the decoder keeps for the backward pass."""
    precision, of = config.precision, model.config
    mode, modules = precision.activation_checkpointing, precision.gradient_checkpointing_modules
    names = set(recompute_activations(model, mode, modules=modules, every=precision.checkpointing_every))
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, DecoderBlock)}
    compiled = precision.compile != "none"
    total = largest = 0
    for name in blocks:
        whole = _block(of, compute, compiled=compiled)
        if name not in names:
            total += whole
        elif recomputed_whole(blocks[name]):
            total += 2 * of.hidden_size * compute
            largest = max(largest, whole)
        else:
            total += _products(of, compute)
            largest = max(largest, whole)
    # Token vectors and final norm; the states that predict, and their gradient.
    return total + largest + (2 * 4 + 4 * compute) * of.hidden_size


def _block(of: ModelConfig, compute: int, *, compiled: bool) -> int:
    """Bytes a token that one block keeps."""
    hidden, q, kv = of.hidden_size, of.num_attention_heads * of.head_dim, of.num_key_value_heads * of.head_dim
    # Values are a part of the fused projection, all of which is kept for them, beside rotated queries and keys.
    attention = compute * (3 * q + 3 * kv) + 4 * of.num_attention_heads
    ffn = _feed_forward_width(of)
    if compiled or compute == 4:
        # Of a norm its input and its result; fused, the activation between the halves of SwiGLU is computed again.
        norms = 2 * 2 * hidden * compute
        feed_forward = (3 if compiled else 4) * ffn * compute
    else:
        # A norm keeps its input in fp32, the rounded value that the weight multiplies, and its result.
        norms = 2 * (4 + 2 * compute) * hidden
        feed_forward = 4 * ffn * compute
    return norms + attention + feed_forward


def _feed_forward_width(of: ModelConfig) -> int:
    """Columns between the projections of a feed-forward layer that a token goes through."""
    if of.num_experts is None:
        return of.intermediate_size
    assert of.moe_intermediate_size is not None and of.num_experts_per_tok is not None, "checked by ModelConfig"
    return of.moe_intermediate_size * of.num_experts_per_tok + (of.shared_expert_intermediate_size or 0)


def _products(of: ModelConfig, compute: int) -> int:
    """Bytes a token that one block keeps if only the results of products and attention are kept."""
    hidden, q, kv = of.hidden_size, of.num_attention_heads * of.head_dim, of.num_key_value_heads * of.head_dim
    return (
        compute * (2 * hidden + q + 2 * kv + q + 2 * hidden + 2 * _feed_forward_width(of)) + 4 * of.num_attention_heads
    )


def _loss(config: TrainConfig, of: ModelConfig, tokens: int, compute: int) -> int:
    chunk = min(config.strategy.loss_chunk_tokens, tokens)
    passes = 2 * compute if config.precision.compile != "none" else 2 * compute + 2 * 4
    return chunk * of.vocab_size * passes + of.vocab_size * of.hidden_size * (4 + compute)
