"""The scheduler without a model: random admissions, aborts, lengths, pool and chunk sizes (rules 5-7, 10, 11)."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core import SamplingParams
from astrai_core.errors import RequestError
from astrai_core.types import Request
from astrai_infer.cache.pool import PagePool
from astrai_infer.cache.storage import KVSpec
from astrai_infer.config import EngineConfig
from astrai_infer.scheduler import InferenceScheduler
from astrai_infer.task import Batch, BatchItem, Delta, StepResult, Task
from astrai_infer.testing import EOS_ID, byte_tokenizer
from astrai_infer.text.detokenize import TextStream

TOKENIZER = byte_tokenizer()
Windows = dict[int | None, int]
"""Pages of each group of layers, by its attention window (None: all keys)."""


def next_token(tokens: list[int]) -> int:
    """What the scripted model answers: a function of everything before, so a lost or repeated token shows."""
    value = (sum((i + 1) * token for i, token in enumerate(tokens)) * 31 + len(tokens)) % 260
    return min(value, EOS_ID)


class Runner:
    """Checks each batch against the budget and the pool, and answers with :func:`next_token`."""

    def __init__(self, pool: PagePool, budget: int) -> None:
        self.pool, self.budget = pool, budget
        self.fail_next = False
        self.failed: set[str] = set()
        self.slots: list[dict[int, tuple[int, ...]]] = [{} for _ in pool.groups]

    def admit(self, task: Task) -> None:
        assert task.row is not None

    def run(self, batch: Batch) -> StepResult:
        assert 0 < batch.n_tokens <= self.budget
        assert len({id(item.task) for item in batch.items}) == len(batch.items), "a task runs once a step"
        if self.fail_next:
            self.fail_next = False
            self.failed |= {item.task.request_id for item in batch.items}
            raise RuntimeError("scripted failure")
        tokens = []
        for item in batch.items:
            assert item.start == item.task.computed_len
            assert self.pool.length(item.task.row) == item.start + item.n_tokens
            self.write_and_read(item)
            if item.samples:
                tokens.append(next_token(item.task.token_ids))
        return StepResult(tokens, [None] * len(tokens))

    def write_and_read(self, item: BatchItem) -> None:
        """Every slot that the item's queries see holds the key of this very prefix, in every group of layers."""
        tokens, end = item.task.token_ids, item.start + item.n_tokens
        for group, held in zip(self.pool.groups, self.slots, strict=True):
            table, window = group.req_to_token.host[item.task.row], group.spec.window
            for position in range(item.start, end):
                held[int(table[position])] = tuple(tokens[: position + 1])
            for position in range(0 if window is None else max(0, item.start - window + 1), end):
                assert held[int(table[position])] == tuple(tokens[: position + 1])


