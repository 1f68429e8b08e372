"""Training steps of astrai beside transformers' Llama, same shapes, same data, same card, one run.

    python -m benchmarks.training --out gpu_out [--size 0.32] [--only ours|hf] [--precision fp8] [--profile]
        [--set precision.attention=flash]

``ours`` goes through the front door: a recipe, ``astrai_train.run.build`` and the trainer with its clipping, on rows of
one document of 2048 tokens; in pure bf16 and over fp32 master weights (the default of recipes), with ``--precision fp8``
or ``fp8_mixed`` the same with the blocks' products in float8. ``hf`` is LlamaForCausalLM in pure bf16, eager and
compiled, with torch's fused AdamW and clipping. Five steps warm up and ten are timed. Each case is printed, and written
to ``--out``, when it is done. MFU counts 6 FLOPs a token and matrix weight and causal attention half
(astrai_train.metrics.mfu), over the card's dense bf16 peak, for float8 too. Several GPUs: benchmarks/two_gpus.py.

What a step of the 0.32 B model is made of on an H200 (24 x 1024, ffn 2816, heads 16/4, vocabulary 49152, tied; 16 x 2048
tokens), and what is chosen for it:

- Matrix products: 6 x 321 M x 32768 = 63 TFLOP, 97 ms at the 650 TFLOP/s that products of this size reach. Fused q/k/v
  and gate/up projections make the small ones larger. Making the head's gradient in the forward pass saves the fourth
  product of a recomputed head: 50 M weights x 2 x 32768 FLOP, 5 ms.
- Attention: 9.9 TFLOP counted, 11.5 TFLOP done (the backward pass computes scores again): 58 ms at flash's 200 TFLOP/s,
  40 ms at cuDNN's 290. So cuDNN comes first for rows of one length.
- Norms, rotation, SwiGLU, additions: fused, 1.3 GB a layer forward and 3 GB backward, 25 ms at 4.2 TB/s; eager about
  three times that, most of it in fp32 copies. So the blocks are compiled, and the residual stream is bf16 over fp32
  weights too.
- Loss: 1.6 G logits. In fp32 and eager 32 to 50 GB of traffic, 8 to 12 ms; compiled, from bf16, 10 GB, 2.5 ms. Chunks of
  8192 tokens keep 0.8 GB of logits and add the weight's gradient up in four passes of 0.6 GB.
- AdamW: 14 bytes a weight in pure bf16, 1.1 ms; 28 in fp32, 2.2 ms, and with fp32 weights 14 more for casts of weights
  and gradients. Division, norm and clipping of gradients: 1 ms.

In all 170 ms, 44 % MFU; the 1.07 B model has 2.5 times the arithmetic for the same traffic: 56 %.

Reckoned, not measured, for float8 at 1.07 B (16 x 2048, ffn 8192, 8 x 2048 tokens): the blocks' products are 95 of its
112 TFLOP, 138 ms at 690 TFLOP/s and 80 ms at 1.2 PFLOP/s. Magnitudes, casts and transposed copies move 242 kB a token and
layer, 63 GB, and 8 GB for the weights: 17 ms at 4.2 TB/s.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from benchmarks.measure import table
from torch import optim

from astrai_core import AutoModel, ModelConfig, Tokenizer
from astrai_train import Callback, StepRecord, TrainConfig, TrainContext
from astrai_train.config.recipe_file import parse_value
from astrai_train.data.store import write_store
from astrai_train.metrics.mfu import CONVENTION, FlopsCounter, peak_flops
from astrai_train.parallel.launch import launch
from astrai_train.run import build
from tools.gpu_results import write

COLUMNS = ["size", "variant", "MFU %", "tokens/s", "ms", "peak GB", "loss", "start s"]
WARM_UP, TIMED = 5, 10
PRECISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("ours, bf16", {"dtype": "bf16"}),
    "bf16_mixed": ("ours, fp32 master", {"dtype": "bf16_mixed"}),
    "fp8": ("ours, fp8 over bf16", {"dtype": "bf16", "fp8": True}),
    "fp8_mixed": ("ours, fp8 over fp32 master", {"dtype": "bf16_mixed", "fp8": True}),
}
"""Of ``--precision``: the variant's name, and the fields of the recipe."""
MODES: dict[str, dict[str, Any]] = {
    "ddp": {"mode": "ddp"},
    "fsdp": {"mode": "fsdp"},
    "fsdp, resharded": {"mode": "fsdp", "reshard_after_forward": True},
}
"""How several ranks train: a variant's name, and the fields of the recipe."""
LEARNING_RATE, BETAS, WEIGHT_DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 0.1, 1.0


