"""Wheels by `make wheels`, pages by `make index`, and pip installing from them over loopback (row B3)."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.tags import sys_tags

from tools.release import CUDA_LABELS, KERNELS, read_wheels

ROOT = Path(__file__).resolve().parents[1]
# Neither an outer make nor this machine's pip settings, such as further indexes and proxies, may have a say.
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PIP_", "PYTHON", "MAKE", "MFLAGS")) and not name.lower().endswith("_proxy")
} | {"PIP_CONFIG_FILE": os.devnull}

pytestmark = pytest.mark.slow


def run(*command: str | Path, environment: dict[str, str] = CLEAN) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)


class Handler(SimpleHTTPRequestHandler):
    """Keeps the paths that were asked for on the server, and the log quiet."""

    def log_message(self, format: str, *arguments: object) -> None:
        requested: list[str] = self.server.requested  # type: ignore[attr-defined]
        requested.append(self.path)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, make_wheel: Callable[..., Path]) -> Path:
    """The wheels and pages of a release, made by the commands of the release workflow.

    The kernels are real where dist/ of this checkout has them for this Python, and stood in where it has not.
    """
    folder = tmp_path_factory.mktemp("release") / "dist"
    # This environment has what builds wheels; its stamp may be missing, or older than requirements.txt.
    options = ["-o", f"{sys.prefix}/.builder.stamp", f"VENV={sys.prefix}", f"DIST={folder}", "NVCC=", "CUDA="]
    done = run("make", "wheels", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    version, tag = read_wheels()[KERNELS].version, str(next(iter(sys_tags())))
    for label in CUDA_LABELS:
        interpreter = f"cp{sys.version_info.major}{sys.version_info.minor}"
        real = sorted((ROOT / "dist").glob(f"astrai_kernels-{version}+{label}-{interpreter}-*.whl"))
        if real:
            shutil.copy(real[-1], folder)
        else:
            make_wheel(folder, KERNELS, f"{version}+{label}", tag)
    done = run("make", "index", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def server(dist: Path) -> Iterator[ThreadingHTTPServer]:
    """A static file server for the index, and nothing else, on loopback."""
    served = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(dist / "index")))
    served.requested = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def install(server: ThreadingHTTPServer, label: str, target: Path, *names: str) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-cache-dir", "--no-deps"]
    url = f"http://127.0.0.1:{server.server_port}/{label}"
    return run(*pip, "--index-url", url, "--target", target, *names)


def versions(target: Path, *modules: str) -> dict[str, str]:
    """Import `modules` in an interpreter that sees `target` and the standard library only."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    module = importlib.import_module(name)\n"
        "    print(name, module.__version__, module.__file__)"
    )
    done = run(sys.executable, "-S", "-c", code, *modules, environment={**CLEAN, "PYTHONPATH": str(target)})
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert all(Path(file).is_relative_to(target) for _, _, file in rows)
    return {name: version for name, version, _ in rows}


@pytest.mark.parametrize("label", CUDA_LABELS)
def test_pip_installs_from_the_index(server: ThreadingHTTPServer, tmp_path: Path, label: str) -> None:
    """B3: the same engine from both indexes, and from each the kernels of its own CUDA, asked for under one name."""
    wheels = read_wheels()
    done = install(server, label, tmp_path, "astrai-core", "astrai-infer", "Astrai_Kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    assert versions(tmp_path, "astrai_core", "astrai_infer") == {
        name: str(wheels[name.replace("_", "-")].version) for name in ("astrai_core", "astrai_infer")
    }
    assert (tmp_path / f"astrai_kernels-{wheels[KERNELS].version}+{label}.dist-info").is_dir()
    requested = server.requested  # type: ignore[attr-defined]
    assert f"/{label}/astrai-core/" in requested, "pip asks for the normalised name"
    assert any(re.fullmatch(r"/files/astrai_core-.*\.whl\.metadata", path) for path in requested), "PEP 658"


def test_pip_refuses_a_wheel_that_was_changed(server: ThreadingHTTPServer, dist: Path, tmp_path: Path) -> None:
    """The hashes on the pages are those of the files, and pip checks them."""
    [wheel] = (dist / "index" / "files").glob("astrai_cli-*.whl")
    whole = wheel.read_bytes()
    wheel.write_bytes(whole + b"\0")
    try:
        done = install(server, "cu130", tmp_path, "astrai-cli")
    finally:
        wheel.write_bytes(whole)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not list(tmp_path.iterdir())
