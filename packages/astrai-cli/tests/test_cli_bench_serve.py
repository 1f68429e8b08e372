"""``astrai bench serve``: arrivals and statistics on a scripted server with a virtual clock, and a real one."""

from __future__ import annotations

import asyncio
import itertools
import json
import selectors
import socket
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import rich_click as click

from astrai_cli.load import Job, LoadReport, Plan, Record, Spread, Target

httpx = pytest.importorskip("httpx", reason="httpx is not installed")


JOB = Job(0.0, [1, 2, 3], 4)


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when everything waits for it, and then at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        loop = self

        class Jump(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> list[Any]:
                assert timeout is not None, "all wait, and nothing will happen"
                loop.now_s += timeout
                return super().select(0)

        super().__init__(Jump())

    def time(self) -> float:
        return self.now_s


def virtually(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(work)


class Script(httpx.AsyncBaseTransport):  # type: ignore[name-defined]
    """A server that answers by a script: after so many seconds, these bytes.

    Parameters
    ----------
    answer
        The n-th request and its body -> status and [(seconds, bytes), ...].
    """

    def __init__(self, answer: Callable[[int, Any], tuple[int, list[tuple[float, bytes]]]]) -> None:
        self._answer = answer
        self.bodies: list[Any] = []
        self.active = self.peak = 0

    async def handle_async_request(self, request: Any) -> Any:
        self.bodies.append(json.loads(await request.aread()))
        status, pieces = self._answer(len(self.bodies) - 1, self.bodies[-1])
        self.active += 1
        self.peak = max(self.peak, self.active)
        return httpx.Response(status, stream=Pieces(self, pieces))


class Pieces(httpx.AsyncByteStream):  # type: ignore[name-defined]
    def __init__(self, script: Script, pieces: list[tuple[float, bytes]]) -> None:
        self._script = script
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for seconds, data in self._pieces:
            await asyncio.sleep(seconds)
            if data == b"cut":
                raise httpx.RemoteProtocolError("cut off")
            yield data

    async def aclose(self) -> None:
        self._script.active -= 1


def event(n_tokens: int, **more: Any) -> bytes:
    choice = {"index": 0, "text": "x" * n_tokens, "token_ids": [7] * n_tokens, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def end(prompt: int, output: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": output}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"


def steady(n: int, body: Any) -> tuple[int, list[tuple[float, bytes]]]:
    """The first token after 0.5 s, the others 0.1 s apart."""
    length = body["max_tokens"]
    pieces = [(0.5 if i == 0 else 0.1, event(1)) for i in range(length)]
    return 200, [*pieces, (0.0, end(len(body["prompt"]), length))]


def load(script: Script, jobs: list[Job], concurrency: int | None = None, *, stream: bool = True) -> list[Record]:
    async def work() -> list[Record]:
        async with httpx.AsyncClient(transport=script, base_url="http://x") as http:
            return await Target(http, "m", stream=stream).run(jobs, concurrency)

    return virtually(work())


def test_times_are_those_of_the_script() -> None:
    """Pieces that arrive together share the time since those before; cuts within events do not matter."""
    pair = event(2) + event(1)
    pieces = [
        (0.25, event(1)),
        (0.3, pair),
        (0.0, event(2)[:20]),
        (0.5, event(2)[20:] + end(3, 6)[:9]),
        (1, end(3, 6)[9:]),
    ]
    script = Script(lambda n, body: (200, pieces))
    (record,) = load(script, [JOB])
    assert record.error is None and (record.prompt_tokens, record.output_tokens) == (3, 6)
    assert record.first_s == pytest.approx(0.25) and record.ended_s == pytest.approx(2.05)
    assert [(pytest.approx(gap), n) for gap, n in record.gaps] == [(0.1, 3), (0.25, 2)]
    report = LoadReport.of([record])
    assert report.itl_s is not None and report.ttft_s == Spread(*[pytest.approx(0.25)] * 5)
    assert (report.itl_s.p50, report.itl_s.max) == (pytest.approx(0.1), pytest.approx(0.25))
    assert report.itl_s.mean == pytest.approx((3 * 0.1 + 2 * 0.25) / 5)
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    assert script.bodies == [{**body, "stream": True, "stream_options": {"include_usage": True}}]


def test_rates_are_over_the_whole_run() -> None:
    """Ten at once of four tokens: all end after 0.8 s."""
    script = Script(steady)
    report = LoadReport.of(load(script, [JOB] * 10))
    assert report.duration_s == pytest.approx(0.8) and report.peak_concurrency == script.peak == 10
    assert report.requests_per_s == pytest.approx(10 / 0.8) and report.output_tokens_per_s == pytest.approx(40 / 0.8)
    assert report.total_tokens_per_s == pytest.approx(70 / 0.8) and (report.prompt_tokens, report.output_tokens) == (
        30,
        40,
    )


def test_a_limit_on_concurrency_shows_as_lateness() -> None:
    script = Script(steady)
    report = LoadReport.of(load(script, [JOB] * 6, concurrency=2))
    assert script.peak == report.peak_concurrency == 2 and report.duration_s == pytest.approx(2.4)
    assert report.wait_s is not None and report.ttft_s is not None
    assert report.wait_s.max == pytest.approx(1.6) and report.ttft_s.max == pytest.approx(0.5)


def test_requests_are_sent_when_they_are_due() -> None:
    records = load(Script(steady), [Job(due, [1], 1) for due in (0.0, 2.0, 2.25)])
    assert [record.sent_s for record in records] == pytest.approx([0.0, 2.0, 2.25])
    assert LoadReport.of(records).peak_concurrency == 2


def test_arrivals_are_a_poisson_process_that_repeats() -> None:
    """Gaps have mean 1/rate and, being exponential, the same deviation; lengths fill their ranges."""
    plan = Plan(4000, 8.0, (3, 9), (2, 2), seed=5)
    jobs = plan.jobs(range(50))
    gaps = [b.due_s - a.due_s for a, b in itertools.pairwise(jobs)]
    assert jobs[0].due_s == 0 and statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.08)
    assert {len(job.prompt) for job in jobs} == set(range(3, 10)) and {job.new_tokens for job in jobs} == {2}
    assert jobs == plan.jobs(range(50)) != Plan(4000, 8.0, (3, 9), (2, 2), seed=6).jobs(range(50))
    assert {job.due_s for job in Plan(9, None, (1, 1), (1, 1), 0).jobs([4])} == {0.0}


def test_percentiles_interpolate_between_ranks() -> None:
    spread = Spread.of([*map(float, range(101))][::-1])
    assert spread == Spread(50.0, 90.0, 99.0, 50.0, 100.0) and Spread.of([]) is None
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.9, pytest.approx(1.99), 1.5, 2.0)


def test_failures_are_counted_and_hide_nothing() -> None:
    """A refusal, an error within the stream, a cut connection, an early end; the others count alone."""
    refusal = b'{"error": {"message": "full"}}'
    scripts: list[tuple[int, list[tuple[float, bytes]]]] = [
        (429, [(0.0, refusal)]),
        (502, [(0.0, b"<html>")]),
        (200, [(0.1, event(1)), (0.1, b'data: {"error": {"message": "broke"}}\n\n')]),
        (200, [(0.1, event(1)), (0.1, b"cut")]),
        (200, [(0.1, event(1))]),
        (429, [(0.0, refusal)]),
    ]
    script = Script(lambda n, body: scripts[n] if n < len(scripts) else steady(n, body))
    report = LoadReport.of(load(script, [JOB] * 8))
    assert (report.n_requests, report.n_failed, report.output_tokens) == (8, 6, 8)
    assert report.errors == {
        "429: full": 2,
        "502: <html>": 1,
        "broke": 1,
        "RemoteProtocolError: cut off": 1,
        "the stream ended before [DONE]": 1,
    }
    assert report.ttft_s == Spread(*[pytest.approx(0.5)] * 5)
    nothing = LoadReport.of(load(Script(lambda n, body: scripts[0]), [JOB]))
    assert nothing.requests_per_s == 0 and nothing.ttft_s is nothing.itl_s is nothing.latency_s is None


def test_whole_answers_have_no_times_of_tokens() -> None:
    answer = json.dumps({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}).encode()
    script = Script(lambda n, body: (200, [(1.5, answer)]))
    report = LoadReport.of(load(script, [JOB] * 2, stream=False))
    assert report.ttft_s is report.itl_s is None and report.output_tokens_per_s == pytest.approx(8 / 1.5)
    assert "stream" not in script.bodies[0]


def test_a_server_without_token_ids_counts_by_pieces() -> None:
    piece = b'data: {"choices": [{"index": 0, "text": "word"}]}\n\n'
    (record,) = load(Script(lambda n, body: (200, [(0.5, piece), (0.2, piece), (0.0, end(3, 2))])), [JOB])
    assert record.gaps == [(pytest.approx(0.2), 1)] and record.output_tokens == 2


def test_the_commands_of_bench_and_their_flags(run: Any) -> None:
    """Frozen like those of the other commands; without a name `engine` is meant."""
    from astrai_cli.commands.bench import bench

    found = {
        name: [
            flag
            for param in command.params
            for flag in (param.opts if isinstance(param, click.Option) else [param.name])
        ]
        for name, command in bench.commands.items()
    }
    assert found == {
        "engine": [
            *"what --compare --trials --json --batch -b --prompt-len --new-tokens".split(),
            *"--model -m --config --device --dtype --backend --threads".split(),
            *"--speculation --draft-model --max-draft-tokens --debug".split(),
        ],
        "serve": [
            *"--url --api-key --model -m --timeout --requests --rate --concurrency --prompt-len --new-tokens".split(),
            *"--stream --warmup --seed --processes --json --output -o --debug".split(),
        ],
    }
    assert all(
        param.help
        for command in bench.commands.values()
        for param in command.params
        if param.param_type_name == "option"
    )
    assert run("bench", "--trials", "0").stderr == run("bench", "engine", "--trials", "0").stderr
    assert "Poisson" in run("bench", "serve", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--prompt-len", "9:3"), 2, "'9:3' is neither a length nor SHORTEST:LONGEST"),
        (("--new-tokens", "x"), 2, "--new-tokens"),
        (("--rate", "0"), 2, "--rate"),
        (("--processes", "4", "--concurrency", "3"), 2, "--processes: 4 are more than can send at once"),
        (("--url", "http://h:p"), 2, "--url: 'http://h:p' is not a URL"),
        (("--url", "nonsense"), 1, "nonsense"),
        (("--url", "http://127.0.0.1:PORT"), 1, "cannot be reached (ConnectError); start a server with `astrai serve`"),
    ],
)
def test_wrong_usage_is_one_line(run: Any, arguments: tuple[str, ...], code: int, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shown = run("bench", "serve", *(argument.replace("PORT", str(port)) for argument in arguments))
    assert shown.exit_code == code and said in shown.stderr and shown.stderr.count("\n") == 1


class TestRealServer:
    """Against a server that listens, over sockets."""

    @pytest.fixture(autouse=True)
    def needs_the_server(self) -> None:
        for name in ("astrai_infer", "fastapi", "uvicorn"):
            pytest.importorskip(name)

    def test_every_request_is_answered_at_the_length_asked_for(self, run: Any, tmp_path: Path) -> None:
        from astrai_infer.testing import small_engine, tiny_model
        from astrai_infer.testing.server import live_server

        file = tmp_path / "load.json"
        with live_server(lambda: small_engine(tiny_model(), max_num_seqs=8), api_key="k") as live:
            command = [
                "bench",
                "serve",
                "--url",
                live.url,
                "--api-key",
                "k",
                "--requests",
                12,
                "--rate",
                200,
                "--output",
                file,
            ]
            shown = run(*command, "--prompt-len", "5:20", "--new-tokens", "3:9", "--concurrency", 4, "--json")
            assert shown.exit_code == 0, shown.stderr
            report = json.loads(shown.stdout)
            assert json.loads(file.read_text()) == report
            text = run(*command, "--no-stream", "--warmup", 0)
            assert text.exit_code == 0 and "12 answered, 0 failed" in text.stdout and "first token" not in text.stdout
            refused = run("bench", "serve", "--url", live.url)
            unknown = run(*command, "--model", "other")
            several = json.loads(run(*command, "--json", "--warmup", 0, "--processes", 3, "--concurrency", 4).stdout)
            failing = run(*command, "--prompt-len", 300, "--warmup", 0)
            finished = live.serving.metrics.finished
        jobs = Plan(12, 200.0, (5, 20), (3, 9), 0).jobs([1])
        assert report["model"] == "tiny" and (report["n_requests"], report["n_failed"]) == (12, 0)
        assert report["output_tokens"] == sum(job.new_tokens for job in jobs)
        assert report["prompt_tokens"] == sum(len(job.prompt) for job in jobs)
        assert 0 < report["itl_s"]["p50"] <= report["itl_s"]["p99"] and report["peak_concurrency"] <= 4
        assert report["ttft_s"]["max"] <= report["latency_s"]["max"] <= report["duration_s"]
        assert (several["n_failed"], several["output_tokens"]) == (0, 12 * 64) and several["peak_concurrency"] <= 4
        assert finished == {"length": 12 + 2 + 12 + 12}
        assert refused.exit_code == 1 and "refused /v1/models with 401: the API key" in refused.stderr
        assert unknown.exit_code == 1 and "does not serve 'other'; ask for one of tiny" in unknown.stderr
        assert failing.exit_code == 1 and "error           12 x 400: prompt[0] has 300 tokens" in failing.stdout
        assert failing.stderr.startswith("error: every request failed") and failing.stderr.count("\n") == 1
