"""``astrai bench``: decode, prefill and start-up speed, beside transformers in the same run (rows BM1, BM2); load on a
server is in :mod:`astrai_cli.commands.bench_serve`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from astrai_cli.commands.bench_serve import serve
from astrai_cli.loading import busy
from astrai_cli.options import ModelName, blame, debug_option, speculation_options
from astrai_cli.output import print_json

if TYPE_CHECKING:
    from astrai_core import CausalLM
    from astrai_infer.bench import EngineBench, Measurement

WHAT_PANEL, SIZE_PANEL, MODEL_PANEL = "What is measured", "Sizes", "Model"


class _Bench(click.RichGroup):
    """Where no command is named, `engine` is meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Name it."""
        first = next((arg for arg in args if arg != "--debug"), None)
        named = first in self.commands or first in ctx.help_option_names
        return super().parse_args(ctx, args if named else ["engine", *args])


@click.group(cls=_Bench, context_settings={"show_default": True})
@debug_option
def bench() -> None:
    """Measure the engine beside transformers, or a server under load.

    The name engine may be left out: astrai bench decode.
    """


bench.add_command(serve)


@bench.command()
@click.argument("what", nargs=-1, type=click.Choice(["decode", "prefill", "start"]))
@click.option(
    "--compare/--no-compare",
    default=None,
    show_default=False,
    panel=WHAT_PANEL,
    help="Measure transformers too, with the same weights; by default if it is installed.",
)
@click.option("--trials", type=click.IntRange(1), default=3, panel=WHAT_PANEL, help="Rounds; the median counts.")
@click.option("--json", "as_json", is_flag=True, show_default=False, panel=WHAT_PANEL, help="Print one JSON object.")
@click.option(
    "--batch", "-b", type=click.IntRange(1), multiple=True, default=(1, 8), panel=SIZE_PANEL, help="Sequences."
)
@click.option("--prompt-len", type=click.IntRange(1), default=128, panel=SIZE_PANEL, help="Tokens per prompt.")
@click.option("--new-tokens", type=click.IntRange(1), default=32, panel=SIZE_PANEL, help="Decode steps per round.")
@click.option(
    "--model",
    "-m",
    type=ModelName(),
    metavar="MODEL",
    panel=MODEL_PANEL,
    help="Real weights; by default a random 1.2 B model (24 layers of 1536, 24/4 heads, vocabulary 100,000).",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    panel=MODEL_PANEL,
    help="A config.json to fill with random weights.",
)
@click.option("--device", metavar="DEVICE", panel=MODEL_PANEL, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", metavar="DTYPE", panel=MODEL_PANEL, help="Type of the weights.")
@click.option("--backend", metavar="NAME", panel=MODEL_PANEL, help="Attention backend by name.")
@click.option(
    "--threads", type=click.IntRange(1), metavar="N", panel=MODEL_PANEL, help="CPU threads, for both engines."
)
@speculation_options
@debug_option
def engine(
    what: tuple[str, ...],
    compare: bool | None,
    trials: int,
    as_json: bool,
    batch: tuple[int, ...],
    prompt_len: int,
    new_tokens: int,
    model: str | None,
    config: Path | None,
    device: str | None,
    dtype: str | None,
    backend: str | None,
    threads: int | None,
    speculation: dict[str, Any],
) -> None:
    """Measure decode, prefill and start-up speed, beside transformers.

    WHAT is any of decode, prefill and start; by default decode and prefill. `start` needs --model: it times a fresh
    process up to its first token. Every figure is the median of the rounds, and both engines run in this process with
    the same number of threads.
    """
    wanted = what or ("decode", "prefill")
    if model is not None and config is not None:
        raise click.UsageError("--model and --config exclude each other; give one")
    if "start" in wanted and model is None:
        raise click.UsageError("start needs --model: random weights have no file to load")
    compare = importlib.util.find_spec("transformers") is not None if compare is None else compare
    with busy("Building the model"):
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        weights = _weights(model, config, device, dtype)
        own = _own(weights, backend, speculation)
    results: list[Measurement] = []
    for result in _measure(own, wanted, batch, prompt_len, new_tokens, trials, compare):
        results.append(result)
        if not as_json:
            click.echo(_line(result, results))
    started = _start(model, device, dtype, trials) if "start" in wanted and model is not None else None
    if as_json:
        facts = {"model": model or str(config or "preset"), "device": str(weights.device), "dtype": str(weights.dtype)}
        print_json(
            {
                **facts,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "results": [asdict(result) for result in results],
                "start_seconds": started,
            }
        )
    elif started is not None:
        click.echo(f"start    astrai        {started:8.2f} s from a fresh process to the first token")


def _weights(model: str | None, config: Path | None, device: str | None, dtype: str | None) -> CausalLM:
    from astrai_core import AutoModel, ModelConfig
    from astrai_core.errors import BackendError, ConfigError
    from astrai_infer.bench import preset_model

    with blame("--device", BackendError):
        if model is not None:
            return AutoModel.from_pretrained(model, dtype, device)
        if config is None:
            return preset_model(None, dtype, device)
        with blame("--config", ConfigError):
            try:
                architecture = ModelConfig.from_dict(json.loads(config.read_text(encoding="utf-8")))
            except ValueError as error:
                raise ConfigError(f"{config}: {error}") from None
        return preset_model(architecture, dtype, device)


def _own(weights: CausalLM, backend: str | None, speculation: dict[str, Any]) -> EngineBench:
    from astrai_core import AutoModel
    from astrai_core.errors import ConfigError
    from astrai_infer import EngineConfig
    from astrai_infer.bench import EngineBench

    with blame(None, ConfigError):
        settings = EngineConfig.from_dict(speculation)
    if settings.draft_model is None:
        return EngineBench(weights, backend, speculation)
    draft = AutoModel.from_pretrained(settings.draft_model, weights.dtype, weights.device)
    return EngineBench(weights, backend, speculation, draft)


def _measure(
    own: EngineBench,
    wanted: tuple[str, ...],
    batches: tuple[int, ...],
    prompt_len: int,
    new_tokens: int,
    trials: int,
    compare: bool,
) -> Iterator[Measurement]:
    from astrai_infer.bench import TransformersBench, transformers_model

    engines: list[Any] = [own]
    if compare:
        engines.append(TransformersBench(transformers_model(own.model)))
    for name in ("decode", "prefill"):
        for n_sequences in batches if name in wanted else ():
            for engine in engines:
                sizes = (
                    (n_sequences, prompt_len, new_tokens, trials)
                    if name == "decode"
                    else (
                        n_sequences,
                        prompt_len,
                        trials,
                    )
                )
                yield getattr(engine, name)(*sizes)


def _line(result: Measurement, so_far: list[Measurement]) -> str:
    """One row of the table; a row of transformers says how many times faster the row before is."""
    row = (
        f"{result.what:<8} {result.engine:<12} batch {result.batch:<4} prompt {result.prompt_len:<6} "
        f"{result.tokens_per_s:10.1f} tokens/s"
    )
    if result.limit_tokens_per_s is not None:
        row += f"   {result.tokens_per_s / result.limit_tokens_per_s:.0%} of what the memory's rate allows"
    if result.engine == "transformers":
        row += f"   astrai is {so_far[-2].tokens_per_s / result.tokens_per_s:.2f}x"
    return row


def _start(model: str, device: str | None, dtype: str | None, trials: int) -> float:
    from statistics import median

    from astrai_infer.bench import start_seconds

    return median(start_seconds(model, device, dtype) for _ in range(trials))
