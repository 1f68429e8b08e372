"""The order in which rows are seen: shuffled, mixed by weight, shared out over ranks, resumable anywhere.

The order is one endless global sequence of draws that depends on the seed, the sources and their weights alone. A
micro-step takes the next ``micro_batch_size x world_size`` draws and rank r its r-th part, so a run can go on with
another number of ranks. The state is how many draws were consumed of each source.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from astrai_core.errors import ConfigError, DataError


class Draw(NamedTuple):
    """A row of a source."""

    source: int
    row: int


NO_ROW = Draw(-1, -1)
"""Fills the last batch of a pass on the ranks that have no row left."""


def shuffled(n_rows: int, seed: int | None, source: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of a source's rows in one epoch, ``[rows]`` int64; None keeps the order of the files.

    Ranks the raw output of PCG64, which NumPy promises not to change (NEP 19); what its ``permutation`` does may.
    """
    if seed is None:
        return np.arange(n_rows, dtype=np.int64)
    raw = np.random.PCG64(np.random.SeedSequence([seed, source, epoch])).random_raw(n_rows)
    return np.argsort(raw, kind="stable").astype(np.int64)


class RowSampler:
    """Draws rows without end, epoch after epoch.

    With several sources every draw goes to the one that is furthest behind its weight, so that after n draws each
    source has had its share of n to within one draw (for two sources; within a few for more).

    Parameters
    ----------
    n_rows
        Rows of each source.
    weights
        Share of the draws of each source, relative to the others.
    seed
        Of the shuffles; None keeps the order of the files.
    micro_batch_size
        Rows that a rank takes at once.
    rank, world_size
        This rank and how many there are.

    Raises
    ------
    DataError
        If a source is empty, or there are fewer rows than ranks.
    """

    def __init__(
        self,
        n_rows: Sequence[int],
        weights: Sequence[float] | None = None,
        *,
        seed: int | None = 0,
        micro_batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check(n_rows, world_size)
        self._n_rows = list(n_rows)
        total = sum(weights) if weights else float(len(n_rows))
        self._shares = [weight / total for weight in weights or [1.0] * len(n_rows)]
        self._seed = seed
        self._micro = micro_batch_size
        self._rank, self._world = rank, world_size
        self._consumed = [0] * len(n_rows)
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}

    @property
    def n_rows(self) -> int:
        """Rows of one pass: those of all sources."""
        return sum(self._n_rows)

    def __len__(self) -> int:
        """Micro-batches of one pass on each rank; the last may take rows of the next pass."""
        return math.ceil(self.n_rows / (self._micro * self._world))

    def next(self) -> list[Draw]:
        """Advance all ranks by one micro-batch and return the draws of this one."""
        mine = range(self._rank * self._micro, (self._rank + 1) * self._micro)
        draws = []
        for i in range(self._micro * self._world):
            source = self._pick()
            epoch, index = divmod(self._consumed[source], self._n_rows[source])
            self._consumed[source] += 1
            if i in mine:
                draws.append(Draw(source, int(self._order(source, epoch)[index])))
        return draws

    def copy(self) -> RowSampler:
        """Return a sampler at the same position that moves by itself."""
        twin = copy.copy(self)
        twin._consumed, twin._orders = list(self._consumed), dict(self._orders)
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON data, with what it depends on."""
        return {
            "consumed": list(self._consumed),
            "n_rows": list(self._n_rows),
            "shares": list(self._shares),
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position.

        Raises
        ------
        ConfigError
            If it belongs to other sources, weights or another seed.
        """
        own = self.state_dict()
        for key in ("n_rows", "shares", "seed"):
            if state.get(key) != own[key]:
                raise ConfigError(
                    f"cannot resume: the data's {key} is {own[key]}, the checkpoint's {state.get(key)}; "
                    "resume with the data and settings of the run"
                )
        self._consumed = list(state["consumed"])

    def _pick(self) -> int:
        if len(self._n_rows) == 1:
            return 0
        drawn = sum(self._consumed) + 1
        behind = [share * drawn - had for share, had in zip(self._shares, self._consumed, strict=True)]
        return behind.index(max(behind))

    def _order(self, source: int, epoch: int) -> NDArray[np.int64]:
        """Rows of an epoch in order; the last one used is kept."""
        known = self._orders.get(source)
        if known is None or known[0] != epoch:
            known = epoch, shuffled(self._n_rows[source], self._seed, source, epoch)
            self._orders[source] = known
        return known[1]


class PassSampler:
    """Draws every row once, source after source in the order of the files; ranks get equally many micro-batches.

    Parameters and errors are those of `RowSampler`.
    """

    def __init__(self, n_rows: Sequence[int], *, micro_batch_size: int = 1, rank: int = 0, world_size: int = 1) -> None:
        _check(n_rows, world_size)
        self._ends = np.cumsum(n_rows, dtype=np.int64)
        self._micro, self._rank, self._world = micro_batch_size, rank, world_size
        self._step = 0

    @property
    def n_rows(self) -> int:
        """Rows of the pass."""
        return int(self._ends[-1])

    def __len__(self) -> int:
        return math.ceil(self.n_rows / (self._micro * self._world))

    def next(self) -> list[Draw]:
        """Advance by one micro-batch and return this rank's draws, `NO_ROW` where there are none left."""
        first = (self._step * self._world + self._rank) * self._micro
        self._step += 1
        return [self._draw(index) for index in range(first, first + self._micro)]

    def copy(self) -> PassSampler:
        """Return a sampler at the same position that moves by itself."""
        return copy.copy(self)

    def _draw(self, index: int) -> Draw:
        if index >= self.n_rows:
            return NO_ROW
        source = int(np.searchsorted(self._ends, index, side="right"))
        return Draw(source, index - int(self._ends[source - 1] if source else 0))


def _check(n_rows: Sequence[int], world_size: int) -> None:
    if not n_rows or min(n_rows) < 1:
        raise DataError("a data source has no rows; give data that is not empty")
    if sum(n_rows) < world_size:
        raise DataError(
            f"{sum(n_rows)} rows cannot be shared out over {world_size} ranks; give more data or fewer ranks"
        )
