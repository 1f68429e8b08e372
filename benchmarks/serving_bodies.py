"""How long one large body holds the server's event loop, for every route that takes token ids, texts or lists.

    OMP_NUM_THREADS=1 python -m benchmarks.serving_bodies --out bodies.json

Bodies are as large as the server admits, 4 MiB. A stall is how much later than asked a task of the server's loop was woken;
the time that the loop's own thread ran stands beside it. Each body is sent a few times and the least of both is told: on a
machine that others use too, the rest is theirs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import table
from benchmarks.serving import serve

from astrai_infer.server.body import MAX_VALUES

LIMIT = (4 << 20) - 200


def bodies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (route, what is large, body)."""
    ask = [{"role": "user", "content": "Hi!"}]
    tool = {"type": "function", "function": {"name": "f"}}
    text = "some words " * (LIMIT // 11)
    for size, most in (("4 MiB of ", LIMIT), ("most ", MAX_VALUES - 20)):

        def many(of: list[Any], n_bytes: int, n_values: int, most: int = most) -> list[Any]:
            return of * min(LIMIT // n_bytes // len(of), most // n_values // len(of))

        ids, thousand = many([1234], 5, 1), [123] * 1000
        for route, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
            yield route, f"{size}ids of one prompt", {field: ids}
            yield route, f"{size}short ids", {field: many([1], 2, 1)}
            yield route, f"{size}prompts of 1,000 ids", {field: many([thousand], 5004, 1001)}
            if most == LIMIT or route == "/v1/completions":  # so many embeddings take minutes
                yield route, f"{size}prompts of one id", {field: many([[1]], 4, 2)}
                yield route, f"{size}short texts", {field: many(["a"], 4, 1)}
        n_biases = len(many([0], 11, 2))
        yield (
            "/v1/completions",
            f"{size}logit_bias",
            {"prompt": "a", "logit_bias": {str(i): 1 for i in range(n_biases)}},
        )
        for route in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"):
            extra = {} if route in ("/tokenize", "/v1/messages/count_tokens") else {"max_tokens": 1}
            parts = many([{"type": "text", "text": "a"}], 27, 5)
            yield route, f"{size}messages", {**extra, "messages": many(ask, 35, 5)}
            yield route, f"{size}parts", {**extra, "messages": [{"role": "user", "content": parts}]}
        yield "/v1/chat/completions", f"{size}tools", {"messages": ask, "tools": many([tool], 53, 7)}
        schema = {"type": "object", "properties": {f"p{i}": {} for i in range(len(many([0], 14, 3)))}}
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield "/v1/chat/completions", f"{size}schema", {"messages": ask, "response_format": format}
        yield "/detokenize", f"{size}ids", {"tokens": many([99], 3, 1)}
    for route, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input"), ("/tokenize", "prompt")):
        yield route, "one text", {field: text}
    for route in ("/v1/chat/completions", "/v1/messages"):
        yield route, "one text", {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    yield "/v1/completions", "not JSON", {}


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return one row for each body."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=("tiny", 64, theirs))
    server.start()
    theirs.close()
    rows = []
    try:
        port = ours.recv()
        for route, what, body in bodies():
            data = json.dumps({"model": "tiny", **body}, separators=(",", ":")).encode()
            if what == "not JSON":
                data = b"[" * LIMIT
            seen, status, said = [], 0, ""
            for _ in range(rounds):
                ours.send(True)
                ours.recv()
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
                connection.request("POST", route, data, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                status, content = answer.status, answer.read()
                connection.close()
                ours.send(True)
                seen.append(ours.recv())
                said = "" if status == 200 else json.loads(content)["error"]["message"]
            wall, ran = (1000 * min(each[i] for each in seen) for i in (0, 1))
            rows.append({"route": route, "large": what, "MB": len(data) / 1e6, "stall_ms": wall, "stall_cpu_ms": ran})
            rows[-1] |= {"status": status, "said": said[:90]}
            print(table(rows[-1:], list(rows[-1])).splitlines()[-1], flush=True)
    finally:
        ours.send(False)
        server.join()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
