"""``astrai data``: what is in a pre-tokenised store."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from astrai_cli.commands.preprocess import need_astrai_train, summary_facts
from astrai_cli.loading import busy
from astrai_cli.options import ModelName, debug_option
from astrai_cli.output import Fact, human_bytes, print_json, print_report

if TYPE_CHECKING:
    from astrai_core import Tokenizer
    from astrai_train.data.store import TokenStore


@click.group(context_settings={"show_default": True})
@debug_option
def data() -> None:
    """Look at tokens to train on."""


@data.command("inspect")
@click.argument("store", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rows", type=click.IntRange(min=0), default=3, metavar="N", help="Rows to show.")
@click.option("--start", type=click.IntRange(min=0), default=0, metavar="I", help="First row to show, from 0.")
@click.option(
    "--tokenizer",
    type=ModelName(),
    metavar="MODEL",
    help="Where the tokenizer is; by default where it was when the store was made.",
)
@click.option("--check", is_flag=True, show_default=False, help="Read every token, and refuse what is out of range.")
@click.option("--json", "as_json", is_flag=True, show_default=False, help="Print one JSON object instead of text.")
@debug_option
def inspect_store(store: Path, rows: int, start: int, tokenizer: str | None, check: bool, as_json: bool) -> None:
    """Show what a store holds, and its rows as text: what is supervised in green.

    STORE is a directory that astrai preprocess made. Where there are no colours, >>> and <<< stand around what is
    supervised.
    """
    need_astrai_train()
    with busy(f"Reading {store}"):
        from astrai_core.checkpoint.source import open_source
        from astrai_train.data.store import TokenStore

        opened = TokenStore(store)
        if check:
            opened.verify()
        shown = range(min(start, len(opened)), min(start + rows, len(opened)))
        decoder = None
        if shown:
            decoder = open_source(tokenizer or opened.header["tokenizer"]["name"]).tokenizer()
            opened.check_tokenizer(decoder)
    texts = [(row, list(_parts(opened, row, decoder))) for row in shown] if decoder else []
    if as_json:
        kept = {key: value for key, value in opened.header.items() if key != "shards"}
        as_data = [
            {"row": row, "parts": [{"stream": s, "text": t, "supervised": m} for s, t, m in parts]}
            for row, parts in texts
        ]
        print_json({**kept, "rows": as_data})
        return
    print_report([(str(store), _facts(opened))])
    for row, parts in texts:
        _print_row(row, parts)


def _facts(store: TokenStore) -> Iterator[Fact]:
    n_bytes = sum(file.stat().st_size for file in store.path.iterdir())
    lengths = {s.name: store.lengths(s.name) for s in store.streams.values() if s.offsets == s.name}
    yield Fact("holds", f"{len(store):,} rows of kind {store.kind}, {human_bytes(n_bytes)}")
    for name, n in lengths.items():
        if len(n):
            unit = "bytes" if name == "columns" else "tokens"
            yield Fact(name, f"{n.sum():,} {unit}; a row {n.min():,} to {n.max():,}, {n.mean():,.1f} on average")
    yield Fact("token type", f"{store.streams[next(iter(lengths))].dtype} for a vocabulary of {store.vocab_size:,}")
    yield Fact("tokenizer", f"{store.header['tokenizer'].get('name')} ({store.tokenizer_hash[:12]})")
    if "summary" in store.header:
        from astrai_train.data.preprocess.part import Summary

        yield from summary_facts(Summary.from_dict(store.header["summary"]))


def _parts(store: TokenStore, row: int, tokenizer: Tokenizer) -> Iterator[tuple[str, str, bool]]:
    """Yield (stream, text, whether it is supervised), the mask's stretches apart."""
    for name in store.streams:
        if name == "mask":
            continue
        ids = store.read(name, row).tolist()
        if name == "columns":
            yield name, json.dumps(json.loads(bytes(ids)), ensure_ascii=False), False
            continue
        mask = store.read("mask", row).tolist() if "mask" in store.streams else [name != "prompt"] * len(ids)
        decoder = tokenizer.stream_decoder(skip_special_tokens=False)
        pieces = [(decoder.step(token), bool(flag)) for token, flag in zip(ids, mask, strict=True)]
        pieces.append((decoder.flush(), bool(mask[-1]) if mask else False))
        for supervised, stretch in groupby(pieces, key=lambda piece: piece[1]):
            if text := "".join(text for text, _ in stretch):
                yield name, text, supervised


def _print_row(row: int, parts: list[tuple[str, str, bool]]) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write(f"row {row}\n")
        for stream, stretches in groupby(parts, key=lambda part: part[0]):
            text = "".join(f">>>{text}<<<" if supervised else text for _, text, supervised in stretches)
            sys.stdout.write(f"{stream}: {text}\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(f"row {row}", "bold"))
    for stream, stretches in groupby(parts, key=lambda part: part[0]):
        line = Text.assemble((f"{stream}: ", "cyan"))
        for _, text, supervised in stretches:
            line.append(text, style="green" if supervised else "dim")
        console.print(line)
