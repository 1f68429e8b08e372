"""Captured steps, launched ahead, on a CPU with a stand-in for graphs (rows W1, C5, G1-G4, S4-S7)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core import SamplingParams
from astrai_core.errors import ConfigError
from astrai_core.model.moe import ExpertLinear
from astrai_core.types import Completion, Request
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.runtime.graph import CudaGraphContext
from astrai_infer.runtime.shapes import FEWEST_CHUNK_TOKENS, MOST_CHUNK_TOKENS, MOST_CHUNKS, Buckets, StepShape
from astrai_infer.speculation import NgramDrafter, can_verify
from astrai_infer.task import Task
from astrai_infer.testing import Recorder, device_engine, small_engine, tiny_model

WINDOWED = {"model_type": "mistral", "sliding_window": 9}
EXPERTS = {
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}

ASKED: list[tuple[int, int, dict[str, Any]]] = [
    (3, 20, {}),
    (40, 9, {}),
    (1, 30, {"temperature": 0.8, "top_k": 20}),
    (17, 12, {"temperature": 1.0, "top_p": 0.9}),
    (20, 12, {"temperature": 0.7, "frequency_penalty": 0.5}),
    (9, 9, {"logprobs": 2}),
    (9, 9, {"prompt_logprobs": 2, "min_tokens": 3}),
    (9, 9, {"temperature": 0.9, "logit_bias": {5: 3.0}, "repetition_penalty": 1.2}),
    (25, 8, {"temperature": 0.9, "min_p": 0.05, "logprobs": 3, "logprobs_mode": "processed"}),
    (90, 30, {"presence_penalty": 0.4}),
]


GROWING: list[tuple[int, int, dict[str, Any]]] = [(10, 60, {"temperature": t / 2}) for t in range(4)]
"""They fit while they are short, and not when they have grown."""


def asked(table: list[tuple[int, int, dict[str, Any]]] = ASKED) -> list[Request]:
    return [
        Request(
            prompt_token_ids=tuple(range(i, i + length)),
            params=SamplingParams(max_tokens=n, seed=i, ignore_eos=True, **({"temperature": 0.0} | params)),
            request_id=str(i),
        )
        for i, (length, n, params) in enumerate(table)
    ]


def check_equal(ours: list[Completion], theirs: list[Completion]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        assert (mine.finish_reason, mine.usage) == (other.finish_reason, other.usage)
        for some, others in ((mine.logprobs, other.logprobs), (mine.prompt_logprobs, other.prompt_logprobs)):
            assert (some is None) == (others is None)
            for entry, expected in zip(some or (), others or (), strict=True):
                assert (entry is None) == (expected is None)
                if entry is not None and expected is not None:
                    assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
                    assert [token for token, _ in entry.top] == [token for token, _ in expected.top]


@pytest.mark.parametrize("how", ["in turn", "ahead", "captured"])
@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 4, "max_batch_tokens": 24},
        {"max_num_seqs": 5, "max_batch_tokens": 24, "n_pages": 9},
        {"max_num_seqs": 3, "max_batch_tokens": 300, "page_size": 1, "prefix_cache": False},
        {"max_num_seqs": 4, "max_batch_tokens": 40, "prefix_cache": False, "model": WINDOWED},
        {"max_num_seqs": 4, "max_batch_tokens": 24, "kv_dtype": "float8_e4m3fn"},
        {"max_num_seqs": 5, "max_batch_tokens": 24, "model": EXPERTS},
    ],
    ids=["chunks", "preemption", "wide", "window", "fp8", "experts"],
)
def test_the_road_of_the_device_gives_the_same_answers(config, how, monkeypatch):
    """Rules 1-4, rows G4, S4-S7: padded to buckets, tokens kept on the device, tables sent as changes, one step ahead,
    replayed: every answer and log-probability is the one of the plain executor. Experts read nothing back."""
    config = dict(config)
    model = tiny_model(**config.pop("model", {}))
    plain = small_engine(model, **config)
    table = GROWING + ASKED[5:] if "n_pages" in config else ASKED
    expected = plain.scheduler.run_batch(asked(table))
    monkeypatch.setattr(ExpertLinear, "can_group", True)
    recorder = Recorder() if how == "captured" else None
    engine = device_engine(model, recorder, ahead=how != "in turn", **config)
    for _ in range(2 if recorder else 1):
        check_equal(engine.scheduler.run_batch(asked(table)), expected)
        engine.pool.clear_prefix_cache()
    assert engine.pool.n_used == 0
    if "n_pages" in config:
        assert engine.scheduler.n_preemptions > 0
    if recorder:
        assert recorder.n_replays > engine.scheduler.n_steps


SPECULATION = {"speculation": "ngram", "max_draft_tokens": 5}


class Oracle(NgramDrafter):
    """Guesses from the known answers, some of them wrong."""

    def __init__(self, answers: dict[str, tuple[int, ...]]) -> None:
        super().__init__(5)
        self.answers = answers
        self.chance = random.Random(0)
        self.guessed: set[str] = set()

    def propose(self, task: Task, limit: int) -> tuple[int, ...]:
        if not can_verify(task.params):
            return ()
        right = list(self.answers[task.request_id][task.output_len :][: max(min(limit, self.chance.randint(0, 5)), 0)])
        if right and self.chance.random() < 0.5:
            right[self.chance.randrange(len(right))] = 7
        if right:
            self.guessed.add(task.request_id)
        return tuple(right)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 16, "max_batch_tokens": 24},
        {"max_num_seqs": 16, "max_batch_tokens": 30, "n_pages": 9},
        {"max_num_seqs": 16, "max_batch_tokens": 40, "prefix_cache": False, "model": WINDOWED},
    ],
    ids=["chunks", "preemption", "window"],
)
def test_guessing_changes_no_token(config, captured):
    """Speculation: greedy or drawn, penalised or not, alone or among others, every answer is the one without it."""
    config = dict(config)
    model = tiny_model(**config.pop("model", {}))
    plain = small_engine(model, **config)
    table = GROWING + [(length, 40, params) for length, _, params in ASKED[3:7]]
    expected = plain.scheduler.run_batch(asked(table))
    engine = device_engine(model, Recorder() if captured else None, **SPECULATION, **config)
    engine.scheduler.drafter = drafter = Oracle({c.request_id: c.token_ids for c in expected})
    check_equal(engine.scheduler.run_batch(asked(table)), expected)
    assert engine.pool.n_used == 0
    assert len(drafter.guessed) == 6, "requests with penalties and rules are the only ones without guesses"
    assert engine.scheduler.n_steps < plain.scheduler.n_steps or "n_pages" in config


def test_right_guesses_save_steps_and_wrong_ones_give_their_slots_back():
    """A text that repeats itself comes several tokens a step; now and then it changes its mind."""
    engine = device_engine(tiny_model(), None, **SPECULATION, max_num_seqs=8, max_batch_tokens=32)
    phrase = list(b"the cat sat on the mat and the dog sat on the log; ")

    def parrot(input_ids, position_ids, cache, backend, logit_rows=None):
        positions = position_ids if logit_rows is None else position_ids[logit_rows]
        logits = torch.zeros(len(positions), engine.model.config.vocab_size)
        for row, position in zip(logits, positions.tolist(), strict=True):
            row[said(position + 1)] = 9.0
        return logits

    def said(position):
        return phrase[position % len(phrase)] if position % 61 else 90

    engine.model.forward_paged = parrot
    request = Request(
        prompt_token_ids=tuple(phrase), params=SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    )
    finals: list[Any] = []
    engine.scheduler.submit(engine.tasks.make(request, finals.append))
    while engine.scheduler.step():
        for task in engine.scheduler.running:
            assert engine.pool.length(task.row) == task.computed_len, "slots of wrong guesses went back"
    completion = finals[-1].completion
    assert list(completion.token_ids) == [said(len(phrase) + i) for i in range(150)]
    assert engine.scheduler.n_steps < 150 / 3


def test_every_tensor_of_a_shape_stays_where_it_is():
    """W1: whatever the batch, a shape's step reads and writes the same memory, so that it can be replayed."""
    engine = device_engine(tiny_model(), None, max_num_seqs=4, max_batch_tokens=16)
    forward, found = engine.model.forward_paged, {}

    def recording(input_ids, position_ids, cache, backend, logit_rows):
        (metadata,) = cache.groups
        shape = len(input_ids), len(metadata.req_indices)
        tensors = {"input_ids": input_ids, "position_ids": position_ids, "logit_rows": logit_rows}
        for name in ("req_indices", "seq_lens", "kv_indptr", "qo_indptr", "out_cache_loc", "req_to_token"):
            tensors[name] = getattr(metadata, name)
        for name, tensor in tensors.items():
            if tensor is not None:
                found.setdefault((shape, name), []).append(tensor.data_ptr())
        return forward(input_ids, position_ids, cache, backend, logit_rows)

    engine.model.forward_paged = recording
    for _ in range(2):
        engine.scheduler.run_batch(asked())
    buckets = {key: places for key, places in found.items() if len(places) > 4}
    assert len({shape for shape, _ in buckets}) > 3
    assert all(len(set(places)) == 1 for places in buckets.values())


