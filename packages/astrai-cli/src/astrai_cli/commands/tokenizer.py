"""``astrai tokenizer``: a tokenizer of one's own."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from astrai_cli.commands.preprocess import need_astrai_train
from astrai_cli.diagnostics import warn
from astrai_cli.loading import busy
from astrai_cli.options import blame, debug_option
from astrai_cli.output import Fact, print_json, print_report


@click.group(context_settings={"show_default": True})
@debug_option
def tokenizer() -> None:
    """Train a tokenizer on text."""


@tokenizer.command("train")
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--vocab-size",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    panel="Vocabulary",
    help="Entries, the 256 bytes and the special tokens included.",
)
@click.option(
    "--min-frequency",
    type=click.IntRange(min=1),
    default=2,
    metavar="N",
    panel="Vocabulary",
    help="Least number of times that a pair must occur to be merged.",
)
@click.option(
    "--field", default="text", metavar="NAME", panel="Text", help="Name of the text in JSON and Parquet records."
)
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    required=True,
    panel="Output",
    help="Directory for tokenizer.json, tokenizer_config.json and the chat template.",
)
@click.option("--overwrite", is_flag=True, show_default=False, panel="Output", help="Replace DIR if it is not empty.")
@click.option("--json", "as_json", is_flag=True, show_default=False, panel="Output", help="Print one JSON object.")
@click.option(
    "--chat-template",
    metavar="NAME",
    panel="Special tokens and chats",
    help="chatml, or a file with a Jinja template; by default none.",
)
@click.option("--bos-token", metavar="TEXT", panel="Special tokens and chats", help="Begins a text; by default none.")
@click.option(
    "--eos-token",
    metavar="TEXT",
    panel="Special tokens and chats",
    help="Ends a text; by default <|endoftext|>, with chatml <|im_end|>.",
)
@click.option(
    "--pad-token", metavar="TEXT", panel="Special tokens and chats", help="Fills rows up; by default <|endoftext|>."
)
@click.option(
    "--special-token",
    "special_tokens",
    multiple=True,
    metavar="TEXT",
    panel="Special tokens and chats",
    help="A further token that no text is split into; may be given several times.",
)
@debug_option
def train_tokenizer(
    files: tuple[str, ...],
    vocab_size: int,
    min_frequency: int,
    field: str,
    output: Path,
    overwrite: bool,
    as_json: bool,
    chat_template: str | None,
    bos_token: str | None,
    eos_token: str | None,
    pad_token: str | None,
    special_tokens: tuple[str, ...],
) -> None:
    """Learn a byte-level BPE vocabulary from FILES.

    FILES are .txt, .md, .jsonl, .json or .parquet files, or quoted patterns of them. DIR is loaded by astrai and by
    transformers; it appears whole or not at all.
    """
    need_astrai_train()
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise click.ClickException(f"{output}: directory is not empty; choose another one or use --overwrite")
    with busy(f"Learning {vocab_size} entries"):
        from astrai_core.checkpoint.atomic import atomic_directory
        from astrai_core.errors import ConfigError
        from astrai_train.data.tokenizer_training import SpecialTokens, bytes_per_token
        from astrai_train.data.tokenizer_training import train_tokenizer as learn

        special = SpecialTokens(bos_token, eos_token, pad_token, special_tokens)
        with blame(None, ConfigError):
            made = learn(
                files,
                vocab_size,
                field=field,
                special=special,
                chat_template=chat_template,
                min_frequency=min_frequency,
            )
        with atomic_directory(output, overwrite=overwrite) as scratch:
            made.save_pretrained(scratch)
        density = bytes_per_token(made, files, field)
    if made.vocab_size < vocab_size:
        warn(
            f"the text gave {made.vocab_size} entries, not {vocab_size}: no further pair occurs {min_frequency} times; "
            "give more text or lower --min-frequency"
        )
    named = {name: [token, made.token_to_id(token)] for name, token in made.special_tokens.items()}
    if as_json:
        print_json(
            {
                "output": str(output),
                "vocab_size": made.vocab_size,
                "bytes_per_token": round(density, 3),
                "special_tokens": named,
                "chat_template": made.chat_template is not None,
            }
        )
        return
    facts = [
        Fact("vocabulary", f"{made.vocab_size:,} entries"),
        Fact("density", f"{density:.2f} bytes a token"),
        *(Fact(name.replace("_", " "), f"{token} ({number})") for name, (token, number) in named.items()),
        Fact("chat template", chat_template or "none"),
    ]
    print_report([(str(output), facts)])
