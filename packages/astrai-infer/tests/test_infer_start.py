"""What a process imports until its first token: of torch no more than `import torch` itself does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from astrai_core import AutoModel, ModelConfig, save_pretrained
from astrai_infer.testing import byte_tokenizer

# Each takes from half a second to two, where astrai's own modules and what they need take half a second together.
HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.onnx", "sympy", "transformers", "triton")

CODE = """
import json, sys
import torch
torchs_own, seen = set(sys.modules), {}
from astrai_core import SamplingParams
from astrai_infer import InferenceEngine
seen["imported"] = sorted(set(sys.modules) - torchs_own)
engine = InferenceEngine.from_pretrained(sys.argv[1], sys.argv[2], max_num_seqs=2, max_seq_len=64)
seen["engine"] = sorted(set(sys.modules) - torchs_own)
for _ in engine.generate([1, 2, 3], SamplingParams(temperature=0.7, max_tokens=3, ignore_eos=True), stream=True):
    pass
engine.close()
seen["tokens"] = sorted(set(sys.modules) - torchs_own)
print(json.dumps(seen))
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_first_token_needs_no_heavy_import(device: str, tmp_path: Path) -> None:
    """Issue 5, Deliver 5: the packages, a loaded checkpoint, an engine and a stream, in a process of their own."""
    config = ModelConfig.from_dict(
        {"model_type": "qwen3", "vocab_size": 400, "hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 1}
        | {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64, "head_dim": 64}
    )
    model = AutoModel.from_config(config, "bfloat16", "cpu", torch.Generator().manual_seed(0))
    save_pretrained(model, tmp_path, tokenizer=byte_tokenizer())
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), device], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert "astrai_infer.engine" in seen["imported"]
    for when, names in seen.items():
        assert not [name for name in HEAVY if name in names], when
