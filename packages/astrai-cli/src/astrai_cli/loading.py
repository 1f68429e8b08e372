"""From a command's flags to a running engine."""

from __future__ import annotations

import importlib.util
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, cast

from astrai_cli.diagnostics import warn
from astrai_cli.options import LoadOptions, blame

if TYPE_CHECKING:
    from collections.abc import Generator

    from astrai_infer import Delta, InferenceEngine, SamplingParams

DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
"""Sampling where neither a flag nor the model's generation_config.json says anything (row CL2)."""

FROM_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What is taken from generation_config.json."""


@contextmanager
def busy(message: str) -> Iterator[None]:
    """Show that something takes a while, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


def check_sampling(flags: Mapping[str, Any]) -> None:
    """Refuse values out of range before anything is loaded; the error names the flag."""
    with busy("Starting"):
        from astrai_core.errors import ConfigError
        from astrai_core.types import SamplingParams
    with blame(None, ConfigError):
        SamplingParams.from_dict(flags)


def open_engine(
    model: str,
    load: LoadOptions,
    *,
    needs_template: bool,
    max_num_seqs: int = 1,
    max_waiting: int = 1,
    speculation: Mapping[str, Any] | None = None,
) -> InferenceEngine:
    """Load a model and build its engine; flags that cannot be met are refused before the weights are read.

    Parameters
    ----------
    needs_template
        Refuse a model without a chat template.
    max_num_seqs, max_waiting
        Of :class:`astrai_infer.EngineConfig`.
    speculation
        Those of its fields that :func:`astrai_cli.options.speculation_options` gives.

    Raises
    ------
    MissingDependencyError
        If astrai-infer is not installed.
    click.UsageError
        If a flag of `load` has an impossible value.
    """
    from astrai_core.errors import BackendError, ChatTemplateError, ConfigError, MissingDependencyError, RegistryError

    if importlib.util.find_spec("astrai_infer") is None:
        raise MissingDependencyError("this command needs astrai-infer; run `pip install 'astrai-cli[infer]'`")
    with busy(f"Loading {model}"):
        from astrai_core.attention.backend import resolve_backend
        from astrai_core.auto import load_model, resolve_device, resolve_dtype
        from astrai_core.checkpoint.source import open_source
        from astrai_infer import EngineConfig, InferenceEngine
        from astrai_infer.draft_model import open_draft

        source = open_source(model)
        config = source.config()
        with blame("--device", BackendError):
            device = resolve_device(load.device)
        if load.backend is not None:
            with blame("--backend", BackendError, RegistryError):
                dtype = resolve_dtype(load.dtype, config, device)
                resolve_backend(load.backend, device, config.head_dim, dtype)
        context = config.max_position_embeddings
        with blame(None, ConfigError):
            settings = EngineConfig.from_dict(
                {
                    "max_seq_len": load.max_seq_len,
                    "max_num_seqs": max_num_seqs,
                    "max_waiting": max_waiting,
                    "backend": load.backend,
                    "seed": secrets.randbits(63),
                    **(speculation or {}),
                }
            )
        with blame("--max-seq-len", ConfigError):
            if (load.max_seq_len or 0) > context:
                raise ConfigError(f"{load.max_seq_len} is more than the model's context of {context} tokens; lower it")
        tokenizer = source.tokenizer()
        if needs_template and tokenizer.chat_template is None:
            raise ChatTemplateError(
                f"{model}: the tokenizer has no chat template; use `astrai generate --raw`, which sends text as it is"
            )
        with blame("--draft-model", ConfigError):
            open_draft(settings, config, tokenizer)
        weights = load_model(source, load.dtype, device)
        engine = InferenceEngine(weights, tokenizer, settings, generation_config=source.generation_config(), name=model)
    if not engine.eos_ids:
        warn(f"{model} has no end-of-text token: answers end at --max-tokens, at --stop or when the context is full")
    return engine


@contextmanager
def streaming(engine: InferenceEngine, prompts: Any, params: SamplingParams) -> Iterator[Iterator[Delta]]:
    """Yield the deltas of an answer or a list of them; leaving early aborts what is left."""
    with closing(cast("Generator[Delta]", engine.generate(prompts, params, stream=True))) as deltas:
        yield deltas


def sampling_params(engine: InferenceEngine, flags: Mapping[str, Any]) -> SamplingParams:
    """Combine flags, the model's generation_config.json and :data:`DEFAULTS`, in this order of precedence.

    Raises
    ------
    ConfigError
        If generation_config.json holds an illegal value.
    """
    from astrai_core.errors import ConfigError
    from astrai_core.types import SamplingParams

    recommended = engine.generation_config
    own = {name: recommended[name] for name in FROM_MODEL if recommended.get(name) is not None}
    if recommended.get("do_sample") is False:
        own["temperature"] = 0.0
    try:
        SamplingParams.from_dict(own)
    except ConfigError as error:
        raise ConfigError(f"{engine.name}: generation_config.json: {error}") from None
    return SamplingParams.from_dict({**DEFAULTS, **own, **flags})
