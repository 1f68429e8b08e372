"""Norm and projections of the decoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from astrai_core import linear_ops, ops


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) with a learned weight ``[hidden]``."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual); see :func:`astrai_core.ops.add_rms_norm`."""
        # The embedding or the norm before this one wrote the residual, and between a norm and the next lies attention or
        # an activation: a kernel that is no product.
        return ops.add_rms_norm(x, residual, self.weight, self.eps, overlap=ops.OVERLAP)


class Embedding(nn.Embedding):
    """A table of token vectors ``[vocab, hidden]`` through the ops door."""

    def reset_parameters(self) -> None:
        """Fill with zeros, until :meth:`CausalLM.init_weights` draws the table or a checkpoint fills it."""
        # torch's own normal draw, on the meta device where models are built, imports torch._dynamo and sympy: as long as
        # all else that a serving process imports beside torch, twice over.
        nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Look up ids ``[...]``; return ``[..., hidden]``."""
        return ops.embedding(input, self.weight)

    def begin(self, ids: Tensor, norm: RMSNorm) -> tuple[Tensor, linear_ops.HalfNorm | None]:
        """Look up ids ``[tokens]``, and do half of the norm of their rows in the same pass if that can be done."""
        rows, is_aligned = self.weight[:1].expand(len(ids), -1), self.weight.storage_offset() % 8 == 0
        if not (is_aligned and linear_ops.can_begin_norm(rows, norm.weight)):
            return self(ids), None
        return linear_ops.embed_and_begin_norm(ids, self.weight, norm.weight)


class Linear(nn.Linear):
    """A projection through the ops door; weight ``[out_features, in_features]``.

    Attributes
    ----------
    packed
        A second copy of the weight for serving on a CPU; see :meth:`CausalLM.pack_weights`.
    adapter
        What is added to the projection, from the input and the projection's output; see
        :func:`astrai_core.model.lora.apply_lora` for training and :class:`astrai_core.model.adapter_slots.AdapterSlots`
        for serving.
    """

    packed: Tensor | None = None
    _packed_version = -1

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.adapter: nn.Module | None = None

    def pack(self) -> None:
        """Lay the weight out for few-row products on a CPU; without effect where such a layout does not exist."""
        self.packed = linear_ops.pack(self.weight) if linear_ops.can_pack(self.weight) else None
        self._packed_version = self.weight._version

    def forward(self, input: Tensor) -> Tensor:
        """Project ``[..., in_features]`` to ``[..., out_features]``."""
        # A weight that was changed in place since has another version: its old copy must not answer for it.
        packed = self.packed if self.packed is not None and self._packed_version == self.weight._version else None
        output = linear_ops.linear(input, self.weight, self.bias, packed)
        return output if self.adapter is None else self.adapter(input, output)

    def can_fuse(self, x: Tensor) -> bool:
        """Whether :meth:`fused` is one launch for as many rows as `x` has."""
        return self.adapter is None and linear_ops.can_fuse(x, self.weight)

    def fused(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        half: linear_ops.HalfNorm | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Project with what precedes and follows in the same pass; see :func:`astrai_core.linear_ops.fused_linear`.

        Only without an adapter, whose input would be lost.
        """
        assert self.adapter is None, "an adapter reads what a fused projection does not keep"
        before = None if norm is None else (norm.weight, norm.eps)
        return linear_ops.fused_linear(
            x, self.weight, self.bias, norm=before, half=half, residual=residual, gated=gated
        )

    def add_to(self, stream: Tensor, x: Tensor, following: RMSNorm | None) -> tuple[Tensor, linear_ops.HalfNorm | None]:
        """Return ``stream + self(x)``, and what can be done in the same pass of the norm that reads the stream next.

        Only without an adapter, where :meth:`can_fuse` says yes.
        """
        if following is None or not linear_ops.can_begin_norm(x, following.weight):
            return self.fused(x, residual=stream), None
        return linear_ops.begin_norm(x, self.weight, following.weight, self.bias, residual=stream)


class FusedLinear(Linear):
    """Several projections of one input, stored as one weight.

    Files keep the parts under their own names; the checkpoint adapter, LoRA, matrix optimizers and tensor parallelism
    read :attr:`row_groups` to find them.

    Parameters
    ----------
    row_groups
        Name of each part -> its rows, in storage order.
    """

    def __init__(self, in_features: int, row_groups: Mapping[str, int], bias: bool) -> None:
        super().__init__(in_features, sum(row_groups.values()), bias)
        self.row_groups = dict(row_groups)

    def row_ranges(self) -> dict[str, tuple[int, int]]:
        """Return name -> half-open range of rows."""
        ranges, start = {}, 0
        for name, rows in self.row_groups.items():
            ranges[name] = (start, start + rows)
            start += rows
        return ranges
