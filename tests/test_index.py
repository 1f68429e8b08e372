"""tools/index.py: what the pages say, read as pip reads them, and which wheels they refuse (row B3)."""

from __future__ import annotations

import hashlib
import html.parser
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from tools.index import WheelFile, main, page, pages
from tools.release import CUDA_LABELS, KERNELS, read_wheels

MakeWheel = Callable[..., Path]
BASE = "http://index.test/simple/"


class Anchors(html.parser.HTMLParser):
    """The links of a page, as ``(text, attributes)``, and the declared version of the repository API."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.api = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag == "a":
            self.found.append(("", attributes))
        elif tag == "meta" and attributes.get("name") == "pypi:repository-version":
            self.api = attributes["content"]

    def handle_data(self, data: str) -> None:
        if self.found and not self.found[-1][0]:
            self.found[-1] = (data, self.found[-1][1])


def served_files(label: str, name: str, text: str) -> dict[str, dict[str, str]]:
    """Resolve the links of project `name`'s page as a client does: path below the index -> attributes."""
    found = {}
    for shown, attributes in Anchors(text).found:
        parts = urlsplit(urljoin(f"{BASE}{label}/{name}/", attributes["href"]))
        assert "+" not in parts.path, "some file servers read a plus as a space"
        path = unquote(parts.path).removeprefix("/simple/")
        assert path == f"files/{shown}"
        found[path] = {**attributes, "fragment": parts.fragment}
    return found


names = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,12}[a-z0-9])?", fullmatch=True).map(canonicalize_name)
releases = st.builds(
    lambda epoch, numbers, pre, post: f"{epoch}{'.'.join(map(str, numbers))}{pre}{post}",
    st.sampled_from(["", "1!"]),
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.sampled_from(["", "a1", "b2", "rc3"]),
    st.sampled_from(["", ".post4", ".dev5"]),
)
labels = st.sampled_from([None, *CUDA_LABELS])
pythons = st.sampled_from(["", ">=3.11", ">=3.11,<3.15", "!=3.12.*,>3.10", "~=3.11"])


@st.composite
def wheel_files(draw: st.DrawFn) -> WheelFile:
    name, release, label = draw(names), draw(releases), draw(labels)
    version = Version(release if label is None else f"{release}+{label}")
    tag = draw(st.sampled_from(["py3-none-any", "cp311-cp311-linux_x86_64", "cp314-cp314-manylinux_2_28_x86_64"]))
    file_name = f"{name.replace('-', '_')}-{version}-{tag}.whl"
    metadata = draw(st.binary(max_size=8))
    return WheelFile(file_name, name, version, hashlib.sha256(metadata + b"w").hexdigest(), draw(pythons), metadata)


@given(st.lists(wheel_files(), max_size=8, unique_by=lambda file: file.file_name), st.sampled_from(CUDA_LABELS))
def test_pages_say_of_every_wheel_what_pip_must_know(files: list[WheelFile], label: str) -> None:
    """PEP 503, 592, 629, 658 and 714: names, hashes, Requires-Python; each wheel on exactly the pages it is for."""
    written = pages(files, label)
    root = Anchors(written["index.html"])
    listed = [name for name, _ in root.found]
    assert listed == sorted(set(listed))
    assert [attributes["href"] for _, attributes in root.found] == [f"{name}/" for name in listed]
    assert set(written) == {"index.html", *(f"{name}/index.html" for name in listed)}
    seen = {}
    for name in listed:
        text = written[f"{name}/index.html"]
        assert Anchors(text).api == root.api == "1.0"
        for path, attributes in served_files(label, name, text).items():
            assert parse_wheel_filename(path.removeprefix("files/"))[0] == name == canonicalize_name(name)
            seen[path] = attributes
    expected = {f"files/{file.file_name}": file for file in files if file.version.local in (None, label)}
    assert set(seen) == set(expected)
    for path, file in expected.items():
        assert seen[path]["fragment"] == f"sha256={file.sha256}"
        assert seen[path]["data-core-metadata"] == f"sha256={hashlib.sha256(file.metadata).hexdigest()}"
        assert SpecifierSet(seen[path].get("data-requires-python", "")) == SpecifierSet(file.requires_python)
        assert ("data-requires-python" in seen[path]) == bool(file.requires_python)


