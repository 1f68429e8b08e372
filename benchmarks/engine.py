"""The engine on one GPU with random weights: decode, prefill, start, time to the first token, latency beside prefill, and a
serving workload.

    python -m benchmarks.engine                                        everything; minutes
    python -m benchmarks.engine --only decode --model preset           under a minute, start included
    python -m benchmarks.engine --only decode --model preset --batch 1 --no-graphs
    python -m benchmarks.engine --profile --model preset --batch 1     GPU time of one step by kernel
    python -m benchmarks.engine --only decode --batch 128 --without-overlap

Decode counts from the first token on: so many sequences of 512 tokens, 128 new ones each, greedy, end of text ignored. Its
limit is what a copy's rate allows for the bytes that must be read: the weights once a step, and the keys and values.
The serving workload is nano-vllm's: 256 requests, 100 to 1,024 tokens in and out.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import copy_bandwidth, table

from astrai_core import SamplingParams, ops
from astrai_core.auto import AutoModel
from astrai_core.config.model import ModelConfig
from astrai_core.model.transformer import CausalLM
from astrai_core.types import Request
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.bench import PRESET, step_bytes
from astrai_infer.runtime.packed import Staging
from astrai_infer.task import Task
from astrai_infer.testing import byte_tokenizer
from tools.gpu_results import write

MODELS: dict[str, dict[str, Any]] = {
    "preset": PRESET,
    "llama1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen06": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}
PARTS = ("decode", "prefill", "ttft", "latency", "serving")
PROMPT_LEN, NEW_TOKENS, WARM_STEPS = 512, 128, 8
PREFILLS = ((1, 2048), (8, 2048))
N_SERVED, SERVED_LENS = 256, (100, 1024)


def build_model(name: str, device: str) -> CausalLM:
    """Build a model with random weights in bf16."""
    generator = torch.Generator(device).manual_seed(0)
    return AutoModel.from_config(ModelConfig.from_dict(MODELS[name]), "bfloat16", device, generator).eval()


def build_engine(model: CausalLM, graphs: bool | None, **config: Any) -> InferenceEngine:
    """Build an engine that reuses no prefix, since the prompts of a benchmark must be computed."""
    settings = EngineConfig(prefix_cache=False, cuda_graphs=graphs, **config)
    return InferenceEngine(model, byte_tokenizer(), settings)


def submit(engine: InferenceEngine, n: int, prompt_len: int, max_tokens: int, seed: int = 1) -> list[Task]:
    """Queue `n` prompts of random tokens."""
    vocab = engine.model.config.vocab_size
    ids = torch.randint(0, vocab, (n, prompt_len), generator=torch.Generator().manual_seed(seed)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tasks = []
    for prompt in ids:
        made = engine.tasks.make(Request(prompt_token_ids=tuple(prompt), params=params), lambda delta: None)
        engine.scheduler.submit(made)
        tasks.extend(made)
    return tasks


def drain(engine: InferenceEngine) -> None:
    """Step until nothing is left."""
    while engine.scheduler.has_work:
        engine.scheduler.step()


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    """Time some work until the device has done it."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def into_decode(engine: InferenceEngine, batch: int, n_steps: int) -> None:
    """Bring `batch` sequences past their prompts, with room for `n_steps` more."""
    # The first prompts are done some steps before the last; none may end while steps of all are timed.
    tasks = submit(engine, batch, PROMPT_LEN, WARM_STEPS + n_steps + 2 + batch)
    while any(task.output_len < WARM_STEPS for task in tasks):
        engine.scheduler.step()


