"""Host time of one engine step with 64 requests decoding, without a model: what the device would wait for.

    OMP_NUM_THREADS=1 python -m benchmarks.host_step
    OMP_NUM_THREADS=1 python -m benchmarks.host_step --out benchmarks/results/host_step.json

The scheduler, pool, executor, sampler and text pipeline are the engine's own. The model returns the same logits in every
step and never calls the attention backend, so the backend's plan is not part of the figure. The sampler's tensor work
grows with the vocabulary and belongs to the device: it stands in a column of its own. The rounds of all cases take
turns; on a machine that others use too, the median of the quickest round says what the code needs.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import table

from astrai_core import SamplingParams
from astrai_core.types import Request
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.task import Batch, StepResult, Task
from astrai_infer.testing import ScriptedModel, byte_tokenizer
from tools.gpu_results import commit

FLOOR_US = 300
"""What a step may take on the host with 64 running requests."""
PROMPT_LEN = 32
ROUNDS, WARM_UP, STEPS = 12, 10, 60
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50, ignore_eos=True),
}


class NullModel(ScriptedModel):
    """Answers every step with the first rows of one fixed tensor of logits."""

    def __init__(self, n_rows: int, vocab_size: int) -> None:
        super().__init__(lambda token, position: 0, vocab_size=vocab_size, max_position_embeddings=4096)
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(n_rows, vocab_size, generator=generator)
        self.logits[:, ord("a") : ord("z")] += 8.0  # sampled ids are letters, as a text's mostly are

    def forward_paged(self, input_ids: Any, position_ids: Any, cache: Any, backend: Any, logit_rows: Any = None) -> Any:
        """Return the fixed logits of as many rows as are asked for."""
        n = len(input_ids if logit_rows is None else logit_rows)
        return self.logits if n == len(self.logits) else self.logits[:n]


class NullRunner:
    """Stands in for the executor: a letter for every task that samples."""

    def admit(self, task: Task) -> None:
        """Do nothing."""

    def run(self, batch: Batch) -> StepResult:
        """Return one letter per sampling item."""
        n = sum(item.samples for item in batch.items)
        return StepResult([ord("a")] * n, [None] * n)


class Stopwatch:
    """Counts the time spent in one function that it wraps."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.spent_ns = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter_ns()
        result = self.function(*arguments, **named)
        self.spent_ns += time.perf_counter_ns() - start
        return result


def decoding_engine(n_requests: int, vocab_size: int, params: SamplingParams) -> InferenceEngine:
    """Return an engine without its thread, ready to be stepped, with every request past its prompt."""
    config = EngineConfig(max_num_seqs=n_requests, max_seq_len=PROMPT_LEN + ROUNDS * (WARM_UP + STEPS) + 8)
    model: Any = NullModel(n_requests, vocab_size)
    engine = InferenceEngine(model, byte_tokenizer(), config)
    for i in range(n_requests):
        prompt = tuple((i + j) % 256 for j in range(PROMPT_LEN))
        request = Request(prompt_token_ids=prompt, params=params, request_id=f"r{i}")
        engine.scheduler.submit(engine.tasks.make(request, lambda delta: None))
    while any(task.remaining_len > 1 for task in engine.scheduler.running) or engine.scheduler.n_waiting:
        engine.scheduler.step()
    return engine


class Case:
    """One engine in steady decode, and what its steps took, in microseconds."""

    def __init__(self, sampling: str, part: str, n_requests: int, vocab_size: int) -> None:
        self.names = {"sampling": sampling, "part": part, "requests": n_requests}
        self.engine = decoding_engine(n_requests, vocab_size, SETTINGS[sampling])
        executor: Any = self.engine.scheduler.executor
        self.sampler = Stopwatch(executor.pipeline.sample)
        if part == "scheduler":
            self.engine.scheduler.executor = NullRunner()
        else:
            executor.pipeline.sample = self.sampler
        self.rounds: list[list[float]] = []
        self.sampler_us: list[float] = []

    def run_round(self) -> None:
        """Time some steps."""
        step, sampler, spent = self.engine.scheduler.step, self.sampler, []
        for _ in range(WARM_UP):
            step()
        for _ in range(STEPS):
            sampler.spent_ns = 0
            start = time.perf_counter_ns()
            step()
            total_ns = time.perf_counter_ns() - start
            spent.append((total_ns - sampler.spent_ns) / 1e3)
            self.sampler_us.append(sampler.spent_ns / 1e3)
        self.rounds.append(spent)

    def row(self) -> dict[str, Any]:
        """Sum up: the host's time without the sampler's tensor work, which stands beside it."""
        assert len(self.engine.scheduler.running) == self.names["requests"], "every step served every request"
        self.engine.close()
        steps = [spent for one in self.rounds for spent in one]
        return {
            **self.names,
            "median_us": statistics.median(steps),
            "p90_us": statistics.quantiles(steps, n=10)[-1],
            "best_round_us": min(map(statistics.median, self.rounds)),
            "sampler_us": statistics.median(self.sampler_us),
        }


def run(n_requests: int, vocab_size: int) -> list[dict[str, Any]]:
    """Measure the scheduler alone and the whole step, for each way of sampling, by turns."""
    cases = [Case(name, part, n_requests, vocab_size) for name in SETTINGS for part in ("scheduler", "whole step")]
    for _ in range(ROUNDS):
        for case in cases:
            case.run_round()
    return [case.row() for case in cases]


def environment() -> dict[str, Any]:
    """What the figures mean nothing without."""
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "astrai-infer")},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    """Name the processor as Linux does, or as Python does elsewhere."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--requests", type=int, default=64, help="running requests (default: 64)")
    parser.add_argument("--vocab", type=int, default=1000, help="columns of the logits (default: 1000)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = run(options.requests, options.vocab)
    print(table(rows, list(rows[0])))
    if options.out:
        facts = {"name": options.out.stem, "environment": environment(), "floor_us": FLOOR_US, "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(facts, indent=2) + "\n")
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
