"""The ranks of a run and what they tell each other; only this room speaks to ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from astrai_core.auto import resolve_device
from astrai_core.errors import AstraiError, BackendError, ConfigError

T = TypeVar("T")

PATIENCE = timedelta(days=2)
"""How long a rank waits for words of another: rank 0 may score a whole data set while the others wait. One that has
ended is noticed at once."""

STALL = timedelta(minutes=10)
"""How long GPUs wait for each other in one exchange. A GPU that waits for a rank which has gone is not told, and its host
waits with it; where nothing else ends the process, torch's watchdog does so then. torch's own limit for NCCL, which beside
gloo it would make half an hour."""


@dataclass(frozen=True)
class World:
    """The ranks that train together, seen from one of them.

    What the ranks tell each other goes through the host (gloo); gradients and weights go through the device's own
    backend. Collectives are entered by every rank or by none, from the thread that trains.
    """

    device: torch.device
    """Where this rank computes."""

    rank: int = 0
    """This rank, from 0."""

    size: int = 1
    """How many ranks there are."""

    control: distributed.ProcessGroup | None = None
    """Group for words between the hosts; None where there is one rank without a process group."""

    writing: distributed.ProcessGroup | None = None
    """Group of the threads that write checkpoints, which must not meet the collectives of the training thread."""

    owned: bool = False
    """Whether :meth:`join` opened the process group."""

    @classmethod
    def join(cls, mode: str, device: str | None = None, environment: Mapping[str, str] = os.environ) -> World:
        """Meet the other ranks, as torchrun's variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ... describe them.

        Without these variables the world is this process alone. A process group that exists already is used and left
        open.

        Parameters
        ----------
        mode
            ``parallel.mode`` of the recipe.
        device
            By default the GPU numbered as the rank is on its machine, or the CPU where there is no GPU.

        Raises
        ------
        ConfigError
            If several ranks were started for the mode ``none``, or they were all given one GPU.
        BackendError
            If a rank has no GPU.
        """
        if distributed.is_available() and distributed.is_initialized():
            rank, size = distributed.get_rank(), distributed.get_world_size()
        else:
            rank, size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
        if mode == "none":
            if size > 1:
                raise ConfigError(
                    f"field 'parallel.mode': 'none' is one process, but {size} were started; choose 'ddp' or 'fsdp'"
                )
            return cls(resolve_device(device))
        if not distributed.is_available():
            raise BackendError(f"parallel.mode {mode!r}: this torch has no torch.distributed; choose 'none'")
        place = _own_device(device, int(environment.get("LOCAL_RANK", rank)), size)
        owned = not distributed.is_initialized()
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if owned:
            _open_group(place, rank, size, environment)
        control, writing = (distributed.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
        return cls(place, rank, size, control, writing, owned)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and shows progress."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return what each rank gave, by rank; values are plain data."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.control)
        return found

    def first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 alone and return its result everywhere; an astrai error is raised everywhere."""
        if self.size == 1:
            return work()
        told: list[Any] = [None, None]
        if self.is_first:
            try:
                told[0] = work()
            except AstraiError as error:
                told[1] = error
        distributed.broadcast_object_list(told, src=0, group=self.control)
        if told[1] is not None:
            raise told[1]
        return cast("T", told[0])

    def largest(self, value: int) -> int:
        """Return the largest of the ranks' values."""
        if self.size == 1:
            return value
        found = torch.tensor(value)
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self.control)
        return int(found)

    def add_up(self, values: Tensor) -> Tensor:
        """Add a tensor on the device up over the ranks, in place, and return it."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def leave(self) -> None:
        """Close the process group, if :meth:`join` opened it; called by all ranks at the end of a run."""
        if self.owned:
            distributed.destroy_process_group()


def _own_device(device: str | None, local_rank: int, size: int) -> torch.device:
    if device in (None, "auto", "cuda") and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise BackendError(
                f"rank {local_rank} of this machine has no GPU ({count} are visible); start fewer ranks, or give "
                "--device cpu"
            )
        return torch.device("cuda", local_rank)
    place = resolve_device(device)
    if place.type == "cuda" and size > 1:
        raise ConfigError(f"device {device!r} is one GPU for {size} ranks; give 'cuda': each rank takes its own")
    return place


def _open_group(device: torch.device, rank: int, size: int, environment: Mapping[str, str]) -> None:
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        options = {"backend": "cpu:gloo,cuda:nccl", "timeout": STALL}
    if "MASTER_ADDR" not in environment:
        if size > 1:
            raise ConfigError("WORLD_SIZE is set but MASTER_ADDR is not; start the ranks by torchrun or --nprocs")
        store = distributed.HashStore()  # type: ignore[attr-defined]
        options |= {"store": store, "rank": rank, "world_size": size}
    distributed.init_process_group(**options)
