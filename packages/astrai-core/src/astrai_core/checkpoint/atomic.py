"""Directories that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from astrai_core.errors import CheckpointError


@contextmanager
def atomic_directory(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside `target` that takes its place when the body succeeds.

    Everything is fsynced before the rename, and a failed body leaves nothing behind, so a reader never finds a
    half-written directory under the final name.

    Parameters
    ----------
    overwrite
        Replace an existing, non-empty `target` (it stays until the new one is complete).

    Raises
    ------
    CheckpointError
        If `target` exists and may not be replaced, or writing fails (a full disk, no permission).
    """
    scratch = scratch_directory(target, overwrite=overwrite)
    with committed(scratch, target):
        yield scratch


def scratch_directory(target: str | Path, *, overwrite: bool = False) -> Path:
    """Do the first half of :func:`atomic_directory`: make the empty directory beside `target`."""
    target = Path(target)
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: exists and is not a directory; choose another path")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise CheckpointError(f"{target}: directory is not empty; choose another path or overwrite it")
    scratch = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(explain_write_error(error, target)) from error
    return scratch


@contextmanager
def committed(scratch: Path, target: str | Path) -> Iterator[None]:
    """Do the second half of :func:`atomic_directory`: `scratch` becomes `target` if the body succeeds, else it goes."""
    target = Path(target)
    try:
        yield
        _sync_tree(scratch)
        _swap(scratch, target)
    except OSError as error:
        raise CheckpointError(explain_write_error(error, target)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _swap(scratch: Path, target: Path) -> None:
    old = None
    if target.exists():
        old = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
        os.rename(target, old)
    try:
        os.rename(scratch, target)
    except OSError:
        if old is not None:
            os.rename(old, target)
        raise
    _sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


def _sync_tree(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def explain_write_error(error: OSError, target: Path) -> str:
    """Return one line about a failed write: where, why and what to do."""
    remedy = {
        errno.ENOSPC: "free some space or choose another disk",
        errno.EDQUOT: "free some of your quota or choose another disk",
        errno.EACCES: "choose a directory you may write to",
        errno.EROFS: "choose a writable file system",
    }.get(error.errno or 0, "nothing was written there")
    return f"{target}: cannot write: {error.strerror or error}; {remedy}"
