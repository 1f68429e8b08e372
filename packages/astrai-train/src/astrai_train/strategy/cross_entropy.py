"""Cross entropy through the output projection, a chunk of tokens at a time."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def summed_cross_entropy(
    hidden: Tensor, head: nn.Module, targets: Tensor, *, chunk_tokens: int, label_smoothing: float = 0.0
) -> Tensor:
    """Return the cross entropy of ``head(hidden)`` against `targets`, summed, without ever holding all logits.

    A chunk's logits are computed again in the backward pass, so that at most ``chunk_tokens * vocab`` of them exist.

    Parameters
    ----------
    hidden
        ``[n, hidden]``, the states that predict; n may be 0.
    head
        Output projection to ``[n, vocab]``.
    targets
        ``[n]`` int64.
    chunk_tokens
        Tokens whose logits exist at once.
    label_smoothing
        Share of the target's probability that is spread evenly over the vocabulary (arXiv 1512.00567, section 7).

    Returns
    -------
    Scalar fp32.
    """

    def chunk_loss(states: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(head(states).float(), wanted, reduction="sum", label_smoothing=label_smoothing)

    chunks = list(zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
    if len(chunks) == 1:
        return chunk_loss(*chunks[0])
    # The projection draws no random number, so there is no generator state to keep for the second time.
    losses = [checkpoint(chunk_loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return sum(losses[1:], start=losses[0])
