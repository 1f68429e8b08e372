"""Fixtures of several files: tiny adapters, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from astrai_infer.testing import small_engine
from astrai_infer.testing.adapters import GREEDY, PROMPTS, merged_model, save_tiny_adapters


@pytest.fixture(scope="session")
def adapter_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_tiny_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session")
def adapter_texts(adapter_paths: dict[str, Path]) -> dict[tuple[str | None, int], tuple[int, ...]]:
    """(Adapter, prompt) -> its greedy tokens, by the merged model alone."""
    found = {}
    for name in (None, *adapter_paths):
        with small_engine(merged_model(adapter_paths.get(name or "")), prefix_cache=False, max_num_seqs=1) as engine:
            for i, prompt in enumerate(PROMPTS):
                found[name, i] = engine.generate(prompt, GREEDY).token_ids
    assert all(len({found[name, i] for name in (None, *adapter_paths)}) == 3 for i in range(len(PROMPTS))), (
        "adapters matter"
    )
    return found
