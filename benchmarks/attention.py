"""Decode and prefill attention against SDPA, FA3 and FlashInfer, all in one run.

    python -m benchmarks.attention --out gpu_out [--quick] [--rows REGEX] [--budget SECONDS] [--peers flashinfer,fa3_fwd]

Decode: GB/s of the keys and values read, by graph replay over rotating pools larger than L2. Pages lie in random order;
FA3 (fa3-fwd) reads contiguous buffers; FlashInfer's plan stands outside the timed region, as ours does. Prefill: TFLOP/s
of causal attention (half of the score matrix counted). A peer that is not installed is left out by name. Before anything
is timed, each result is compared with torch's own attention. Rows are printed and written as they come. FlashInfer compiles
its kernels when a head size is first used, a minute or more each: the rows of a head size follow each other.

"of floor": decode, over 0.95 of the faster peer; prefill, over 0.9 of SDPA's flash kernel.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.measure import Rows, add_limits, graph_microseconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from astrai_kernels import DecodePlan, decode_attention, prefill_attention

DECODE = [
    (heads, kv_heads, head_dim, batch, length)
    for heads, kv_heads, head_dim in ((24, 4, 64), (32, 8, 128), (32, 8, 64))
    for batch, length in (
        *((1, 576), (1, 2048), (1, 32768), (8, 576), (8, 8192), (32, 576), (32, 2048), (32, 8192)),
        *((128, 576), (128, 2048), (128, 8192)),
    )
]
PREFILL = [
    (4, 2048, 24, 4, 64),
    (1, 16384, 24, 4, 64),
    (4, 2048, 32, 8, 128),
    (1, 16384, 32, 8, 128),
    (8, 512, 32, 8, 128),
]
ROTATE_BYTES = 200e6
RAGGED = "ragged"
PEERS = ("flashinfer", "fa3_fwd")
DECODE_FLOOR, PREFILL_FLOOR = 0.95, 0.9
DECODE_COLUMNS = [
    "heads",
    "B",
    "KV",
    "us",
    "astrai",
    "page 1",
    "FlashInfer",
    "FA3",
    "of best",
    "of floor",
    "page 1 of 16",
]
PREFILL_COLUMNS = ["B", "S", "heads", "us", "astrai", "SDPA flash", "SDPA cuDNN", "FA3", "of flash", "of floor"]


class DecodeCase:
    """Pools, tables and queries of one row; several pools, so that a replay cannot live on L2."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, lens: list[int]) -> None:
        self.shape = (heads, kv_heads, head_dim)
        self.lens = lens
        self.bytes = 4 * sum(lens) * kv_heads * head_dim
        self.longest = max(lens)
        self.n_pools = max(2, min(64, math.ceil(ROTATE_BYTES / self.bytes)))
        self.pages_of = [-(-n // 16) for n in lens]
        self.pages = torch.randperm(sum(self.pages_of), device="cuda")
        size = 16 * len(self.pages)
        self.pools = [torch.randn((2, size, kv_heads, head_dim), device="cuda").bfloat16() for _ in range(self.n_pools)]
        self.q = torch.randn((len(lens), heads, head_dim), device="cuda").bfloat16()
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")

    def slots(self, page_size: int) -> Tensor:
        """``[batch, longest]`` int32 table over pages of 16 or single tokens in random order."""
        out = torch.zeros((len(self.lens), self.longest), dtype=torch.int32, device="cuda")
        tokens = torch.randperm(16 * len(self.pages), device="cuda")
        first = 0
        for b, n in enumerate(self.lens):
            if page_size == 1:
                out[b, :n] = tokens[16 * first : 16 * first + n]
            else:
                own = self.pages[first : first + self.pages_of[b]]
                out[b, :n] = (own.unsqueeze(1) * 16 + torch.arange(16, device="cuda")).flatten()[:n]
            first += self.pages_of[b]
        return out

    def expected(self, slots: Tensor) -> Tensor:
        k, v = self.pools[0]
        rows = []
        for b, n in enumerate(self.lens):
            own = slots[b, :n].long()
            keys, values = (x[own].transpose(0, 1).unsqueeze(0) for x in (k, v))
            rows.append(
                F.scaled_dot_product_attention(self.q[b, :, None][None], keys, values, enable_gqa=True)[0, :, 0]
            )
        return torch.stack(rows)

    def ours(self, slots: Tensor) -> list[Callable[[], Tensor]]:
        heads, kv_heads, head_dim = self.shape
        plan = DecodePlan(len(self.lens), heads, kv_heads, head_dim, self.q.device)
        plan.update(self.seq_lens)
        out = torch.empty_like(self.q)
        run = partial(decode_attention, self.q, plan=plan, req_to_token=slots, out=out, overlap=True)
        return [partial(run, pool[0], pool[1]) for pool in self.pools]

    def flashinfer(self, page_size: int) -> list[Callable[[], Tensor]]:
        import flashinfer

        heads, kv_heads, head_dim = self.shape
        scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=True)
        pages = [-(-n // page_size) for n in self.lens]
        indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
        table = self.slots(page_size)
        if page_size == 1:
            indices = torch.cat([table[b, :n] for b, n in enumerate(self.lens)])
        else:
            indices = self.pages.int()
        last = torch.tensor([(n - 1) % page_size + 1 for n in self.lens], dtype=torch.int32)
        wrapper.plan(
            indptr, indices, last, heads, kv_heads, head_dim, page_size,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        paged = [p.view(2, -1, page_size, kv_heads, head_dim) for p in self.pools]
        return [partial(wrapper.run, self.q, (p[0], p[1])) for p in paged]

    def fa3(self) -> list[Callable[[], Any]]:
        """Contiguous, equal lengths only."""
        import fa3_fwd._C  # noqa: F401  (registers torch.ops.fa3_fwd)

        _, kv_heads, head_dim = self.shape
        n, batch = self.longest, len(self.lens)
        scale = head_dim**-0.5

        def call(pool: Tensor) -> Any:
            k, v = (x[: batch * n].view(batch, n, kv_heads, head_dim) for x in pool)
            return torch.ops.fa3_fwd.fwd(self.q.unsqueeze(1), k, v, softmax_scale=scale, is_causal=True, num_splits=0)

        return [partial(call, pool) for pool in self.pools]


def decode_row(
    heads: int, kv_heads: int, head_dim: int, lens: list[int], label: str, peers: set[str]
) -> dict[str, Any]:
    case = DecodeCase(heads, kv_heads, head_dim, lens)
    slots = case.slots(16)
    runs: dict[str, list[Callable[[], Any]]] = {"astrai": case.ours(slots), "page 1": case.ours(case.slots(1))}
    torch.testing.assert_close(runs["astrai"][0]().float(), case.expected(slots).float(), rtol=2e-2, atol=2e-2)
    if "flashinfer" in peers:
        runs["FlashInfer"] = case.flashinfer(16)
        torch.testing.assert_close(runs["FlashInfer"][0]().float(), case.expected(slots).float(), rtol=2e-2, atol=2e-2)
    if "fa3_fwd" in peers and len(set(lens)) == 1:
        runs["FA3"] = case.fa3()
    calls = max(case.n_pools, 16)
    us = {name: graph_microseconds([run[i % len(run)] for i in range(calls)]) for name, run in runs.items()}
    row: dict[str, Any] = {"heads": f"{heads}/{kv_heads} d{head_dim}", "B": len(lens), "KV": label}
    row["us"] = us["astrai"]
    row.update({name: case.bytes / value * 1e-3 for name, value in us.items()})
    best = max((row[name] for name in ("FlashInfer", "FA3") if name in row), default=None)
    if best:
        row["of best"] = row["astrai"] / best
        row["of floor"] = row["of best"] / DECODE_FLOOR
    row["page 1 of 16"] = row["page 1"] / row["astrai"]
    return row


def prefill_row(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, peers: set[str]) -> dict[str, Any]:
    tokens = batch * length
    q, k, v = (torch.randn((batch, length, n, head_dim), device="cuda").bfloat16() for n in (heads, kv_heads, kv_heads))
    slots = (torch.randperm(tokens // 16, device="cuda").unsqueeze(1) * 16 + torch.arange(16, device="cuda")).flatten()
    pool_k, pool_v = (torch.empty_like(x).flatten(0, 1) for x in (k, v))
    pool_k[slots], pool_v[slots] = k.flatten(0, 1), v.flatten(0, 1)
    table_ = slots.int().view(batch, length)
    indptr = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q).flatten(0, 1)

    def ours() -> Tensor:
        return prefill_attention(q.flatten(0, 1), pool_k, pool_v, indptr, lens, req_to_token=table_, out=out)

    def sdpa(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            )

    runs: dict[str, Callable[[], Any]] = {
        "astrai": ours,
        "SDPA flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    }
    if "fa3_fwd" in peers:
        import fa3_fwd._C  # noqa: F401

        runs["FA3"] = partial(
            torch.ops.fa3_fwd.fwd, q, k, v, softmax_scale=head_dim**-0.5, is_causal=True, num_splits=1
        )
    expected = runs["SDPA flash"]().transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(ours().float(), expected.float(), rtol=2e-2, atol=2e-2)
    us = {name: graph_microseconds([run] * 4) for name, run in runs.items()}
    operations = 2.0 * batch * length * length * heads * head_dim
    row: dict[str, Any] = {"B": batch, "S": length, "heads": f"{heads}/{kv_heads} d{head_dim}", "us": us["astrai"]}
    row.update({name: operations / value * 1e-6 for name, value in us.items()})
    row["of flash"] = row["astrai"] / row["SDPA flash"]
    row["of floor"] = row["of flash"] / PREFILL_FLOOR
    return row


def verdict(name: str, rows: list[dict[str, Any]], column: str, least: float) -> None:
    """Print how many rows reach ``least`` in ``column``, and the lowest."""
    found = [row for row in rows if column in row]
    if found:
        reached = sum(row[column] >= least for row in found)
        worst = min(found, key=lambda row: row[column])
        label = " ".join(str(worst[key]) for key in ("heads", "B", "KV", "S") if key in worst)
        lowest = f"lowest {worst[column]:.2f} ({label})"
        print(f"{name}: {reached} of {len(found)} rows reach {least} in '{column}'; {lowest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for attention.json")
    parser.add_argument("--quick", action="store_true", help="a few rows only")
    parser.add_argument("--peers", default=",".join(PEERS), help="which to run beside, with commas")
    add_limits(parser)
    options = parser.parse_args()
    wanted = set(filter(None, options.peers.split(",")))
    if unknown := sorted(wanted - set(PEERS)):
        parser.error(f"--peers: {unknown[0]} is not one of {', '.join(PEERS)}")
    peers = {name for name in wanted if importlib.util.find_spec(name) is not None}
    for name in sorted(wanted - peers):
        print(f"{name} is not installed: left out")
    rows = Rows(options.out / "attention.json", {"peers": sorted(peers)}, options)
    prefill, decode = [], []
    for shape in PREFILL:
        batch, length, heads, kv_heads, head_dim = shape
        if rows.wants(f"prefill {batch} x {length} {heads}/{kv_heads} d{head_dim}"):
            prefill.append(prefill_row(*shape, peers))
            rows.add("prefill_tflops", prefill[-1], PREFILL_COLUMNS)
            torch.cuda.empty_cache()
    cases = [(*shape[:3], [shape[4]] * shape[3], str(shape[4])) for shape in DECODE[:: 5 if options.quick else 1]]
    for heads, kv_heads, head_dim in ((24, 4, 64), (32, 8, 128)):
        cases.append((heads, kv_heads, head_dim, torch.linspace(100, 8192, 64).int().tolist(), RAGGED))
    for heads, kv_heads, head_dim, lens, label in sorted(cases, key=lambda case: case[2]):
        if rows.wants(f"decode {heads}/{kv_heads} d{head_dim} {len(lens)} x {label}"):
            decode.append(decode_row(heads, kv_heads, head_dim, lens, label, peers))
            rows.add("decode_gb_per_s", decode[-1], DECODE_COLUMNS)
            torch.cuda.empty_cache()
    print()
    verdict("prefill", prefill, "of floor", 1.0)
    verdict("decode", decode, "of floor", 1.0)
    verdict("decode", decode, "of best", 0.85)
    verdict("decode", decode, "page 1 of 16", 0.95)
    rows.close()


if __name__ == "__main__":
    main()
