"""Versions of the five wheels: list them, check that they fit together, bump one.

    python tools/release.py list
    python tools/release.py check [TAG ...]        # without a tag: those that point at HEAD
    python tools/release.py bump astrai-core minor # or major, patch, 0.2.0, 0.2.0rc1

A wheel's version is written once, in its ``_version.py``; its release is tagged ``astrai-core-v0.1.0``. Wheels require
their siblings by a range, so a bump out of that range breaks the dependents: `bump` names them, and `check` fails until
their ranges are raised.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
_VERSION_LINE = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_PYTHON_MINOR = re.compile(r"Programming Language :: Python :: (3\.\d+)")
_PARTS = ("major", "minor", "patch")
KERNELS = "astrai-kernels"
# A release holds the kernels for each of these and each Python of their classifiers (.github/workflows/release.yml).
CUDA_LABELS = ("cu128", "cu130")


class ReleaseError(Exception):
    """What is wrong, in one line."""


@dataclass(frozen=True)
class Wheel:
    """One of the five projects under ``packages/``."""

    name: str
    """Distribution, ``astrai-core``."""
    folder: Path
    """``packages/astrai-core``."""
    version: Version
    """Of ``_version.py``, which :attr:`version_file` locates."""
    requires: tuple[tuple[str, Requirement], ...]
    """``(extra, requirement)`` of each declared requirement; the extra is "" for one that always holds."""
    python_minors: tuple[str, ...]
    """``3.11``, ... of the classifiers; the kernels, which have no stable ABI, are built for each."""

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def version_file(self) -> Path:
        return self.folder / "src" / self.module / "_version.py"

    @property
    def tag(self) -> str:
        return f"{self.name}-v{self.version}"

    def sibling_requires(self) -> Iterator[tuple[str, Requirement]]:
        """Yield the requirements on other wheels of astrai."""
        for extra, requirement in self.requires:
            if requirement.name.startswith("astrai-") and requirement.name != self.name:
                yield extra, requirement


def read_wheel(folder: Path) -> Wheel:
    """Read the metadata of the wheel in `folder`.

    Raises
    ------
    ReleaseError
        If ``_version.py`` does not hold exactly one valid version.
    """
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    name = project["name"]
    version_file = folder / "src" / name.replace("-", "_") / "_version.py"
    found = _VERSION_LINE.findall(version_file.read_text())
    if len(found) != 1:
        raise ReleaseError(f'{version_file}: expected one line __version__ = "X.Y.Z", found {len(found)}')
    try:
        version = Version(found[0])
    except InvalidVersion:
        raise ReleaseError(f"{version_file}: {found[0]!r} is not a version; write X.Y.Z") from None
    requires = [("", Requirement(text)) for text in project.get("dependencies", [])]
    for extra, texts in project.get("optional-dependencies", {}).items():
        requires += [(extra, Requirement(text)) for text in texts]
    minors = [match[1] for text in project.get("classifiers", []) if (match := _PYTHON_MINOR.fullmatch(text))]
    return Wheel(name, folder, version, tuple(requires), tuple(minors))


def read_wheels(root: Path = ROOT) -> dict[str, Wheel]:
    """Return the wheels of the repository at `root` by distribution name."""
    wheels = [read_wheel(file.parent) for file in sorted((root / "packages").glob("*/pyproject.toml"))]
    return {wheel.name: wheel for wheel in wheels}


def is_range(requirement: Requirement) -> bool:
    """Tell whether `requirement` has a lower and an upper bound, so that it neither freezes nor follows the sibling."""
    operators = {specifier.operator for specifier in requirement.specifier}
    return bool(operators & {">=", ">", "~="}) and bool(operators & {"<", "<=", "~="})


def fitting_range(version: Version) -> str:
    """Return the range to require: up to the next minor version before 1.0, up to the next major one from then on."""
    if version.major == 0:
        return f">=0.{version.minor},<0.{version.minor + 1}"
    return f">={version.major}.{version.minor},<{version.major + 1}"


def broken_dependents(wheels: dict[str, Wheel], name: str, version: Version) -> list[str]:
    """Return one line for each requirement on wheel `name` that does not admit `version`."""
    lines = []
    for wheel in wheels.values():
        for extra, requirement in wheel.sibling_requires():
            if requirement.name == name and not requirement.specifier.contains(version, prereleases=True):
                where = f"{wheel.name}[{extra}]" if extra else wheel.name
                lines.append(f"{where} requires {requirement}, which {version} is not; use {fitting_range(version)}")
    return lines


def problems(wheels: dict[str, Wheel], tags: list[str]) -> list[str]:
    """Return one line for everything that keeps the wheels from being released together under `tags`."""
    found = []
    for wheel in wheels.values():
        found += broken_dependents(wheels, wheel.name, wheel.version)
        required = [requirement for _, requirement in wheel.sibling_requires()]
        bounded = {requirement.name for requirement in required if is_range(requirement)}
        for requirement in required:
            if requirement.name not in wheels:
                found.append(f"{wheel.name} requires {requirement}, which is no wheel of this repository")
            elif requirement.name not in bounded or (requirement.specifier and not is_range(requirement)):
                fitting = fitting_range(wheels[requirement.name].version)
                found.append(f"{wheel.name} requires {requirement} without a range; use {fitting}")
    for tag in tags:
        name, _, version = tag.rpartition("-v")
        if name not in wheels:
            found.append(f"tag {tag}: no such wheel; the tags are {', '.join(w.tag for w in wheels.values())}")
        elif tag != wheels[name].tag:
            where = wheels[name].version_file.name
            found.append(f"tag {tag}: {where} says {wheels[name].version}, not {version}; bump or tag again")
    return found


def next_version(current: Version, target: str) -> Version:
    """Return `current` with part `target` (major, minor, patch) raised, or `target` itself if it is a later version.

    Raises
    ------
    ReleaseError
        If `target` is neither.
    """
    if target in _PARTS:
        index = _PARTS.index(target)
        release = [*current.release, 0, 0, 0][:3]
        return Version(".".join(str(part) for part in [*release[:index], release[index] + 1, *[0] * (2 - index)]))
    try:
        version = Version(target)
    except InvalidVersion:
        raise ReleaseError(f"{target!r} is not a version; use major, minor, patch or X.Y.Z") from None
    if version <= current:
        raise ReleaseError(f"{version} is not later than {current}")
    if version.local:
        raise ReleaseError(f"{version}: a local label is added by the build, not written here")
    return version


def bump(wheels: dict[str, Wheel], name: str, target: str) -> list[str]:
    """Write the new version of wheel `name`; return what was done, then the lines of :func:`broken_dependents`."""
    if name not in wheels:
        raise ReleaseError(f"{name!r} is no wheel; the wheels are {', '.join(wheels)}")
    wheel = wheels[name]
    version = next_version(wheel.version, target)
    text = wheel.version_file.read_text()
    wheel.version_file.write_text(_VERSION_LINE.sub(f'__version__ = "{version}"', text))
    done = f"{name} {wheel.version} -> {version}; its release is tagged {name}-v{version}"
    return [done, *broken_dependents(wheels, name, version)]


def git_tags(root: Path, *options: str) -> list[str]:
    """Return the release tags that ``git tag`` lists with `options`."""
    output = subprocess.run(
        ["git", "-C", str(root), "tag", "--list", "astrai-*-v*", *options], check=True, capture_output=True, text=True
    ).stdout
    return output.split()


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="versions, tags and sibling ranges")
    commands.add_parser("check", help="fail if versions, ranges and tags disagree").add_argument("tags", nargs="*")
    bumping = commands.add_parser("bump", help="write a new version and name the dependents that it breaks")
    bumping.add_argument("wheel")
    bumping.add_argument("target", help="major, minor, patch or a version")
    options = parser.parse_args(arguments)
    lines: list[str] = []
    try:
        wheels = read_wheels(root)
        if options.command == "list":
            tagged = set(git_tags(root))
            for wheel in wheels.values():
                siblings = ", ".join(sorted({str(requirement) for _, requirement in wheel.sibling_requires()}))
                state = "tagged" if wheel.tag in tagged else "no tag"
                print(f"{wheel.name:<15} {wheel.version!s:<10} {state:<7} {siblings}")
        elif options.command == "check":
            lines = problems(wheels, options.tags or git_tags(root, "--points-at", "HEAD"))
        else:
            print(*bump(wheels, options.wheel, options.target), sep="\n")
    except ReleaseError as error:
        lines = [str(error)]
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
