"""The engine against a full forward without a cache: rows S1-S3, S9, and inference rules 1-3, 5-7, 10, 11, 13-16."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from astrai_core import SamplingParams
from astrai_core.errors import ChatTemplateError, RequestError
from astrai_core.types import Request
from astrai_infer import InferenceEngine
from astrai_infer.testing import EOS_ID, ScriptedModel, byte_tokenizer, tiny_model
from astrai_infer.testing import scripted_engine as scripted
from astrai_infer.testing import small_engine as engine

TOKENIZER = byte_tokenizer()
PROMPTS = [list(range(10 + i, 10 + i + length)) for i, length in enumerate([1, 5, 16, 17, 31, 40, 2, 63])]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@torch.no_grad()
def verified(model, prompts: list[list[int]], n: int) -> list[tuple[int, ...]]:
    """Greedy completions of one request at a time, each token checked against a full forward without a cache."""
    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
    with engine(model, max_num_seqs=1, prefix_cache=False) as alone:
        outputs = [alone.generate(prompt, params).token_ids for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = model(torch.tensor([[*prompt, *output]])).logits[0]
        assert tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == output
    return outputs


FAMILIES = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    model = tiny_model(**FAMILIES[request.param])
    return model, verified(model, PROMPTS, 24)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 8},
        {"max_num_seqs": 8, "max_batch_tokens": 9},
        {"max_num_seqs": 3, "max_batch_tokens": 64, "page_size": 1},
        {"max_num_seqs": 8, "max_batch_tokens": 33, "n_pages": 8},
        {"max_num_seqs": 4, "max_batch_tokens": 33, "cache_mode": "contiguous"},
    ],
    ids=["batched", "chunked", "page1", "preempted", "contiguous"],
)
def test_greedy_depends_on_the_prompt_alone(case, config):
    """Rule 1, rows S2 and S3: not batch mates, chunks, page size nor preemption change a token."""
    model, expected = case
    with engine(model, **config) as subject:
        results = subject.generate(PROMPTS, GREEDY)
        assert [result.token_ids for result in results] == expected
        assert all(result.finish_reason == "length" for result in results)
        assert subject.pool.n_used == 0, "every page came back"


def test_prefix_cache_changes_no_output(case):
    """Rules 1 and 8: a warm cache gives the same tokens, counts what it found, and recomputes the last token."""
    model, expected = case
    with engine(model) as subject:
        for round_number in range(2):
            results = subject.generate(PROMPTS, GREEDY)
            assert [result.token_ids for result in results] == expected
            found = [result.usage.cached_tokens for result in results]
            assert found == ([0] * 8 if round_number == 0 else [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS])
        longer = [*PROMPTS[5], *expected[5]]
        assert subject.generate(longer, GREEDY).usage.cached_tokens == (len(longer) - 1) // 16 * 16
    with engine(model, prefix_cache=False) as subject:
        assert [subject.generate(PROMPTS[7], GREEDY).usage.cached_tokens for _ in range(2)] == [0, 0]


def test_preemption_did_happen():
    """The pool of the case above really is too small for all, so that case tests what it says."""
    with engine(tiny_model(), max_num_seqs=8, max_batch_tokens=33, n_pages=8) as subject:
        seen = []
        preempt = subject.scheduler._preempt
        subject.scheduler._preempt = lambda task: (seen.append(task.request_id), preempt(task))
        subject.generate(PROMPTS, GREEDY)
        assert seen


def test_loop_and_run_batch_give_the_same_tokens():
    """S1."""
    model = tiny_model()
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16, n=2)
    with engine(model) as looped:
        expected = looped.generate(PROMPTS, params)
    subject = engine(model)
    requests = [
        Request(prompt_token_ids=tuple(prompt), params=params, request_id=str(i)) for i, prompt in enumerate(PROMPTS)
    ]
    flat = subject.scheduler.run_batch(requests)
    assert [completion.token_ids for completion in flat] == [c.token_ids for choices in expected for c in choices]
    assert subject._thread is None, "run_batch needs no thread"
    assert [completion.request_id for completion in flat[::2]] == [request.request_id for request in requests]


def test_streamed_equals_whole_and_deltas_join():
    """Rule 13."""
    with engine(tiny_model()) as subject:
        params = SamplingParams(temperature=1.0, seed=11, max_tokens=40)
        whole = subject.generate(PROMPTS, params)
        deltas = list(subject.generate(PROMPTS, params, stream=True))
        for i, completion in enumerate(whole):
            mine = [delta for delta in deltas if delta.prompt_index == i]
            assert "".join(mine) == completion.text == TOKENIZER.decode(completion.token_ids)
            assert tuple(itertools.chain(*(delta.token_ids for delta in mine))) == completion.token_ids
            assert [delta.completion is not None for delta in mine] == [False] * (len(mine) - 1) + [True]
            assert mine[-1].finish_reason == completion.finish_reason
            assert mine[0].text == str(mine[0])


def test_seeded_text_depends_on_prompt_params_seed_and_choice_alone():
    """Rule 2."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, n=3)
    with engine(tiny_model()) as subject:
        alone = [choice.token_ids for choice in subject.generate([1, 2, 3], params)]
        assert [choice.index for choice in subject.generate([1, 2, 3], params)] == [0, 1, 2]
        crowded = subject.generate([[9], [1, 2, 3], [8, 8]], params)[1]
        assert [choice.token_ids for choice in crowded] == alone
        assert len(set(alone)) == 3, "choices differ"
        unseeded = {subject.generate([1, 2, 3], SamplingParams(max_tokens=12)).token_ids for _ in range(3)}
        assert len(unseeded) == 3, "requests without a seed differ"


