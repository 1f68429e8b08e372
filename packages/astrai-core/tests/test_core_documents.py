"""Documents side by side in a row: each is computed as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from astrai_core import AutoModel, ModelConfig
from astrai_core.errors import BackendError, RequestError
from astrai_core.model import documents

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


# ---- all documents in one call ----


def varlen_twin(q, k, v, indptr, indptr_k, longest, longest_k, *, scale, window_size):
    """What torch.nn.attention.varlen computes, token by token from its definition."""
    assert indptr.dtype == torch.int32 and indptr is indptr_k and longest == longest_k
    assert int(indptr.diff().max()) <= longest and window_size[1] == 0
    place = torch.arange(len(q))
    owner = torch.bucketize(place, indptr[1:], right=True)
    seen = (owner[:, None] == owner) & (place <= place[:, None])
    if window_size[0] >= 0:
        seen &= place >= place[:, None] - window_size[0]
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("extra", [{}, WINDOW], ids=["full", "window"])
def test_one_call_is_one_by_one(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training rule 4: prefix sums, windows and scale reach the kernel; values and gradients are the same."""
    model, lens = make_model(extra), (3, 7, 1, 9, 4)
    ids = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    found = []
    for kernel in ("one_by_one", "varlen"):
        if kernel == "varlen":
            monkeypatch.setattr(documents, "varlen_unavailable", lambda *facts: None)
            monkeypatch.setattr(documents, "_varlen", lambda: varlen_twin)
        model.document_kernel = kernel
        model.zero_grad()
        hidden = model.hidden_states(ids, doc_lens=lens)
        hidden.square().sum().backward()
        found.append((hidden.detach(), model.model.layers[0].self_attn.qkv_proj.weight.grad.clone()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_one_call_by_name_is_strict() -> None:
    model = make_model({})
    model.document_kernel = "varlen"
    with pytest.raises(BackendError, match="'varlen' cannot run on cpu: it needs a CUDA device; compute the documents"):
        model.hidden_states(torch.zeros(1, 5, dtype=torch.long), doc_lens=(2, 3))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ((torch.float32, 64, 0.0), "not torch.float32; compute in bfloat16"),
        ((torch.bfloat16, 512, 0.0), "heads of multiples of 8 up to 256, not 512"),
        ((torch.bfloat16, 64, 0.1), "no dropout, and attention_dropout is 0.1"),
    ],
)
def test_why_one_call_cannot_be(facts: tuple[torch.dtype, int, float], reason: str) -> None:
    assert reason in (documents.varlen_unavailable(torch.device("cuda"), *facts) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("extra", [{}, WINDOW], ids=["full", "window"])
def test_one_call_on_a_gpu(extra: dict[str, Any]) -> None:
    """bf16, grouped heads: within a few roundings of one call a document, forward and backward."""
    reason = documents.varlen_unavailable(torch.device("cuda"), torch.bfloat16, 8, 0.0)
    assert reason is None, reason
    model = make_model(extra).to("cuda", torch.bfloat16)
    lens = (3, 70, 1, 90, 28)
    ids = torch.randint(0, 61, (3, 64), generator=torch.Generator().manual_seed(1)).cuda()
    found = []
    for kernel in ("one_by_one", "varlen"):
        model.document_kernel = kernel
        model.zero_grad()
        hidden = model.hidden_states(ids, doc_lens=lens)
        hidden.float().square().sum().backward()
        found.append((hidden.detach().float(), model.model.layers[0].self_attn.qkv_proj.weight.grad.float()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.03 * float(theirs.abs().max()), rtol=0)


@pytest.mark.gpu
def test_blocks_compile_on_a_gpu() -> None:
    """The kernel within a compiled layer: documents of any number and length, few compilations.

    A compiled layer rounds in other places, and the model amplifies that: both are held against fp32.
    """
    model = make_model({}).to("cuda", torch.bfloat16)
    plain = make_model({}).to("cuda", torch.bfloat16)
    wide = make_model({}).to("cuda", torch.bfloat16).float()
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile()
    for lens in ((3, 70, 1, 90, 28), (64, 64, 64), (20, 44, 100, 28), (192,)):
        ids = torch.randint(0, 61, (3, 64), generator=torch.Generator().manual_seed(len(lens))).cuda()
        ours, theirs, exact = (m.hidden_states(ids, doc_lens=lens).float() for m in (model, plain, wide))
        assert 0 < (theirs - exact).norm() < 0.05 * exact.norm()
        assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()
        ours.square().sum().backward()
