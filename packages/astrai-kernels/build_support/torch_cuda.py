"""Print the CUDA version of the torch that this interpreter would import ("13.0"); nothing without torch or CUDA.

Used by CMake before a build. torch itself is not imported, which would take seconds.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path


def torch_cuda_version() -> str:
    """Return ``torch.version.cuda`` as text, or "" when torch is absent or built for another device."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    version_file = Path(spec.origin).with_name("version.py")
    return str(runpy.run_path(str(version_file)).get("cuda") or "")


if __name__ == "__main__":
    sys.stdout.write(torch_cuda_version() + "\n")
