"""The one place that imports :mod:`astrai_kernels`: is the wheel there, does it fit this torch, and if not, what to do."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from astrai_core.errors import BackendError

DISTRIBUTION = "astrai-kernels"


@dataclass(frozen=True)
class KernelStatus:
    """What :func:`status` found."""

    available: bool
    """The kernels can be launched here."""
    version: str | None
    """Version of the installed wheel, with its CUDA label."""
    reason: str
    """Why they cannot be used; empty if they can."""
    remedy: str
    """What to install or change; empty if nothing."""


def cuda_mismatch(kernels_cudart: int, torch_cuda: str | None) -> str | None:
    """Return the remedy if kernels built with CUDA runtime `kernels_cudart` cannot serve this torch, else None.

    The wheel links no libtorch, so only the CUDA major version has to agree.

    Parameters
    ----------
    kernels_cudart
        ``CUDART_VERSION`` of the build, e.g. 13000.
    torch_cuda
        ``torch.version.cuda``, e.g. "12.8"; None for a CPU build of torch.
    """
    if torch_cuda is None:
        return "install a CUDA build of torch"
    have, want = kernels_cudart // 1000, int(torch_cuda.split(".")[0])
    if have == want:
        return None
    label = {12: "cu128", 13: "cu130"}.get(want)
    if label is None:
        return f"install a torch built for CUDA {have}"
    return f"reinstall {DISTRIBUTION} from the {label} index, which fits torch's CUDA {torch_cuda}"


@functools.lru_cache(maxsize=1)
def status() -> KernelStatus:
    """Find the kernels wheel and decide whether it can run here; probed once per process, at first use."""
    import torch

    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return KernelStatus(False, None, "astrai-kernels is not installed", "pip install 'astrai-core[cuda]'")
    try:
        info: Any = importlib.import_module("astrai_kernels").build_info()
        cudart_version, built = int(info["cudart_version"]), str(info["version"])
    except ImportError as error:
        return KernelStatus(False, version, f"its extension does not load: {error}", f"reinstall {DISTRIBUTION}")
    except (AttributeError, KeyError) as error:
        # A compiled module left behind by an earlier version loads, but lacks what the Python files beside it ask for.
        reason = f"its extension is of another version ({type(error).__name__}: {error})"
        return KernelStatus(False, version, reason, f"reinstall {DISTRIBUTION}")
    if built != version:
        return KernelStatus(False, version, f"its extension is of version {built}", f"reinstall {DISTRIBUTION}")
    mismatch = cuda_mismatch(cudart_version, torch.version.cuda)
    if mismatch is not None:
        reason = f"built for CUDA {cudart_version // 1000}, torch has CUDA {torch.version.cuda or 'none'}"
        return KernelStatus(False, version, reason, mismatch)
    if not torch.cuda.is_available():
        return KernelStatus(False, version, "no CUDA device is visible", "check the driver and CUDA_VISIBLE_DEVICES")
    return KernelStatus(True, version, "", "")


def module(name: str) -> ModuleType:
    """Return ``astrai_kernels.<name>``.

    Raises
    ------
    BackendError
        If the kernels cannot be used here; the message says why and what to do.
    """
    found = status()
    if not found.available:
        raise BackendError(f"{DISTRIBUTION} cannot be used: {found.reason}; {found.remedy}")
    return importlib.import_module(f"astrai_kernels.{name}")
