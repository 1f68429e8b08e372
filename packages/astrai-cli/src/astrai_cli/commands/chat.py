"""``astrai chat``: talk to a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import rich_click as click

from astrai_cli.loading import check_sampling, open_engine, sampling_params
from astrai_cli.options import (
    debug_option,
    load_options,
    model_option,
    sampling_options,
    speculation_options,
    system_option,
)

if TYPE_CHECKING:
    from astrai_cli.options import LoadOptions


@click.command()
@model_option
@system_option
@click.option(
    "--stats", is_flag=True, show_default=False, panel="Output", help="Print the token rate after each answer."
)
@sampling_options
@load_options
@speculation_options
@debug_option
@click.pass_context
def chat(
    ctx: click.Context,
    model: str,
    load: LoadOptions,
    speculation: dict[str, Any],
    sampling: dict[str, Any],
    system: str | None,
    stats: bool,
) -> None:
    """Talk to a model.

    Each line is one turn; /help lists the commands. With piped input, each line is answered and nothing else is
    printed. Sampling defaults give way to the model's generation_config.json.
    """
    check_sampling(sampling)
    with open_engine(model, load, needs_template=True, speculation=speculation) as engine:
        from astrai_cli.conversation import Conversation

        session = Conversation(
            engine,
            sampling_params(engine, sampling),
            system=system,
            interactive=sys.stdin.isatty() and sys.stdout.isatty(),
            stats=stats,
        )
        session.run()
    if session.n_failed and not session.interactive:
        ctx.exit(1)
