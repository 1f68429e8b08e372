"""The ``astrai`` command: which commands there are, how one is found, and how it fails."""

from __future__ import annotations

import errno
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import rich_click as click

from astrai_cli import diagnostics
from astrai_cli._version import __version__
from astrai_cli.options import debug_option


class Entry(NamedTuple):
    """A command in the help, and where it lives."""

    target: str
    help: str
    panel: str


START, USE, MAKE, FILES, SHELL = "Start here", "Use a model", "Make a model", "Model files", "Shell"

COMMANDS = {
    "quickstart": Entry("quickstart:quickstart", "See small models answer and learn, and what to try next.", START),
    "doctor": Entry("doctor:doctor", "Show versions, devices and kernels, and what to install.", START),
    "chat": Entry("chat:chat", "Talk to a model.", USE),
    "generate": Entry("generate:generate", "Complete one prompt, or a file of them.", USE),
    "serve": Entry("serve:serve", "Serve a model over HTTP: the OpenAI and Anthropic APIs.", USE),
    "bench": Entry("bench:bench", "Measure the engine beside transformers, or a server under load.", USE),
    "tokenizer": Entry("tokenizer:tokenizer", "Train a tokenizer on text.", MAKE),
    "preprocess": Entry("preprocess:preprocess", "Turn text, chats or preferences into tokens to train on.", MAKE),
    "data": Entry("data:data", "Look at tokens to train on.", MAKE),
    "train": Entry("train:train", "Train a model by a recipe.", MAKE),
    "report": Entry("report:report", "Draw the curves of a training run as an HTML page.", MAKE),
    "inspect": Entry("inspect:inspect", "Show architecture, size, memory, tokenizer and template.", FILES),
    "convert": Entry("convert:convert", "Turn a GGUF or other model into a Hugging Face directory.", FILES),
    "completion": Entry("completion:completion", "Print the completion script of bash, zsh or fish.", SHELL),
}
"""The commands in the order of the help. Their modules are imported when they run, so that the help costs nothing."""


class App(click.RichGroup):
    """A group of lazy commands, whose failures are one line on stderr."""

    def load(self, name: str) -> click.Command:
        """Import a command of :data:`COMMANDS`."""
        module, attribute = COMMANDS[name].target.split(":")
        command = getattr(importlib.import_module(f"astrai_cli.commands.{module}"), attribute)
        assert isinstance(command, click.Command), f"{COMMANDS[name].target} is no command"
        return command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Keep the order of the table."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that runs; the others stay entries of the table."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else self.load(name), rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what fails on purpose becomes a click exception, with a traceback only if asked for."""
        from astrai_core.errors import AstraiError

        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (AstraiError, OSError, click.ClickException) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise
            if diagnostics.DEBUG in ctx.meta:
                traceback.print_exc()
            raise diagnostics.failure(error) from error
        return result

    def main(  # type: ignore[override]  # the overloads of click say when it returns; this one never does
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run and exit: 0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
        extra.pop("standalone_mode", None)
        try:
            code = super().main(args, prog_name, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.ClickException as error:
            diagnostics.print_failure(error)
            code = error.exit_code
        except click.Abort:
            code = 130
        except OSError as error:  # the help itself could not be printed
            failed = diagnostics.failure(error)
            code = failed.exit_code
            if error.errno != errno.EPIPE:  # a reader that went away needs no word
                diagnostics.print_failure(failed)
        sys.exit(code)


@click.group(
    cls=App,
    commands={name: click.RichCommand(name=name, help=it.help, panel=it.panel) for name, it in COMMANDS.items()},
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "rich_help_config": {"style_commands_table_column_width_ratio": (1, 5), "max_width": 100},
    },
)
@click.version_option(__version__, prog_name="astrai", message="%(prog)s %(version)s")
@debug_option
def app() -> None:
    """Train and serve small and mid-size language models, on GPUs or a plain CPU."""


def main() -> NoReturn:
    """Run the command line of this process."""
    diagnostics.set_up()
    app.main(prog_name="astrai")