def test_padding_touches_the_scratch_slots_alone():
    """Rule 9: a step writes the slots of its own tokens and the scratch slots, in decode and mixed shapes."""
    engine = device_engine(tiny_model(), None, max_num_seqs=7, max_batch_tokens=64)
    (group,) = engine.pool.groups
    last_page_end = group.allocator.n_pages * engine.pool.page_size
    executor = engine.scheduler.executor
    launch, seen = executor.launch, []

    def checked(batch):
        own = {
            int(group.req_to_token.host[item.task.row, position])
            for item in batch.items
            for position in range(item.start, item.start + item.n_tokens)
        }
        keys = group.storage.k_buffer
        before = keys.clone().nan_to_num()
        flight = launch(batch)
        changed = (keys.nan_to_num() != before).any(0).any(-1).any(-1).nonzero().flatten().tolist()
        assert set(changed) <= own | {last_page_end}
        seen.append((len(batch.decodes), len(batch.chunks)))
        return flight

    executor.launch = checked
    engine.scheduler.run_batch(asked())
    assert {decodes not in (0, 1, 2, 4, 7) for decodes, chunks in seen if not chunks} == {True, False}
    assert any(chunks for _, chunks in seen)


@given(
    st.integers(1, 300),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 5000),
    st.integers(1, 4096),
    st.integers(1, 9999),
)
@settings(max_examples=300)
def test_buckets_hold_what_they_are_chosen_for(max_rows, n_decode, n_chunks, more, max_len, max_tokens):
    """Every step has a shape; a bucket's padding is less than the step or small, and every chunk of it has a token."""
    n_decode, n_chunks = min(n_decode, max_rows), min(n_chunks, max_rows)
    buckets = Buckets(max_rows, max_len, max_tokens)
    assert buckets.first[0] == StepShape(max_rows), "the largest comes first, for its memory serves the others"
    if n_decode:
        rows = buckets.decode(n_decode).n_decode
        assert n_decode <= rows <= max_rows
        assert rows < 2 * n_decode
    if not n_chunks:
        return
    n_tokens = n_chunks + more
    shape = buckets.mixed(n_decode, n_chunks, n_tokens)
    assert shape.n_chunks >= n_chunks
    assert shape.n_chunk_tokens - n_tokens >= shape.n_chunks - n_chunks
    if not shape.is_bucket:
        assert shape == StepShape(n_decode, n_tokens, n_chunks, is_bucket=False)
        return
    assert shape.n_chunks <= 4 * n_chunks
    assert shape.n_chunk_tokens <= buckets.most_chunk_tokens <= MOST_CHUNK_TOKENS
    assert shape.n_chunks <= MOST_CHUNKS
    assert shape.n_chunk_tokens < 2 * n_tokens + FEWEST_CHUNK_TOKENS + 2 * shape.n_chunks
    assert (shape.n_chunk_tokens > n_tokens) <= (shape.n_chunks > n_chunks), "what is left belongs to a chunk"
    assert shape.n_chunk_tokens - n_tokens - (shape.n_chunks - n_chunks) + 1 <= max_len


