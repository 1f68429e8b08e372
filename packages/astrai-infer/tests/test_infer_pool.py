"""Pages, rows and lengths (rows C1, C3): nothing is lost, shared or forgotten under random use."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_infer.cache.allocator import PageAllocator
from astrai_infer.cache.pool import PagePool
from astrai_infer.cache.storage import KVSpec

SPEC = KVSpec(n_layers=2, n_kv_heads=3, head_dim=4, dtype=torch.float32)


def pool(n_pages: int = 6, page_size: int = 4, n_rows: int = 3, max_seq_len: int = 16) -> PagePool:
    return PagePool(SPEC, n_pages, page_size, n_rows, max_seq_len, torch.device("cpu"))


def test_storage_shape():
    """C1: four dimensions, one index."""
    subject = pool()
    assert subject.storage.k_buffer.shape == subject.storage.v_buffer.shape == (2, (6 + 1) * 4, 3, 4)
    assert SPEC.token_bytes == 2 * 2 * 3 * 4 * 4


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=60), st.sampled_from([1, 4]))
def test_random_use_keeps_every_invariant(actions, page_size):
    """Lengths are tracked (C3); live positions have distinct slots; the scratch page belongs to nobody; no page is lost."""
    subject = pool(page_size=page_size)
    live: dict[int, int] = {}
    for which, n in actions:
        rows = list(live)
        if n == 0 and rows:
            row = rows[which % len(rows)]
            subject.release(row)
            del live[row]
        elif which == 0 and subject.can_admit(max(n, 1)):
            row = subject.acquire_row()
            assert row not in live
            live[row] = 0
            assert subject.extend(row, max(n, 1)), "can_admit promised room"
            live[row] += max(n, 1)
        elif rows:
            row = rows[which % len(rows)]
            if live[row] + n > subject.max_seq_len:
                continue
            free = subject.allocator.n_free
            if subject.extend(row, n):
                live[row] += n
            else:
                assert subject.allocator.n_free == free, "a refused extend takes nothing"
                assert subject.pages_for(live[row] + n) - subject.pages_for(live[row]) > free
        slots = [slot for row, length in live.items() for slot in subject.req_to_token.host[row, :length].tolist()]
        assert len(set(slots)) == len(slots), "two positions share a slot"
        assert all(page_size <= slot < subject.storage.size for slot in slots), "page 0 is the scratch page"
        assert all(subject.length(row) == length for row, length in live.items())
        assert subject.allocator.n_used == sum(subject.pages_for(length) for length in live.values())
        assert subject.allocator.n_free + subject.allocator.n_used == subject.allocator.n_pages
    for row in list(live):
        subject.release(row)
    assert subject.allocator.n_free == subject.allocator.n_pages


def test_bind_tasks_describes_the_step():
    subject = pool()
    first, second = subject.acquire_row(), subject.acquire_row()
    subject.extend(first, 5)
    subject.extend(second, 3)
    subject.extend(first, 1)
    metadata = subject.bind_tasks([second, first], [3, 1]).metadata
    assert metadata.phase == "prefill"
    assert metadata.seq_lens.tolist() == list(metadata.seq_lens_host) == [3, 6]
    assert metadata.kv_indptr.tolist() == [0, 3, 9]
    assert metadata.qo_indptr.tolist() == [0, 3, 4]
    table = subject.req_to_token.table
    assert metadata.out_cache_loc.tolist() == [*table[second, :3].tolist(), int(table[first, 5])]
    assert subject.bind_tasks([first], [1]).metadata.phase == "decode"


def test_freeing_twice_is_caught():
    allocator = PageAllocator(3)
    pages = allocator.alloc(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages)
    assert allocator.alloc(4) is None
    assert allocator.n_free == 3


@pytest.mark.parametrize("module", ["scheduler", "task", "queue", "config", "cache.allocator", "text.detokenize"])
def test_host_side_modules_import_no_torch(module):
    code = f"import sys, astrai_infer.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
