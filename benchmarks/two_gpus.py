"""Training on several GPUs beside one, and the verdicts of the tests of several ranks, in one file.

    python -m benchmarks.two_gpus --out gpu_out [--size 0.32] [--precision bf16] [--junit two.xml] [--budget SECONDS]
    python -m benchmarks.two_gpus --quick --device cpu      # tries the program out, by gloo

Sizes, data and recipe are those of benchmarks.training. Each mode of several ranks (replicas, and shards that are gathered
once a step or once a pass: row TR4) is compared with one rank that does the same steps by accumulation:

- "scaling %" is the rate of the ranks over that of one rank times their number; at least 90 is asked for where weights are
  gathered once a step or not at all. One rank moves the weights once for all its micro-batches, where several do for each:
  what that saves counts against the ranks.
- "off" and "norm off" are how far loss and gradient norm are from those of one rank, relatively, at the worst of 15 steps:
  at most 1e-5 and 1e-4 in fp32, 2e-3 and 3e-2 in bf16. The norm shows what the loss would not: AdamW moves the weights
  alike whatever its gradients are multiplied by.

Further checks are groups of tests, by what pytest's ``--junitxml`` file tells of them. The results are written after each
row, so that a run cut short keeps what it has; a mode that fails is a failed check, and the next is measured. Exit status: 0
if all was done and is as asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.measure import table
from benchmarks.training import MODES, SIZES, TIMED, WARM_UP, Size, Timing, ours

from astrai_core.errors import AstraiError
from astrai_train.metrics.mfu import CONVENTION, peak_flops
from astrai_train.report.page import METRICS, read_lines
from tools.gpu_results import environment, read_junit

COLUMNS = ["size", "variant", "ranks", "MFU %", "tokens/s", "scaling %", "ms", "peak GB", "off", "norm off", "start s"]
FLOOR = 90.0
"""Least "scaling %"."""
UNSCALED = "fsdp, resharded"
"""The mode without a floor: to gather weights twice is the price of its memory."""
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (2e-3, 3e-2), "bf16_mixed": (2e-3, 3e-2)}
"""By precision: most that "off" and "norm off" may be."""
GROUPS = {
    "loss and gradient of two ranks equal one GPU's": r"::test_the_gradient_is_that|::test_ranks_equal_one_process",
    "sharded Muon equals unsharded": r"muon_adamw-fsdp\]|::test_equals_one_process\[cuda-muon",
    "sharded Mano equals unsharded": r"mano_adamw-fsdp\]|::test_equals_one_process\[cuda-mano",
    "clipping on two ranks equals one GPU's (D2)": r"\[cuda-clipping-",
    "reshard_after_forward both ways (TR4)": r"::test_ranks_equal_one_process\[cuda-.*-fsdp(_reshard)?\]",
    "a checkpoint of two loads on one": r"::test_a_checkpoint_loads.*-on-one-",
    "a checkpoint of one loads on two": r"::test_a_checkpoint_loads\S*\[cuda-on-many-",
    "resume on two ranks is exact": r"::test_resume_is_exact",
    "one rank killed: the other ends": r"test_train_killed_rank::|\[in nccl-|::test_a_rank_killed_in_a_save",
}
"""By what they show: tests, as ``class::name`` of the file."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A verdict."""

    name: str
    passed: bool
    found: Any
    asked: Any


def train(
    size: Size, precision: str, device: str, ranks: int, parallel: dict[str, Any] | None
) -> tuple[Timing, list[list[float]]]:
    """Time `ranks`, or without `parallel` one that does their steps; return loss and gradient norm of each step too.

    One rank does as many micro-batches of the same rows, one after another.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        changes: dict[str, Any] = {"output_dir": str(run), "log.interval": 1, "log.metrics": ["loss", "grad_norm"]}
        if parallel is None:
            changes["micro_batch_size"] = size.micro_batch
            size, ranks = dataclasses.replace(size, micro_batch=size.micro_batch * ranks), 1
        timing = ours(size, {"dtype": precision}, device, changes, False, ranks, parallel)
        return timing, [[line["loss"], line["grad_norm"]] for line in read_lines(run / METRICS)]


def row_of(size: Size, variant: str, ranks: int, timing: Timing, step: tuple[int, float], peak: float | None) -> Any:
    """Make a row; `step` is (tokens, FLOPs) of a whole step, `peak` one device's FLOPs per second."""
    tokens, flops = step
    seconds = timing.milliseconds / 1e3
    return {
        "size": size.name,
        "variant": variant,
        "ranks": ranks,
        "MFU %": 100 * flops / seconds / (peak * ranks) if peak else None,
        "tokens/s": tokens / seconds,
        "ms": timing.milliseconds,
        "peak GB": timing.peak_bytes / 1e9,
        "start s": timing.start_seconds,
    }


def verdicts(junit: Path) -> list[Check]:
    """Return a check for each of `GROUPS`, which is failed too if none of its tests ran, or pytest wrote no file."""
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
        kinds = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
    checks = []
    for name, pattern in GROUPS.items():
        found = [outcome for test, outcome in outcomes.items() if re.search(pattern, test)]
        counts = {outcome: found.count(outcome) for outcome in sorted(set(found))}
        checks.append(Check(name, counts.keys() == {"passed"}, counts, "all passed"))
    return checks


