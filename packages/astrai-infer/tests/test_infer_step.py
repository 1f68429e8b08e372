"""What one step does and does not do: addresses, in-place updates, skipped work (rows C2, C4-C8, W1, S2-S10)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from astrai_core import SamplingParams
from astrai_core.types import Request
from astrai_infer import InferenceEngine
from astrai_infer.runtime.workspace import Buffer
from astrai_infer.sampling import pipeline as pipeline_module
from astrai_infer.sampling import strategies
from astrai_infer.testing import ScriptedModel, small_engine, tiny_model

FREE = {"slice", "detach", "to", "lift_fresh", "resolve_conj", "resolve_neg", "view", "unsqueeze"}
"""Operations that allocate and compute nothing ("to": the type is right already; checked by the test's own tensors)."""


class NullModel(ScriptedModel):
    """The same logits in every step, made once, so that a step's tensor operations are the engine's own."""

    def __init__(self) -> None:
        super().__init__(lambda token, position: 0)
        self.logits = torch.randn(8, self.config.vocab_size, generator=torch.Generator().manual_seed(0))
        self.logits.abs_()

    def forward_paged(self, input_ids, position_ids, cache, backend, logit_rows=None):
        return self.logits[: len(input_ids if logit_rows is None else logit_rows)]


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        self.seen[operation.overloadpacket.__name__] += 1
        return operation(*arguments, **(named or {}))


def submit(engine: InferenceEngine, prompt: list[int], **params) -> list:
    """Queue a request without starting the engine's thread; return its tasks."""
    sampling = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | params))
    tasks = engine.tasks.make(Request(prompt_token_ids=tuple(prompt), params=sampling), lambda delta: None)
    engine.scheduler.submit(tasks)
    return tasks


def steady(**params) -> InferenceEngine:
    """An engine of the null model whose two requests have been decoding for some steps."""
    engine = small_engine(NullModel(), max_num_seqs=4)
    for length in (3, 20):
        submit(engine, list(range(length)), **params)
    for _ in range(4):
        engine.scheduler.step()
    return engine


def operations(engine: InferenceEngine) -> Counter[str]:
    """What the next step does."""
    with Operations() as recorded:
        assert engine.scheduler.step()
    return recorded.seen


def test_every_tensor_of_a_step_stays_where_it_is():
    """W1, C8: mixed and decode steps of any size hand the model the workspace's own memory."""
    engine = small_engine(tiny_model(), max_num_seqs=4, max_batch_tokens=16)
    workspace, forward = engine.scheduler.executor.workspace, engine.model.forward_paged
    found: dict[str, set[int]] = {}
    phases = set()

    def recording(input_ids, position_ids, cache, backend, logit_rows):
        (metadata,) = cache.groups
        phases.add(metadata.phase)
        tensors = {"input_ids": input_ids, "position_ids": position_ids, "logit_rows": logit_rows}
        for name in ("req_indices", "seq_lens", "kv_indptr", "qo_indptr", "out_cache_loc", "req_to_token"):
            tensors[name] = getattr(metadata, name)
        tensors |= {f"{kind}_{i}": t for kind in ("k", "v") for i, t in enumerate(getattr(cache, f"{kind}_buffers"))}
        for name, tensor in tensors.items():
            if tensor is not None:
                found.setdefault(name, set()).add(tensor.data_ptr())
        return forward(input_ids, position_ids, cache, backend, logit_rows)

    engine.model.forward_paged = recording
    for length in (3, 40, 7):
        submit(engine, list(range(length)), max_tokens=8)
        for _ in range(3):
            engine.scheduler.step()
    while engine.scheduler.step():
        pass
    assert phases == {"prefill", "decode"}
    assert {name: len(places) for name, places in found.items()} == dict.fromkeys(found, 1)
    for name in ("input_ids", "position_ids", "logit_rows", "req_indices", "seq_lens", "kv_indptr", "qo_indptr"):
        buffer: Buffer = getattr(workspace, name)
        assert found[name] == {buffer.device_tensor.data_ptr()}, name
    assert found["out_cache_loc"] == {workspace.out_cache_locs[0].device_tensor.data_ptr()}


def test_a_steady_step_increments_in_place_and_makes_no_tensor():
    """C4, C5, S5, S10: lengths, prefix sums and positions each grow by one addition in place; nothing else is computed."""
    engine = steady()
    seen = operations(engine)
    assert seen["add_"] == 3
    assert set(seen) - FREE == {"add_"}
    submit(engine, [1, 2])
    assert set(operations(engine)) - FREE != {"add_"}, "an admission is not a steady step"


