"""Worker processes of preprocessing: training rule 11, parallel in bounded memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from astrai_core.errors import DataError
from astrai_train.data.preprocess import files, part, run, workers
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.part import Job, Summary
from astrai_train.data.preprocess.workers import WorkerPool
from astrai_train.data.store import TokenStore


def configure(path: Path, **changes: Any) -> PreprocessConfig:
    base = {"inputs": [{"paths": [str(path)]}], "tokenizer": "bytes", "format": "text"}
    return PreprocessConfig.from_dict(base | changes)


def write_rows(path: Path, n_rows: int, length: int) -> Path:
    path.write_text("".join(json.dumps({"text": f"{i:04d} " + "x" * length}) + "\n" for i in range(n_rows)))
    return path


def test_threads_of_the_tokenizer_change_nothing(tmp_path: Path, byte_tokenizer: Any) -> None:
    """Parts are the same bytes from workers with one thread and with three, and in the order of the requests."""
    file = write_rows(tmp_path / "in.jsonl", 400, 50)
    config = configure(file, chunk_bytes=5_000)
    pieces = files.cut(file, "auto", config.chunk_bytes)
    made = []
    for n_threads in (1, 3):
        parts = tmp_path / f"parts{n_threads}"
        parts.mkdir()
        with WorkerPool(Job(config, byte_tokenizer, parts), 2, n_threads) as pool:
            asked = [pool.submit(i, piece) for i, piece in enumerate(pieces)]
            assert sum(future.result().kept for future in asked) == 400
        made.append({str(p.relative_to(parts)): p.read_bytes() for p in sorted(parts.glob("*/*"))})
    assert made[0] == made[1]
    assert len(made[0]) == 4 * len(pieces)


@pytest.mark.parametrize(
    ("n_cores", "n_missing", "asked", "expected"),
    [
        (2, 100, None, (2, 1)),
        (64, 1000, None, (16, 4)),  # 64 processes would not fit 2 GB
        (8, 1, None, (1, 8)),  # a JSON array is one piece
        (8, 0, None, (0, 8)),
        (8, 100, 3, (3, 1)),
        (2, 100, 40, (40, 1)),
        (8, 100, 0, (0, 1)),
    ],
)
def test_cores_become_processes_then_threads(
    monkeypatch: pytest.MonkeyPatch, n_cores: int, n_missing: int, asked: int | None, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(n_cores)), raising=False)
    assert run._processes(configure(Path("x.jsonl"), workers=asked), n_missing) == expected
    assert workers.MAX_WORKERS == 16


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_batches_are_bounded_by_bytes(tmp_path: Path, kind: str) -> None:
    """Rule 11, bounded memory: what is encoded at once is a number of bytes, however long the rows are."""
    rows = [{"text": f"{i} " + "x" * 100_000} for i in range(20)]
    file = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    (piece,) = files.cut(file, "auto", 1 << 30)
    batches = [samples for _, samples in part._batches(configure(file), piece, Summary())]
    assert [text for batch in batches for text in batch] == [row["text"] for row in rows]
    assert {len(batch) for batch in batches[:-1]} == {3}, "the third passes 256 KiB"


def test_an_error_of_a_worker_is_that_of_the_file(tmp_path: Path, byte_tokenizer: Any) -> None:
    """Rule 11: the error of a file that is broken as a whole comes through, and no part stays in the way."""
    (tmp_path / "in.json").write_text('[{"text": "a"}, {"text": "b"}')
    with pytest.raises(DataError, match=r"in.json: the JSON array is cut off after record 2; fetch it again"):
        run.preprocess(configure(tmp_path / "in.json", workers=1), tmp_path / "out", byte_tokenizer)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the worker in /proc")
def test_a_worker_that_dies_is_an_error(tmp_path: Path, byte_tokenizer: Any) -> None:
    """As when memory runs out: one line with the file, no waiting for ever; the pool ends with its other workers."""

    def children() -> set[int]:
        tasks = Path("/proc/self/task").iterdir()
        return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}

    file = write_rows(tmp_path / "in.jsonl", 20_000, 200)
    (piece,) = files.cut(file, "auto", 1 << 30)
    before = children()
    with WorkerPool(Job(configure(file), byte_tokenizer, tmp_path), 1, 1) as pool:
        future = pool.submit(0, piece)
        end = time.monotonic() + 60
        while not (tmp_path / "00000000.tmp").exists():
            assert time.monotonic() < end
            assert not future.done()
            time.sleep(0.01)
        (worker,) = children() - before
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(DataError, match=r"in.jsonl: a worker process died of it \(signal 9, out of memory\?\)"):
            future.result(timeout=60)
    assert children() == before
    assert not (tmp_path / "00000000").exists()


def test_a_script_needs_no_guard(tmp_path: Path, tokenizer_dir: Path) -> None:
    """Workers do not import the caller's main module, nor does what it prints or its standard input concern them."""
    file = write_rows(tmp_path / "in.jsonl", 200, 50)
    settings = {**configure(file, chunk_bytes=4_000, workers=2).to_dict(), "tokenizer": str(tokenizer_dir)}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from astrai_core import AutoTokenizer\n"
        "from astrai_train.data.preprocess.config import PreprocessConfig\n"
        "from astrai_train.data.preprocess.run import preprocess\n"
        "config = PreprocessConfig.from_file(sys.argv[1])\n"
        "print(preprocess(config, sys.argv[2], AutoTokenizer.from_pretrained(config.tokenizer))[''].kept)\n"
    )
    command: list[str | Path] = [sys.executable, tmp_path / "script.py", tmp_path / "config.json", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, stdin=subprocess.DEVNULL)
    assert (done.stdout, done.stderr) == ("200\n", "")
    assert len(TokenStore(tmp_path / "out")) == 200
