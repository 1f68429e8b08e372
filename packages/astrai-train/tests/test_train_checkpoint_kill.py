"""kill -9 in a loop of saves, fifty times: what is resumed is always whole (training rule 6, issue 6's floor)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("checkpoint_kill_worker.py")
KILLS = 50


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_fifty_kills_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    """After each kill the newest checkpoint is at least the last that was finished, and all of one step."""
    done = subprocess.run(
        [sys.executable, WORKER, tmp_path / "checkpoints", str(KILLS)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["kills"] == KILLS and found["reached"] >= KILLS
    assert found["torn"] >= 3, "kills met saves that were under way, which left something to clean"
