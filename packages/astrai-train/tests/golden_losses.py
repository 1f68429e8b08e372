"""The losses of a small run under each optimizer, kept in golden_losses.json.

    python packages/astrai-train/tests/golden_losses.py      # write them anew, after a change that is meant

The model reads the first bytes of the novel of astrai-cli, one id a byte, in float32 on one thread.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

KEPT = Path(__file__).with_suffix(".json")

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 4e-3},
    "muon_adamw": {"lr": 1e-2, "adamw_lr": 4e-3},
    "mano_adamw": {"lr": 2e-2, "adamw_lr": 4e-3},
    "nora_nadamw": {"lr": 5e-3, "nadamw_lr": 4e-3},
}
STEPS, SEQ_LEN, BATCH = 48, 64, 8
VOCABULARY, N_BYTES = 257, 40_000


def losses(optimizer: str, folder: Path) -> list[float]:
    """Train in `folder`, which must not hold a run, and return the loss of every step."""
    from astrai_cli.first_model import novel
    from astrai_core import Tokenizer
    from astrai_train import TrainConfig, train
    from astrai_train.data.store import write_store

    text = np.frombuffer(novel()[:N_BYTES].encode("ascii"), np.uint8).astype(np.int64)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, "w0"))
    tokenizer = Tokenizer(backend, config={"eos_token": f"w{VOCABULARY - 1}"})
    tokenizer.save_pretrained(folder / "tokenizer")
    write_store(folder / "store", "text", [{"input_ids": text}], tokenizer)
    recipe = {
        "model": {
            "architecture": {
                "model_type": "llama",
                "vocab_size": VOCABULARY,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": SEQ_LEN,
                "tie_word_embeddings": True,
            },
            "tokenizer": str(folder / "tokenizer"),
        },
        "data": {"train": [{"path": str(folder / "store")}], "seq_len": SEQ_LEN, "packing": "simple", "workers": 0},
        "strategy": {"name": "seq"},
        "optimizer": {"name": optimizer, **OPTIMIZERS[optimizer]},
        "lr_schedule": {"name": "wsd", "warmup": 4, "decay": 12},
        "output_dir": str(folder / "run"),
        "batch_size": BATCH,
        "micro_batch_size": BATCH // 2,
        "max_steps": STEPS,
        "precision": {"dtype": "fp32"},
        "log": {"interval": 1, "metrics": ["loss"], "progress": False},
    }
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(TrainConfig.from_dict(recipe), device="cpu")
    finally:
        torch.set_num_threads(n_threads)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> None:
    """Write golden_losses.json."""
    found = {}
    for name in OPTIMIZERS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = [round(loss, 6) for loss in losses(name, Path(folder))]
    KEPT.write_text(json.dumps(found) + "\n")
    sys.stdout.write(f"{KEPT}\n")


if __name__ == "__main__":
    main()
