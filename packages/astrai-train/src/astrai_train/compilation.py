"""torch.compile for training: every decoder block by itself, and the passes over the logits.

Why not the model as a whole. A block begins with the addition of what the last one computed and the norm of the sum, so
no pair of kernels that could be one lies on both sides of a block's border. One block is compiled instead of all layers
(on an H200's host about 20 s instead of minutes), and the others reuse its code. Blocks are also what activation
checkpointing recomputes and FSDP gathers. The price is a guard check a block, which the device's queue hides.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from astrai_core.model.transformer import CausalLM
from astrai_train.strategy.base import BaseStrategy

CompileMode = Literal["none", "default", "max-autotune"]
"""``default`` fuses what lies between products; ``max-autotune`` also times candidates for the products and takes minutes
to start."""

BACKEND = "inductor"

# CUDA graphs, which max-autotune brings by its own name, want their inputs in one place: here each layer's weights are
# others, and gradients are kept across calls.
_MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}

# Kinds of call that a run makes of one block: first layer or not, training or evaluation, rows of one document or of
# several, each with one or with any number of tokens. Beyond torch's limit of 8 a block would quietly run uncompiled.
VARIANTS = 32


def compile_training(model: CausalLM, strategy: BaseStrategy, mode: CompileMode) -> None:
    """Let the model's blocks, its last norm and the loss run compiled; weights keep their names and places.

    Call it after activation checkpointing was set up, and before the model is sharded.
    """
    if mode == "none":
        return
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    options: dict[str, Any] = {"backend": BACKEND}
    if BACKEND == "inductor":
        options["mode"] = _MODES[mode]
    for layer in model.model.layers:
        layer.compile(**options)
    model.model.norm.compile(**options)
    strategy.compiled = True
