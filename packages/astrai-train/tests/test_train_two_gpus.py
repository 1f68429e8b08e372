"""benchmarks/two_gpus.py as far as it goes without GPUs: the rows, the verdicts, and the tests that these are made of."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astrai_core.errors import AstraiError, TrainingError

ROOT = Path(__file__).resolve().parents[3]
CHECK = ROOT / "tools" / "gpu_check.sh"

if not CHECK.is_file() or importlib.util.find_spec("benchmarks") is None:
    pytest.skip("the repository's benchmarks are not here", allow_module_level=True)

from benchmarks import two_gpus  # noqa: E402
from benchmarks.training import SIZES, Timing  # noqa: E402

Measure = Callable[..., two_gpus.Results]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Function from what two ranks take and find to the results, where one rank takes 20 ms and finds (8, 2)."""

    def make(
        milliseconds: float, loss: float = 8.0, norm: float = 2.0, error: AstraiError | None = None, **options: Any
    ) -> two_gpus.Results:
        def stand_in(size: Any, precision: Any, device: Any, changes: Any, profile: Any, ranks: int, *_: Any) -> Timing:
            assert size.micro_batch * ranks == 4 and changes.get("micro_batch_size", 2) == 2, "the same steps"
            if ranks == 2 and error is not None:
                raise error
            found = (8.0, 2.0) if ranks == 1 else (loss, norm)
            lines = [{"step": 1, "loss": found[0], "grad_norm": found[1]}, {"step": 2, "loss": 8.0, "grad_norm": 2.0}]
            run = Path(changes["output_dir"])
            run.mkdir()
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            return Timing(20.0 if ranks == 1 else milliseconds, 1.0, 10, 8.0)

        monkeypatch.setattr(two_gpus, "ours", stand_in)
        results = two_gpus.Results(tmp_path / "two_gpus.json", {"name": "two_gpus"})
        given = {"device": "cpu", "ranks": 2, "quick": False} | options
        results.measure(SIZES["tiny"], "fp32", argparse.Namespace(**given), float("inf"))
        return results

    return make


def test_ranks_are_judged_by_one_rank(measure: Measure, tmp_path: Path) -> None:
    """Half the time for the same steps is all that two ranks can bring; the file holds what the screen showed."""
    results = measure(10.0)
    written = json.loads((tmp_path / "two_gpus.json").read_text())
    assert written["rows"] == results.rows and len(written["checks"]) == len(results.checks) == 8
    assert [row.get("scaling %") for row in results.rows] == [None, 100.0, 100.0, 100.0]
    assert [row["tokens/s"] for row in results.rows] == [12800.0, 25600.0, 25600.0, 25600.0]
    assert all(check.passed for check in results.checks)


@pytest.mark.parametrize(
    ("found", "failed"),
    [
        ((11.2, 8.0, 2.0), "scaling"),
        ((10.0, 8.0 * (1 + 1.1e-5), 2.0), "loss"),
        ((10.0, float("nan"), 2.0), "loss"),
        ((10.0, 8.0, 1.0), "norm"),  # gradients that are averaged instead of added up
    ],
)
def test_what_is_not_as_asked_for(measure: Measure, found: tuple[float, float, float], failed: str) -> None:
    checks = measure(*found).checks
    assert {check.name.rpartition(": ")[2] for check in checks if not check.passed} == {failed}


def test_speed_is_not_judged_by_a_tiny_model(measure: Measure) -> None:
    assert all(check.passed for check in measure(100.0, quick=True).checks)


def test_a_mode_that_fails_is_a_failed_check(measure: Measure) -> None:
    """The others are tried all the same."""
    results = measure(10.0, error=TrainingError("rank 1: was killed"))
    assert [(check.passed, check.found) for check in results.checks] == [
        (False, "TrainingError: rank 1: was killed")
    ] * 3
    assert [row["ranks"] for row in results.rows] == [1]


def test_what_there_was_no_time_for_has_not_passed(tmp_path: Path) -> None:
    results = two_gpus.Results(tmp_path / "two_gpus.json", {})
    options = argparse.Namespace(device="cpu", ranks=2, quick=False)
    results.measure(SIZES["tiny"], "fp32", options, float("-inf"))
    assert [check.passed for check in results.checks] == [False] * 4


def junit(path: Path, outcomes: dict[str, str]) -> Path:
    """Write a file as pytest does: test, as ``class::name``, -> the element that tells of its outcome, if any."""
    cases = []
    for test, outcome in outcomes.items():
        owner, _, name = test.partition("::")
        cases.append(f'<testcase classname="{owner}" name="{name}">{outcome}</testcase>')
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def test_a_group_of_tests_is_a_verdict(tmp_path: Path) -> None:
    """A failure, a test that was skipped and none at all are no pass."""
    tests = {
        "a.test_train_parallel::test_resume_is_exact[cuda-ddp]": "",
        "a.test_train_killed_rank::test_torchrun[cuda]": "",
        "a.test_train_killed_rank::test_the_starter[cuda]": '<failure message="x"/>',
        "a.test_train_parallel::test_ranks_equal_one_process[cuda-clipping-ddp]": '<skipped message="one GPU"/>',
    }
    found = {check.name: check for check in two_gpus.verdicts(junit(tmp_path / "two.xml", tests))}
    assert found.keys() == two_gpus.GROUPS.keys()
    assert [name for name, check in found.items() if check.passed] == ["resume on two ranks is exact"]
    assert found["one rank killed: the other ends"].found == {"failure": 1, "passed": 1}
    assert found["a checkpoint of two loads on one"].found == {}
    assert not any(check.passed for check in two_gpus.verdicts(tmp_path / "absent.xml")), "pytest was killed"


@pytest.mark.slow
def test_every_group_has_tests(tmp_path: Path) -> None:
    """Among those that ``gpu_check.sh two`` runs: a test that was renamed would be missed where GPUs are rare."""
    stem, names = re.search(r"files=\((\S+)\{(\S+)\}\.py\)", CHECK.read_text()).groups()  # type: ignore[union-attr]
    files = [f"{stem}{name}.py" for name in names.split(",")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tests = [line.replace("/", ".").replace(".py::", "::", 1) for line in shown.splitlines() if "::" in line]
    assert len(tests) > 50
    for name, pattern in two_gpus.GROUPS.items():
        assert any(re.search(pattern, test) for test in tests), name
