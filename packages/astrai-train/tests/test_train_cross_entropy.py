"""Cross entropy in chunks with its gradient made on the way, beside torch's own over whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from astrai_core.errors import ConfigError
from astrai_train.strategy import cross_entropy
from astrai_train.strategy.cross_entropy import loss_and_gradient, summed_cross_entropy

VOCAB, WIDTH = 61, 16


def case(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, WIDTH, generator=generator).to(dtype).requires_grad_()
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    return hidden, head.to(dtype), torch.randint(0, VOCAB, (n,), generator=generator)


def whole(hidden: Tensor, head: nn.Linear, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum", label_smoothing=smoothing)


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 40), chunk=st.integers(1, 45), smoothing=st.sampled_from([0.0, 0.1]), factor=st.floats(-3, 3))
def test_parity(n: int, chunk: int, smoothing: float, factor: float) -> None:
    """Training rule 12: within 1e-6 a token in fp32, for any chunks and any factor behind the loss."""
    hidden, head, targets = case(n)
    ours = summed_cross_entropy(hidden, head, targets, chunk_tokens=chunk, label_smoothing=smoothing)
    theirs = whole(hidden, head, targets, smoothing)
    assert (ours.dtype, ours.dim()) == (torch.float32, 0)
    torch.testing.assert_close(ours / n, theirs / n, atol=1e-6, rtol=1e-6)
    for mine, other in zip(
        gradients(factor / n * ours, hidden, head.weight),
        gradients(factor / n * theirs, hidden, head.weight),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


def test_a_tied_weight_gets_both_gradients() -> None:
    """Training rule 7: the head that is the embedding."""
    _, head, targets = case(20)
    ids = targets.flip(0)
    found = []
    for loss in (lambda *a: summed_cross_entropy(*a, chunk_tokens=7), whole):
        found.append(gradients(loss(F.embedding(ids, head.weight), head, targets) / 20, head.weight)[0])
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)


def test_bf16_over_fp32_weights() -> None:
    """Products in the states' type, softmax and the sum over chunks in fp32, the gradient in the weight's."""
    hidden, head, targets = case(40)
    half = hidden.detach().bfloat16().requires_grad_()
    loss = summed_cross_entropy(half, head, targets, chunk_tokens=3)
    for_hidden, for_weight = gradients(loss, half, head.weight)
    assert (for_hidden.dtype, for_weight.dtype) == (torch.bfloat16, torch.float32)
    exact = gradients(whole(hidden, head, targets), hidden, head.weight)
    torch.testing.assert_close(loss, whole(hidden, head, targets), atol=0, rtol=1e-2)
    torch.testing.assert_close(for_hidden.float(), exact[0], atol=0.06, rtol=0.05)
    torch.testing.assert_close(for_weight, exact[1], atol=0.06, rtol=0.05)


def test_the_sum_over_chunks_is_not_rounded() -> None:
    """In bf16 throughout: 64 chunks of one token give the weight's gradient as exactly as one chunk of 64."""
    hidden, head, targets = case(64, torch.bfloat16)
    exact = gradients(whole(hidden.double(), head.double(), targets), head.weight)[0]
    head.bfloat16()
    errors = [
        (gradients(summed_cross_entropy(hidden, head, targets, chunk_tokens=n), head.weight)[0] - exact).norm()
        for n in (1, 64)
    ]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize("frozen", ["weight", "hidden", "both", "no_grad"])
def test_only_what_is_wanted_is_computed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen weight (LoRA) gets no gradient and costs no product."""
    hidden, head, targets = case(9)
    expected = whole(hidden, head, targets)
    products: list[Any] = []
    monkeypatch.setattr(cross_entropy, "_add_product", lambda *args: products.append(args))
    if frozen in ("weight", "both"):
        head.weight.requires_grad_(False)
    if frozen in ("hidden", "both"):
        hidden.requires_grad_(False)
    with torch.set_grad_enabled(frozen != "no_grad"):
        loss = summed_cross_entropy(hidden, head, targets, chunk_tokens=4)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.requires_grad == (frozen in ("weight", "hidden"))
    assert len(products) == (3 if frozen == "hidden" else 0)


def test_no_target_at_all() -> None:
    """Training rule 1: 0 and a gradient of zeros."""
    hidden, head, _ = case(0)
    loss = summed_cross_entropy(hidden, head, torch.zeros(0, dtype=torch.long), chunk_tokens=4)
    found = gradients(loss, hidden, head.weight)
    assert loss.item() == 0 and found[0].shape == (0, WIDTH) and not found[1].any()


def test_within_torch_compile() -> None:
    """The whole loss can be part of somebody's compiled step."""
    hidden, head, targets = case(25)
    torch._dynamo.reset()
    step = torch.compile(
        lambda states: summed_cross_entropy(states, head, targets, chunk_tokens=10), backend="aot_eager", fullgraph=True
    )
    ours, theirs = step(hidden), whole(hidden, head, targets)
    torch.testing.assert_close(gradients(ours, hidden)[0], gradients(theirs, hidden)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_compiled_piece_is_the_same(smoothing: float) -> None:
    """It compares where the eager one scatters."""
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(9) * 5
    torch._dynamo.reset()
    compiled = torch.compile(loss_and_gradient, backend="aot_eager")
    for ours, theirs in zip(
        compiled(logits, targets, smoothing), loss_and_gradient(logits, targets, smoothing), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_more_than_a_weight_is_refused() -> None:
    """A bias or an adapter would be left out silently."""
    hidden, head, targets = case(3)
    adapted = nn.Linear(WIDTH, VOCAB, bias=False)
    adapted.adapter = nn.Identity()
    for other in (nn.Linear(WIDTH, VOCAB), adapted, nn.Sequential(head)):
        with pytest.raises(ConfigError, match="output projection without bias and adapter"):
            summed_cross_entropy(hidden, other, targets, chunk_tokens=4)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype, compiled: bool) -> None:
    """Real kernels, several chunks, one of them compiled for any size."""
    hidden, head, targets = case(1000, dtype)
    hidden, targets = hidden.detach().cuda().requires_grad_(), targets.cuda()
    head.cuda()
    theirs = whole(hidden, head, targets)
    expected = gradients(theirs, hidden, head.weight)
    for chunk in (300, 1000, 77):
        ours = summed_cross_entropy(hidden, head, targets, chunk_tokens=chunk, compiled=compiled)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert ours.item() == pytest.approx(theirs.item(), rel=tolerance)
        for mine, other in zip(gradients(ours, hidden, head.weight), expected, strict=True):
            torch.testing.assert_close(mine, other, atol=tolerance * float(other.abs().max()), rtol=0)
