"""schemathesis: what the server's OpenAPI document allows and forbids, against a live server (floor of issue 7).

Examples are few, so that all of it takes seconds, and those of a run come again in the next one with the same tests (other
modules lend hypothesis other constants); ``ASTRAI_SCHEMA_EXAMPLES=500`` asks for more.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings, strategies

from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.server import LiveServer, live_server

N_EXAMPLES = int(os.environ.get("ASTRAI_SCHEMA_EXAMPLES", "15"))
POSTS = {
    "/v1/chat/completions": 200,
    "/v1/completions": 200,
    "/v1/embeddings": 200,
    "/v1/messages": 200,
    "/v1/messages/count_tokens": 200,
    "/tokenize": 200,
    "/detokenize": 200,
    "/update_weights": 400,
    "/v1/load_lora_adapter": 400,
    "/v1/unload_lora_adapter": 404,
}
"""Routes that take a body, and the least status that some examples which the document allows must get."""
WRITES = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
NEEDED = {"model", "messages", "prompt", "input", "tokens", "path", "version", "lora_name", "lora_path"}
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi!"}], "prompt": "Hi!", "tokens": [72]}
"""Stand in half of the examples: what is made up is mostly empty, or ids outside of the vocabulary."""
GETS = ("/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics", "/stats")
CONFORMS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)
ADMIN = {"Authorization": "Bearer root"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(lambda: small_engine(tiny_model(), max_num_seqs=8), admin_key="root", access_log=False) as live:
        yield live


@pytest.fixture(scope="module")
def schema(server: LiveServer) -> Any:
    import schemathesis

    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def run(operation: Any, mode: str, checks: tuple[str, ...]) -> Counter[int]:
    """Send examples, check every answer, and return how often each status came."""
    import schemathesis
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    held, seen = [CHECKS.get_one(name) for name in checks], Counter[int]()
    with requests.Session() as session:

        @settings(
            max_examples=N_EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)), strategies.randoms())
        def send(case: Any, draw: Any) -> None:
            if isinstance(case.body, dict):
                if isinstance(case.body.get("model"), str):
                    case.body["model"] = "tiny"  # any other name is a 404
                if mode == "positive":  # with all fields at once, and random turns, hardly one request is in order
                    kept = {name for name in case.body if name in NEEDED or draw.random() < 0.1}
                    if {"prompt", "messages"} <= kept:  # both are a 400
                        kept.discard(draw.choice(("prompt", "messages", "neither")))
                    case.body = {name: case.body[name] for name in case.body if name in kept}
                    for name, good in GOOD.items():
                        if name in kept and draw.random() < 0.5:
                            case.body[name] = good
                    if operation.path in WRITES:
                        case.body["max_tokens"] = draw.randint(1, 8)  # to the end of the context takes its time
            response = case.call(session=session, headers=ADMIN)
            seen[response.status_code] += 1
            case.validate_response(response, checks=held)

        send()
    return seen


@pytest.mark.parametrize("path", POSTS)
def test_what_the_document_allows_is_answered_as_it_says(schema: Any, path: str) -> None:
    """No 500; status, type of content, headers and body are those of the document; ranges that it does not tell are a
    400.
    """
    seen = run(schema[path]["POST"], "positive", CONFORMS)
    assert seen[POSTS[path]] > 0 and set(seen) <= {200, 400, POSTS[path]}


@pytest.mark.parametrize("path", POSTS)
def test_what_the_document_forbids_is_refused(schema: Any, path: str) -> None:
    """Rules 11, 19: nothing that the document does not allow is taken, and the refusal is the documented one."""
    seen = run(schema[path]["POST"], "negative", (*CONFORMS, "negative_data_rejection"))
    assert seen.total() > 0 and all(400 <= status < 500 for status in seen)


@pytest.mark.parametrize("path", GETS)
def test_what_is_only_read(schema: Any, path: str) -> None:
    seen = run(schema[path]["GET"], "positive", CONFORMS)
    assert set(seen) == ({404} if "{" in path else {200})


def test_every_route_is_asked(server: LiveServer, schema: Any) -> None:
    described = {(method, path) for path, operations in schema.raw_schema["paths"].items() for method in operations}
    bare = {"pause", "resume", "sleep", "wake"}  # would stop the engine for the others; they take nothing
    asked = {("post", path) for path in POSTS} | {("get", path) for path in GETS}
    assert described == asked | {("post", f"/{name}") for name in bare}
    assert server.serving.client.n_open == 0 and server.serving.trouble() is None
