"""What guessing is worth: one request, without guesses, with n-grams, and with draft models, in one run.

    python -m benchmarks.speculation [--model preset] [--out gpu_out]

The weights are random, so the text is of no interest; greedy, it soon goes in circles, as lists, code and quotations do: the
n-gram rows are for such text. Random weights also have no small model that agrees with them. The draft rows therefore show
what the mechanism costs and what it can give, and nothing of how often a trained small model is right:

- ``all right``: the draft is a quarter of the model's layers, and the other layers of the model add nothing to the residual
  stream (their output projections are zero). The two agree on every token, and the model still does all of its work.
- ``all wrong``: the draft has weights of its own. Guesses become few; what is left is what a wrong draft model costs.

Columns: tokens/s, how many times quicker than the same weights without guesses, guesses made and taken per step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.engine import MODELS, build_model, synchronize
from benchmarks.measure import table

from astrai_core import SamplingParams
from astrai_core.auto import AutoModel
from astrai_core.config.model import ModelConfig
from astrai_core.model.transformer import CausalLM
from astrai_core.types import Request
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.testing import byte_tokenizer
from tools.gpu_results import write

PHRASE_LEN, N_PHRASES, NEW_TOKENS = 24, 16, 768
MOST = (3, 7, 15)


def run(model: CausalLM, new_tokens: int, most: int = 0, draft: CausalLM | None = None) -> dict[str, Any]:
    """Time one request, after one that warms up."""
    guesses: dict[str, Any] = {}
    if most:
        guesses = {"speculation": "ngram" if draft is None else "draft", "max_draft_tokens": most}
    settings = EngineConfig(prefix_cache=False, max_num_seqs=32, max_seq_len=2048, max_batch_tokens=2048, **guesses)
    engine = InferenceEngine(model, byte_tokenizer(), settings, draft_model=draft)
    first = min(1000, model.config.vocab_size - PHRASE_LEN)
    prompt = tuple(range(first, first + PHRASE_LEN)) * N_PHRASES
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
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
        "guesses": most,
        "tokens/s": new_tokens / elapsed,
        "guessed a step": task.n_drafted / n_steps,
        "taken a step": task.n_accepted / n_steps,
    }


@torch.no_grad()
def agreeing_draft(model: CausalLM) -> CausalLM:
    """Silence all but the first quarter of a model's layers, and return that quarter as a model: the two agree."""
    n_layers = max(model.config.num_hidden_layers // 4, 1)
    for layer in model.model.layers[n_layers:]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    draft = small_model(model, n_layers)
    own = model.state_dict()
    draft.load_state_dict({name: own[name] for name in draft.state_dict()})
    return draft


def small_model(model: CausalLM, n_layers: int) -> CausalLM:
    """Build a model of other random weights with fewer layers."""
    config = ModelConfig.from_dict({**model.config.to_dict(), "num_hidden_layers": n_layers})
    dtype = str(model.dtype).removeprefix("torch.")
    generator = torch.Generator(model.device).manual_seed(1)
    return AutoModel.from_config(config, dtype, model.device, generator).eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="preset")
    parser.add_argument("--device", default="cuda", help="where (default: cuda)")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of the request")
    parser.add_argument("--out", type=Path, help="folder for speculation.json")
    options = parser.parse_args(arguments)
    model, n = build_model(options.model, options.device), options.new_tokens
    plain = run(model, n)
    rows = [("none", plain, plain)]
    rows += [("n-gram", run(model, n, most), plain) for most in MOST]
    wrong = small_model(model, max(model.config.num_hidden_layers // 4, 1))
    rows += [("draft, all wrong", run(model, n, most, wrong), plain) for most in MOST]
    right = agreeing_draft(model)
    silenced = run(model, n)
    rows += [("none, layers silenced", silenced, silenced)]
    rows += [("draft, all right", run(model, n, most, right), silenced) for most in MOST]
    found = [
        {"model": options.model, "how": how, **row, "times": row["tokens/s"] / base["tokens/s"]}
        for how, row, base in rows
    ]
    print(table(found, list(found[0])))
    if options.out:
        write(options.out / "speculation.json", "speculation", {"rows": found})


if __name__ == "__main__":
    main()
