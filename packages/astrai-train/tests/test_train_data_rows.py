"""Packing, order and batches: training rules 1, 2, 4, 5, 10 and 11."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core.errors import ConfigError, DataError
from astrai_train import DataConfig
from astrai_train.data.collate import IGNORE_LABEL, PairBatch, Span, TrainBatch, collate
from astrai_train.data.dataset import open_train_source, open_valid_sources
from astrai_train.data.packing import Packing, pack
from astrai_train.data.sampler import NO_ROW, PassSampler, RowSampler, shuffled

METHODS = ("none", "simple", "bfd", "bfd_split")
Write = Callable[..., Path]


def texts(lengths: list[int]) -> list[dict[str, Any]]:
    """Documents whose tokens tell where they come from: document d counts from 50 d."""
    return [{"input_ids": [(50 * d + i) % 250 for i in range(n)]} for d, n in enumerate(lengths)]


def config(path: Path | list[Path], **changes: Any) -> DataConfig:
    paths = path if isinstance(path, list) else [path]
    train = [{"path": str(p)} for p in paths]
    return DataConfig.from_dict({"train": train, "seq_len": 16, "workers": 0, **changes})


lengths_of_documents = st.lists(st.integers(0, 40), max_size=60)


def spans_by_document(packing: Packing) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for row in range(len(packing)):
        for doc, start, stop in packing.row(row):
            found.setdefault(doc, []).append((start, stop))
    return {doc: sorted(spans) for doc, spans in found.items()}


@given(lengths_of_documents, st.integers(1, 17), st.sampled_from(METHODS), st.sampled_from(["truncate", "drop"]))
@settings(max_examples=150, deadline=None)
def test_packing_loses_and_repeats_only_what_it_counts(
    lengths: list[int], seq_len: int, method: Any, overlong: Any
) -> None:
    """Rule 4: no row is too long, none is empty, no token lies in two spans; what is lost is counted."""
    packing = pack(np.array(lengths, np.int64), seq_len, method, overlong)
    sizes = [[stop - start for _, start, stop in packing.row(row)] for row in range(len(packing))]
    assert all(0 < sum(row) <= seq_len and min(row) > 0 for row in sizes)
    spans = spans_by_document(packing)
    for doc, pieces in spans.items():
        assert pieces[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(pieces))
        assert pieces[-1][1] <= lengths[doc]
    assert sum(map(sum, sizes)) + packing.n_tokens_lost == sum(lengths)
    long = sum(n > seq_len for n in lengths)
    if method in ("simple", "bfd_split"):
        assert packing.n_tokens_lost == packing.n_truncated == packing.n_dropped == 0
        assert packing.n_split == sum(len(pieces) > 1 for pieces in spans.values())
    else:
        assert (packing.n_truncated, packing.n_dropped) == ((0, long) if overlong == "drop" else (long, 0))
    assert packing.n_empty == lengths.count(0)
    if method == "simple":
        assert all(sum(row) == seq_len for row in sizes[:-1])
    if method == "none":
        assert all(len(row) == 1 for row in sizes)


@given(st.lists(st.integers(1, 24), min_size=1, max_size=60), st.integers(1, 24))
@settings(max_examples=150, deadline=None)
def test_best_fit_decreasing_equals_its_definition(lengths: list[int], seq_len: int) -> None:
    """Rule 4: longest first, each into the row with the least room that still takes it (quadratic reference)."""
    expected: list[list[int]] = []
    for length in sorted((min(n, seq_len) for n in lengths), reverse=True):
        fitting = [row for row in expected if seq_len - sum(row) >= length]
        if fitting:
            min(fitting, key=lambda row: seq_len - sum(row)).append(length)
        else:
            expected.append([length])
    packing = pack(np.array(lengths, np.int64), seq_len, "bfd")
    found = [[stop - start for _, start, stop in packing.row(row)] for row in range(len(packing))]
    # Of two rows with the same room either may be taken: what they hold may differ, how full the rows are may not.
    assert sorted(map(sum, found)) == sorted(map(sum, expected))
    assert sorted(n for row in found for n in row) == sorted(n for row in expected for n in row)


def test_rows_of_the_maths() -> None:
    """maths.md section 11: 5, 3, 7, 2, 4, 1 in rows of 8 are {7, 1}, {5, 3}, {4, 2}."""
    packing = pack(np.array([5, 3, 7, 2, 4, 1], np.int64), 8, "bfd")
    found = [{stop - start for _, start, stop in packing.row(row)} for row in range(len(packing))]
    assert sorted(found, key=max, reverse=True) == [{7, 1}, {5, 3}, {4, 2}]


def test_best_fit_decreasing_does_not_go_quadratic() -> None:
    """Rule 4: eight times the documents cost at most some thirteen times the tree steps (n log n), not 64 times."""
    import time

    def seconds(n: int) -> float:
        lengths = np.random.default_rng(0).integers(1, 2048, n)
        start = time.process_time()
        pack(lengths, 2048, "bfd")
        return time.process_time() - start

    small = min(seconds(4_000) for _ in range(3))
    assert min(seconds(32_000) for _ in range(2)) < 24 * small


def test_batches_have_one_shift_and_no_target_across_documents() -> None:
    """Rules 2 and 4: unshifted labels by span; pad id and id 0 are content like any other."""
    spans = [Span(np.array([0, 5, 6]), np.array([0, 1, 1])), Span(np.array([0, 0, 7]), None)]
    batch = collate([spans, []], pad_id=0, seq_len=8)
    assert batch.input_ids.tolist() == [[0, 5, 6, 0, 0, 7, 0, 0], [0] * 8]
    ignored = IGNORE_LABEL
    assert batch.labels.tolist() == [[ignored, 5, 6, ignored, 0, 7, ignored, ignored], [ignored] * 8]
    assert batch.doc_ids.tolist() == [[0, 0, 0, 1, 1, 1, -1, -1], [-1] * 8]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0], [0] * 8]
    assert (batch.n_supervised, batch.n_tokens) == (4, 6)
    continuous = collate([spans], pad_id=0, seq_len=8, position_ids="continuous").position_ids
    assert continuous is not None
    assert continuous[0, :6].tolist() == [0, 1, 2, 3, 4, 5]
    assert collate([spans], pad_id=0, position_ids="none").position_ids is None
    dtypes = [t.dtype for t in (batch.input_ids, batch.labels, batch.position_ids, batch.doc_ids)]
    assert dtypes == [torch.int64, torch.int64, torch.int64, torch.int32]
    with pytest.raises(ValueError, match="does not fit"):
        collate([spans], pad_id=0, seq_len=5)


@given(lengths_of_documents.filter(any), st.integers(2, 17), st.sampled_from(["simple", "bfd", "bfd_split"]))
@settings(max_examples=60, deadline=None)
def test_every_target_has_its_own_document_before_it(lengths: list[int], seq_len: int, method: Any) -> None:
    """Rules 2 and 4: wherever there is a label, the token before it belongs to the same document, one position on."""
    packing = pack(np.array(lengths, np.int64), seq_len, method)
    documents = [np.arange(n) + 1000 * d for d, n in enumerate(lengths)]
    rows = [[Span(documents[d][a:b]) for d, a, b in packing.row(r)] for r in range(len(packing))]
    batch = collate(rows, pad_id=0, seq_len=seq_len)
    assert batch.position_ids is not None
    row, at = torch.nonzero(batch.labels != IGNORE_LABEL, as_tuple=True)
    assert (at > 0).all()
    assert torch.equal(batch.labels[row, at], batch.input_ids[row, at])
    assert torch.equal(batch.input_ids[row, at], batch.input_ids[row, at - 1] + 1)
    assert torch.equal(batch.doc_ids[row, at], batch.doc_ids[row, at - 1])
    assert torch.equal(batch.position_ids[row, at], batch.position_ids[row, at - 1] + 1)
    assert batch.n_supervised == len(row) == batch.n_tokens - len(packing.doc)


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_the_sampler_resumes_anywhere(n_rows: int, micro: int, world: int, steps: int) -> None:
    """Rule 5: every epoch draws every row once over all ranks; a position goes on as if nothing had happened."""
    world = min(world, n_rows)
    ranks = [RowSampler([n_rows], seed=3, micro_batch_size=micro, rank=r, world_size=world) for r in range(world)]
    drawn = [draw.row for _ in range(steps) for rank in ranks for draw in rank.next()]
    epochs = [drawn[i : i + n_rows] for i in range(0, len(drawn), n_rows)]
    assert all(sorted(epoch) == list(range(n_rows)) for epoch in epochs if len(epoch) == n_rows)
    assert drawn == [int(i) for e in range(len(epochs)) for i in shuffled(n_rows, 3, 0, e)][: len(drawn)]
    states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
    assert all(state == states[0] for state in states), "the position does not depend on the rank"
    fresh = RowSampler([n_rows], seed=3, micro_batch_size=micro, rank=world - 1, world_size=world)
    fresh.load_state_dict(states[0])
    assert [fresh.next() for _ in range(9)] == [ranks[-1].next() for _ in range(9)]


def test_another_number_of_ranks_goes_on_with_the_same_rows() -> None:
    """Rule 6: a checkpoint of two ranks loads on one, and no row is skipped or seen twice."""
    two = [RowSampler([7], micro_batch_size=1, rank=r, world_size=2) for r in range(2)]
    first = [draw for _ in range(3) for rank in two for draw in rank.next()]
    one = RowSampler([7], micro_batch_size=2)
    one.load_state_dict(two[0].state_dict())
    straight = RowSampler([7], micro_batch_size=2)
    assert first + [draw for _ in range(4) for draw in one.next()] == [d for _ in range(7) for d in straight.next()]


def test_shuffles_differ_by_seed_epoch_and_source() -> None:
    orders = [shuffled(50, *key).tolist() for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert len({tuple(order) for order in orders}) == 4
    assert shuffled(8, 0, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5], "the order of old runs must stay"
    assert shuffled(4, None, 0, 5).tolist() == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.05, 5)), min_size=2, max_size=4), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_a_mixture_keeps_its_weights(members: list[tuple[int, float]], n_draws: int) -> None:
    """Every prefix of the draws holds each source's share, to within the number of sources."""
    n_rows, weights = [n for n, _ in members], [w for _, w in members]
    sampler = RowSampler(n_rows, weights)
    counts = [0] * len(members)
    for n in range(1, n_draws + 1):
        counts[sampler.next()[0].source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - n * weight / sum(weights)) < len(members)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"n_rows": [4, 3]}, "the data's n_rows"),
        ({"weights": [1, 2]}, "the data's shares"),
        ({"seed": 1}, "the data's seed"),
    ],
)
def test_a_position_of_other_data_is_refused(other: dict[str, Any], said: str) -> None:
    state = RowSampler([3, 4], [1, 1]).state_dict()
    sampler = RowSampler(**{"n_rows": [3, 4], "weights": [1, 1], "seed": 0, **other})
    with pytest.raises(ConfigError, match=said):
        sampler.load_state_dict(state)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 3))
