"""Embeddings by a decoder: its last hidden states, pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn.functional import normalize

from astrai_core.errors import RequestError
from astrai_infer.engine import InferenceEngine

Pooling = Literal["mean", "last"]


@torch.inference_mode()
def embed(
    engine: InferenceEngine, prompts: Sequence[Sequence[int]], pooling: Pooling, adapter: str | None = None
) -> list[list[float]]:
    """Return one vector of length 1 for each prompt.

    Each prompt is computed by itself between two steps, so that running completions wait for one prompt at most and a
    vector does not depend on what else is embedded.

    Parameters
    ----------
    prompts
        Token ids.
    pooling
        "mean" over the prompt's hidden states after the final norm, or that of the "last" token.
    adapter
        Name of the adapter to compute them with; None: the model itself.

    Returns
    -------
    ``[n][hidden]``, fp32 precision.

    Raises
    ------
    RequestError
        If a prompt is empty, too long, or holds an id outside the vocabulary; if the adapter is not loaded.
    EngineError
        If the engine is closed, or its weights are half updated.
    """
    model, vocab = engine.model, engine.model.config.vocab_size
    for i, ids in enumerate(prompts):
        if not ids:
            raise RequestError(f"input[{i}] is empty; give at least one token")
        if len(ids) > engine.max_seq_len:
            raise RequestError(f"input[{i}] has {len(ids)} tokens, max_seq_len is {engine.max_seq_len}; shorten it")
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise RequestError(f"input[{i}]: a token id is outside the vocabulary of {vocab}; correct it")
    vectors = []
    for ids in prompts:
        with engine.scheduler.between_steps(recompute=False), engine.adapters.applied(adapter, len(ids)):
            engine.check_alive()
            hidden = model.hidden_states(torch.tensor([ids], device=model.device))[0].float()
        pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
        vectors.append(normalize(pooled, dim=0).tolist())
    return vectors
