"""The records that every wheel speaks: what is asked of a model and what it answers. No torch here."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from astrai_core.config.base import CONFIG, BaseConfig, dataclass

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a completion ended: a stop string or id, the token limit, the caller's abort, a fault of the engine."""

MAX_SEED = 2**63 - 1


def _as_tuple(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, (list, set, frozenset)) else value


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_tuple)]
Int = Annotated[int, BeforeValidator(_not_bool)]
Float = Annotated[float, BeforeValidator(_not_bool)]


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class StructuredOutput(BaseConfig):
    """The language that a completion must belong to: one of `json_schema`, `regex`, `choice` and `grammar`."""

    json_schema: dict[str, Any] | None = None
    """The completion is a JSON document that this schema admits; ``{}`` admits any."""
    regex: str | None = None
    """The whole completion matches."""
    choice: Strings = ()
    """The completion is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in llguidance's variant of Lark, whose start rule is ``start``."""
    think: Literal["no", "may", "opened"] = "no"
    """Free text between ``<think>`` and ``</think>`` may come first; "opened": the prompt ends inside of it."""

    @model_validator(mode="after")
    def _one_of(self) -> StructuredOutput:
        given = [self.json_schema is not None, self.regex is not None, bool(self.choice), self.grammar is not None]
        if sum(given) != 1:
            raise ValueError(f"{sum(given)} of json_schema, regex, choice and grammar are given; give exactly one")
        return self


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class SamplingParams(BaseConfig):
    """How one request is sampled; vLLM's names. Illegal values raise, naming field, value and legal range.

    The logits of a step pass through, in this order: repetition, presence and frequency penalties, ``logit_bias``,
    ``allowed_token_ids``, ``min_tokens``; temperature; ``top_k``; ``top_p``; ``min_p``. Penalties also act when greedy.
    """

    n: Int = Field(default=1, ge=1, le=128)
    """Completions per prompt."""
    temperature: Float = Field(default=1.0, ge=0, le=100)
    """Divides the logits; 0 is exact argmax."""
    top_p: Float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probabilities reach this mass; 1 is off."""
    top_k: Int = Field(default=0, ge=-1, le=2**31 - 1)
    """Keep the k likeliest tokens; 0, -1 and None are off."""
    min_p: Float = Field(default=0.0, ge=0, le=1)
    """Drop tokens below this share of the likeliest token's probability; 0 is off."""
    max_tokens: Int | None = Field(default=None, ge=1)
    """Longest completion in tokens; None means until the context is full."""
    min_tokens: Int = Field(default=0, ge=0)
    """No end-of-text or stop id before this many tokens; stop strings wait for them too."""
    stop: Strings = ()
    """Strings that end the completion; they are not part of it."""
    stop_token_ids: TokenIds = ()
    """Further token ids that end the completion."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-text ids."""
    seed: Int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Makes the completion a function of prompt, parameters, seed and choice index alone."""
    logprobs: Int | None = Field(default=None, ge=0, le=100)
    """Log-probabilities of the sampled tokens and of this many likeliest ones."""
    prompt_logprobs: Int | None = Field(default=None, ge=0, le=100)
    """The same for the tokens of the prompt."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Log-softmax of the model's own logits, or of what is left after penalties, temperature and filters."""
    presence_penalty: Float = Field(default=0.0, ge=-2, le=2)
    """Subtracted once from the logit of every token in the penalised history."""
    frequency_penalty: Float = Field(default=0.0, ge=-2, le=2)
    """Subtracted per occurrence in the penalised history."""
    repetition_penalty: Float = Field(default=1.0, gt=0, le=10)
    """Divides positive and multiplies negative logits of tokens seen in prompt or completion (arXiv 1909.05858)."""
    rep_window: Int = Field(default=64, ge=0)
    """Last prompt tokens that presence and frequency penalties count in addition to the completion."""
    logit_bias: dict[int, Float] | None = None
    """Added to the logits of the given token ids."""
    allowed_token_ids: TokenIds | None = None
    """Only these ids can be sampled."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the completion in its text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured: StructuredOutput | None = None
    """The completion must belong to this language; it ends when it is complete."""

    @field_validator("top_k", mode="before")
    @classmethod
    def _top_k_off(cls, value: Any) -> Any:
        return 0 if value is None else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("a stop string must not be empty; remove it")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias_range(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        for token_id, bias in (value or {}).items():
            if token_id < 0 or not -100 <= bias <= 100:
                raise ValueError(f"{token_id}: {bias} is out of range; ids are >= 0 and biases within -100..100")
        return value

    @field_validator("allowed_token_ids", mode="before")
    @classmethod
    def _allowed_none(cls, value: Any) -> Any:
        return None if value is None else _as_tuple(value)

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty, so no token could be sampled; give ids or leave it out")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must be <= max_tokens ({self.max_tokens})")
        if self.structured is not None and (self.min_tokens or self.ignore_eos or self.allowed_token_ids is not None):
            raise ValueError(
                "structured decides when the completion ends and of what: leave out min_tokens, ignore_eos "
                "and allowed_token_ids"
            )
        return self

    @property
    def greedy(self) -> bool:
        """Argmax instead of a draw."""
        return self.temperature == 0.0

    @property
    def counts_history(self) -> bool:
        """Whether any penalty needs the tokens seen so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Request(BaseConfig):
    """One prompt to complete: token ids and how to sample."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    request_id: str = ""
    priority: int = 0
    """Smaller is served first; equal priorities in order of arrival."""
    adapter: str | None = None
    """Name of the adapter that it is computed with; None is the model itself."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Usage(BaseConfig):
    """Token counts of a completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the prefix cache before the request came. What another of its choices, or
    the request itself before a preemption, has computed saves the same work but is not counted."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, config=CONFIG)
class TokenLogprobs(BaseConfig):
    """Natural log-probabilities at one position; see :attr:`SamplingParams.logprobs_mode`."""

    token_id: int
    logprob: Annotated[float, Field(allow_inf_nan=True)]
    top: tuple[tuple[int, Annotated[float, Field(allow_inf_nan=True)]], ...] = ()
    """(token id, log-probability) of the likeliest tokens, best first; the chosen token is always among them."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Completion(BaseConfig):
    """The answer to a :class:`Request`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per token of the completion, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry per prompt token, if asked for; None for the first, which nothing predicts."""
    index: int = 0
    """Which of the request's n choices this is."""
    request_id: str = ""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it, if one did."""
    weight_version: int = 0
    """Version of the weights that produced it."""
    error: str | None = None
    """What went wrong, when finish_reason is "error"."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the completion's tokens, if they were asked for."""
        return None if self.logprobs is None else math.fsum(entry.logprob for entry in self.logprobs)
