"""Pages, rows and lengths (rows C1, C3): nothing is lost, shared or forgotten under random use."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from astrai_infer.cache.allocator import PageAllocator
from astrai_infer.cache.groups import SCRATCH_SLOTS
from astrai_infer.cache.pool import PagePool
from astrai_infer.cache.storage import KVSpec
from astrai_infer.runtime.workspace import Buffer, InferenceWorkspace
from astrai_infer.testing.models import tiny_config

CPU = torch.device("cpu")
SPEC = KVSpec("full", (0, 1), n_kv_heads=3, head_dim=4, dtype=torch.float32)


def pool(n_pages: int = 6, page_size: int = 4, n_rows: int = 3, max_seq_len: int = 16) -> PagePool:
    return PagePool((SPEC,), (n_pages,), page_size, n_rows, max_seq_len, CPU)


def test_storage_shape():
    """C1: four dimensions, one index."""
    storage = pool().groups[0].storage
    assert storage.k_buffer.shape == storage.v_buffer.shape == (2, 6 * 4 + 16, 3, 4)
    assert SPEC.token_bytes == 2 * 2 * 3 * 4 * 4


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 2)), max_size=60), st.sampled_from([1, 4])
)
def test_random_use_keeps_every_invariant(actions, page_size):
    """Lengths are tracked (C3); a slot that two requests share holds the same tokens at the same place for both; the
    scratch slots belong to nobody; ``free + cached + used == total`` always (rules 6 and 8)."""
    subject = pool(page_size=page_size)
    (group,) = subject.groups
    allocator, host = group.allocator, group.req_to_token.host
    live: dict[int, list[int]] = {}
    written: dict[int, tuple[int, ...]] = {}
    for which, n, flavour in actions:
        rows = list(live)
        if n == 0 and rows:
            row = rows[which % len(rows)]
            subject.release(row)
            del live[row]
        elif which == 0:
            tokens = [flavour] * max(n, 1)
            admission = subject.admit(tokens, "weights")
            if admission is not None:
                row, cached_len = admission
                assert row not in live
                assert cached_len < len(tokens), "the last token is always fed"
                assert subject.extend(row, len(tokens) - cached_len), "admit promised room"
                for position in range(cached_len):
                    slot = int(host[row, position])
                    assert written[slot] == tuple(tokens[: position + 1]), "a hit must hold this very prefix"
                live[row] = tokens
        elif rows and len(live[row := rows[which % len(rows)]]) + n <= subject.max_seq_len:
            available = allocator.n_available
            missing = subject.pages_for(len(live[row]) + n) - subject.pages_for(len(live[row]))
            extended = subject.extend(row, n)
            assert extended == (missing <= available)
            if extended:
                live[row] = live[row] + [flavour] * n
            else:
                assert allocator.n_available == available, "a refused extend takes nothing"
        for row, tokens in live.items():
            slots = host[row, : len(tokens)].tolist()
            assert len(set(slots)) == len(slots)
            assert all(0 <= slot < group.storage.size - SCRATCH_SLOTS for slot in slots), "scratch is nobody's"
            for position, slot in enumerate(slots):
                written[slot] = tuple(tokens[: position + 1])
            subject.record(row, tokens, len(tokens))
            assert subject.length(row) == len(tokens)
        for row, tokens in live.items():
            for position, slot in enumerate(host[row, : len(tokens)].tolist()):
                assert written[slot] == tuple(tokens[: position + 1]), "two requests write different tokens to a slot"
        assert allocator.n_free + allocator.n_cached + allocator.n_used == allocator.n_pages
        assert len(subject.prefix) <= allocator.n_pages, "the index is bounded by the pool"
    for row in list(live):
        subject.release(row)
    assert allocator.n_used == 0
    subject.clear_prefix_cache()
    assert allocator.n_free == allocator.n_pages
    assert len(subject.prefix) == 0


def test_prefix_hits_and_eviction_order():
    """Rule 8: whole pages only, never the last token; least recently used first; the namespace is part of the key."""
    subject = pool(n_pages=4, page_size=2)
    prompt = [1, 2, 3, 4]
    row, cached_len = subject.admit(prompt, ("v0", None))
    assert cached_len == 0
    subject.extend(row, 4)
    subject.record(row, prompt, 4)
    subject.release(row)
    assert (subject.n_cached, subject.n_free) == (2, 2)
    for tokens, namespace, expected in [
        ([1, 2, 3, 4], ("v0", None), 2),
        ([1, 2, 3, 4, 5], ("v0", None), 4),
        ([1, 2, 9, 9, 9], ("v0", None), 2),
        ([9, 2, 3, 4, 5], ("v0", None), 0),
        ([1, 2, 3, 4, 5], ("v1", None), 0),
        ([1, 2, 3, 4, 5], ("v0", "adapter"), 0),
    ]:
        row, cached_len = subject.admit(tokens, namespace)
        assert cached_len == expected
        subject.release(row)
    row, _ = subject.admit([7] * 6, ("v0", None))
    assert subject.extend(row, 6)
    subject.release(row)
    row, cached_len = subject.admit([1, 2, 3, 4, 5], ("v0", None))
    assert cached_len == 2, "the tail of the old prefix went first"
    subject.release(row)
    assert subject.admit([1, 2, 3, 4, 5], ("v0", None), match=False)[1] == 0


def test_a_prefix_computed_twice_still_serves_what_follows():
    subject = pool(n_pages=8, page_size=2, n_rows=3)
    first, second = (subject.admit([1, 2, 3, tail], "w")[0] for tail in (4, 5))
    for row, tail in ((first, 4), (second, 5)):
        subject.extend(row, 4)
        subject.record(row, [1, 2, 3, tail], 4)
    for row in (first, second):
        subject.release(row)
    assert [subject.admit([1, 2, 3, tail, 9], "w")[1] for tail in (4, 5)] == [4, 4]


def addresses(workspace: InferenceWorkspace) -> list[int]:
    buffers = [*(b for b in vars(workspace).values() if isinstance(b, Buffer)), *workspace.out_cache_locs]
    return [buffer.device_tensor.data_ptr() for buffer in buffers]


def test_bind_tasks_describes_the_step():
    """W1, C8: what a step reads lies in the workspace."""
    subject, workspace = pool(), InferenceWorkspace(16, 3, CPU)
    before = addresses(workspace)
    (first, _), (second, _) = subject.admit([1] * 5, "w"), subject.admit([2] * 3, "w")
    subject.extend(first, 5)
    subject.extend(second, 3)
    subject.extend(first, 1)
    metadata = subject.bind_tasks([second, first], [3, 1], workspace).groups[0]
    assert metadata.phase == "prefill"
    assert metadata.seq_lens.tolist() == list(metadata.seq_lens_host) == [3, 6]
    assert metadata.kv_indptr.tolist() == [0, 3, 9]
    assert metadata.qo_indptr.tolist() == [0, 3, 4]
    table = subject.groups[0].req_to_token.table
    assert metadata.out_cache_loc.tolist() == [*table[second, :3].tolist(), int(table[first, 5])]
    assert subject.bind_tasks([first], [1], workspace).groups[0].phase == "decode"
    assert addresses(workspace) == before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=3), max_size=12))
def test_steady_steps_equal_fresh_ones(steps):
    """C4, C5: incremented in place or built anew, the metadata is the same, and nothing moves."""
    subject, workspace = pool(n_pages=40, max_seq_len=64), InferenceWorkspace(64, 3, CPU)
    rows = [subject.admit([row] * 3, "w")[0] for row in range(3)]
    for row in rows:
        subject.extend(row, 3)
    before, steady = addresses(workspace), 0
    for step in steps:
        q_lens = dict(step)
        for which, n in q_lens.items():
            subject.extend(rows[which], n)
        chosen, counts = [rows[which] for which in q_lens], list(q_lens.values())
        lens = [subject.length(row) for row in chosen]
        steady += workspace.bound.is_steady_increment(chosen, lens, set(counts) == {1})
        got = subject.bind_tasks(chosen, counts, workspace).groups[0]
        assert got.seq_lens.tolist() == lens
        assert got.req_indices.tolist() == chosen
        assert got.kv_indptr.tolist() == [0, *itertools.accumulate(lens)]
        assert got.qo_indptr.tolist() == [0, *itertools.accumulate(counts)]
        host = subject.groups[0].req_to_token.host
        assert got.out_cache_loc.tolist() == [
            slot for row, n, q in zip(chosen, lens, counts, strict=True) for slot in host[row, n - q : n].tolist()
        ]
        assert addresses(workspace) == before
    note(f"{steady} steady steps")


def test_contiguous_is_the_identity_allocation():
    """C6: row r owns slots ``r * page_size ..``, in order, and nothing else changes."""
    subject = PagePool((SPEC,), (3,), 16, 3, 16, CPU, prefix_cache=False, contiguous=True)
    rows = [subject.admit([1] * n, "w")[0] for n in (3, 16, 5)]
    assert sorted(rows) == [0, 1, 2]
    assert subject.admit([1], "w") is None, "no row is left"
    for row in rows:
        assert subject.extend(row, 16)
        assert subject.groups[0].req_to_token.host[row].tolist() == list(range(16 * row, 16 * row + 16))
    subject.release(rows[1])
    assert subject.admit([2] * 4, "w") == (rows[1], 0)


def grouped(windows: list[int | None], n_pages: list[int], page_size: int, chunk_len: int) -> PagePool:
    """A pool for sequences of up to 64 tokens, with a layer for each window."""
    specs = [
        KVSpec("full" if window is None else "window", (layer,), 1, 2, torch.float32, window)
        for layer, window in enumerate(windows)
    ]
    return PagePool(specs, n_pages, page_size, 3, 64, CPU, chunk_len=chunk_len, prefix_cache=False)


class Shadow:
    """What each slot of each group holds, written and read as a model would.

    Every slot that a step's queries can see must hold this very request's token of that position.
    """

    def __init__(self, subject: PagePool) -> None:
        self.subject = subject
        self.slots: list[dict[int, tuple[object, int]]] = [{} for _ in subject.groups]

    def step(self, row: int, name: object, computed_len: int, n_tokens: int) -> None:
        """Write and read positions ``computed_len ..``, which have slots, and record them."""
        for group, held in zip(self.subject.groups, self.slots, strict=True):
            slots, end, window = group.req_to_token.host[row].tolist(), computed_len + n_tokens, group.spec.window
            for position in range(computed_len, end):
                assert 0 <= slots[position] < group.storage.size - SCRATCH_SLOTS, "scratch is nobody's"
                held[slots[position]] = (name, position)
            for position in range(0 if window is None else max(0, computed_len - window + 1), end):
                assert held[slots[position]] == (name, position), "a key that a query sees was overwritten"
        self.subject.record(row, (), computed_len + n_tokens)

    def check_counts(self, lens: list[int]) -> None:
        """Per group: every page is free, cached or used, and the live requests hold no more than they may."""
        for group in self.subject.groups:
            allocator, size = group.allocator, self.subject.page_size
            assert allocator.n_free + allocator.n_cached + allocator.n_used == allocator.n_pages
            assert allocator.n_used <= sum(group.spec.pages_for(n, size, self.subject.chunk_len) for n in lens)


window_sets = st.sampled_from([[1], [5], [None, 3], [9, None], [None, 4, 17]])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), max_size=80),
    window_sets,
    st.lists(st.integers(1, 16), min_size=3, max_size=3),
    st.sampled_from([1, 4]),
)
def test_windows_give_pages_back_and_lose_nothing_that_is_seen(actions, windows, n_pages, page_size):
    """Rule 6: ``free + cached + used == total`` per group; all groups give pages for a step or none does; no page that
    a later query sees is given to another; a window holds the same few pages however long the sequence."""
    subject = grouped(windows, n_pages[: len(windows)], page_size, chunk_len=8)
    shadow = Shadow(subject)
    live: dict[int, tuple[object, int]] = {}
    for number, (which, n) in enumerate(actions):
        rows = list(live)
        before = [group.allocator.n_available for group in subject.groups]
        if which == 0:
            needed = [group.spec.pages_for(max(n, 1), page_size, 8) for group in subject.groups]
            admission = subject.admit([1] * max(n, 1), "w")
            there = all(have >= need for have, need in zip(before, needed, strict=True))
            assert (admission is not None) == (there and len(live) < 3)
            if admission is not None:
                row = admission[0]
                assert subject.extend(row, max(n, 1)), "admit promised room"
                shadow.step(row, number, 0, max(n, 1))
                live[row] = (number, max(n, 1))
        elif rows and n == 0:
            subject.release(rows[which % len(rows)])
            del live[rows[which % len(rows)]]
        elif rows and live[row := rows[which % len(rows)]][1] + n <= subject.max_seq_len:
            name, length = live[row]
            missing = subject.pages_for(length + n) - subject.pages_for(length)
            extended = subject.extend(row, n)
            assert extended == all(missing <= have for have in before)
            if extended:
                shadow.step(row, name, length, n)
                live[row] = (name, length + n)
            else:
                assert [group.allocator.n_available for group in subject.groups] == before, "nothing is taken"
        shadow.check_counts([length for _, length in live.values()])
    for row in list(live):
        subject.release(row)
    assert (subject.n_used, subject.n_free) == (0, subject.n_pages)


@settings(max_examples=200, deadline=None)
@given(window_sets, st.sampled_from([1, 4, 16]), st.integers(1, 20), st.data())
def test_a_request_alone_always_reaches_the_capacity(windows, page_size, chunk_len, data):
    """Rule 6: what is promised at admission holds for every pool, window, page size and cut into chunks."""
    n_pages = [data.draw(st.integers(1, 70)) for _ in windows]
    subject = grouped(windows, n_pages, page_size, chunk_len)
    shadow, length = Shadow(subject), 0
    row, _ = subject.admit([1] * (subject.capacity - 1), "w")
    while length < subject.capacity:
        n = data.draw(st.integers(1, min(chunk_len, subject.capacity - length)))
        assert subject.extend(row, n)
        shadow.step(row, "alone", length, n)
        length += n
    if all(window is not None for window in windows) and min(n_pages) * page_size >= max(windows) + chunk_len + 2 * 16:
        assert subject.capacity == subject.max_seq_len, "windows do not bound the length"


def test_a_window_needs_its_own_pages_only():
    """A request of 64 tokens in a window of 6 keeps two or three pages of four, and they come back while it runs."""
    subject = grouped([None, 6], [16, 3], page_size=4, chunk_len=1)
    row, _ = subject.admit([1], "w")
    full, window = (group.allocator for group in subject.groups)
    used = []
    for length in range(1, 65):
        assert subject.extend(row, 1)
        subject.record(row, (), length)
        used.append(window.n_used)
        assert full.n_used == -(-length // 4)
    assert max(used) <= 3
    assert used[-8:] == [2] * 8
    subject.release(row)
    assert (full.n_free, window.n_free) == (16, 3)


def test_groups_of_a_model():
    """Decision 4: layers with the same window share a group; each layer finds its buffers, table and slots (W1)."""
    config = tiny_config(
        model_type="qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=6, max_window_layers=2
    )
    specs = KVSpec.groups(config, torch.float32)
    assert [(spec.kind, spec.window, spec.layers) for spec in specs] == [("full", None, (0, 1)), ("window", 6, (2, 3))]
    (whole,) = KVSpec.groups(config, torch.float32, whole=True)
    assert (whole.kind, whole.layers, whole.token_bytes) == ("full", (0, 1, 2, 3), 2 * specs[0].token_bytes)
    subject = PagePool(specs, (8, 4), 4, 2, 32, CPU, prefix_cache=False)
    workspace = InferenceWorkspace(16, 2, CPU, len(specs))
    before = addresses(workspace)
    other, row = subject.admit([1] * 3, "w")[0], subject.admit([1] * 5, "w")[0]
    assert subject.extend(row, 5)
    assert subject.extend(other, 3)
    cache = subject.bind_tasks([row, other], [5, 3], workspace)
    for layer, (group, place) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        k, v, metadata = cache.of(layer)
        storage, table = subject.groups[group].storage, subject.groups[group].req_to_token.table
        assert k.data_ptr() == storage.k_buffer[place].data_ptr()
        assert v.data_ptr() == storage.v_buffer[place].data_ptr()
        assert k.shape == (storage.size, config.num_key_value_heads, config.head_dim)
        assert metadata.req_to_token is table
        assert metadata.window == specs[group].window
        assert metadata.out_cache_loc.tolist() == [*table[row, :5].tolist(), *table[other, :3].tolist()]
    first, second = cache.groups
    assert first.seq_lens is second.seq_lens
    assert first.out_cache_loc.data_ptr() != second.out_cache_loc.data_ptr()
    assert addresses(workspace) == before
    subject.free()
    assert sum(buffer.numel() for buffer in subject.bind_tasks([row], [1], workspace).k_buffers) == 0
    subject.allocate()
    assert subject.bind_tasks([row], [1], workspace).of(3)[0].shape == k.shape


def test_releasing_twice_is_caught():
    allocator = PageAllocator(3)
    pages = allocator.alloc(2)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(pages)
    assert allocator.alloc(4) is None
    assert allocator.n_free == 3


@pytest.mark.parametrize(
    "module", ["scheduler", "task", "queue", "turns", "config", "cache.allocator", "cache.prefix", "text.detokenize"]
)
def test_host_side_modules_import_no_torch(module):
    code = f"import sys, astrai_infer.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
