"""Small engines for tests."""

from __future__ import annotations

from typing import Any

from torch import nn

from astrai_infer.cache.storage import KVSpec
from astrai_infer.config import EngineConfig
from astrai_infer.engine import InferenceEngine
from astrai_infer.testing.models import ScriptedModel
from astrai_infer.testing.tokenizer import EOS_ID, byte_tokenizer


def small_engine(model: nn.Module, n_pages: int | None = None, **config: Any) -> InferenceEngine:
    """Return an engine over the byte tokenizer.

    Parameters
    ----------
    n_pages
        Memory of the KV cache, in pages of 16 tokens of all layers; None sizes it as usual.
    **config
        Fields of :class:`~astrai_infer.config.EngineConfig`.
    """
    served: Any = model
    if n_pages is not None:
        (spec,) = KVSpec.groups(served.config, served.dtype, whole=True)
        config["kv_cache_bytes"] = n_pages * 16 * spec.token_bytes
    return InferenceEngine(served, byte_tokenizer(), EngineConfig(**config))


def scripted_engine(text: str, **config: Any) -> InferenceEngine:
    """Return an engine that writes `text` after a prompt of one token, then end of text."""
    data = [*text.encode(), EOS_ID]
    return small_engine(ScriptedModel(lambda _, position: data[min(position, len(data) - 1)]), **config)
