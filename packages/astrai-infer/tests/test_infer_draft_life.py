"""Random lives of requests with a draft model: what comes, goes, is aborted or computed again (rules 1, 5-8)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from astrai_core import SamplingParams
from astrai_core.types import Request
from astrai_infer import InferenceEngine
from astrai_infer.testing import device_engine, small_engine, tiny_model

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def request(name: str, length: int, n: int, params: dict[str, Any], priority: int = 0) -> Request:
    return Request(
        prompt_token_ids=tuple((7 * length + k) % 250 for k in range(length)),
        params=SamplingParams(**{"max_tokens": n, "seed": length, "ignore_eos": True, "temperature": 0.0, **params}),
        request_id=name,
        priority=priority,
    )


def check_pages(engine: InferenceEngine) -> None:
    for group in engine.pool.groups:
        allocator = group.allocator
        assert allocator.n_free + allocator.n_cached + allocator.n_used == allocator.n_pages


def kept(engine: InferenceEngine) -> Iterator[int]:
    """Slots whose keys are those of both models: of running requests, and of pages that a prefix may find."""
    (group,) = engine.pool.groups
    for task in engine.scheduler.running:
        assert task.draft_lag in (0, 1)
        yield from group.req_to_token.host[task.row, : max(task.computed_len - task.draft_lag, 0)].tolist()
    size = engine.pool.page_size
    for page in engine.pool.prefix._keys if engine.pool.prefix is not None else ():
        yield from range(page * size, (page + 1) * size)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 30), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 30), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 10)),
        st.tuples(st.just("recompute")),
    ),
    max_size=16,
)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"presence_penalty": 0.5},
]
LIVES = {"model": tiny_model(**SMALL), "good": tiny_model(**SMALL), "poor": tiny_model(seed=3, **SMALL)}
ALONE: dict[tuple[int, ...], tuple[int, ...]] = {}
"""(length, tokens, kind) -> what a request says without a draft model and without others."""


def alone(length: int, n: int, kind: int) -> tuple[int, ...]:
    key = length, n, kind
    if key not in ALONE:
        engine = small_engine(LIVES["model"], max_num_seqs=1)
        (done,) = engine.scheduler.run_batch([request("", length, n, KINDS[kind])])
        ALONE[key] = done.token_ids
    return ALONE[key]


JOINED = [("submit", 10, 30, 0, 0), ("step", 2), ("submit", 10, 8, 0, 1), ("step", 4), ("recompute",), ("step", 5)]
"""Others come, and all is computed again, while the draft model is a token behind; five rows leave one a guess less."""


@settings(max_examples=25, deadline=None)
@example(JOINED, "good", 14, 16, 5, 40, 2, True, "plain")
@example(JOINED, "good", 14, 8, 5, 40, 2, False, "device")
@given(
    actions,
    st.sampled_from(["good", "poor"]),
    st.integers(5, 14),
    st.sampled_from([1, 8, 16]),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(["plain", "device"]),
)
def test_random_life_with_a_draft_model(script, draft, n_pages, page_size, n_seqs, budget, most, prefix_cache, road):
    """Rules 1, 5-8: whatever comes and goes, everyone says what they say alone, every page comes back, and the draft
    model's keys stand wherever the model's do."""
    config = {
        "draft_model": LIVES[draft],
        "speculation": "draft",
        "n_pages": n_pages,
        "page_size": page_size,
        "max_num_seqs": n_seqs,
        "max_batch_tokens": max(budget, n_seqs),
        "max_draft_tokens": most,
        "prefix_cache": prefix_cache,
    }
    model = LIVES["model"]
    engine = small_engine(model, **config) if road == "plain" else device_engine(model, None, **config)
    (group,) = engine.pool.groups
    told: dict[str, list[Any]] = {}
    asked: dict[str, tuple[int, int, int]] = {}
    aborted: set[str] = set()

    def step() -> bool:
        went = engine.scheduler.step()
        check_pages(engine)
        if draft == "good":
            slots = sorted(set(kept(engine)))
            own, beside = group.storages
            torch.testing.assert_close(own.k_buffer[:, slots], beside.k_buffer[:, slots], atol=1e-4, rtol=1e-4)
        return went

    for number, (kind, *arguments) in enumerate(script):
        if kind == "submit":
            length, n, priority, params = arguments
            if length >= engine.pool.capacity:
                continue
            name = f"r{number}"
            asked[name] = length, min(n, engine.pool.capacity - length), params
            wanted = request(name, length, n, KINDS[params], priority)
            engine.scheduler.submit(engine.tasks.make(wanted, told.setdefault(name, []).append))
        elif kind == "step":
            for _ in range(arguments[0]):
                step()
        elif kind == "abort" and asked:
            victim = sorted(asked)[arguments[0] % len(asked)]
            aborted.add(victim)
            engine.scheduler.abort(victim)
        elif kind == "recompute":
            with engine.scheduler.between_steps(recompute=True):
                assert engine.pool.n_free == engine.pool.n_pages
    while step():
        pass
    assert not engine.scheduler.has_work
    assert engine.pool.n_used == 0
    for name, (length, n, params) in asked.items():
        done = told[name][-1].completion
        got = done.token_ids
        assert [token for delta in told[name] for token in delta.token_ids] == list(got)
        if done.finish_reason == "abort":
            assert name in aborted
        else:
            assert len(got) == n
        assert got == alone(length, n, params)[: len(got)]
    if draft == "good":
        assert engine.health().n_accepted == engine.health().n_drafted
