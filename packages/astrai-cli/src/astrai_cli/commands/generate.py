"""``astrai generate``: complete one prompt, or a file of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import rich_click as click

from astrai_cli import jsonl
from astrai_cli.loading import check_sampling, open_engine, sampling_params, streaming
from astrai_cli.options import (
    blame,
    debug_option,
    load_options,
    model_option,
    sampling_options,
    speculation_options,
    system_option,
)
from astrai_cli.output import StreamedText, TokenRate, print_json, whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from astrai_cli.options import LoadOptions
    from astrai_infer import Completion, Delta, InferenceEngine, SamplingParams

BATCH = 64
"""Prompts of a file that run at once."""

PROMPT_PANEL, OUTPUT_PANEL = "Prompt", "Output"


@click.command()
@model_option
@click.option(
    "--prompt",
    "-p",
    metavar="TEXT",
    panel=PROMPT_PANEL,
    help="What to ask; - reads standard input (one last newline is dropped).",
)
@system_option
@click.option(
    "--raw",
    is_flag=True,
    show_default=False,
    panel=PROMPT_PANEL,
    help="Send the text as it is, without the chat template.",
)
@click.option(
    "--input",
    "input_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    panel=PROMPT_PANEL,
    help='A batch instead: JSON lines with "prompt" or "messages"; other keys are kept.',
)
@click.option(
    "--output",
    "output_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    panel=OUTPUT_PANEL,
    help="Where the batch's answers go: the input's lines with text, token_ids, finish_reason and usage.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    show_default=False,
    panel=OUTPUT_PANEL,
    help="Print one JSON object instead of text.",
)
@sampling_options
@load_options
@speculation_options
@debug_option
def generate(
    model: str,
    load: LoadOptions,
    speculation: dict[str, Any],
    sampling: dict[str, Any],
    prompt: str | None,
    system: str | None,
    raw: bool,
    input_path: Path | None,
    output_path: Path | None,
    as_json: bool,
) -> None:
    """Complete one prompt, or a file of them.

    The text is streamed to standard output. The model's chat template is applied unless --raw is given, and sampling
    defaults give way to the model's generation_config.json.

    \b
    astrai generate -m smollm2 -p "How do plants make their food?" --temperature 0
    astrai generate -m smollm2 --input questions.jsonl --output answers.jsonl
    """
    if (prompt is None) == (input_path is None):
        raise click.UsageError("give either --prompt or --input")
    if (input_path is None) != (output_path is None):
        raise click.UsageError("--input and --output go together")
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template; leave out --raw")
    if as_json and input_path is not None:
        raise click.UsageError("--json is for --prompt; the output of --input is JSON lines already")
    if input_path is not None and output_path is not None:
        if not output_path.resolve().parent.is_dir():
            raise click.UsageError(f"--output: the directory of {output_path} does not exist; create it")
        lines = jsonl.read_lines(input_path, raw=raw, system=system)
        check_sampling(sampling)
        _run_batch(model, load, speculation, sampling, lines, output_path, raw)
        return
    text = _read_prompt(cast("str", prompt))
    check_sampling(sampling)
    with open_engine(model, load, needs_template=not raw, speculation=speculation) as engine:
        params = sampling_params(engine, sampling)
        asked = text if raw else jsonl.conversation(text, system)
        _run_one(engine, asked, params, as_json)


def _read_prompt(prompt: str) -> str:
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise click.ClickException(f"standard input: not UTF-8 text (byte {error.start}); convert it") from None
    if not prompt:
        raise click.UsageError("--prompt is empty; give some text")
    return prompt


def _run_one(engine: InferenceEngine, prompt: Any, params: SamplingParams, as_json: bool) -> None:
    from astrai_core.errors import RequestError

    with blame("--prompt", RequestError):
        if as_json:
            completion = cast("Completion", engine.generate(prompt, params))
            print_json({**jsonl.describe(completion), "model": engine.name})
            return
        out = StreamedText()
        with streaming(engine, prompt, params) as deltas:
            for delta in deltas:
                out.write(delta)
        out.end()


def _run_batch(
    model: str,
    load: LoadOptions,
    speculation: dict[str, Any],
    sampling: dict[str, Any],
    lines: list[jsonl.Line],
    output: Path,
    raw: bool,
) -> None:
    completions: list[Completion] = []
    rate = TokenRate()
    if lines:
        n_seqs = min(BATCH, len(lines))
        with open_engine(
            model,
            load,
            needs_template=not raw,
            max_num_seqs=n_seqs,
            max_waiting=len(lines),
            speculation=speculation,
        ) as engine:
            params = sampling_params(engine, sampling)
            rate = TokenRate()
            with streaming(engine, [line.prompt for line in lines], params) as deltas:
                completions = _collect(deltas, len(lines), rate)
    with whole_file(output) as file:
        file.writelines(map(jsonl.answer, lines, completions))
    n_failed = sum(completion.error is not None for completion in completions)
    if n_failed:
        raise click.ClickException(f'{n_failed} of {len(lines)} lines could not be served; see "error" in {output}')
    click.echo(f"{output}: {len(lines)} lines, {rate}", err=True)


def _collect(deltas: Iterator[Delta], n_lines: int, rate: TokenRate) -> list[Completion]:
    """Wait for all completions, in the order of the lines, with a progress bar if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    found: dict[int, Completion] = {}
    columns = (TextColumn("lines"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = not sys.stderr.isatty()
    with Progress(
        *columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True, disable=hidden
    ) as progress:
        bar = progress.add_task("", total=n_lines)
        for delta in deltas:
            rate.add(len(delta.token_ids))
            if delta.completion is not None:
                found[delta.prompt_index] = delta.completion
                progress.update(bar, advance=1, description=str(rate))
    return [found[i] for i in range(n_lines)]