@dataclasses.dataclass(frozen=True)
class Size:
    """A Llama shape and its micro-batch."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    micro_batch: int
    vocab: int = 49152
    seq_len: int = 2048

    def config(self) -> dict[str, Any]:
        """Return config.json as both sides read it."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.seq_len,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        }

    def flops(self) -> float:
        """Return the FLOPs of a step."""
        model = AutoModel.from_config(ModelConfig.from_dict(self.config()), torch.bfloat16, "meta")
        return FlopsCounter(model).of([self.seq_len] * self.micro_batch)


SIZES = {
    size.name: size
    for size in (
        Size("0.32", 24, 1024, 2816, 16, 4, 16),
        Size("1.07", 16, 2048, 8192, 32, 8, 8),
        Size("tiny", 2, 64, 128, 4, 2, 2, vocab=512, seq_len=64),
    )
}


@dataclasses.dataclass(frozen=True)
class Timing:
    """What was measured of one variant."""

    milliseconds: float
    start_seconds: float
    """Of the first step, compilation included."""
    peak_bytes: int
    loss: float


class Stopwatch:
    """Times steps on the host; the device is waited for where the timed steps begin and end, not between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks = [time.perf_counter()]

    def mark(self) -> bool:
        """Note the end of a step; return whether it was the last."""
        done = len(self.marks)
        if self.device.type == "cuda" and done in (1, WARM_UP, WARM_UP + TIMED):
            torch.cuda.synchronize()
            if done == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
        self.marks.append(time.perf_counter())
        return done == WARM_UP + TIMED

    def timing(self, loss: float) -> Timing:
        """Sum up."""
        marks, peak = self.marks, torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return Timing((marks[-1] - marks[WARM_UP]) / TIMED * 1e3, marks[1] - marks[0], peak, loss)


class Done(Exception):
    """Ends a run of ours, on every rank, where it would save a checkpoint."""


class Timer(Callback):
    """Marks the steps of a run of ours."""

    def __init__(self, device: torch.device) -> None:
        self.watch = Stopwatch(device)
        self.loss = float("nan")

    def on_train_begin(self, context: TrainContext) -> None:
        """Start the clock."""
        self.watch = Stopwatch(context.device)

    def on_step_end(self, context: TrainContext, record: StepRecord) -> None:
        """Mark the step."""
        self.loss = record.loss if record.loss is not None else float("nan")
        self.watch.mark()


def documents(size: Size, ranks: int = 1) -> list[Any]:
    """Return random documents of one row each, the same for both sides."""
    draw = np.random.default_rng(0)
    return [draw.integers(0, size.vocab, size.seq_len) for _ in range(4 * size.micro_batch * ranks)]


def ours(
    size: Size,
    precision: dict[str, Any],
    device: str,
    changes: dict[str, Any],
    profile: bool,
    ranks: int = 1,
    parallel: dict[str, Any] | None = None,
) -> Timing:
    """Time a run of astrai; of several ranks, the first is timed."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(size.vocab)}, "w0"))
        tokenizer = Tokenizer(backend, config={"eos_token": "w1"})
        tokenizer.save_pretrained(root / "tokenizer")
        write_store(root / "store", "text", [{"input_ids": row} for row in documents(size, ranks)], tokenizer)
        recipe: dict[str, Any] = {
            "model": {"architecture": size.config(), "tokenizer": str(root / "tokenizer")},
            "data": {"train": [{"path": str(root / "store")}], "seq_len": size.seq_len, "packing": "simple"},
            "strategy": {"name": "seq", "loss_chunk_tokens": 8192},
            "optimizer": {"name": "adamw", "lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY},
            "lr_schedule": {"name": "constant", "warmup": 0},
            "max_grad_norm": MAX_NORM,
            "output_dir": str(root / "run"),
            "batch_size": size.micro_batch * ranks,
            "micro_batch_size": size.micro_batch,
            "max_steps": WARM_UP + TIMED,
            "checkpoint": {"interval": 10**6},
            "parallel": parallel or {"mode": "none"},
            "precision": {**precision, "compile": "default" if device == "cuda" else "none"},
            "log": {"interval": 10**6, "metrics": ["loss"], "progress": False},
        }
        for dotted, value in changes.items():
            *groups, last = dotted.split(".")
            inner = recipe
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[last] = value
        title = f"ours {size.name} {precision}" if profile else None
        work = functools.partial(timed, recipe, device, title)
        found = work() if ranks == 1 else launch(work, ranks)
        assert found is not None, "the first rank has a watch"
        return found


def stop() -> None:
    """Save nothing, and end."""
    raise Done


def timed(recipe: dict[str, Any], device: str, title: str | None) -> Timing | None:
    """Time a recipe's steps on the first rank; `title`: print its kernels."""
    timer = Timer(torch.device(device))
    trainer: Any = build(TrainConfig.from_dict(recipe), device=device, callbacks=[timer])
    trainer.save = stop
    with profiled(title), contextlib.suppress(Done):
        trainer.train()
    return timer.watch.timing(timer.loss) if trainer.context.parallel.world.is_first else None


def hf(size: Size, compiled: bool, device: str, profile: bool) -> Timing:
    """Time transformers' Llama in pure bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {name: value for name, value in size.config().items() if name != "model_type"}
    with torch.device(device):
        model: Any = LlamaForCausalLM(LlamaConfig(**config, use_cache=False))
    model.bfloat16().train()
    step_model = torch.compile(model) if compiled else model
    optimizer = optim.AdamW(model.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    rows = torch.from_numpy(np.stack(documents(size)))
    batches = rows.to(device).split(size.micro_batch)
    watch = Stopwatch(torch.device(device))
    with profiled(f"hf {size.name}{' compiled' if compiled else ''}" if profile else None):
        while True:
            ids = batches[len(watch.marks) % len(batches)]
            loss = step_model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if watch.mark():
                return watch.timing(loss.item())


@contextlib.contextmanager
def profiled(title: str | None) -> Iterator[None]:
    """Print the kernels of all steps together, the most expensive first, if there is a title."""
    if title is None:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield
    print(f"\n{title}: kernels of {WARM_UP + TIMED} steps")
    print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90))


def variants(size: Size, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Timing]]]:
    """Yield name and measurement."""
    changes = {name: parse_value(value) for name, _, value in (item.partition("=") for item in options.set)}
    if options.only != "hf":
        for name, precision in (PRECISIONS[wanted] for wanted in options.precision or ["bf16", "bf16_mixed"]):
            yield name, functools.partial(ours, size, precision, options.device, changes, options.profile)
    if options.only != "ours":
        for name, compiled in (("hf compiled, bf16", True), ("hf eager, bf16", False)):
            yield name, functools.partial(hf, size, compiled, options.device, options.profile)


def main() -> None:
    """Measure, print a table, write training.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_out"), help="folder for training.json")
    parser.add_argument("--size", choices=list(SIZES), action="append", help="default: 0.32 and 1.07")
    parser.add_argument("--only", choices=["ours", "hf"], help="one side alone")
    parser.add_argument(
        "--precision", choices=list(PRECISIONS), action="append", help="of ours; default: bf16 and bf16_mixed"
    )
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of our recipe")
    parser.add_argument("--profile", action="store_true", help="print kernels by time; not for figures")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.only != "ours" and importlib.util.find_spec("transformers") is None:
        parser.error("transformers is not installed: install it, or measure --only ours")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --size tiny tries the program out")
    peak = peak_flops(torch.device(options.device))
    rows = []
    for name in options.size or ["0.32", "1.07"]:
        size = SIZES[name]
        flops, tokens = size.flops(), size.micro_batch * size.seq_len
        for variant, measure in variants(size, options):
            print(f"{name} B, {variant} ...", flush=True)
            timing = measure()
            gc.collect()
            torch._dynamo.reset()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            seconds = timing.milliseconds / 1e3
            rows.append(
                {
                    "size": name,
                    "variant": variant,
                    "MFU %": 100 * flops / seconds / peak if peak else float("nan"),
                    "tokens/s": round(tokens / seconds),
                    "ms": timing.milliseconds,
                    "peak GB": timing.peak_bytes / 1e9,
                    "loss": timing.loss,
                    "start s": timing.start_seconds,
                }
            )
            print(table(rows, COLUMNS), flush=True)
            facts = {"convention": CONVENTION, "warm-up": WARM_UP, "steps": TIMED, "changes": options.set, "rows": rows}
            if options.device == "cuda":
                write(options.out / "training.json", "training", facts)


if __name__ == "__main__":
    main()
