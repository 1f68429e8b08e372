"""A recipe to vary."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from astrai_core.errors import ConfigError
from astrai_train import TrainConfig

MINIMAL: dict[str, Any] = {
    "model": {"pretrained": "smollm2"},
    "data": {"train": [{"path": "stories"}], "seq_len": 64},
    "strategy": {"name": "sft"},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "output_dir": "runs/one",
    "batch_size": 8,
    "max_steps": 100,
}


def _recipe(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """`MINIMAL` with fields, given by their dotted names, set or (by the value ``...``) removed."""
    data = copy.deepcopy(MINIMAL)
    for dotted, value in (changes or {}).items():
        *groups, last = dotted.split(".")
        inner = data
        for group in groups:
            inner = inner.setdefault(group, {})
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    return data


@pytest.fixture(scope="session")
def recipe() -> Callable[..., dict[str, Any]]:
    """Function from changes, by dotted name, to a smallest valid recipe with those changes."""
    return _recipe


@pytest.fixture(scope="session")
def error_of() -> Callable[[dict[str, Any]], str]:
    """Function from changes that make a recipe invalid to the one line that says so."""

    def message(changes: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            TrainConfig.from_dict(_recipe(changes))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return message
