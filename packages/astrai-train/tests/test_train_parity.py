"""Parity with transformers and torch: one optimizer step, and the exported checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_train import TrainConfig
from astrai_train.run import build, train

transformers = pytest.importorskip("transformers")

Recipe = Callable[..., dict[str, Any]]


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_a_step_equals_transformers_and_torch(run_recipe: Recipe, tmp_path: Path) -> None:
    """Rows of one document each, two micro-batches; weights within 1e-6 in fp32 after AdamW with decay and clipping."""
    changes = {
        "data.packing": "none",
        "max_steps": 2,
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 3.0},
        "lr_schedule": {"name": "constant", "warmup": 0},
    }
    trainer = build(TrainConfig.from_dict(run_recipe(changes)))
    trainer.save()
    trainer.context.checkpoints.wait()
    theirs = load(tmp_path / "run" / "checkpoints" / "step_0").train()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in theirs.parameters() if p.dim() >= 2], "weight_decay": 3.0},
        {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    batches = iter(trainer.context.source)
    twins = iter(
        build(TrainConfig.from_dict(run_recipe(changes | {"output_dir": str(tmp_path / "twin")}))).context.source
    )
    start = {name: value.clone() for name, value in theirs.state_dict().items()}
    for _ in range(2):
        rows = [next(twins) for _ in range(2)]
        n_supervised = sum(batch.n_supervised for batch in rows)
        total = 0.0
        for batch in rows:
            loss = theirs(
                input_ids=batch.input_ids,
                attention_mask=(batch.doc_ids >= 0).long(),
                labels=batch.labels,
                num_items_in_batch=n_supervised,
            ).loss
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        record = trainer._step(batches)
        assert record.loss == pytest.approx(total, rel=1e-6)
        assert record.grad_norm == pytest.approx(float(norm), rel=1e-5)
    trainer.save()
    trainer.context.checkpoints.wait()
    ours = load(tmp_path / "run" / "checkpoints" / "step_2").state_dict()
    expected = theirs.state_dict()
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        assert (value - start[name]).abs().mean() > 1e-3, "two steps moved every weight far beyond the tolerance"
        torch.testing.assert_close(
            value, expected[name], atol=1e-6, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_loads_in_transformers(run_recipe: Recipe, tied: bool) -> None:
    """Training rule 7: equal logits; tied weights are one tensor in the file and in the model."""
    recipe = run_recipe({"max_steps": 2, "model.architecture.tie_word_embeddings": tied})
    result = train(TrainConfig.from_dict(recipe))
    theirs = load(result.checkpoint).eval()
    trainer = build(TrainConfig.from_dict(recipe), resume=True)
    model = trainer.context.model.eval()
    ids = torch.randint(0, 258, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, atol=1e-5, rtol=0)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.checkpoint)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
