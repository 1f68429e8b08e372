"""What guessing is worth: one request whose text repeats itself, with and without n-gram speculation, in one run.

    python -m benchmarks.speculation [--model preset] [--out gpu_out]

The weights are random, so the text is of no interest; greedy, it soon goes in circles, as lists, code and quotations do.
Columns: tokens/s, how many times quicker than without guesses, guesses made and taken per step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import MODELS, build_engine, build_model, synchronize
from benchmarks.measure import table

from astrai_core import SamplingParams
from astrai_core.model.transformer import CausalLM
from astrai_core.types import Request
from tools.gpu_results import write

PHRASE_LEN, N_PHRASES, NEW_TOKENS = 24, 16, 768


def run(model: CausalLM, most: int | None) -> dict[str, Any]:
    """Time one request, after one that warms up."""
    guesses: dict[str, Any] = {} if most is None else {"speculation": "ngram", "max_draft_tokens": most}
    engine = build_engine(model, None, max_num_seqs=32, max_seq_len=2048, max_batch_tokens=2048, **guesses)
    prompt = tuple(range(1000, 1000 + PHRASE_LEN)) * N_PHRASES
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for _ in range(2):
        (task,) = engine.tasks.make(Request(prompt_token_ids=prompt, params=params), lambda delta: None)
        engine.scheduler.submit([task])
        engine.scheduler.step()
        synchronize()
        start, n_before = time.perf_counter(), engine.scheduler.n_steps
        while engine.scheduler.has_work:
            engine.scheduler.step()
        elapsed, n_steps = time.perf_counter() - start, engine.scheduler.n_steps - n_before
    engine.close()
    return {
        "guesses": most or 0,
        "tokens/s": NEW_TOKENS / elapsed,
        "guessed a step": task.n_drafted / n_steps,
        "taken a step": (NEW_TOKENS - n_steps) / n_steps,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="preset")
    parser.add_argument("--device", default="cuda", help="where (default: cuda)")
    parser.add_argument("--out", type=Path, help="folder for speculation.json")
    options = parser.parse_args(arguments)
    model = build_model(options.model, options.device)
    rows = [run(model, most) for most in (None, 3, 7, 15)]
    rows = [{"model": options.model, **row, "times": row["tokens/s"] / rows[0]["tokens/s"]} for row in rows]
    print(table(rows, list(rows[0])))
    if options.out:
        write(options.out / "speculation.json", "speculation", {"rows": rows})


if __name__ == "__main__":
    main()
