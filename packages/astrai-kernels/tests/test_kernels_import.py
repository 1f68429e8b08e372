"""Importing the package, and what the compiled module says of itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import astrai_kernels
from astrai_kernels import _loader


def run(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_neither_torch_nor_the_extension():
    """Rule "importing does nothing": of all non-standard modules, only the package and its version are loaded."""
    loaded = run(
        "import sys; before = set(sys.modules)\n"
        "import astrai_kernels\n"
        "new = {m for m in set(sys.modules) - before if m.partition('.')[0] not in sys.stdlib_module_names}\n"
        "print(*sorted(new))"
    )
    assert loaded == "astrai_kernels astrai_kernels._version"


@pytest.mark.kernel
def test_build_info_needs_no_torch():
    """The compiled module loads, and describes itself, where torch cannot be imported (decision: no libtorch)."""
    out = run(
        "import sys; sys.modules['torch'] = None\n"
        "import astrai_kernels\n"
        "info = astrai_kernels.build_info()\n"
        "print(info['cudart_version'], *info['architectures'])"
    )
    cudart_version, *architectures = out.split()
    assert int(cudart_version) >= 11080
    assert architectures


@pytest.mark.kernel
def test_build_info_names_version_label_and_compilers():
    info = astrai_kernels.build_info()
    assert info["version"].partition("+")[0] == astrai_kernels.__version__
    assert info["label"] == info["version"].partition("+")[2]
    assert info["compiler"].startswith("NVIDIA ")
    assert info["host_compiler"].partition(" ")[2]
    if info["label"]:
        assert info["label"] == f"cu{info['cudart_version'] // 1000}{info['cudart_version'] % 1000 // 10}"


def test_missing_extension_is_named_with_its_remedy(monkeypatch):
    """A source tree on the path has no compiled module: the error says so instead of a bare ModuleNotFoundError."""
    monkeypatch.setattr(_loader, "_MODULE", "astrai_kernels.lib._absent")
    with pytest.raises(ImportError, match=r"no compiled module.*pip install packages/astrai-kernels"):
        _loader.extension.__wrapped__()


def test_a_stale_extension_is_named_with_what_it_lacks(monkeypatch):
    """Row B2: sources that were updated beside a module compiled before; one line, instead of an AttributeError later."""
    stale = ModuleType("astrai_kernels.lib._stale")
    for name in set(_loader._FUNCTIONS) - {"sample", "attention_plan"}:
        setattr(stale, name, lambda: None)
    monkeypatch.setitem(sys.modules, stale.__name__, stale)
    monkeypatch.setattr(_loader, "_MODULE", stale.__name__)
    with pytest.raises(ImportError, match=r"is older than .* it lacks attention_plan, sample: reinstall") as caught:
        _loader.extension.__wrapped__()
    assert "\n" not in str(caught.value)
    stale.sample = stale.attention_plan = lambda: None
    assert _loader.extension.__wrapped__() is stale


def test_the_loader_asks_for_what_the_package_calls():
    """A launcher that is called but not asked for would be missed in a stale module; the stub types the same ones."""
    package = Path(astrai_kernels.__file__).parent
    called = set()
    for file in package.glob("*.py"):
        called |= set(re.findall(r"\bextension\(\)\.(\w+)", file.read_text()))
    stub = ast.parse((package / "lib" / "_C.pyi").read_text())
    typed = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert called == typed == set(_loader._FUNCTIONS)


def test_every_public_name_resolves():
    for name in astrai_kernels.__all__:
        assert getattr(astrai_kernels, name) is not None
    assert set(astrai_kernels.__all__) <= set(dir(astrai_kernels))
    with pytest.raises(AttributeError, match="flash"):
        _ = astrai_kernels.flash
