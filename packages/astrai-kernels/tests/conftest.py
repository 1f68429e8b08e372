"""Fixtures of the kernel tests on a GPU; the marks ``gpu`` and ``kernel`` are in the top conftest (row TS1)."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Rule = Callable[..., None]


@pytest.fixture
def fresh_seed() -> int:
    """Seed torch anew, on every device, and print the seed, which pytest shows if the test fails."""
    seed = torch.seed()
    torch.manual_seed(seed)
    sys.stdout.write(f"torch.manual_seed({seed})\n")
    return seed


@pytest.fixture
def obeys_rule() -> Rule:
    """The correctness rule of the kernels.

    ``check(kernel, exact, same_precision)``: with (a) the fp32 reference on upcast inputs, (b) plain torch in the
    kernel's type and (c) the kernel, max|c - a| <= 2 max|b - a| + the rounding noise of a, and the cosine of c and a
    differs from 1 by at most 5e-6, or by `cosine` where operations follow one another (taken over 4096 elements or more:
    rounding errors of fewer do not average out).
    """

    def check(kernel: Tensor, exact: Tensor, same_precision: Tensor, cosine: float = 5e-6) -> None:
        assert kernel.dtype == same_precision.dtype
        assert kernel.shape == exact.shape
        if exact.numel() == 0:
            return
        c, a, b = kernel.double(), exact.double(), same_precision.double()
        assert c.isfinite().all(), "the kernel left poison behind, or made some"
        noise = 2.0**-19 * a.abs().max()
        error, allowed = (c - a).abs().max(), 2 * (b - a).abs().max() + noise
        assert error <= allowed, f"max|c - a| = {error:.3e}, allowed {allowed:.3e}"
        if a.numel() >= 4096:
            difference = 1 - torch.nn.functional.cosine_similarity(c.flatten(), a.flatten(), dim=0)
            assert difference <= cosine, f"cosine difference {difference:.2e}, allowed {cosine:.2e}"

    return check
