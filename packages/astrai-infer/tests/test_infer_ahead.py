"""Steps launched before the one before is read (rules 5-7, 10): a virtual device that works in order, later than asked."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core import SamplingParams
from astrai_core.types import Request
from astrai_infer.cache.pool import PagePool
from astrai_infer.cache.storage import KVSpec
from astrai_infer.config import EngineConfig
from astrai_infer.scheduler import InferenceScheduler
from astrai_infer.task import Batch, Delta, StepResult, Task
from astrai_infer.testing import EOS_ID, byte_tokenizer
from astrai_infer.text.detokenize import TextStream

TOKENIZER = byte_tokenizer()
MAX_LEN = 64


def next_token(tokens: tuple[int, ...]) -> int:
    """What the scripted model answers: a function of everything before, end of text now and then."""
    value = (sum((i + 1) * token for i, token in enumerate(tokens)) * 31 + len(tokens)) % 270
    return min(value, EOS_ID)


def alone(prompt: tuple[int, ...], limit: int) -> list[int]:
    """What a request says if nobody else is there."""
    tokens: list[int] = []
    while len(tokens) < limit and EOS_ID not in tokens:
        tokens.append(next_token((*prompt, *tokens)))
    return tokens


@dataclass
class Entry:
    """One request's part of a step, as it was when the step was launched: later changes of the host do not reach it."""

    row: int
    start: int
    ids: tuple[int, ...] | None
    """Tokens to feed; None: the one that the device sampled last for the row."""
    before: tuple[int, ...] | None
    """The tokens before these; None: those that the device fed for the row."""
    slots: list[tuple[int, ...]]
    """Per group of layers, the slots of all positions up to the last one fed."""
    samples: bool


@dataclass
class Launched:
    device: Device
    entries: list[Entry]
    tokens: list[int] | None = None
    fails: bool = False

    def result(self) -> StepResult:
        self.device.run_until(self)
        if self.fails:
            self.device.failed |= {task.request_id for task in self.device.running()}
            raise RuntimeError("scripted failure of the device")
        assert self.tokens is not None
        return StepResult(self.tokens, [None] * len(self.tokens))


@dataclass
class Device:
    """Keys, newest tokens and a queue of steps, which it runs when somebody waits, or when it likes."""

    pool: PagePool
    budget: int
    chance: random.Random
    queue: deque[Launched] = field(default_factory=deque)
    newest: dict[int, int] = field(default_factory=dict)
    fed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    keys: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    fail_launch: bool = False
    fail_result: bool = False
    failed: set[str] = field(default_factory=set)
    running: Callable[[], list[Task]] = list
    """What the scheduler runs at the moment."""
    n_ahead: int = 0

    def __post_init__(self) -> None:
        self.keys = [{} for _ in self.pool.groups]

    def admit(self, task: Task) -> None:
        assert task.row is not None
        assert task.pending_len == 0, "a task whose token is on its way keeps its row"

    def run(self, batch: Batch) -> StepResult:
        raise AssertionError("a scheduler that can run ahead does")

    def launch(self, batch: Batch) -> Launched:
        assert 0 < batch.n_tokens <= self.budget
        assert sum(step.tokens is None for step in self.queue) <= 1, "at most two steps are under way"
        if self.fail_launch:
            self.fail_launch = False
            self.failed |= {item.task.request_id for item in batch.items}
            raise RuntimeError("scripted failure of a launch")
        decoding = {id(task) for task in batch.decodes}
        entries = []
        for item in batch.items:
            task, end = item.task, item.start + item.n_tokens
            assert task.status == "running"
            assert self.pool.length(task.row) == end
            ids = None if id(task) in decoding else tuple(task.token_ids[item.start : end])
            assert ids is None or len(ids) == item.n_tokens, "a chunk is of known tokens"
            slots = [tuple(group.req_to_token.host[task.row, :end].tolist()) for group in self.pool.groups]
            before = None if ids is None else tuple(task.token_ids[: item.start])
            entries.append(Entry(task.row, item.start, ids, before, slots, item.samples))
        launched = Launched(self, entries, fails=self.fail_result)
        self.fail_result = False
        self.n_ahead += bool(self.queue)
        self.queue.append(launched)
        while self.queue and self.chance.random() < 0.3:
            self._run(self.queue.popleft())
        return launched

    def run_until(self, launched: Launched) -> None:
        while launched.tokens is None:
            self._run(self.queue.popleft())

    def _run(self, launched: Launched) -> None:
        launched.tokens = []
        for entry in launched.entries:
            ids = (self.newest[entry.row],) if entry.ids is None else entry.ids
            end = entry.start + len(ids)
            prefix = (self.fed[entry.row] if entry.before is None else entry.before) + ids
            self.fed[entry.row] = prefix
            assert len(prefix) == end
            for group, slots, held in zip(self.pool.groups, entry.slots, self.keys, strict=True):
                for position in range(entry.start, end):
                    held[slots[position]] = prefix[: position + 1]
                window = group.spec.window
                for position in range(0 if window is None else max(0, entry.start - window + 1), end):
                    assert held[slots[position]] == prefix[: position + 1], "a key that a query sees was overwritten"
            if entry.samples:
                self.newest[entry.row] = next_token(prefix)
                launched.tokens.append(self.newest[entry.row])


