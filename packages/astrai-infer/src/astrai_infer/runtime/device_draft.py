"""The draft model where the device runs behind the host: its tokens stay on the device until the model has judged them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from astrai_core.attention.backend import AttentionBackend
from astrai_core.model.transformer import CausalLM
from astrai_infer.cache.pool import PagePool
from astrai_infer.runtime.drafting import DRAFT, catching_up
from astrai_infer.runtime.executor import rows_of
from astrai_infer.runtime.fill import StepFiller
from astrai_infer.runtime.graph import Capture, CudaGraphContext
from astrai_infer.runtime.packed import Fields, Layout, Packed
from astrai_infer.runtime.paged import PagedModel
from astrai_infer.runtime.shapes import Buckets, StepShape
from astrai_infer.sampling.rows import VARIANTS, RowFields, RowSampler, Variant
from astrai_infer.task import Batch, BatchItem, Task


class DeviceDraft:
    """Runs the draft model's passes, see :class:`~astrai_infer.runtime.drafting.DraftRunner`; nothing here waits.

    A pass is a copy of its inputs and the forward work with the sampling behind it, which is one graph for each shape and
    way of sampling. The sampled tokens are the next pass's input where they stand.

    Parameters
    ----------
    sampler
        The executor's: requests are drawn for with the same parameters.
    max_tokens
        Most tokens of a step of the model.
    most
        Guesses for a request in a step.
    deterministic
        Run the model in torch's deterministic mode, as the one that it guesses for: if they are equal, so are their bits.

    Attributes
    ----------
    guesses
        ``[1 + most, n_rows]`` int64: the newest token of each of the step's tasks, and the guesses that follow it.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: PagePool,
        backend: AttentionBackend,
        buckets: Buckets,
        sampler: RowSampler,
        max_tokens: int,
        most: int,
        capture: Capture | None,
        *,
        deterministic: bool = False,
    ) -> None:
        device, n_rows = model.device, pool.n_rows
        self._paged = PagedModel(model, pool, backend, DRAFT, deterministic=deterministic)
        self._buckets = buckets
        self._sampler = sampler
        self.graphs = CudaGraphContext(capture if model.supports_graph else None)
        self._filler = StepFiller(pool, buckets, sampler, n_rows)
        self._scratch_row = n_rows
        # Each row may be one token behind; padding at most quadruples the chunks.
        most_tokens = max(max_tokens + n_rows, buckets.most_chunk_tokens)
        largest = StepShape(n_rows, most_tokens, 4 * n_rows, verifies=True, is_bucket=False)
        n_groups = len(pool.groups)
        n_bytes = Layout.of(largest, n_groups).n_bytes
        self._packed = Packed(n_bytes, 0, 0, n_groups, device, n_steps=most + 1)
        self._ids = torch.zeros(largest.n_tokens, dtype=torch.int64, device=device)
        self.guesses = torch.zeros((1 + most, n_rows), dtype=torch.int64, device=device)
        self._on_host = torch.zeros_like(self.guesses, device="cpu", pin_memory=device.type == "cuda")

    def run_padding(self, shape: StepShape) -> None:
        """Run the passes beside a step of that shape, of nothing but padding."""
        shapes = [shape] if shape.n_chunks else [shape, self._buckets.decode(shape.n_decode)]
        for each in shapes:
            staging = self._packed.next()
            layout, fields = self._packed.layout(each)
            host = self._filler.fill_padding(staging, each, layout)
            self._packed.send(staging, layout, [])
            for variant in (None,) if shape.n_chunks else VARIANTS:
                self._pass(each, fields, host, variant)
            staging.record()

    def forget(self) -> None:
        """Drop what holds addresses of the pool."""
        self.graphs.forget()
        self._paged.forget()

    def follow(self, batch: Batch) -> None:
        """Feed what a step with chunks feeds."""
        staging = self._packed.next()
        # What is one token is a row that decodes, as in the model's step; chunks of a captured step are few.
        single = [task for task in batch.decodes if not task.draft_lag]
        behind = [BatchItem(task, task.computed_len, 1, False) for task in batch.decodes if task.draft_lag]
        fed = Batch(single, catching_up(behind + batch.chunks))
        step = self._filler.fill_mixed(staging, fed, self._packed.layout, with_spans=False)
        layout, fields = self._packed.layout(step.shape)
        self._packed.send(staging, layout, [])
        self._pass(step.shape, fields, step.host, None)
        staging.record()

    def guess(self, tasks: list[Task], lens: list[int]) -> None:
        """Launch the passes that put ``lens[i]`` guesses for each task below its newest token in :attr:`guesses`."""
        n, counts = len(tasks), np.array(lens)
        rows = np.array(rows_of(tasks), dtype=np.int64)
        starts = np.array([task.computed_len for task in tasks], dtype=np.int64)
        variant: Variant = "greedy" if all(t.params.greedy for t, k in zip(tasks, lens, strict=True) if k) else "random"
        # The token that a task is behind stands behind the newest ones of all: order is nothing to the attention.
        behind = np.array([i for i, task in enumerate(tasks) if task.draft_lag], dtype=np.int64)
        ids = [task.token_ids[-1] for task in tasks] + [tasks[i].token_ids[-2] for i in behind]
        first = np.concatenate([rows, rows[behind]]), np.concatenate([starts, starts[behind] - 1])
        n_passes = max(1, *lens)
        for depth in range(n_passes):
            if depth == 0:
                (whose, positions), shape = first, self._buckets.verify(len(ids))
            else:
                guessing = counts > depth
                whose, positions = np.where(guessing, rows, self._scratch_row), np.where(guessing, starts + depth, 0)
                shape = self._buckets.decode(n)
            staging = self._packed.next()
            host = self._filler.fill_singles(staging, shape, whose, positions, ids, self._packed.layout)
            layout, fields = self._packed.layout(shape)
            self._packed.send(staging, layout, [])
            if depth == 0:
                self.guesses[0, : shape.n_decode].copy_(fields.host_ids)
            self._pass(shape, fields, host, variant if counts.any() else None)
            self.guesses[depth + 1].copy_(self._ids[: self.guesses.shape[1]])
            staging.record()
        self._on_host[: n_passes + 1].copy_(self.guesses[: n_passes + 1], non_blocking=True)

    def guessed(self, lens: list[int]) -> list[tuple[int, ...]]:
        """Return the guesses of the last step, when it has ended."""
        columns = self._on_host[1 : 1 + max(1, *lens), : len(lens)].T.tolist()
        return [tuple(column[:k]) for column, k in zip(columns, lens, strict=True)]

    def _pass(
        self, shape: StepShape, fields: Fields[Tensor], host: Fields[np.ndarray], variant: Variant | None
    ) -> None:
        """Feed a pass's tokens, and sample behind each of them or of none."""
        cache = self._paged.cache(shape, fields, host)

        def work() -> None:
            ids, n_named = self._ids[: shape.n_tokens], len(fields.host_ids)
            if n_named:
                ids[shape.n_tokens - n_named :].copy_(fields.host_ids)
            logits = self._paged.logits(ids, shape, fields, cache)
            if variant is not None:
                rows = RowFields(fields.sample_rows, fields.last_pos, fields.floats, fields.ints)
                self._sampler.sample(variant, logits, rows, self._ids[: shape.n_requests])

        self.graphs.run((shape, variant) if shape.is_bucket else None, work)
