"""A draft model guesses, the model decides: no text changes, and right guesses save steps (rules 1, 2, 5-8, 12, 18)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from astrai_core import SamplingParams, save_pretrained
from astrai_core.checkpoint.hf_adapter import checkpoint_tensors
from astrai_core.errors import ConfigError
from astrai_core.model.transformer import CausalLM
from astrai_core.types import Completion, Request, StructuredOutput
from astrai_infer import InferenceEngine
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.runtime.shapes import StepShape
from astrai_infer.speculation import GuessCounts, ModelDrafter
from astrai_infer.task import Task
from astrai_infer.testing import (
    Recorder,
    ScriptedModel,
    byte_tokenizer,
    device_engine,
    save_tiny_adapter,
    small_engine,
    tiny_model,
)

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
WINDOWED = {"model_type": "mistral", "sliding_window": 9}
ROADS = ["plain", "device", "captured"]


@torch.no_grad()
def near(noise: float, **changes: Any) -> CausalLM:
    """The model of :func:`tiny_model` with noisy weights: it guesses right now and then."""
    model = tiny_model(**changes)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


def engine_on(road: str, model: torch.nn.Module, draft: torch.nn.Module, **config: Any) -> InferenceEngine:
    config = {"speculation": "draft", "max_draft_tokens": 4, **config}
    if road == "plain":
        return small_engine(model, draft_model=draft, **config)
    return device_engine(model, Recorder() if road == "captured" else None, draft_model=draft, **config)


def request(i: int, length: int, max_tokens: int, **params: Any) -> Request:
    given_params = {"max_tokens": max_tokens, "seed": i, "ignore_eos": True, "temperature": 0.0, **params}
    prompt = tuple((7 * i + k) % 250 for k in range(length))
    return Request(prompt_token_ids=prompt, params=SamplingParams(**given_params), request_id=str(i))


MIX = [
    request(0, 3, 16),
    request(1, 40, 14, temperature=0.8, top_k=20),
    request(2, 17, 18, temperature=1.0, top_p=0.9),
    request(3, 1, 8, temperature=0.9, logprobs=2),
    request(4, 20, 8, temperature=0.7, frequency_penalty=0.5),
    request(5, 9, 6, min_tokens=3, prompt_logprobs=2),
    request(6, 25, 10, temperature=0.9, min_p=0.05, logprobs=3, logprobs_mode="processed"),
    request(7, 33, 6, n=3, temperature=1.1),
    request(8, 50, 1),
]
GROWING = [request(i, 10, 40, temperature=i / 2) for i in range(4)]
"""They fit while they are short, and not when they have grown."""


def check_equal(ours: list[Completion], theirs: list[Completion]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        assert (mine.text, mine.finish_reason, mine.usage.completion_tokens) == (
            other.text,
            other.finish_reason,
            other.usage.completion_tokens,
        )
        for some, others in ((mine.logprobs, other.logprobs), (mine.prompt_logprobs, other.prompt_logprobs)):
            assert (some is None) == (others is None)
            for entry, expected in zip(some or (), others or (), strict=True):
                assert (entry is None) == (expected is None)
                if entry is not None and expected is not None:
                    assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)


def check_pages(engine: InferenceEngine) -> None:
    for group in engine.pool.groups:
        allocator = group.allocator
        assert allocator.n_free + allocator.n_cached + allocator.n_used == allocator.n_pages


@pytest.mark.parametrize("road", ["plain", "captured"])
@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 16, "max_batch_tokens": 24},
        {"max_num_seqs": 3, "max_batch_tokens": 300, "page_size": 1, "prefix_cache": False},
        {"max_num_seqs": 16, "max_batch_tokens": 40, "n_pages": 8, "table": GROWING},
        {"max_num_seqs": 16, "max_batch_tokens": 40, "prefix_cache": False, "draft": WINDOWED},
        {"max_num_seqs": 16, "max_batch_tokens": 40, "prefix_cache": False, "model": WINDOWED},
        {"max_num_seqs": 16, "max_batch_tokens": 40, "cache_mode": "contiguous"},
        {"max_num_seqs": 16, "max_batch_tokens": 24, "kv_dtype": "float8_e4m3fn"},
    ],
    ids=["chunks", "pages of 1", "preemption", "window of the draft", "window of the model", "contiguous", "fp8"],
)
def test_a_draft_model_changes_no_text(road: str, config: dict[str, Any]) -> None:
    """Rules 1, 2, 4, 6, 8: greedy or drawn, alone or among others, cold or warm: as without a draft model."""
    config = dict(config)
    table = config.pop("table", MIX)
    model, architecture = tiny_model(**config.pop("model", {})), config.pop("draft", {})
    expected = small_engine(model, **config).scheduler.run_batch(table)
    engine = engine_on(road, model, near(0.05, **architecture), **config)
    for _ in range(2):
        check_equal(engine.scheduler.run_batch(table), expected)
        check_pages(engine)
        assert engine.pool.n_used == 0
    health = engine.health()
    assert health.n_drafted > health.n_accepted > 0
    assert (engine.scheduler.n_preemptions > 0) == ("n_pages" in config)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_equal_to_the_model_is_always_right(road: str, temperature: float) -> None:
    """The same logits, seed and position give the same token, drawn or not: every step brings all it can."""
    table = [request(i, 5 + i, 41, temperature=temperature) for i in range(3)]
    engine = engine_on(road, tiny_model(), tiny_model(), max_num_seqs=32)
    check_equal(engine.scheduler.run_batch(table), small_engine(tiny_model()).scheduler.run_batch(table))
    assert engine.scheduler.n_steps == 1 + 40 // 5, "the prompts' step, and 1 + 4 tokens in each behind it"
    health = engine.health()
    assert (health.n_drafts, health.n_drafted, health.n_accepted) == (3 * 8, 3 * 32, 3 * 32)


class Wrong(ScriptedModel):
    """Says what the model certainly does not."""

    def __init__(self) -> None:
        super().__init__(lambda token, position: 255)


@pytest.mark.parametrize("road", ROADS)
def test_a_draft_that_is_always_wrong_costs_no_token(road: str) -> None:
    """Its guesses are rejected, become fewer, and leave nothing behind."""
    text = [ord("a") + i % 26 for i in range(60)]
    model = ScriptedModel(lambda token, position: text[(position + 1) % 60])
    engine = engine_on(road, model, Wrong(), max_num_seqs=8)
    (done,) = engine.scheduler.run_batch([request(0, 1, 40)])
    assert list(done.token_ids) == text[1:41]
    health = engine.health()
    assert health.n_accepted == 0
    assert engine.scheduler.n_steps == 40
    assert health.n_drafted == 4 + 2 + 36, "half as many each time, at least one, none behind the end"
    assert engine.pool.n_used == 0


def test_stops_grammars_and_choices_end_where_they_did() -> None:
    """Rules 15, 18: a stop string or id among right guesses ends the answer there; what has a grammar is not guessed."""
    model = tiny_model()
    plain, engine = small_engine(model), engine_on("plain", model, tiny_model())
    (free,) = plain.scheduler.run_batch([request(1, 9, 40)])
    table = [
        request(1, 9, 40, stop=(free.text[11:13],)),
        request(1, 9, 40, stop_token_ids=(free.token_ids[17],)),
        request(2, 9, 60, structured=StructuredOutput(regex=r"[A-Z]{3}-\d{4}"), temperature=1.0, ignore_eos=False),
        request(3, 9, 30, logit_bias={5: 3.0}),
        request(4, 9, 30, repetition_penalty=1.3, temperature=0.9),
    ]
    expected = plain.scheduler.run_batch(table)
    assert [done.finish_reason for done in expected[:3]] == ["stop"] * 3
    check_equal(engine.scheduler.run_batch(table[:2]), expected[:2])
    before = engine.health().n_drafted
    assert before > 0
    check_equal(engine.scheduler.run_batch(table[2:]), expected[2:])
    assert engine.health().n_drafted == before


def test_a_step_has_no_more_rows_than_there_are_and_shares_them_evenly() -> None:
    """Rule 5: guesses never push a request out; among many requests each has few."""
    engine = engine_on("plain", tiny_model(), tiny_model(), max_num_seqs=8, max_draft_tokens=6)
    run, seen = engine.scheduler.executor.run, []
    engine.scheduler.executor.run = lambda batch: (seen.append(list(batch.draft_lens)), run(batch))[1]
    engine.scheduler.run_batch([request(i, 4, 30) for i in range(3)])
    verifying = [lens for lens in seen if lens]
    assert verifying[0] == [2, 2, 1], "8 rows: 3 newest tokens and 5 guesses"
    assert all(len(lens) + sum(lens) <= 8 for lens in verifying)
    alone_again = engine_on("plain", tiny_model(), tiny_model(), max_num_seqs=1, max_draft_tokens=6)
    alone_again.scheduler.run_batch([request(0, 4, 22)])
    assert alone_again.scheduler.n_steps == 1 + 21 // 7, "one request has all its guesses, whatever max_num_seqs is"


def task_of(engine: InferenceEngine, n: int) -> Task:
    (task,) = engine.tasks.make(request(0, 3, n), lambda delta: None)
    return task


def test_guesses_become_fewer_when_they_are_wrong_and_more_when_they_are_right() -> None:
    """The rule is documented: all wrong halves, all right doubles, and there is one at least."""
    engine = small_engine(tiny_model())
    counts, task = GuessCounts(8), task_of(engine, 100)
    drafter = ModelDrafter(8)
    drafter.counts = counts
    for accepted, limit in ((0, 4), (0, 2), (1, 2), (2, 4), (0, 2), (0, 1), (0, 1), (1, 2)):
        plan_lens = [counts.limit(task)]
        batch = type("Step", (), {"decodes": [task], "draft_lens": plan_lens})()
        counts.learn(batch, [accepted])
        assert counts.limit(task) == limit
    assert counts.n_drafts == 8
    assert counts.limit(task_of(engine, 3)) == 2, "none behind the last token"


class NoReads(TorchDispatchMode):
    """Fails when a value of a tensor is read by the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "the host read a value"
        return func(*args, **(kwargs or {}))


