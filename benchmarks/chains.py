"""Products of 96 and 128 rows with the launch that follows each in a step, as core can chain them; all in one run.

    python -m benchmarks.chains --out gpu_out [--quick]

Rows are of two kinds. "down" and "o": cuBLAS's product and add_rms_norm ("plain us"), the same reading the residual before
the product has ended ("overlap"), and a batched product over 2 or 4 slices of K whose sums the norm adds up ("2 slices",
"4 slices"). "qkv": the product (the kernel's for one row) and qkv_norm_rope_write, plain and reading positions, slots and
angles early. All but the first are how many times faster than plain they are. Every call of a graph has a weight of its
own, so that each is read from memory; a chain begins with a norm of its input, as a step's do with a kernel that is no
product. "bmm us" is the batched product of core's slices alone, "linear us" cuBLAS's in one piece.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.linear import DTYPE, MODELS, Model, check
from benchmarks.measure import buffer_sets, graph_microseconds, table
from torch import Tensor

import astrai_kernels
from astrai_core.partial_sums import slices_of
from tools.gpu_results import write

ROWS = (96, 128)
EPS = 1e-5
COLUMNS = [
    "model",
    "chain",
    "shape",
    "rows",
    "plain us",
    "overlap",
    "2 slices",
    "4 slices",
    "core's",
    "linear us",
    "bmm us",
]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def in_slices(x: Tensor, weight: Tensor, slices: int) -> Tensor:
    """Return ``[slices, rows, out_features]`` fp32 sums over slices of K, of which neither operand is copied."""
    left = x.view(len(x), slices, -1).transpose(0, 1)
    return torch.bmm(left, weight.view(len(weight), slices, -1).permute(1, 2, 0), out_dtype=torch.float32)


def time(chain: Callable[[Tensor], Any], weights: Sequence[Tensor]) -> float:
    return graph_microseconds([functools.partial(chain, weight) for weight in weights])


def measure_sums(model: str, name: str, out_features: int, in_features: int) -> list[dict[str, Any]]:
    """Measure a product whose result joins the residual stream."""
    n_weights = buffer_sets(DTYPE.itemsize * out_features * in_features)
    weights = [randn(out_features, in_features) * in_features**-0.5 for _ in range(n_weights)]
    before, after = randn(in_features), randn(out_features)
    found = []
    for rows in ROWS:
        x, residual = randn(rows, in_features), randn(rows, out_features)

        def plain(weight: Tensor, overlap: bool = False, x: Tensor = x, residual: Tensor = residual) -> Any:
            product = torch.nn.functional.linear(astrai_kernels.rms_norm(x, before, EPS), weight)
            return astrai_kernels.add_rms_norm(product, residual, after, EPS, overlap=overlap)

        def cut(weight: Tensor, slices: int, x: Tensor = x, residual: Tensor = residual) -> Any:
            parts = in_slices(astrai_kernels.rms_norm(x, before, EPS), weight, slices)
            return astrai_kernels.add_rms_norm_partials(parts, residual, after, EPS, overlap=True)

        expected = plain(weights[0])
        for got in (plain(weights[0], overlap=True), cut(weights[0], 2), cut(weights[0], 4)):
            for one, other in zip(got, expected, strict=True):
                check(one, other)
        us = time(plain, weights)
        row = {
            "model": model,
            "chain": name,
            "shape": f"{out_features} x {in_features}",
            "rows": rows,
            "plain us": us,
            "overlap": us / time(functools.partial(plain, overlap=True), weights),
            **{f"{n} slices": us / time(functools.partial(cut, slices=n), weights) for n in (2, 4)},
            "core's": slices_of(out_features, in_features),
            "linear us": time(functools.partial(torch.nn.functional.linear, x), weights),
            "bmm us": time(
                functools.partial(in_slices, x, slices=max(2, slices_of(out_features, in_features))), weights
            ),
        }
        found.append(row)
        print(table([row], COLUMNS).splitlines()[1], flush=True)
    return found


def measure_qkv(model: Model, head_dim: int) -> list[dict[str, Any]]:
    """Measure the projection whose heads are rotated and go to the pool."""
    n_heads, n_kv_heads = model.q_size // head_dim, model.kv_size // head_dim
    out_features = model.q_size + 2 * model.kv_size
    n_weights = buffer_sets(DTYPE.itemsize * out_features * model.hidden)
    weights = [randn(out_features, model.hidden) * model.hidden**-0.5 for _ in range(n_weights)]
    norm = randn(model.hidden)
    angles = torch.rand(4096, head_dim // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    k_buffer, v_buffer = randn(2, 4096, n_kv_heads, head_dim)
    found = []
    for rows in (1, *ROWS):
        x = randn(rows, model.hidden)
        positions, slots = (torch.randperm(4096, device="cuda")[:rows] for _ in range(2))
        project = astrai_kernels.linear if rows == 1 else torch.nn.functional.linear

        def chain(
            weight: Tensor,
            overlap: bool = False,
            x: Tensor = x,
            positions: Tensor = positions,
            slots: Tensor = slots,
            project: Callable[[Tensor, Tensor], Tensor] = project,
        ) -> Tensor:
            qkv = project(astrai_kernels.rms_norm(x, norm, EPS), weight)
            return astrai_kernels.qkv_norm_rope_write(
                *(qkv, positions, cos, sin, k_buffer, v_buffer, slots, n_heads, n_kv_heads), overlap=overlap
            )

        check(chain(weights[0], overlap=True), chain(weights[0]))
        us = time(chain, weights)
        row = {
            "model": model.name,
            "chain": "qkv",
            "shape": f"{out_features} x {model.hidden}",
            "rows": rows,
            "plain us": us,
            "overlap": us / time(functools.partial(chain, overlap=True), weights),
        }
        found.append(row)
        print(table([row], COLUMNS).splitlines()[1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_out"), help="folder for chains.json")
    parser.add_argument("--quick", action="store_true", help="one model")
    options = parser.parse_args()
    rows = []
    with torch.no_grad():
        for model in MODELS[:1] if options.quick else MODELS:
            rows += measure_sums(model.name, "down", model.hidden, model.ffn)
            rows += measure_sums(model.name, "o", model.hidden, model.q_size)
            rows += measure_qkv(model, 128 if model.name == "qwen06" else 64)
    print()
    print(table(rows, COLUMNS))
    write(options.out / "chains.json", "chains", {"dtype": str(DTYPE), "rows": rows})


if __name__ == "__main__":
    main()
