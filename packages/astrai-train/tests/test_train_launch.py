"""Ranks on one machine: started, watched, and ended together (issue 6, 5)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from astrai_core.errors import AstraiError, ConfigError, DataError, TrainingError
from astrai_train.parallel.launch import RankError, _Failure, _Rank, _watch, launch

TESTS = Path(__file__).parent
slow = partial(pytest.param, marks=pytest.mark.slow)
two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the ranks' work, which they can import too."""
    monkeypatch.syspath_prepend(str(TESTS))
    import launch_jobs

    return launch_jobs


@pytest.mark.slow
def test_ranks_find_each_other(jobs: Any, tmp_path: Path) -> None:
    """What rank 0 returns comes back; every rank was there, and none ended with its group open."""
    assert launch(partial(jobs.ranks, tmp_path / "rank"), 2) == (2, 3)
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert said == {"rank_0": "open: False", "rank_1": "open: False"}


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("killed", TrainingError, r"^rank 1: was killed by SIGKILL .*resumed"),
        slow("lingers", DataError, r"^rank 1: rows.jsonl:3: not JSON; mend the line$"),
        slow("unforeseen", TrainingError, r"^rank 1: ZeroDivisionError: by nothing \(run with --debug"),
        slow("hang", TrainingError, r"^rank 1: was killed by SIGKILL .*resumed"),
        pytest.param("in nccl", TrainingError, r"^rank 1: was killed by SIGKILL .*resumed", marks=two_gpus),
        slow("all", DataError, "^there is no data anywhere$"),
    ],
)
def test_one_failure_ends_all_and_is_named(
    jobs: Any, monkeypatch: pytest.MonkeyPatch, how: str, error: type[AstraiError], message: str
) -> None:
    """One rank dies: the others stop, though they wait for it or do not even look, and one message names it."""
    monkeypatch.setattr("astrai_train.parallel.launch.GRACE_SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(error, match=message) as caught:
        launch(partial(jobs.fail, 1, how), 2)
    assert time.monotonic() - started < 60, "no rank was waited for until it timed out"
    if how == "unforeseen":
        assert isinstance(caught.value.__cause__, RankError)
        assert "in fail" in str(caught.value.__cause__), "the traceback of the other process"


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.exitcode = code
        self.sentinel, writer = os.pipe()
        os.close(writer)

    def join(self) -> None:
        os.close(self.sentinel)


def ended(number: int, how: float) -> _Rank[None]:
    """Make a rank that was ended by a signal (below 0), or told of an error so many seconds ago."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    if how >= 0:
        sender.send(_Failure(time.time() - how, DataError("told"), ""))
    sender.close()
    return _Rank(number, cast("Any", Ended(int(how) if how < 0 else 1)), receiver)


@pytest.mark.parametrize(
    ("how", "first"),
    [
        (
            (-signal.SIGABRT, -signal.SIGKILL),
            1,
        ),  # torch's watchdog ended whom the killed one had left waiting
        ((-signal.SIGABRT, 2.0), 1),  # or one that had told of an error
        ((-signal.SIGABRT, 0.0), 0),  # whoever was connected to it told of its end
        ((-signal.SIGKILL, 2.0), 0),
    ],
)
def test_who_failed_first(how: tuple[float, float], first: int) -> None:
    failed = _watch([ended(number, each) for number, each in enumerate(how)])
    assert failed is not None and failed.number == first


@pytest.mark.slow
def test_a_killed_starter_takes_its_ranks_along(jobs: Any, tmp_path: Path) -> None:
    """No orphan trains on."""
    code = (
        "import sys; from functools import partial; from pathlib import Path\n"
        "import launch_jobs; from astrai_train.parallel.launch import launch\n"
        "if __name__ == '__main__': launch(partial(launch_jobs.linger, Path(sys.argv[1])), 2)\n"
    )
    script = tmp_path / "start.py"
    script.write_text(code)
    said = tmp_path / "said"
    said.mkdir()
    starter = subprocess.Popen([sys.executable, str(script), str(said)], env={**os.environ, "PYTHONPATH": str(TESTS)})
    wait_until(lambda: len(list(said.glob("[01]"))) == 2)
    starter.kill()
    starter.wait()
    pids = [int((said / name).read_text()) for name in ("0", "1")]
    wait_until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank(jobs: Any, tmp_path: Path, number: signal.Signals) -> None:
    """Here the ranks have no handler yet, so they end, and so does the starter."""
    import threading

    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.glob("[01]"))) == 2)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        launch(partial(jobs.linger, tmp_path), 2)
    assert signal.getsignal(number) is before


def test_what_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--nprocs must be at least 1, got 0"):
        launch(int, 0)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="this process is one already"):
        launch(int, 2)


def alive(pid: int) -> bool:
    """Whether a process still runs (one that ended and was not yet waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
