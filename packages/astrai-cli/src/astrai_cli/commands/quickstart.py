"""``astrai quickstart``: a small real model answers, here and now."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from astrai_cli.jsonl import conversation
from astrai_cli.loading import open_engine, streaming
from astrai_cli.options import debug_option, load_options
from astrai_cli.output import StreamedText, TokenRate, human_count

if TYPE_CHECKING:
    from astrai_cli.options import LoadOptions

MODEL = "smollm2"
QUESTION = "How do plants make their food?"
MAX_TOKENS = 200

NEXT = (
    ("Talk to it", f"chat -m {MODEL}"),
    ("Ask it once", f'generate -m {MODEL} -p "Hello!"'),
    ("Look inside", f"inspect {MODEL}"),
    ("Make a directory of it", f"convert {MODEL} {MODEL}-hf"),
    ("See what is missing", "doctor"),
)


@click.command()
@load_options
@debug_option
def quickstart(load: LoadOptions) -> None:
    """See a small real model answer, and what to try next.

    SmolLM2-135M-Instruct answers a question; its likeliest words are taken, so the answer is the same each time.
    """
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
    _heading("What to try next")
    for what, command in NEXT:
        click.echo(f"  {what:24}{click.style(f'{_program()} {command}', fg='cyan')}")


def _heading(text: str) -> None:
    click.secho(text, bold=True)


def _program() -> str:
    """Return how the user can call this program again: by its name if that is found, else by its path."""
    called = Path(sys.argv[0])
    found = shutil.which("astrai")
    if called.name != "astrai" or not called.exists() or (found is not None and called.samefile(found)):
        return "astrai"
    return str(called)
