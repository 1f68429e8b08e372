"""Decode steps as one kernel (G2): which of an engine's steps it runs, and who is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from astrai_core import kernels
from astrai_core.attention.cuda import CudaBackend
from astrai_core.attention.metadata import KVCache
from astrai_core.attention.torch_native import TorchNativeBackend
from astrai_core.errors import ConfigError
from astrai_core.model import whole_step
from astrai_core.model.whole_step import STEP_ROWS, WholeStep
from astrai_infer import EngineConfig
from astrai_infer.runtime.build import step_kernel
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.runtime.shapes import StepShape
from astrai_infer.testing import Recorder, device_engine, small_engine, tiny_model


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"deterministic": True}, "deterministic is True"),
        ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype is 'float8_e4m3fn'"),
        ({"adapters": object()}, "there is room for adapters"),
        ({"model": "it has experts"}, "it has experts"),
        ({"backend": TorchNativeBackend()}, "it needs a CUDA device and the backend cuda"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_who_decodes_by_one_kernel(changes, why, monkeypatch):
    """G2: left alone, a request alone where the kernel can; by name, as many as it takes or a refusal; or never."""
    parts = {"model": None, "adapters": None, "backend": CudaBackend.__new__(CudaBackend)} | changes
    reason, adapters, backend = (parts.pop(name) for name in ("model", "adapters", "backend"))
    monkeypatch.setattr(WholeStep, "unavailable", staticmethod(lambda model: reason))
    monkeypatch.setattr(kernels, "module", lambda name: SimpleNamespace(MOST_ROWS=8))
    model = tiny_model()

    def choose(wanted: bool | None) -> WholeStep | None:
        return step_kernel(model, EngineConfig(step_kernel=wanted, **parts), adapters, backend)

    assert choose(False) is None
    monkeypatch.setattr(whole_step, "STEP_LAYER_BYTES", 0)
    assert choose(None) is None, "large layers are left to the ops"
    monkeypatch.setattr(whole_step, "STEP_LAYER_BYTES", 1 << 30)
    if why is None:
        assert [whole.most_rows for whole in (choose(None), choose(True)) if whole is not None] == [STEP_ROWS, 8]
        return
    assert choose(None) is None
    with pytest.raises(ConfigError, match=f"step_kernel is True but {why}"):
        choose(True)


def test_an_engine_on_a_cpu_has_none_unless_asked():
    """Left alone it runs op by op there."""
    for choice in (None, False):
        assert small_engine(tiny_model(), step_kernel=choice).config.step_kernel is choice


class Counted:
    """Stands for the kernel: takes decode steps of up to `most_rows` requests, and counts them by their rows."""

    def __init__(self, most_rows: int, vocab_size: int) -> None:
        self.most_rows = most_rows
        self.vocab_size = vocab_size
        self.rows: list[int] = []
        self.forgotten = 0

    def takes(self, ids: Tensor, cache: KVCache) -> bool:
        return cache.phase == "decode" and ids.shape[0] <= self.most_rows

    def run(self, ids: Tensor, position_ids: Tensor, cache: KVCache) -> Tensor:
        self.rows.append(ids.shape[0])
        return torch.zeros(ids.shape[0], self.vocab_size)

    def forget(self) -> None:
        self.forgotten += 1


@pytest.mark.parametrize("most_rows", [1, 8])
def test_each_bucket_is_the_kernel_or_the_ops(most_rows):
    """What a bucket is captured as follows from its rows; steps with chunks are never the kernel's."""
    plain = device_engine(tiny_model(), None, max_num_seqs=8).scheduler.executor
    assert isinstance(plain, DeviceExecutor)
    whole: Any = Counted(most_rows, plain.model.config.vocab_size)
    executor = DeviceExecutor(plain.model, plain.pool, plain.backend, 8, 64, Recorder(), whole_step=whole)
    for n in (1, 2, 4, 8):
        executor.run_padding(StepShape(n))
    executor.run_padding(StepShape(0, 16, 1))
    executor.run_padding(StepShape(1, 16, 1))
    assert whole.rows == [n for n in (1, 2, 4, 8) if n <= most_rows]
    executor.forget()
    assert whole.forgotten == 1
