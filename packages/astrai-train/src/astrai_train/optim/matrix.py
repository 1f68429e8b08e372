"""What Muon, Mano and Nora share: the step over groups of matrices, fused weights, and weights sharded by FSDP2.

A group's ``row_groups`` are the rows of each matrix that its (fused) weights are made of; every matrix is updated as
if it were a parameter of its own. ``()`` stands for weights that are one matrix each. Weights of three dimensions are
stacks ``[experts, out, in]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from astrai_core.errors import ConfigError

HALF = frozenset({torch.bfloat16, torch.float16})
"""Dtypes too coarse for norms, sums and small steps."""


@dataclass(frozen=True)
class MatrixRows:
    """The rows of one matrix that this rank holds: ``start .. stop`` of the local tensor, of `rows` in all."""

    start: int
    stop: int
    rows: int


class MatrixOptimizer(Optimizer, ABC):
    """An optimizer of matrices.

    Raises
    ------
    ConfigError
        If a parameter is not a matrix or a stack of them, or ``row_groups`` do not add up to its rows.
    """

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        super().__init__(params, {"row_groups": (), **defaults})
        for group in self.param_groups:
            names = group.get("param_names") or [str(index) for index in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                self._check(name, parameter, group["row_groups"])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; run `closure` first, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
            self._finish(group)
        return loss

    @abstractmethod
    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Move one parameter."""

    def _finish(self, group: dict[str, Any]) -> None:
        """End the step of one group."""

    def _check(self, name: str, parameter: nn.Parameter, row_groups: tuple[int, ...]) -> None:
        if parameter.ndim not in (2, 3):
            raise ConfigError(
                f"{type(self).__name__}: parameter {name} has shape {list(parameter.shape)}; give it to the companion"
            )
        if row_groups and sum(row_groups) != parameter.shape[-2]:
            raise ConfigError(
                f"{type(self).__name__}: row_groups {row_groups} of parameter {name} add up to {sum(row_groups)}, "
                f"it has {parameter.shape[-2]} rows"
            )


def require_row_shards(optimizer: str, name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter whose rows are cut.

    Raises
    ------
    ConfigError
        If it is sharded along any dimension but the first.
    """
    if isinstance(parameter, DTensor) and any(
        part.is_shard() and not part.is_shard(0) for part in parameter.placements
    ):
        raise ConfigError(
            f"{optimizer}: parameter {name} is sharded as {tuple(parameter.placements)}; shard dimension 0 only"
        )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory; of a plain tensor, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def exact(tensor: Tensor) -> Tensor:
    """Return a tensor fit for norms and sums: half precision becomes float32."""
    return tensor.float() if tensor.dtype in HALF else tensor


def matrix_rows(parameter: Tensor, row_groups: tuple[int, ...]) -> list[MatrixRows]:
    """Find each matrix in this rank's part of a weight; one of which it holds no row has an empty range."""
    first, held = 0, parameter.shape[-2]
    if isinstance(parameter, DTensor) and parameter.ndim == 2:
        (chunk,) = parameter.__create_chunk_list__()
        first, held = chunk.offsets[0], chunk.sizes[0]
    found, start = [], 0
    for rows in row_groups or (parameter.shape[-2],):
        low, high = (min(max(edge - first, 0), held) for edge in (start, start + rows))
        found.append(MatrixRows(low, high, rows))
        start += rows
    return found


def gather_like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return the whole of a tensor of which each rank holds the `part` that it holds of `parameter`; a collective."""
    if not isinstance(parameter, DTensor):
        return part
    whole = DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
    return whole.full_tensor()


def shard_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a tensor that every rank holds whole, cut like `parameter`."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def sum_over_row_shards(sums: Tensor, parameter: Tensor) -> Tensor:
    """Add up what the ranks that share out the rows of a matrix have summed over theirs; a collective."""
    if not isinstance(parameter, DTensor) or parameter.ndim != 2:
        return sums
    placements: list[Placement] = [Partial() if isinstance(p, Shard) else Replicate() for p in parameter.placements]
    return DTensor.from_local(sums, parameter.device_mesh, placements).full_tensor()


def per_row(rows: list[MatrixRows], value: Callable[[int], float], like: Tensor) -> Tensor:
    """Return a column ``[local rows, 1]`` that holds, at each row, `value` of its matrix's row count."""
    return torch.cat([like.new_full((part.stop - part.start, 1), value(part.rows)) for part in rows])
