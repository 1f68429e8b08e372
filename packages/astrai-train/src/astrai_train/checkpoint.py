"""Checkpoints of a run: Hugging Face directories with the training state beside the weights (training rules 5 to 7).

``checkpoints/step_N/`` holds the state after the update of step N. It is written under another name, synced, and
renamed; its last file, ``checkpoint.json``, lists the others with their sizes and digests. A directory without that
list, or at odds with it, is damaged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from astrai_core.checkpoint.atomic import atomic_directory
from astrai_core.checkpoint.hf_adapter import checkpoint_tensors, exported_config, write_pretrained
from astrai_core.config.model import ModelConfig
from astrai_core.errors import CheckpointError
from astrai_core.model.transformer import CausalLM
from astrai_core.tokenizer.tokenizer import Tokenizer

MARKER = "checkpoint.json"
STATE = "training_state.pt"
FORMAT = 1
_NAME = re.compile(r"step_(\d+)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds."""

    step: int
    config: ModelConfig
    weights: Mapping[str, Tensor]
    """By their names in the Hugging Face files."""
    state: Mapping[str, Any]
    """Optimizer, counters, position in the data, random streams."""

    @classmethod
    def take(cls, step: int, model: CausalLM, state: Mapping[str, Any], *, copy: bool) -> Self:
        """Collect the state after `step`.

        Parameters
        ----------
        copy
            Copy every tensor to the host, so that training may go on while the snapshot is written.
        """
        weights = dict(checkpoint_tensors(model))
        if copy:
            return cls(step, exported_config(model), _host_copy(weights), _host_copy(dict(state)))
        return cls(step, exported_config(model), weights, state)


def _host_copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _host_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_host_copy(item) for item in value)
    return value


class CheckpointStore:
    """The checkpoints of one run.

    Parameters
    ----------
    root
        Their directory; made when the first is saved.
    keep
        Newest checkpoints that are kept; None keeps all.
    asynchronous
        Write in a thread; `save` then returns when the state was copied, and :meth:`wait` when it is on disk.
    tokenizer, generation_config
        Written into every checkpoint.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int | None,
        asynchronous: bool,
        tokenizer: Tokenizer | None = None,
        generation_config: dict[str, Any] | None = None,
    ) -> None:
        self.root = root
        self.keep = keep
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        self._writer = ThreadPoolExecutor(1, "astrai-checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None

    def path(self, step: int) -> Path:
        """Return where the checkpoint of `step` belongs."""
        return self.root / f"step_{step}"

    def save(self, step: int, model: CausalLM, state: Mapping[str, Any]) -> Path:
        """Save the state after `step`, then delete what need not be kept; one save at a time is in flight.

        Raises
        ------
        CheckpointError
            If this save, or the one before it that was still being written, failed; what was there stays.
        """
        self.wait()
        snapshot = Snapshot.take(step, model, state, copy=self._writer is not None)
        if self._writer is None:
            self._write(snapshot)
        else:
            self._pending = self._writer.submit(self._write, snapshot)
        return self.path(step)

    def wait(self) -> None:
        """Wait for the save in flight; raises what it failed with."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """End the writing thread; a save in flight is finished first."""
        if self._writer is not None:
            self._writer.shutdown()

    def _write(self, snapshot: Snapshot) -> None:
        with atomic_directory(self.path(snapshot.step), overwrite=True) as scratch:
            write_pretrained(
                scratch,
                snapshot.config,
                snapshot.weights.items(),
                tokenizer=self.tokenizer,
                generation_config=self.generation_config,
            )
            torch.save({"format": FORMAT, **snapshot.state}, scratch / STATE)
            files = {
                str(path.relative_to(scratch)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
                for path in sorted(scratch.rglob("*"))
                if path.is_file()
            }
            marker = {"format": FORMAT, "step": snapshot.step, "files": files}
            (scratch / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        self._retain()

    def _retain(self) -> None:
        """Delete all but the newest `keep` whole checkpoints. Called right after a save: the newest is good."""
        if self.keep is None:
            return
        whole = [path for _, path in self._listed() if _damage(path, digests=False) is None]
        for path in whole[self.keep :]:
            doomed = path.with_name(f".{path.name}.tmp")  # half deleted, it must not look like a checkpoint
            path.rename(doomed)
            shutil.rmtree(doomed)

    def clean(self) -> None:
        """Remove what interrupted saves and deletions left behind."""
        for pattern in (".step_*.tmp", ".step_*.old"):
            for path in self.root.glob(pattern):
                shutil.rmtree(path)

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


def _first_line(error: Exception) -> str:
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