def test_work_runs_then_is_captured_then_replayed():
    """G1, G2: the first time as it is; the second captures and replays, so that it has a result; then only replays."""
    log: list[str] = []

    def capture(run):
        log.append("capture")
        return lambda: log.append("replay"), "output"

    context = CudaGraphContext(capture)
    assert context.run("key", lambda: log.append("work")) is None
    assert not context.has_graph("key")
    assert [context.run("key", lambda: log.append("work")) for _ in range(2)] == ["output"] * 2
    assert log == ["work", "capture", "replay", "replay"]
    for _ in range(3):
        context.run(None, lambda: log.append("unnamed"))
    assert log[4:] == ["unnamed"] * 3, "work without a name is never captured"
    context.forget()
    assert not context.has_graph("key")
    context.run("key", lambda: log.append("again"))
    assert log[-1] == "again"


def test_work_that_there_is_no_memory_to_capture_runs_without(caplog):
    """Rule 10: running out of memory for a graph costs speed, not the request."""
    attempts = []

    def capture(run):
        attempts.append(1)
        raise torch.OutOfMemoryError("scripted")

    context = CudaGraphContext(capture)
    assert [context.run("key", lambda: "done") for _ in range(4)] == ["done"] * 4
    assert len(attempts) == 1
    assert "no memory is left to capture key" in caplog.text


