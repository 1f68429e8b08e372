"""The life of an engine: aborts, failures, health, limits (inference rules 7, 10, 11)."""

from __future__ import annotations

import threading

import pytest

from astrai_core import SamplingParams
from astrai_core.errors import ConfigError, EngineError, RequestError
from astrai_core.types import Request
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.testing import ScriptedModel
from astrai_infer.testing import scripted_engine as scripted
from astrai_infer.testing import small_engine as engine


def test_abort_returns_pages_and_ends_the_waiter_once():
    """Rule 7."""
    with scripted("x" * 250, max_num_seqs=2) as subject:
        stream = subject.generate([[0], [0], [0]], SamplingParams(temperature=0.0), stream=True)
        first = next(stream)
        for request_id in ["req-1", "req-2", "req-3", "req-1", "unknown"]:
            subject.abort(request_id)
        final = [delta for delta in [first, *stream] if delta.completion is not None]
        assert sorted(delta.prompt_index for delta in final) == [0, 1, 2]
        assert subject.pool.n_used == 0


def test_dropping_a_stream_aborts_it():
    with scripted("x" * 250) as subject:
        stream = subject.generate([0], SamplingParams(temperature=0.0), stream=True)
        next(stream)
        stream.close()
        subject.generate([0], SamplingParams(temperature=0.0, max_tokens=2))
        assert not subject.scheduler.running


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on():
    """Rule 10."""

    def script(token, position):
        if token == 13:
            raise RuntimeError("boom")
        return 65

    with engine(ScriptedModel(script)) as subject:
        with pytest.raises(EngineError, match="a step failed: RuntimeError: boom"):
            subject.generate([13])
        assert subject.generate([0], SamplingParams(max_tokens=2, temperature=0.0)).text == "AA"
        assert subject.pool.n_used == 0


def test_a_dead_loop_fails_its_waiters_and_refuses_new_requests():
    def script(token, position):
        raise KeyboardInterrupt

    subject = engine(ScriptedModel(script))
    silent = threading.excepthook
    threading.excepthook = lambda args: None
    try:
        with pytest.raises(EngineError, match="the engine stopped: KeyboardInterrupt"):
            subject.generate([0])
        with pytest.raises(EngineError, match="the engine is closed"):
            subject.generate([0])
        assert subject.health().status == "stopped"
    finally:
        subject.close()
        threading.excepthook = silent


def test_health_is_live():
    """Rule 10."""
    with scripted("x" * 250, max_num_seqs=1) as subject:
        stream = subject.generate([[0], [0]], SamplingParams(temperature=0.0), stream=True)
        next(stream)
        health = subject.health()
        assert (health.status, health.n_running, health.n_waiting) == ("ok", 1, 1)
        assert health.n_steps > 0
        assert health.n_pages_used > 0
        subject.pause()
        assert subject.health().status == "paused"
        subject.resume()
        assert len([delta for delta in stream if delta.completion]) == 2
        assert subject.health().n_pages_used == 0


def test_closing_ends_what_runs():
    subject = scripted("x" * 250)
    stream = subject.generate([[0], [0]], SamplingParams(temperature=0.0), stream=True)
    next(stream)
    subject.close()
    assert {delta.finish_reason for delta in stream if delta.completion} == {"error"}
    subject.close()


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"max_seq_len is 999, the model's context is 256"):
        scripted("x", max_seq_len=999)
    with pytest.raises(ValueError, match="max_batch_tokens"):
        EngineConfig(max_num_seqs=10, max_batch_tokens=5)
    with pytest.raises(ConfigError, match="unknown field 'max_seqs'"):
        InferenceEngine.from_pretrained("nowhere", max_seqs=3)
    with pytest.raises(RequestError, match="2 SamplingParams for 1 prompts"), scripted("x") as subject:
        subject.generate([1], [SamplingParams(), SamplingParams()])


def test_the_queue_is_bounded():
    subject = scripted("x", max_waiting=2)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    requests = [Request(prompt_token_ids=(0,), params=params, request_id=str(i)) for i in range(3)]
    with pytest.raises(RequestError, match="max_waiting allows no more"):
        subject.scheduler.run_batch(requests)
