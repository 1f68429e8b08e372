"""A model's passes over the pool, with every tensor of a shape where it always is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from astrai_core.attention.backend import AttentionBackend
from astrai_core.attention.metadata import AttentionMetadata, KVCache
from astrai_core.model.adapter_slots import AdapterSlots
from astrai_core.model.transformer import CausalLM
from astrai_core.model.whole_step import WholeStep
from astrai_infer.cache.pool import PagePool
from astrai_infer.runtime.packed import Fields
from astrai_infer.runtime.shapes import StepShape


class PagedModel:
    """Runs a model on the fields of a step.

    Parameters
    ----------
    which
        Whose storage of the pool it reads and writes: 0 the model's, 1 the draft model's.
    deterministic
        Run in torch's deterministic mode.
    adapters
        Room for adapters on the model; every step then reads the slot of each of its tokens.
    whole_step
        Runs the decode steps that it takes as one kernel.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: PagePool,
        backend: AttentionBackend,
        which: int = 0,
        *,
        deterministic: bool = False,
        adapters: AdapterSlots | None = None,
        whole_step: WholeStep | None = None,
    ) -> None:
        self.model = model
        self._whole_step = whole_step
        self._pool = pool
        self._backend = backend
        self._which = which
        self._deterministic = deterministic
        self._adapters = adapters
        self._caches: dict[StepShape, KVCache] = {}

    def forget(self) -> None:
        """Drop what holds addresses of the pool."""
        self._caches.clear()
        if self._whole_step is not None:
            self._whole_step.forget()

    def cache(self, shape: StepShape, fields: Fields[Tensor], host: Fields[np.ndarray]) -> KVCache:
        """Return the view of a step; for a bucket it is the same each time."""
        cache = self._caches.get(shape)
        if cache is None:
            groups = [
                AttentionMetadata(
                    phase="prefill" if shape.n_chunks else "decode",
                    req_to_token=group.req_to_token.table,
                    req_indices=fields.req_indices,
                    seq_lens=fields.seq_lens,
                    kv_indptr=fields.kv_indptr,
                    qo_indptr=fields.qo_indptr,
                    out_cache_loc=out_cache_loc,
                    seq_lens_host=(1,) * shape.n_requests,
                    q_lens_host=(1,) * shape.n_requests,
                    window=group.spec.window,
                    page_size=self._pool.page_size,
                    contiguous=self._pool.contiguous,
                    n_single=shape.n_decode,
                    reads_own_keys=shape.verifies,
                )
                for group, out_cache_loc in zip(self._pool.groups, fields.out_cache_locs.unbind(0), strict=True)
            ]
            cache = self._pool.view(groups, self._which)
            if shape.is_bucket:
                self._caches[shape] = cache
        if not self._backend.supports_graph():
            for metadata in cache.groups:
                metadata.seq_lens_host = tuple(host.seq_lens.tolist())
                metadata.q_lens_host = tuple(np.diff(host.qo_indptr).tolist())
        return cache

    def logits(self, ids: Tensor, shape: StepShape, fields: Fields[Tensor], cache: KVCache) -> Tensor:
        """Feed ``ids``, ``[tokens]`` int64; return ``[logits, vocab]``. Can be captured."""
        rows = fields.logit_rows if shape.n_chunk_tokens else None
        adapted = nullcontext() if self._adapters is None else self._adapters.applied(fields.adapter_ids)
        whole = self._whole_step
        with deterministic_algorithms(self._deterministic), adapted:
            if whole is not None and rows is None and whole.takes(ids, cache):
                return whole.run(ids, fields.position_ids, cache)
            return self.model.forward_paged(ids, fields.position_ids, cache, self._backend, rows)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Switch torch's deterministic mode on inside; new memory is not filled, since none is read before it was written."""
    if not enabled:
        yield
        return
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
