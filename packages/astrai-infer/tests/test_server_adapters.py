"""Adapters over HTTP: asked for as models, in both protocols; loaded and unloaded by the holder of the admin key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from astrai_core import SamplingParams, save_pretrained
from astrai_core.errors import CheckpointError, ConfigError
from astrai_infer import InferenceEngine
from astrai_infer.server.app import create_app
from astrai_infer.server.config import ServerConfig
from astrai_infer.server.run import _make_engine
from astrai_infer.server.serving import Serving
from astrai_infer.testing import byte_tokenizer, save_tiny_adapter, small_engine, tiny_model
from astrai_infer.testing.server import serving

pytestmark = pytest.mark.anyio

N_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
PROMPT = [{"role": "user", "content": "Hi!"}]
ROOT = {"Authorization": "Bearer root"}
USER = {"Authorization": "Bearer user"}
NAMES = ("tiny", "first", "second")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: str(save_tiny_adapter(root / name, seed)) for seed, name in enumerate(NAMES[1:])}


@pytest.fixture(scope="module")
def said(paths: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Model -> what it says, by the engine itself."""
    with small_engine(tiny_model(), adapters=paths) as engine:
        found = {
            name: engine.generate(PROMPT, GREEDY, adapter=None if name == "tiny" else name).token_ids for name in NAMES
        }
    assert len(set(found.values())) == len(NAMES), "adapters matter"
    return found


@asynccontextmanager
async def local(engine: InferenceEngine, **config: Any) -> AsyncIterator[tuple[Serving, httpx.AsyncClient]]:
    async with serving(engine, **config) as served:
        transport = httpx.ASGITransport(create_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield served, http


async def answered(http: httpx.AsyncClient, model: str, *, stream: bool = False) -> tuple[int, ...]:
    """Return the ids of a chat's answer, and check that it names the model that was asked for."""
    body = {"model": model, "messages": PROMPT, "max_tokens": N_TOKENS, "ignore_eos": True, "temperature": 0}
    answer = await http.post("/v1/chat/completions", json={**body, "return_token_ids": True, "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        assert answer.json()["model"] == model
        return tuple(answer.json()["choices"][0]["token_ids"])
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and line != "data: [DONE]"]
    assert {chunk["model"] for chunk in chunks} == {model}
    return tuple(token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ()))


# ---- asked for ----


async def test_a_model_of_a_request_is_the_base_or_an_adapter(paths: Any, said: Any) -> None:
    """Issue 7, LoRA by name: at the same time, streamed and not, each gets the answer of the model that it names."""
    async with local(small_engine(tiny_model(), adapters=paths, max_num_seqs=8)) as (_, http):
        names = NAMES * 4
        found = await asyncio.gather(*(answered(http, name, stream=i % 2 == 1) for i, name in enumerate(names)))
    assert found == [said[name] for name in names]


async def test_every_route_knows_them(paths: Any, said: Any) -> None:
    """Completions, Anthropic's messages and counts, embeddings, token routes."""
    engine = small_engine(tiny_model(), adapters=paths, max_num_seqs=8)
    ids = engine.encode(PROMPT)
    async with local(engine) as (_, http):
        vectors = {}
        for name in NAMES:
            ask: dict[str, Any] = {
                "max_tokens": N_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = await http.post("/v1/completions", json={"model": name, "prompt": ids, **ask})
            assert tuple(answer.json()["choices"][0]["token_ids"]) == said[name]
            message = {"model": name, "messages": PROMPT, "max_tokens": N_TOKENS, "temperature": 0}
            answer = await http.post("/v1/messages", json=message)
            assert answer.json()["model"] == name
            text = "".join(block["text"] for block in answer.json()["content"])
            assert byte_tokenizer().decode(said[name]).startswith(text)
            assert answer.json()["usage"]["cache_read_input_tokens"] == 16, (
                "what /v1/completions computed, and no other's"
            )
            answer = await http.post("/v1/messages/count_tokens", json={"model": name, "messages": PROMPT})
            assert answer.json() == {"input_tokens": len(ids)}
            answer = await http.post("/tokenize", json={"model": name, "messages": PROMPT})
            assert answer.json()["tokens"] == ids
            answer = await http.post("/v1/embeddings", json={"model": name, "input": ids})
            vectors[name] = tuple(answer.json()["data"][0]["embedding"])
        assert len(set(vectors.values())) == len(NAMES)


async def test_they_are_listed_and_unknown_names_refused(paths: Any) -> None:
    """vLLM's fields: an adapter's parent is the base, its root the directory. Any other name is a 404 in each protocol."""
    async with local(small_engine(tiny_model(), adapters=paths), served_model_name=("base", "alias")) as (served, http):
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(each["id"], each["parent"], each["root"]) for each in listed] == [
            ("base", None, "tiny"),
            ("alias", None, "tiny"),
            ("first", "base", paths["first"]),
            ("second", "base", paths["second"]),
        ]
        assert (await http.get("/v1/models/second")).json() == listed[3]
        assert {each["created"] for each in listed} == {served.created}
        for path, body in {
            "/v1/chat/completions": {"messages": PROMPT},
            "/v1/completions": {"prompt": "a"},
            "/v1/embeddings": {"input": "a"},
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [65]},
        }.items():
            answer = await http.post(path, json={"model": "third", **body})
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
            assert answer.json()["error"]["param"] == "model"
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            more = {} if path.endswith("tokens") else {"max_tokens": 3}
            answer = await http.post(path, json={"model": "third", "messages": PROMPT, **more})
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "not_found_error"
        assert (await http.get("/v1/models/third")).status_code == 404


