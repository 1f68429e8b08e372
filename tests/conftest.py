"""Fixtures of the cross-wheel tests; the marks skip_no_cuda and skip_no_kernel are in the top conftest (row TS1)."""

from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def project_files() -> list[Path]:
    """Every file of the project: what git tracks, and what it would track if it were added."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [file for name in listing.split("\0") if name and (file := ROOT / name).is_file()]


@pytest.fixture
def metadata_copy(tmp_path: Path) -> Path:
    """A git repository with the metadata of the five wheels, all brought to 0.1.0, free to be changed."""
    for project in sorted(ROOT.glob("packages/*/pyproject.toml")):
        copy = tmp_path / project.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        copy.write_text(re.sub(r'("astrai-[a-z]+(?:\[[a-z,]+\])?)[<>=~][^"]*"', r'\1>=0.1,<0.2"', project.read_text()))
        for file in project.parent.glob("src/*/_version.py"):
            version_file = tmp_path / file.relative_to(ROOT)
            version_file.parent.mkdir(parents=True)
            version_file.write_text('__version__ = "0.1.0"\n')
    git = ["git", "-C", str(tmp_path), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "metadata"], check=True)
    return tmp_path


@pytest.fixture
def edit() -> Callable[[Path, str, str], None]:
    """Replace a text that must be in the file."""

    def replace(file: Path, old: str, new: str) -> None:
        text = file.read_text()
        assert old in text, f"{old!r} is not in {file}"
        file.write_text(text.replace(old, new))

    return replace


@pytest.fixture(scope="session")
def make_wheel() -> Callable[..., Path]:
    """Write a small wheel that pip takes: ``make_wheel(folder, name, version, tag=, requires_python=, told=)``."""

    def write(
        folder: Path,
        name: str,
        version: str,
        tag: str = "py3-none-any",
        requires_python: str | None = ">=3.11",
        told: str | None = None,
    ) -> Path:
        """`told` is the version in METADATA, where it is not that of the file name."""
        stem = f"{re.sub('[-_.]+', '_', name)}-{version}"
        fields = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version if told is None else told}"]
        fields += [] if requires_python is None else [f"Requires-Python: {requires_python}"]
        contents = {
            f"{stem.partition('-')[0]}/__init__.py": f'__version__ = "{version}"\n',
            f"{stem}.dist-info/METADATA": "\n".join([*fields, "", "A stand-in.", ""]),
            f"{stem}.dist-info/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        }
        contents[f"{stem}.dist-info/RECORD"] = "".join(
            f"{file},,\n" for file in [*contents, f"{stem}.dist-info/RECORD"]
        )
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{stem}-{tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file, text in contents.items():
                archive.writestr(zipfile.ZipInfo(file), text)  # without the time: equal wheels are equal bytes
        return path

    return write
