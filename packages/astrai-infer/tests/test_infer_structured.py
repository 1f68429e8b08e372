"""Structured output through the engine (rule 18)."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from astrai_core.errors import ConfigError, RequestError
from astrai_core.types import Request, SamplingParams, StructuredOutput
from astrai_infer.task import Delta
from astrai_infer.testing import scripted_engine, small_engine, tiny_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


def params(structured: StructuredOutput, **more: Any) -> SamplingParams:
    return SamplingParams(**{"structured": structured, "max_tokens": 150, "seed": 1, **more})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_random_model_writes_what_the_language_admits(model: Any, temperature: float) -> None:
    """Rule 18: schema, expression, choice, grammar; the answer ends by itself."""
    with small_engine(model) as engine:
        asked = {
            "schema": StructuredOutput(json_schema=SCHEMA),
            "regex": StructuredOutput(regex=r"[A-Z]{3}-\d{4}"),
            "choice": StructuredOutput(choice=("yes", "no", "it \"depends\"\n")),
            "grammar": StructuredOutput(grammar='start: "(" start ")" | "x"'),
        }  # fmt: skip
        done = engine.generate(["a"] * 4, [params(s, temperature=temperature) for s in asked.values()])
        texts = dict(zip(asked, done, strict=True))
        assert {c.finish_reason for c in done if not isinstance(c, list)} <= {"stop", "length"}
        found = json.loads(texts["schema"].text)
        assert set(found) == {"kind", "legs"} and found["kind"] in ("cat", "dog") and 0 <= found["legs"] <= 9
        assert re.fullmatch(r"[A-Z]{3}-\d{4}", texts["regex"].text)
        assert texts["choice"].text in asked["choice"].choice
        assert re.fullmatch(r"\(*x?\)*", texts["grammar"].text)


def test_a_token_that_the_language_refuses_is_no_part_of_the_answer(model: Any) -> None:
    """Rules 10 and 13: the error names it, and the deltas join to what the completion holds."""
    engine = small_engine(model)
    deltas: list[Delta] = []
    asked = Request(
        prompt_token_ids=(97,), params=params(StructuredOutput(regex="[a-z]{9}"), temperature=0.0, logprobs=0)
    )
    (task,) = engine.tasks.make(asked, deltas.append)
    engine.scheduler.submit([task])
    for _ in range(3):
        engine.scheduler.step()
    task.grammar.allowed = lambda width: np.arange(width) == ord("9")
    while engine.scheduler.step():
        pass
    completion = deltas[-1].completion
    assert completion is not None and completion.finish_reason == "error"
    assert completion.error is not None and completion.error.startswith("structured output: ")
    told = [token for delta in deltas for token in delta.token_ids]
    assert list(completion.token_ids) == told and len(told) == 3
    assert [entry.token_id for entry in completion.logprobs or ()] == told


def test_white_space_is_bounded(model: Any) -> None:
    """Rule 18: a model that only wants white space gets 20 of it at a place."""
    with small_engine(model) as engine:
        bias = {ord(" "): 100.0, ord("\n"): 100.0}
        text = engine.generate(
            "a", params(StructuredOutput(json_schema=SCHEMA), logit_bias=bias, temperature=0, max_tokens=250)
        ).text
    assert max(map(len, re.findall(r"\s+", text))) == 20 and json.loads(text)["kind"]


def test_the_mask_survives_preemption_and_choices(model: Any) -> None:
    """Rule 18: n choices in a pool that holds few of them write what each writes alone."""
    wanted = params(StructuredOutput(json_schema=SCHEMA), n=4, temperature=1.0)
    with small_engine(model) as roomy:
        alone = [c.text for c in roomy.generate("abc", wanted)]
        assert max(map(len, alone)) < 100
    with small_engine(model, n_pages=7, max_seq_len=112, prefix_cache=False) as tight:
        done = tight.generate("abc", wanted)
        assert tight.health().n_preemptions > 0
    assert [c.text for c in done] == alone and len(set(alone)) > 1
    assert all(set(json.loads(text)) == {"kind", "legs"} for text in alone)


@pytest.mark.parametrize(
    ("think", "says", "written"),
    [
        ("opened", "blue, no {</think>blue", "blue, no {</think>green"),
        ("may", "<think>blue</think>blue", "<think>blue</think>green"),
        ("may", "red", "red"),
        ("no", "<think>", "green"),
    ],
)
def test_thinking_may_come_first(think: Any, says: str, written: str) -> None:
    """What is thought is free; the answer is not, and where the model wants what is not admitted the first token wins."""
    structured = StructuredOutput(choice=("red", "green"), think=think)
    with scripted_engine(says) as engine:
        text = engine.generate("a", params(structured, temperature=0)).text
    assert "".join(text.split()) == "".join(written.split())


@pytest.mark.parametrize(
    ("structured", "field"),
    [
        ({"json_schema": {"type": "nonsense"}}, "json_schema"),
        ({"regex": "a("}, "regex"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"grammar": '{"grammars": []}', "think": "may"}, "grammar"),
    ],
)
def test_an_invalid_language_is_refused_before_admission(model: Any, structured: Any, field: str) -> None:
    with small_engine(model) as engine:
        with pytest.raises(RequestError, match=rf"structured.{field} cannot be used: .+; (correct it|give a)"):
            engine.generate("a", params(StructuredOutput(**structured)))
        assert engine.health().n_steps == 0


@pytest.mark.parametrize("more", [{"min_tokens": 3}, {"ignore_eos": True}, {"allowed_token_ids": (1,)}])
def test_what_would_contradict_the_language_is_refused(more: Any) -> None:
    with pytest.raises(ConfigError, match="structured decides when the completion ends"):
        SamplingParams.from_dict({"structured": StructuredOutput(regex="a"), **more})


def test_one_language_at_a_time() -> None:
    with pytest.raises(ConfigError, match="2 of json_schema, regex, choice and grammar are given"):
        StructuredOutput.from_dict({"regex": "a", "choice": ["b"]})
