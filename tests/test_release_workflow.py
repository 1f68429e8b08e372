"""The release workflow builds what tools/release.py says, and only by what also runs here (rows B1, B3)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tools.release import CUDA_LABELS, KERNELS, read_wheels

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
RELEASE = yaml.safe_load((WORKFLOWS / "release.yml").read_text())
MINORS = read_wheels()[KERNELS].python_minors


def commands(workflow: dict[str, Any]) -> list[list[str]]:
    """Every command line of a workflow's ``run`` steps, in words."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    return [shlex.split(line) for step in steps for line in step["run"].splitlines()]


def test_the_matrix_is_what_the_release_tool_says() -> None:
    """B3: each CUDA label times each Python of the kernels' classifiers, on the toolkit that the label names."""
    matrix = RELEASE["jobs"]["wheels"]["strategy"]["matrix"]
    assert matrix["cuda"] == list(CUDA_LABELS)
    assert matrix["python"] == list(MINORS)
    assert set(matrix) == {"cuda", "python", "include"}
    assert matrix["include"] == [
        {"cuda": label, "toolkit": f"cuda{label[2:-1]}.{label[-1]}"} for label in CUDA_LABELS
    ]  # every leg gets its toolkit, and no leg is added
    assert RELEASE["jobs"]["wheels"]["container"].endswith(":${{ matrix.toolkit }}")


def test_the_pythons_are_those_that_the_wheels_admit() -> None:
    """From the oldest that ``requires-python`` of all five admits, without a gap."""
    numbers = [int(minor.partition(".")[2]) for minor in MINORS]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    for wheel in read_wheels().values():
        project = tomllib.loads((wheel.folder / "pyproject.toml").read_text())["project"]
        admitted = SpecifierSet(project["requires-python"])
        assert all(Version(f"{minor}.0") in admitted for minor in MINORS)
        assert Version(f"3.{numbers[0] - 1}.99") not in admitted


@pytest.mark.parametrize("file", sorted(WORKFLOWS.glob("*.yml")), ids=lambda file: file.name)
def test_a_workflow_runs_only_what_runs_here(file: Path) -> None:
    """Make targets with variables that the Makefile knows, and scripts of tools/: nothing lives in the workflow alone."""
    makefile = (ROOT / "Makefile").read_text()
    found = commands(yaml.safe_load(file.read_text()))
    assert found
    for program, *arguments in found:
        if program == "make":
            variables = [word.partition("=")[0] for word in arguments if "=" in word]
            assert all(re.search(rf"^{name} \?= ", makefile, re.MULTILINE) for name in variables), arguments
            targets = [word for word in arguments if "=" not in word]
            assert targets
            for target in targets:
                assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), f"make {target} is no documented target"
        else:
            assert program == ".venv/bin/python", f"{program}: a workflow calls make, or a script of tools/ by .venv"
            assert (ROOT / arguments[0]).is_file() and arguments[0].startswith("tools/")


def test_every_leg_hands_its_wheels_to_the_index() -> None:
    """The names under which the legs upload are distinct, and the index job downloads all of them, apart, into dist/."""
    wheels, index = RELEASE["jobs"]["wheels"], RELEASE["jobs"]["index"]
    assert index["needs"] == "wheels"
    [upload] = [step["with"] for step in wheels["steps"] if "upload-artifact" in step.get("uses", "")]
    assert upload["path"] == "dist/*.whl"
    assert "${{ matrix.cuda }}" in upload["name"] and "${{ matrix.python }}" in upload["name"]
    [download] = [step["with"] for step in index["steps"] if "download-artifact" in step.get("uses", "")]
    prefix = download["pattern"].removesuffix("*")
    assert upload["name"].startswith(prefix) and download["path"] == "dist"
    assert "merge-multiple" not in download, "of equal names, one leg's wheel would hide another's"


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # `make test` hands its own flags and variables down.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=clean, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("label", CUDA_LABELS)
def test_make_wheels_gives_the_kernels_their_label(tmp_path: Path, label: str) -> None:
    """B3: all five wheels, with every architecture unless CUDAARCHS says otherwise; shown, not run."""
    stamp = f"{tmp_path}/.builder.stamp"
    shown = make("-n", "-o", stamp, "wheels", f"VENV={tmp_path}", "NVCC=/cuda/bin/nvcc", f"CUDA={label}", "DIST=out")
    assert shown.returncode == 0, shown.stderr
    pure, kernels = shown.stdout.splitlines()
    assert f"ASTRAI_CUDA_LABEL='{label}'" in kernels and "CUDAARCHS" not in kernels
    built = re.findall(r"\./packages/(\S+)", shown.stdout)
    assert sorted(built) == sorted(read_wheels())
    assert "--wheel-dir out" in pure and "--wheel-dir out" in kernels


def test_make_wheels_for_a_cuda_without_nvcc_fails(tmp_path: Path) -> None:
    """What was asked for by name is not left out in silence; without a name the pure wheels are enough."""
    stamp = f"{tmp_path}/.builder.stamp"
    options = ["-o", stamp, "wheels", f"VENV={tmp_path}", "BUILD_WHEEL=true", "NVCC="]
    failed = make(*options, "CUDA=cu130")
    assert failed.returncode != 0
    assert "CUDA=cu130 needs nvcc" in failed.stderr
    unnamed = make(*options, "CUDA=")
    assert unnamed.returncode == 0, unnamed.stderr
    assert "packages/astrai-kernels was not built" in unnamed.stdout