class Harness:
    """A scheduler, its pool, and what each request must answer."""

    def __init__(
        self, *, n_pages: int | Windows, page_size: int, max_num_seqs: int, budget: int, prefix_cache: bool = True
    ) -> None:
        self.config = EngineConfig(
            max_num_seqs=max_num_seqs, max_batch_tokens=max(budget, max_num_seqs), page_size=page_size
        )
        pages: Windows = {None: n_pages} if isinstance(n_pages, int) else n_pages
        specs = [
            KVSpec("full" if window is None else "window", (layer,), 1, 2, torch.float32, window)
            for layer, window in enumerate(pages)
        ]
        self.pool = PagePool(
            specs,
            list(pages.values()),
            page_size,
            max_num_seqs,
            64,
            torch.device("cpu"),
            chunk_len=self.config.max_batch_tokens,
            prefix_cache=prefix_cache,
        )
        self.runner = Runner(self.pool, self.config.max_batch_tokens)
        self.now_s = 0.0
        self.scheduler = InferenceScheduler(self.config, self.pool, self.runner, self.make_tasks, lambda: self.now_s)
        self.finals: dict[str, list[Delta]] = {}
        self.asked: dict[str, tuple[tuple[int, ...], int | None]] = {}

    def make_tasks(self, request: Request, on_delta) -> list[Task]:
        return [
            Task(
                request.request_id,
                request.prompt_token_ids,
                request.params,
                seed=0,
                max_total_len=min(64, self.pool.capacity),
                stop_ids=frozenset({EOS_ID}),
                text=TextStream(TOKENIZER, request.params),
                on_delta=on_delta,
                priority=request.priority,
            )
        ]

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int | None, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(prompt_token_ids=prompt, params=params, request_id=name, priority=priority)

        def on_delta(delta: Delta) -> None:
            if delta.completion is not None:
                self.finals.setdefault(name, []).append(delta)

        self.scheduler.submit(self.make_tasks(request, on_delta))
        self.asked[name] = (prompt, max_tokens)

    def check_counts(self) -> None:
        lens = [self.pool.length(task.row) for task in self.scheduler.running]
        for group in self.pool.groups:
            allocator, size = group.allocator, self.pool.page_size
            assert allocator.n_free + allocator.n_cached + allocator.n_used == allocator.n_pages
            live = sum(group.spec.pages_for(n, size, self.pool.chunk_len) for n in lens)
            assert allocator.n_used <= live, "no page is used by nobody"
        assert len(self.scheduler.running) <= self.config.max_num_seqs

    def drain(self) -> None:
        for _ in range(20_000):
            self.check_counts()
            if not self.scheduler.step():
                break
        assert not self.scheduler.has_work, "nothing waits for ever"
        assert self.pool.n_used == 0, "every page came back"

    def check_answers(self, excused: set[str] = frozenset()) -> None:
        """Every request ended exactly once, and with what it would have said alone."""
        assert set(self.finals) == set(self.asked)
        for name, (prompt, max_tokens) in self.asked.items():
            (final,) = self.finals[name]
            completion = final.completion
            expected: list[int] = []
            limit = min(64, self.pool.capacity) - len(prompt)
            limit = limit if max_tokens is None else min(limit, max_tokens)
            while len(expected) < limit and EOS_ID not in expected:
                expected.append(next_token([*prompt, *expected]))
            got = list(completion.token_ids)
            if completion.finish_reason in ("abort", "error"):
                assert name in excused
                assert got == expected[: len(got)]
            else:
                assert got == expected
                assert completion.finish_reason == ("stop" if got[-1] == EOS_ID else "length")


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 30)), st.integers(0, 2)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 10)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("recompute")),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    actions,
    st.one_of(
        st.integers(2, 12),
        st.dictionaries(st.sampled_from([None, 1, 4, 20]), st.integers(2, 12), min_size=1, max_size=3),
    ),
    st.sampled_from([1, 8, 16]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.booleans(),
)
def test_random_life(script, n_pages, page_size, max_num_seqs, budget, prefix_cache):
    """Whatever happens to a request's neighbours, it says what it would have said alone, no page is lost, and no key
    that a query sees was overwritten, whatever windows the groups of layers have."""
    prefix_cache = prefix_cache and isinstance(n_pages, int)
    harness = Harness(
        n_pages=n_pages, page_size=page_size, max_num_seqs=max_num_seqs, budget=budget, prefix_cache=prefix_cache
    )
    excused: set[str] = set()
    for number, (kind, *arguments) in enumerate(script):
        name = f"r{number}"
        if kind == "submit":
            length, max_tokens, priority = arguments
            prompt = tuple(i % 3 for i in range(length))
            if length >= harness.pool.capacity:
                with pytest.raises(RequestError, match=f"prompt has {length} tokens, the KV cache holds"):
                    harness.submit(name, prompt, max_tokens)
            else:
                harness.submit(name, prompt, max_tokens, priority)
        elif kind == "step":
            for _ in range(arguments[0]):
                harness.scheduler.step()
        elif kind == "abort" and harness.asked:
            victim = sorted(harness.asked)[arguments[0] % len(harness.asked)]
            excused.add(victim)
            harness.scheduler.abort(victim)
            harness.scheduler.abort(victim)
        elif kind == "fail":
            harness.runner.fail_next = True
        elif kind == "recompute":
            with harness.scheduler.between_steps(recompute=True):
                assert harness.pool.n_free == harness.pool.n_pages
        harness.check_counts()
    harness.drain()
    harness.check_answers(excused | harness.runner.failed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_pages", "n_steps"),
    [(14, 50_000), ({None: 14, 10: 12}, 25_000), ({7: 9}, 25_000)],
    ids=["full", "full+window", "window"],
)
def test_a_hundred_thousand_random_steps(n_pages, n_steps):
    """``free + cached + used == total`` in every group after each of 100,000 steps of random traffic in tight pools."""
    chance = random.Random(0)
    prefix_cache = isinstance(n_pages, int)
    harness = Harness(n_pages=n_pages, page_size=8, max_num_seqs=6, budget=24, prefix_cache=prefix_cache)
    aborted: set[str] = set()
    steps = submitted = 0
    while steps < n_steps:
        if len(harness.scheduler.waiting) < 4:
            prompt = tuple(chance.choice((1, 2)) for _ in range(chance.randint(1, 50)))
            harness.submit(f"r{submitted}", prompt, chance.choice((None, 1, 8, 40)), chance.randint(0, 2))
            submitted += 1
        if chance.random() < 0.02:
            victim = f"r{chance.randrange(submitted)}"
            aborted.add(victim)
            harness.scheduler.abort(victim)
        steps += harness.scheduler.step()
        harness.check_counts()
    harness.drain()
    assert set(harness.finals) == set(harness.asked)
    assert all(len(finals) == 1 for finals in harness.finals.values())


