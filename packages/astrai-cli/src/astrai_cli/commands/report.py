"""``astrai report``: the curves of a run as one HTML page."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from astrai_cli.commands.preprocess import need_astrai_train
from astrai_cli.loading import busy
from astrai_cli.options import debug_option


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    show_default=False,
    help="The page; by default report.html in RUN.",
)
@debug_option
def report(run: Path, output: Path | None) -> None:
    """Draw the curves of a training run as an HTML page.

    RUN is the output_dir of a run, whether it goes on or has ended. The page needs no other file and no network.
    """
    need_astrai_train()
    with busy(f"Reading {run}"):
        from astrai_train.report.page import write_report

        page = write_report(run, output=output)
    click.echo(str(page))