def test_positions_are_right_after_every_change_of_the_batch(monkeypatch):
    """S5: incremented or written anew, a token's position is its index, whoever comes, goes or is recomputed."""
    engine = small_engine(tiny_model(), max_num_seqs=4, max_batch_tokens=12)
    executor, scheduler = engine.scheduler.executor, engine.scheduler
    run, forward = executor.run, engine.model.forward_paged
    expected: list[list[int]] = []
    compared = Counter()

    def recording_run(batch):
        expected.append([p for item in batch.items for p in range(item.start, item.start + item.n_tokens)])
        return run(batch)

    def recording_forward(input_ids, position_ids, cache, backend, logit_rows):
        assert position_ids.tolist() == expected[-1]
        (metadata,) = cache.groups
        ends = np.cumsum(metadata.q_lens_host) - 1
        assert (position_ids[ends] + 1).tolist() == metadata.seq_lens.tolist() == list(metadata.seq_lens_host)
        compared[metadata.phase] += 1
        return forward(input_ids, position_ids, cache, backend, logit_rows)

    monkeypatch.setattr(executor, "run", recording_run)
    monkeypatch.setattr(engine.model, "forward_paged", recording_forward)
    for length, n_new in ((3, 9), (30, 4), (1, 5)):
        submit(engine, list(range(length)), max_tokens=n_new)
        for _ in range(3):
            scheduler.step()
    for _ in range(2):
        submit(engine, [5, 6], max_tokens=6)
        scheduler.step()
        scheduler.step()
        with scheduler.between_steps(recompute=True):
            pass
        while scheduler.step():
            pass
    assert min(compared["prefill"], compared["decode"]) > 5


def test_the_plan_is_made_once_a_step_for_all_layers():
    """C2, C7: tables, prefix sums and the backend's plan are built once a step, whatever the number of layers; and the plan
    behind the embedding, which keeps the promise that it is given."""
    engine = small_engine(tiny_model(num_hidden_layers=5), max_num_seqs=4, max_batch_tokens=16)
    pool, backend, decoder, calls = engine.pool, engine.scheduler.executor.backend, engine.model.model, []
    bind, plan, embed = pool.bind_tasks, backend.plan, decoder.embed
    pool.bind_tasks = lambda *a: (calls.append("bind"), bind(*a))[1]
    decoder.embed = lambda *a: (calls.append("embed"), embed(*a))[1]
    backend.plan = lambda *a, overlap: (calls.append(f"plan, overlap {overlap}"), plan(*a, overlap=overlap))[1]
    for length in (3, 40):
        submit(engine, list(range(length)), max_tokens=8)
    while engine.scheduler.step():
        pass
    assert engine.scheduler.n_steps > 8
    assert calls == ["bind", "embed", "plan, overlap True"] * engine.scheduler.n_steps


@pytest.mark.parametrize("config", [{}, {"model_type": "mistral", "sliding_window": 9}], ids=["full", "window"])
def test_the_model_never_waits_for_the_device(config, monkeypatch):
    """C7: neither plan nor attention reads a tensor back, in prefill or decode."""
    engine = small_engine(tiny_model(**config), max_num_seqs=4, max_batch_tokens=16)
    forward, inside = engine.model.forward_paged, []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
        original = getattr(torch.Tensor, name)

        def guarded(self, *arguments, _name=name, _original=original, **named):
            assert not inside, f"Tensor.{_name} inside a forward reads the device"
            return _original(self, *arguments, **named)

        monkeypatch.setattr(torch.Tensor, name, guarded)

    def marked(*arguments):
        inside.append(True)
        output = forward(*arguments)
        inside.clear()
        return output

    monkeypatch.setattr(engine.model, "forward_paged", marked)
    tasks = [task for length in (3, 40) for task in submit(engine, list(range(length)), max_tokens=8)]
    while engine.scheduler.step():
        pass
    assert [(task.status, task.output_len) for task in tasks] == [("finished", 8)] * 2


def test_log_softmax_runs_only_for_those_who_ask():
    """S6, SM3."""
    assert "log_softmax" in operations(steady(logprobs=1))
    assert not {"log_softmax", "_log_softmax"} & set(operations(steady()))


def test_penalties_cost_nothing_when_they_are_off(monkeypatch):
    """S7: no history is allocated and the strategy is not called; with a penalty it is."""

    def refuse(*arguments):
        raise ZeroDivisionError("penalties were applied")

    monkeypatch.setattr(pipeline_module.strategies, "apply_penalties", refuse)
    engine = steady()
    assert engine.scheduler.executor.info._counts is None
    with pytest.raises(ZeroDivisionError):
        steady(frequency_penalty=0.5)
    assert strategies.apply_penalties is refuse


