"""What the scheduler asks of the pool and of the executor. No torch here."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from astrai_infer.task import Batch, StepResult, Task


class Pool(Protocol):
    """The KV pool (:class:`astrai_infer.cache.pool.PagePool`)."""

    @property
    def page_size(self) -> int: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def prefix(self) -> object | None: ...
    @property
    def capacity(self) -> int: ...
    def admit(self, token_ids: Sequence[int], namespace: Hashable, *, match: bool) -> tuple[int, int] | None: ...
    def record(self, row: int, token_ids: Sequence[int], computed_len: int) -> int: ...
    def extend(self, row: int, n_tokens: int) -> bool: ...
    def truncate(self, row: int, length: int) -> None: ...
    def release(self, row: int) -> None: ...
    def clear_prefix_cache(self) -> None: ...


class StepRunner(Protocol):
    """An executor (:class:`astrai_infer.runtime.executor.Executor`)."""

    def admit(self, task: Task) -> None: ...
    def run(self, batch: Batch) -> StepResult: ...


class Launched(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Wait for its end; call it once."""
        ...


@runtime_checkable
class AheadRunner(StepRunner, Protocol):
    """An executor whose steps need not be waited for (:class:`astrai_infer.runtime.device.DeviceExecutor`).

    Steps run in the order of their launches, and so does what :meth:`admit` writes. A step reads the newest token of each
    decoding task where the step before put it, so the host need not know it.
    """

    def launch(self, batch: Batch) -> Launched:
        """Start a step; the one before the last has been read."""
        ...
