"""``astrai train``: a recipe, carried out or resumed."""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from astrai_cli import diagnostics, recipe_flags
from astrai_cli.loading import busy
from astrai_cli.options import debug_option

if TYPE_CHECKING:
    from astrai_train import TrainConfig


class RecipeCommand(click.RichCommand):
    """A command with a flag for every field of a recipe; the schema is read when the command is parsed or explained."""

    @cached_property
    def leaves(self) -> dict[str, recipe_flags.Leaf]:
        """Click's parameter name -> field.

        Raises
        ------
        MissingDependencyError
            If astrai-train is not installed.
        """
        from astrai_core.errors import MissingDependencyError

        if importlib.util.find_spec("astrai_train") is None:
            raise MissingDependencyError("this command needs astrai-train; run `pip install 'astrai-cli[train]'`")
        from astrai_train import TrainConfig

        return {leaf.parameter: leaf for leaf in recipe_flags.leaves(TrainConfig.json_schema())}

    @cached_property
    def generated(self) -> list[click.Parameter]:
        """The flags of the fields."""
        return [leaf.option() for leaf in self.leaves.values()]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Put the generated flags between the command's own and ``--help``."""
        own = super().get_params(ctx)
        return [*own[: len(self.params)], *self.generated, *own[len(self.params) :]]


# The values' names stand before the help: a column of their own leaves no room for the longest flags.
HELP_COLUMNS = {"options_table_column_types": ["opt_long", "help"], "options_table_help_sections": ["metavar", "help"]}


@click.command(cls=RecipeCommand, context_settings={"rich_help_config": HELP_COLUMNS})
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--resume",
    is_flag=True,
    show_default=False,
    panel="Run",
    help="Go on from the newest whole checkpoint of the run directory; from the start if there is none.",
)
@click.option(
    "--device", metavar="DEVICE", panel="Run", help="auto, cpu, cuda or cuda:N; by default CUDA if there is any."
)
@click.option(
    "--nprocs",
    type=click.IntRange(min=1),
    metavar="N",
    panel="Run",
    help="Ranks to start on this machine, each on a GPU of its own; torchrun starts them on several.",
)
@debug_option
@click.pass_context
def train(
    ctx: click.RichContext, /, recipe: Path, resume: bool, device: str | None, nprocs: int | None, **fields: Any
) -> None:
    """Train a model by a recipe.

    RECIPE is a YAML file. Every field of it is also a flag, which takes the place of what the file says. The run
    directory gets the whole recipe, metrics.jsonl, checkpoints and report.html; Ctrl-C finishes the step, saves and ends.
    """
    command = ctx.command
    assert isinstance(command, RecipeCommand), "the decorator says so"
    given = {name: value for name, value in fields.items() if value not in (None, ())}
    config = _config(recipe, {command.leaves[name]: value for name, value in given.items()} if given else {})
    if nprocs is None or nprocs == 1:
        carry_out(config, resume, device)
        return
    if config.parallel.mode == "none":
        raise click.UsageError(f"--nprocs: {nprocs} ranks need --parallel.mode ddp or fsdp, it is none", ctx)
    from astrai_train.parallel.launch import launch

    launch(partial(carry_out, config, resume, device), nprocs, set_up=diagnostics.set_up)


def carry_out(config: TrainConfig, resume: bool, device: str | None) -> None:
    """Train in this process, alone or as one of several ranks, the first of which tells how it went."""
    with busy("Preparing the run") if os.environ.get("RANK", "0") == "0" else nullcontext():
        from astrai_train.run import build

        trainer = build(config, resume=resume, device=device, tell=partial(click.echo, err=True))
    tell = click.echo if trainer.context.parallel.world.is_first else lambda line: None
    done = trainer.context.counters.step
    if done:
        tell(f"Resuming {config.output_dir} after step {done}")
    result = trainer.train()
    if result.stopped_by is not None:
        remedy = "; go on with --resume" if result.stopped_by.startswith("SIG") else ""
        tell(f"{result.stopped_by}: stopped after step {result.step}{remedy}")
    tell(f"{result.checkpoint}: {result.step} of {trainer.context.total_steps} steps")


def _config(recipe: Path, given: dict[recipe_flags.Leaf, Any]) -> TrainConfig:
    """Read the recipe under the flags; a flag that cannot be met is wrong usage and is named."""
    from astrai_core.errors import ConfigError
    from astrai_train import TrainConfig

    overrides = {}
    for leaf, value in given.items():
        try:
            overrides[leaf.path] = leaf.parse(value)
        except ConfigError as error:
            raise click.UsageError(f"{leaf.flag}: {error}", click.get_current_context()) from None
    try:
        return TrainConfig.from_yaml(recipe, overrides)
    except ConfigError as error:
        if str(error).startswith(str(recipe)):
            raise
        raise click.UsageError(str(error), click.get_current_context()) from None
