"""What a client sees when something goes wrong, in the envelope of its protocol."""

from __future__ import annotations

import re
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.responses import JSONResponse

from astrai_core.errors import AstraiError, ChatTemplateError, CheckpointError, ConfigError, EngineError, RequestError

# status -> (OpenAI's type, Anthropic's type)
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("server_error", "timeout_error"),
}


class OpenAIProblem(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """OpenAI's envelope of an error."""

    error: OpenAIProblem


class AnthropicProblem(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Anthropic's envelope of an error."""

    type: str
    error: AnthropicProblem
    request_id: str


def _described(envelope: type) -> dict[int | str, dict[str, Any]]:
    refused = {"model": envelope, "description": "The request is refused, for the reason that the answer names."}
    failed = {"model": envelope, "description": "The server cannot answer now, or failed on this request."}
    return {"4XX": refused, "5XX": failed}


OPENAI_ERRORS, ANTHROPIC_ERRORS = _described(OpenAIError), _described(AnthropicError)
"""Of the API's description."""


class ApiError(Exception):
    """A request that ends with an error status.

    Parameters
    ----------
    status
        HTTP status.
    message
        One line: what is wrong and what to do.
    param
        The field that is wrong.
    code
        OpenAI's word for it.
    retry_after_s
        When to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self, path: str, request_id: str) -> dict[str, Any]:
        """Return the envelope of the protocol that `path` belongs to."""
        openai_type, anthropic_type = _TYPES[self.status]
        if speaks_anthropic(path):
            error = {"type": anthropic_type, "message": self.message}
            return {"type": "error", "error": error, "request_id": request_id}
        return {"error": {"message": self.message, "type": openai_type, "param": self.param, "code": self.code}}

    def response(self, path: str, request_id: str) -> JSONResponse:
        """Return the whole answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return JSONResponse(self.body(path, request_id), self.status, headers)


def speaks_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's protocol."""
    return path.startswith("/v1/messages")


def as_api_error(error: Exception) -> ApiError:
    """Return what a client should see of an error that was raised on purpose, or by the clock."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than the server allows; ask for less, or raise request-timeout")
    if isinstance(error, RequestError) and "max_waiting" in str(error):
        return ApiError(429, str(error), code="queue_full", retry_after_s=1)
    if isinstance(error, (RequestError, ChatTemplateError, ConfigError, CheckpointError)):
        return ApiError(400, str(error).removeprefix("SamplingParams: "), param=_field(str(error)))
    assert isinstance(error, AstraiError), "other errors are not turned into answers"
    return ApiError(503 if isinstance(error, EngineError) and "process ended" in str(error) else 500, str(error))


def _invalid(error: RequestValidationError) -> ApiError:
    """One complaint: of those about a field's alternatives, the one that got furthest, or was not about its type."""
    first = max(error.errors(), key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    location = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}; correct it")
    # Members of unions stand in the path under the names of their types.
    field = ".".join(str(p) for p in location if isinstance(p, int) or re.fullmatch(r"(?!str$)[a-z_]+", p)) or "body"
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"{field} is not supported by this server; leave it out", param=field, code="unknown_field"
        )
    if first["type"] == "missing":
        return ApiError(400, f"{field} is required; add it", param=field)
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{field}: {message[:1].lower()}{message[1:]}", param=field)


def _field(message: str) -> str | None:
    _, found, rest = message.partition("field '")
    return rest.partition("'")[0] if found else None
