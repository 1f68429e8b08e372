"""``astrai preprocess`` beside the tokenizer's own parallel rate, and its memory (issue 6: >= 80 %, < 2 GB).

Both sides tokenise the same text with the same number of cores, in turns: the tokenizer library gets all documents
as a list in memory (``encode_batch_fast``, its own threads, text in bounded batches), astrai the JSON lines file, from
which it makes a store. Memory is that of the whole process tree, shared pages counted once (PSS), sampled while it runs.
Beside the clock stands the processor time of both sides, all threads and processes and the start of workers included.
On a machine that others use even that depends on who shares a core at the moment, so the same is measured in one thread
and in turns of one piece (1 MiB of the file), without the start: the median over the pieces is the steadiest figure.

    python -m benchmarks.preprocess [--megabytes 64] [--rounds 3] [--format text|messages] [--tokenizer smollm2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CODE = """
import os, sys, time
from astrai_core.checkpoint.source import open_source
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.run import preprocess
if __name__ == "__main__":
    config = PreprocessConfig.from_file(sys.argv[1])
    tokenizer = open_source(config.tokenizer).tokenizer()
    start, used = time.perf_counter(), sum(os.times()[:4])
    summary = preprocess(config, sys.argv[2], tokenizer)[""]
    print(time.perf_counter() - start, sum(os.times()[:4]) - used, summary.tokens)
"""


def make_documents(n_bytes: int) -> list[str]:
    """Return documents of 500 to 8,000 characters out of the novel of astrai-cli, in an order of their own."""
    from astrai_cli.first_model import novel

    text, draw, made, total = novel(), random.Random(0), [], 0
    while total < n_bytes:
        start = draw.randrange(len(text))
        made.append(text[start : start + draw.randint(500, 8_000)])
        total += len(made[-1])
    return made


def record_of(document: str, kind: str) -> dict[str, Any]:
    """Return a record of a format: plain text, or turns of a conversation."""
    if kind == "text":
        return {"text": document}
    half = len(document) // 4
    return {
        "messages": [
            {"role": "user", "content": document[:half]},
            {"role": "assistant", "content": document[half:]},
        ]
    }


def library_seconds(tokenizer: Any, texts: list[str]) -> tuple[float, float]:
    """Time the library's own parallel encoding; return seconds by the clock and of processors."""
    start, used = time.perf_counter(), time.process_time()
    for first in range(0, len(texts), 1024):
        tokenizer.backend.encode_batch_fast(texts[first : first + 1024], add_special_tokens=False)
    return time.perf_counter() - start, time.process_time() - used


def tree(pid: int) -> list[int]:
    """Return a process and all below it, as far as they still run."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += tree(int(child))
    return found


def memory_bytes(pid: int) -> int:
    """Return the proportional set size of a process tree; a process that just ended counts nothing."""
    total = 0
    for member in tree(pid):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def astrai_seconds(config: Path, output: Path) -> tuple[float, float, int, int]:
    """Preprocess in a process of its own; return both seconds without its imports, tokens, and the peak memory."""
    script = config.with_name("run.py")
    script.write_text(CODE)
    process = subprocess.Popen([sys.executable, script, config, output], stdout=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, memory_bytes(process.pid))
        except FileNotFoundError:
            break  # it ended while its tree was read
        time.sleep(0.5)  # reading smaps walks the page tables, which takes time from what is measured
    told, _ = process.communicate()
    if process.returncode:
        sys.exit(process.returncode)
    seconds, used, tokens = told.split()
    return float(seconds), float(used), int(tokens), peak


def share_by_pieces(config: Path, texts: dict[str, str], tokenizer: Any, scratch: Path) -> float:
    """Let both sides do a piece in turns, in this thread; return the median of their ratios by processor time.

    Parameters
    ----------
    texts
        What each line of the file is rendered to.
    """
    from astrai_train.data.preprocess import files
    from astrai_train.data.preprocess.config import PreprocessConfig
    from astrai_train.data.preprocess.encode import Encoder
    from astrai_train.data.preprocess.part import Job, make_part

    settings = PreprocessConfig.from_file(config)
    (file,) = files.find_files(settings.inputs[0].paths)
    encoder = Encoder(settings, tokenizer)
    scratch.mkdir()
    ratios = []
    for number, piece in enumerate(files.cut(file, "auto", settings.chunk_bytes)):
        mine = [texts[json.dumps(record.value)] for record in files.read(piece, settings.text_unit)]
        start = time.process_time()
        for first in range(0, len(mine), 64):
            tokenizer.backend.encode_batch_fast(mine[first : first + 64], add_special_tokens=False)
        between = time.process_time()
        make_part(Job(settings, tokenizer, scratch), encoder, number, piece)
        ratios.append((between - start) / (time.process_time() - between))
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--format", choices=("text", "messages"), default="text")
    parser.add_argument("--tokenizer", default="smollm2")
    arguments = parser.parse_args()
    from astrai_core.checkpoint.source import open_source

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = open_source(arguments.tokenizer).tokenizer()
    documents = make_documents(arguments.megabytes * 10**6)
    records = [record_of(document, arguments.format) for document in documents]
    texts = documents
    if arguments.format == "messages":
        texts = [
            tokenizer.apply_chat_template(record["messages"], tokenize=False, add_generation_prompt=False)
            for record in records
        ]
    n_bytes = sum(len(text.encode()) for text in texts)
    library: list[tuple[float, float]] = []
    astrai: list[tuple[float, float]] = []
    peaks = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with (folder / "in.jsonl").open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        settings = {
            "inputs": [{"paths": [str(folder / "in.jsonl")]}],
            "tokenizer": arguments.tokenizer,
            "format": arguments.format,
        }
        (folder / "config.json").write_text(json.dumps(settings))
        library_seconds(tokenizer, texts[:256])
        for number in range(arguments.rounds):
            library.append(library_seconds(tokenizer, texts))
            *seconds, n_tokens, peak = astrai_seconds(folder / "config.json", folder / f"out{number}")
            astrai.append((seconds[0], seconds[1]))
            peaks.append(peak)
            rates = [n_bytes / 1e6 / value for value in (*library[-1], *astrai[-1])]
            print(
                f"round {number + 1}: library {rates[0]:.2f} MB/s ({rates[1]:.2f} a processor second), "
                f"astrai {rates[2]:.2f} MB/s ({rates[3]:.2f}), {rates[2] / rates[0]:.1%} ({rates[3] / rates[1]:.1%})",
                flush=True,
            )
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        lines = {json.dumps(record): text for record, text in zip(records, texts, strict=True)}
        by_pieces = share_by_pieces(folder / "config.json", lines, tokenizer, folder / "parts")
    by_clock, by_processor = (
        statistics.median(theirs[i] / mine[i] for theirs, mine in zip(library, astrai, strict=True)) for i in (0, 1)
    )
    print(
        json.dumps(
            {
                "format": arguments.format,
                "megabytes": round(n_bytes / 1e6, 1),
                "tokens": n_tokens,
                "cores": len(os.sched_getaffinity(0)),
                "library_mb_per_s": round(n_bytes / statistics.median(clock for clock, _ in library) / 1e6, 2),
                "astrai_mb_per_s": round(n_bytes / statistics.median(clock for clock, _ in astrai) / 1e6, 2),
                "share_of_library": round(by_clock, 3),
                "share_by_processor_time": round(by_processor, 3),
                "share_by_pieces": round(by_pieces, 3),
                "peak_memory_bytes": max(peaks),
            }
        )
    )


if __name__ == "__main__":
    main()
