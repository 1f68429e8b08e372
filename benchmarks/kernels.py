"""rms_norm, add_rms_norm and apply_rotary against plain torch and torch.compile, all in one run.

    python -m benchmarks.kernels --out gpu_out [--quick]

Every implementation gets its own output memory for each of the rotating operand sets (see benchmarks/measure.py). Before
anything is timed, the kernel's result is compared with the plain one. Columns: microseconds of the kernel, GB/s counting
each operand once, that rate as a share of a copy's, and how many times longer the others take.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import buffer_sets, copy_bandwidth, graph_microseconds, table
from torch import Tensor

import astrai_kernels
from astrai_kernels import reference
from tools.gpu_results import write

DTYPE = torch.bfloat16
EPS = 1e-6
MAX_POS = 8192
COLUMNS = ["op", "shape", "us", "GB/s", "of copy", "eager", "compile", "F.rms_norm"]


@dataclass(frozen=True)
class Case:
    """One row of the table: how to make operands, the bytes they hold, and who computes with them."""

    op: str
    shape: str
    bytes: int
    operands: Callable[[], tuple[Tensor, ...]]
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    fused: Callable[..., Any] | None = None


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def rms_norm_case(rows: int, hidden: int) -> Case:
    weight = randn(hidden)
    return Case(
        op="rms_norm",
        shape=f"{rows} x {hidden}",
        bytes=DTYPE.itemsize * (2 * rows + 1) * hidden,
        operands=lambda: (randn(rows, hidden),),
        kernel=lambda x: astrai_kernels.rms_norm(x, weight, EPS),
        plain=lambda x: reference.rms_norm(x, weight, EPS),
        fused=lambda x: torch.nn.functional.rms_norm(x, (hidden,), weight, EPS),
    )


def add_rms_norm_case(rows: int, hidden: int) -> Case:
    weight = randn(hidden)

    def fused(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch.nn.functional.rms_norm(total, (hidden,), weight, EPS), total

    return Case(
        op="add_rms_norm",
        shape=f"{rows} x {hidden}",
        bytes=DTYPE.itemsize * (4 * rows + 1) * hidden,
        operands=lambda: (randn(rows, hidden), randn(rows, hidden)),
        kernel=lambda x, residual: astrai_kernels.add_rms_norm(x, residual, weight, EPS),
        plain=lambda x, residual: reference.add_rms_norm(x, residual, weight, EPS),
        fused=fused,
    )


def rotary_case(tokens: int, q_heads: int, k_heads: int, head_dim: int) -> Case:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device="cuda") / head_dim)
    angles = torch.outer(torch.arange(MAX_POS, device="cuda"), frequencies)
    cos, sin = angles.cos(), angles.sin()
    position_ids = torch.arange(tokens, device="cuda") % MAX_POS

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Hugging Face's computation: tables cast to the type of q, ``x * cos + rotate_half(x) * sin``."""
        c, s = (torch.cat((t, t), -1)[position_ids].to(q.dtype).unsqueeze(1) for t in (cos, sin))
        halves = (x.chunk(2, dim=-1) for x in (q, k))
        return tuple(x * c + torch.cat((-b, a), -1) * s for x, (a, b) in zip((q, k), halves, strict=True))

    return Case(
        op="rotary",
        shape=f"{tokens} x {q_heads}/{k_heads} x {head_dim}",
        bytes=tokens * (2 * DTYPE.itemsize * (q_heads + k_heads) * head_dim + 4 * head_dim + 8),
        operands=lambda: (randn(tokens, q_heads, head_dim), randn(tokens, k_heads, head_dim)),
        kernel=lambda q, k: astrai_kernels.apply_rotary(q, k, cos, sin, position_ids),
        plain=plain,
    )


def cases(quick: bool) -> Iterator[Case]:
    """Decode sizes and sizes of 64 MB and more; hidden sizes and heads of the models that figures are kept for."""
    for case in (rms_norm_case, add_rms_norm_case):
        for hidden in (2048,) if quick else (1536, 2048, 4096, 8192):
            yield case(1, hidden)
            yield case(128, hidden)
            yield case((1 << 25) // hidden, hidden)
    for heads in ((32, 8, 128),) if quick else ((24, 4, 64), (16, 8, 128), (32, 8, 128)):
        for tokens in (1, 128, 16384):
            yield rotary_case(tokens, *heads)


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def check(case: Case) -> None:
    """Refuse to time a kernel whose result is wrong."""
    operands = case.operands()
    for got, expected in zip(flat(case.kernel(*operands)), flat(case.plain(*operands)), strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=2**-6, atol=2**-5)


def measure(case: Case, copy_rate: float) -> dict[str, Any]:
    check(case)
    torch.compiler.reset()
    sets = [case.operands() for _ in range(buffer_sets(case.bytes))]

    def time(function: Callable[..., Any]) -> float:
        return graph_microseconds([functools.partial(function, *operands) for operands in sets])

    compiled = torch.compile(case.plain, fullgraph=True, dynamic=False)
    compiled(*sets[0])  # compiles outside the capture
    ours = time(case.kernel)
    rate = case.bytes / ours * 1e-3
    return {
        "op": case.op,
        "shape": case.shape,
        "us": ours,
        "GB/s": rate,
        "of copy": rate / copy_rate,
        "eager": time(case.plain) / ours,
        "compile": time(compiled) / ours,
        "F.rms_norm": time(case.fused) / ours if case.fused else "-",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_out"), help="folder for kernels.json")
    parser.add_argument("--quick", action="store_true", help="one hidden size and one set of heads")
    options = parser.parse_args()
    with torch.no_grad():
        copy_rate = copy_bandwidth()
        print(f"copy: {copy_rate:.0f} GB/s read and written")
        rows = []
        for case in cases(options.quick):
            rows.append(measure(case, copy_rate))
            print(table([rows[-1]], COLUMNS).splitlines()[1], flush=True)
    print()
    print(table(rows, COLUMNS))
    write(options.out / "kernels.json", "kernels", {"dtype": str(DTYPE), "copy GB/s": copy_rate, "rows": rows})


if __name__ == "__main__":
    main()