def test_markup_in_a_title_or_an_attribute_stays_text() -> None:
    assert "<title>a&lt;b</title>" in page("a<b", [])
    link = WheelFile("a-1-py3-none-any.whl", "a", Version("1"), "0", '<3"&', b"").link()
    assert 'data-requires-python="&lt;3&quot;&amp;"' in link


@pytest.fixture
def dist(tmp_path: Path, make_wheel: MakeWheel) -> Path:
    """Wheels as the release workflow gathers them: a folder for each leg, the pure wheels in all of them."""
    for label in CUDA_LABELS:
        for minor in ("311", "314"):
            leg = tmp_path / "dist" / f"{label}-{minor}"
            make_wheel(leg, KERNELS, f"0.1.0+{label}", f"cp{minor}-cp{minor}-linux_x86_64")
            for name in set(read_wheels()) - {KERNELS}:
                make_wheel(leg, name, "0.1.0")
    return tmp_path / "dist"


def test_only_the_kernels_differ_between_the_two_indexes(dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B3: everything is listed under both, the kernels under their own CUDA for every Python; files are stored once."""
    assert main([str(dist)]) == 0
    shown = capsys.readouterr().out
    listing: dict[str, dict[str, list[str]]] = {}
    for label in CUDA_LABELS:
        assert f"index/{label}: 4 wheels for every CUDA, 2 of {KERNELS}" in shown
        root = Anchors((dist / "index" / label / "index.html").read_text())
        listing[label] = {
            name: list(served_files(label, name, (dist / "index" / label / name / "index.html").read_text()))
            for name, _ in root.found
        }
        assert set(listing[label]) == set(read_wheels())
        assert listing[label].pop(KERNELS) == [
            f"files/astrai_kernels-0.1.0+{label}-cp{minor}-cp{minor}-linux_x86_64.whl" for minor in ("311", "314")
        ]
    assert listing["cu128"] == listing["cu130"]
    stored = sorted(file.name for file in (dist / "index" / "files").glob("*.whl"))
    assert stored == sorted({file.name for file in dist.glob("cu*/*.whl")})
    for wheel in (dist / "index" / "files").glob("*.whl"):
        assert wheel.with_name(f"{wheel.name}.metadata").read_text().startswith("Metadata-Version: 2.4\nName: astrai-")


def test_a_second_run_leaves_nothing_of_the_first(dist: Path) -> None:
    assert main([str(dist)]) == 0
    before = {file: file.read_bytes() for file in (dist / "index").rglob("*") if file.is_file()}
    (dist / "index" / "files" / "stale.whl").write_bytes(b"")
    assert main([str(dist)]) == 0
    assert {file: file.read_bytes() for file in (dist / "index").rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("name", "wheel", "message"),
    [
        (KERNELS, {"version": "0.1.0"}, "no page takes its label; remove it and build it by make wheels CUDA=cu128 or"),
        (KERNELS, {"version": "0.1.0+cu126"}, "no page takes its label"),
        ("astrai-core", {"version": "0.1.0+cu128"}, "only astrai-kernels has a label"),
        ("astrai-cores", {"version": "0.1.0"}, "astrai-cores is no wheel of this repository; remove it"),
        (KERNELS, {"version": "0.2.0+cu128", "told": "0.2.0"}, "metadata says astrai-kernels 0.2.0; a wheel is built"),
        ("astrai-core", {"version": "0.2.0", "told": "next"}, "metadata says astrai-core next"),
        (
            "astrai-core",
            {"version": "0.1.0", "requires_python": ">=3.12"},
            "a wheel must come out the same on every leg",
        ),
    ],
)
def test_a_wheel_that_no_page_may_list(
    dist: Path,
    make_wheel: MakeWheel,
    capsys: pytest.CaptureFixture[str],
    name: str,
    wheel: dict[str, Any],
    message: str,
) -> None:
    """One line that names the file; pages of an earlier run stay as they were."""
    path = make_wheel(dist / "zz-last", name, **wheel)
    assert main([str(dist)]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert path.name in said and said.count("\n") == 1
    assert not (dist / "index").exists()


def test_a_file_that_is_no_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "no wheels there; run make wheels" in capsys.readouterr().err
    for name in ("astrai_core-0.1.0-py3-none-any.whl", "astrai_core.whl"):
        (tmp_path / name).write_bytes(b"cut off")
        assert main([str(tmp_path)]) == 1
        assert f"{name}: not a wheel" in capsys.readouterr().err
        (tmp_path / name).unlink()