class Results:
    """What was found so far, on the screen and in the file."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path, self._facts = path, facts
        self.rows: list[dict[str, Any]] = []
        self.checks: list[Check] = []

    def write(self) -> None:
        """Write the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        found = {"rows": self.rows, "checks": [dataclasses.asdict(check) for check in self.checks]}
        self._path.write_text(json.dumps(self._facts | found, indent=2) + "\n")

    def measure(self, size: Size, precision: str, options: argparse.Namespace, deadline: float) -> None:
        """Measure one rank and then each mode; what begins after the deadline is a failed check instead."""
        device, ranks = options.device, options.ranks
        peak = peak_flops(torch.device(device))
        step = ranks * size.micro_batch * size.seq_len, ranks * size.flops()
        one: dict[str, Any] | None = None
        for mode, parallel in {"one rank": None, **MODES}.items():
            name = f"{size.name} B, {precision}, {mode}"
            if time.monotonic() > deadline or (parallel and one is None):
                self.checks.append(Check(name, False, "no time, or no rank to compare with", "measured"))
                continue
            print(f"{name} ...", flush=True)
            try:
                timing, steps = train(size, precision, device, ranks, parallel)
            except AstraiError as error:
                self.checks.append(Check(name, False, f"{type(error).__name__}: {error}", "measured"))
                continue
            finally:
                gc.collect()
                torch._dynamo.reset()
                if device == "cuda":
                    torch.cuda.empty_cache()  # the first rank is on this process's GPU
            row = row_of(size, f"{precision}, {mode}", ranks if parallel else 1, timing, step, peak) | {"steps": steps}
            if one is None:
                one = row
            else:
                self.compare(row, one, name, precision, judge_speed=mode != UNSCALED and not options.quick)
            self.rows.append(row)
            self.write()
            print(table([dict.fromkeys(COLUMNS, "") | row for row in self.rows], COLUMNS), flush=True)

    def compare(
        self, row: dict[str, Any], one: dict[str, Any], name: str, precision: str, *, judge_speed: bool
    ) -> None:
        """Add to a row of several ranks how it compares with that of one, and the checks."""
        off = np.abs(np.array(row["steps"]) / np.array(one["steps"]) - 1).max(0)
        for column, what, found, most in zip(
            ("off", "norm off"), ("loss", "norm"), off, TOLERANCES[precision], strict=True
        ):
            row[column] = float(found)
            self.checks.append(Check(f"{name}: {what}", bool(found <= most), float(found), f"at most {most} off"))
        scaling = row["scaling %"] = 100 * row["tokens/s"] / (row["ranks"] * one["tokens/s"])
        if judge_speed:
            self.checks.append(Check(f"{name}: scaling", scaling >= FLOOR, scaling, f"at least {FLOOR} %"))


def facts_of(device: str) -> dict[str, Any]:
    """Return what holds for all rows."""
    facts = {"name": "two_gpus", "convention": CONVENTION, "warm-up": WARM_UP, "steps": TIMED}
    if device != "cuda":
        return facts | {"environment": {"device": device, "versions": {"torch": torch.__version__}}}
    links = torch.cuda.can_device_access_peer(0, 1)
    return facts | {"environment": environment(), "nccl": list(torch.cuda.nccl.version()), "peer access": links}


def main() -> None:
    """Measure, print tables and verdicts, write two_gpus.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_out"), help="folder for two_gpus.json")
    parser.add_argument("--size", choices=list(SIZES), action="append", help="default: 0.32 and 1.07")
    parser.add_argument("--precision", choices=list(TOLERANCES), action="append", help="default: bf16")
    parser.add_argument("--ranks", type=int, default=2, help="how many GPUs (default: 2)")
    parser.add_argument("--quick", action="store_true", help="the tiny size, in fp32; no verdict on speed")
    parser.add_argument("--junit", type=Path, help="pytest's --junitxml file of the tests of several ranks")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="start no row later")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    if options.ranks < 2:
        parser.error("--ranks must be at least 2")
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        parser.error(
            f"{options.ranks} ranks need as many GPUs, torch sees {torch.cuda.device_count()}; "
            "--quick --device cpu tries the program out"
        )
    results = Results(options.out / "two_gpus.json", facts_of(options.device))
    if options.junit is not None:
        tests = read_junit(options.junit) if options.junit.exists() else {"passed": 0, "failed": []}
        results.checks += [Check("tests", bool(tests["passed"]) and not tests["failed"], tests, "all passed")]
        results.checks += verdicts(options.junit)
        results.write()
    sizes = ["tiny"] if options.quick else options.size or ["0.32", "1.07"]
    for size in sizes:
        for precision in ["fp32"] if options.quick else options.precision or ["bf16"]:
            results.measure(SIZES[size], precision, options, deadline)
    results.write()
    for check in results.checks:
        print(f"{'passed' if check.passed else 'FAILED'}  {check.name}: {check.found} ({check.asked})")
    print(f"wrote {options.out / 'two_gpus.json'}")
    sys.exit(0 if all(check.passed for check in results.checks) else 1)


if __name__ == "__main__":
    main()
