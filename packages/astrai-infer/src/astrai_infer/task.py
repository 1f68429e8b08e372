"""The mutable life of a request inside the engine, and what one step runs. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from astrai_core.types import Completion, FinishReason, SamplingParams, TokenLogprobs, Usage
from astrai_infer.text.detokenize import TextStream

if TYPE_CHECKING:
    from astrai_infer.adapters import Adapter
    from astrai_infer.sampling.grammar import Grammar

Status = Literal["waiting", "running", "finished"]


class Delta(str):
    """A piece of streamed text; it is that string, and knows where it belongs.

    Attributes
    ----------
    token_ids
        The tokens that are new since the last delta.
    prompt_index, choice
        Which prompt of the call, and which of its n choices.
    logprobs
        One entry for each of `token_ids`, if asked for; else empty.
    completion
        The whole answer, with the last delta of a choice; None before.
    """

    __slots__ = ("choice", "completion", "logprobs", "prompt_index", "token_ids")

    token_ids: tuple[int, ...]
    prompt_index: int
    choice: int
    logprobs: tuple[TokenLogprobs, ...]
    completion: Completion | None

    @classmethod
    def of(
        cls,
        text: str,
        token_ids: tuple[int, ...],
        choice: int,
        completion: Completion | None = None,
        prompt_index: int = 0,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> Delta:
        """Build a delta."""
        delta = cls(text)
        delta.token_ids = token_ids
        delta.choice = choice
        delta.prompt_index = prompt_index
        delta.completion = completion
        delta.logprobs = logprobs
        return delta

    @property
    def text(self) -> str:
        """The piece of text as a plain string."""
        return str(self)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the completion ended, with its last delta."""
        return None if self.completion is None else self.completion.finish_reason


class Task:
    """One choice of one request.

    The chained invariant: ``0 <= computed_len <= total_len - 1 + pending_len``, and ``total_len == len(prompt) +
    len(output)``. A step feeds tokens ``computed_len ..`` and samples when it reaches the last one; prefill, decode and
    recomputation after preemption differ only in how many tokens are left.

    Parameters
    ----------
    first
        The first choice of the same request, for the others.
    grammar
        What may come next, where ``params.structured`` asks for it; it moves on with every token that is appended.
    adapter
        What it is computed with; None: the model itself.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        seed: int,
        max_total_len: int,
        stop_ids: frozenset[int],
        text: TextStream,
        on_delta: Callable[[Delta], None],
        index: int = 0,
        prompt_index: int = 0,
        priority: int = 0,
        first: Task | None = None,
        grammar: Grammar | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = seed
        longest = max_total_len if params.max_tokens is None else len(prompt_ids) + params.max_tokens
        self.end_len = min(max_total_len, longest)
        """Prompt and output tokens at which the completion ends for length."""
        self.stop_ids = stop_ids
        self.text = text
        self.on_delta = on_delta
        self.index = index
        self.prompt_index = prompt_index
        self.priority = priority
        self.first = first
        self.grammar = grammar
        self.adapter = adapter
        self.arrival = 0
        self.status: Status = "waiting"
        self.row: int | None = None
        self.computed_len = 0
        self.pending_len = 0
        """Tokens sampled on the device and not read yet: 1 while a step that samples for this task is in flight."""
        self.admitted_len = 0
        """Tokens it had when it was admitted last: once there are more, it decodes."""
        self.record_len = 0
        """The computed length at which the pool wants to hear of it again."""
        self.cached_len = 0
        self.weight_version = 0
        self.token_ids = list(prompt_ids)
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.n_preemptions = 0
        self.n_drafted = self.n_accepted = 0
        """Tokens that were guessed for it, and those that were right."""
        self.draft_lag = 0
        """Computed tokens, the newest ones, that a draft model has not been fed: 1 after a step whose guesses were all
        right, since the last guess was not fed to it."""
        self._final: Delta | None = None

    @property
    def total_len(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def output_len(self) -> int:
        """Sampled tokens."""
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """Sampled tokens."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def remaining_len(self) -> int:
        """Tokens to feed before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.computed_len

    @property
    def adapter_slot(self) -> int:
        """Where the factors of its adapter stand; -1 if it has none."""
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: who is served first and preempted last."""
        return (self.priority, self.arrival)

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take the sampled token: emit its text and finish if it ends the completion."""
        complete = False
        if self.grammar is not None:
            complete = self.grammar.accept(token_id)
            if self.grammar.error:  # the token is no part of the language, nor of the completion
                self.finish("error", error=f"structured output: {self.grammar.error}")
                return
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token_id in self.stop_ids and self.output_len > self.params.min_tokens:
            is_eos = token_id not in self.params.stop_token_ids
            self.finish("stop", stop_reason=None if is_eos else token_id, stop_token_id=token_id)
            return
        delta, stop = self.text.push(token_id)
        if stop is not None:
            self._close("stop", delta, (token_id,), stop)
        elif complete or len(self.token_ids) >= self.end_len:
            tail, stop = self.text.end()
            self._close("stop" if complete or stop is not None else "length", delta + tail, (token_id,), stop)
        else:
            entries = () if logprobs is None else (logprobs,)
            self.on_delta(Delta.of(delta, (token_id,), self.index, None, self.prompt_index, entries))

    def finish(
        self,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> None:
        """End the completion; :meth:`notify` then gives the caller its one final delta."""
        tail, _ = self.text.end(stop_token_id)
        new = () if stop_token_id is None else (stop_token_id,)
        self._close(reason, tail, new, stop_reason, error)

    def _close(
        self,
        reason: FinishReason,
        delta: str,
        new_ids: tuple[int, ...],
        stop_reason: str | int | None,
        error: str | None = None,
    ) -> None:
        assert self.status != "finished", f"request {self.request_id} finished twice"
        self.status = "finished"
        params = self.params
        completion = Completion(
            text=self.text.text,
            token_ids=tuple(self.output_ids),
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=len(self.prompt_ids), completion_tokens=self.output_len, cached_tokens=self.cached_len
            ),
            logprobs=None if params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            index=self.index,
            request_id=self.request_id,
            stop_reason=stop_reason,
            weight_version=self.weight_version,
            error=error,
        )
        entries = tuple(self.logprobs[-len(new_ids) :]) if new_ids else ()
        self._final = Delta.of(delta, new_ids, self.index, completion, self.prompt_index, entries)

    def notify(self) -> None:
        """Hand the final delta to the caller; call it once, after the task's pages went back."""
        assert self._final is not None, "only a finished task has a final delta"
        self.on_delta(self._final)
        self._final = None


