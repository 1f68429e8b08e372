"""``astrai convert``: any model that loads, as a Hugging Face directory."""

from __future__ import annotations

import re
from pathlib import Path

import rich_click as click

from astrai_cli.loading import busy
from astrai_cli.options import ModelName, debug_option, dtype_option
from astrai_cli.output import human_bytes, human_count

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Size(click.ParamType):
    """A number of bytes with a unit: 5GB, 500MB, 2GiB."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", value.strip().lower())
        n_bytes = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
        if n_bytes < 1:
            self.fail(f"{value!r} is no size; write it as 5GB, 500MB or 2GiB", param, ctx)
        return n_bytes


@click.command()
@click.argument("source", type=ModelName())
@click.argument("dest", type=click.Path(file_okay=False, path_type=Path))
@dtype_option
@click.option("--overwrite", is_flag=True, show_default=False, panel="Output", help="Replace DEST if it is not empty.")
@click.option(
    "--max-shard-size",
    type=Size(),
    default="5GB",
    metavar="SIZE",
    panel="Output",
    help="Largest weight file; a model that is larger gets several.",
)
@debug_option
def convert(source: str, dest: Path, dtype: str | None, overwrite: bool, max_shard_size: int) -> None:
    """Turn a GGUF or other model into a Hugging Face directory.

    SOURCE is a directory, a .gguf file, a Hugging Face id, or smollm2. DEST gets config.json, safetensors weights,
    tokenizer, chat template and generation_config.json, appears whole or not at all, and is loaded as a check.
    """
    if dest.is_dir() and any(dest.iterdir()) and not overwrite:
        raise click.ClickException(f"{dest}: directory is not empty; choose another one or use --overwrite")
    with busy(f"Reading {source}"):
        from astrai_core.auto import AutoModel, AutoTokenizer, load_model
        from astrai_core.checkpoint.hf_adapter import save_pretrained
        from astrai_core.checkpoint.source import open_source

        opened = open_source(source)
        tokenizer = opened.tokenizer()
        generation_config = opened.generation_config()
        config = opened.config()
        kind = dtype if dtype not in (None, "auto") else config.dtype or "bfloat16"
        model = load_model(opened, kind, "cpu")
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    with busy(f"Writing {dest}"):
        save_pretrained(
            model,
            dest,
            tokenizer=tokenizer,
            generation_config=generation_config,
            max_shard_bytes=max_shard_size,
            overwrite=overwrite,
        )
    del model
    with busy(f"Checking {dest}"):
        AutoModel.from_pretrained(dest, kind, "cpu")
        AutoTokenizer.from_pretrained(dest)
    n_bytes = sum(file.stat().st_size for file in dest.rglob("*.safetensors"))
    click.echo(f"{dest}: {human_count(n_parameters)} parameters, {kind}, {human_bytes(n_bytes)} of weights")
