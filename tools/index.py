"""The pages that pip installs the wheels from: one simple repository (PEP 503) for each CUDA.

    python -m tools.index [DIST]    # reads the wheels under DIST (default dist), writes DIST/index

``DIST/index/cu128`` and ``DIST/index/cu130`` are the values of ``--index-url``. They list the same wheels except for
the kernels, whose local label says where they belong: on one page for both, pip would take +cu130 always, since it
sorts last. ``DIST/index/files`` holds every wheel once, and its metadata beside it (PEP 658). All links are relative,
so any static file server will do.

The wheels may lie in a folder for each leg of the release workflow. A pure wheel comes from every leg then, and all
copies must be the same bytes.

Exit status: 0, or 1 with one line that says what is wrong with a wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import shutil
import sys
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path
from urllib.parse import quote

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from tools.release import CUDA_LABELS, KERNELS, ROOT, ReleaseError, read_wheels


@dataclass(frozen=True)
class WheelFile:
    """What the pages say of one wheel."""

    file_name: str
    name: str
    """Normalised distribution name (PEP 503), ``astrai-core``."""
    version: Version
    sha256: str
    requires_python: str
    """``>=3.11``; "" if the wheel does not say."""
    metadata: bytes
    """The METADATA file inside the wheel."""

    def link(self) -> str:
        """Return the anchor on a page that lies two folders below the files' parent."""
        attributes = {
            "href": f"../../files/{quote(self.file_name)}#sha256={self.sha256}",
            "data-core-metadata": f"sha256={hashlib.sha256(self.metadata).hexdigest()}",
        }
        if self.requires_python:
            attributes["data-requires-python"] = self.requires_python
        written = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
        return f"<a {written}>{html.escape(self.file_name)}</a>"


def read_wheel_file(path: Path) -> WheelFile:
    """Read the facts of a wheel out of its name, its bytes and its METADATA.

    Raises
    ------
    ReleaseError
        If it is no wheel, or its name and its metadata disagree.
    """
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            [entry] = [entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA")]
            metadata = archive.read(entry)
    except (InvalidWheelFilename, zipfile.BadZipFile, ValueError) as error:
        raise ReleaseError(f"{path}: not a wheel ({error}); remove it and build it again") from None
    fields = BytesHeaderParser().parsebytes(metadata)
    told = (fields["Name"] or "", fields["Version"] or "")
    try:
        same = (canonicalize_name(told[0]), Version(told[1])) == (name, version)
    except InvalidVersion:
        same = False
    if not same:
        raise ReleaseError(
            f"{path}: its metadata says {' '.join(told)}; a wheel is built with its label, never renamed"
        )
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return WheelFile(path.name, name, version, sha256, fields["Requires-Python"] or "", metadata)


def check_label(file: WheelFile, known: Iterable[str]) -> None:
    """Raise :class:`ReleaseError` if a wheel is none of `known`, or has a label that no page stands for."""
    if file.name not in known:
        raise ReleaseError(f"{file.file_name}: {file.name} is no wheel of this repository; remove it")
    label = file.version.local
    if file.name == KERNELS and label not in CUDA_LABELS:
        ways = " or ".join(f"CUDA={label}" for label in CUDA_LABELS)
        raise ReleaseError(f"{file.file_name}: no page takes its label; remove it and build it by make wheels {ways}")
    if file.name != KERNELS and label is not None:
        raise ReleaseError(f"{file.file_name}: only {KERNELS} has a label; remove it and build it again")


def collect(dist: Path, target: Path, known: Iterable[str]) -> dict[Path, WheelFile]:
    """Find the wheels under `dist`, but not those under `target`; of equal copies the first.

    Raises
    ------
    ReleaseError
        If there is none, one is not fit for a page, or two of one name differ.
    """
    known = list(known)
    found: dict[str, tuple[Path, WheelFile]] = {}
    for path in sorted(dist.rglob("*.whl")):
        if path.is_relative_to(target):
            continue
        file = read_wheel_file(path)
        check_label(file, known)
        first, other = found.setdefault(path.name, (path, file))
        if other.sha256 != file.sha256:
            raise ReleaseError(
                f"{path} differs from {first}: a wheel must come out the same on every leg that builds it"
            )
    if not found:
        raise ReleaseError(f"{dist}: no wheels there; run make wheels")
    return dict(found.values())


def page(title: str, links: Iterable[str]) -> str:
    """Return a page of the simple repository API, version 1.0 (PEP 503, PEP 629)."""
    lines = "".join(f"{link}<br>\n" for link in links)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="pypi:repository-version" content="1.0">\n'
        f"<title>{html.escape(title)}</title>\n</head>\n<body>\n{lines}</body>\n</html>\n"
    )


def pages(files: Iterable[WheelFile], label: str) -> dict[str, str]:
    """Return the pages for one CUDA by their paths below its folder: the root page, and one for each project."""
    projects: dict[str, list[WheelFile]] = {}
    for file in sorted(files, key=lambda file: (file.name, file.version, file.file_name)):
        if file.version.local in (None, label):
            projects.setdefault(file.name, []).append(file)
    written = {"index.html": page(f"astrai wheels, {label}", (f'<a href="{name}/">{name}</a>' for name in projects))}
    for name, versions in projects.items():
        written[f"{name}/index.html"] = page(f"{name}, {label}", (file.link() for file in versions))
    return written


def write_index(wheels: dict[Path, WheelFile], target: Path) -> None:
    """Write files and pages to `target`, in place of whatever was there."""
    if target.exists():
        shutil.rmtree(target)
    (target / "files").mkdir(parents=True)
    for path, file in wheels.items():
        shutil.copyfile(path, target / "files" / file.file_name)
        (target / "files" / f"{file.file_name}.metadata").write_bytes(file.metadata)
    for label in CUDA_LABELS:
        for name, text in pages(wheels.values(), label).items():
            place = target / label / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, nargs="?", default=ROOT / "dist", help="folder with the wheels")
    dist = parser.parse_args(arguments).dist
    target = dist / "index"
    try:
        wheels = collect(dist, target, read_wheels())
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    write_index(wheels, target)
    for label in CUDA_LABELS:
        kernels = sum(file.version.local == label for file in wheels.values())
        others = sum(file.version.local is None for file in wheels.values())
        print(f"{target / label}: {others} wheels for every CUDA, {kernels} of {KERNELS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
