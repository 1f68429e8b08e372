"""An engine whose decode steps are one kernel (G2): the text of one that runs op by op, graphs or not, asleep or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from astrai_core import SamplingParams
from astrai_core.errors import ConfigError
from astrai_core.model.transformer import CausalLM
from astrai_core.model.whole_step import STEP_ROWS, WholeStep
from astrai_core.types import Request
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.testing import byte_tokenizer
from astrai_infer.testing.models import gpu_model

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

VOCAB = 264
"""A multiple of 8, as the kernel wants it."""


def engine_of(model: CausalLM, **config: Any) -> InferenceEngine:
    settings = {"max_num_seqs": 16, "max_batch_tokens": 256, "kv_cache_bytes": 1 << 26} | config
    return InferenceEngine(model, byte_tokenizer(), EngineConfig(**settings))


def whole_step_of(engine: InferenceEngine) -> WholeStep | None:
    executor = engine.scheduler.executor
    assert isinstance(executor, DeviceExecutor)
    return executor.whole_step


def texts(engine: InferenceEngine, n: int) -> list[list[int]]:
    asked = [
        Request(
            prompt_token_ids=tuple(range(3 + i, 40 + 7 * i)),
            params=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        )
        for i in range(n)
    ]
    return [list(c.token_ids) for c in engine.scheduler.run_batch(asked)]


def agreement(mine: list[list[int]], other: list[list[int]]) -> float:
    """Share of tokens before the first that differs: attention rounds otherwise, and one near tie changes what follows."""
    same = 0
    for x, y in zip(mine, other, strict=True):
        same += next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
    return same / sum(map(len, mine))


@pytest.mark.parametrize("n", [1, 3, 8, 11])
def test_text_is_that_of_an_engine_without(n):
    """One to eight requests by the kernel; of eleven, the last eight."""
    model = gpu_model(vocab_size=VOCAB)
    expected = texts(engine_of(model, step_kernel=False), n)
    assert whole_step_of(engine_of(model, step_kernel=False)) is None
    engine = engine_of(model, step_kernel=True)
    found = texts(engine, n)
    whole = whole_step_of(engine)
    assert whole is not None
    assert whole._step is not None, "the kernel ran"
    assert agreement(found, expected) > 0.6
    assert texts(engine_of(model, step_kernel=True, cuda_graphs=False), n) == found, "graphs change no bit"


def test_by_itself_the_engine_uses_it_for_a_request_alone():
    """The bucket of one request is the kernel, the others are the ops."""
    model = gpu_model(vocab_size=VOCAB)
    by_name = texts(engine_of(model, step_kernel=True), 1)
    engine = engine_of(model)
    whole = whole_step_of(engine)
    assert whole is not None
    assert whole.most_rows == STEP_ROWS
    assert texts(engine, 1) == by_name
    together = texts(engine, 3)
    assert agreement(together, texts(engine_of(model, step_kernel=False), 3)) > 0.6


def test_it_survives_sleep():
    """The pool is let go and comes back elsewhere; the kernel is told."""
    model = gpu_model(vocab_size=VOCAB)
    engine = engine_of(model, step_kernel=True)
    expected = texts(engine, 2)
    held = torch.cuda.memory_allocated()
    cache = sum(group.storage.k_buffer.nbytes + group.storage.v_buffer.nbytes for group in engine.pool.groups)
    engine.sleep()
    assert held - torch.cuda.memory_allocated() >= cache > 0
    engine.resume()
    assert texts(engine, 2) == expected


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({}, {"deterministic": True}, "deterministic is True"),
        ({}, {"kv_dtype": "float8_e4m3fn"}, "kv_dtype is 'float8_e4m3fn'"),
        ({}, {"max_loras": 2}, "there is room for adapters"),
        ({"mlp_bias": True}, {}, "its feed-forward layers have biases"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(options, config, message):
    with pytest.raises(ConfigError, match=f"step_kernel is True but {message}"):
        engine_of(gpu_model(**{"vocab_size": VOCAB, **options}), step_kernel=True, **config)
