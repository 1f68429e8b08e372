"""The step on a device whose queue runs ahead of the host: launched without waiting, read one step later.

Host and device share nothing but one copy a step in each direction. The tokens stay on the device: the sampler writes
them where the next step's embedding reads them, so no step waits for the host to see one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from astrai_core.attention.backend import AttentionBackend
from astrai_core.model.adapter_slots import AdapterSlots
from astrai_core.model.transformer import CausalLM
from astrai_core.model.whole_step import WholeStep
from astrai_core.types import TokenLogprobs
from astrai_infer.cache.pool import PagePool
from astrai_infer.runtime.device_draft import DeviceDraft
from astrai_infer.runtime.fill import StepFiller
from astrai_infer.runtime.graph import Capture, CudaGraphContext
from astrai_infer.runtime.packed import Fields, Layout, Packed, Staging
from astrai_infer.runtime.paged import PagedModel
from astrai_infer.runtime.shapes import MOST_CHUNKS, Buckets, StepShape
from astrai_infer.sampling.pipeline import logprob_entries, logprob_tensors
from astrai_infer.sampling.rows import VARIANTS, RowFields, RowSampler, Variant, to_host
from astrai_infer.task import Batch, StepResult, Task


@dataclass
class Flight:
    """A step that was launched. Its result is read once."""

    staging: Staging
    n_tokens: int
    """Tokens that come back, padding included."""
    sample_at: list[int]
    """Which of them belong to a task."""
    logprobs: Callable[[], list[TokenLogprobs | None]]
    prompt_logprobs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    drafts: Callable[[], list[tuple[int, ...]]] = list
    """The guesses of a step that verifies."""

    def result(self) -> StepResult:
        """Wait until the step has ended, and read what it sampled."""
        self.staging.wait()
        tokens = self.staging.tokens[: self.n_tokens].tolist()
        if len(self.sample_at) != self.n_tokens:
            tokens = [tokens[i] for i in self.sample_at]
        prompts = {i: logprob_entries(*tensors) for i, tensors in self.prompt_logprobs.items()}
        return StepResult(tokens, self.logprobs(), prompts, self.drafts())


class DeviceExecutor:
    """Owns the model's side of a step where the device runs behind the host; the scheduler decides who runs.

    A step is a copy of its inputs, the forward work up to the logits, the sampling, and a copy of the tokens back; both
    works are graphs for the shapes that :class:`~astrai_infer.runtime.shapes.Buckets` knows, and are padded to the same
    shapes without graphs, so that the results agree bit by bit (row G4). In a steady step nothing is allocated and
    nothing waits (rows W1, C5).

    Parameters
    ----------
    n_rows
        Requests that can run at once.
    max_tokens
        Most tokens of a step.
    capture
        How work is captured; None: it never is.
    deterministic
        Run the model, and the draft model, in torch's deterministic mode.
    adapters
        Room for adapters on the model; every step then reads the slot of each of its tokens.
    draft
        A draft model, which makes the guesses of steps that verify. It runs without adapters.
    max_draft_tokens
        Most guesses for a request in a step; 0: no step verifies.
    whole_step
        Runs the model's decode steps that it takes as one kernel; it is this executor's own.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: PagePool,
        backend: AttentionBackend,
        n_rows: int,
        max_tokens: int,
        capture: Capture | None,
        *,
        deterministic: bool = False,
        adapters: AdapterSlots | None = None,
        draft: CausalLM | None = None,
        max_draft_tokens: int = 0,
        whole_step: WholeStep | None = None,
    ) -> None:
        self.model = model
        self.whole_step = whole_step
        self.adapters = adapters
        self.pool = pool
        self.backend = backend
        self._paged = PagedModel(
            model, pool, backend, deterministic=deterministic, adapters=adapters, whole_step=whole_step
        )
        self.buckets = Buckets(n_rows, pool.max_seq_len, max_tokens, verifies=max_draft_tokens > 0)
        self.sampler = RowSampler(n_rows + 1, model.config.vocab_size, model.device)
        self.graphs = CudaGraphContext(capture)
        self.draft: DeviceDraft | None = None
        if draft is not None:
            self.draft = DeviceDraft(
                draft,
                pool,
                backend,
                self.buckets,
                self.sampler,
                max_tokens,
                max_draft_tokens,
                capture,
                deterministic=deterministic,
            )
        # Graphs and events go to the current device, which in a new thread is the first one.
        self._on_device = torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext()
        n_groups = len(pool.groups)
        most = max(max_tokens, self.buckets.most_chunk_tokens)
        # The largest step: all rows decode or have chunks, which padding at most quadruples, and every token has logits.
        largest = StepShape(n_rows, most, 4 * n_rows, n_logits=most + n_rows, verifies=True, is_bucket=False)
        n_deltas = 4 * max_tokens + 64 * n_rows
        n_bytes = Layout.of(largest, n_groups, adapters is not None).n_bytes
        self.packed = Packed(
            n_bytes, n_deltas, largest.n_requests, n_groups, model.device, has_adapters=adapters is not None
        )
        self.ids = torch.zeros(max(largest.n_tokens, largest.n_requests), dtype=torch.int64, device=model.device)
        """The next step's first input ids: the last step's tokens, in its order; behind the decoding rows, chunks."""
        # Each graph of a decode step keeps its logits; those of the many mixed shapes share this memory.
        self.mixed_logits = torch.empty(
            (n_rows + MOST_CHUNKS, model.config.vocab_size), dtype=model.dtype, device=model.device
        )
        self.last_token = torch.zeros(n_rows + 1, dtype=torch.int64, device=model.device)
        """Newest token of each row, as of the last change of the batch."""
        self._filler = StepFiller(pool, self.buckets, self.sampler, n_rows)
        self._held: tuple[int, Tensor, np.ndarray] | None = None
        """Of the tokens in `ids`: how many, and their rows on the device and on the host."""
        for group in pool.groups:
            group.req_to_token.pending = []

    def prepare(self) -> None:
        """Capture the shapes that every engine needs; only scratch slots of the pool are written."""
        for _ in range(3):  # the first run loads what the second captures; sampling is captured behind captured logits
            for shape in self.buckets.first:
                self.run_padding(shape)

    @torch.inference_mode()
    def run_padding(self, shape: StepShape) -> None:
        """Run a step of nothing but padding, greedy and random."""
        with self._on_device:
            staging = self.packed.next()
            layout, fields = self.packed.layout(shape)
            host = self._filler.fill_padding(staging, shape, layout)
            self.packed.send(staging, layout, [])
            logits = self._forward(shape, fields, host)
            for variant in VARIANTS:
                self._sample(shape, fields, logits, variant)
            staging.record()
            if self.draft is not None:
                self.draft.run_padding(shape)
        self._held = None

    def forget(self) -> None:
        """Drop what holds addresses of the pool: its memory is about to go or to move."""
        self.graphs.forget()
        self._paged.forget()
        if self.draft is not None:
            self.draft.forget()

    def admit(self, task: Task) -> None:
        """Write a task's sampling parameters into its row."""
        self.sampler.admit(task)

    def run(self, batch: Batch) -> StepResult:
        """Launch a step and wait for its result."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Flight:
        """Put a step into the device's queue: feed the batch's tokens and sample for the tasks that reach their last one.

        At most two steps are in the queue: the result of the one before the last must have been read. They go to the
        current stream of the calling thread, so all callers must have the same one.
        """
        with self._on_device:
            return self._launch(batch)

    def _launch(self, batch: Batch) -> Flight:
        staging = self.packed.next()
        try:
            if batch.draft_lens:
                step = self._filler.fill_verify(staging, batch, self.packed.layout)
            elif batch.chunks:
                step = self._filler.fill_mixed(staging, batch, self.packed.layout)
            else:
                step = self._filler.fill_decode(staging, batch.decodes, self.packed.layout)
            layout, fields = self.packed.layout(step.shape)
            self._keep_tokens(step.shape, step.host.req_indices)
            deltas = self._take_deltas()
            on_device = self.packed.send(staging, layout, [delta for _, delta in deltas])
            for (table, _), index, values in zip(deltas, on_device[::2], on_device[1::2], strict=True):
                table.view(-1).index_copy_(0, index, values)
            self._place_tokens(step.shape, fields)
            if self.draft is not None and batch.draft_lens:
                self.draft.guess(batch.decodes, batch.draft_lens)
            logits = self._forward(step.shape, fields, step.host)
            prompt_logprobs = {
                span.item - len(batch.decodes): to_host(
                    *logprob_tensors(
                        logits[span.first : span.first + len(span.predicted)],
                        torch.tensor(span.predicted, device=logits.device),
                        span.n_top,
                    )
                )
                for span in step.spans
            }
            logprobs = self._sample_for(step.shape, fields, logits, step.tasks, step.sample_at)
        except BaseException:
            self._held = None
            self._filler.reset()
            raise
        n = step.shape.n_requests
        staging.tokens[:n].copy_(self.ids[:n], non_blocking=True)
        staging.record()
        # Of several tokens for one row, the host knows which counts.
        self._held = None if step.shape.verifies else (n, fields.sample_rows, step.host.sample_rows)
        drafts: Callable[[], list[tuple[int, ...]]] = partial(list, batch.drafts or ())
        if (draft := self.draft) is not None:
            if batch.draft_lens:
                drafts = partial(draft.guessed, batch.draft_lens)
            else:  # behind the step's tokens, which are not kept waiting
                draft.follow(batch)
        return Flight(staging, n, step.sample_at, logprobs, prompt_logprobs, drafts)

    def _keep_tokens(self, shape: StepShape, rows: np.ndarray) -> None:
        """Bring the tokens that the last step sampled to their rows, unless they stand where this step wants them.

        Their rows on the device are overwritten by this step's inputs, so it is done before those are sent.
        """
        if self._held is None:
            return
        n, rows_on_device, rows_on_host = self._held
        if shape.n_chunks == 0 and np.array_equal(rows_on_host, rows):
            return
        self.last_token.index_copy_(0, rows_on_device, self.ids[:n])
        self._held = None

    def _place_tokens(self, shape: StepShape, fields: Fields[Tensor]) -> None:
        if self._held is None and shape.n_decode and not shape.verifies:
            rows = fields.req_indices[: shape.n_decode]
            torch.index_select(self.last_token, 0, rows, out=self.ids[: shape.n_decode])

    def _take_deltas(self) -> list[tuple[Tensor, tuple[np.ndarray, np.ndarray]]]:
        """Collect what changed in the tables since the last step: table, flat indices (int64), values (int32)."""
        deltas = []
        room = self.packed.n_deltas
        for group in self.pool.groups:
            table = group.req_to_token
            changes = table.pending
            if not changes:
                continue
            room -= sum(end - start for _, start, end in changes)
            if room < 0:  # a rare burst, of long prefixes that were found: row by row
                for row, start, end in changes:
                    table.table[row, start:end].copy_(torch.from_numpy(table.host[row, start:end]))
            else:
                width = table.max_seq_len
                index = np.concatenate(
                    [np.arange(row * width + start, row * width + end) for row, start, end in changes]
                )
                deltas.append((table.table, (index, table.host.reshape(-1)[index])))
            changes.clear()
        return deltas

    def _forward(self, shape: StepShape, fields: Fields[Tensor], host: Fields[np.ndarray]) -> Tensor:
        """Run the model, or replay that; return the logits ``[logits, vocab]``."""
        cache = self._paged.cache(shape, fields, host)

        def work() -> Tensor:
            ids, n_named = self.ids[: shape.n_tokens], len(fields.host_ids)
            if shape.verifies and not shape.n_chunks and self.draft is not None:
                torch.index_select(self.draft.guesses.view(-1), 0, fields.host_ids, out=ids)
            elif n_named:
                ids[shape.n_tokens - n_named :].copy_(fields.host_ids)
            logits = self._paged.logits(ids, shape, fields, cache)
            if not (shape.is_bucket and shape.n_chunks):
                return logits
            return self.mixed_logits[: shape.n_requests].copy_(logits)

        return self.graphs.run(("forward", shape) if shape.is_bucket else None, work)

    def _sample(self, shape: StepShape, fields: Fields[Tensor], logits: Tensor, variant: Variant) -> RowFields:
        rows = RowFields(fields.sample_rows, fields.last_pos, fields.floats, fields.ints)
        out = self.ids[: shape.n_requests]
        # Only captured logits stand at an address that stays.
        key = ("sample", shape, variant) if self.graphs.has_graph(("forward", shape)) else None
        self.graphs.run(key, lambda: self.sampler.sample(variant, logits, rows, out))
        return rows

    def _sample_for(
        self, shape: StepShape, fields: Fields[Tensor], logits: Tensor, tasks: Sequence[Task], at: Sequence[int]
    ) -> Callable[[], list[TokenLogprobs | None]]:
        """Sample for the tasks of a step; return what gives their log-probabilities when it has ended."""
        if shape.n_logits is not None:
            logits = logits.index_select(0, fields.sample_at)
        variant = self.sampler.variant(tasks)
        rows = self._sample(shape, fields, logits, variant)
        tokens = self.ids[: shape.n_requests]
        if any(self.sampler.needs_amending(task.params) for task in tasks):
            self.sampler.amend(tasks, at, logits, rows, tokens)
        logprobs: Callable[[], list[TokenLogprobs | None]] = _no_logprobs(len(tasks))
        if any(task.params.logprobs is not None for task in tasks):
            logprobs = self.sampler.logprobs(tasks, at, logits, rows, tokens)
        if variant == "history":
            self.graphs.run(("record", shape) if shape.is_bucket else None, lambda: self.sampler.record(rows, tokens))
        return logprobs


def _no_logprobs(n: int) -> Callable[[], list[TokenLogprobs | None]]:
    return lambda: [None] * n
