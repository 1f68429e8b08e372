"""What guessing is worth: one request, without guesses, with n-grams, and with draft models, in one run.

    python -m benchmarks.speculation [--model preset] [--out gpu_out]

The weights are random, so the text is of no interest, and no small model agrees with them. The rows show what the mechanism
costs and what it can give, and nothing of how often guesses are right in a text or with a model that somebody uses:

- ``random``: the text of such weights hardly repeats itself. n-grams are then seldom guessed and often wrong, and a draft
  with weights of its own always is: what is left is what wrong guesses cost.
- ``agreed``: the draft is a quarter of the model's layers, and the other layers of the model add nothing to the residual
  stream (their output projections are zero). The two agree on every token.
- ``circle``: no layer adds anything, and the output head answers each of a phrase's 24 tokens by the next, the last by the
  first. The text is the phrase again and again, as where a prompt is quoted word by word, and every guess is right.

The model does all of its work in each of them, and the rows without guesses are of the same weights. Columns: tokens/s, how
many times quicker than without guesses, guesses made and taken per step.
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
    prompt = phrase(model) * N_PHRASES
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


def silence(model: CausalLM, n_kept: int) -> None:
    """Let all but the first `n_kept` layers add nothing to the residual stream."""
    for layer in model.model.layers[n_kept:]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


@torch.no_grad()
def agreeing_draft(model: CausalLM) -> CausalLM:
    """Silence all but the first quarter of a model's layers, and return that quarter as a model: the two agree."""
    n_layers = max(model.config.num_hidden_layers // 4, 1)
    silence(model, n_layers)
    draft = small_model(model, n_layers)
    own = model.state_dict()
    draft.load_state_dict({name: own[name] for name in draft.state_dict()})
    return draft


@torch.no_grad()
def go_in_circles(model: CausalLM) -> None:
    """Silence all layers, and let the greedy text be :func:`phrase` again and again once it is in it.

    The head's row of each token is the direction of the token vector ahead of it, whose logit is then the root of the hidden
    size (39 for the preset); random rows have about 1.
    """
    silence(model, 0)
    ids = torch.tensor(phrase(model), device=model.device)
    table = model.model.embed_tokens.weight
    head = model.lm_head.weight.clone()  # tied to the table in some models, which must stay what it is
    head[ids.roll(-1)] = torch.nn.functional.normalize(table[ids].float(), dim=-1).to(head.dtype)
    model.lm_head.weight = torch.nn.Parameter(head)


def phrase(model: CausalLM) -> tuple[int, ...]:
    """Return the tokens that the prompt repeats."""
    first = min(1000, model.config.vocab_size - PHRASE_LEN)
    return tuple(range(first, first + PHRASE_LEN))


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
    n_layers = max(model.config.num_hidden_layers // 4, 1)
    found: list[dict[str, Any]] = []

    def add(text: str, how: str, most: int = 0, draft: CausalLM | None = None) -> None:
        row = run(model, n, most, draft)
        plain = next((other for other in found if other["text"] == text), row)
        times = row["tokens/s"] / plain["tokens/s"]
        found.append({"model": options.model, "text": text, "how": how, **row, "times": times})

    add("random", "none")
    add("random", "n-gram", 7)
    add("random", "draft", 7, small_model(model, n_layers))
    right = agreeing_draft(model)
    add("agreed", "none")
    for most in MOST:
        add("agreed", "draft", most, right)
    go_in_circles(model)
    add("circle", "none")
    for most in MOST:
        add("circle", "n-gram", most)
    print(table(found, list(found[0])))
    if options.out:
        write(options.out / "speculation.json", "speculation", {"rows": found})


if __name__ == "__main__":
    main()
