"""The rules of docs/developer/contributing.md and architecture.md that a machine can check."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tools.release import Wheel, read_wheels

ROOT = Path(__file__).resolve().parents[1]
WHEELS = read_wheels(ROOT)
# What a wheel may import of the others; the kernels' Python side and core may also import torch.
MAY_IMPORT = {
    "astrai_kernels": set[str](),
    "astrai_core": {"astrai_kernels"},
    "astrai_infer": {"astrai_core"},
    "astrai_train": {"astrai_core"},
    "astrai_cli": {"astrai_core", "astrai_infer", "astrai_train"},
}
# "Where am I, what may I touch?" in architecture.md: modules that must not bring in a library, however indirectly.
WITHOUT = {
    "astrai_infer.scheduler": {"torch"},
    "astrai_infer.task": {"torch"},
    "astrai_infer.queue": {"torch"},
    "astrai_infer.cache.allocator": {"torch"},
    "astrai_infer.cache.prefix": {"torch"},
    "astrai_infer.server.app": {"torch"},
    "astrai_cli.main": {"torch", "astrai_core", "astrai_infer", "astrai_train"},
}
SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h", ".cmake", ".sh"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".jinja", ""}
MACHINE_PATH_OR_REGISTRY = re.compile(
    r"/work/(main|shared)|/[r]oot/|/home/\w|/Users/\w|/opt/(wheels|pypi)"
    r"|pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs\.org|conda\.anaconda\.org|deb\.debian\.org"
)
UNFINISHED = re.compile("|".join(rf"\b{first}{rest}\b" for first, rest in [("TO", "DO"), ("FIX", "ME"), ("XX", "X")]))


def python_files(files: list[Path]) -> list[Path]:
    return [file for file in files if file.suffix == ".py"]


def text_files(files: list[Path]) -> Iterator[tuple[Path, str]]:
    for file in files:
        if file.suffix in TEXT_SUFFIXES and file.name != "LICENSE":
            yield file.relative_to(ROOT), file.read_text(encoding="utf-8")


def modules_of(wheel: Wheel) -> list[str]:
    """Every module of the wheel, the package itself first."""
    source = wheel.folder / "src"
    names = [".".join(file.relative_to(source).with_suffix("").parts) for file in source.rglob("*.py")]
    return sorted(name.removesuffix(".__init__") for name in names)


def run_python(code: str, *arguments: str) -> str:
    """Run `code` in a fresh interpreter that finds all five source trees; fails with what it printed."""
    sources = os.pathsep.join(str(wheel.folder / "src") for wheel in WHEELS.values())
    environment = {**os.environ, "PYTHONPATH": sources}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, cwd=ROOT / "tests", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", f"importing printed: {done.stderr}"
    return done.stdout


def top_level_modules(*imported: str) -> set[str]:
    """Import the modules in a fresh interpreter and return the top-level packages that are loaded then."""
    code = (
        "import sys, json, importlib\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps(list(sys.modules)))"
    )
    return {name.partition(".")[0] for name in json.loads(run_python(code, *imported))}


def test_source_files_stay_short(project_files: list[Path]) -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in project_files if file.suffix in SOURCE_SUFFIXES}
    assert len(lengths) > 100, "the listing of the project's files is broken"
    assert [f"{file.relative_to(ROOT)}: {lines}" for file, lines in lengths.items() if lines >= 400] == []


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_importing_a_package_loads_neither_torch_nor_a_sibling(module: str) -> None:
    assert top_level_modules(module) & {"torch", "numpy", *MAY_IMPORT} == {module}


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_importing_any_module_does_nothing(module: str) -> None:
    """No logging set-up, no probing of devices, no threads, no output; and nothing of a wheel above or beside."""
    names = modules_of(WHEELS[module.replace("_", "-")])
    code = (
        "import sys, json, importlib, logging, threading, warnings\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "torch = sys.modules.get('torch')\n"
        "ours = [n for n in logging.root.manager.loggerDict if n.startswith('astrai')]\n"
        "print(json.dumps({\n"
        "    'root handlers': [repr(h) for h in logging.root.handlers],\n"
        "    'handlers or levels': [n for n in ours if logging.getLogger(n).handlers or logging.getLogger(n).level],\n"
        "    'threads': [t.name for t in threading.enumerate() if t is not threading.main_thread()],\n"
        "    'cuda': bool(torch and torch.cuda.is_initialized()),\n"
        "    'astrai': sorted({n.partition('.')[0] for n in sys.modules if n.startswith('astrai_')}),\n"
        "}))"
    )
    found = json.loads(run_python(code, *names))
    assert set(found.pop("astrai")) - {module} <= MAY_IMPORT[module]
    assert found == {"root handlers": [], "handlers or levels": [], "threads": [], "cuda": False}


@pytest.mark.parametrize("module", WITHOUT)
def test_rooms_without_a_library(module: str) -> None:
    assert top_level_modules(module) & WITHOUT[module] == set()


def test_the_layers_hold() -> None:
    """Imports go downwards only; the contracts are in pyproject.toml."""
    sources = os.pathsep.join(str(wheel.folder / "src") for wheel in WHEELS.values())
    done = subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "lint-imports", "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* kept, 0 broken", done.stdout), done.stdout


@pytest.mark.parametrize("wheel", WHEELS.values(), ids=list(WHEELS))
def test_a_wheel_requires_what_it_imports(wheel: Wheel) -> None:
    """By itself or in an extra: what comes along with another requirement today may stay away tomorrow."""
    distributions = importlib.metadata.packages_distributions()
    required = {canonicalize_name(requirement.name) for _, requirement in wheel.requires}
    missing = set()
    for file in (wheel.folder / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {wheel.module}:
                owners = {canonicalize_name(name) for name in distributions.get(top, [top])}
                if not owners & required:
                    missing.add(f"{file.relative_to(ROOT)} imports {top}")
    assert missing == set()


def imports_of_kernels(file: Path) -> bool:
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        # Also as a string, which importlib is given.
        names += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
        if any(re.fullmatch(r"astrai_kernels(\.\w+)*\.?", name) for name in names):
            return True
    return False


def test_the_kernels_are_reached_through_one_door() -> None:
    importing = [
        str(file.relative_to(ROOT))
        for name, wheel in WHEELS.items()
        if name != "astrai-kernels"
        for file in (wheel.folder / "src").rglob("*.py")
        if imports_of_kernels(file)
    ]
    assert importing == ["packages/astrai-core/src/astrai_core/kernels.py"]


def test_no_exception_is_swallowed(project_files: list[Path]) -> None:
    """Nothing is caught to be ignored; what catches everything cleans up or explains, and raises."""
    found = []
    for file in python_files(project_files):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {""}
            blind = bool(caught & {"", "Exception", "BaseException"}) and not isinstance(node.body[-1], ast.Raise)
            if blind or isinstance(node.body[0], ast.Pass):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_nothing_is_left_unfinished(project_files: list[Path]) -> None:
    found = [f"{name}: {match[0]}" for name, text in text_files(project_files) for match in UNFINISHED.finditer(text)]
    assert found == []


def test_no_machine_path_and_no_registry_host(project_files: list[Path]) -> None:
    found = [
        f"{name}: {match[0]}"
        for name, text in text_files(project_files)
        for match in MACHINE_PATH_OR_REGISTRY.finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize("wheel", WHEELS.values(), ids=list(WHEELS))
def test_every_wheel_carries_what_a_wheel_needs(wheel: Wheel) -> None:
    assert len((wheel.folder / "README.md").read_text().splitlines()) > 5
    assert (wheel.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (wheel.folder / "src" / wheel.module / "py.typed").is_file()
    assert list((wheel.folder / "tests").glob("test_*.py")), "its own tests lie beside it"


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_all_equals_what_can_be_imported(module: str) -> None:
    """``__all__``, what type checkers see, what ``dir`` shows and what getattr gives are the same public names."""
    text = (WHEELS[module.replace("_", "-")].folder / "src" / module / "__init__.py").read_text()
    seen_by_checkers = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module not in {"__future__", "typing"}
        for alias in node.names
    }
    code = (
        "import sys, json, importlib, types\n"
        "package = importlib.import_module(sys.argv[1])\n"
        "missing = [name for name in package.__all__ if not hasattr(package, name)]\n"
        "print(json.dumps([package.__all__, missing, dir(package)]))"
    )
    exported, missing, listed = json.loads(run_python(code, module))
    assert missing == []
    assert Counter(exported) == Counter(seen_by_checkers)
    assert set(exported) <= set(listed)
    with pytest.raises(AssertionError, match="has no attribute 'nonesuch'"):
        run_python(f"import {module}; {module}.nonesuch")


def test_test_files_have_unique_names(project_files: list[Path]) -> None:
    names = Counter(file.name for file in python_files(project_files) if file.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
