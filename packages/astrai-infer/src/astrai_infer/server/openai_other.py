"""The smaller routes: models, embeddings, /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from astrai_infer.server.body import BodyRoute
from astrai_infer.server.chat import Conversation, ToolChoice, prepare
from astrai_infer.server.errors import ApiError
from astrai_infer.server.openai_completions import prompt_ids
from astrai_infer.server.openai_schema import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from astrai_infer.server.serving import Serving
from astrai_infer.server.sse import while_connected

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

AT_ONCE = 16
"""Prompts that one call to the engine embeds."""


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List what is served."""
    serving: Serving = request.app.state.serving
    return {"object": "list", "data": [describe(serving, name) for name in (*serving.config.names, *serving.adapters)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe one model."""
    serving: Serving = request.app.state.serving
    serving.check_model(name)
    return describe(serving, name)


def describe(serving: Serving, name: str) -> dict[str, Any]:
    """Return OpenAI's description of the model or of an adapter, with vLLM's fields."""
    adapter = serving.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": serving.created if adapter is None else adapter.created,
        "owned_by": "astrai",
        "root": serving.config.model if adapter is None else adapter.path,
        "parent": None if adapter is None else serving.config.names[0],
        "max_model_len": serving.client.info.max_seq_len,
    }


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Turn texts into vectors of length 1."""
    serving: Serving = request.app.state.serving
    adapter = serving.check_model(body.model)
    if not body.input:
        raise ApiError(400, "input is empty; give at least one token", param="input")
    request.state.user = body.user
    serving.check_room(1)
    serving.n_embedding += 1
    try:
        prompts = await prompt_ids(serving, body.input, "input")
        async with asyncio.timeout(serving.config.request_timeout):
            vectors = await while_connected(request.receive, _embed(serving, prompts, body.pooling, adapter))
    finally:
        serving.n_embedding -= 1
    if vectors is None:
        return Response(status_code=499)
    content = await asyncio.to_thread(_described, body, vectors, sum(map(len, prompts)))
    return Response(content, media_type="application/json")


async def _embed(
    serving: Serving, prompts: list[list[int]], pooling: str | None, adapter: str | None
) -> list[list[float]]:
    """Ask for a few at a time, so that a client that leaves ends the rest."""
    vectors: list[list[float]] = []
    for start in range(0, len(prompts), AT_ONCE):
        some = prompts[start : start + AT_ONCE]
        vectors += await serving.client.call("embed", some, pooling or serving.config.pooling, adapter)
    return vectors


def _described(body: EmbeddingRequest, vectors: list[list[float]], n_tokens: int) -> str:
    """The answer's JSON. Vectors are written one by one: the interpreter lock is held while one is, and other threads
    wait."""
    items = [
        json.dumps({"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)})
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    head = json.dumps({"object": "list", "model": body.model, "usage": usage})
    return f'{head[:-1]}, "data": [{", ".join(items)}]}}'


def _encoded(vector: list[float], format: str) -> list[float] | str:
    if format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


@router.post("/tokenize", tags=["Tokens"])
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Turn a prompt or messages into token ids."""
    serving: Serving = request.app.state.serving
    if body.model is not None:
        serving.check_model(body.model)
    if body.prompt is not None:
        ids = (await serving.encode([body.prompt], add_special_tokens=body.add_special_tokens))[0]
    else:
        ids = (await prepare(serving, lambda: _conversation(body))).token_ids
    content = await asyncio.to_thread(_tokenized, serving, ids, body.return_token_strs)
    return Response(content, media_type="application/json")


def _conversation(body: TokenizeRequest) -> Conversation:
    return Conversation(
        messages=[message.plain() for message in body.messages or ()],
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        choice=ToolChoice("auto" if body.tools else "none"),
        add_generation_prompt=body.add_generation_prompt,
    )


def _tokenized(serving: Serving, ids: list[int], with_strs: bool) -> str:
    """The answer's JSON, written in parts for the reason that vectors are."""
    parts = [ids[start : start + 10_000] for start in range(0, len(ids), 10_000)]
    head = json.dumps({"count": len(ids), "max_model_len": serving.client.info.max_seq_len})
    found = f'{head[:-1]}, "tokens": [{", ".join(json.dumps(part)[1:-1] for part in parts)}]'
    if with_strs:
        name = serving.tokenizer.id_to_token
        found += f', "token_strs": [{", ".join(json.dumps([name(i) for i in part])[1:-1] for part in parts)}]'
    return f"{found}}}"


@router.post("/detokenize", tags=["Tokens"])
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """Turn token ids into text."""
    serving: Serving = request.app.state.serving
    if body.model is not None:
        serving.check_model(body.model)
    serving.check_ids("tokens", body.tokens)
    return {"prompt": await serving.decode(body.tokens)}
