"""Attention within documents that lie side by side in a batch's rows; no mask of tokens by tokens is ever made."""

from __future__ import annotations

import functools
import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from astrai_core.attention.backend import AttentionSpec
from astrai_core.attention.gather import causal_mask
from astrai_core.errors import BackendError

DocumentKernel = Literal["auto", "varlen", "one_by_one"]
"""``varlen`` computes all documents in one call of FlashAttention (torch.nn.attention.varlen); ``one_by_one`` calls
scaled_dot_product_attention for each; ``auto`` is ``varlen`` where that can run."""

MAX_HEAD_DIM = 256
"""Largest head of torch's FlashAttention."""


class DocumentAttention(ABC):
    """Causal attention of every document to itself alone; planned once a pass, shared by the layers."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float) -> Tensor:
        """Attend; q ``[tokens, n_heads, head_dim]``, k and v ``[tokens, n_kv_heads, head_dim]``, the result like q."""


@functools.cache
def _not_compiled() -> Callable[..., Tensor]:
    """Return :func:`_attend_each`, which a compiled layer calls as it is: it must not be specialised on the lengths of a
    batch, which the next batch does not share."""
    # At first use and not as a decorator: it imports torch._dynamo and sympy, half of what a serving process would import.
    disabled: Callable[..., Tensor] = torch.compiler.disable(_attend_each)
    return disabled


def _attend_each(documents: OneByOne, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float) -> Tensor:
    parts = zip(q.split(documents.lens), k.split(documents.lens), v.split(documents.lens), strict=True)
    return torch.cat([_document(*part, spec=spec, dropout=dropout) for part in parts])


@dataclass(frozen=True, eq=False)
class OneByOne(DocumentAttention):
    """One call of scaled_dot_product_attention a document: runs everywhere."""

    lens: tuple[int, ...]
    """Tokens of each document."""
    attend_each: Callable[..., Tensor] = field(default_factory=_not_compiled, repr=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float) -> Tensor:
        """Attend document after document."""
        return self.attend_each(self, q, k, v, spec, dropout)


@dataclass(frozen=True, eq=False)
class Varlen(DocumentAttention):
    """All documents in one call of FlashAttention; windows by the kernel, dropout by none."""

    indptr: Tensor
    """``[documents + 1]`` int32: prefix sum of their lengths."""
    longest: int
    """At least the length of the longest document; few different values, since a compiled layer is made for each."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float) -> Tensor:
        """Attend in one call."""
        assert dropout == 0.0, "plan_documents leaves dropout to OneByOne"
        window = (-1, 0) if spec.window is None else (spec.window - 1, 0)
        out: Tensor = _varlen()(
            q, k, v, self.indptr, self.indptr, self.longest, self.longest, scale=spec.scale, window_size=window
        )
        return out


def plan_documents(
    lens: Sequence[int],
    kernel: DocumentKernel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    dropout: float,
) -> DocumentAttention:
    """Prepare the attention of a pass over documents of these lengths.

    Parameters
    ----------
    lens
        Tokens of each document, in the order of the flattened batch.
    dtype
        Of the queries and keys.
    dropout
        Share of the attention weights that is dropped.

    Raises
    ------
    BackendError
        If `kernel` is ``varlen`` and cannot run here.
    """
    if kernel != "one_by_one":
        reason = varlen_unavailable(device, dtype, head_dim, dropout)
        if reason is None:
            indptr = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
            longest = 1 << (max(lens) - 1).bit_length()
            return Varlen(indptr.to(device, non_blocking=True), longest)
        if kernel == "varlen":
            raise BackendError(f"attention kernel 'varlen' cannot run on {device}: {reason}")
    return OneByOne(tuple(lens))


def varlen_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> str | None:
    """Say why all documents cannot be computed in one call, and the remedy; None if they can."""
    if device.type != "cuda":
        return "it needs a CUDA device; compute the documents one by one"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes bfloat16 or float16, not {dtype}; compute in bfloat16"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return (
            f"it takes heads of multiples of 8 up to {MAX_HEAD_DIM}, not {head_dim}; compute the documents one by one"
        )
    if dropout:
        return f"it has no dropout, and attention_dropout is {dropout}; set that to 0"
    try:
        _varlen()
    except ImportError as error:
        return f"{error}; it needs torch 2.11 or later"
    return None


@functools.cache
def _varlen() -> Callable[..., Any]:
    """Return torch's function, told that heads may be grouped where it asks.

    torch 2.10 has neither scale nor window; torch 2.13 refuses grouped heads unless `enable_gqa` is given, and 2.11
    has no such argument.
    """
    from torch.nn.attention.varlen import varlen_attn

    arguments = inspect.signature(varlen_attn).parameters
    if "window_size" not in arguments or "scale" not in arguments:
        raise ImportError(f"torch {torch.__version__} has no scale and window_size in varlen_attn")
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in arguments else varlen_attn


def _document(q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, dropout: float) -> Tensor:
    """Attend within one document; ``[tokens, heads, head_dim]`` each."""
    n, window = q.shape[0], spec.window
    mask = None if window is None or window >= n else causal_mask(n, n, window, q.device)
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    return attend_rows(q, k, v, mask, spec, dropout).squeeze(0).transpose(0, 1)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, dropout: float) -> Tensor:
    """Attend within rows, ``[batch, heads, seq, head_dim]`` each; plain causal masking without a mask."""
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=spec.scale,
        enable_gqa=spec.n_heads != spec.n_kv_heads,
    )
