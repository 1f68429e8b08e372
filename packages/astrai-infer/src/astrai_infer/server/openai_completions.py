"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from astrai_core.types import TokenLogprobs
from astrai_infer.server.body import BodyRoute
from astrai_infer.server.errors import ApiError
from astrai_infer.server.openai_chat import grouped, usage
from astrai_infer.server.openai_schema import CompletionRequest
from astrai_infer.server.serving import Running, Serving
from astrai_infer.server.sse import STREAMED, EventStream, event, whole
from astrai_infer.wire import End, Piece

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Go on with one text or many."""
    serving: Serving = request.app.state.serving
    adapter = serving.check_model(body.model)
    if isinstance(body.prompt[0], (list, str)) and not isinstance(body.prompt, str):
        serving.check_room(len(body.prompt))  # before so many are encoded
    prompts = await prompt_ids(serving, body.prompt, "prompt", add_special_tokens=body.add_special_tokens)
    params = serving.sampling(
        {
            # A prompt's log-probabilities come with a completion of one token, which is then left out.
            "max_tokens": 1 if body.max_tokens == 0 else body.max_tokens,
            "logprobs": body.logprobs,
            "prompt_logprobs": body.logprobs if body.echo else None,
            "structured": body.structure(),
            **body.sampling(),
        }
    )
    texts = await _texts(serving, body.prompt, prompts) if body.echo else [""] * len(prompts)
    request_id: str = request.state.request_id
    request.state.user = body.user
    running = await serving.start(request_id, prompts, params, body.priority, adapter=adapter)
    answer = CompletionAnswer(serving, body, running, f"cmpl-{request_id}", prompts, texts, params.n)
    if body.stream:
        return EventStream(answer.stream(), running, lambda error: event(error.body("", request_id)))
    return await whole(request, running, answer.whole())


async def prompt_ids(
    serving: Serving,
    given: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    field: str,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Turn one text, one list of ids, or a list of either into lists of ids."""
    if isinstance(given, str):
        given = [given]
    elif given and isinstance(given[0], int):
        given = [cast("list[int]", given)]
    texts = [item for item in given if isinstance(item, str)]
    if texts:
        encoded = await serving.encode(texts, add_special_tokens=add_special_tokens)
    else:
        encoded = [list(item) for item in given if not isinstance(item, (str, int))]
    for i, ids in enumerate(encoded):
        if not ids:
            raise ApiError(400, f"{field}[{i}] is empty; give at least one token", param=field)
        serving.check_length(f"{field}[{i}]", ids)
        serving.check_ids(field, ids)
    return encoded


async def _texts(serving: Serving, given: Any, prompts: list[list[int]]) -> list[str]:
    """The texts that are echoed: as they were sent, or of the ids that were."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], str):
        return list(given)
    return [await serving.decode(ids) for ids in prompts]


@dataclass
class Choice:
    """One completion as it grows."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    offset: int = 0
    """Characters of the tokens whose log-probabilities were told."""
    end: End | None = None


class CompletionAnswer:
    """The road from pieces to what a client gets."""

    def __init__(
        self,
        serving: Serving,
        body: CompletionRequest,
        running: Running,
        answer_id: str,
        prompts: list[list[int]],
        texts: list[str],
        n: int,
    ) -> None:
        self._serving = serving
        self._body = body
        self._running = running
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": running.created,
            "model": body.model,
            **({"usage": None} if body.tells_usage else {}),
        }
        self._prompts = prompts
        self._texts = texts
        self._n = n
        self._choices = [Choice() for _ in range(n * len(prompts))]

    async def whole(self) -> Response:
        """Return the completions when all are complete."""
        async for pieces in self._running:
            for group in grouped(pieces):
                self._take(group)
        choices = [self._choice_body(i, choice) for i, choice in enumerate(self._choices)]
        return JSONResponse({**self._head, "choices": choices, "usage": self._usage()})

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the completions as events."""
        started: set[int] = set()
        async for pieces in self._running:
            chunks = []
            for group in grouped(pieces):
                text = "" if group.choice in started else self._texts[group.choice // self._n]
                started.add(group.choice)
                self._take(group)
                chunks.append(self._chunk(group, text))
            yield b"".join(chunks)
        if self._body.tells_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _take(self, group: Piece) -> None:
        choice = self._choices[group.choice]
        if group.end is not None:
            choice.end = group.end
        if self._body.max_tokens == 0:
            return
        choice.text.append(group.text)
        choice.logprobs += group.logprobs
        choice.token_ids += group.token_ids

    def _chunk(self, group: Piece, before: str) -> bytes:
        choice, shown = self._choices[group.choice], self._body.max_tokens != 0
        body: dict[str, Any] = {
            "index": group.choice,
            "text": before + group.text if shown else before,
            "logprobs": self._logprobs(choice, group.logprobs) if self._body.logprobs is not None else None,
            **self._ending(choice),
        }
        if self._body.return_token_ids:
            body["token_ids"] = list(group.token_ids) if shown else []
        return event({**self._head, "choices": [body]})

    def _choice_body(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.end is not None, "the stream ends when all choices have"
        prompt = self._prompts[index // self._n]
        entries: list[TokenLogprobs | None] = [*(choice.end.prompt_logprobs or ()), *choice.logprobs]
        body = {
            "index": index,
            "text": self._texts[index // self._n] + "".join(choice.text),
            "logprobs": self._logprobs(choice, entries, prompt[0]) if self._body.logprobs is not None else None,
            **self._ending(choice),
        }
        if self._body.return_token_ids:
            body |= {"prompt_token_ids": prompt, "token_ids": choice.token_ids}
        return body

    def _ending(self, choice: Choice) -> dict[str, Any]:
        if choice.end is None:
            return {"finish_reason": None, "stop_reason": None}
        reason = "length" if self._body.max_tokens == 0 else choice.end.finish_reason
        return {"finish_reason": reason, "stop_reason": choice.end.stop_reason}

    def _usage(self) -> dict[str, Any]:
        total = usage([choice.end for choice in self._choices], self._n)
        if self._body.max_tokens == 0:
            total |= {"completion_tokens": 0, "total_tokens": total["prompt_tokens"]}
        return total

    def _logprobs(
        self, choice: Choice, entries: Sequence[TokenLogprobs | None], first_id: int | None = None
    ) -> dict[str, Any]:
        """OpenAI's four lists. Nothing predicts a prompt's first token, whose id is `first_id`."""
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            assert entry is not None or first_id is not None, "only a prompt has a token without a prediction"
            token = self._token(first_id if entry is None else entry.token_id)
            told["tokens"].append(token)
            told["token_logprobs"].append(None if entry is None else max(entry.logprob, -9999.0))
            told["top_logprobs"].append(
                None if entry is None else {self._token(i): max(value, -9999.0) for i, value in entry.top}
            )
            told["text_offset"].append(choice.offset)
            choice.offset += len(token)
        return told

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else self._serving.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
