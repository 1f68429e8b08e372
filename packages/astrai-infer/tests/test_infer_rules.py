"""What a request may ask and how it may end, whatever its neighbours do (inference rules 3, 7, 10, 11, 15)."""

from __future__ import annotations

import math
import queue
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core import SamplingParams
from astrai_core.errors import AstraiError, EngineError
from astrai_core.types import Request
from astrai_infer import InferenceEngine
from astrai_infer.task import Delta
from astrai_infer.testing import VOCAB_SIZE, ScriptedModel, device_engine, small_engine, tiny_model

GOOD = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
GOOD_PROMPTS = [[1, 2, 3], list(range(40))]

huge = st.sampled_from([VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**63, 2**70, 10**30])
bad_id = st.one_of(huge, st.integers(-(2**70), -1))
not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
bad_prompt = st.one_of(
    st.just(""),
    st.just([1] * 256),
    st.tuples(st.lists(st.integers(0, 200), max_size=3), bad_id).map(lambda pair: [*pair[0], pair[1]]),
    st.lists(st.one_of(st.none(), not_finite, st.text(max_size=2)), min_size=1, max_size=3).map(lambda ids: [1, *ids]),
    st.just([{"role": "user"}]),
)
bad_params = st.one_of(
    st.fixed_dictionaries({"stop_token_ids": st.lists(bad_id, min_size=1, max_size=2)}),
    st.fixed_dictionaries({"allowed_token_ids": st.lists(bad_id, min_size=1, max_size=2)}),
    st.fixed_dictionaries({"logit_bias": st.dictionaries(bad_id, st.floats(-1, 1), min_size=1, max_size=2)}),
    st.fixed_dictionaries({"logit_bias": st.dictionaries(st.integers(0, 256), not_finite, min_size=1, max_size=2)}),
    st.tuples(
        st.sampled_from(
            ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
        ),
        st.one_of(not_finite, st.sampled_from([-1e30, 1e30, "x", None, True])),
    ).map(lambda pair: {pair[0]: pair[1]}),
    st.tuples(
        st.sampled_from(
            ["max_tokens", "n", "seed", "rep_window", "min_tokens", "logprobs", "prompt_logprobs", "top_k"]
        ),
        st.one_of(st.integers(-(2**70), -2), st.sampled_from([math.nan, math.inf, 0.5, "x", True])),
    ).map(lambda pair: {pair[0]: pair[1]}),
    st.sampled_from([{"max_tokens": 0}, {"n": 0}, {"n": 10**9}, {"seed": 2**63}, {"min_tokens": 5, "max_tokens": 2}]),
)


@pytest.fixture(scope="module")
def shared():
    """One engine for all examples, so that what an example leaves behind disturbs the next; and its good answers."""
    with small_engine(tiny_model(), max_num_seqs=4, max_batch_tokens=16) as engine:
        expected = [engine.generate(prompt, GOOD).token_ids for prompt in GOOD_PROMPTS]
        yield engine, expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_bad_request_is_an_error_of_its_own(shared, data):
    """Rule 11: out-of-vocabulary ids anywhere, numbers that are none, zero, negative and huge: always one of our errors
    in one line, and the requests that run beside it answer as if it had never come."""
    engine, expected = shared
    stream = engine.generate(GOOD_PROMPTS, GOOD, stream=True)
    deltas = [next(stream)]
    prompt, params = data.draw(
        st.one_of(
            st.tuples(bad_prompt, st.just({})),
            st.tuples(st.just([1, 2]), bad_params),
        )
    )
    with pytest.raises(AstraiError) as caught:
        engine.generate(prompt, SamplingParams.from_dict(params))
    assert str(caught.value)
    assert "\n" not in str(caught.value)
    deltas.extend(stream)
    for i, tokens in enumerate(expected):
        mine = [token for delta in deltas if delta.prompt_index == i for token in delta.token_ids]
        assert tuple(mine) == tokens
    assert (engine.pool.n_used, engine.scheduler.running, engine.scheduler.n_waiting) == (0, [], 0)


