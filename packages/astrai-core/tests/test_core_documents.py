"""Documents side by side in a row: each is computed as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from astrai_core import AutoModel, ModelConfig
from astrai_core.errors import RequestError

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
WINDOW = {"model_type": "mistral", "sliding_window": 4}


def make_model(extra: dict[str, Any]) -> Any:
    config = ModelConfig.from_dict(SHAPE | extra)
    return AutoModel.from_config(config, device="cpu", generator=torch.Generator().manual_seed(0)).eval()


@pytest.mark.parametrize("extra", [{}, WINDOW], ids=["full", "window"])
@torch.no_grad()
def test_documents_do_not_see_each_other(extra: dict[str, Any]) -> None:
    model = make_model(extra)
    lens = (3, 7, 1, 9, 4)
    ids = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lens]).view(2, 12)
    found = model.hidden_states(ids, positions, doc_lens=lens).flatten(0, 1).split(lens)
    for document, hidden in zip(ids.flatten().split(lens), found, strict=True):
        torch.testing.assert_close(hidden, model.hidden_states(document[None])[0], atol=1e-5, rtol=0)
    together = model.hidden_states(ids, positions).flatten(0, 1)
    assert (together[3:10] - found[1]).abs().max() > 1e-2, "without doc_lens they do"


@torch.no_grad()
def test_forward_projects_the_hidden_states() -> None:
    model = make_model({})
    ids = torch.arange(10).view(2, 5)
    out = model(ids)
    assert torch.equal(out.last_hidden_state, model.hidden_states(ids))
    assert torch.equal(out.logits, model.lm_head(out.last_hidden_state))


def test_lengths_that_do_not_add_up_are_refused() -> None:
    model = make_model({})
    ids = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(RequestError, match=r"doc_lens must add up to batch x seq = 10 tokens"):
        model.hidden_states(ids, doc_lens=(5, 4))
    with pytest.raises(RequestError, match="excludes attention_mask"):
        model.hidden_states(ids, attention_mask=torch.ones_like(ids), doc_lens=(5, 5))