def test_decodes_go_on_while_a_long_prompt_is_prefilled():
    """Rule 5: in every step each running request decodes, and the prompt advances by what is left of the budget."""
    harness = Harness(n_pages=40, page_size=8, max_num_seqs=3, budget=6)
    for name in ("a", "b"):
        harness.submit(name, (1,), 40)
    harness.scheduler.step()
    harness.submit("long", tuple(range(40)), 1)
    for step in range(1, 10):
        harness.scheduler.step()
        lengths = {task.request_id: task.output_len for task in harness.scheduler.running}
        assert lengths.get("a") == lengths.get("b") == step + 1
        if step < 9:
            (long,) = (task for task in harness.scheduler.running if task.request_id == "long")
            assert long.computed_len == 4 * step


def test_priority_then_arrival():
    harness = Harness(n_pages=40, page_size=8, max_num_seqs=1, budget=8)
    for name, priority in [("first", 1), ("second", 1), ("urgent", 0)]:
        harness.submit(name, (1, 2), 2, priority)
    harness.drain()
    assert list(harness.finals) == ["urgent", "first", "second"]


def test_the_request_served_last_is_preempted_and_resumes_from_its_own_pages():
    """Rule 6: memory pressure recomputes, re-hitting the request's own prefix; the oldest never waits for a younger."""
    harness = Harness(n_pages=5, page_size=8, max_num_seqs=2, budget=64)
    harness.submit("old", tuple([1] * 15), 20)
    harness.submit("young", tuple([2] * 15), 20)
    preempted = []
    preempt = harness.scheduler._preempt
    harness.scheduler._preempt = lambda task: (preempted.append(task.request_id), preempt(task))
    harness.drain()
    harness.check_answers()
    assert set(preempted) == {"young"}
    assert list(harness.finals) == ["old", "young"]


def test_progress_is_told_on_a_virtual_clock():
    """Rule 10: health shows the time since the last step, so a hanging device can be seen."""
    harness = Harness(n_pages=40, page_size=8, max_num_seqs=1, budget=8)
    harness.now_s = 5.0
    assert harness.scheduler.seconds_since_step == 5.0
    harness.submit("a", (1,), 3)
    harness.submit("b", (1,), 3)
    assert harness.scheduler.n_waiting == 2
    harness.scheduler.step()
    assert (harness.scheduler.n_waiting, harness.scheduler.seconds_since_step) == (1, 0.0)
    harness.now_s += 7.0
    assert harness.scheduler.seconds_since_step == 7.0