def test_a_pass_draws_every_row_once_and_equally_often_on_every_rank(n_rows: list[int], micro: int, world: int) -> None:
    """Rule 1: ranks enter the same number of batches, however the rows divide."""
    world = min(world, sum(n_rows))
    ranks = [PassSampler(n_rows, micro_batch_size=micro, rank=r, world_size=world) for r in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    drawn = [draw for _ in range(len(ranks[0])) for rank in ranks for draw in rank.next()]
    assert [draw for draw in drawn if draw != NO_ROW] == [(s, r) for s, n in enumerate(n_rows) for r in range(n)]


def test_empty_data_and_more_ranks_than_rows_are_refused(write_rows: Write) -> None:
    """Rule 11: before any model is loaded."""
    with pytest.raises(DataError, match="3 rows cannot be shared out over 4 ranks"):
        RowSampler([3], world_size=4)
    with pytest.raises(DataError, match="no row is left of 0 documents"):
        open_train_source(
            config(write_rows("none", "text", [])), pairs=False, pad_id=0, batch_size=1, micro_batch_size=1
        )
    path = write_rows("few", "text", texts([5, 6]))
    with pytest.raises(DataError, match=r"few: 2 rows are fewer than the 3 of one step"):
        open_train_source(config(path), pairs=False, pad_id=0, batch_size=3, micro_batch_size=1)
    with pytest.raises(DataError, match="kind 'text' holds no preference pairs"):
        open_train_source(config(path), pairs=True, pad_id=0, batch_size=1, micro_batch_size=1)


def same(one: TrainBatch, two: TrainBatch) -> bool:
    pairs = [(getattr(one, name), getattr(two, name)) for name in vars(one)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packing", METHODS)
def test_a_source_resumes_exactly(write_rows: Write, packing: str, workers: int) -> None:
    """Rule 5: k batches, a state through JSON, and a new source goes on, over epoch edges, with prefetching workers;
    torch's global random stream is not touched."""
    path = write_rows("store", "text", texts([5, 17, 3, 40, 1, 9, 16]))

    def source() -> Any:
        settings = config(path, packing=packing, workers=workers)
        return open_train_source(settings, pairs=False, pad_id=1, batch_size=2, micro_batch_size=2)

    before = torch.get_rng_state()
    straight = list(islice(source(), 20))
    assert torch.equal(torch.get_rng_state(), before)
    for k in (1, 7) if workers else range(1, 12):
        first = source()
        head = list(islice(first, k))
        second = source()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        both = head + list(islice(second, 20 - k))
        assert all(same(a, b) for a, b in zip(straight, both, strict=True))
    state = copy.deepcopy(first.state_dict())
    other = open_train_source(
        config(path, packing=packing, seq_len=8), pairs=False, pad_id=1, batch_size=2, micro_batch_size=2
    )
    with pytest.raises(ConfigError, match="cannot resume"):
        other.load_state_dict(state)


def test_a_chat_store_supervises_its_mask(write_rows: Write) -> None:
    """Rule 2: labels are where the mask is, in a span that begins inside a document too."""
    rows = [{"input_ids": list(range(1, 21)), "mask": [i % 2 for i in range(20)]}]
    source = open_train_source(
        config(write_rows("chat", "chat", rows), packing="simple", shuffle_seed=None),
        pairs=False, pad_id=0, batch_size=1, micro_batch_size=2,
    )  # fmt: skip
    batch = next(iter(source))
    labels = [[-100] * 16, [-100] * 16]
    labels[0] = [i + 1 if i % 2 else -100 for i in range(16)]
    labels[1][:4] = [-100, 18, -100, 20]
    assert batch.labels.tolist() == labels


def test_pairs_keep_a_common_prompt(write_rows: Write) -> None:
    """Rule 10: one cut of the prompt for both answers, its end is kept; pairs left empty are dropped and counted."""
    rows: list[dict[str, Any]] = [
        {"prompt": list(range(10, 22)), "chosen": [1, 2], "rejected": [3, 4, 5, 6, 7, 8]},
        {"prompt": [9], "chosen": [], "rejected": [1]},
        {"prompt": [30, 31], "chosen": list(range(40, 60)), "rejected": [7]},
        {"prompt": [], "chosen": [1], "rejected": [1]},
    ]
    path = write_rows("pairs", "pairs", rows)
    source = open_train_source(
        config(path, shuffle_seed=None), pairs=True, pad_id=0, batch_size=2, micro_batch_size=2, max_prompt_len=11
    )
    batch = next(iter(source))
    assert isinstance(batch, PairBatch)
    assert batch.prompt_len.tolist() == [10, 1]
    assert batch.input_ids.tolist() == [
        [*range(12, 22), 1, 2, 0, 0, 0, 0],
        [*range(12, 22), 3, 4, 5, 6, 7, 8],
        [31, *range(40, 55)],
        [31, 7, *[0] * 14],
    ]
    assert batch.n_supervised == 2 + 6 + 15 + 1
    assert source.describe() == [{"pairs": 4, "rows": 2, "empty": 2, "prompts_cut": 2, "answers_cut": 1}]
    assert source.lines() == [f"{path}: pairs 4, rows 2, empty 2, prompts cut 2, answers cut 1"]


def test_what_is_cut_or_left_out_is_told(write_rows: Write) -> None:
    """Rule 4: the policy for documents longer than a row (16 tokens here) is counted, and a run begins by saying so."""
    path = write_rows("long", "text", texts([5, 20, 0, 30]))
    for packing, overlong, said in (
        ("none", "truncate", "documents 4, rows 3, truncated 2, empty 1, tokens lost 18"),
        ("bfd", "drop", "documents 4, rows 1, dropped 2, empty 1, tokens lost 50"),
        ("bfd_split", "truncate", "documents 4, rows 4, split 2, empty 1"),
    ):
        settings = config(path, packing=packing, overlong=overlong)
        source = open_train_source(settings, pairs=False, pad_id=0, batch_size=1, micro_batch_size=1)
        assert source.lines() == [f"{path}: {said}"]


def batches_of(sources: Any) -> Iterator[TrainBatch]:
    for _, source in sources:
        yield from source


def test_validation_sees_every_row_once(write_rows: Write) -> None:
    """Rule 1: over two ranks, the last batch of one of them is empty and supervises nothing."""
    path = write_rows("valid", "text", texts([4, 5, 6, 7, 8]))
    settings = config(path, valid=[{"path": str(path)}])
    ranks = [
        list(batches_of(open_valid_sources(settings, pairs=False, pad_id=0, micro_batch_size=2, rank=r, world_size=2)))
        for r in range(2)
    ]
    assert [len(rank) for rank in ranks] == [2, 2]
    assert sum(batch.n_supervised for rank in ranks for batch in rank) == 3 + 4 + 5 + 6 + 7
    assert ranks[1][1].n_supervised == 0
    assert ranks[1][1].input_ids.shape[0] == 2