async def test_what_is_counted_stands_under_each_ones_name(paths: Any) -> None:
    """Rule 22: tokens and times by model; what the engine does as a whole under the base's name; /stats adds up."""
    async with local(small_engine(tiny_model(), adapters=paths)) as (_, http):
        for name in ("first", "first", "tiny"):
            await answered(http, name)
        lines = (await http.get("/metrics")).text.splitlines()
        stats = (await http.get("/stats")).json()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    for name, n in (("tiny", 1), ("first", 2)):
        assert values[f'astrai:generation_tokens_total{{model_name="{name}"}}'] == n * N_TOKENS
        assert values[f'astrai:request_success_total{{finished_reason="length",model_name="{name}"}}'] == n
        assert values[f'astrai:time_to_first_token_seconds_count{{model_name="{name}"}}'] == n
    assert not any('"second"' in line for line in lines)
    assert [line for line in values if line.startswith("astrai:num_requests_running")] == [
        'astrai:num_requests_running{model_name="tiny"}'
    ]
    assert stats["finished"] == {"length": 3}
    assert stats["generation_tokens"] == 3 * N_TOKENS
    assert stats["mean_ttft_s"] > 0
    assert [record["model"] for record in stats["last"]] == ["first", "first", "tiny"]


# ---- loaded and unloaded ----


async def test_adapters_come_and_go_by_the_admin_key(paths: Any, said: Any) -> None:
    """vLLM's routes: without an admin key there are none, and a client's own key does not open them."""
    load = {"lora_name": "second", "lora_path": paths["second"]}
    async with local(small_engine(tiny_model(), adapters=paths)) as (_, http):
        assert (await http.post("/v1/load_lora_adapter", json=load)).status_code == 404
    engine = small_engine(tiny_model(), adapters={"first": paths["first"]}, max_loras=2)
    async with local(engine, admin_key="root", api_key="user") as (served, http):
        for path, body in (("load", load), ("unload", {"lora_name": "first"})):
            for headers in ({}, USER):
                answer = await http.post(f"/v1/{path}_lora_adapter", json=body, headers=headers)
                assert answer.status_code == 401
                assert "the admin key is missing or wrong" in answer.json()["error"]["message"]
        answer = await http.post("/v1/load_lora_adapter", json=load, headers=ROOT)
        assert answer.status_code == 200
        assert answer.json()["id"] == "second"
        assert answer.json()["root"] == paths["second"]
        http.headers = USER
        assert await answered(http, "second") == said["second"]
        answer = await http.post("/v1/unload_lora_adapter", json={"lora_name": "first"}, headers=ROOT)
        assert answer.json() == {"id": "first", "object": "model", "deleted": True}
        assert [each["id"] for each in (await http.get("/v1/models")).json()["data"]] == ["tiny", "second"]
        body = {"model": "first", "messages": PROMPT}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 404
        again = {"lora_name": "third", "lora_path": paths["first"]}
        assert (await http.post("/v1/load_lora_adapter", json=again, headers=ROOT)).status_code == 200
        assert await answered(http, "third") == said["first"]
        assert served.adapters.keys() == {"second", "third"}


