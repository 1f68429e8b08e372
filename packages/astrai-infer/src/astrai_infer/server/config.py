"""Settings of the server; a field is a flag of ``astrai serve`` and a key of its YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from astrai_core.config.base import CONFIG, BaseConfig, dataclass
from astrai_core.errors import ConfigError
from astrai_infer.config import check_draft
from astrai_infer.text.tools import FORMATS

ALIASES = {"max_model_len": "max_seq_len"}
"""Names that other servers use -> ours."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class ServerConfig(BaseConfig):
    """What is served, and to whom."""

    model: str
    """A directory, a .gguf file, a Hugging Face id, or smollm2."""
    lora: dict[str, str] = Field(default_factory=dict)
    """Name -> directory of an adapter (PEFT's) that clients can ask for as a model; as a flag, NAME=DIRECTORY."""
    max_loras: int | None = None
    """Adapters that there is room for at once, also for those that are loaded later; by default as many as `lora` has."""
    max_lora_rank: int | None = None
    """Largest rank of one: 8, 16, 32 or 64; by default that of the adapters given."""
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
    speculation: Literal["ngram", "draft"] | None = None
    """Guess several tokens and check them in one step, which changes no text: ngram, from what came before; draft, by a
    small model."""
    draft_model: str | None = None
    """The small model of draft, of the same vocabulary; in the forms of `model`."""
    max_draft_tokens: int = Field(default=5, ge=1, le=31)
    """Most guesses for a completion in a step."""
    gpu_memory_utilization: float = 0.85
    """Share of the GPU's free memory, after the weights, that the KV cache may take."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is reachable from other machines."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    api_key: tuple[str, ...] = ()
    """Clients must send one of these."""
    admin_key: str | None = Field(default=None, min_length=1)
    """Opens /pause, /resume, /sleep, /wake, /update_weights, /v1/load_lora_adapter and /v1/unload_lora_adapter."""
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

    @field_validator("lora", mode="before")
    @classmethod
    def _named_directories(cls, value: Any) -> Any:
        listed = (value,) if isinstance(value, str) else value
        if not isinstance(listed, (list, tuple)):
            return value  # a mapping, or what pydantic refuses
        named: dict[str, str] = {}
        for each in listed:
            name, equals, directory = each.partition("=") if isinstance(each, str) else ("", "", "")
            if not (name and equals and directory):
                raise ValueError(f"{each!r} is not NAME=DIRECTORY; give both")
            if name in named:
                raise ValueError(f"the name {name!r} is given twice; give each adapter one of its own")
            named[name] = directory
        return named

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        if clash := sorted(self.lora.keys() & set(self.names)):
            raise ValueError(f"lora: {clash[0]!r} is a name of the model itself; give the adapter another")
        return self

    @model_validator(mode="after")
    def _draft_model_is_used(self) -> Self:
        check_draft(self.speculation, self.draft_model)
        if self.speculation == "draft" and self.draft_model is None:
            raise ValueError(
                "speculation is 'draft' and draft_model is missing; name a small model with the same vocabulary"
            )
        return self

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
            "speculation": self.speculation,
            "draft_model": self.draft_model,
            "max_draft_tokens": self.max_draft_tokens,
            "max_loras": self.max_loras,
            "max_lora_rank": self.max_lora_rank,
        }
