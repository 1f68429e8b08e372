"""Preprocessing that is killed: training rule 11, resumable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from astrai_core import AutoTokenizer
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.run import preprocess
from astrai_train.data.store import TokenStore

SCRIPT = """
import sys
from astrai_core import AutoTokenizer
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.run import preprocess

if __name__ == "__main__":
    config = PreprocessConfig.from_file(sys.argv[1])
    preprocess(config, sys.argv[2], AutoTokenizer.from_pretrained(config.tokenizer))
"""
SECONDS = 60


def wait_for(condition: object, what: str) -> None:
    assert callable(condition)
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {SECONDS} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and waits to be reaped does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for orphans in /proc")
def test_a_killed_run_leaves_no_worker_and_goes_on(tmp_path: Path, tokenizer_dir: Path) -> None:
    """kill -9 of the first process ends its workers; what is whole is kept, and the result is that of one run."""
    rows = [json.dumps({"text": f"row {i} " * 40}) for i in range(6_000)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    inputs = [{"paths": [str(tmp_path / "in.jsonl")]}]
    settings = {
        "inputs": inputs,
        "tokenizer": str(tokenizer_dir),
        "format": "text",
        "chunk_bytes": 20_000,
        "workers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "script.py").write_text(SCRIPT)
    parts = tmp_path / "out.partial"
    process = subprocess.Popen([sys.executable, tmp_path / "script.py", tmp_path / "config.json", tmp_path / "out"])
    try:
        wait_for(lambda: len(list(parts.glob("*/summary.json"))) >= 3, "the third part")
        tasks = Path(f"/proc/{process.pid}/task").iterdir()
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert children
    wait_for(lambda: not any(map(alive, children)), "the end of the workers")
    finished = {path.parent.name: path.stat().st_mtime_ns for path in parts.glob("0*/summary.json")}
    assert not (tmp_path / "out").exists()
    assert 3 <= len(finished) < 100, "killed in the middle"

    config = PreprocessConfig.from_dict({**settings, "workers": 0})
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    kept: list[dict[str, int]] = []

    def look(done: int, total: int) -> None:
        if not kept:
            kept.append({name: os.stat(parts / name / "summary.json").st_mtime_ns for name in finished})

    preprocess(config, tmp_path / "out", tokenizer, progress=look)
    assert kept == [finished]
    preprocess(config, tmp_path / "straight", tokenizer)
    one, two = TokenStore(tmp_path / "out"), TokenStore(tmp_path / "straight")
    assert len(one) == 6_000
    assert one.lengths("input_ids").tolist() == two.lengths("input_ids").tolist()
    for file in (tmp_path / "straight").glob("*.bin"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
