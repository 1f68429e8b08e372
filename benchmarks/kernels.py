"""Norms, rotary, the fused ops and sampling against plain torch and torch.compile, all in one run.

    python -m benchmarks.kernels --out gpu_out [--quick] [--floors] [--rows REGEX] [--budget SECONDS]

Every implementation gets its own output memory for each of the rotating operand sets (see benchmarks/measure.py). Before
anything is timed, the kernel's result is compared with the plain one. Columns: microseconds of the kernel, GB/s counting
each operand once, that rate as a share of a copy's, how many times longer the others take, the floor (norms, rotary, gates
and KV write: 3,500 GB/s on 64 MB and more, 3.5 us at up to 128 rows), and how many times over it is reached. ``--floors``
takes the rows that have one, without the others, in seconds. ``add_rms_norm`` is called as astrai_core calls it, with
``overlap``: in a model its residual was written two launches ago, here before the first call (128 x 8192 on an H200: 3.3 us,
3.9 us without).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import Rows, add_limits, buffer_sets, copy_bandwidth, graph_microseconds
from torch import Tensor

import astrai_kernels
from astrai_kernels import reference

DTYPE = torch.bfloat16
EPS = 1e-6
MAX_POS = 8192
VOCAB = 151_936
COLUMNS = ["op", "shape", "us", "GB/s", "of copy", "eager", "compile", "F.rms_norm", "floor", "of floor"]
FLOOR_OPS = ("rms_norm", "add_rms_norm", "rotary", "qkv", "silu", "gelu_tanh")
FLOOR_RATE, FLOOR_BYTES = 3500.0, 64e6  # GB/s, of operands this large
FLOOR_MICROSECONDS, FLOOR_ROWS = 3.5, 128


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
    tokens_by: Callable[..., Tensor] | None = None
    """Who says which token ids are right, where `plain` breaks ties in its own way."""


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

    def operands() -> tuple[Tensor, Tensor]:
        residual = randn(rows, hidden)  # first: `overlap` promises that a kernel has started since
        return randn(rows, hidden), residual

    def fused(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch.nn.functional.rms_norm(total, (hidden,), weight, EPS), total

    return Case(
        op="add_rms_norm",
        shape=f"{rows} x {hidden}",
        bytes=DTYPE.itemsize * (4 * rows + 1) * hidden,
        operands=operands,
        kernel=lambda x, residual: astrai_kernels.add_rms_norm(x, residual, weight, EPS, overlap=True),
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


def qkv_case(tokens: int, n_heads: int, n_kv_heads: int, head_dim: int, norms: bool) -> Case:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device="cuda") / head_dim)
    angles = torch.outer(torch.arange(MAX_POS, device="cuda"), frequencies)
    cos, sin = angles.cos(), angles.sin()
    position_ids = torch.arange(tokens, device="cuda") % MAX_POS
    slots = torch.randperm(tokens + 64, device="cuda")[:tokens]
    q_norm, k_norm = (randn(head_dim), randn(head_dim)) if norms else (None, None)
    heads = n_heads + 2 * n_kv_heads

    def kernel(qkv: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        return astrai_kernels.qkv_norm_rope_write(
            *(qkv, position_ids, cos, sin, k_pool, v_pool, slots, n_heads, n_kv_heads),
            q_norm=q_norm,
            k_norm=k_norm,
            eps=EPS,
        )

    def plain(qkv: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Hugging Face's norm and rotation, and an index_copy_ for each pool."""
        q, k, v = qkv.view(tokens, heads, head_dim).split((n_heads, n_kv_heads, n_kv_heads), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = reference.rms_norm(q, q_norm, EPS), reference.rms_norm(k, k_norm, EPS)
        c, s = (torch.cat((t, t), -1)[position_ids].to(q.dtype).unsqueeze(1) for t in (cos, sin))
        halves = (x.chunk(2, dim=-1) for x in (q, k))
        q, k = (x * c + torch.cat((-b, a), -1) * s for x, (a, b) in zip((q, k), halves, strict=True))
        k_pool.index_copy_(0, slots, k)
        v_pool.index_copy_(0, slots, v)
        return q

    return Case(
        op="qkv",
        shape=f"{tokens} x {n_heads}/{n_kv_heads} x {head_dim}{' norm' if norms else ''}",
        bytes=tokens * (2 * DTYPE.itemsize * heads * head_dim + 4 * head_dim + 16),
        operands=lambda: (
            randn(tokens, heads * head_dim),
            *(torch.empty(tokens + 64, n_kv_heads, head_dim, dtype=DTYPE, device="cuda") for _ in range(2)),
        ),
        kernel=kernel,
        plain=plain,
    )


def gated_case(rows: int, width: int, kind: str) -> Case:
    return Case(
        op=kind,
        shape=f"{rows} x {width}",
        bytes=3 * DTYPE.itemsize * rows * width,
        operands=lambda: (randn(rows, 2 * width),),
        kernel=lambda x: astrai_kernels.gated_activation(x, kind),
        plain=lambda x: reference.gated_activation(x, kind),
    )


def embedding_case(tokens: int, hidden: int) -> Case:
    table = randn(131072, hidden)
    return Case(
        op="embedding",
        shape=f"{tokens} x {hidden}",
        bytes=2 * DTYPE.itemsize * tokens * hidden + 8 * tokens,
        operands=lambda: (torch.randint(0, len(table), (tokens,), device="cuda"),),
        kernel=lambda ids: astrai_kernels.embedding(ids, table),
        plain=lambda ids: torch.nn.functional.embedding(ids, table),
    )


def argmax_case(rows: int) -> Case:
    return Case(
        op="argmax",
        shape=f"{rows} x {VOCAB}",
        bytes=DTYPE.itemsize * rows * VOCAB,
        operands=lambda: (randn(rows, VOCAB),),
        kernel=astrai_kernels.argmax,
        plain=lambda logits: logits.argmax(-1),
        tokens_by=reference.argmax,
    )


def sample_case(rows: int, top_k: int, top_p: float) -> Case:
    """Top-k and top-p over a whole vocabulary; the others sort the top-k first and draw from it."""
    temperature, p = torch.full((rows,), 0.8, device="cuda"), torch.full((rows,), top_p, device="cuda")
    k = torch.full((rows,), top_k, device="cuda")
    seed, position = torch.arange(rows, device="cuda"), torch.full((rows,), 77, device="cuda")

    def plain(logits: Tensor) -> Tensor:
        values, ids = (logits.float() / temperature.unsqueeze(1)).topk(top_k, dim=1)
        probs = values.softmax(1)
        probs = probs.masked_fill(probs.cumsum(1) - probs >= p.unsqueeze(1), 0)
        cumulative = probs.cumsum(1)
        u = reference.uniform(seed, position).float() * cumulative[:, -1]
        column = torch.searchsorted(cumulative, u.unsqueeze(1), right=True).clamp_max(top_k - 1)
        return ids.gather(1, column).squeeze(1)

    return Case(
        op="sample",
        shape=f"{rows} x {VOCAB} k {top_k} p {top_p}",
        bytes=DTYPE.itemsize * rows * VOCAB,
        operands=lambda: (3 * randn(rows, VOCAB),),
        kernel=lambda logits: astrai_kernels.sample(logits, temperature, k, p, None, seed, position),
        plain=plain,
        tokens_by=lambda logits: reference.sample(logits, temperature, k, p, None, seed, position),
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
            yield qkv_case(tokens, *heads, norms=heads == (16, 8, 128))
    for width in (8192,) if quick else (3072, 6912, 8192):
        for rows in (1, 128, 8192):
            yield gated_case(rows, width, "silu")
    yield gated_case(8192, 8192, "gelu_tanh")
    for tokens in (1, 128, 16384):
        yield embedding_case(tokens, 2048)
    for rows in (1, 128) if quick else (1, 8, 32, 128):
        yield argmax_case(rows)
        yield sample_case(rows, 50, 0.9)


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def check(case: Case) -> None:
    """Refuse to time a kernel whose result is wrong."""
    operands = case.operands()
    if case.tokens_by is not None:
        # A draw may differ where its number falls within rounding of a boundary.
        wrong = int((case.kernel(*operands) != case.tokens_by(*operands)).sum())
        if wrong > 1:
            raise AssertionError(f"{case.op} {case.shape}: {wrong} token ids differ from the reference")
        return
    for got, expected in zip(flat(case.kernel(*operands)), flat(case.plain(*operands)), strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=2**-6, atol=2**-5)


def measure(case: Case, copy_rate: float, peers: bool) -> dict[str, Any]:
    check(case)
    sets = [case.operands() for _ in range(buffer_sets(case.bytes))]

    def time(function: Callable[..., Any]) -> float:
        return graph_microseconds([functools.partial(function, *operands) for operands in sets])

    ours = time(case.kernel)
    rate = case.bytes / ours * 1e-3
    row: dict[str, Any] = {"op": case.op, "shape": case.shape, "us": ours, "GB/s": rate, "of copy": rate / copy_rate}
    if floor := floor_of(case):
        row["floor"], bound = floor
        row["of floor"] = rate / bound if row["floor"].endswith("GB/s") else bound / ours
    if peers:
        torch.compiler.reset()
        compiled = torch.compile(case.plain, fullgraph=True, dynamic=False)
        compiled(*sets[0])  # compiles outside the capture
        row["eager"] = time(case.plain) / ours
        row["compile"] = time(compiled) / ours
        if case.fused:
            row["F.rms_norm"] = time(case.fused) / ours
    return row


def floor_of(case: Case) -> tuple[str, float] | None:
    """Name and value of the floor that holds for a row: GB/s, or microseconds."""
    if case.op not in FLOOR_OPS:
        return None
    if case.bytes >= FLOOR_BYTES:
        return f"{FLOOR_RATE:.0f} GB/s", FLOOR_RATE
    if int(case.shape.partition(" ")[0]) <= FLOOR_ROWS:
        return f"{FLOOR_MICROSECONDS} us", FLOOR_MICROSECONDS
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_out"), help="folder for kernels.json")
    parser.add_argument("--quick", action="store_true", help="one hidden size and one set of heads")
    parser.add_argument("--floors", action="store_true", help="the rows that have a floor, without torch beside them")
    add_limits(parser)
    options = parser.parse_args()
    with torch.no_grad():
        copy_rate = copy_bandwidth()
        print(f"copy: {copy_rate:.0f} GB/s read and written")
        rows = Rows(options.out / "kernels.json", {"dtype": str(DTYPE), "copy GB/s": copy_rate}, options)
        missed = []
        for case in cases(options.quick):
            if (options.floors and floor_of(case) is None) or not rows.wants(f"{case.op} {case.shape}"):
                continue
            row = measure(case, copy_rate, peers=not options.floors)
            rows.add("rows", row, COLUMNS)
            if row.get("of floor", 1.0) < 1.0:
                missed.append(f"{case.op} {case.shape} {row['of floor']:.2f}")
    print(f"\nbelow the floor: {'; '.join(missed) or 'none'}")
    rows.close()


if __name__ == "__main__":
    main()
