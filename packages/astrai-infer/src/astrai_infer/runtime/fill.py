"""From a batch's lists to the arrays of a step. No tensors here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from astrai_infer.cache.pool import PagePool
from astrai_infer.runtime.executor import PromptSpan, plan_logits, rows_of
from astrai_infer.runtime.packed import Fields, Layout, Staging
from astrai_infer.runtime.shapes import Buckets, StepShape
from astrai_infer.sampling.rows import RowSampler
from astrai_infer.task import Batch, BatchItem, Task

LayoutOf = Callable[[StepShape], tuple[Layout, Any]]


@dataclass(frozen=True)
class FilledStep:
    """A step whose inputs stand in the staging."""

    shape: StepShape
    host: Fields[np.ndarray]
    tasks: list[Task]
    """Those that get a token."""
    sample_at: list[int]
    """Row of the step that each of them is."""
    spans: list[PromptSpan]
    """Logits that prompts asked for."""


class StepFiller:
    """Writes the inputs of steps.

    Padding reads and writes the scratch slot alone: it is requests in the scratch row, greedy, of tokens at position 0.
    """

    def __init__(self, pool: PagePool, buckets: Buckets, sampler: RowSampler, scratch_row: int) -> None:
        self._pool = pool
        self._buckets = buckets
        self._sampler = sampler
        self._scratch_row = scratch_row
        self._decoding: list[Task] = []
        """The tasks of the last step if all of them decoded, in its order."""
        self._rows = np.zeros(0, dtype=np.int64)
        self._positions = np.zeros(0, dtype=np.int64)
        self._at: list[int] = []
        self._batch = 0
        """Counts the changes of the tasks that decode."""

    def reset(self) -> None:
        """Take no step as the one before the next: the last one failed."""
        self._decoding = []

    def fill_padding(self, staging: Staging, shape: StepShape, layout: Layout) -> Fields[np.ndarray]:
        """Fill a step that is all padding."""
        host = staging.fields(shape, layout)
        staging.filled = None
        nobody = np.zeros(0, dtype=np.int64)
        self._fill_rows(host, nobody, nobody, shape.n_decode)
        self._pad_decodes(host, 0, shape.n_decode)
        share, rest = divmod(shape.n_chunk_tokens, max(shape.n_chunks, 1))
        lens = [share + (i < rest) for i in range(shape.n_chunks)]
        self._fill_lens(host, shape.n_decode, lens, lens)
        host.logit_rows[:] = host.qo_indptr[1:][: len(host.logit_rows)] - 1
        self._fill_chunk_tokens(host, shape.n_decode, [])
        host.host_ids[:] = 0
        self._fill_adapters(host)
        return host

    def fill_decode(self, staging: Staging, tasks: list[Task], layout_of: LayoutOf) -> FilledStep:
        """Fill a step in which every task decodes.

        A task that decodes in two steps in a row is one token longer in the second: if it was preempted in between, it
        comes back as a chunk.
        """
        n = len(tasks)
        shape = self._buckets.decode(n)
        host = staging.fields(shape, layout_of(shape)[0])
        if tasks == self._decoding:
            self._positions += 1
        else:
            self._decoding = tasks
            self._rows = np.array(rows_of(tasks), dtype=np.int64)
            self._positions = np.array([task.computed_len for task in tasks], dtype=np.int64)
            self._at = list(range(n))
            self._batch += 1
        if staging.filled != (shape, self._batch):
            self._fill_rows(host, self._rows, self._rows[:0], shape.n_decode)
            self._pad_decodes(host, n, shape.n_decode)
            host.qo_indptr[:] = np.arange(shape.n_decode + 1)
            self._fill_adapters(host, (0, tasks, 1))
            staging.filled = shape, self._batch
        self._fill_decodes(host, self._rows, self._positions)
        host.last_pos[:] = host.position_ids
        np.cumsum(host.seq_lens, out=host.kv_indptr[1:])
        return FilledStep(shape, host, tasks, self._at, [])

    def fill_verify(self, staging: Staging, batch: Batch, layout_of: LayoutOf) -> FilledStep:
        """Fill a step in which every row is the newest token of a task, or a guess behind it.

        A guessed row keeps no history, and its token reaches the next step through the host. Where a draft model guesses,
        the ids are places in its table of guesses, :attr:`DeviceDraft.guesses`.
        """
        counts = [1 + n for n in batch.draft_lens]
        n = sum(counts)
        rows = np.repeat(np.array(rows_of(batch.decodes), dtype=np.int64), counts)
        starts = np.repeat(np.array([task.computed_len for task in batch.decodes], dtype=np.int64), counts)
        depth = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
        ids: Any
        if batch.drafts is None:
            ids = depth * self._pool.n_rows + np.repeat(np.arange(len(counts)), counts)
        else:
            pairs = zip(batch.decodes, batch.drafts, strict=True)
            ids = [token for task, draft in pairs for token in (task.token_ids[-1], *draft)]
        shape = self._buckets.verify(n)
        host = self.fill_singles(staging, shape, rows, starts + depth, ids, layout_of)
        host.sample_rows[:n] = np.where(np.repeat(counts, counts) > 1, self._scratch_row, rows)
        self._fill_adapters(host, (0, batch.decodes, counts))
        tasks = [task for task, count in zip(batch.decodes, counts, strict=True) for _ in range(count)]
        return FilledStep(shape, host, tasks, list(range(n)), [])

    def fill_singles(
        self,
        staging: Staging,
        shape: StepShape,
        rows: np.ndarray,
        positions: np.ndarray,
        ids: Any,
        layout_of: LayoutOf,
    ) -> Fields[np.ndarray]:
        """Fill a step without chunks, whatever the rows were in the step before.

        Parameters
        ----------
        rows, positions
            ``[n]`` int64: whose token is fed, and where it stands; the scratch row has position 0 alone.
        ids
            The `n` tokens, if the shape has the host name them.
        """
        self._decoding = []
        n = len(rows)
        host = staging.fields(shape, layout_of(shape)[0])
        staging.filled = None
        self._fill_rows(host, rows, rows[:0], shape.n_decode)
        self._pad_decodes(host, n, shape.n_decode)
        self._fill_decodes(host, rows, positions)
        if len(host.host_ids):
            host.host_ids[:n] = ids
            host.host_ids[n:] = 0
        host.qo_indptr[:] = np.arange(shape.n_decode + 1)
        host.last_pos[:] = host.position_ids
        host.kv_indptr[0] = 0
        np.cumsum(host.seq_lens, out=host.kv_indptr[1:])
        return host

    def fill_mixed(self, staging: Staging, batch: Batch, layout_of: LayoutOf, *, with_spans: bool = True) -> FilledStep:
        """Fill a step with chunks of prompts, and the logits that their requests want of them, or without these."""
        self._decoding = []
        decodes, chunks = batch.decodes, batch.chunks
        lens = [item.n_tokens for item in chunks]
        n_decode, n_chunks, n_tokens = len(decodes), len(chunks), sum(lens)
        shape = self._buckets.mixed(n_decode, n_chunks, n_tokens)
        plan = None
        if with_spans and any(item.task.params.prompt_logprobs is not None for item in chunks):
            plan = plan_logits(batch.items)
            if plan.spans:
                shape = replace(
                    shape,
                    n_decode=n_decode,
                    n_chunk_tokens=n_tokens,
                    n_chunks=n_chunks,
                    n_logits=len(plan.rows),
                    is_bucket=False,
                )
        host = staging.fields(shape, layout_of(shape)[0])
        staging.filled = None
        first = shape.n_decode
        rows = np.array(rows_of(decodes), dtype=np.int64)
        chunk_rows = np.array(rows_of([item.task for item in chunks]), dtype=np.int64)
        self._fill_rows(host, rows, chunk_rows, first, [item.samples for item in chunks])
        self._pad_decodes(host, n_decode, first)
        self._fill_decodes(host, rows, np.array([task.computed_len for task in decodes], dtype=np.int64))
        # What is left of the bucket: chunks of one token, and one that takes the rest.
        pads = [1] * (shape.n_chunks - n_chunks)
        if pads:
            pads[-1] += shape.n_chunk_tokens - n_tokens - len(pads)
        ends = [item.start + item.n_tokens for item in chunks]
        self._fill_lens(host, first, [*lens, *pads], [*ends, *pads])
        self._fill_chunk_tokens(host, first, chunks)
        if shape.verifies:
            host.host_ids[:n_decode] = [task.token_ids[-1] for task in decodes]
            host.host_ids[n_decode:first] = 0
        self._fill_adapters(host, (0, decodes, 1), (first, [item.task for item in chunks], lens))
        at = [*range(n_decode), *(first + i for i, item in enumerate(chunks) if item.samples)]
        if plan is not None and plan.spans:
            host.logit_rows[:] = plan.rows
            host.sample_at[:] = 0
            host.sample_at[at] = plan.sample_at
        else:
            host.logit_rows[:] = host.qo_indptr[1:] - 1
        tasks = [*decodes, *(item.task for item in chunks if item.samples)]
        return FilledStep(shape, host, tasks, at, [] if plan is None else plan.spans)

    def _fill_rows(
        self,
        host: Fields[np.ndarray],
        rows: np.ndarray,
        chunk_rows: np.ndarray,
        first: int,
        samples: Sequence[bool] = (),
    ) -> None:
        """Write who the requests are and how they are sampled; chunks begin at request `first`."""
        end = first + len(chunk_rows)
        host.req_indices[:] = self._scratch_row
        host.req_indices[: len(rows)] = rows
        host.req_indices[first:end] = chunk_rows
        host.sample_rows[:] = host.req_indices
        host.sample_rows[first:end] = np.where(samples, chunk_rows, self._scratch_row)
        host.floats[:] = self._sampler.floats[host.sample_rows]
        host.ints[:] = self._sampler.ints[host.sample_rows]

    def _fill_lens(self, host: Fields[np.ndarray], first: int, lens: list[int], ends: list[int]) -> None:
        """Write the lengths of the chunks behind the decoding rows, and what follows from all lengths."""
        host.seq_lens[first:] = ends
        host.qo_indptr[: first + 1] = np.arange(first + 1)
        host.qo_indptr[first + 1 :] = first + np.cumsum(lens, dtype=np.int32)
        host.kv_indptr[0] = 0
        np.cumsum(host.seq_lens, out=host.kv_indptr[1:])
        host.last_pos[:] = host.seq_lens - 1

    def _pad_decodes(self, host: Fields[np.ndarray], n: int, size: int) -> None:
        host.position_ids[n:size] = 0
        host.seq_lens[n:size] = 1
        for locs, group in zip(host.out_cache_locs, self._pool.groups, strict=True):
            locs[n:size] = group.req_to_token.scratch_slot

    def _fill_decodes(self, host: Fields[np.ndarray], rows: np.ndarray, positions: np.ndarray) -> None:
        n = len(rows)
        host.position_ids[:n] = positions
        host.seq_lens[:n] = positions + 1
        for locs, group in zip(host.out_cache_locs, self._pool.groups, strict=True):
            locs[:n] = group.req_to_token.host[rows, positions]

    def _fill_adapters(self, host: Fields[np.ndarray], *parts: tuple[int, Sequence[Task], int | Sequence[int]]) -> None:
        """Write whose adapter each token has; padding has none.

        Parameters
        ----------
        parts
            First token, tasks, and how many tokens each of them has.
        """
        ids = host.adapter_ids
        if not len(ids):
            return
        ids[:] = -1
        for first, tasks, counts in parts:
            slots = np.repeat(np.array([task.adapter_slot for task in tasks], dtype=np.int32), counts)
            ids[first : first + len(slots)] = slots

    def _fill_chunk_tokens(self, host: Fields[np.ndarray], first: int, chunks: Sequence[BatchItem]) -> None:
        """Write ids, positions and slots of the tokens behind the decoding rows."""
        at, ids = first, host.host_ids[len(host.host_ids) - (len(host.position_ids) - first) :]
        for item in chunks:
            row, start, end = item.task.row, item.start, item.start + item.n_tokens
            stop = at + item.n_tokens
            ids[at - first : stop - first] = item.task.token_ids[start:end]
            host.position_ids[at:stop] = np.arange(start, end)
            for locs, group in zip(host.out_cache_locs, self._pool.groups, strict=True):
                locs[at:stop] = group.req_to_token.host[row, start:end]
            at = stop
        ids[at - first :] = 0
        host.position_ids[at:] = 0
        for locs, group in zip(host.out_cache_locs, self._pool.groups, strict=True):
            locs[at:] = group.req_to_token.scratch_slot