def test_the_sampling_view_is_built_once_per_set_of_tasks():
    """S4: a steady step gathers no row of parameters again; an admission does."""
    engine = steady(temperature=0.7)
    info = engine.scheduler.executor.info
    view = info.view(tuple(engine.scheduler.running))
    engine.scheduler.step()
    assert info.view(tuple(engine.scheduler.running)) is view
    submit(engine, [1])
    engine.scheduler.step()
    assert info._view is not view


def test_no_token_is_fed_twice():
    """S2: a request of p prompt tokens and n new ones feeds p + n - 1, in chunks or not."""
    for budget in (4, 64):
        model = ScriptedModel(lambda token, position: 65)
        engine = small_engine(model, max_num_seqs=2, max_batch_tokens=budget)
        submit(engine, list(range(21)), max_tokens=7)
        submit(engine, list(range(30, 35)), max_tokens=1)
        while engine.scheduler.step():
            pass
        assert model.n_fed == (21 + 7 - 1) + 5


def test_all_lengths_decode_in_every_step():
    """S3: requests at different positions each get one token a step."""
    engine = small_engine(NullModel(), max_num_seqs=4)
    tasks = [task for length in (1, 9, 17, 40) for task in submit(engine, list(range(length)))]
    for step in range(1, 8):
        engine.scheduler.step()
        assert [task.output_len for task in tasks] == [step] * 4


def test_run_batch_fills_the_prefix_cache_and_keeps_the_order():
    """S1: the second batch finds what the first computed; answers come in the order asked, not of finishing."""
    engine = small_engine(tiny_model(), max_num_seqs=4)
    requests = [
        Request(
            prompt_token_ids=tuple(range(start, start + 20)),
            params=SamplingParams(temperature=0.0, max_tokens=n_new, ignore_eos=True),
            request_id=str(start),
        )
        for start, n_new in ((0, 9), (50, 1), (100, 4))
    ]
    first, second = (engine.scheduler.run_batch(requests) for _ in range(2))
    for batch, cached in ((first, 0), (second, 16)):
        assert [completion.request_id for completion in batch] == ["0", "50", "100"]
        assert [completion.usage.completion_tokens for completion in batch] == [9, 1, 4]
        assert [completion.usage.cached_tokens for completion in batch] == [cached] * 3


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_compute_their_prompt_once(prefix_cache):
    """Rules 2 and 8: the later choices find the first one's pages; to the caller nothing was cached before."""
    engine = small_engine(model := ScriptedModel(lambda t, p: 65), max_num_seqs=4, prefix_cache=prefix_cache)
    prompt = tuple(range(40))
    params = SamplingParams(temperature=0.0, max_tokens=3, n=4)
    request = Request(prompt_token_ids=prompt, params=params)
    completions = engine.scheduler.run_batch([request])
    assert [completion.index for completion in completions] == [0, 1, 2, 3]
    assert {completion.usage.cached_tokens for completion in completions} == {0}
    assert model.n_fed == 4 * 2 + (40 + 3 * (40 - 32) if prefix_cache else 4 * 40)
    again = engine.scheduler.run_batch([request])
    assert {completion.usage.cached_tokens for completion in again} == ({32} if prefix_cache else {0})


def test_choices_that_wait_keep_their_seats_and_hold_nobody_up():
    """Rule 5: while the first choice is prefilled others are admitted, but not into the rows of the choices."""
    engine = small_engine(NullModel(), max_num_seqs=4, max_batch_tokens=32)
    choices = submit(engine, list(range(60)), n=3)
    others = [submit(engine, [i])[0] for i in range(1, 4)]
    engine.scheduler.step()
    assert [task.row is not None for task in choices] == [True, False, False]
    engine.scheduler.step()
    assert [task.row is not None for task in [*choices, *others]] == [True, False, False, True, False, False]
    engine.scheduler.step()
    assert [task.row is not None for task in [*choices, *others]] == [True, True, True, True, False, False]
    assert choices[0].computed_len == 61


def test_pages_of_its_own_are_not_cached_tokens():
    """Rules 6 and 8: a preempted request finds its own pages again, which saves work but was not there before it."""
    model = ScriptedModel(lambda token, position: 65)
    engine = small_engine(model, max_num_seqs=2, n_pages=4)
    old = submit(engine, list(range(15)), max_tokens=18)[0]
    young = submit(engine, list(range(100, 120)), max_tokens=20)[0]
    completions = []
    for task in (old, young):
        task.on_delta = lambda delta: completions.append(delta.completion) if delta.completion else None
    while engine.scheduler.step():
        pass
    assert (old.n_preemptions, young.n_preemptions) == (0, 1)
    assert [completion.usage.cached_tokens for completion in completions] == [0, 0]
    assert model.n_fed < (15 + 18 - 1) + (20 + 20 - 1) + young.total_len - 16, "the pages were found"
