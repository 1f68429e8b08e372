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
from astrai_infer.cache.pool import SCRATCH_SLOTS, PagePool
from astrai_infer.cache.storage import KVSpec
from astrai_infer.runtime.workspace import Buffer, InferenceWorkspace

SPEC = KVSpec(n_layers=2, n_kv_heads=3, head_dim=4, dtype=torch.float32)


def pool(n_pages: int = 6, page_size: int = 4, n_rows: int = 3, max_seq_len: int = 16) -> PagePool:
    return PagePool(SPEC, n_pages, page_size, n_rows, max_seq_len, torch.device("cpu"))


def test_storage_shape():
    """C1: four dimensions, one index."""
    subject = pool()
    assert subject.storage.k_buffer.shape == subject.storage.v_buffer.shape == (2, 6 * 4 + 16, 3, 4)
    assert SPEC.token_bytes == 2 * 2 * 3 * 4 * 4


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 2)), max_size=60), st.sampled_from([1, 4])
)
def test_random_use_keeps_every_invariant(actions, page_size):
    """Lengths are tracked (C3); a slot that two requests share holds the same tokens at the same place for both; the
    scratch slots belong to nobody; ``free + cached + used == total`` always (rules 6 and 8)."""
    subject = pool(page_size=page_size)
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
                    slot = int(subject.req_to_token.host[row, position])
                    assert written[slot] == tuple(tokens[: position + 1]), "a hit must hold this very prefix"
                live[row] = tokens
        elif rows and len(live[row := rows[which % len(rows)]]) + n <= subject.max_seq_len:
            available = subject.allocator.n_available
            missing = subject.pages_for(len(live[row]) + n) - subject.pages_for(len(live[row]))
            extended = subject.extend(row, n)
            assert extended == (missing <= available)
            if extended:
                live[row] = live[row] + [flavour] * n
            else:
                assert subject.allocator.n_available == available, "a refused extend takes nothing"
        for row, tokens in live.items():
            slots = subject.req_to_token.host[row, : len(tokens)].tolist()
            assert len(set(slots)) == len(slots)
            assert all(0 <= slot < subject.storage.size - SCRATCH_SLOTS for slot in slots), "scratch is nobody's"
            for position, slot in enumerate(slots):
                written[slot] = tuple(tokens[: position + 1])
            subject.record(row, tokens, len(tokens))
            assert subject.length(row) == len(tokens)
        for row, tokens in live.items():
            for position, slot in enumerate(subject.req_to_token.host[row, : len(tokens)].tolist()):
                assert written[slot] == tuple(tokens[: position + 1]), "two requests write different tokens to a slot"
        allocator = subject.allocator
        assert allocator.n_free + allocator.n_cached + allocator.n_used == allocator.n_pages
        assert len(subject.prefix) <= allocator.n_pages, "the index is bounded by the pool"
    for row in list(live):
        subject.release(row)
    assert subject.allocator.n_used == 0
    subject.clear_prefix_cache()
    assert subject.allocator.n_free == subject.allocator.n_pages
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
    assert (subject.allocator.n_cached, subject.allocator.n_free) == (2, 2)
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
    return [buffer.device_tensor.data_ptr() for buffer in vars(workspace).values() if isinstance(buffer, Buffer)]


def test_bind_tasks_describes_the_step():
    """W1, C8: what a step reads lies in the workspace."""
    subject, workspace = pool(), InferenceWorkspace(16, 3, torch.device("cpu"))
    before = addresses(workspace)
    (first, _), (second, _) = subject.admit([1] * 5, "w"), subject.admit([2] * 3, "w")
    subject.extend(first, 5)
    subject.extend(second, 3)
    subject.extend(first, 1)
    metadata = subject.bind_tasks([second, first], [3, 1], workspace).metadata
    assert metadata.phase == "prefill"
    assert metadata.seq_lens.tolist() == list(metadata.seq_lens_host) == [3, 6]
    assert metadata.kv_indptr.tolist() == [0, 3, 9]
    assert metadata.qo_indptr.tolist() == [0, 3, 4]
    table = subject.req_to_token.table
    assert metadata.out_cache_loc.tolist() == [*table[second, :3].tolist(), int(table[first, 5])]
    assert subject.bind_tasks([first], [1], workspace).metadata.phase == "decode"
    assert addresses(workspace) == before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=3), max_size=12))
def test_steady_steps_equal_fresh_ones(steps):
    """C4, C5: incremented in place or built anew, the metadata is the same, and nothing moves."""
    subject, workspace = pool(n_pages=40, max_seq_len=64), InferenceWorkspace(64, 3, torch.device("cpu"))
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
        steady += subject._bound.is_steady_increment(chosen, lens, set(counts) == {1})
        got = subject.bind_tasks(chosen, counts, workspace).metadata
        assert got.seq_lens.tolist() == lens
        assert got.req_indices.tolist() == chosen
        assert got.kv_indptr.tolist() == [0, *itertools.accumulate(lens)]
        assert got.qo_indptr.tolist() == [0, *itertools.accumulate(counts)]
        host = subject.req_to_token.host
        assert got.out_cache_loc.tolist() == [
            slot for row, n, q in zip(chosen, lens, counts, strict=True) for slot in host[row, n - q : n].tolist()
        ]
        assert addresses(workspace) == before
    note(f"{steady} steady steps")


def test_contiguous_is_the_identity_allocation():
    """C6: row r owns slots ``r * page_size ..``, in order, and nothing else changes."""
    subject = PagePool(SPEC, 3, 16, 3, 16, torch.device("cpu"), prefix_cache=False, contiguous=True)
    rows = [subject.admit([1] * n, "w")[0] for n in (3, 16, 5)]
    assert sorted(rows) == [0, 1, 2]
    assert subject.admit([1], "w") is None, "no row is left"
    for row in rows:
        assert subject.extend(row, 16)
        assert subject.req_to_token.host[row].tolist() == list(range(16 * row, 16 * row + 16))
    subject.release(rows[1])
    assert subject.admit([2] * 4, "w") == (rows[1], 0)


def test_releasing_twice_is_caught():
    allocator = PageAllocator(3)
    pages = allocator.alloc(2)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(pages)
    assert allocator.alloc(4) is None
    assert allocator.n_free == 3


@pytest.mark.parametrize(
    "module", ["scheduler", "task", "queue", "config", "cache.allocator", "cache.prefix", "text.detokenize"]
)
def test_host_side_modules_import_no_torch(module):
    code = f"import sys, astrai_infer.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
