"""Flags that several commands share, and the values they stand for. Nothing heavy is imported here."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import rich_click as click
from click.shell_completion import CompletionItem

from astrai_cli import diagnostics

DTYPES = ("auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16")
"""What :func:`astrai_core.auto.resolve_dtype` takes."""

MODEL_PANEL, WEIGHTS_PANEL, SAMPLING_PANEL = "Model", "Where and how it runs", "Sampling"
LENGTH_PANEL, PENALTY_PANEL, SPECULATION_PANEL = "Length and end", "Penalties", "Speculation"

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class ModelName(click.ParamType):
    """A directory, a .gguf file, a Hugging Face id or ``smollm2``."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        """Offer the short name, and files."""
        names = [CompletionItem("smollm2")] if "smollm2".startswith(incomplete) else []
        return [*names, CompletionItem(incomplete, type="file")]


@dataclass(frozen=True)
class LoadOptions:
    """The values of :func:`load_options`."""

    device: str | None
    dtype: str | None
    backend: str | None
    max_seq_len: int | None


# (flags, type, metavar, help); what is legal is checked by the engine's or the server's config alone.
SPECULATION: tuple[tuple[tuple[str, ...], Any, str, str], ...] = (
    (
        ("--speculation",),
        str,
        "NAME",
        "Guess several tokens and check them in one step, which changes no text: ngram, or draft with --draft-model.",
    ),
    (
        ("--draft-model",),
        ModelName(),
        "MODEL",
        "A small model of the same vocabulary that guesses, for --speculation draft.",
    ),
    (
        ("--max-draft-tokens",),
        int,
        "N",
        "Most guesses for a completion in a step (vLLM: num_speculative_tokens).  [default: 5]",
    ),
)

debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    show_default=False,
    callback=diagnostics.enable_debug,
    help="Show tracebacks and log records.",
)

model_option = click.option(
    "--model",
    "-m",
    type=ModelName(),
    metavar="MODEL",
    required=True,
    panel=MODEL_PANEL,
    help="A directory, a .gguf file, a Hugging Face id, or smollm2.",
)

system_option = click.option(
    "--system", metavar="TEXT", panel=MODEL_PANEL, help="System prompt; by default what the chat template says."
)

dtype_option = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    metavar="DTYPE",
    panel=WEIGHTS_PANEL,
    help="Type of the weights: float32, bfloat16 or float16; by default float32 on a CPU, else the checkpoint's own.",
)


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of every command that loads a model; they arrive as ``load``, a :class:`LoadOptions`."""

    @functools.wraps(command)
    def collected(
        device: str | None, dtype: str | None, backend: str | None, max_seq_len: int | None, **others: Any
    ) -> Any:
        return command(load=LoadOptions(device, dtype, backend, max_seq_len), **others)

    flags = (
        click.option(
            "--device",
            metavar="DEVICE",
            panel=WEIGHTS_PANEL,
            help="auto, cpu, cuda or cuda:N; by default CUDA if there is any.",
        ),
        dtype_option,
        click.option(
            "--backend",
            metavar="NAME",
            panel=WEIGHTS_PANEL,
            help="Attention backend by name; by default the first that can run (see astrai doctor).",
        ),
        click.option(
            "--max-seq-len",
            type=int,
            metavar="N",
            panel=WEIGHTS_PANEL,
            help="Longest prompt and completion together, in tokens; by default the model's context.",
        ),
    )
    return stack(flags, collected)


def speculation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of speculative decoding; those that were given arrive as ``speculation``, a dict of EngineConfig's
    fields."""

    @functools.wraps(command)
    def collected(**values: Any) -> Any:
        given = {name: values.pop(name) for name in ("speculation", "draft_model", "max_draft_tokens")}
        return command(speculation={name: value for name, value in given.items() if value is not None}, **values)

    flags = (
        click.option(*names, type=kind, metavar=metavar, panel=SPECULATION_PANEL, help=text, show_default=False)
        for names, kind, metavar, text in SPECULATION
    )
    return stack(flags, collected)


# (flag, type, metavar, panel, help); the range of a value is checked by SamplingParams alone.
_SAMPLING = (
    ("temperature", float, "T", SAMPLING_PANEL, "Randomness; 0 always takes the likeliest token.  [default: 0.8]"),
    ("top-k", int, "K", SAMPLING_PANEL, "Keep the K likeliest tokens; 0 is off.  [default: 50]"),
    ("top-p", float, "P", SAMPLING_PANEL, "Keep the likeliest tokens that add up to P; 1 is off.  [default: 0.95]"),
    ("min-p", float, "P", SAMPLING_PANEL, "Drop tokens below P times the likeliest one; 0 is off."),
    ("seed", int, "S", SAMPLING_PANEL, "Makes the answer repeatable; by default each run draws its own."),
    ("max-tokens", int, "N", LENGTH_PANEL, "Longest answer in tokens; by default until the context is full."),
    ("stop", str, "TEXT", LENGTH_PANEL, "End before this text; may be given several times."),
    ("repetition-penalty", float, "X", PENALTY_PANEL, "Above 1: repeat less of prompt and answer; 1 is off."),
    ("presence-penalty", float, "X", PENALTY_PANEL, "Lowers the logit of every token that was used, once; 0 is off."),
    ("frequency-penalty", float, "X", PENALTY_PANEL, "Lowers it for each time it was used; 0 is off."),
    ("rep-window", int, "N", PENALTY_PANEL, "Last N prompt tokens that the two above count too.  [default: 64]"),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling flags; those that were given arrive as ``sampling``, a dict by SamplingParams' names."""
    names = [flag.replace("-", "_") for flag, *_ in _SAMPLING]

    @functools.wraps(command)
    def collected(**values: Any) -> Any:
        sampling = {name: values.pop(name) for name in names}
        return command(sampling={k: v for k, v in sampling.items() if v not in (None, ())}, **values)

    flags = (
        click.option(f"--{flag}", type=kind, metavar=metavar, panel=panel, help=text, multiple=kind is str)
        for flag, kind, metavar, panel, text in _SAMPLING
    )
    return stack(flags, collected)


@contextmanager
def blame(flag: str | None, *errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into wrong usage of a flag: exit code 2, and its name in front of the message.

    Parameters
    ----------
    flag
        The flag's name; None takes it from the field that the message names (``field 'top_p': ...``).
    """
    try:
        yield
    except errors as error:
        message = re.sub(r"^[A-Z]\w+: ", "", str(error))  # the class that refused the value
        if field := re.match(r"field '(\w+)[^']*': ", message):
            flag, message = flag or f"--{field[1].replace('_', '-')}", message[field.end() :]
        raise click.UsageError(f"{flag}: {message}" if flag else message, click.get_current_context()) from error


def stack(flags: Any, command: Callable[..., Any]) -> Callable[..., Any]:
    """Apply option decorators so that the help shows them in the order given."""
    for flag in reversed(tuple(flags)):
        command = flag(command)
    return command
