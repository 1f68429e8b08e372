"""``astrai bench serve``: load on a running server, and what its clients see."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from astrai_cli.loading import busy
from astrai_cli.options import blame, debug_option
from astrai_cli.output import print_json, whole_file

if TYPE_CHECKING:
    from astrai_cli.load import LoadReport, Server

SERVER_PANEL, LOAD_PANEL, SHOWN_PANEL = "Server", "Load", "What is shown"


class Lengths(click.ParamType):
    """``N`` or ``SHORTEST:LONGEST``, in tokens."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return the shortest and the longest."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", value)
        shortest, longest = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= shortest <= longest:
            self.fail(f"{value!r} is neither a length nor SHORTEST:LONGEST, in tokens from 1", param, ctx)
        return shortest, longest


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", metavar="URL", panel=SERVER_PANEL, help="Where it listens.")
@click.option("--api-key", metavar="KEY", panel=SERVER_PANEL, help="If the server asks for one.")
@click.option("--model", "-m", metavar="NAME", panel=SERVER_PANEL, help="By default the first that it serves.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, metavar="SECONDS",
              panel=SERVER_PANEL, help="A request that gets nothing for so long has failed.")  # fmt: skip
@click.option("--requests", type=click.IntRange(1), default=100, metavar="N", panel=LOAD_PANEL, help="How many.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    metavar="R",
    panel=LOAD_PANEL,
    help="Arrivals per second, at random times (Poisson); by default all arrive at once.",
)
@click.option("--concurrency", type=click.IntRange(1), metavar="N", panel=LOAD_PANEL, help="At most so many at once.")
@click.option(
    "--prompt-len", type=Lengths(), default="128", metavar="N[:M]", panel=LOAD_PANEL, help="Tokens per prompt."
)
@click.option(
    "--new-tokens", type=Lengths(), default="64", metavar="N[:M]", panel=LOAD_PANEL, help="Tokens per answer."
)
@click.option("--stream/--no-stream", default=True, panel=LOAD_PANEL, help="Streamed answers show the times of tokens.")
@click.option("--warmup", type=click.IntRange(0), default=2, metavar="N", panel=LOAD_PANEL, help="Requests before.")
@click.option("--seed", type=int, default=0, metavar="S", panel=LOAD_PANEL, help="Of arrivals, lengths and prompts.")
@click.option("--processes", type=click.IntRange(1), default=1, metavar="N", panel=LOAD_PANEL, help="That send.")
@click.option("--json", "as_json", is_flag=True, show_default=False, panel=SHOWN_PANEL, help="Print one JSON object.")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    panel=SHOWN_PANEL,
    help="Write the JSON object to a file.",
)
@debug_option
def serve(
    url: str,
    api_key: str | None,
    model: str | None,
    timeout: float,
    requests: int,
    rate: float | None,
    concurrency: int | None,
    prompt_len: tuple[int, int],
    new_tokens: tuple[int, int],
    stream: bool,
    warmup: int,
    seed: int,
    processes: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Put load on a running server, and measure what its clients see.

    Prompts are random tokens, so that no two share a prefix; answers have the length that was asked for. Times are
    those of this client: give it a core of its own, and more processes where tokens come faster than 5,000 a second. The
    exit code is 1 if every request failed.

    \b
    astrai bench serve --rate 8 --requests 200 --prompt-len 100:500 --new-tokens 128
    """
    if importlib.util.find_spec("httpx") is None:
        from astrai_core.errors import MissingDependencyError

        raise MissingDependencyError("this command needs httpx; run `pip install 'astrai-cli[serve]'`")
    if processes > min(requests, concurrency or requests):
        raise click.UsageError(f"--processes: {processes} are more than can send at once; start fewer")
    with busy("Sending requests"):
        from astrai_cli.load import Job, LoadReport, Plan, Server, send
        from astrai_core.errors import ConfigError

        plan = Plan(requests, rate, prompt_len, new_tokens, seed)
        server = Server(url, api_key, timeout)
        with blame(None, ConfigError):
            served, token_ids = asyncio.run(_find(server, model))
        first = Job(0.0, token_ids[: prompt_len[0]], new_tokens[0])
        send(server, served, stream, [first] * warmup, 1)
        records = send(server, served, stream, plan.jobs(token_ids), concurrency, processes)
    report = LoadReport.of(records)
    facts = {
        "url": url,
        "model": served,
        "concurrency": concurrency,
        "stream": stream,
        **asdict(plan),
        **asdict(report),
    }
    if output is not None:
        with whole_file(output) as file:
            file.write(json.dumps(facts, indent=2) + "\n")
    if as_json:
        print_json(facts)
    else:
        click.echo("\n".join(_lines(report)))
    if report.n_failed == report.n_requests:
        raise click.ClickException(f"every request failed; the first: {next(iter(report.errors))}")


async def _find(server: Server, model: str | None) -> tuple[str, list[int]]:
    """The model's name, and tokens to make prompts of."""
    from astrai_cli.load import Target

    async with server.client() as http:
        target = await Target.find(http, model)
        return target.model, await target.token_ids()


def _lines(report: LoadReport) -> list[str]:
    """The report as a table."""
    good = report.n_requests - report.n_failed
    lines = [
        f"requests        {good} answered, {report.n_failed} failed, in {report.duration_s:.2f} s"
        f" ({report.requests_per_s:.2f}/s), at most {report.peak_concurrency} at once",
        f"tokens          {report.output_tokens} written ({report.output_tokens_per_s:.1f}/s), {report.prompt_tokens} read"
        f" ({report.total_tokens_per_s:.1f}/s together)",
    ]
    times = {
        "first token": report.ttft_s,
        "between tokens": report.itl_s,
        "whole answer": report.latency_s,
        "sent late": report.wait_s,
    }
    lines.append(f"{'milliseconds':<14}{'p50':>11}{'p90':>11}{'p99':>11}{'mean':>11}{'max':>11}")
    for name, spread in times.items():
        if spread is not None:
            lines.append(f"{name:<14}" + "".join(f"{1000 * value:11.2f}" for value in asdict(spread).values()))
    return lines + [f"error           {n} x {message}" for message, n in report.errors.items()]
