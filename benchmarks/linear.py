"""linear against torch.nn.functional.linear (cuBLAS) on the projections of three models, all in one run.

    python -m benchmarks.linear --out gpu_out [--quick]

Every call of a graph has a weight of its own, so that each is read from memory (see benchmarks/measure.py); calls follow
each other on one stream, as in a model. Before anything is timed, the kernel's result is compared with the plain one.
Columns: microseconds of the kernel, GB/s counting each operand once, that rate as a share of a copy's, and how many
times longer cuBLAS takes for the product alone and for product and epilogue (eager). More than 128 rows are measured in
the fixed order of deterministic mode.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
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
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MANY_ROWS = (512, 2048, 8192)
COLUMNS = ["model", "projection", "shape", "rows", "us", "GB/s", "of copy", "TFLOP/s", "cuBLAS", "with epilogue"]


@dataclass(frozen=True)
class Model:
    """Sizes of a model's projections."""

    name: str
    hidden: int
    ffn: int
    q_size: int
    kv_size: int
    vocab: int


MODELS = (
    Model("preset", 1536, 6912, 24 * 64, 4 * 64, 100000),
    Model("llama1b", 2048, 8192, 32 * 64, 8 * 64, 128256),
    Model("qwen06", 1024, 3072, 16 * 128, 8 * 128, 151936),
)


@dataclass(frozen=True)
class Projection:
    """One weight ``[out_features, in_features]`` (swiglu: gate rows and up rows) and what follows the product."""

    model: str
    name: str
    out_features: int
    in_features: int
    residual: bool = False
    activation: str | None = None


def projections(models: Sequence[Model]) -> Iterator[Projection]:
    for m in models:
        yield Projection(m.name, "qkv", m.q_size + 2 * m.kv_size, m.hidden)
        yield Projection(m.name, "o", m.hidden, m.q_size, residual=True)
        yield Projection(m.name, "gate_up", 2 * m.ffn, m.hidden, activation="swiglu")
        yield Projection(m.name, "down", m.hidden, m.ffn, residual=True)
        yield Projection(m.name, "lm_head", m.vocab, m.hidden)


def check(got: Tensor, expected: Tensor) -> None:
    """Refuse to time a kernel whose result is wrong."""
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-6, atol=2**-5)


def measure(p: Projection, rows: int, weights: Sequence[Tensor], copy_rate: float) -> dict[str, Any]:
    x = torch.randn(rows, p.in_features, dtype=DTYPE, device="cuda")
    width = p.out_features // 2 if p.activation else p.out_features
    residual = torch.randn(rows, width, dtype=DTYPE, device="cuda") if p.residual else None
    options: dict[str, Any] = {"residual": residual, "activation": p.activation}
    kernel = functools.partial(astrai_kernels.linear, fixed_order=rows in MANY_ROWS, **options)
    check(kernel(x, weights[0]), reference.linear(x, weights[0], **options))

    def time(function: Callable[[Tensor], Any]) -> float:
        return graph_microseconds([functools.partial(function, weight) for weight in weights])

    ours = time(lambda weight: kernel(x, weight))
    moved = DTYPE.itemsize * (weights[0].numel() + x.numel() + rows * width * (2 if p.residual else 1))
    rate = moved / ours * 1e-3
    return {
        "model": p.model,
        "projection": p.name,
        "shape": f"{p.out_features} x {p.in_features}",
        "rows": rows,
        "us": ours,
        "GB/s": rate,
        "of copy": rate / copy_rate,
        "TFLOP/s": 2e-6 * rows * weights[0].numel() / ours,
        "cuBLAS": time(lambda weight: torch.nn.functional.linear(x, weight)) / ours,
        "with epilogue": time(lambda weight: reference.linear(x, weight, **options)) / ours,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_out"), help="folder for linear.json")
    parser.add_argument("--quick", action="store_true", help="one model, rows 1, 16, 128 and 2048")
    options = parser.parse_args()
    with torch.no_grad():
        copy_rate = copy_bandwidth()
        print(f"copy: {copy_rate:.0f} GB/s read and written")
        rows = []
        for p in projections(MODELS[:1] if options.quick else MODELS):
            bytes_of_weight = DTYPE.itemsize * p.out_features * p.in_features
            scale = p.in_features**-0.5
            weights = [
                torch.randn(p.out_features, p.in_features, dtype=DTYPE, device="cuda") * scale
                for _ in range(buffer_sets(bytes_of_weight))
            ]
            many = () if p.name == "lm_head" else MANY_ROWS  # a prefill projects the last row of a prompt alone
            for count in (1, 16, 128, 2048) if options.quick else (*ROWS, *many):
                rows.append(measure(p, count, weights, copy_rate))
                print(table([rows[-1]], COLUMNS).splitlines()[1], flush=True)
            del weights
    print()
    print(table(rows, COLUMNS))
    write(options.out / "linear.json", "linear", {"dtype": str(DTYPE), "copy GB/s": copy_rate, "rows": rows})


if __name__ == "__main__":
    main()
