"""The ``astrai`` command."""

from __future__ import annotations

from astrai_cli._version import __version__

__all__ = ["__version__"]


def __dir__() -> list[str]:
    return sorted(__all__)
