"""What HTTP costs: the same requests to an engine of this process and, streamed, to a server; and whether its loop stalls.

    OMP_NUM_THREADS=1 python -m benchmarks.serving --model smollm2 --streams 32
    OMP_NUM_THREADS=1 python -m benchmarks.serving --model tiny --streams 256 --new-tokens 48
    python -m benchmarks.serving --model preset --streams 64 --new-tokens 512 --limit 140 --out serving.json      on a GPU

The server is ``astrai serve``'s: a process with the event loop, another with the engine. Rounds of the bare engine and of
HTTP take turns, with the same prompts of token ids; every streamed text must be the bare engine's, or the run fails; with
random weights in bf16 on a GPU, where near ties depend on the batch, every count of tokens must be. The clients are part of
the time over HTTP; they only keep what they read until the round is over. A stall is how much later than asked a task of
the server's loop was woken: on a machine that others use too that includes waiting for a core, so the time that the loop's
own thread ran between two wake-ups stands beside it, which bounds what the code can have blocked.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tokenizers
import torch
import uvloop
from benchmarks.engine import MODELS, build_model
from benchmarks.measure import table
from uvicorn import Config

from astrai_core import SamplingParams
from astrai_core.checkpoint.source import open_source
from astrai_core.tokenizer.stream_decoder import BYTE_OF_CHAR
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.client import EngineClient
from astrai_infer.server.app import create_app
from astrai_infer.server.config import ServerConfig
from astrai_infer.server.run import DrainingServer
from astrai_infer.server.serving import Serving
from astrai_infer.testing import small_engine, tiny_model
from astrai_infer.testing.tokenizer import byte_tokenizer
from tools.gpu_results import environment

TICK_S = 0.005


def make_engine(model: str, streams: int) -> InferenceEngine:
    """Build the engine that is measured; "tiny" has two layers of 32 channels, so that HTTP is nearly all there is."""
    if model == "tiny":
        return small_engine(tiny_model(max_position_embeddings=1024), max_num_seqs=streams)
    if model in MODELS:  # another such engine is on the same GPU
        settings = EngineConfig(max_num_seqs=streams, max_seq_len=2048, memory_fraction=0.3)
        return InferenceEngine(build_model(model, "cuda"), make_tokenizer(model), settings)
    return InferenceEngine.from_pretrained(model, max_num_seqs=streams, max_seq_len=1024)


def make_tokenizer(model: str) -> Tokenizer:
    """Return the model's tokenizer; with random weights one in which every id is some characters of text."""
    if model == "tiny":
        return byte_tokenizer()
    if model not in MODELS:
        return open_source(model).tokenizer()
    words = {f"\u0120t{i}": i for i in range(256, MODELS[model]["vocab_size"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={**BYTE_OF_CHAR, **words}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


def serve(model: str, streams: int, channel: Connection) -> None:
    """Serve in a process of its own: say the port, then, for each message, the stalls since the one before."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(model, streams, channel))


async def _serve(model: str, streams: int, channel: Connection) -> None:
    client = await EngineClient.start_process(functools.partial(make_engine, model, streams))
    try:
        settings = ServerConfig(model=model, access_log=False)
        serving = Serving(client, make_tokenizer(model), settings, {})
        server = DrainingServer(Config(create_app(serving), port=0, log_config=None, lifespan="off"), serving)
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        gc.collect()
        gc.freeze()
        channel.send(server.servers[0].sockets[0].getsockname()[1])
        stalls: list[tuple[float, float]] = []
        watching, before_s = asyncio.create_task(_watch(stalls)), time.process_time()
        while await asyncio.to_thread(channel.recv):
            await asyncio.sleep(2 * TICK_S)  # a stall is told when it is over
            used_s, before_s = time.process_time() - before_s, time.process_time()
            channel.send((max(wall for wall, _ in stalls), max(ran for _, ran in stalls), used_s))
            stalls.clear()
        watching.cancel()
        server.should_exit = True
        await running
    finally:
        await client.close()


async def _watch(stalls: list[tuple[float, float]]) -> None:
    while True:
        began, ran = time.perf_counter(), time.thread_time()
        await asyncio.sleep(TICK_S)
        stalls.append((time.perf_counter() - began - TICK_S, time.thread_time() - ran))


async def ask(port: int, body: dict[str, Any]) -> bytes:
    """Send one request on a connection of its own and return all that was streamed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    return answer


async def ask_all(port: int, prompts: Sequence[list[int]], body: dict[str, Any]) -> list[bytes]:
    """Send all requests at once."""
    return await asyncio.gather(*(ask(port, {**body, "prompt": prompt}) for prompt in prompts))


def read(answer: bytes) -> tuple[str, int, int]:
    """Return the text of a stream, its tokens, and the events that they came in."""
    parts, at = [], answer.index(b"\r\n\r\n") + 4
    while at < len(answer):  # of HTTP's chunks
        begin = answer.index(b"\r\n", at) + 2
        end = begin + int(answer[at:begin], 16)
        parts.append(answer[begin:end])
        at = end + 2
    events = [json.loads(each.removeprefix(b"data: ")) for each in b"".join(parts).split(b"\n\n")[:-2]]
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    return "".join(texts), events[-1]["usage"]["completion_tokens"], len(texts)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run.

    Raises
    ------
    SystemExit
        If a streamed text, or its length, is not the bare engine's.
    """
    model, n, new_tokens = arguments.model, arguments.streams, arguments.new_tokens
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(model, n, theirs))
    server.start()
    theirs.close()
    times: dict[str, list[float]] = {"engine": [], "http": []}
    seen: list[tuple[float, float, float]] = []
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    body = {"model": model, "temperature": 0, "max_tokens": new_tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    n_events, end_s = 0, time.monotonic() + arguments.limit
    try:
        port = ours.recv()
        with make_engine(model, n) as engine:
            for i in range(arguments.rounds + 1):
                round_s = time.monotonic()
                prompts = torch.randint(97, 123, (n, arguments.prompt_len), generator=generator).tolist()
                began = time.perf_counter()
                expected = engine.generate(prompts, params)
                times["engine"].append(time.perf_counter() - began)
                ours.send(True)
                ours.recv()
                began = time.perf_counter()
                answers = asyncio.run(ask_all(port, prompts, body))
                times["http"].append(time.perf_counter() - began)
                ours.send(True)
                seen.append(ours.recv())
                found = [read(answer) for answer in answers]
                n_events = sum(n for *_, n in found)
                if {n for _, n, _ in found} != {new_tokens}:
                    raise SystemExit(f"round {i}: a stream has not {new_tokens} tokens")
                if model not in MODELS and [text for text, *_ in found] != [each.text for each in expected]:  # type: ignore[union-attr]
                    raise SystemExit(f"round {i}: a streamed text differs from the bare engine's")
                if i and 2 * time.monotonic() - round_s > end_s:
                    break
    finally:
        ours.send(False)
        server.join()
    warm = {name: each[1:] for name, each in times.items()}  # the first round takes memory and connections
    engine_s, http_s = statistics.median(warm["engine"]), statistics.median(warm["http"])
    return {
        "model": model,
        "streams": n,
        "prompt_len": arguments.prompt_len,
        "new_tokens": new_tokens,
        "engine_s": engine_s,
        "http_s": http_s,
        "cost": http_s / engine_s - 1,
        "best_cost": min(warm["http"]) / min(warm["engine"]) - 1,
        "engine_tokens_per_s": n * new_tokens / engine_s,
        "tokens_per_s": n * new_tokens / http_s,
        "tokens_per_event": n * new_tokens / n_events,
        "server_us_per_token": 1e6 * statistics.median(used for *_, used in seen[1:]) / (n * new_tokens),
        "max_stall_ms": 1000 * max(wall for wall, _, _ in seen),
        "max_stall_cpu_ms": 1000 * max(ran for _, ran, _ in seen),
        "times": warm,
        "environment": environment() if torch.cuda.is_available() else {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="smollm2", help="what `astrai serve` takes, tiny, or random weights: preset, ..."
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600, help="seconds after which no further round is begun")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    print(table([found], [name for name in found if name not in ("times", "environment")]))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
