"""The README's figures, written from benchmarks/results/, so that they cannot differ from what was measured.

    python -m tools.readme_tables           rewrite the table in README.md
    python -m tools.readme_tables --check   exit status 1 if it is not what the results say

The table stands between two comments; of all results of the engine the newest file with decoding rows is taken.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures: python -m tools.readme_tables -->\n", "<!-- end of figures -->\n"
MODELS = {"preset": "1.2 B (24 x 1536, 24/4 heads)", "llama1b": "Llama-3.2-1B's shape", "qwen06": "Qwen3-0.6B's shape"}
BATCHES = (1, 8, 32, 128)
# vLLM 0.25.1 from its wheel, its defaults, on an H200 on 2026-11-30: prompts of 512 tokens, 128 new ones, greedy.
VLLM = {
    "preset": (491, 3_523, 11_689, 38_073),
    "llama1b": (716, 5_054, 17_320, 44_055),
    "qwen06": (603, 4_748, 13_228, 29_467),
}


def newest(results: Path) -> dict[str, Any]:
    """Return the content of the newest file of the engine's benchmark that has every row of the table."""
    for path in sorted(results.glob("*-h200-engine*.json"), reverse=True):
        content: dict[str, Any] = json.loads(path.read_text())
        if set(decoding(content)) >= {(model, batch) for model in MODELS for batch in BATCHES}:
            return content
    raise SystemExit(f"readme_tables: {results} has no result of benchmarks/engine.py with all decoding rows")


def decoding(content: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Return tokens per second by model and batch."""
    rows = (row for row in content["rows"] if row["part"] == "decode")
    return {(row["model"], row["batch"]): row["tokens/s"] for row in rows}


def table(content: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    rates, environment = decoding(content), content["environment"]
    lines = [
        f"Measured on {environment['date'][:10]} on one {environment['card']}; torch {environment['versions']['torch']}.\n",
        "| model | astrai | vLLM |",
        "|---|---|---|",
    ]
    for model, title in MODELS.items():
        ours = [rates[model, batch] for batch in BATCHES]
        columns = (
            " / ".join(f"{rate:,.0f}" for rate in ours),
            " / ".join(f"{rate:,}" for rate in VLLM[model]),
        )
        lines.append(f"| {title} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Rewrite or check the README."""
    parser = argparse.ArgumentParser(description="Write the README's figures from benchmarks/results/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if the figures differ")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder with README.md and benchmarks/results/")
    options = parser.parse_args(arguments)
    readme = options.root / "README.md"
    text = readme.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(
            f"readme_tables: {readme} lacks the lines {BEGIN.strip()!r} and {END.strip()!r}; put them back"
        )
    wanted = head + BEGIN + table(newest(options.root / "benchmarks" / "results")) + END + tail
    if options.check:
        if text != wanted:
            print("readme_tables: the README's figures are not the newest results; run python -m tools.readme_tables")
        return int(text != wanted)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
