"""Routes for whoever owns the server: pause, sleep, new weights, adapters. They exist only with ``--admin-key``."""

from __future__ import annotations

import hmac
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from pydantic import Field

from astrai_infer.server.errors import ApiError
from astrai_infer.server.openai_other import describe
from astrai_infer.server.openai_schema import Strict
from astrai_infer.server.serving import Serving


def _check_key(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    given = request.headers.get("authorization", "").encode("latin-1")
    key = serving.config.admin_key
    assert key is not None, "without a key the routes do not exist"
    if not hmac.compare_digest(given, f"Bearer {key}".encode()):
        raise ApiError(401, "the admin key is missing or wrong; send it as `Authorization: Bearer KEY`")
    return serving


router = APIRouter(tags=["Admin"])
Admin = Annotated[Serving, Depends(_check_key)]


class UpdateWeights(Strict):
    """``POST /update_weights``."""

    path: str
    """A directory or .gguf file of the same architecture, on the server's disk."""
    version: int
    """Larger than the last one; completions report it."""


class UnloadAdapter(Strict):
    """``POST /v1/unload_lora_adapter``; vLLM's names."""

    lora_name: str = Field(min_length=1)
    """As clients ask for it."""


class LoadAdapter(UnloadAdapter):
    """``POST /v1/load_lora_adapter``; vLLM's names."""

    lora_path: str
    """A directory of PEFT's for the served model, on the server's disk."""


@router.post("/pause")
async def pause(serving: Admin) -> dict[str, Any]:
    """Run no further step; requests keep their place, new ones queue up."""
    return await _state(serving, "pause")


@router.post("/resume")
async def resume(serving: Admin) -> dict[str, Any]:
    """Go on after a pause."""
    return await _state(serving, "resume")


@router.post("/sleep")
async def sleep(serving: Admin) -> dict[str, Any]:
    """Pause and give the KV cache's memory back."""
    return await _state(serving, "sleep")


@router.post("/wake")
async def wake(serving: Admin) -> dict[str, Any]:
    """Take the memory again and go on; what ran is computed again."""
    return await _state(serving, "resume")


@router.post("/update_weights")
async def update_weights(body: UpdateWeights, serving: Admin) -> dict[str, Any]:
    """Copy new weights over the old ones; what runs keeps its tokens and goes on with the new weights."""
    return await _state(serving, "update_weights", body.path, body.version)


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapter, serving: Admin) -> dict[str, Any]:
    """Serve one more adapter under a name of its own; what runs goes on. Returns its entry of /v1/models."""
    await serving.load_adapter(body.lora_name, body.lora_path)
    return describe(serving, body.lora_name)


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapter, serving: Admin) -> dict[str, Any]:
    """Refuse new requests for an adapter; those that run finish, and then there is room for another."""
    await serving.unload_adapter(body.lora_name)
    return {"id": body.lora_name, "object": "model", "deleted": True}


async def _state(serving: Serving, name: str, *arguments: Any) -> dict[str, Any]:
    state: dict[str, Any] = await serving.client.call(name, *arguments)
    return state


PATHS = frozenset(route.path for route in router.routes if isinstance(route, APIRoute))
"""They ask for the admin key, and so for no other."""
