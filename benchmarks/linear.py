"""linear against torch.nn.functional.linear (cuBLAS) on the projections of three models, all in one run.

    python -m benchmarks.linear --out gpu_out [--quick] [--many] [--rows REGEX] [--budget SECONDS]

Calls of a graph take turns with more weights than L2 holds, so that each is read from memory (see benchmarks/measure.py);
they follow each other on one stream, as in a model, and are so many that the graph's own start (3 to 5 us on an H200) does
not count. Before anything is timed, the kernel's result is compared with the plain one. Columns: microseconds of the
kernel; GB/s counting each operand once; that rate over a copy's of 1 GiB ("of copy"), and over that of a copy which reads
half of the weight and writes as much, in a graph of as many calls ("copy alike us" is its time: no launch moves 5 MB at
the rate of 1 GiB); how many times longer cuBLAS takes for the product alone and for product and epilogue (eager). At the
end, what misses the floors of :data:`COPY_FLOOR` and cuBLAS. ``--many`` adds 512, 2,048 and 8,192 rows, which are measured
in the fixed order of deterministic mode.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import MOST_CALLS, Rows, add_limits, buffer_sets, copy_bandwidth, graph_microseconds
from torch import Tensor

import astrai_kernels
from astrai_kernels import reference

DTYPE = torch.bfloat16
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MANY_ROWS = (512, 2048, 8192)
COLUMNS = [
    "model", "projection", "shape", "rows", "us", "GB/s", "of copy", "copy alike us", "of copy alike", "TFLOP/s", "cuBLAS",
    "with epilogue",
]  # fmt: skip
COPY_FLOOR = 0.8  # of the copy's rate
COPY_FLOOR_ROWS = 8  # up to these
PEER_FLOOR_ROWS = 32  # up to these linear is to be ahead of cuBLAS
GRAPH_BYTES = 2e9  # of weights that a graph reads, if that takes at most MOST_CALLS calls: some 0.5 ms


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


def copy_alike_microseconds(weights: Sequence[Tensor], calls: int) -> float:
    """Time a copy that reads half of a weight and writes as much elsewhere, by the faster of torch's two kernels for it."""
    halves = [weight.flatten().view(torch.float32)[: weight.numel() // 4] for weight in weights]
    targets = [torch.empty_like(half) for half in halves]

    def time(copy: Callable[[Tensor, Tensor], Any]) -> float:
        pairs = [(halves[i % len(halves)], targets[i % len(halves)]) for i in range(calls)]
        return graph_microseconds([functools.partial(copy, source, target) for source, target in pairs])

    # As a graph's memcpy node, and by an elementwise kernel.
    return min(
        time(lambda source, target: target.copy_(source)), time(lambda source, target: torch.neg(source, out=target))
    )


def measure(
    p: Projection, rows: int, weights: Sequence[Tensor], calls: int, copy_rate: float, alike: float
) -> dict[str, Any]:
    x = torch.randn(rows, p.in_features, dtype=DTYPE, device="cuda")
    width = p.out_features // 2 if p.activation else p.out_features
    residual = torch.randn(rows, width, dtype=DTYPE, device="cuda") if p.residual else None
    options: dict[str, Any] = {"residual": residual, "activation": p.activation}
    kernel = functools.partial(astrai_kernels.linear, fixed_order=rows in MANY_ROWS, **options)
    check(kernel(x, weights[0]), reference.linear(x, weights[0], **options))

    def time(function: Callable[[Tensor], Any]) -> float:
        return graph_microseconds([functools.partial(function, weights[i % len(weights)]) for i in range(calls)])

    ours = time(lambda weight: kernel(x, weight))
    weight_bytes = DTYPE.itemsize * weights[0].numel()
    moved = weight_bytes + DTYPE.itemsize * (x.numel() + rows * width * (2 if p.residual else 1))
    rate = moved / ours * 1e-3
    return {
        "model": p.model,
        "projection": p.name,
        "shape": f"{p.out_features} x {p.in_features}",
        "rows": rows,
        "us": ours,
        "GB/s": rate,
        "of copy": rate / copy_rate,
        "copy alike us": alike,
        "of copy alike": rate / (weight_bytes / alike * 1e-3),
        "TFLOP/s": 2e-6 * rows * weights[0].numel() / ours,
        "cuBLAS": time(lambda weight: torch.nn.functional.linear(x, weight)) / ours,
        "with epilogue": time(lambda weight: reference.linear(x, weight, **options)) / ours,
    }


def label(row: dict[str, Any], column: str) -> str:
    return f"{row['model']} {row['projection']} {row['rows']} rows {row[column]:.2f}"


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    """Say what misses a floor, and how linear stands against cuBLAS at each number of rows."""
    few = [row for row in rows if row["rows"] <= COPY_FLOOR_ROWS]
    for column in ("of copy", "of copy alike"):
        low = [label(row, column) for row in few if row[column] < COPY_FLOOR]
        found = f"{len(low)} of {len(few)}: {'; '.join(low) or 'none'}"
        print(f"\n{column}, up to {COPY_FLOOR_ROWS} rows, below {COPY_FLOOR} in {found}")
    for count in dict.fromkeys(row["rows"] for row in rows):
        same = [row for row in rows if row["rows"] == count]
        for column in ("cuBLAS", "with epilogue"):
            factors = [row[column] for row in same]
            print(f"{count:5} rows, {column:13}: {min(factors):.2f} to {max(factors):.2f} times as long", end="")
            behind = [label(row, column) for row in same if row[column] < 1.0]
            print(f"; behind: {'; '.join(behind)}" if behind and count <= PEER_FLOOR_ROWS else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_out"), help="folder for linear.json")
    parser.add_argument("--quick", action="store_true", help="one model, rows 1, 16, 128 and 2048")
    parser.add_argument("--many", action="store_true", help="also 512, 2048 and 8192 rows")
    add_limits(parser)
    options = parser.parse_args()
    counts = (1, 16, 128, 2048) if options.quick else (*ROWS, *(MANY_ROWS if options.many else ()))
    with torch.no_grad():
        copy_rate = copy_bandwidth()
        print(f"copy: {copy_rate:.0f} GB/s read and written")
        rows = Rows(options.out / "linear.json", {"dtype": str(DTYPE), "copy GB/s": copy_rate}, options)
        measured: list[dict[str, Any]] = []
        for p in projections(MODELS[:1] if options.quick else MODELS):
            # A prefill projects the last row of a prompt alone.
            wanted = [
                count
                for count in counts
                if not (p.name == "lm_head" and count in MANY_ROWS) and rows.wants(f"{p.model} {p.name} {count} rows")
            ]
            if not wanted:
                continue
            weight_bytes = DTYPE.itemsize * p.out_features * p.in_features
            scale = p.in_features**-0.5
            weights = [
                torch.randn(p.out_features, p.in_features, dtype=DTYPE, device="cuda") * scale
                for _ in range(buffer_sets(weight_bytes))
            ]
            calls = max(len(weights), min(MOST_CALLS, -(-int(GRAPH_BYTES) // weight_bytes)))
            alike = copy_alike_microseconds(weights, calls)
            for count in wanted:
                some = len(weights) if count in MANY_ROWS else calls  # these take long by themselves
                measured.append(measure(p, count, weights, some, copy_rate, alike))
                rows.add("rows", measured[-1], COLUMNS)
            del weights
    print_summary(measured)
    rows.close()


if __name__ == "__main__":
    main()