@dataclass(slots=True)
class BatchItem:
    """What a step does for one task: feed `n_tokens` from `start` on."""

    task: Task
    start: int
    n_tokens: int
    samples: bool
    """Whether that reaches the task's last token, so that the step yields the next one."""


@dataclass
class Batch:
    """One step's work. The scheduler fills it, the executor reads it; the tokens of the decodes come first."""

    decodes: list[Task]
    """Each has sampled since it was admitted: it feeds the token that it sampled last, at `computed_len`, and samples the
    next one. That token may still be on its way to the host (``pending_len``)."""
    chunks: list[BatchItem]
    """Pieces of prompts, and of what is recomputed."""
    draft_lens: list[int] = field(default_factory=list)
    """Of a step that verifies: for each of the decodes, how many guesses of the tokens behind its last one are fed too. The
    step then has no chunks and samples after every token."""
    drafts: list[tuple[int, ...]] | None = None
    """These guesses; None: the executor's draft model makes them."""

    @property
    def items(self) -> list[BatchItem]:
        """All of it, in the order of the step's tokens."""
        return [BatchItem(task, task.computed_len, 1, True) for task in self.decodes] + self.chunks

    @property
    def must_be_read(self) -> bool:
        """Whether nothing can follow before the step's tokens are known: they decide what a grammar allows next."""
        return any(task.grammar is not None for task in self.decodes) or any(
            item.task.grammar is not None for item in self.chunks
        )

    @property
    def n_tokens(self) -> int:
        """Tokens fed by the step."""
        return len(self.decodes) + sum(self.draft_lens) + sum(item.n_tokens for item in self.chunks)


@dataclass
class StepResult:
    """What the executor returns, on the host."""

    token_ids: list[int]
    """Sampled token of each decode, then of each chunk that samples. If the step verifies, those of a decode's last token
    and of each of its guesses stand together."""
    logprobs: list[TokenLogprobs | None]
    """Of each sampled token, if its request asked for them."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Index of a chunk -> entries for the prompt tokens that it predicts."""
    drafts: list[tuple[int, ...]] = field(default_factory=list)
    """If the step verifies: the guesses for each decode."""
