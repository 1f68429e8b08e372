"""The top conftest: what every test of every wheel shares; tests/test_wheels_alone.py takes it along with each wheel.

A test says what it needs by a mark, and is skipped with the reason where that is missing (row TS1)::

    from conftest import skip_no_cuda, skip_no_kernel   # or @pytest.mark.gpu, @pytest.mark.kernel
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["skip_no_cuda", "skip_no_kernel"]

skip_no_cuda = pytest.mark.gpu
skip_no_kernel = pytest.mark.kernel

# Tests never download; those of the downloading code bring their own hub. Read by the libraries at their import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Commands under test buffer their output as a user's do; unbuffered, a missing flush would not be seen.
os.environ.pop("PYTHONUNBUFFERED", None)


@functools.cache
def no_cuda() -> str:
    """Return why there is no CUDA device, or "" where there is one."""
    import torch

    return "" if torch.cuda.is_available() else f"no CUDA device is visible to torch {torch.__version__}"


@functools.cache
def no_kernel() -> str:
    """Return why the compiled kernels cannot be loaded, or "" where they can. They load without a GPU."""
    if importlib.util.find_spec("astrai_kernels") is None:
        return "astrai-kernels is not installed"
    import astrai_kernels

    try:
        astrai_kernels.build_info()
    except ImportError as error:
        return str(error)
    return ""


MISSING: dict[str, Callable[[], str]] = {"gpu": no_cuda, "kernel": no_kernel}


def pytest_configure() -> None:
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        # Workers share the cores, so a time limit for one example would fail at random.
        settings.register_profile("astrai", deadline=None)
        settings.load_profile("astrai")


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Seed torch for each test, which draws the same whatever ran before it in its process."""
    if "torch" in sys.modules:  # where a test is the first to import it, the seed is torch's own constant
        sys.modules["torch"].manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests, the longest of them first, so that no worker is left with one at the end.

    With ``ASTRAI_TESTS_A_FILE`` in the environment, as many of each file are left.
    """
    if most := os.environ.get("ASTRAI_TESTS_A_FILE"):
        seen: Counter[Path] = Counter()
        for item in items:
            seen[item.path] += 1
            if seen[item.path] > int(most):
                item.add_marker(pytest.mark.skip(reason=f"only {most} of a file are wanted"))
    items.sort(key=lambda item: ("test_wheels_alone" not in item.nodeid, item.get_closest_marker("slow") is None))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, missing in MISSING.items():
        if item.get_closest_marker(mark) is not None and missing():
            pytest.skip(missing())
