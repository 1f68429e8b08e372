"""tools/release.py: versions, sibling ranges and tags, on a changed copy of the real metadata."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from tools.release import ReleaseError, fitting_range, main, next_version, problems, read_wheel, read_wheels

WHEELS = {"astrai-kernels", "astrai-core", "astrai-infer", "astrai-train", "astrai-cli"}
Edit = Callable[[Path, str, str], None]


def test_the_repository_itself_fits_together() -> None:
    wheels = read_wheels()
    assert set(wheels) == WHEELS
    assert problems(wheels, [wheel.tag for wheel in wheels.values()]) == []


@pytest.mark.parametrize(
    ("current", "target", "expected"),
    [
        ("0.1.0", "patch", "0.1.1"),
        ("0.1.5", "minor", "0.2.0"),
        ("0.9.1", "major", "1.0.0"),
        ("0.2.0rc1", "patch", "0.2.1"),
        ("0.1.0", "0.2.0rc1", "0.2.0rc1"),
        ("0.2.0rc1", "0.2.0", "0.2.0"),
    ],
)
def test_next_version(current: str, target: str, expected: str) -> None:
    assert next_version(Version(current), target) == Version(expected)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("0.1.0", "not later than 0.1.0"),
        ("0.0.9", "not later than 0.1.0"),
        ("0.2.0+cu130", "label is added by the build"),
        ("newest", "is not a version; use major, minor, patch"),
    ],
)
def test_next_version_refuses(target: str, message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        next_version(Version("0.1.0"), target)


@pytest.mark.parametrize(("version", "expected"), [("0.1.3", ">=0.1,<0.2"), ("1.4.2", ">=1.4,<2")])
def test_fitting_range_admits_the_version_and_not_the_next_breaking_one(version: str, expected: str) -> None:
    assert fitting_range(Version(version)) == expected


def test_bump_within_the_ranges_breaks_nothing(metadata_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bump", "astrai-core", "patch"], metadata_copy) == 0
    assert capsys.readouterr().out.splitlines() == [
        "astrai-core 0.1.0 -> 0.1.1; its release is tagged astrai-core-v0.1.1"
    ]
    assert read_wheels(metadata_copy)["astrai-core"].version == Version("0.1.1")
    assert main(["check"], metadata_copy) == 0


def test_bump_out_of_the_ranges_names_every_dependent(
    metadata_copy: Path, edit: Edit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bump", "astrai-core", "minor"], metadata_copy) == 0
    broken = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in broken] == ["astrai-cli", "astrai-infer", "astrai-train"]
    assert all(line.endswith("which 0.2.0 is not; use >=0.2,<0.3") for line in broken)

    assert main(["check"], metadata_copy) == 1
    assert capsys.readouterr().err.splitlines() == broken
    for name in ("astrai-infer", "astrai-train"):
        edit(metadata_copy / "packages" / name / "pyproject.toml", "astrai-core>=0.1,<0.2", "astrai-core>=0.2,<0.3")
    edit(
        metadata_copy / "packages/astrai-cli/pyproject.toml", "astrai-core[gguf,hub]>=0.1,<0.2", "astrai-core>=0.2,<0.3"
    )
    assert main(["check"], metadata_copy) == 0


def test_bump_names_a_dependent_by_its_extra(metadata_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bump", "astrai-kernels", "0.2.0"], metadata_copy) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("astrai-core[cuda] requires astrai-kernels")


def test_bump_of_an_unknown_wheel(metadata_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bump", "astrai", "minor"], metadata_copy) == 1
    assert "'astrai' is no wheel; the wheels are astrai-cli, astrai-core" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("astrai-core-v0.1.0", ""),
        ("astrai-core-v0.2.0", "tag astrai-core-v0.2.0: _version.py says 0.1.0, not 0.2.0; bump or tag again"),
        ("astrai-cores-v0.1.0", "tag astrai-cores-v0.1.0: no such wheel; the tags are astrai-cli-v0.1.0"),
        ("v0.1.0", "tag v0.1.0: no such wheel"),
    ],
)
def test_a_tag_is_checked_against_the_version_file(
    metadata_copy: Path, capsys: pytest.CaptureFixture[str], tag: str, message: str
) -> None:
    assert main(["check", tag], metadata_copy) == (1 if message else 0)
    assert capsys.readouterr().err.startswith(message)


def test_check_finds_the_tags_of_head_and_list_shows_them(
    metadata_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tag in ("astrai-train-v0.1.0", "unrelated-v7"):
        subprocess.run(["git", "-C", str(metadata_copy), "tag", tag], check=True)
    assert main(["check"], metadata_copy) == 0
    assert main(["list"], metadata_copy) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(rows) == WHEELS
    assert " tagged " in rows["astrai-train"] and " no tag " in rows["astrai-core"]

    subprocess.run(["git", "-C", str(metadata_copy), "tag", "astrai-train-v0.3.0"], check=True)
    assert main(["check"], metadata_copy) == 1
    assert "astrai-train-v0.3.0" in capsys.readouterr().err


@pytest.mark.parametrize("pin", ["astrai-core==0.1.0", "astrai-core>=0.1", "astrai-core"])
def test_a_sibling_is_required_by_a_range(
    metadata_copy: Path, edit: Edit, capsys: pytest.CaptureFixture[str], pin: str
) -> None:
    edit(metadata_copy / "packages/astrai-train/pyproject.toml", "astrai-core>=0.1,<0.2", pin)
    assert main(["check"], metadata_copy) == 1
    assert f"astrai-train requires {pin} without a range; use >=0.1,<0.2" in capsys.readouterr().err


def test_a_sibling_that_does_not_exist(metadata_copy: Path, edit: Edit, capsys: pytest.CaptureFixture[str]) -> None:
    edit(metadata_copy / "packages/astrai-train/pyproject.toml", '"astrai-core>=', '"astrai-cores>=')
    assert main(["check"], metadata_copy) == 1
    assert "which is no wheel of this repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("__version__ = '0.1.0'\n", "expected one line"), ('__version__ = "next"\n', "'next' is not a version")],
)
def test_a_broken_version_file_is_named(metadata_copy: Path, text: str, message: str) -> None:
    folder = metadata_copy / "packages/astrai-core"
    (folder / "src/astrai_core/_version.py").write_text(text)
    with pytest.raises(ReleaseError, match=message) as caught:
        read_wheel(folder)
    assert "_version.py" in str(caught.value)