async def test_who_has_an_adapter_finishes_with_it(paths: Any) -> None:
    """Unloading drains: the stream that runs ends as it would have, and only then there is room for another."""
    engine = small_engine(tiny_model(), adapters={"first": paths["first"]}, max_loras=1)
    expected = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), adapter="first")
    body = {"model": "first", "messages": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    async with local(engine, admin_key="root") as (served, http):
        engine.pause()
        running = asyncio.create_task(http.post("/v1/chat/completions", json={**body, "return_token_ids": True}))
        while not served.client.n_open:
            await asyncio.sleep(0)
        load = {"lora_name": "second", "lora_path": paths["second"]}
        assert (
            await http.post("/v1/unload_lora_adapter", json={"lora_name": "first"}, headers=ROOT)
        ).status_code == 200
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 404
        answer = await http.post("/v1/load_lora_adapter", json=load, headers=ROOT)
        assert answer.status_code == 400
        assert "1 of them by requests of adapters that were unloaded" in answer.json()["error"]["message"]
        engine.resume()
        assert tuple((await running).json()["choices"][0]["token_ids"]) == expected.token_ids
        assert (await http.post("/v1/load_lora_adapter", json=load, headers=ROOT)).status_code == 200


async def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path, paths: Any, said: Any) -> None:
    """Names that are taken, directories that are none, adapters of other models: a 4xx, and what is served stays."""
    other = str(save_tiny_adapter(tmp_path / "other", hidden_size=64))
    (tmp_path / "file").write_text("")
    engine = small_engine(tiny_model(), adapters={"first": paths["first"]}, max_loras=2)
    async with local(engine, admin_key="root", served_model_name=("tiny", "alias")) as (served, http):

        async def refused(status: int, message: str, path: str = "load", **body: Any) -> None:
            answer = await http.post(f"/v1/{path}_lora_adapter", json=body, headers=ROOT)
            assert answer.status_code == status, answer.text
            said = answer.json()["error"]["message"]
            assert message in said
            assert "\n" not in said

        await refused(400, "'alias' is a name of the model itself", lora_name="alias", lora_path=paths["second"])
        await refused(400, "adapter 'first' is loaded already", lora_name="first", lora_path=paths["second"])
        await refused(400, "no such file; give the directory", lora_name="x", lora_path=str(tmp_path / "nowhere"))
        await refused(400, "no such file; give the directory", lora_name="x", lora_path=str(tmp_path / "file"))
        await refused(400, "cannot be read", lora_name="x", lora_path="a\0b")
        await refused(400, "cannot be read", lora_name="x", lora_path="a" * 5000)
        await refused(400, "give the model that it was trained on", lora_name="x", lora_path=other)
        await refused(400, "lora_name", lora_name="", lora_path=other)
        await refused(400, "load_inplace is not supported", lora_name="x", lora_path=other, load_inplace=True)
        await refused(404, "no adapter 'x' is loaded", "unload", lora_name="x")
        await refused(404, "no adapter 'alias' is loaded", "unload", lora_name="alias")
        assert served.adapters.keys() == {"first"}
        assert await answered(http, "first") == said["first"]
    async with local(small_engine(tiny_model()), admin_key="root") as (_, http):
        await refused(
            400, "this engine has no room for adapters; set max_loras", lora_name="x", lora_path=paths["first"]
        )


def test_the_command_s_engine_has_them(tmp_path: Path, paths: Any, said: Any) -> None:
    """``astrai serve --lora``: from names and directories to an engine; what is wrong is told before the weights load."""
    save_pretrained(tiny_model(), tmp_path / "base", tokenizer=byte_tokenizer())
    config = {"model": str(tmp_path / "base"), "device": "cpu", "max_num_seqs": 2}
    with _make_engine(ServerConfig(**config, lora=paths, max_lora_rank=8)) as engine:
        assert engine.generate(PROMPT, GREEDY, adapter="second").token_ids == said["second"]
        assert engine.adapters.slots is not None
        assert engine.adapters.slots.rank == 8
    with pytest.raises(ConfigError, match="field 'max_lora_rank': input should be 8, 16, 32 or 64"):
        _make_engine(ServerConfig(**config, lora=paths, max_lora_rank=12))
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="nowhere.*no such file; give the directory of a PEFT adapter"):
        _make_engine(ServerConfig(**config, lora={"x": str(tmp_path / "nowhere")}))
