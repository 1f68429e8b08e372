"""Facts about a GPU run, and the JSON file that each phase of tools/gpu_check.sh writes.

    python -m tools.gpu_results test.json --junit test.xml --command "memcheck rms_norm=0" ...

Exit status: 0, or 1 if a test failed, none ran, or a command's status is not 0; the file is written either way.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformers")


def _output(*command: str) -> str:
    """Return what a command prints, or "" where it does not exist or fails: facts are recorded as far as known."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""


def commit() -> str:
    """Name the commit under test: ``ASTRAI_COMMIT`` where the tree came without its git folder, else git's HEAD."""
    if named := os.environ.get("ASTRAI_COMMIT"):
        return named
    head = _output("git", "rev-parse", "HEAD")
    return (head + "-dirty" if head and _output("git", "status", "--porcelain") else head) or "unknown"


def _kernels() -> dict[str, Any] | None:
    """What the compiled kernels were built from and for; None where a benchmark runs without them, as training does."""
    if importlib.util.find_spec("astrai_kernels") is None or importlib.util.find_spec("astrai_kernels.lib._C") is None:
        return None
    import astrai_kernels

    info = astrai_kernels.build_info()
    return {name: info[name] for name in ("version", "cudart_version", "compiler")} | {
        "architectures": list(info["architectures"])
    }


def environment() -> dict[str, Any]:
    """Card, driver, versions, commit and date: what a figure means nothing without."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    versions = {
        name: importlib.metadata.version(name)
        for name in PACKAGES
        if importlib.util.find_spec(name) is not None  # absent ones are left out
    }
    return {
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "cuda": torch.version.cuda,
        "kernels": _kernels(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write(path: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Write ``facts`` of run ``name`` with the environment as JSON, making the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": name, "environment": environment(), **facts}, indent=2) + "\n")
    print(f"wrote {path}")


def read_junit(path: Path) -> dict[str, Any]:
    """Count a pytest run's outcomes, naming the failures and why others were skipped."""
    passed, seconds = 0, 0.0
    failed: list[str] = []
    skipped: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        seconds += float(case.get("time", 0))
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skip is not None:
            skipped[skip.get("message", "")] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": dict(skipped), "seconds": round(seconds, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("result", type=Path, help="JSON file to write; its stem names the run")
    parser.add_argument("--junit", type=Path, help="pytest's --junitxml file")
    parser.add_argument(
        "--command", action="append", default=[], metavar="NAME=STATUS", help="exit status of a program"
    )
    options = parser.parse_args(arguments)
    facts: dict[str, Any] = {}
    good = True
    if options.junit:
        facts["tests"] = read_junit(options.junit)
        good = facts["tests"]["passed"] > 0 and not facts["tests"]["failed"]
    if options.command:
        facts["commands"] = {
            name: int(status) for name, _, status in (text.rpartition("=") for text in options.command)
        }
        good = good and not any(facts["commands"].values())
    write(options.result, options.result.stem, facts)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
