"""Safetensors files: streamed in from one or many shards, written out in shards with an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from astrai_core.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 10**9


def shard_paths(directory: Path) -> list[Path]:
    """Return the directory's shards, all of which exist.

    Raises
    ------
    CheckpointError
        If there are no safetensors weights, the index is broken, or a shard it names is missing.
    """
    index = directory / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(name) for name in weight_map.values()})
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index}: no readable weight_map; download it again") from None
        for name in names:
            if not (directory / name).is_file():
                raise CheckpointError(f"{directory / name}: missing shard named by {INDEX}; download it again")
        return [directory / name for name in names]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(directory.glob(pattern))]
    if others:
        raise CheckpointError(f"{directory}: has {others[0]} but no {SINGLE}; convert the weights to safetensors")
    raise CheckpointError(f"{directory}: no weights; expected {SINGLE} or {INDEX}")


def iterate_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every shard; tensors are views of the mapped files, read when they are copied."""
    for path in shard_paths(directory):
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118  (safe_open is no mapping)
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: truncated or damaged ({error}); download it again") from None


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Raise the OSError of a write that failed in the body, where safetensors raises an error of its own for it."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode  # save_file replaces the file by one that only its owner can read
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with system_errors(path):
        save_file(whole, path, {"format": "pt"})
    path.chmod(mode)


def write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """Write tensors in order, starting a new file when the next tensor would exceed `max_shard_bytes`.

    Memory stays below one shard plus one tensor. One shard is called model.safetensors; several get an index.
    """
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0
    written: list[tuple[Path, list[str]]] = []

    def flush() -> None:
        path = directory / f"shard-{len(written) + 1:05d}.safetensors"
        write_file(path, pending)
        written.append((path, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.detach().cpu().contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    if len(written) == 1:
        written[0][0].rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(written, 1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
