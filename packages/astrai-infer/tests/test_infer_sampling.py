"""Sampling: each transformation equals transformers' (rows SM1, SM2; rule 3), and draws follow the distribution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core import SamplingParams
from astrai_infer.sampling import pipeline as pipeline_module
from astrai_infer.sampling import strategies
from astrai_infer.sampling.batch_info import SamplingBatchInfo
from astrai_infer.sampling.pipeline import SamplingPipeline, token_logprobs
from astrai_infer.task import Task
from astrai_infer.testing import byte_tokenizer
from astrai_infer.text.detokenize import TextStream

TOKENIZER = byte_tokenizer()
VOCAB = 50
CPU = torch.device("cpu")


def make_task(row: int, params: SamplingParams, prompt=(1, 2, 3), output=(), seed: int = 7) -> Task:
    task = Task(
        "r",
        tuple(prompt),
        params,
        seed=seed,
        max_total_len=10**6,
        stop_ids=frozenset({VOCAB - 1}),
        text=TextStream(TOKENIZER, params),
        on_delta=lambda delta: None,
    )
    task.token_ids.extend(output)
    task.row = row
    return task


def sample(tasks: list[Task], logits: torch.Tensor, positions=None) -> torch.Tensor:
    info = SamplingBatchInfo(len(tasks), logits.shape[1], CPU)
    for task in tasks:
        info.admit(task)
    positions = torch.zeros(len(tasks), dtype=torch.long) if positions is None else positions
    return SamplingPipeline(info).sample(logits, info.view(tuple(tasks)), positions)[0]


def reference_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' warpers in the documented order."""
    process = pytest.importorskip("transformers.generation.logits_process")
    ids = torch.zeros(1, 1, dtype=torch.long)
    scores = process.TemperatureLogitsWarper(params.temperature)(ids, logits[None])
    if params.top_k > 0:
        scores = process.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = process.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = process.MinPLogitsWarper(params.min_p)(ids, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.7},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"top_k": VOCAB + 10},
    ],
    ids=str,
)
@pytest.mark.parametrize("wide", [16, 1024])
def test_draws_follow_the_filtered_distribution(params, wide, monkeypatch):
    """Chi-square of 10,000 draws against transformers' filtered probabilities; also where the nucleus is sorted in part."""
    monkeypatch.setattr(pipeline_module, "WIDE", wide)
    n = 10_000
    params = SamplingParams(**params)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = reference_probs(logits, params) * n
    tasks = [make_task(row, params, seed=row) for row in range(n)]
    counts = torch.bincount(sample(tasks, logits.expand(n, -1)), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
    likely = expected > 5
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum().item()
    degrees = int(likely.sum()) - 1
    assert statistic < degrees + 5 * (2 * max(degrees, 1)) ** 0.5 + 5


def test_rows_of_a_batch_do_not_mix():
    """Greedy, filtered and free rows in one batch give what each gives alone (rule 2)."""
    settings = [
        {"temperature": 0.0},
        {},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"temperature": 0.0, "top_k": 2},
    ]
    tasks = [make_task(row, SamplingParams(**setting), seed=row) for row, setting in enumerate(settings)]
    logits = torch.randn(len(tasks), VOCAB)
    together = sample(tasks, logits)
    for i, task in enumerate(tasks):
        task.row = 0
        assert sample([task], logits[i : i + 1]).item() == together[i].item()
    assert together[0] == logits[0].argmax()
    assert together[5] == logits[5].argmax()


def test_penalties_equal_their_formulas():
    """SM1: logit - frequency * count - presence * seen over the output and the last rep_window prompt tokens."""
    prompt, output = [4, 4, 5, 6], [6, 7, 7]
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25, rep_window=2)
    info = SamplingBatchInfo(2, 10, CPU)
    plain = make_task(0, SamplingParams(temperature=0.0), prompt, output)
    task = make_task(1, params, prompt, output)
    for each in (plain, task):
        info.admit(each)
    view = info.view((task,))
    actual = strategies.apply_penalties(torch.zeros(1, 10), *info.penalties(view))[0]
    expected = torch.zeros(10)
    for token, count in {5: 1, 6: 2, 7: 2}.items():
        expected[token] = -0.5 * count - 0.25
    torch.testing.assert_close(actual, expected)
    info.record(view, torch.tensor([7]))
    again = strategies.apply_penalties(torch.zeros(1, 10), *info.penalties(view))[0]
    assert again[7] == expected[7] - 0.5


def test_repetition_penalty_equals_transformers():
    process = pytest.importorskip("transformers.generation.logits_process")
    prompt, output = [4, 4, 5], [6, 7]
    task = make_task(0, SamplingParams(repetition_penalty=1.7), prompt, output)
    info = SamplingBatchInfo(1, 10, CPU)
    info.admit(task)
    logits = torch.randn(1, 10)
    expected = process.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    torch.testing.assert_close(strategies.apply_penalties(logits, *info.penalties(info.view((task,)))), expected)


def test_penalties_act_on_greedy_rows_and_their_own_row_only():
    logits = torch.zeros(2, VOCAB)
    logits[:, 3], logits[:, 8] = 1.0, 0.9
    tasks = [
        make_task(0, SamplingParams(temperature=0.0, presence_penalty=0.5)),
        make_task(1, SamplingParams(temperature=0.0)),
    ]
    assert sample(tasks, logits).tolist() == [8, 3]


