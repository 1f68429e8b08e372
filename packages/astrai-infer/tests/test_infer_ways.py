"""One answer whatever way a request takes through the engine: tokens and logits of every family (rules 1 and 8)."""

from __future__ import annotations

import pytest
import torch

from astrai_core import SamplingParams
from astrai_infer import InferenceEngine
from astrai_infer.testing import small_engine, tiny_model

PROMPTS = [tuple(range(10 + i, 10 + i + length)) for i, length in enumerate([40, 5, 33, 18])]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FAMILIES = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
WAYS = {
    "batched": {"max_num_seqs": 4},
    "chunks of 1": {"max_num_seqs": 1, "max_batch_tokens": 1},
    "chunks of 3": {"max_num_seqs": 2, "max_batch_tokens": 3},
    "chunks of 7": {"max_num_seqs": 4, "max_batch_tokens": 7},
    "preempted": {"max_num_seqs": 4, "max_batch_tokens": 16, "n_pages": 4},
    "pages of 1": {"max_num_seqs": 4, "page_size": 1},
    "contiguous": {"max_num_seqs": 4, "max_batch_tokens": 16, "cache_mode": "contiguous"},
    "no prefix cache": {"max_num_seqs": 4, "prefix_cache": False},
}
Logits = dict[tuple[tuple[int, ...], int], torch.Tensor]
"""(prompt, tokens before the sampled one) -> the model's logits for it."""


def record_logits(engine: InferenceEngine) -> Logits:
    """Keep what the sampler is given."""
    pipeline, found = engine.scheduler.executor.pipeline, {}
    sample = pipeline.sample

    def recording(logits, view, positions):
        for task, row in zip(view.tasks, logits, strict=True):
            found[task.prompt_ids, task.total_len] = row.clone()
        return sample(logits, view, positions)

    pipeline.sample = recording
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    """A model of each family, with the tokens and logits of each prompt in an engine of its own."""
    model, tokens, logits = tiny_model(**FAMILIES[request.param]), [], {}
    for prompt in PROMPTS:
        with small_engine(model, max_num_seqs=1, prefix_cache=False) as engine:
            found = record_logits(engine)
            tokens.append(engine.generate(prompt, GREEDY).token_ids)
            logits |= found
    return model, tokens, logits


def check(case, results, found: Logits) -> None:
    _, tokens, logits = case
    assert [result.token_ids for result in results] == tokens
    assert found.keys() == logits.keys()
    for key, row in found.items():
        torch.testing.assert_close(row, logits[key], atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_tokens_and_logits(case, way):
    """Rule 1, rows S2, S3, C6: batch mates, chunks, page size, preemption and cache mode change nothing."""
    with small_engine(case[0], **WAYS[way]) as engine:
        found = record_logits(engine)
        check(case, engine.generate(PROMPTS, GREEDY), found)
        assert (engine.scheduler.n_preemptions > 0) == (way == "preempted")
        assert engine.pool.n_used == 0


def test_a_warm_prefix_cache_gives_the_same_tokens_and_logits(case):
    """Rules 1 and 8: hits change nothing, and at least the last prompt token is fed again."""
    with small_engine(case[0], max_num_seqs=4) as engine:
        engine.generate(PROMPTS, GREEDY)
        found = record_logits(engine)
        results = engine.generate(PROMPTS, GREEDY)
        check(case, results, found)
        assert [result.usage.cached_tokens for result in results] == [32, 0, 32, 16]


def test_streaming_gives_the_same_tokens_and_logits(case):
    """Rules 1 and 13."""
    with small_engine(case[0], max_num_seqs=4) as engine:
        found = record_logits(engine)
        deltas = list(engine.generate(PROMPTS, GREEDY, stream=True))
        results = [delta.completion for delta in deltas if delta.completion is not None]
        check(case, sorted(results, key=lambda completion: int(completion.request_id.removeprefix("req-"))), found)
        for i, tokens in enumerate(case[1]):
            streamed = [delta.token_ids for delta in deltas if delta.prompt_index == i]
            assert tuple(token for ids in streamed for token in ids) == tokens


@torch.no_grad()
def test_the_logits_are_those_of_a_forward_without_a_cache(case):
    """Rule 1, row S2: the first token comes from the prompt's own logits, and nothing is fed twice."""
    model, tokens, logits = case
    for prompt, output in zip(PROMPTS, tokens, strict=True):
        dense = model(torch.tensor([[*prompt, *output]])).logits[0]
        for n in range(len(prompt), len(prompt) + len(output)):
            torch.testing.assert_close(logits[prompt, n], dense[n - 1], atol=1e-5, rtol=0.0)