class Watch:
    """Steps an engine by hand and keeps every delta."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.deltas: list[Delta] = []

    def submit(self, name: str, prompt: list[int], on_delta=None, **params) -> None:
        request = Request(
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params)),
            request_id=name,
        )

        def deliver(delta: Delta) -> None:
            self.deltas.append(delta)
            if on_delta is not None:
                on_delta(delta)

        self.engine.scheduler.submit(self.engine.tasks.make(request, deliver))

    def drain(self) -> None:
        while self.engine.scheduler.step():
            pass
        assert not self.engine.scheduler.has_work
        assert self.engine.pool.n_used == 0, "every page came back"

    def reasons(self) -> dict[str, list[str]]:
        """Finish reasons of each request, in order."""
        found: dict[str, list[str]] = {}
        for delta in self.deltas:
            if delta.completion is not None:
                found.setdefault(delta.completion.request_id, []).append(delta.completion.finish_reason)
        return found


@pytest.mark.parametrize("moment", ["queued", "mid-prefill", "decoding", "in flight", "finishing", "finished"])
def test_an_abort_at_any_moment_ends_the_request_once(moment):
    """Rules 7 and 15: exactly one final event, no page lost, neighbours untouched; a second abort does nothing."""
    engine = small_engine(ScriptedModel(lambda token, position: 65), max_num_seqs=2, max_batch_tokens=8)
    watch, scheduler = Watch(engine), engine.scheduler

    def abort() -> None:
        scheduler.abort("victim")
        scheduler.abort("victim")

    watch.submit("neighbour", [1, 2])
    watch.submit("victim", list(range(30)), on_delta=(lambda delta: abort()) if moment == "finishing" else None)
    if moment in ("mid-prefill", "decoding", "in flight"):
        for _ in range({"mid-prefill": 2, "decoding": 6, "in flight": 5}[moment]):
            scheduler.step()
    if moment == "in flight":
        run = scheduler.executor.run

        def run_and_abort(batch):
            scheduler.executor.run = run
            thread = threading.Thread(target=abort)
            thread.start()
            thread.join(10)
            assert not thread.is_alive(), "an abort never waits for a step"
            return run(batch)

        scheduler.executor.run = run_and_abort
    if moment == "finished":
        watch.drain()
    if moment != "finishing":
        abort()
    watch.drain()
    expected = {"finished": ["length"]}.get(moment, ["abort"])
    assert watch.reasons() == {"victim": expected, "neighbour": ["length"]}


def test_an_abort_in_the_last_step_changes_nothing():
    """Rule 7: the request finishes in the very step in which it is aborted; its one final event says so."""
    engine = small_engine(ScriptedModel(lambda token, position: 65), max_num_seqs=2)
    watch = Watch(engine)
    watch.submit(
        "victim",
        [1],
        on_delta=lambda delta: engine.scheduler.abort("victim") if delta.completion else None,
        max_tokens=1,
    )
    watch.drain()
    assert watch.reasons() == {"victim": ["length"]}


@pytest.mark.parametrize(
    "error",
    [RuntimeError("boom"), torch.OutOfMemoryError("boom"), MemoryError("boom"), ValueError("boom"), IndexError("boom")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("during", ["prefill", "decode"])
def test_a_failing_step_ends_what_it_ran_and_nothing_else(error, during):
    """Rules 10 and 15: its requests end with the error, those that waited are served, and no page is lost."""

    def script(token: int, position: int) -> int:
        if token == 13 or (during == "decode" and token == 65 and position == 33):
            raise error
        return 65

    engine = small_engine(ScriptedModel(script), max_num_seqs=1)
    watch = Watch(engine)
    watch.submit("bad", [*range(14, 14 + 30), 13 if during == "prefill" else 1])
    watch.submit("waiting", [1])
    watch.drain()
    assert watch.reasons() == {"bad": ["error"], "waiting": ["length"]}
    (completion,) = (delta.completion for delta in watch.deltas if delta.finish_reason == "error")
    assert completion.error == f"a step failed: {type(error).__name__}: boom"


def test_every_waiter_of_a_dead_loop_hears_at_once():
    """Rule 10: running and queued requests of several threads all end when the loop dies; none waits for ever."""

    def script(token: int, position: int) -> int:
        if position > 3:
            raise KeyboardInterrupt
        return 65

    engine = small_engine(ScriptedModel(script), max_num_seqs=1)
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()
    silent, threading.excepthook = threading.excepthook, lambda args: None
    engine.pause()

    def ask() -> None:
        try:
            engine.generate([1, 2], GOOD)
        except EngineError as failure:
            ends.put(str(failure))

    try:
        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        while engine.scheduler.n_waiting < 3:
            assert any(thread.is_alive() for thread in threads)
        engine.resume()
        messages = [ends.get(timeout=10) for _ in threads]
        assert all(message.startswith("the engine stopped: KeyboardInterrupt") for message in messages)
        assert engine.health().status == "stopped"
    finally:
        engine.close()
        threading.excepthook = silent


@pytest.mark.parametrize("road", ["plain", "device"])
def test_what_nearly_divides_by_zero_does_not(road):
    """Rule 3: at the least temperature a draw is the argmax, and a tiny penalty leaves every log-probability a number."""
    model = tiny_model()
    engine = small_engine(model) if road == "plain" else device_engine(model, None)
    with engine:
        expected = engine.generate(GOOD_PROMPTS, GOOD)
        for temperature in (1e-30, 1e-42, 5e-324):
            params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True, seed=1, top_p=0.9)
            assert [c.token_ids for c in engine.generate(GOOD_PROMPTS, params)] == [c.token_ids for c in expected]
        params = SamplingParams(
            temperature=1e-42, repetition_penalty=1e-42, max_tokens=6, logprobs=2, logprobs_mode="processed"
        )
        for completion in engine.generate(GOOD_PROMPTS, params):
            assert not any(math.isnan(entry.logprob) for entry in completion.logprobs)


@torch.no_grad()
def test_bias_and_penalties_come_before_the_temperature():
    """Rule 3: at temperature 2 a bias of 2 and a presence penalty of 1 move the processed log-odds by half of each."""
    model = tiny_model()
    prompt = [3, 4, 5]
    raw = model(torch.tensor([prompt])).logits[0, -1]
    params = SamplingParams(
        temperature=2.0,
        max_tokens=1,
        seed=1,
        logit_bias={7: 2.0},
        presence_penalty=1.0,
        logprobs=100,
        logprobs_mode="processed",
        allowed_token_ids=[5, 7, 9],
    )
    with small_engine(model) as engine:
        (entry,) = engine.generate(prompt, params).logprobs
    found = {token: logprob for token, logprob in entry.top if logprob > -math.inf}
    changed = raw + torch.zeros_like(raw).index_fill(0, torch.tensor([7]), 2.0)
    changed -= torch.zeros_like(raw).index_fill(0, torch.tensor(prompt), 1.0)
    expected = (changed[[5, 7, 9]] / 2).log_softmax(0)
    assert found == pytest.approx(dict(zip([5, 7, 9], expected.tolist(), strict=True)), abs=1e-5)
