"""The application: routes, and how errors are told."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from astrai_core.errors import AstraiError
from astrai_infer._version import __version__
from astrai_infer.server import admin, anthropic, docs, openai_chat, openai_completions, openai_other, page
from astrai_infer.server.errors import OPENAI_ERRORS, ApiError, as_api_error
from astrai_infer.server.front import Front
from astrai_infer.server.serving import Serving

logger = logging.getLogger(__name__)


def create_app(serving: Serving) -> FastAPI:
    """Return the ASGI application that serves one model; it keeps `serving` as ``app.state.serving``."""
    app = FastAPI(
        title="astrai",
        version=__version__,
        description="The OpenAI and Anthropic APIs of one model.",
        openapi_url=None,  # see docs: FastAPI's own pages load scripts from elsewhere, and block the event loop
        strict_content_type=False,
        responses=OPENAI_ERRORS,
    )
    app.state.serving = serving
    for module in (openai_chat, openai_completions, openai_other, anthropic, page, docs):
        app.include_router(module.router)
    if serving.config.admin_key is not None:
        app.include_router(admin.router)
    unwell: dict[int | str, dict[str, Any]] = {503: {"description": "The same, with the reason."}}
    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
    app.add_api_route("/health", _health, methods=["GET"], tags=["State"], responses=unwell)
    app.add_api_route("/ready", _ready, methods=["GET"], tags=["State"], responses=unwell)
    app.add_api_route("/metrics", _metrics, methods=["GET"], tags=["State"], responses=text, response_class=Response)
    app.add_api_route("/stats", _stats, methods=["GET"], tags=["State"])
    for kind in (ApiError, AstraiError, RequestValidationError, TimeoutError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(500, _on_unexpected)
    app.add_middleware(Front, serving=serving)
    return app


async def _health(request: Request) -> Response:
    """200 while the engine is well, 503 with the reason otherwise."""
    serving: Serving = request.app.state.serving
    trouble, health = serving.trouble(), serving.client.health
    body: dict[str, Any] = {"status": "ok" if trouble is None else "unhealthy"}
    if trouble is not None:
        body["reason"] = trouble
    if health is not None:
        body |= {"engine": health.status, "running": health.n_running, "waiting": health.n_waiting}
        body |= {"steps": health.n_steps, "seconds_since_step": round(health.seconds_since_step, 3)}
        body["weight_version"] = health.weight_version
    return JSONResponse(body, 200 if trouble is None else 503)


async def _ready(request: Request) -> Response:
    """200 while new requests are welcome, 503 with the reason otherwise."""
    serving: Serving = request.app.state.serving
    reason = "the server is shutting down" if serving.draining else serving.trouble()
    if reason is not None:
        return JSONResponse({"ready": False, "reason": reason}, 503)
    return JSONResponse({"ready": True})


async def _metrics(request: Request) -> Response:
    """Counters in Prometheus' text format."""
    serving: Serving = request.app.state.serving
    return Response(serving.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _stats(request: Request) -> dict[str, Any]:
    """Totals, what runs, means, and the last finished completions."""
    serving: Serving = request.app.state.serving
    return serving.metrics.stats()


def _request_id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request_id", ""))


async def _on_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response(request.url.path, _request_id(request))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths, wrong methods, bodies that cannot be read."""
    assert isinstance(error, HTTPException), "registered for it"
    if isinstance(error.__cause__, (ApiError, RequestValidationError)):  # the body's, which FastAPI reads
        return await _on_error(request, error.__cause__)
    path = request.url.path
    message = f"{request.method} {path}: {str(error.detail).lower()}; see /docs for what there is"
    status = error.status_code if error.status_code in (404, 405) else 400
    response = ApiError(status, message).response(path, _request_id(request))
    response.headers.update(error.headers or {})
    return response


async def _on_unexpected(request: Request, error: Exception) -> Response:
    logger.error("request %s failed", _request_id(request), exc_info=error)
    message = "the server failed on this request; its log says more"
    return ApiError(500, message).response(request.url.path, _request_id(request))