class Life:
    """A scheduler over the virtual device, and what callers heard."""

    def __init__(
        self, n_pages: dict[int | None, int], page_size: int, n_seqs: int, budget: int, prefix_cache: bool
    ) -> None:
        config = EngineConfig(max_num_seqs=n_seqs, max_batch_tokens=max(budget, n_seqs), page_size=page_size)
        specs = [
            KVSpec("full" if window is None else "window", (layer,), 1, 2, torch.float32, window)
            for layer, window in enumerate(n_pages)
        ]
        self.pool = PagePool(
            specs,
            list(n_pages.values()),
            page_size,
            n_seqs,
            MAX_LEN,
            torch.device("cpu"),
            chunk_len=config.max_batch_tokens,
            prefix_cache=prefix_cache and list(n_pages) == [None],
        )
        self.device = Device(self.pool, config.max_batch_tokens, random.Random(0))
        self.scheduler = InferenceScheduler(config, self.pool, self.device, lambda request, on_delta: [])
        self.device.running = lambda: self.scheduler.running
        self.heard: dict[str, list[Delta]] = {}
        self.asked: dict[str, tuple[tuple[int, ...], int]] = {}

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int, priority: int = 0) -> None:
        longest = min(MAX_LEN, self.pool.capacity)
        if len(prompt) >= self.pool.capacity:
            return
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(prompt_token_ids=prompt, params=params, request_id=name, priority=priority)
        task = Task(
            name,
            prompt,
            request.params,
            seed=0,
            max_total_len=longest,
            stop_ids=frozenset({EOS_ID}),
            text=TextStream(TOKENIZER, params),
            on_delta=self.heard.setdefault(name, []).append,
            priority=priority,
        )
        self.scheduler.submit([task])
        self.asked[name] = prompt, min(max_tokens, longest - len(prompt))

    def check_pages(self) -> None:
        for group in self.pool.groups:
            allocator = group.allocator
            assert allocator.n_free + allocator.n_cached + allocator.n_used == allocator.n_pages

    def drain(self) -> None:
        for _ in range(20_000):
            self.check_pages()
            if not self.scheduler.step():
                break
        assert not self.scheduler.has_work, "nothing waits for ever"
        assert self.pool.n_used == 0, "every page came back"
        assert all(step.tokens is None or step not in self.device.queue for step in self.device.queue)

    def check(self, excused: set[str]) -> None:
        """Each caller heard one end, at the end, and up to it what the request says alone."""
        for name, (prompt, limit) in self.asked.items():
            *pieces, final = self.heard[name]
            assert final.completion is not None
            assert all(piece.completion is None for piece in pieces)
            got, expected = list(final.completion.token_ids), alone(prompt, limit)
            told = [token for delta in self.heard[name] for token in delta.token_ids]
            assert told == got, "no token was seen that is not part of the answer"
            if final.completion.finish_reason in ("abort", "error"):
                assert name in excused
                assert got == expected[: len(got)]
            else:
                assert got == expected
                assert final.completion.finish_reason == ("stop" if got[-1] == EOS_ID else "length")


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 30), st.integers(0, 2)),
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 30), st.integers(0, 2)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 10)),
        st.tuples(st.sampled_from(["fail launch", "fail result", "recompute", "pause"])),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(
    actions,
    st.one_of(
        st.integers(2, 12).map(lambda n: {None: n}),
        st.dictionaries(st.sampled_from([None, 1, 4, 20]), st.integers(2, 12), min_size=1, max_size=3),
    ),
    st.sampled_from([1, 8, 16]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.booleans(),
)
def test_random_life_one_step_ahead(script, n_pages, page_size, n_seqs, budget, prefix_cache):
    """Ends, aborts, preemptions and failures are noticed a step late: no page is lost, no key is overwritten that a step
    under way reads, no caller sees a token too many, and everyone says what they would have said alone."""
    life = Life(n_pages, page_size, n_seqs, budget, prefix_cache)
    excused: set[str] = set()
    for number, (kind, *arguments) in enumerate(script):
        if kind == "submit":
            length, max_tokens, priority = arguments
            life.submit(f"r{number}", tuple(i % 3 for i in range(length)), max_tokens, priority)
        elif kind == "step":
            for _ in range(arguments[0]):
                life.scheduler.step()
                life.check_pages()
        elif kind == "abort" and life.asked:
            victim = sorted(life.asked)[arguments[0] % len(life.asked)]
            excused.add(victim)
            life.scheduler.abort(victim)
        elif kind == "fail launch":
            life.device.fail_launch = True
        elif kind == "fail result":
            life.device.fail_result = True
        elif kind == "recompute":
            with life.scheduler.between_steps(recompute=True):
                assert life.pool.n_free == life.pool.n_pages
                assert all(step.tokens is not None for step in life.device.queue), "nothing is under way"
        elif kind == "pause":
            life.scheduler.pause()
            assert all(step.tokens is not None for step in life.device.queue), "nothing is under way"
            assert not life.scheduler.step()
            life.scheduler.resume()
    life.device.fail_launch = life.device.fail_result = False
    life.drain()
    life.check(excused | life.device.failed)


def test_every_steady_step_is_launched_before_the_last_is_read():
    """Overlap: with requests decoding, the device always has the next step already."""
    life = Life({None: 40}, 8, 4, 32, True)
    for i in range(3):
        life.submit(f"r{i}", (i, 1), 25)
    life.drain()
    life.check(set())
    assert life.device.n_ahead >= 0.3 * life.scheduler.n_steps, "the virtual device is often quicker than the host"
    assert life.scheduler.n_steps <= 27, "one step more than without running ahead, at most"


def test_an_end_by_length_costs_no_step():
    """That a token is the last one follows from the lengths, so nothing is launched for a request that will have ended."""
    life = Life({None: 40}, 8, 1, 32, True)
    life.submit("a", (5,), 3)
    fed = []
    launch = life.device.launch
    life.device.launch = lambda batch: (fed.append(batch.n_tokens), launch(batch))[1]
    life.drain()
    n_new = len(alone((5,), 3))
    assert len(fed) == n_new


def test_a_token_behind_the_end_is_never_seen():
    """Rule 7: the step that was already under way when the end of text was read samples for nobody."""
    prompt = next((i, j) for i in range(200) for j in range(200) if len(alone((i, j), 9)) == 3)
    life = Life({None: 40}, 8, 2, 32, True)
    life.submit("ends", prompt, 30)
    steps = []
    launch = life.device.launch
    life.device.launch = lambda batch: (steps.append(len(batch.decodes)), launch(batch))[1]
    life.drain()
    life.check(set())
    assert len(steps) == 4, "three tokens, and one step too many"


def test_what_a_grammar_allows_waits_for_the_last_token():
    """Structured output decides by the last token: a step with it is read before the next is chosen."""

    class Anything:
        error = ""

        def accept(self, token_id: int) -> bool:
            return False

    life = Life({None: 40}, 8, 2, 32, True)
    life.submit("free", (1,), 10)
    life.submit("bound", (2,), 10)
    for task in life.scheduler._arrived[1:]:
        task.grammar = Anything()
    launch = life.device.launch

    def checked(batch: Batch) -> Launched:
        assert all(task.pending_len == 0 for task in batch.decodes if task.grammar is not None)
        return launch(batch)

    life.device.launch = checked
    life.drain()
    life.check(set())


@pytest.mark.parametrize("kind", ["launch", "result"])
def test_a_failure_ends_the_requests_of_the_step_and_the_engine_goes_on(kind):
    """Rule 10, one step late."""
    life = Life({None: 40}, 8, 4, 32, True)
    for i in range(2):
        life.submit(f"r{i}", (i,), 30)
    for _ in range(4):
        life.scheduler.step()
    setattr(life.device, f"fail_{kind}", True)
    for _ in range(3):
        life.scheduler.step()
    failed = {name for name, heard in life.heard.items() if heard[-1].completion and heard[-1].completion.error}
    assert failed, "somebody was told"
    assert all("scripted failure" in life.heard[name][-1].completion.error for name in failed)
    life.submit("later", (7,), 5)
    life.drain()
    life.check(failed)