@pytest.mark.parametrize(
    ("params", "text", "reason", "stop_reason"),
    [
        ({}, "hello world", "stop", None),
        ({"max_tokens": 5}, "hello", "length", None),
        ({"stop": "o w"}, "hell", "stop", "o w"),
        ({"stop": ["world", "wor"]}, "hello ", "stop", "wor"),
        ({"stop": "o w", "include_stop_str_in_output": True}, "hello w", "stop", "o w"),
        ({"stop": "worldly"}, "hello world", "stop", None),
        ({"stop": "world!", "max_tokens": 10}, "hello worl", "length", None),
        ({"stop_token_ids": [ord("o")]}, "hell", "stop", ord("o")),
        ({"stop_token_ids": [ord("o")], "include_stop_str_in_output": True}, "hello", "stop", ord("o")),
        ({"stop": "l", "min_tokens": 4}, "hello wor", "stop", "l"),
    ],
)
def test_stops_and_finish_reasons(params, text, reason, stop_reason):
    """Rules 14, 15."""
    with scripted("hello world") as subject:
        result = subject.generate([0], SamplingParams(temperature=0.0, **params))
        assert (result.text, result.finish_reason, result.stop_reason) == (text, reason, stop_reason)
        streamed = list(subject.generate([0], SamplingParams(temperature=0.0, **params), stream=True))
        assert "".join(streamed) == text
        assert result.usage.completion_tokens == len(result.token_ids)


def test_min_tokens_holds_the_end_back():
    with scripted("abc") as subject:
        result = subject.generate([0], SamplingParams(temperature=0.0, min_tokens=5, max_tokens=9))
        assert result.usage.completion_tokens == 6
        assert result.token_ids.index(EOS_ID) == 5


def test_ignore_eos_and_generation_config_eos():
    model = ScriptedModel(lambda _, position: [65, 66, EOS_ID, 67, 68][min(position, 4)])
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with InferenceEngine(model, TOKENIZER, generation_config={"eos_token_id": [EOS_ID, 66]}) as subject:
        assert subject.generate([0], params).token_ids == (65, 66, EOS_ID, 67, 68)
        assert subject.generate([0], SamplingParams(temperature=0.0)).token_ids == (65, 66), "several EOS ids"


def test_characters_split_over_tokens_come_whole():
    """Rule 14: no half character in any delta; a cut-off one becomes U+FFFD at the end."""
    with scripted("aé€😀b") as subject:
        deltas = list(subject.generate([0], SamplingParams(temperature=0.0), stream=True))
        assert [str(delta) for delta in deltas if delta] == ["a", "é", "€", "😀", "b"]
        cut = subject.generate([0], SamplingParams(temperature=0.0, max_tokens=5))
        assert (cut.text, cut.finish_reason) == ("aé\ufffd", "length")


def test_runs_until_the_context_is_full():
    """CL2: no max_tokens means until max_seq_len."""
    with scripted("x" * 300, max_seq_len=32) as subject:
        result = subject.generate([0, 0], SamplingParams(temperature=0.0))
        assert (result.finish_reason, result.usage.total_tokens) == ("length", 32)


