"""CUDA kernels of astrai: checked functions over an extension that links nothing of torch.

Importing this package imports neither torch nor the extension; both are loaded when a name below is first used.

========================================  ==========================================================
:func:`rms_norm`, :func:`add_rms_norm`    RMSNorm, alone and behind a residual add
:func:`apply_rotary`,                     rotary position embedding of q and k, out of place and in
:func:`apply_rotary_`                     place
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
    from .fused import add_rms_norm, rms_norm
    from .rotary import apply_rotary, apply_rotary_

__all__ = [
    "BuildInfo",
    "__version__",
    "add_rms_norm",
    "apply_rotary",
    "apply_rotary_",
    "build_info",
    "rms_norm",
]

_HOMES = {
    "BuildInfo": "_loader",
    "build_info": "_loader",
    "add_rms_norm": "fused",
    "rms_norm": "fused",
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