def test_graphs_cannot_be_had_on_a_cpu():
    """Strict: what was asked for by name is refused where it cannot be."""
    with pytest.raises(ConfigError, match="cuda_graphs is True but the model is on a CPU; leave it out"):
        small_engine(tiny_model(), cuda_graphs=True)
    with pytest.raises(ConfigError, match="needs a CUDA device and the backend cuda; leave it out"):
        small_engine(tiny_model(), deterministic=True)
    with pytest.raises(ConfigError, match="step_kernel is True but it needs a CUDA device and the backend cuda; leave"):
        small_engine(tiny_model(), step_kernel=True)
    assert not isinstance(small_engine(tiny_model(), cuda_graphs=False).scheduler.executor, DeviceExecutor)


def test_deterministic_mode_is_for_the_draft_model_too():
    """Rule 2: where the model sums in a fixed order, so does its draft; equal weights then guess right bit by bit."""
    plain = device_engine(tiny_model(), None, max_num_seqs=8).scheduler.executor
    assert isinstance(plain, DeviceExecutor)
    models = {"model": plain.model, "draft": tiny_model()}
    seen: list[tuple[str, bool]] = []
    for name, model in models.items():

        def watched(*args: Any, forward: Any = model.forward_paged, name: str = name) -> torch.Tensor:
            seen.append((name, torch.are_deterministic_algorithms_enabled()))
            return forward(*args)

        model.forward_paged = watched
    engine = device_engine(plain.model, None, draft_model=models["draft"], speculation="draft", max_num_seqs=8)
    for deterministic in (False, True):
        executor = DeviceExecutor(
            plain.model, engine.pool, plain.backend, 8, 64, None,
            deterministic=deterministic, draft=models["draft"], max_draft_tokens=2,
        )  # fmt: skip
        seen.clear()
        for shape in (StepShape(4, verifies=True), StepShape(0, 16, 1)):
            executor.run_padding(shape)
        assert set(seen) == {(name, deterministic) for name in models}
        assert not torch.are_deterministic_algorithms_enabled()


def test_sleep_and_new_weights_land_what_is_under_way():
    """Rules 8 and 12: between steps nothing is in flight, graphs are made anew, and answers go on as they would have."""
    recorder = Recorder()
    engine = device_engine(tiny_model(), recorder, max_num_seqs=4, max_batch_tokens=24)
    expected = engine.scheduler.run_batch(asked()[:3])
    told: list[Any] = []
    for request in asked()[:3]:
        engine.scheduler.submit(engine.tasks.make(request, told.append))
    for _ in range(6):
        engine.scheduler.step()
    assert engine.scheduler._flight is not None
    engine.sleep()
    assert engine.scheduler._flight is None
    assert len(engine._executor.graphs) == 0
    engine.resume()
    assert len(engine._executor.graphs) > 0
    while engine.scheduler.step():
        pass
    finals = {delta.completion.request_id: delta.completion for delta in told if delta.completion}
    assert [finals[c.request_id].token_ids for c in expected] == [c.token_ids for c in expected]