def test_outgrowing_the_pool_ends_with_length():
    """Rule 6."""
    with scripted("x" * 300, max_num_seqs=2, n_pages=3) as subject:
        results = subject.generate([[0] * 5, [0] * 7], SamplingParams(temperature=0.0))
        assert [result.finish_reason for result in results] == ["length", "length"]
        assert [result.usage.total_tokens for result in results] == [48, 48]
        assert subject.pool.n_used == 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([1, 0.5], {}, "a prompt is text, a list of messages or a list of token ids"),
        ({"role": "user"}, {}, "a prompt is text"),
        ([999], {}, "prompt: token id 999 is outside the vocabulary of 257"),
        ([1] * 256, {}, "prompt has 256 tokens, max_seq_len is 256"),
        ([1], {"logit_bias": {300: 1.0}}, "logit_bias: token id 300"),
        ([1], {"stop_token_ids": [300]}, "stop_token_ids: token id 300"),
        ([1], {"allowed_token_ids": [300]}, "allowed_token_ids: token id 300"),
        (
            [1],
            {"allowed_token_ids": [7, EOS_ID], "stop_token_ids": [7], "min_tokens": 2},
            "min_tokens is 2 but each of",
        ),
        ([{"role": "user"}, {"role": 3, "content": "x"}], {}, r"messages\[0\]"),
    ],
)
def test_a_bad_request_is_refused_alone(prompt, params, message):
    """Rule 11: it raises when single, and in a list it leaves the others untouched."""
    bad, good = SamplingParams(**params), SamplingParams(temperature=0.0, max_tokens=2)
    with scripted("ok") as subject:
        with pytest.raises((RequestError, ChatTemplateError), match=message):
            subject.generate(prompt, bad)
        if not isinstance(prompt, dict) and not (isinstance(prompt, list) and isinstance(prompt[0], dict)):
            first, second = subject.generate([prompt, [0]], [bad, good])
            assert first.finish_reason == "error"
            assert second.text == "ok"


def test_prompt_larger_than_the_cache_is_refused_with_the_numbers():
    with (
        scripted("x", n_pages=2, max_seq_len=128) as subject,
        pytest.raises(RequestError, match="prompt has 40 tokens, the KV cache holds 32"),
    ):
        subject.generate([1] * 40)


def test_no_prompts_give_no_results():
    with scripted("x") as subject:
        assert subject.generate([]) == []


def test_conversations_go_through_the_template():
    """Rule 16."""
    with scripted("x") as subject:
        ids = subject.encode([{"role": "user", "content": "hi"}])
        assert bytes(ids) == b"<user>hi<assistant>"


def test_asyncio():
    """S9: the same road for asyncio, concurrent and streamed."""

    async def main(subject):
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        results = await asyncio.gather(*(subject.generate_async(prompt, params) for prompt in PROMPTS))
        streamed = [delta async for delta in subject.generate_async(PROMPTS[1], params, stream=True)]
        listed = await subject.generate_async(PROMPTS, params)
        with pytest.raises(RequestError, match="empty"):
            await subject.generate_async("")
        return results, streamed, listed

    model = tiny_model()
    with engine(model) as subject:
        results, streamed, listed = asyncio.run(main(subject))
    assert [result.token_ids for result in results] == verified(model, PROMPTS, 24)
    assert "".join(streamed) == results[1].text
    assert [result.text for result in listed] == [result.text for result in results]


@torch.no_grad()
def test_logprobs_are_of_the_models_own_logits():
    """Rule 4, rows SM2, SM3: one entry a token; the chosen token is always listed."""
    model = tiny_model()
    params = SamplingParams(
        temperature=1.3, top_k=40, seed=2, max_tokens=20, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    prompt = PROMPTS[5]
    with engine(model, max_num_seqs=8, max_batch_tokens=16) as subject:
        result = subject.generate([prompt, PROMPTS[0]], params)[0]
    ids = [*prompt, *result.token_ids]
    expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert len(result.logprobs) == len(result.token_ids) == 20
    assert len(result.prompt_logprobs) == len(prompt)
    assert result.prompt_logprobs[0] is None
    for position, entry in enumerate([*result.prompt_logprobs, *result.logprobs]):
        if entry is None:
            continue
        assert entry.token_id == ids[position]
        assert entry.logprob == pytest.approx(float(expected[position - 1, ids[position]]), abs=1e-4)
        assert entry.token_id in [token for token, _ in entry.top]
        best = expected[position - 1].topk(2).indices.tolist()
        assert [token for token, _ in entry.top][:2] == best
