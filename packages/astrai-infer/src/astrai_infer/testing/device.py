"""The road of a CUDA device on a CPU: its executor, with a stand-in for graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from astrai_infer.engine import InferenceEngine
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.runtime.executor import Executor
from astrai_infer.scheduler import InferenceScheduler
from astrai_infer.testing.engines import small_engine

R = TypeVar("R")


@contextlib.contextmanager
def steady(*, may_allocate: bool = False) -> Iterator[None]:
    """Fail if what runs within waits for the CUDA device, or takes memory by torch's allocator."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert may_allocate or torch.cuda.memory_stats()["allocation.all.allocated"] == before, "memory was allocated"


class Recorder:
    """Stands in for graph capture: the replay calls the work again and puts its result where the first one was.

    A capture runs nothing; what its call of the work did to the penalty history is undone.

    Attributes
    ----------
    n_replays
        Replays so far.
    """

    def __init__(self) -> None:
        self.executor: DeviceExecutor | None = None
        self.n_replays = 0

    def __call__(self, run: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """See :class:`astrai_infer.runtime.graph.Capture`."""
        assert self.executor is not None, "device_engine names the executor"
        info = self.executor.sampler.info
        history = [table.clone() for table in info.history] if info._counts is not None else []
        output = run()
        for table, before in zip(info.history if history else (), history, strict=True):
            table.copy_(before)
        if isinstance(output, torch.Tensor):
            output.fill_(float("nan"))

        def replay() -> None:
            self.n_replays += 1
            result = run()
            if isinstance(result, torch.Tensor) and isinstance(output, torch.Tensor):
                output.copy_(result)

        return replay, output


def device_engine(
    model: nn.Module,
    capture: Recorder | None,
    *,
    ahead: bool = True,
    draft_model: nn.Module | None = None,
    **config: Any,
) -> InferenceEngine:
    """Return a small engine whose executor is the device's, with tables that follow the host's only by what a step sends.

    Parameters
    ----------
    capture
        Stands in for graphs; None: there are none.
    ahead
        Launch a step before the one before is read, where nothing is in the way.
    draft_model, **config
        As for :func:`small_engine`.
    """
    engine = small_engine(model, draft_model=draft_model, **config)
    settings, plain = engine.config, engine.scheduler.executor
    assert isinstance(plain, Executor), "on a CPU steps run as they come"
    draft: Any = draft_model
    executor = DeviceExecutor(
        engine.model,
        engine.pool,
        plain.backend,
        engine.pool.n_rows,
        settings.max_batch_tokens,
        capture,
        adapters=plain.adapters,
        draft=draft,
        max_draft_tokens=0 if settings.speculation is None else settings.max_draft_tokens,
    )
    if capture is not None:
        capture.executor = executor
    for group in engine.pool.groups:
        group.req_to_token.table = group.req_to_token.table.clone()
    executor.prepare()
    engine._executor = executor
    engine.scheduler = InferenceScheduler(settings, engine.pool, executor, engine.tasks.make)
    if not ahead:
        engine.scheduler._ahead = None
    return engine
