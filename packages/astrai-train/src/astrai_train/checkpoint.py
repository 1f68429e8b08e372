"""Checkpoints of a run: Hugging Face directories with the training state beside the weights (training rules 5 to 7).

``checkpoints/step_N/`` holds the state after the update of step N: the weights as transformers loads them (of a LoRA
run the adapter, as PEFT loads it), ``training_state.pt`` with plain values, and ``training_state/`` with the tensors,
in the sharded files of torch.distributed.checkpoint. It is written under another name, synced, and renamed; its last
file, ``checkpoint.json``, lists the others with their sizes and digests. A directory without that list, or at odds
with it, is damaged.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from astrai_core.checkpoint.adapter import adapter_tensors, write_adapter
from astrai_core.checkpoint.atomic import atomic_directory, committed, explain_write_error, scratch_directory
from astrai_core.checkpoint.hf_adapter import checkpoint_tensors, exported_config, write_pretrained
from astrai_core.errors import AstraiError, CheckpointError
from astrai_core.model.transformer import CausalLM
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_train.parallel.shards import HostCopies, write_tensors
from astrai_train.parallel.world import World

MARKER = "checkpoint.json"
STATE = "training_state.pt"
TENSORS = "training_state"
FORMAT = 2
_NAME = re.compile(r"step_(\d+)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingState:
    """What a run needs beside the weights to go on."""

    plain: Mapping[str, Any]
    """Counters, options, position in the data, random streams: values that ``weights_only`` loading takes."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """What has a value for each weight, by names as :mod:`astrai_train.parallel.shards` reads them."""


class CheckpointStore:
    """The checkpoints of one run.

    Parameters
    ----------
    root
        Their directory, on a disk that all ranks share; made when the first is saved.
    keep
        Newest checkpoints that are kept; None keeps all.
    keep_every
        Those of every so many steps are kept besides.
    asynchronous
        `save` returns when the state was copied, and :meth:`wait` when it is on disk.
    world
        The ranks; each writes its part of the state, rank 0 the weights. By default this process alone.
    tokenizer, generation_config
        Written into every checkpoint.
    base_model
        Where the weights below an adapter came from; of runs that train one.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int | None,
        asynchronous: bool,
        keep_every: int | None = None,
        world: World | None = None,
        tokenizer: Tokenizer | None = None,
        generation_config: dict[str, Any] | None = None,
        base_model: str | None = None,
    ) -> None:
        self.root = root
        self.keep = keep
        self.keep_every = keep_every
        self.asynchronous = asynchronous
        self.world = world or World(torch.device("cpu"))
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        self.base_model = base_model
        self._writer = ThreadPoolExecutor(1, "astrai-checkpoint", _use, (self.world.device,))
        self._weights, self._tensors = HostCopies(), HostCopies()
        self._pending: Future[None] | None = None

    def path(self, step: int) -> Path:
        """Return where the checkpoint of `step` belongs."""
        return self.root / f"step_{step}"

    def save(
        self,
        step: int,
        model: CausalLM | None,
        state: TrainingState,
        *,
        model_is_copy: bool = False,
        best: int | None = None,
    ) -> Path:
        """Save the state after `step`, then delete what need not be kept; one save at a time is in flight.

        Parameters
        ----------
        model
            The model with its weights whole; used on rank 0 alone.
        model_is_copy
            Whether training leaves `model` alone.
        best
            Step whose checkpoint is kept however old it is.

        Raises
        ------
        CheckpointError
            On every rank, if this save, or the one before it that was still being written, failed; what was there
            stays.
        """
        self.wait()
        scratch = self.world.first(partial(scratch_directory, self.path(step), overwrite=True))
        write_model = None if model is None else self._export(model, copy=self.asynchronous and not model_is_copy)
        tensors = self._tensors.take(state.tensors) if self.asynchronous else state.tensors
        plain = deepcopy(state.plain) if self.asynchronous else state.plain
        self._pending = self._writer.submit(self._write, step, scratch, write_model, plain, tensors, best)
        if not self.asynchronous:
            self.wait()
        return self.path(step)

    def export(self, model: CausalLM, directory: Path) -> None:
        """Write a model as a checkpoint's weights are written, without a state, in place of what is there.

        What an export that was interrupted has left beside it is removed.

        Raises
        ------
        CheckpointError
            If it cannot be written; what was there stays.
        """
        _remove_leftovers(directory.parent, f"{directory.name}.*")
        write_model = self._export(model, copy=False)
        with atomic_directory(directory, overwrite=True) as scratch:
            write_model(scratch)

    def wait(self) -> None:
        """Wait for the save in flight on every rank; raises on every rank what it failed with on any."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.exception()
        told = error
        if error is not None and not isinstance(error, AstraiError):
            reason = f"{type(error).__name__}: {_first_line(error)}"
            told = CheckpointError(f"{self.root}: a save failed ({reason}); resume from the last checkpoint")
        for failed in self.world.gather(told):
            if failed is not None:
                raise failed from (None if failed is error else error)

    def close(self) -> None:
        """End the writing thread; a save in flight is finished first."""
        self._writer.shutdown()

    def _export(self, model: CausalLM, *, copy: bool) -> Callable[[Path], None]:
        """Collect what is to be written of the model, and return what writes it."""
        lora = model.lora
        weights = dict(checkpoint_tensors(model) if lora is None else adapter_tensors(model))
        if copy:
            weights = self._weights.take(weights)
        if lora is None:
            config = exported_config(model)
            return lambda directory: write_pretrained(
                directory,
                config,
                weights.items(),
                tokenizer=self.tokenizer,
                generation_config=self.generation_config,
            )
        assert self.base_model is not None, "an adapter is trained on a model that was loaded"
        base_model = self.base_model
        return lambda directory: write_adapter(directory, lora, weights.items(), base_model, tokenizer=self.tokenizer)

    def _write(
        self,
        step: int,
        scratch: Path,
        write_model: Callable[[Path], None] | None,
        plain: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        best: int | None,
    ) -> None:
        if not self.world.is_first:
            try:
                write_tensors(scratch / TENSORS, tensors, self.world.writing)
            except OSError as error:
                raise CheckpointError(explain_write_error(error, self.path(step))) from error
            return
        with committed(scratch, self.path(step)):
            # First: what needs all ranks. Whatever fails afterwards leaves nobody waiting.
            write_tensors(scratch / TENSORS, tensors, self.world.writing)
            assert write_model is not None, "rank 0 is given the model"
            write_model(scratch)
            state = io.BytesIO()  # into a file torch.save would hide the system's error, such as a full disk
            torch.save({"format": FORMAT, **plain}, state)
            (scratch / STATE).write_bytes(state.getbuffer())
            files = {
                str(path.relative_to(scratch)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
                for path in sorted(scratch.rglob("*"))
                if path.is_file()
            }
            marker = {"format": FORMAT, "step": step, "files": files}
            (scratch / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        self._retain(step, best)

    def _retain(self, saved: int, best: int | None) -> None:
        """Delete whole checkpoints that nothing asks to keep. Called right after a save: that one is good.

        Those of later steps are none: the run did not go on from them, because their contents have changed.
        """
        if self.keep is None:
            return
        whole = [
            (step, path) for step, path in self._listed() if step <= saved and _damage(path, digests=False) is None
        ]
        for step, path in whole[self.keep :]:
            if step == best or (self.keep_every and step % self.keep_every == 0):
                continue
            doomed = path.with_name(f".{path.name}.tmp")  # half deleted, it must not look like a checkpoint
            path.rename(doomed)
            shutil.rmtree(doomed)

    def clean(self) -> None:
        """Remove what interrupted saves and deletions left behind."""
        _remove_leftovers(self.root, "step_*")

    def newest(self) -> tuple[int, Path] | None:
        """Return step and directory of the newest whole checkpoint; damaged ones are skipped with a warning."""
        for step, path in self._listed():
            damage = _damage(path, digests=True)
            if damage is None:
                return step, path
            logger.warning("%s: skipped, %s", path, damage)
        return None

    def _listed(self) -> Iterator[tuple[int, Path]]:
        found = [(int(match[1]), path) for path in self.root.glob("step_*") if (match := _NAME.fullmatch(path.name))]
        return iter(sorted(found, reverse=True))


def load_training_state(path: Path) -> dict[str, Any]:
    """Read the training state of a whole checkpoint, onto the host.

    Raises
    ------
    CheckpointError
        If another version of astrai wrote it, or it holds more than tensors and plain values.
    """
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path / STATE}: cannot be read ({_first_line(error)}); resume from another") from None
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"{path / STATE}: has format {state['format']}, this astrai-train reads {FORMAT}; use the version that wrote it"
        )
    return state


def _use(device: torch.device) -> None:
    """Let a thread be on its rank's GPU: a new one is on the first, whose streams torch would wait for in a save."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _remove_leftovers(parent: Path, name: str) -> None:
    """Remove what writes under these names, which were interrupted, have left in a directory."""
    for kind in ("tmp", "old"):
        for path in parent.glob(f".{name}.{kind}"):
            shutil.rmtree(path)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damage(path: Path, *, digests: bool) -> str | None:
    """Say what is wrong with a checkpoint, or None; without `digests` the files' sizes alone are compared."""
    try:
        files = json.loads((path / MARKER).read_text(encoding="utf-8"))["files"]
        for name, facts in files.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != facts["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
            if digests and _sha256(file) != facts["sha256"]:
                return f"the contents of {name} have changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MARKER} cannot be read ({type(error).__name__}: {error})"
    return None