def test_the_device_drafts_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """W1, C5: from a draft token to the next nothing is read, and every tensor of a shape is where it always is."""
    engine = engine_on("device", tiny_model(), near(0.05), max_num_seqs=16)
    executor = engine.scheduler.executor
    assert isinstance(executor, DeviceExecutor) and executor.draft is not None
    draft, places, passes = executor.draft, {}, []
    guess, forward = draft.guess, draft._paged.model.forward_paged

    def watched(tasks, lens):
        def refuse(*_: object) -> None:
            raise AssertionError("the host read a tensor")

        with monkeypatch.context() as patch, NoReads():
            patch.setattr(torch.Tensor, "tolist", refuse)
            guess(tasks, lens)
        passes.append(max(lens))

    def recording(input_ids, position_ids, cache, backend, logit_rows=None) -> torch.Tensor:
        metadata = cache.groups[0]
        shape = len(input_ids), metadata.reads_own_keys, len(metadata.req_indices)
        tensors = (input_ids, position_ids, metadata.seq_lens, metadata.req_indices, metadata.out_cache_loc)
        if logit_rows is None:
            places.setdefault(shape, set()).add(tuple(tensor.data_ptr() for tensor in tensors))
        return forward(input_ids, position_ids, cache, backend, logit_rows)

    draft.guess, draft._paged.model.forward_paged = watched, recording
    engine.scheduler.run_batch([request(i, 5, 40, temperature=i / 2) for i in range(3)])
    assert max(passes) == 4
    assert len(places) > 2
    assert all(len(each) == 1 for each in places.values())


