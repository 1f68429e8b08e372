"""``astrai quickstart``: a small real model answers, and another one is trained from nothing, here and now."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from astrai_cli.diagnostics import warn
from astrai_cli.jsonl import conversation
from astrai_cli.loading import open_engine, streaming
from astrai_cli.options import debug_option, load_options
from astrai_cli.output import StreamedText, TokenRate, human_count

if TYPE_CHECKING:
    from astrai_cli.options import LoadOptions

MODEL = "smollm2"
QUESTION = "How do plants make their food?"
MAX_TOKENS = 200
RUN = Path("runs", "quickstart")
OPENING = "Emma was very"
STORY_TOKENS = 120

NEXT = (
    ("Talk to it", f"chat -m {MODEL}"),
    ("Ask it once", f'generate -m {MODEL} -p "Hello!"'),
    ("Look inside", f"inspect {MODEL}"),
    ("Make a directory of it", f"convert {MODEL} {MODEL}-hf"),
    ("See what is missing", "doctor"),
)


@click.command()
@click.option(
    "--train-seconds",
    type=click.FloatRange(min=0),
    default=120,
    metavar="S",
    panel="Training",
    help="About how long the small model is trained; 0 leaves it out.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    panel="Training",
    show_default=False,
    help="Directory of the training, which must not exist; by default runs/quickstart, or with a number if that exists.",
)
@load_options
@debug_option
def quickstart(load: LoadOptions, train_seconds: float, output: Path | None) -> None:
    """See small models answer and learn, and what to try next.

    SmolLM2-135M-Instruct answers a question; its likeliest words are taken, so the answer is the same each time. Then
    a model of 2 M parameters is trained from nothing on a novel, Emma by Jane Austen, and writes on in its style.
    """
    if output is not None and output.exists():
        raise click.UsageError(f"--output: {output} exists; name a directory that does not")
    start = time.perf_counter()
    with open_engine(MODEL, load, needs_template=True) as engine:
        from astrai_core.types import SamplingParams

        n_parameters = sum(parameter.numel() for parameter in engine.model.parameters())
        dtype = str(engine.model.dtype).removeprefix("torch.")
        _heading("SmolLM2-135M-Instruct")
        click.echo(
            f"{human_count(n_parameters)} parameters in {dtype} on {engine.model.device}, "
            f"loaded in {time.perf_counter() - start:.1f} s\n"
        )
        _heading(f"{QUESTION}\n")
        out, rate = StreamedText(), TokenRate()
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        with streaming(engine, conversation(QUESTION, None), params) as deltas:
            for delta in deltas:
                rate.add(len(delta.token_ids))
                out.write(delta)
        out.end()
        click.secho(f"\n{rate}\n", dim=True)
    further: tuple[tuple[str, str], ...] = ()
    if train_seconds:
        further = _train(load, train_seconds, output)
    _heading("What to try next")
    for what, command in (*NEXT, *further):
        click.echo(f"  {what:24}{click.style(f'{_program()} {command}', fg='cyan')}")


def _train(load: LoadOptions, seconds: float, output: Path | None) -> tuple[tuple[str, str], ...]:
    """Train the small model and let it write; return what to try with it."""
    if importlib.util.find_spec("astrai_train") is None:
        warn("no model is trained here, which needs astrai-train: pip install 'astrai-cli[train]'")
        return ()
    from astrai_cli.first_model import free_folder, train_first_model

    _heading("A model of your own, from nothing but a novel: Emma, by Jane Austen")
    made = train_first_model(output or free_folder(RUN), seconds, load.device)
    if not made.finished:
        raise click.Abort
    _heading(f"\nIt writes on from {OPENING!r}:\n")
    with open_engine(str(made.checkpoint), replace(load, dtype=None, max_seq_len=None), needs_template=False) as engine:
        from astrai_core.types import SamplingParams

        out = StreamedText()
        out.write(OPENING)
        params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1, max_tokens=STORY_TOKENS)
        with streaming(engine, OPENING, params) as deltas:
            for delta in deltas:
                out.write(delta)
        out.end()
    click.echo(f"\nIts curves are in {made.run_dir / 'report.html'}\n")
    return (
        ("Let yours write", f'generate -m {made.checkpoint} --raw -p "{OPENING}"'),
        ("Train it otherwise", f"train {made.run_dir / 'recipe.yaml'} --output-dir runs/other"),
    )


def _heading(text: str) -> None:
    click.secho(text, bold=True)


def _program() -> str:
    """Return how the user can call this program again: by its name if that is found, else by its path."""
    called = Path(sys.argv[0])
    found = shutil.which("astrai")
    if called.name != "astrai" or not called.exists() or (found is not None and called.samefile(found)):
        return "astrai"
    return str(called)
