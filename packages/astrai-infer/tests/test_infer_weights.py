"""Weights swapped under running requests, pause and sleep (inference rules 8 and 12)."""

from __future__ import annotations

import pytest
import torch

from astrai_core import SamplingParams
from astrai_core.checkpoint.hf_adapter import checkpoint_tensors
from astrai_core.errors import CheckpointError, ConfigError, EngineError
from astrai_core.types import Request
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.embedding import embed
from astrai_infer.task import Delta
from astrai_infer.testing import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()
PROMPT = tuple(range(40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def engine(seed: int = 0) -> InferenceEngine:
    return InferenceEngine(tiny_model(seed), TOKENIZER, EngineConfig(max_num_seqs=2))


def copies(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in checkpoint_tensors(tiny_model(seed))]


def test_new_weights_serve_at_once_and_nothing_stale_is_found():
    with engine(1) as fresh, engine(0) as subject:
        expected = fresh.generate(PROMPT, GREEDY).token_ids
        old = subject.generate(PROMPT, GREEDY)
        addresses = [parameter.data_ptr() for parameter in subject.model.parameters()]
        subject.update_weights(copies(1), version=5)
        new = subject.generate(PROMPT, GREEDY)
        assert new.token_ids == expected != old.token_ids
        assert (old.weight_version, new.weight_version) == (0, 5)
        assert new.usage.cached_tokens == 0
        assert [parameter.data_ptr() for parameter in subject.model.parameters()] == addresses
        assert subject.pool.n_used == 0
        with pytest.raises(ConfigError, match="version is 5, it must be larger than 5"):
            subject.update_weights(copies(1), version=5)


def test_a_running_request_keeps_its_tokens_and_recomputes_the_rest():
    """What comes after the swap equals a fresh run of the new weights over everything before it."""
    subject = engine(0)
    tasks = subject.tasks.make(Request(prompt_token_ids=PROMPT, params=GREEDY), lambda delta: None)
    subject.scheduler.submit(tasks)
    for _ in range(6):
        subject.scheduler.step()
    before = tasks[0].output_ids
    assert len(before) == 6
    subject.update_weights(copies(1), version=1)
    while tasks[0].status != "finished":
        subject.scheduler.step()
    with engine(1) as fresh:
        rest = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
        assert tasks[0].output_ids == [*before, *fresh.generate([*PROMPT, *before], rest).token_ids]


def test_a_failed_update_is_not_served():
    with engine(0) as subject:
        with pytest.raises(CheckpointError, match="update_weights: .* tensors are missing"):
            subject.update_weights(copies(1)[:-1], version=1)
        with pytest.raises(EngineError, match="update the weights again"):
            subject.generate(PROMPT, GREEDY)
        with pytest.raises(EngineError, match="update the weights again"):
            embed(subject, [PROMPT], "mean")
        subject.update_weights(copies(1), version=1)
        assert subject.generate(PROMPT, GREEDY).weight_version == 1


def test_a_failed_update_ends_what_ran():
    """No token is of weights that are half the old and half the new ones."""
    subject = engine(0)
    heard: list[Delta] = []
    for _ in range(3):
        subject.scheduler.submit(subject.tasks.make(Request(prompt_token_ids=PROMPT, params=GREEDY), heard.append))
    for _ in range(4):
        subject.scheduler.step()
    n_tokens = sum(len(delta.token_ids) for delta in heard)
    with pytest.raises(CheckpointError):
        subject.update_weights(copies(1)[:-1], version=1)
    while subject.scheduler.step():
        pass
    ends = [delta.completion for delta in heard if delta.completion is not None]
    assert [end.error for end in ends] == ["an update of the weights failed half way"] * 3
    assert sum(len(delta.token_ids) for delta in heard) == sum(len(end.token_ids) for end in ends) == n_tokens
    assert subject.pool.n_used == 0


@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_pause_and_sleep_change_no_output(how):
    with engine(0) as reference:
        expected = reference.generate(PROMPT, GREEDY).token_ids
    with engine(0) as subject:
        stream = subject.generate(PROMPT, GREEDY, stream=True)
        tokens = [*next(stream).token_ids]
        getattr(subject, how)()
        steps = subject.scheduler.n_steps
        assert not subject.scheduler.step(), "a paused engine does nothing"
        if how == "sleep":
            assert all(group.storage.k_buffer.numel() == 0 for group in subject.pool.groups)
            assert subject.pool.n_free == subject.pool.n_pages
        assert subject.scheduler.n_steps == steps
        with pytest.raises(EngineError, match="paused"):
            subject.scheduler.run_batch([Request(prompt_token_ids=PROMPT, params=GREEDY)])
        subject.resume()
        for delta in stream:
            tokens.extend(delta.token_ids)
        assert tuple(tokens) == expected
