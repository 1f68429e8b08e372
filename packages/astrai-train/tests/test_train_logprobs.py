"""Log-probabilities of answers: one shift, chunks, gradients (training rules 1, 2 and 10)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from astrai_core.errors import ConfigError
from astrai_train.strategy.logprobs import sequence_logprobs

ROWS, SEQ, HIDDEN, VOCAB = 3, 7, 5, 11


class Head(nn.Linear):
    """An output projection that remembers how many states it was given at once."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, VOCAB, bias=False)
        self.sizes: list[int] = []

    def forward(self, input: Tensor) -> Tensor:
        self.sizes.append(len(input))
        return super().forward(input)


@pytest.fixture
def case() -> tuple[Tensor, Head, Tensor, Tensor]:
    """States, projection, ids, and a mask with two spans, all but the first token, and nothing."""
    torch.manual_seed(0)
    supervised = torch.zeros(ROWS, SEQ, dtype=torch.bool)
    supervised[0, 2:4] = supervised[0, 6] = supervised[1, 1:] = True
    ids = torch.randint(0, VOCAB, (ROWS, SEQ))
    return torch.randn(ROWS, SEQ, HIDDEN, requires_grad=True), Head(), ids, supervised


def by_hand(hidden: Tensor, head: nn.Module, ids: Tensor, supervised: Tensor) -> Tensor:
    sums = []
    for row in range(len(ids)):
        logprobs = F.log_softmax(head(hidden[row]), -1)
        scored = [logprobs[i - 1, ids[row, i]] for i in range(1, ids.shape[1]) if supervised[row, i]]
        sums.append(torch.stack(scored).sum() if scored else logprobs.sum() * 0)
    return torch.stack(sums)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 4, 9, 100])
def test_equals_the_definition(case: tuple[Tensor, Head, Tensor, Tensor], chunk_tokens: int) -> None:
    """Value and gradient, whatever the chunks; a row without supervised tokens is 0."""
    hidden, head, ids, supervised = case
    found = sequence_logprobs(hidden, head, ids, supervised, chunk_tokens=chunk_tokens)
    expected = by_hand(hidden, head, ids, supervised)
    torch.testing.assert_close(found.sums, expected)
    assert found.n_tokens.tolist() == [3, 6, 0]
    torch.testing.assert_close(found.means(), expected / torch.tensor([3, 6, 1]))
    weights = torch.tensor([1.0, -2.0, 3.0])
    for mine, theirs in zip(
        torch.autograd.grad((found.sums * weights).sum(), (hidden, head.weight)),
        torch.autograd.grad((expected * weights).sum(), (hidden, head.weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_logits_are_never_whole(case: tuple[Tensor, Head, Tensor, Tensor]) -> None:
    """Only states that score a token are projected, so many at a time; in the backward pass again."""
    hidden, head, ids, supervised = case
    found = sequence_logprobs(hidden, head, ids, supervised, chunk_tokens=4)
    assert head.sizes == [4, 4, 1]
    found.sums.sum().backward()
    assert sorted(head.sizes) == [1, 1, 4, 4, 4, 4]


def test_exactly_one_shift() -> None:
    """Rule 2: states that announce the next token score it surely; one place off, they do not."""
    ids = torch.arange(SEQ)[None]
    hidden = 50 * F.one_hot(ids.roll(-1, 1), VOCAB).float()
    supervised = torch.ones(1, SEQ, dtype=torch.bool)
    found = sequence_logprobs(hidden, nn.Identity(), ids, supervised, chunk_tokens=3)
    assert found.n_tokens.tolist() == [SEQ - 1], "the first token has nothing before it"
    assert found.sums.item() == pytest.approx(0, abs=1e-6)
    off = sequence_logprobs(hidden.roll(1, 1), nn.Identity(), ids, supervised, chunk_tokens=3)
    assert off.sums.item() < -100


def test_unsupervised_content_does_not_count(case: tuple[Tensor, Head, Tensor, Tensor]) -> None:
    """Rule 2: masked tokens, id 0 and padding among them, change nothing; supervised ids 0 are content."""
    hidden, head, ids, supervised = case
    found = sequence_logprobs(hidden, head, ids, supervised, chunk_tokens=4)
    other = sequence_logprobs(hidden, head, ids.where(supervised, 0), supervised, chunk_tokens=4)
    assert torch.equal(found.sums, other.sums)
    zeros = sequence_logprobs(hidden, head, torch.zeros_like(ids), supervised, chunk_tokens=4)
    assert zeros.n_tokens.tolist() == [3, 6, 0]
    torch.testing.assert_close(zeros.sums, by_hand(hidden, head, torch.zeros_like(ids), supervised))


def test_nothing_supervised_keeps_the_graph(case: tuple[Tensor, Head, Tensor, Tensor]) -> None:
    """Rule 1: such a micro-batch contributes 0, with a gradient of zeros for every collective to happen."""
    hidden, head, ids, supervised = case
    found = sequence_logprobs(hidden, head, ids, torch.zeros_like(supervised), chunk_tokens=4)
    assert found.sums.tolist() == [0, 0, 0]
    gradients = torch.autograd.grad(found.sums.sum(), (hidden, head.weight))
    assert not any(gradient.any() for gradient in gradients)


def test_half_precision_is_summed_in_float32(case: tuple[Tensor, Head, Tensor, Tensor]) -> None:
    hidden, head, ids, supervised = case
    found = sequence_logprobs(hidden.bfloat16(), head.bfloat16(), ids, supervised, chunk_tokens=4)
    assert found.sums.dtype == torch.float32
    logits = head(hidden.bfloat16()).float()
    expected = by_hand(logits, nn.Identity(), ids, supervised)
    torch.testing.assert_close(found.sums, expected, rtol=1e-5, atol=1e-5)


def test_refusals(case: tuple[Tensor, Head, Tensor, Tensor]) -> None:
    hidden, head, ids, supervised = case
    with pytest.raises(ConfigError, match="chunk_tokens"):
        sequence_logprobs(hidden, head, ids, supervised, chunk_tokens=0)
    with pytest.raises(ConfigError, match=r"must share \[rows, seq_len\]"):
        sequence_logprobs(hidden, head, ids[:, 1:], supervised, chunk_tokens=4)
