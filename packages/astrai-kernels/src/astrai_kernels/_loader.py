"""Loading of the compiled module, and what it says about itself. No torch here."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import TypedDict

from ._version import __version__

_MODULE = "astrai_kernels.lib._C"
# What the Python files beside this one call. A module compiled before one of these was added would fail at its first use.
_FUNCTIONS = (
    "add_rms_norm",
    "attention_capacity",
    "attention_decode",
    "attention_plan",
    "attention_prefill",
    "attention_scalar",
    "build_info",
    "decode_step",
    "embedding",
    "gated_activation",
    "linear",
    "lora_expand",
    "lora_shrink",
    "qkv_attention_decode",
    "qkv_norm_rope_write",
    "rms_norm",
    "rotary",
    "sample",
    "step_capacity",
    "step_maps",
)


@functools.cache
def extension() -> ModuleType:
    """Return the compiled module; it loads on machines without a driver too.

    Raises
    ------
    ImportError
        If this installation carries no compiled module, one that cannot be loaded, or one of an earlier version; the
        message says which and what to do.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name != _MODULE:
            raise
        raise ImportError(
            f"astrai-kernels {__version__} has no compiled module here ({_MODULE}): install the wheel for this Python, "
            "or build it with nvcc by `pip install packages/astrai-kernels`",
            name=_MODULE,
        ) from error
    missing = [name for name in _FUNCTIONS if not hasattr(module, name)]
    if missing:
        raise ImportError(
            f"the compiled module {_MODULE} is older than astrai-kernels {__version__}, it lacks {', '.join(missing)}: "
            "reinstall the wheel, or build it again by `pip install packages/astrai-kernels`",
            name=_MODULE,
        )
    return module


class BuildInfo(TypedDict):
    """What the compiled module was built from and for; a plain dict.

    Attributes
    ----------
    version : str
        Version of the wheel, with its CUDA label if it has one (``0.1.0+cu130``).
    label : str
        The label alone (``cu130``), or "" for an unlabelled build.
    cudart_version : int
        ``CUDART_VERSION`` of the CUDA runtime linked in, 1000 * major + 10 * minor. The kernels run beside any torch
        built for the same major.
    compiler, host_compiler : str
        Name and version of the device and the host compiler.
    architectures : tuple of str
        As given to CMake: ``90a-real`` is machine code for sm_90a, ``120`` machine code and PTX.
    """

    version: str
    label: str
    cudart_version: int
    compiler: str
    host_compiler: str
    architectures: tuple[str, ...]


def build_info() -> BuildInfo:
    """Describe the compiled module. Needs neither torch nor a GPU nor a driver.

    Raises
    ------
    ImportError
        See :func:`extension`.
    """
    facts = extension().build_info()
    return BuildInfo(
        version=facts["version"],
        label=facts["version"].partition("+")[2],
        cudart_version=facts["cudart_version"],
        compiler=facts["compiler"],
        host_compiler=facts["host_compiler"],
        architectures=tuple(facts["architectures"].split(",")),
    )
