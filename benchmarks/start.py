"""From the start of a process to its first token: a checkpoint on disk, its files in the page cache, graphs on.

    python -m benchmarks.start [--model llama1b] [--rounds 3] [--out gpu_out]

Each round is a new interpreter that imports, loads, builds the engine and streams an answer to a prompt of 128 tokens; it
says what it had used when, by the clock of the process that started it. Bytecode goes to a folder of this benchmark, so
that it does not matter whether the installation has any: the first round makes it, the others read it, as they do where
pip installed the wheels.

Columns: who made the bytecode; seconds since the start when the interpreter runs, torch is imported, astrai is, the first
call of CUDA is done (the driver and its context), the engine is built, and the first token is there; modules imported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import build_model
from benchmarks.measure import table

from astrai_core.checkpoint.hf_adapter import save_pretrained
from astrai_infer.testing import byte_tokenizer
from tools.gpu_results import write

CHILD = """
import json, sys, time
started, directory, device, new_tokens = float(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
marks = {"interpreter s": time.time() - started}
import torch
marks["torch s"] = time.time() - started
from astrai_core import SamplingParams
from astrai_infer import InferenceEngine
marks["imported s"] = time.time() - started
torch.ones(1, device=device).item()
marks["device s"] = time.time() - started
engine = InferenceEngine.from_pretrained(directory, device, max_num_seqs=32, max_seq_len=2048)
marks["engine s"] = time.time() - started
params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
stream = engine.generate(list(range(128)), params, stream=True)
next(stream)
marks["first token s"] = time.time() - started
for _ in stream:
    pass
engine.close()
marks["modules"] = len(sys.modules)
print(json.dumps(marks))
"""


def save_model(name: str, directory: Path, device: str) -> None:
    """Write a model of random weights in bf16, as a checkpoint that the child can load."""
    save_pretrained(build_model(name, device), directory, tokenizer=byte_tokenizer())


def run(directory: Path, bytecode: Path, device: str) -> dict[str, Any]:
    """One new process, which reads or makes `bytecode`; its marks."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    command = [sys.executable, "-c", CHILD, repr(time.time()), str(directory), device, "8"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"the process failed:\n{done.stderr[-4000:]}")
    marks: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return marks


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", default="llama1b", help="one of the engine benchmark's (default: llama1b)")
    parser.add_argument("--device", default="cuda", help="where (default: cuda)")
    parser.add_argument("--rounds", type=int, default=3, help="processes after the first (default: 3)")
    parser.add_argument("--out", type=Path, help="folder for start.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        directory, bytecode = Path(folder) / "model", Path(folder) / "bytecode"
        save_model(options.model, directory, options.device)
        rows = [
            {"model": options.model, "bytecode": "read" if n else "made", **run(directory, bytecode, options.device)}
            for n in range(options.rounds + 1)
        ]
    print(table(rows, list(rows[0])))
    if options.out:
        write(options.out / "start.json", "start", {"rows": rows})


if __name__ == "__main__":
    main()
