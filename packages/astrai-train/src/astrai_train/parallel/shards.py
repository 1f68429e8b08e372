"""Tensors of a training state on disk: sharded files of torch.distributed.checkpoint, and copies that wait for them.

A file set that some number of ranks wrote can be read by any other number: each rank writes the parts that it holds
(of what all hold alike, one rank writes it), and reads the parts that it needs.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future

from astrai_core.errors import CheckpointError
from astrai_train.optim.matrix import local

SEPARATOR = "/"
"""Between the parts of a tensor's name, the last of which names the parameter that it is shaped and cut like."""


class HostCopies:
    """Copies of tensors in host memory, so that training may go on while they are written.

    On a GPU the memory is pinned and used again by the next :meth:`take`, before which the copies must be done with.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._mesh: DeviceMesh | None = None

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of each tensor; of a sharded one this rank's part, still as part of the whole."""
        copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if self._kept:
            torch.cuda.synchronize()
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        part = local(tensor)
        if part.is_cuda:
            kept = self._kept.get(name)
            if kept is None or kept.shape != part.shape or kept.dtype != part.dtype:
                kept = self._kept[name] = torch.empty_like(part, device="cpu", pin_memory=True)
            host = kept.copy_(part, non_blocking=True)
        else:
            host = part.clone()
        if not isinstance(tensor, DTensor):
            return host
        mesh = tensor.device_mesh
        if part.is_cuda:
            # A sharded tensor's device is its mesh's: copies on the host need a mesh of the hosts.
            self._mesh = self._mesh or DeviceMesh("cpu", mesh.mesh)
            mesh = self._mesh
        return DTensor.from_local(
            host, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], group: distributed.ProcessGroup | None) -> None:
    """Write tensors into an empty or absent directory; a collective of `group`, whose ranks share the disk.

    Parameters
    ----------
    group
        None writes alone.

    Raises
    ------
    OSError
        On every rank, if one cannot write.
    """
    _expect_no_group()
    # Each rank syncs what it wrote: on a network disk nobody else can do it.
    writer = _Writer(directory, sync_files=True, overwrite=False)
    try:
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        rank = min(error.failures)
        cause = error.failures[rank][0]
        if isinstance(cause, OSError):
            raise cause from None
        raise


def read_tensors(directory: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read what :func:`write_tensors` wrote, by however many ranks; no collective.

    Parameters
    ----------
    parameters
        The trained parameters by name. A tensor named and shaped like one comes on its device and in its shards, in
        the dtype that it was saved in; any other comes whole and on the host.

    Raises
    ------
    CheckpointError
        If the files are not what astrai writes.
    """
    _expect_no_group()
    reader = _Reader(directory)
    found: dict[str, Tensor] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{directory}: {name!r} is not a tensor; resume from another checkpoint")
        like = parameters.get(name.rpartition(SEPARATOR)[2])
        if like is not None and like.shape == entry.size:
            found[name] = torch.empty_like(like, dtype=entry.properties.dtype, requires_grad=False)
        else:
            found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load(found, storage_reader=reader, no_dist=True)
    return found


def _expect_no_group() -> None:
    """Keep torch from warning that there is no process group: where there is none, there is one process."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class _Writer(FileSystemWriter):
    """A writer that tells of a full disk.

    ``torch.save`` hides the system's error behind a RuntimeError, and what links the two does not reach other ranks.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class _Reader(FileSystemReader):
    """A reader that runs no code of the files: torch unpickles the index of a checkpoint without restriction."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        with open(path, "rb") as file:
            found = _IndexUnpickler(file, path).load()
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{path}: is not the index of a checkpoint; resume from another")
        return found


class _IndexUnpickler(pickle.Unpickler):
    """Builds the classes that an index consists of, and no others."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        known = (module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))) or (
            module,
            name,
        ) in _INDEX_NAMES
        if not known:
            raise CheckpointError(f"{self._path}: names {module}.{name}, which is no part of an index; do not trust it")
        return super().find_class(module, name)


_INDEX_NAMES = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        *((module, kind) for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath")),
    }
)
