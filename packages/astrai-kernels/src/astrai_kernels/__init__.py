"""CUDA kernels of astrai: checked functions over an extension that links nothing of torch.

Importing this package imports neither torch nor the extension; both are loaded when a name below is first used.

========================================  ==========================================================
:func:`rms_norm`, :func:`add_rms_norm`    RMSNorm, alone and behind a residual add
:func:`apply_rotary`,                     rotary position embedding of q and k, out of place and in
:func:`apply_rotary_`                     place
:func:`linear`                            x @ weight^T with an epilogue, in a fixed order on request
:func:`linear_before_norm`,               two of them with an RMSNorm between, of which each does half;
:func:`linear_after_norm`,                the first half may be the embedding's
:func:`embedding_before_norm`
:func:`lora_shrink`, :func:`lora_expand`  the two halves of LoRA, an adapter for each row
:func:`decode_attention`,                 attention of a few query rows a request over a paged or contiguous
:class:`DecodePlan`                       KV cache; how a step's work is cut, and its scratch
:func:`prefill_attention`                 causal attention of ragged queries over such a cache
:func:`scalar_attention`                  its slow and readable twin
:func:`qkv_norm_rope_write`               qk-norm, rotary and KV write of a fused projection
:func:`qkv_decode_attention`              the same and decode attention of one query a request, in one launch
:func:`gated_activation`                  SwiGLU and GeGLU
:func:`embedding`                         rows of a table by their ids
:func:`argmax`, :func:`sample`            one token per row of logits, without a sort
:func:`decode_step`, :class:`DecodeStep`,  a whole decode step of a dense model in one kernel, and what it
:class:`StepLayer`                        reads at fixed addresses
:func:`build_info`                        what the extension was built from and for; needs no GPU
:mod:`astrai_kernels.reference`           the same functions in plain torch, for any device
========================================  ==========================================================

The functions run on the current stream of their tensors' device and are also torch ops (``torch.ops.astrai``), which
``torch.compile`` keeps whole. They have no backward and never fall back: what they cannot run, they refuse.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from ._loader import BuildInfo, build_info
    from .attention import DecodePlan, decode_attention
    from .elementwise import embedding, gated_activation
    from .fused import add_rms_norm, rms_norm
    from .lora import lora_expand, lora_shrink
    from .normed_projection import embedding_before_norm, linear_after_norm, linear_before_norm
    from .prefill import prefill_attention, scalar_attention
    from .projection import linear
    from .qkv import qkv_norm_rope_write
    from .qkv_attention import qkv_decode_attention
    from .rotary import apply_rotary, apply_rotary_
    from .sampling import argmax, sample
    from .step import DecodeStep, StepLayer, decode_step

__all__ = [
    "BuildInfo",
    "DecodePlan",
    "DecodeStep",
    "StepLayer",
    "__version__",
    "add_rms_norm",
    "apply_rotary",
    "apply_rotary_",
    "argmax",
    "build_info",
    "decode_attention",
    "decode_step",
    "embedding",
    "embedding_before_norm",
    "gated_activation",
    "linear",
    "linear_after_norm",
    "linear_before_norm",
    "lora_expand",
    "lora_shrink",
    "prefill_attention",
    "qkv_decode_attention",
    "qkv_norm_rope_write",
    "rms_norm",
    "sample",
    "scalar_attention",
]

_HOMES = {
    "prefill_attention": "prefill",
    "scalar_attention": "prefill",
    "argmax": "sampling",
    "sample": "sampling",
    "embedding": "elementwise",
    "gated_activation": "elementwise",
    "qkv_norm_rope_write": "qkv",
    "qkv_decode_attention": "qkv_attention",
    "DecodePlan": "attention",
    "decode_attention": "attention",
    "DecodeStep": "step",
    "StepLayer": "step",
    "decode_step": "step",
    "BuildInfo": "_loader",
    "build_info": "_loader",
    "add_rms_norm": "fused",
    "rms_norm": "fused",
    "linear": "projection",
    "embedding_before_norm": "normed_projection",
    "linear_after_norm": "normed_projection",
    "linear_before_norm": "normed_projection",
    "lora_expand": "lora",
    "lora_shrink": "lora",
    "apply_rotary": "rotary",
    "apply_rotary_": "rotary",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
