"""Version provider of the build: ``src/astrai_kernels/_version.py`` plus a CUDA label from the environment.

``ASTRAI_CUDA_LABEL=cu128`` gives 0.1.0+cu128. The label enters the metadata when the wheel is built; a wheel whose file
is merely renamed is refused by pip.
"""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERSION_FILE = Path(__file__).parents[1] / "src" / "astrai_kernels" / "_version.py"


def labelled_version(version: str, label: str) -> str:
    """Append ``label`` ("", "cu128", "cu130", ...) to ``version``.

    Raises
    ------
    ValueError
        If the label is no CUDA label.
    """
    if not label:
        return version
    if not re.fullmatch(r"cu\d{3}", label):
        raise ValueError(f"ASTRAI_CUDA_LABEL={label!r}: expected cu and three digits, such as cu128, or nothing")
    return f"{version}+{label}"


def dynamic_metadata(field: str, settings: Mapping[str, Any]) -> str:
    """Entry point that scikit-build-core calls; see ``tool.scikit-build.metadata`` in pyproject.toml."""
    if field != "version" or settings:
        raise ValueError(f"astrai_version provides 'version' without settings, not {field!r} with {dict(settings)}")
    return labelled_version(
        runpy.run_path(str(VERSION_FILE))["__version__"], os.environ.get("ASTRAI_CUDA_LABEL", "").strip()
    )
