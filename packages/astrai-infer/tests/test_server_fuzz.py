"""No value of any field makes the server fail (rule 11 over HTTP): an answer, or a refusal of that request alone."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from astrai_infer.server.anthropic_schema import CountRequest, MessagesRequest
from astrai_infer.server.app import create_app
from astrai_infer.server.openai_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.server import serving

ASK = {"messages": [{"role": "user", "content": "Hi!"}]}
# Half of a surrogate pair, numbers that no float holds, deep lists: what JSON can say.
VALUES = [
    *(
        "null",
        "true",
        "-1",
        "0",
        "1",
        "0.5",
        "1e400",
        "NaN",
        "123456789012345678901234567890",
        '""',
        '"x"',
        '"\\ud800"',
    ),
    *("[]", "{}", "[[]]", '[""]', "[1, -1]", "[999999]", '{"": 1}', '{"x": {"y": []}}', '{"-1": 1}', '{"5": 1e99}'),
    "[" * 80 + "]" * 80,
    '[{"role": "user", "content": "\\ud800"}]',
    '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]',
    '{"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}',
    '{"json": {"type": "object", "properties": {"a": {"pattern": "("}}}}',
    '{"regex": "(?=a)b"}',
    *(f'{{"json": {"{" + chr(34) + "a" + chr(34) + ":"}{deep * "["}{deep * "]"}}}}}' for deep in (300, 5000)),
    '[{"type": "function", "function": {"name": "f", "parameters": ' + '{"a":' * 300 + "1" + "}" * 300 + "}}]",
]
ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {**ASK, "max_tokens": 2}),
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 2}),
    "/v1/messages": (MessagesRequest, {**ASK, "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountRequest, ASK),
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize("path", ROUTES)
async def test_every_field_takes_any_value(path: str) -> None:
    schema, good = ROUTES[path]
    fields = [field.alias or name for name, field in schema.model_fields.items()]
    failed, served = [], 0
    async with serving(small_engine(tiny_model(), max_num_seqs=8)) as server:
        transport = httpx.ASGITransport(create_app(server), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for field in fields:
                for value in VALUES:
                    body = {"model": "tiny", **good}
                    body.pop(field, None)
                    text = f"{json.dumps(body)[:-1]}, {json.dumps(field)}: {value}}}"
                    answer = await http.post(path, content=text.encode())
                    served += answer.status_code == 200
                    if answer.status_code >= 500:
                        failed.append((field, value, answer.status_code, answer.text))
            assert failed == []
            assert served >= len(fields)
            last = await http.post(path, json={"model": "tiny", **good})
        assert last.status_code == 200 and server.client.n_open == 0 and server.trouble() is None