class Stopwatch:
    """Sums what steps wait for the device, to tell the host's own time from it."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._wait = Staging.wait

    def __enter__(self) -> Stopwatch:
        def timed(staging: Staging) -> None:
            start = time.perf_counter()
            self._wait(staging)
            self.waited += time.perf_counter() - start

        Staging.wait = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Staging.wait = self._wait  # type: ignore[method-assign]


def decode(engine: InferenceEngine, batch: int, copy_rate: float) -> dict[str, Any]:
    """Time steps that all sequences decode in.

    "host us" is the median of what a step takes besides waiting for the device; it is hidden as long as it is less than the
    device's own time.
    """
    into_decode(engine, batch, NEW_TOKENS)
    step = engine.scheduler.step
    whole: list[float] = []
    host: list[float] = []
    collections = sum(generation["collections"] for generation in gc.get_stats()[2:])

    def run() -> None:
        for _ in range(NEW_TOKENS):
            start, waited = time.perf_counter(), watch.waited
            step()
            whole.append(time.perf_counter() - start)
            host.append(whole[-1] - (watch.waited - waited))

    with Stopwatch() as watch:
        elapsed = seconds(run)
    drain(engine)
    rate = batch * NEW_TOKENS / elapsed
    limit = batch * copy_rate * 1e9 / step_bytes(engine, batch, PROMPT_LEN + WARM_STEPS + NEW_TOKENS / 2)
    late = sorted((1e3 * seconds_, i) for i, seconds_ in enumerate(whole))[-4:]
    return {
        "part": "decode",
        "batch": batch,
        "tokens/s": rate,
        "of limit": rate / limit,
        "us a step": 1e6 * elapsed / NEW_TOKENS,
        "median us": 1e6 * statistics.median(whole),
        "host us": 1e6 * statistics.median(host),
        "full collections": sum(generation["collections"] for generation in gc.get_stats()[2:]) - collections,
        "slowest ms (step)": ", ".join(f"{ms:.2f} ({i})" for ms, i in reversed(late)),
    }


def prefill(engine: InferenceEngine, batch: int, prompt_len: int) -> dict[str, Any]:
    """Time from the queue to the first token of all."""
    trials = []
    for trial in range(6):
        submit(engine, batch, prompt_len, 1, seed=trial)
        trials.append(seconds(lambda: drain(engine)))
    elapsed = statistics.median(trials[1:])
    return {
        "part": "prefill",
        "batch": f"{batch}x{prompt_len}",
        "tokens/s": batch * prompt_len / elapsed,
        "ms": 1e3 * elapsed,
    }


def first_token(engine: InferenceEngine, prompt_len: int) -> dict[str, Any]:
    """Time a short prompt on an idle engine, through its thread."""
    vocab = engine.model.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    trials = []
    for trial in range(24):
        generator = torch.Generator().manual_seed(trial)
        ids = torch.randint(0, vocab, (prompt_len,), generator=generator).tolist()
        trials.append(seconds(lambda ids=ids: engine.generate(ids, params)))  # type: ignore[misc]
    return {"part": "ttft", "batch": f"1x{prompt_len}", "ms": 1e3 * statistics.median(trials[4:])}


def latency(engine: InferenceEngine, batch: int = 32, n_prompts: int = 24) -> dict[str, Any]:
    """Time between tokens of decoding sequences while prompts of 2,048 tokens come in."""
    n_steps = 900
    tasks = submit(engine, batch, 64, n_steps + 100)
    while any(task.output_len < WARM_STEPS for task in tasks):
        engine.scheduler.step()
    gaps, last, seen = [], time.perf_counter(), tasks[0].output_len
    for step in range(n_steps):
        if step % (n_steps // n_prompts) == 0:
            submit(engine, 1, 2048, 4, seed=step)
        engine.scheduler.step()
        if tasks[0].output_len > seen:
            now, seen = time.perf_counter(), tasks[0].output_len
            gaps.append(now - last)
            last = now
    for task in tasks:
        engine.scheduler.abort(task.request_id)
    drain(engine)
    gaps.sort()
    median, p99 = gaps[len(gaps) // 2], gaps[int(0.99 * len(gaps))]
    return {"part": "latency", "batch": batch, "ms": 1e3 * median, "p99 ms": 1e3 * p99, "p99/median": p99 / median}


def serving(engine: InferenceEngine) -> dict[str, Any]:
    """Run nano-vllm's workload; count the generated tokens."""
    draw = random.Random(0)
    vocab = engine.model.config.vocab_size
    prompts, params = [], []
    for _ in range(N_SERVED):
        prompts.append([draw.randrange(vocab) for _ in range(draw.randint(*SERVED_LENS))])
        params.append(SamplingParams(temperature=0.0, max_tokens=draw.randint(*SERVED_LENS), ignore_eos=True))
    engine.generate(prompts[0], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    elapsed = seconds(lambda: engine.generate(prompts, params))
    n_tokens = sum(p.max_tokens or 0 for p in params)
    return {"part": "serving", "batch": N_SERVED, "tokens/s": n_tokens / elapsed, "ms": 1e3 * elapsed}


def profile(engine: InferenceEngine, batch: int, n_steps: int = 20) -> list[dict[str, Any]]:
    """Return what a decode step spends on the GPU, by kernel, and how long the GPU did nothing.

    Kernels start while the one before still runs, so their own times add up to more than the step; "us added" is the time
    from the end before to a kernel's own, which adds up to the step.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    into_decode(engine, batch, 2 * n_steps)
    for _ in range(n_steps // 2):
        engine.scheduler.step()
    with recorded(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(n_steps):
            engine.scheduler.step()
        synchronize()
    drain(engine)
    spent: dict[str, list[float]] = defaultdict(list)
    added: dict[str, float] = defaultdict(float)
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end]
    last = min(e.time_range.end for e in events)
    for event in sorted(events, key=lambda e: e.time_range.end):
        spent[event.name].append(event.time_range.elapsed_us())
        added[event.name] += event.time_range.end - last
        last = event.time_range.end
    span = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
    busy, reached = 0.0, 0.0
    for event in sorted(events, key=lambda e: e.time_range.start):
        start, end = max(event.time_range.start, reached), event.time_range.end
        busy += max(0.0, end - start)
        reached = max(reached, end)
    rows = [
        {
            "us added": added[name] / n_steps,
            "us a step": sum(times) / n_steps,
            "launches a step": len(times) / n_steps,
            "us each": statistics.median(times),
            "kernel": name[:110],
        }
        for name, times in spent.items()
    ]
    rows.sort(key=lambda row: -row["us added"])
    total = {
        "us added": span / n_steps,
        "us a step": span / n_steps,
        "launches a step": len(events) / n_steps,
        "us each": 0.0,
    }
    rows.append({**total, "kernel": f"the whole step, of which {(span - busy) / n_steps:.1f} us idle"})
    return rows


def measure(options: argparse.Namespace, name: str, copy_rate: float) -> list[dict[str, Any]]:
    """Run the chosen parts for one model."""
    model = build_model(name, options.device)
    parts = [options.only] if options.only else list(PARTS)
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append({"model": name, **row})
        print(table([rows[-1]], list(rows[-1])), flush=True)

    graphs = False if options.no_graphs else None
    config = {"deterministic": options.deterministic, "kv_dtype": options.kv, "step_kernel": options.step_kernel}
    build = functools.partial(build_engine, model, graphs, **config)
    start = time.perf_counter()
    if options.profile or "decode" in parts:
        batches = options.batch or ([1] if options.profile else [1, 8, 32, 128])
        engine = build(max_num_seqs=max(batches), max_seq_len=1024, max_batch_tokens=8192)
        print(f"{name}: engine ready in {time.perf_counter() - start:.2f} s", flush=True)
        for batch in batches:
            if options.profile:
                found = profile(engine, batch)
                print(table(found, list(found[0])), flush=True)
                rows.extend({"model": name, "part": "profile", "batch": batch, **row} for row in found)
            else:
                note(decode(engine, batch, copy_rate))
        engine.close()
        del engine
    if options.profile:
        return rows
    if "prefill" in parts:
        for batch, prompt_len in PREFILLS:
            engine = build(max_num_seqs=batch, max_seq_len=prompt_len + 2, max_batch_tokens=batch * prompt_len)
            note(prefill(engine, batch, prompt_len))
            engine.close()
            del engine
    if {"ttft", "latency"} & set(parts):
        engine = build(max_num_seqs=64, max_seq_len=4096, max_batch_tokens=options.chunk)
        if "ttft" in parts:
            for prompt_len in (128, 2048):
                note(first_token(engine, prompt_len))
        if "latency" in parts:
            engine.close()
            engine = build(
                max_num_seqs=64,
                max_seq_len=4096,
                max_batch_tokens=options.chunk,
                max_chunk_tokens=options.beside,
            )
            note(latency(engine))
        engine.close()
        del engine
    if "serving" in parts:
        engine = build(max_num_seqs=256, max_seq_len=4096, max_batch_tokens=16384)
        note(serving(engine))
        engine.close()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--model", choices=sorted(MODELS), help="one model (default: all)")
    parser.add_argument("--batch", type=int, nargs="+", help="sequences that decode (default: 1 8 32 128)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step for ttft and latency (default: 2048)")
    parser.add_argument(
        "--beside", type=int, help="tokens of prompts in a step with decodes, for latency (default: all)"
    )
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself")
    parser.add_argument("--deterministic", action="store_true", help="decode in deterministic mode")
    parser.add_argument(
        "--step-kernel",
        action=argparse.BooleanOptionalAction,
        help="decode up to eight sequences by one kernel a step, or none; without it, the engine chooses",
    )
    parser.add_argument(
        "--without-overlap", action="store_true", help="norms and writes to the cache read nothing early"
    )
    parser.add_argument("--kv", default="auto", help="type of keys and values, such as float8_e4m3fn (default: auto)")
    parser.add_argument("--profile", action="store_true", help="only list the kernels of a decode step")
    parser.add_argument("--device", default="cuda", help="where (default: cuda)")
    parser.add_argument("--out", type=Path, help="folder for engine.json")
    options = parser.parse_args(arguments)
    ops.OVERLAP = not options.without_overlap
    copy_rate = copy_bandwidth() if options.device == "cuda" else 10.0
    print(f"copy: {copy_rate:.0f} GB/s read and written")
    rows: list[dict[str, Any]] = []
    for name in [options.model] if options.model else MODELS:
        rows.extend(measure(options, name, copy_rate))
    if options.out:
        write(options.out / "engine.json", "engine", {"copy GB/s": copy_rate, "rows": rows})


if __name__ == "__main__":
    main()
