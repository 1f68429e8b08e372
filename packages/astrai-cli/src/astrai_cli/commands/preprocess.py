"""``astrai preprocess``: files of text, conversations or preferences into pre-tokenised stores."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from astrai_cli.diagnostics import warn
from astrai_cli.loading import busy
from astrai_cli.options import debug_option
from astrai_cli.output import Fact, print_json, print_report

if TYPE_CHECKING:
    from astrai_train.data.preprocess.part import Summary


def need_astrai_train() -> None:
    """Refuse to go on without the training package.

    Raises
    ------
    MissingDependencyError
        With the line that installs it.
    """
    from astrai_core.errors import MissingDependencyError

    if importlib.util.find_spec("astrai_train") is None:
        raise MissingDependencyError("this command needs astrai-train; run `pip install 'astrai-cli[train]'`")


@click.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    required=True,
    panel="Output",
    help="Directory of the store, or of one store for each domain.",
)
@click.option("--overwrite", is_flag=True, show_default=False, panel="Output", help="Replace DIR if it is not empty.")
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    metavar="N",
    panel="Run",
    help="Processes; 0 works in this one; by default what CONFIG says, or one for each core.",
)
@click.option("--json", "as_json", is_flag=True, show_default=False, panel="Output", help="Print one JSON object.")
@debug_option
def preprocess(config: Path, output: Path, overwrite: bool, workers: int | None, as_json: bool) -> None:
    """Turn text, chats or preferences into tokens to train on.

    CONFIG is a YAML or JSON file that names the files, their format and the tokenizer. DIR appears whole or not at all;
    a run that was stopped goes on where it was when it is started again.
    """
    need_astrai_train()
    with busy(f"Reading {config}"):
        from astrai_core.checkpoint.source import open_source
        from astrai_train.data.preprocess import run
        from astrai_train.data.preprocess.config import PreprocessConfig

        settings = PreprocessConfig.from_file(config)
        if workers is not None:
            settings = dataclasses.replace(settings, workers=workers)
        tokenizer = open_source(settings.tokenizer).tokenizer()
    with _progress() as progress:
        summaries = run.preprocess(settings, output, tokenizer, overwrite=overwrite, progress=progress)
    for summary in summaries.values():
        for bad in summary.bad_rows:
            warn(f"skipped {bad}")
    if as_json:
        print_json({domain or output.name: summary.to_dict() for domain, summary in summaries.items()})
    else:
        print_report((str(output / domain), summary_facts(summary)) for domain, summary in summaries.items())


def summary_facts(summary: Summary) -> Iterator[Fact]:
    """Say what became of the rows: kept, dropped and why, tokens, supervised share."""
    yield Fact("rows kept", f"{summary.kept:,}")
    for reason, n_rows in sorted(summary.dropped.items()):
        yield Fact("dropped", f"{n_rows:,} ({reason})")
    if summary.bad:
        yield Fact("skipped", f"{summary.bad:,} bad rows", good=False)
    yield Fact("tokens", f"{summary.tokens:,}")
    yield Fact("supervised", f"{summary.supervised / summary.tokens if summary.tokens else 0:.1%} of the tokens")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar over the bytes of the input, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    with Progress(
        "Tokenising", BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
