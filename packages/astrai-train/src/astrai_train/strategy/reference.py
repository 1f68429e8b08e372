"""Where the reference's log-probabilities come from: a frozen copy, the model without its adapter, or a file."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from astrai_core.checkpoint.atomic import explain_write_error
from astrai_core.checkpoint.weights import system_errors
from astrai_core.errors import CheckpointError, DataError
from astrai_core.model.lora import adapters_off
from astrai_train.data.collate import IGNORE_LABEL, PADDING_DOC, TrainBatch
from astrai_train.strategy.logprobs import batch_logprobs

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM


class Reference(ABC):
    """Scores rows as the model before training would."""

    @abstractmethod
    def __call__(self, batch: TrainBatch) -> Tensor:
        """Return the log-probability of each row's supervised tokens together, ``[rows]`` float32 without graph.

        Parameters
        ----------
        batch
            On the host.
        """


class FrozenCopy(Reference):
    """A model of its own, in evaluation mode, that nothing optimises.

    Parameters
    ----------
    model
        Not shared with anyone; it is frozen here.
    chunk_tokens
        Tokens whose logits exist at once.
    """

    def __init__(self, model: CausalLM, chunk_tokens: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self.chunk_tokens = chunk_tokens

    @torch.no_grad()
    def __call__(self, batch: TrainBatch) -> Tensor:
        """Score by the copy."""
        return batch_logprobs(self.model, batch, self.chunk_tokens).sums


class AdapterOff(Reference):
    """The model that is trained, without its adapters and their dropout: its base weights never change.

    Parameters
    ----------
    model
        With adapters.
    chunk_tokens
        Tokens whose logits exist at once.
    """

    def __init__(self, model: CausalLM, chunk_tokens: int) -> None:
        self.model = model
        self.chunk_tokens = chunk_tokens

    @torch.no_grad()
    def __call__(self, batch: TrainBatch) -> Tensor:
        """Score with the adapters off."""
        with adapters_off(self.model), evaluating(self.model):
            return batch_logprobs(self.model, batch, self.chunk_tokens).sums


class CachedLogprobs(Reference):
    """Log-probabilities that were computed before training, by the contents of a row.

    Parameters
    ----------
    keys
        ``[rows]`` uint64, as :func:`row_keys` gives them, in any order.
    values
        ``[rows]`` float32, in nats.
    device
        Where the values are wanted.
    """

    def __init__(self, keys: NDArray[np.uint64], values: NDArray[np.float32], device: torch.device) -> None:
        order = np.argsort(keys)
        self.keys, self.values = keys[order], values[order]
        self.device = device

    def __len__(self) -> int:
        return len(self.keys)

    def has(self, batch: TrainBatch) -> bool:
        """Whether every row of a host batch is known."""
        keys = row_keys(batch)
        # Not np.isin, which sorts all keys again for every batch.
        places = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return bool((self.keys[places] == keys).all())

    def __call__(self, batch: TrainBatch) -> Tensor:
        """Look the rows up.

        Raises
        ------
        DataError
            If a row is not known.
        """
        if not self.has(batch):
            raise DataError("a row has no cached reference; the data changed during the run, start it again")
        found = self.values[np.searchsorted(self.keys, row_keys(batch))]
        return torch.from_numpy(found).to(self.device, non_blocking=True)

    def extended(self, keys: Iterable[NDArray[np.uint64]], values: Iterable[NDArray[np.float32]]) -> CachedLogprobs:
        """Return a cache with further rows."""
        more, first = np.unique(np.concatenate([self.keys, *keys]), return_index=True)
        return CachedLogprobs(more, np.concatenate([self.values, *values])[first], self.device)

    def save(self, path: Path, model: str) -> None:
        """Write the cache whole or not at all.

        Parameters
        ----------
        model
            Digest of the reference; only a cache of the same model is read back.

        Raises
        ------
        CheckpointError
            If the file cannot be written.
        """
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with system_errors(path):
                save_file({"keys": self.keys, "values": self.values}, temporary, {"model": model})
            temporary.replace(path)
        except OSError as error:
            raise CheckpointError(explain_write_error(error, path)) from None
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, model: str, device: torch.device) -> CachedLogprobs:
        """Read what was saved for the same reference; an empty cache if there is none.

        Raises
        ------
        CheckpointError
            If the file is damaged.
        """
        nothing = cls(EMPTY_ROW, np.zeros(1, np.float32), device)
        if not path.exists():
            return nothing
        try:
            with safe_open(path, framework="np") as file:
                if (file.metadata() or {}).get("model") != model:
                    return nothing
                return cls(file.get_tensor("keys"), file.get_tensor("values"), device)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged ({error}); remove it, and it is computed again") from None


def _digest(ids: Tensor, supervised: Tensor) -> int:
    digest = hashlib.blake2b(ids.numpy().tobytes(), digest_size=8)
    digest.update(supervised.to(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


EMPTY_ROW = np.array([_digest(torch.zeros(0, dtype=torch.int64), torch.zeros(0))], np.uint64)
"""The key of a row without a token, which fills up a batch; its log-probability is 0."""


def row_keys(batch: TrainBatch) -> NDArray[np.uint64]:
    """Return a digest of each row of a host batch, ``[rows]``: of its tokens and of which are supervised.

    What is not in the row (its place, its neighbours, padding) does not matter, and all that cuts it (tokenizer, chat
    template, row and prompt length) is in its tokens.
    """
    lengths = (batch.doc_ids != PADDING_DOC).sum(1).tolist()
    rows = zip(batch.input_ids, batch.labels != IGNORE_LABEL, lengths, strict=True)
    return np.array([_digest(ids[:n], mask[:n]) for ids, mask, n in rows], np.uint64)


@torch.no_grad()
def complete_cache(
    cache: CachedLogprobs, batches: Iterable[TrainBatch], model: CausalLM, chunk_tokens: int
) -> CachedLogprobs:
    """Return the cache with the rows of `batches` that it lacked, scored by `model` in evaluation mode."""
    keys, values = [], []
    with evaluating(model):
        for batch in batches:
            if not cache.has(batch):
                keys.append(row_keys(batch))
                values.append(batch_logprobs(model, batch, chunk_tokens).sums.cpu().numpy())
    return cache.extended(keys, values)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode; afterwards each has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