@pytest.mark.parametrize("road", ROADS)
def test_sleep_and_new_weights(road: str) -> None:
    """Rules 8, 12: the draft model's keys go and come with the model's; after new weights it guesses for the new ones."""
    engine = engine_on(road, tiny_model(), tiny_model(), max_num_seqs=16)
    table = [request(i, 9, 20) for i in range(3)]
    expected = engine.scheduler.run_batch(table)
    told: list[Any] = []
    for each in table:
        engine.scheduler.submit(engine.tasks.make(each, told.append))
    for _ in range(3):
        engine.scheduler.step()
    engine.sleep()
    assert all(storage.k_buffer.numel() == 0 for group in engine.pool.groups for storage in group.storages)
    engine.resume()
    while engine.scheduler.step():
        pass
    finals = {delta.completion.request_id: delta.completion for delta in told if delta.completion}
    assert [finals[done.request_id].token_ids for done in expected] == [done.token_ids for done in expected]
    assert engine.health().n_accepted == engine.health().n_drafted
    engine.update_weights(checkpoint_tensors(tiny_model(seed=9)), 1)
    new = small_engine(tiny_model(seed=9)).scheduler.run_batch(table)
    assert [done.token_ids for done in engine.scheduler.run_batch(table)] == [done.token_ids for done in new]
    assert engine.health().n_accepted < engine.health().n_drafted, "the draft model is what it was"


def test_what_decodes_beside_a_prompt_is_a_row_and_no_chunk() -> None:
    """G3, G4: sums are those of other steps that decode, and many of them fit into a shape that is captured."""
    engine = engine_on("device", tiny_model(), near(0.05), max_num_seqs=24, max_batch_tokens=64)
    executor, shapes = engine.scheduler.executor, []
    assert isinstance(executor, DeviceExecutor) and executor.draft is not None
    for owner, name in ((executor, "_forward"), (executor.draft, "_pass")):
        work = getattr(owner, name)

        def watched(shape: StepShape, *rest: Any, work: Any = work, name: str = name) -> Any:
            shapes.append((name, shape))
            return work(shape, *rest)

        setattr(owner, name, watched)
    table = [request(i, 2, 12, temperature=i % 2) for i in range(20)]
    told: list[Any] = []
    for each in table:
        engine.scheduler.submit(engine.tasks.make(each, told.append))
    for number in range(3):
        engine.scheduler.step()
        engine.scheduler.submit(engine.tasks.make(request(90 + number, 30, 2), told.append))
    while engine.scheduler.step():
        pass
    mixed = [(name, shape) for name, shape in shapes if shape.n_chunks and shape.n_decode >= 20]
    assert {name for name, _ in mixed} == {"_forward", "_pass"}
    assert all(shape.is_bucket for _, shape in mixed)
    finals = {delta.completion.request_id: delta.completion.token_ids for delta in told if delta.completion}
    expected = small_engine(tiny_model()).scheduler.run_batch(table)
    assert [finals[done.request_id] for done in expected] == [done.token_ids for done in expected]