def test_bias_allowed_ids_and_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, VOCAB - 1], logits[0, 4] = 5.0, 1.0
    kept = logits.clone()
    greedy = {"temperature": 0.0}
    assert sample([make_task(0, SamplingParams(**greedy))], logits).item() == VOCAB - 1
    assert sample([make_task(0, SamplingParams(**greedy, min_tokens=2))], logits).item() == 4
    assert sample([make_task(0, SamplingParams(**greedy, min_tokens=2), output=[9, 9])], logits).item() == VOCAB - 1
    assert sample([make_task(0, SamplingParams(**greedy, logit_bias={6: 50.0}))], logits).item() == 6
    assert sample([make_task(0, SamplingParams(**greedy, allowed_token_ids=[4, 6]))], logits).item() == 4
    assert torch.equal(logits, kept), "the model's logits are left alone"


def test_history_survives_readmission():
    """A preempted request that comes back in another row is penalised for the same tokens."""
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5, rep_window=0)
    info = SamplingBatchInfo(3, 10, CPU)
    first = make_task(0, params, [1], [])
    info.admit(first)
    for token in (4, 4, 5):
        info.record(info.view((first,)), torch.tensor([token]))
        first.token_ids.append(token)
    back = make_task(2, params, [1], [4, 4, 5])
    info.admit(back)
    for ours, theirs in zip(info.penalties(info.view((first,))), info.penalties(info.view((back,))), strict=True):
        assert torch.equal(ours, theirs)


def test_the_same_set_of_tasks_reuses_its_view():
    """S4: rows are gathered once per ordered task set; admission invalidates them."""
    info = SamplingBatchInfo(2, 10, CPU)
    tasks = tuple(make_task(row, SamplingParams()) for row in range(2))
    for task in tasks:
        info.admit(task)
    view = info.view(tasks)
    assert info.view(tasks) is view
    assert info.view(tasks[::-1]) is not view
    view = info.view(tasks)
    info.admit(tasks[0])
    assert info.view(tasks) is not view


def test_uniform_is_a_function_of_seed_and_position():
    seeds = torch.arange(200_000)
    first = strategies.uniform(seeds, torch.full_like(seeds, 5))
    assert torch.equal(first, strategies.uniform(seeds, torch.full_like(seeds, 5)))
    assert torch.equal(first[17:18], strategies.uniform(seeds[17:18], torch.tensor([5])))
    assert ((first >= 0) & (first < 1)).all()
    assert abs(first.mean().item() - 0.5) < 0.005
    other = strategies.uniform(seeds, torch.full_like(seeds, 6))
    assert abs(torch.corrcoef(torch.stack((first, other)))[0, 1].item()) < 0.01
    histogram = torch.histc(first.float(), bins=64, min=0, max=1)
    assert histogram.std() / histogram.mean() < 0.03


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.just(-torch.inf), st.floats(-5, 5)), min_size=1, max_size=20),
    st.floats(0, 1, exclude_max=True),
)
def test_draw_never_picks_an_excluded_column(values, u):
    logits = torch.tensor([[0.5, *values]])
    picked = strategies.draw(logits, torch.tensor([u], dtype=torch.float64)).item()
    assert torch.isfinite(logits[0, picked])


@pytest.mark.parametrize(
    "params", [{"temperature": 0.7, "top_k": 12, "top_p": 0.8}, {"top_p": 0.5}, {"temperature": 2.0}]
)
def test_processed_logprobs_are_of_the_filtered_distribution(params):
    """Rule 4: processed = after temperature and filters, -inf where they exclude; raw = the model's logits."""
    params = SamplingParams(**params, logprobs=VOCAB, logprobs_mode="processed")
    logits = torch.randn(1, VOCAB)
    task = make_task(0, params)
    info = SamplingBatchInfo(1, VOCAB, CPU)
    info.admit(task)
    _, (entry,) = SamplingPipeline(info).sample(logits, info.view((task,)), torch.zeros(1, dtype=torch.long))
    found = torch.empty(VOCAB)
    for token, logprob in entry.top:
        found[token] = logprob
    torch.testing.assert_close(found.exp(), reference_probs(logits[0], params), atol=1e-6, rtol=1e-5)
    assert entry.logprob == found[entry.token_id] > -torch.inf


def test_token_logprobs():
    """SM2: log-softmax of the model's logits; the chosen token is always listed."""
    logits = torch.randn(3, VOCAB)
    tokens = torch.tensor([1, 2, int(logits[2].argmax())])
    expected = logits.log_softmax(-1)
    for i, entry in enumerate(token_logprobs(logits, tokens, 4)):
        assert entry.token_id == tokens[i]
        assert entry.logprob == pytest.approx(expected[i, tokens[i]].item())
        assert [t for t, _ in entry.top[:4]] == expected[i].topk(4).indices.tolist()
        assert entry.token_id in [t for t, _ in entry.top]
    assert token_logprobs(logits, tokens, 0)[0].top == ((1, token_logprobs(logits, tokens, 0)[0].logprob),)
