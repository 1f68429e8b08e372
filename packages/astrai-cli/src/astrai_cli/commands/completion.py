"""``astrai completion``: the script that lets a shell complete commands, flags and values."""

from __future__ import annotations

import sys

import rich_click as click
from click.shell_completion import get_completion_class

from astrai_cli.options import debug_option

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_ASTRAI_COMPLETE"
"""Set by the scripts when they ask this program for completions."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@debug_option
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of bash, zsh or fish.

    \b
    bash:  astrai completion bash >> ~/.bashrc
    zsh:   astrai completion zsh >> ~/.zshrc
    fish:  astrai completion fish > ~/.config/fish/completions/astrai.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    root = ctx.find_root()
    sys.stdout.write(kind(root.command, {}, "astrai", VARIABLE).source() + "\n")