def test_what_cannot_be_is_refused_by_name() -> None:
    """Rule 3's manner: field, value, remedy."""
    model = tiny_model()
    for draft, config, message in (
        (None, {"speculation": "draft"}, "speculation is 'draft' and draft_model is missing; name a small model"),
        (tiny_model(), {}, "draft_model is given but speculation is None; set it to 'draft'"),
        (tiny_model(), {"speculation": "ngram"}, "draft_model is given but speculation is 'ngram'"),
        (tiny_model(vocab_size=300), {"speculation": "draft"}, "its vocabulary has 300 tokens, the model's 257"),
        (
            tiny_model(max_position_embeddings=64),
            {"speculation": "draft"},
            "its context is 64 tokens, sequences may have 256; set max_seq_len",
        ),
        (
            tiny_model().double(),
            {"speculation": "draft"},
            "draft_model is torch.float64 on cpu, the model torch.float32",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            small_engine(model, draft_model=draft, **config)
    short = small_engine(model, draft_model=tiny_model(max_position_embeddings=64), speculation="draft", max_seq_len=64)
    assert short.max_seq_len == 64


def saved(path: Path, *, swapped: bool = False, **changes: Any) -> Path:
    """A model directory; with two tokens that have changed places, if asked."""
    tokenizer = byte_tokenizer()
    save_pretrained(tiny_model(**changes), path, tokenizer=tokenizer)
    if swapped:
        file = path / "tokenizer.json"
        content = json.loads(file.read_text())
        vocab = content["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        file.write_text(json.dumps(content))
    return path


def test_a_draft_model_is_loaded_by_name_and_has_the_same_vocabulary(tmp_path: Path) -> None:
    """From directories: checked before any weights are read, token by token."""
    path, small = saved(tmp_path / "model"), saved(tmp_path / "small", seed=3, **SMALL)
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    with InferenceEngine.from_pretrained(path) as plain:
        expected = plain.generate("Hello", params).text
    with InferenceEngine.from_pretrained(path, speculation="draft", draft_model=str(small)) as engine:
        assert engine.generate("Hello", params).text == expected
        assert engine.health().n_drafted > 0
    other = saved(tmp_path / "other", swapped=True)
    (other / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"its vocabulary is not the model's \(token 'a' has the id 98, the model's is 97"
    ):
        InferenceEngine.from_pretrained(path, speculation="draft", draft_model=str(other))
    with pytest.raises(ConfigError, match="draft_model is given but speculation is None; set speculation to 'draft'"):
        InferenceEngine.from_pretrained(path, draft_model=str(small))


@pytest.mark.parametrize("road", ROADS)
def test_adapters_are_the_models_alone(road: str, tmp_path: Path) -> None:
    """A request with an adapter is guessed for without it, in one step with others, and says what it says."""
    adapters = {"tiny": save_tiny_adapter(tmp_path / "tiny", seed=1)}
    table = [replace(request(i, 9 + i, 14, temperature=i / 4), adapter=(None, "tiny")[i % 2]) for i in range(4)]
    expected = small_engine(tiny_model(), adapters=adapters).scheduler.run_batch(table)
    engine = engine_on(road, tiny_model(), tiny_model(), max_num_seqs=16, adapters=adapters)
    for _ in range(2):
        check_equal(engine.scheduler.run_batch(table), expected)
    health = engine.health()
    assert 0 < health.n_accepted < health.n_drafted, "the base's guesses are not the adapter's tokens"


def test_ngrams_are_checked_where_steps_run_as_they_come() -> None:
    """The plain executor verifies guesses of both kinds: a text that goes in circles comes several tokens a step."""
    text = [ord("a") + i % 7 for i in range(120)]
    model = ScriptedModel(lambda token, position: text[(position + 1) % 119] if position != 50 else 90)
    table = [request(0, 1, 90), request(1, 3, 60, temperature=0.5)]
    expected = small_engine(model).scheduler.run_batch(table)
    engine = small_engine(model, speculation="ngram", max_draft_tokens=6, max_num_seqs=16)
    check_equal(engine.scheduler.run_batch(table), expected)
    health = engine.health()
    assert engine.scheduler.n_steps < 90 / 3
    assert health.n_drafted > health.n_accepted > 60
