"""One call of the engine: what counts as one prompt or many, and how deltas become results. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from astrai_core.errors import EngineError, RequestError
from astrai_core.types import Completion, SamplingParams, Usage
from astrai_infer.task import Delta

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""Plain text, a conversation (its template is applied), or token ids."""
Prompts: TypeAlias = Prompt | Sequence[Prompt]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
AdapterNames: TypeAlias = str | Sequence[str | None] | None
"""Of one adapter for all prompts, or of one for each; None is the model itself."""
Result: TypeAlias = Completion | list[Completion]
"""One completion, or the n choices of a prompt with ``n > 1``."""


class Call:
    """One call: how many prompts and choices it has, and which are still open."""

    def __init__(self, single: bool, counts: list[int]) -> None:
        self.single = single
        self.counts = counts
        self.n_open = sum(counts)
        self.request_ids: list[str] = []
        self.abandoned = False
        """Nobody waits for it any more, also while its prompts are still being queued."""

    def take(self, delta: Delta) -> Delta:
        """Note a delta; the failure of a single prompt raises."""
        if delta.completion is not None:
            self.n_open -= 1
            if self.single and delta.completion.error is not None:
                raise EngineError(delta.completion.error)
        return delta

    def results(self, deltas: list[Delta]) -> Result | list[Result]:
        """Arrange the completions as the prompts were given."""
        found = {(d.prompt_index, d.choice): d.completion for d in deltas if d.completion is not None}
        listed: list[Result] = []
        for i, n in enumerate(self.counts):
            choices = [found[i, choice] for choice in range(n)]
            listed.append(choices[0] if n == 1 else choices)
        return listed[0] if self.single else listed


def collect_into(slots: list[Completion | None]) -> Callable[[Delta], None]:
    """Return what puts each completion of a prompt into the slot of its choice."""

    def on_delta(delta: Delta) -> None:
        if delta.completion is not None:
            slots[delta.choice] = delta.completion

    return on_delta


def is_conversation(prompt: Any) -> bool:
    """A list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_list_of_prompts(prompts: Any) -> bool:
    """A list of texts, conversations or id lists; a conversation or one list of ids is a single prompt."""
    if isinstance(prompts, str) or is_conversation(prompts):
        return False
    return isinstance(prompts, Sequence) and not (len(prompts) > 0 and isinstance(prompts[0], Integral))


def new_call(prompts: Any, params: Any) -> Call:
    """Describe a call of which nothing is queued yet."""
    single = not is_list_of_prompts(prompts)
    return Call(single, [each.n for each in params_for(params, 1 if single else len(prompts))])


def params_for(params: Any, n_prompts: int) -> list[SamplingParams]:
    """One SamplingParams per prompt, from none, one or a list."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n_prompts
    listed = list(params)
    if len(listed) != n_prompts:
        raise RequestError(f"{len(listed)} SamplingParams for {n_prompts} prompts; give one, or one for each")
    return listed


def adapters_for(adapter: AdapterNames, n_prompts: int) -> list[str | None]:
    """One name of an adapter per prompt, or None for the model itself, from one or a list."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * n_prompts
    listed = list(adapter)
    if len(listed) != n_prompts:
        raise RequestError(f"{len(listed)} adapters for {n_prompts} prompts; give one, or one for each")
    return listed


def refusal(error: str, request_id: str, index: int, prompt_index: int) -> Delta:
    """The answer to a prompt of a list that cannot be served."""
    completion = Completion(
        text="",
        token_ids=(),
        finish_reason="error",
        usage=Usage(prompt_tokens=0, completion_tokens=0),
        index=index,
        request_id=request_id,
        error=error,
    )
    return Delta.of("", (), index, completion, prompt_index)


def as_ids(value: Any) -> tuple[int, ...]:
    """Token ids from none, one or a list of them."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
