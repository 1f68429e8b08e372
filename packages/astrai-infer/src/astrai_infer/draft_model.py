"""The draft model of an engine: found, checked against the model that it guesses for, and loaded."""

from __future__ import annotations

from astrai_core.auto import load_model
from astrai_core.checkpoint.source import ModelSource, open_source
from astrai_core.config.model import ModelConfig
from astrai_core.errors import ConfigError
from astrai_core.model.transformer import CausalLM
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_infer.cache.sizing import context_len
from astrai_infer.config import EngineConfig


def open_draft(config: EngineConfig, architecture: ModelConfig, tokenizer: Tokenizer) -> ModelSource | None:
    """Find the draft model that `config` names, without its weights; None if it is not to guess with one.

    Parameters
    ----------
    architecture, tokenizer
        Of the model that it guesses for.

    Raises
    ------
    ConfigError
        If there is none, its vocabulary is another, or its context is shorter than sequences can be.
    """
    if config.speculation != "draft":
        return None
    if config.draft_model is None:
        raise ConfigError(
            "speculation is 'draft' and draft_model is missing; name a small model with the same vocabulary"
        )
    source = open_source(config.draft_model)
    _check_sizes(config, architecture, source.config(), config.draft_model)
    own, others = tokenizer.get_vocab(), source.tokenizer().get_vocab()
    if own != others:
        token = min(token for token, _ in own.items() ^ others.items())
        raise ConfigError(
            f"draft_model {config.draft_model}: its vocabulary is not the model's (token {token!r} has the id "
            f"{others.get(token)}, the model's is {own.get(token)}); use one with the same tokenizer"
        )
    return source


def resolve_draft(
    config: EngineConfig, model: CausalLM, tokenizer: Tokenizer, given: CausalLM | None
) -> CausalLM | None:
    """Return the loaded draft model of an engine, in the type and on the device of its model.

    Parameters
    ----------
    given
        One that is loaded already, in place of the one that `config` names.

    Raises
    ------
    ConfigError
        As :func:`open_draft`; if a model is given that would not be used, or is elsewhere or of another type.
    """
    if given is None:
        source = open_draft(config, model.config, tokenizer)
        return None if source is None else load_model(source, model.dtype, model.device)
    if config.speculation != "draft":
        raise ConfigError(f"draft_model is given but speculation is {config.speculation!r}; set it to 'draft'")
    if (given.device, given.dtype) != (model.device, model.dtype):
        raise ConfigError(
            f"draft_model is {given.dtype} on {given.device}, the model {model.dtype} on {model.device}; "
            "load both alike"
        )
    _check_sizes(config, model.config, given.config, "")
    return given


def _check_sizes(config: EngineConfig, model: ModelConfig, draft: ModelConfig, name: str) -> None:
    which = f"draft_model {name}".rstrip()
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{which}: its vocabulary has {draft.vocab_size} tokens, the model's {model.vocab_size}; use one of the same "
            "family and padding"
        )
    longest = context_len(model, config)
    if draft.max_position_embeddings < longest:
        raise ConfigError(
            f"{which}: its context is {draft.max_position_embeddings} tokens, sequences may have {longest}; set "
            "max_seq_len to no more than the former"
        )
