"""Settings of the server; a field is a flag of ``astrai serve`` and a key of its YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_core.errors import ConfigError
from astrai_infer.text.tools import FORMATS

ALIASES = {"max_model_len": "max_seq_len"}
"""Names that other servers use -> ours."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ServerConfig(BaseConfig):
    """What is served, and to whom."""

    model: str
    """A directory, a .gguf file, a Hugging Face id, or smollm2."""
    served_model_name: tuple[str, ...] = ()
    """Names under which clients ask for the model; by default what `model` says, and its last part."""
    device: str | None = None
    """auto, cpu, cuda or cuda:N; by default CUDA if there is any."""
    dtype: str | None = None
    """Type of the weights; by default float32 on a CPU, else the checkpoint's own."""
    backend: str | None = None
    """Attention backend by name; by default the first that can run."""
    max_seq_len: int | None = None
    """Longest prompt and completion together, in tokens; by default the model's context."""
    max_num_seqs: int = 64
    """Completions that run at once."""
    max_batch_tokens: int = 2048
    """Token budget of one step."""
    gpu_memory_utilization: float = 0.85
    """Share of the GPU's free memory, after the weights, that the KV cache may take."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is reachable from other machines."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    api_key: tuple[str, ...] = ()
    """Clients must send one of these."""
    admin_key: str | None = Field(default=None, min_length=1)
    """Opens /admin: pause, resume, sleep, wake, update_weights."""
    max_queue: int = Field(default=512, ge=0)
    """Completions that may wait beside those that run; one more is refused with status 429."""
    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds after which a request is ended."""
    drain_timeout: float = Field(default=60.0, ge=0)
    """Seconds that running requests have to finish after SIGTERM."""
    max_body_bytes: int = Field(default=4 << 20, gt=0)
    """Largest request body."""
    tool_call_parser: str = "auto"
    """Format of tool calls: hermes, llama3_json, mistral, none, or auto, which reads the chat template."""
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """Split `<think>` from the answer: think, none, or auto, which reads the chat template."""
    pooling: Literal["mean", "last"] = "mean"
    """How /v1/embeddings pools the last hidden states."""
    vllm_metrics: bool = False
    """Show the metrics under the prefix vllm: as well."""
    access_log: bool = True
    """Print a line for each request."""

    @field_validator("served_model_name", "api_key", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("api_key")
    @classmethod
    def _keys_are_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("a key must not be empty; give some text")
        return value

    @field_validator("tool_call_parser")
    @classmethod
    def _known_parser(cls, value: str) -> str:
        if value not in ("auto", "none", *FORMATS):
            raise ValueError(f"must be auto, none, {', '.join(FORMATS)}")
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may ask for; the first is the one that is listed first."""
        return self.served_model_name or tuple(dict.fromkeys((self.model, Path(self.model).name)))

    @classmethod
    def from_yaml(cls, path: Path | None, flags: Mapping[str, Any]) -> Self:
        """Read a file under the flags that were given.

        Parameters
        ----------
        path
            A YAML object whose keys are the flags' names without their leading dashes; None for no file.
        flags
            By field name; they take the place of what the file says.

        Raises
        ------
        ConfigError
            Names the file or field.
        """
        given: dict[str, Any] = {}
        if path is not None:
            import yaml

            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
            if not isinstance(content, dict):
                raise ConfigError(f"{path} must hold `flag: value` lines")
            for key, value in content.items():
                name = str(key).replace("-", "_")
                given[ALIASES.get(name, name)] = value
        try:
            return cls.from_dict({**given, **flags})
        except ConfigError as error:
            raise error if path is None else ConfigError(f"{path}: {error}") from None

    def engine_settings(self) -> dict[str, Any]:
        """Return fields of :class:`~astrai_infer.config.EngineConfig`."""
        return {
            "max_seq_len": self.max_seq_len,
            "max_num_seqs": self.max_num_seqs,
            "max_batch_tokens": max(self.max_batch_tokens, self.max_num_seqs),
            "memory_fraction": self.gpu_memory_utilization,
            "backend": self.backend,
        }
