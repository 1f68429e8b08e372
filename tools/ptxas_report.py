"""Read a build log made with ``-Xptxas=-v`` and say which kernels spill registers to memory.

Prints one line with the number of kernels and the most registers; with ``--json`` writes the facts to a file.
Exit status: 0 no spills, 1 spills (each named), 2 the log holds no ptxas output.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_ENTRY = re.compile(r"Compiling entry function '(?P<kernel>\S+)' for '(?P<architecture>\w+)'")
_SPILL = re.compile(r"(\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")


@dataclass(frozen=True)
class Kernel:
    """What ptxas said of one kernel for one architecture; spills in bytes a thread, stores and loads together."""

    name: str
    architecture: str
    registers: int
    spills: int


def parse(log: str) -> list[Kernel]:
    """Collect the kernels of a build log, in its order."""
    kernels = []
    name = architecture = ""
    spills = 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            name, architecture, spills = match["kernel"], match["architecture"], 0
        elif match := _SPILL.search(line):
            spills = int(match["stores"]) + int(match["loads"])
        elif (match := _REGISTERS.search(line)) and name:
            kernels.append(Kernel(name, architecture, int(match["registers"]), spills))
            name = ""
    return kernels


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring for the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--json", type=Path, help="write counts and the spilling kernels here")
    options = parser.parse_args(arguments)
    kernels = parse(options.log.read_text(errors="replace"))
    if not kernels:
        print(f"{options.log}: no ptxas output; build with -DASTRAI_PTXAS_VERBOSE=ON", file=sys.stderr)
        return 2
    spilling = [kernel for kernel in kernels if kernel.spills]
    for kernel in spilling:
        print(f"spills {kernel.spills} bytes: {kernel.name} for {kernel.architecture}")
    most = max(kernel.registers for kernel in kernels)
    print(f"ptxas: {len(kernels)} kernels, {len(spilling)} spill, at most {most} registers")
    if options.json:
        facts = {"kernels": len(kernels), "most_registers": most, "spilling": [asdict(kernel) for kernel in spilling]}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
