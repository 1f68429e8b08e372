"""Small engines for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from astrai_infer.cache.storage import KVSpec
from astrai_infer.config import EngineConfig
from astrai_infer.engine import InferenceEngine
from astrai_infer.testing.models import ScriptedModel
from astrai_infer.testing.tokenizer import EOS_ID, byte_tokenizer


def small_engine(
    model: nn.Module,
    n_pages: int | None = None,
    *,
    draft_model: nn.Module | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    **config: Any,
) -> InferenceEngine:
    """Return an engine over the byte tokenizer.

    Parameters
    ----------
    n_pages
        Memory of the KV cache, in pages of 16 tokens of all layers, also of a draft model's; None sizes it as usual.
    draft_model
        A loaded draft model, for ``speculation="draft"``.
    adapters
        Name -> directory.
    **config
        Fields of :class:`~astrai_infer.config.EngineConfig`.
    """
    served: Any = model
    draft: Any = draft_model
    if n_pages is not None:
        models = [served] if draft is None else [served, draft]
        specs = [spec for each in models for spec in KVSpec.groups(each.config, each.dtype, whole=True)]
        config["kv_cache_bytes"] = n_pages * 16 * sum(spec.token_bytes for spec in specs)
    return InferenceEngine(served, byte_tokenizer(), EngineConfig(**config), draft_model=draft, adapters=adapters)


def scripted_engine(text: str, **config: Any) -> InferenceEngine:
    """Return an engine that writes `text` after a prompt of one token, then end of text."""
    data = [*text.encode(), EOS_ID]
    return small_engine(ScriptedModel(lambda _, position: data[min(position, len(data) - 1)]), **config)
