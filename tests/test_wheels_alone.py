"""Each wheel is built, installed alone with what it declares, and passes its own tests there, some of each file.

torch is not installed again (it is most of a gigabyte) but shared: a .pth file leads to a folder that holds links to
the installed torch and nothing else. pip finds torch's metadata there, so torch's own requirements are installed like
any other.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tools.release import read_wheels

ROOT = Path(__file__).resolve().parents[1]
WHEELS = read_wheels(ROOT)
# The siblings that come along with a wheel, alone and with its `test` extra. All others must stay away.
ALONG = {
    "astrai-kernels": (set[str](), set[str]()),
    "astrai-core": (set[str](), set[str]()),
    "astrai-infer": ({"astrai-core"}, {"astrai-core"}),
    "astrai-train": ({"astrai-core"}, {"astrai-core"}),
    "astrai-cli": ({"astrai-core"}, {"astrai-core", "astrai-infer"}),
}
# Their `test` extra brings all that their modules import.
HOLDS_ITS_EXTRAS = {"astrai-infer"}
HAS_NVCC = shutil.which("nvcc") is not None
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST_", "COV_"))}


def run(*command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] = CLEAN) -> str:
    """Run a command away from the source trees; fails with all that it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} returned {done.returncode}\n{done.stdout}"
    return done.stdout


@contextmanager
def once(folder: Path) -> Iterator[bool]:
    """Let one of the parallel test workers fill `folder`: true for the one that has to."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.with_suffix(".done")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not done.exists()
        done.touch()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test run that all its workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def torch_alone(shared: Path) -> Path:
    """A folder in which torch is installed and nothing else (but for CUDA's libraries, if torch requires them)."""
    folder = shared / "torch-alone"
    with once(folder) as must:
        if must:
            folder.mkdir()
            required = [re.split(r"[^\w.-]", text)[0] for text in importlib.metadata.requires("torch") or []]
            libraries = [name for name in required if name.startswith(("nvidia-", "cuda-", "triton"))]
            for name in ["torch", *libraries]:
                try:
                    distribution = importlib.metadata.distribution(name)
                except importlib.metadata.PackageNotFoundError:
                    continue  # required on another platform
                for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}:
                    link = folder / top
                    if not link.exists():
                        link.symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def build(name: str, shared: Path) -> Path:
    """Build wheel `name` into a folder of its own and return the file."""
    house = shared / "wheelhouse" / name
    with once(house) as must:
        if must:
            # One architecture: the code of the others is compiled by `make check` and by the release workflow.
            tools = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
            options: list[str | Path] = ["--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", house]
            if name == "astrai-kernels":
                tools["CUDAARCHS"] = os.environ.get("CUDAARCHS", "90a-real")
                # What `make kernels` compiled serves again.
                options.append("--config-settings=build-dir=build/{wheel_tag}")
            run(sys.executable, *PIP, "wheel", *options, WHEELS[name].folder, environment=CLEAN | tools)
    (wheel,) = house.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(name == "astrai-kernels" and not HAS_NVCC, reason="nvcc is not on PATH")
        )
        for name in ALONG
    ],
)
def test_a_wheel_alone(name: str, shared: Path, torch_alone: Path, tmp_path: Path) -> None:
    alone, with_tests = ALONG[name]
    file = build(name, shared)
    links: list[str | Path] = [
        option for sibling in sorted(with_tests) for option in ("--find-links", build(sibling, shared).parent)
    ]

    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site_packages = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site_packages / "torch.pth").write_text(f"{torch_alone}\n")
    install: list[str | Path] = [sys.executable, *PIP, "--python", python, "install", "--no-compile", *links]
    install += ["--constraint", ROOT / "requirements.txt"]

    run(*install, file)
    assert siblings_in(python, tmp_path) == {name, *alone}
    # A module may need what an extra brings, and nothing else that is missing; with the tests' extra all of them import.
    import_all = (
        "import importlib, importlib.metadata, pkgutil, re, sys\n"
        "package = importlib.import_module(sys.argv[1])\n"
        "extras = {re.split(r'[^\\w.-]', text)[0].lower().replace('-', '_')\n"
        "          for text in importlib.metadata.requires(sys.argv[1].replace('_', '-')) or [] if 'extra ==' in text}\n"
        "if 'pyyaml' in extras: extras.add('yaml')\n"
        "for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    try:\n"
        "        importlib.import_module(found.name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        if 'whole' in sys.argv or error.name.partition('.')[0] not in extras: raise\n"
        "print(package.__version__)"
    )
    # The last line: torch warns before it where numpy is not among what the wheel requires.
    version = run(python, "-c", import_all, WHEELS[name].module, cwd=tmp_path).splitlines()[-1]
    assert version == str(WHEELS[name].version)

    run(*install, f"{file}[test]")
    assert siblings_in(python, tmp_path) == {name, *with_tests}
    assert not (site_packages / "torch").exists(), "torch was installed instead of shared"
    if name in HOLDS_ITS_EXTRAS:
        run(python, "-c", import_all, WHEELS[name].module, "whole", cwd=tmp_path)

    copied = tmp_path / WHEELS[name].folder.relative_to(ROOT)
    shutil.copytree(WHEELS[name].folder, copied, ignore=shutil.ignore_patterns("src", "build", "__pycache__"))
    for settings in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / settings, tmp_path)
    # Enough to use every import and every fixture: all of them have run beside the other wheels, which takes as long again.
    some = CLEAN | {"ASTRAI_TESTS_A_FILE": "2"}
    command = [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", copied / "tests"]
    report = run(*command, cwd=tmp_path, environment=some)
    assert re.search(r"\b[1-9]\d* passed", report), report


def siblings_in(python: Path, cwd: Path) -> set[str]:
    """Return which of the five wheels this interpreter can import."""
    code = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n)))"
    modules = {wheel.module: wheel.name for wheel in WHEELS.values()}
    return {modules[module] for module in run(python, "-c", code, *modules, cwd=cwd).split()}
