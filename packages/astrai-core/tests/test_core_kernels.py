"""The door to the kernels wheel: what :func:`astrai_core.kernels.status` makes of each installation (rows B3, A2)."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from astrai_core import kernels
from astrai_core.errors import BackendError

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Stand a kernels wheel in: its ``build_info``, and what torch says of its CUDA and of the devices."""

    def stand_in(build_info: Callable[[], Any] | None, torch_cuda: str | None = "13.0", devices: bool = True) -> None:
        wheel = ModuleType("astrai_kernels")
        if build_info is not None:
            wheel.build_info = build_info  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "astrai_kernels", wheel)
        monkeypatch.setattr(importlib.metadata, "version", {"astrai-kernels": "0.1.0+cu130"}.__getitem__)
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices)
        kernels.status.cache_clear()

    yield stand_in
    kernels.status.cache_clear()


def cuda13() -> dict[str, Any]:
    return {"version": "0.1.0+cu130", "cudart_version": 13000}


def raising(error: Exception) -> Callable[[], Any]:
    def build_info() -> Any:
        raise error

    return build_info


@pytest.mark.parametrize(
    ("cudart", "torch_cuda", "remedy"),
    [
        (13000, "13.0", None),
        (13000, "13.2", None),
        (12080, "12.9", None),
        (13000, "12.8", "reinstall astrai-kernels from the cu128 index, which fits torch's CUDA 12.8"),
        (12080, "13.0", "reinstall astrai-kernels from the cu130 index, which fits torch's CUDA 13.0"),
        (13000, "11.8", "install a torch built for CUDA 13"),
        (12080, None, "install a CUDA build of torch"),
    ],
)
def test_only_the_cuda_major_must_agree(cudart: int, torch_cuda: str | None, remedy: str | None) -> None:
    """B3: the wheel links no libtorch; a mismatch names the index to reinstall from."""
    assert kernels.cuda_mismatch(cudart, torch_cuda) == remedy


def test_kernels_that_fit(install: Install) -> None:
    install(cuda13)
    assert kernels.status() == kernels.KernelStatus(True, "0.1.0+cu130", "", "")


@pytest.mark.parametrize(
    ("build_info", "torch_cuda", "devices", "reason", "remedy"),
    [
        (
            cuda13,
            "12.8",
            True,
            "built for CUDA 13, torch has CUDA 12.8",
            "reinstall astrai-kernels from the cu128 index",
        ),
        (cuda13, None, True, "built for CUDA 13, torch has CUDA none", "install a CUDA build of torch"),
        (cuda13, "13.0", False, "no CUDA device is visible", "check the driver and CUDA_VISIBLE_DEVICES"),
        (raising(ImportError("libfoo.so")), "13.0", True, "its extension does not load: libfoo.so", "reinstall"),
        (None, "13.0", True, "its extension is of another version (AttributeError: module 'astrai_", "reinstall"),
        (
            raising(KeyError("architectures")),
            "13.0",
            True,
            "of another version (KeyError: 'architectures')",
            "reinstall",
        ),
        (dict, "13.0", True, "of another version (KeyError: 'cudart_version')", "reinstall astrai-kernels"),
        (lambda: {**cuda13(), "version": "0.0.9"}, "13.0", True, "its extension is of version 0.0.9", "reinstall"),
    ],
)
def test_kernels_that_do_not_fit_are_one_line_with_the_remedy(
    install: Install,
    build_info: Callable[[], Any] | None,
    torch_cuda: str | None,
    devices: bool,
    reason: str,
    remedy: str,
) -> None:
    """B3, A2: a wheel for another CUDA, no device, a broken or a stale extension; asking for the kernels says it too."""
    install(build_info, torch_cuda, devices)
    found = kernels.status()
    assert (found.available, found.version) == (False, "0.1.0+cu130")
    assert reason in found.reason
    assert found.remedy.startswith(remedy)
    with pytest.raises(BackendError) as caught:
        kernels.module("fused")
    assert str(caught.value) == f"astrai-kernels cannot be used: {found.reason}; {found.remedy}"
    assert "\n" not in str(caught.value)
