"""Sparse feed-forward: each token goes to the few experts that a softmax router scores highest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from astrai_core import linear_ops, ops
from astrai_core.config.model import ModelConfig
from astrai_core.model.layers import Linear
from astrai_core.model.mlp import SwiGLU

GROUPED_ROWS = 128
"""Rows an expert, on average, up to which torch's grouped product takes the same one of its kernels (2.9 to 2.13). In
deterministic mode no call has more: a row's bits must not depend on how many rows there are."""


class RouterStats:
    """What the routers of one pass did, document by document.

    The balance of a document of T tokens, K of E experts a token, is ``sum_i f_i P_i`` with
    ``f_i = E / (K T) * tokens sent to expert i`` and P_i the mean of its probabilities (DeepSeek-V3, arXiv 2412.19437,
    equations 17 to 20, sequence-wise). It is 1 where the experts share evenly; the gradient goes through P alone.
    transformers' ``load_balancing_loss_func`` of one layer gives K times as much.

    Parameters
    ----------
    documents
        ``[tokens]`` int64: the document of each token, counted over the batch; `n_documents` stands for padding, which
        is left out.
    n_documents
        Documents of the batch.

    Attributes
    ----------
    balances
        Layer -> ``[documents]`` float32 with graph. By layer, so that recomputation in the backward pass adds nothing.
    spreads
        Layer -> ``[2, documents]`` float32 without graph: the mean over a document's tokens of the entropy of their
        probabilities, in nats, and the largest f_i, which is 1 where the experts share evenly.
    """

    # No dataclass: FSDP's hooks replace those that hold tensors with a graph by copies, and what later layers record
    # would be lost.
    def __init__(self, documents: Tensor, n_documents: int) -> None:
        self.documents = documents
        self.n_documents = n_documents
        self.balances: dict[int, Tensor] = {}
        self.spreads: dict[int, Tensor] = {}

    def record(self, layer: int, probs: Tensor, chosen: Tensor) -> None:
        """Take in one layer's routing.

        Parameters
        ----------
        probs
            ``[tokens, experts]`` float32.
        chosen
            ``[tokens, top k]`` int64.
        """
        shape = (self.n_documents + 1, probs.shape[1])
        sent = torch.zeros_like(probs).scatter_(1, chosen, 1.0).detach()
        counts = probs.new_zeros(shape).index_add(0, self.documents, sent)
        mass = probs.new_zeros(shape).index_add(0, self.documents, probs)
        lengths = counts.sum(1) / chosen.shape[1]
        scale = probs.shape[1] / (chosen.shape[1] * lengths.clamp(min=1.0).square())
        self.balances[layer] = ((counts * mass).sum(1) * scale)[:-1]
        entropy = torch.zeros_like(lengths).index_add(0, self.documents, torch.special.entr(probs.detach()).sum(1))
        busiest = counts.amax(1) * (probs.shape[1] / chosen.shape[1])
        self.spreads[layer] = (torch.stack((entropy, busiest)) / lengths.clamp(min=1.0))[:, :-1]

    def balance(self) -> Tensor:
        """Return the mean over the layers, ``[documents]`` float32."""
        return torch.stack(list(self.balances.values())).mean(0)

    def spread(self) -> Tensor:
        """Return the mean over the layers of entropy and largest share, ``[2, documents]`` float32 without graph."""
        return torch.stack(list(self.spreads.values())).mean(0)


class ExpertLinear(nn.Module):
    """One projection of every expert, stored as a stack.

    Parameters
    ----------
    n_experts
        Of the stack.
    in_features
        Columns of each.
    row_groups
        Name of each part of an expert's projection -> its rows, in storage order; see `FusedLinear`.
    """

    def __init__(self, n_experts: int, in_features: int, row_groups: Mapping[str, int]) -> None:
        super().__init__()
        self.row_groups = dict(row_groups)
        self.weight = nn.Parameter(torch.empty(n_experts, sum(row_groups.values()), in_features))

    def row_ranges(self) -> dict[str, tuple[int, int]]:
        """Return name -> half-open range of rows."""
        ranges, start = {}, 0
        for name, rows in self.row_groups.items():
            ranges[name] = (start, start + rows)
            start += rows
        return ranges

    @property
    def can_group(self) -> bool:
        """Whether torch multiplies the whole stack in one launch that reads the experts' shares on the device.

        ``torch._grouped_mm`` (public as ``torch.nn.functional.grouped_mm`` from torch 2.10 on) does so for bf16 on compute
        capability 9 or 10, rows at multiples of 16 bytes; elsewhere it reads the shares back, as the loop here does.
        """
        weight = self.weight
        if not (weight.is_cuda and weight.dtype == torch.bfloat16 and weight.is_contiguous()):
            return False
        n_experts, rows, columns = weight.shape
        aligned = rows % 8 == 0 and columns % 8 == 0 and weight.storage_offset() % 8 == 0
        return aligned and n_experts < 1024 and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)

    def forward(self, x: Tensor, shares: Tensor | Sequence[int]) -> Tensor:
        """Project tokens that are sorted by expert.

        Parameters
        ----------
        x
            ``[tokens, in_features]``.
        shares
            Where each expert's tokens end, ``[experts]`` int32 on x's device, if :attr:`can_group`; else how many there
            are.

        Returns
        -------
        ``[tokens, rows]``
        """
        if isinstance(shares, Tensor):
            return self._grouped(x, shares)
        parts = zip(x.split(list(shares)), self.weight, strict=True)
        return torch.cat([linear_ops.linear(tokens, weight) for tokens, weight in parts])

    def _grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        weight = self.weight.transpose(1, 2)
        n_tokens = len(x)
        most = GROUPED_ROWS * len(weight) if torch.are_deterministic_algorithms_enabled() else n_tokens
        if n_tokens <= most:
            return torch._grouped_mm(x, weight, offs=ends)
        starts = range(0, n_tokens, most)
        pieces = [(start, x[start : start + most]) for start in starts]
        return torch.cat(
            [torch._grouped_mm(rows, weight, offs=(ends - start).clamp(0, len(rows))) for start, rows in pieces]
        )


class Experts(nn.Module):
    """Gated feed-forward layers of one shape."""

    def __init__(self, n_experts: int, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = ExpertLinear(n_experts, hidden_size, {"gate_proj": width, "up_proj": width})
        self.down_proj = ExpertLinear(n_experts, width, {"down_proj": hidden_size})

    @property
    def supports_graph(self) -> bool:
        """Whether a pass without gradients reads nothing back from the device."""
        return self.gate_up_proj.can_group and self.down_proj.can_group

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Map tokens sorted by expert.

        Parameters
        ----------
        x
            ``[tokens, hidden]``.
        ends
            ``[experts]`` int32: where each expert's tokens end.
        """
        shares: Tensor | list[int] = ends
        # The gradient of a grouped product has rules of its own about shares, which differ between versions of torch.
        if torch.is_grad_enabled() or not self.supports_graph:
            shares = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return self.down_proj(ops.swiglu(self.gate_up_proj(x, shares)), shares)


class SparseMoE(nn.Module):
    """Top-k experts under a softmax router (arXiv 1701.06538; as in Qwen2-MoE and Qwen3-MoE).

    All experts' probabilities are one softmax; the k highest weigh their experts' outputs, brought to a sum of 1 if
    ``norm_topk_prob``. A shared expert, which every token goes through, is weighed by a sigmoid gate of its own.

    Parameters
    ----------
    config
        With ``num_experts``.
    layer
        Number of the decoder layer.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        n_experts, top_k, width = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
        assert n_experts is not None and top_k is not None and width is not None, "checked by ModelConfig"
        self.layer = layer
        self.top_k = top_k
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = Linear(config.hidden_size, n_experts, bias=False)
        self.experts = Experts(n_experts, config.hidden_size, width)
        shared = config.shared_expert_intermediate_size
        self.shared_expert = None if shared is None else SwiGLU(config, shared)
        self.shared_expert_gate = None if shared is None else Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor, stats: RouterStats | None = None) -> Tensor:
        """Map ``[..., hidden]`` to ``[..., hidden]``, and tell `stats` about the routing."""
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.gate(tokens)
        probs = logits.softmax(-1, dtype=torch.float32)
        weights, chosen = probs.topk(self.top_k, -1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        if stats is not None:
            stats.record(self.layer, probs, chosen)
        # Sorted by expert and back by the inverse order: sums over a token's experts have one order on every device.
        experts, order = chosen.flatten().sort(stable=True)
        every = torch.arange(probs.shape[1], device=experts.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        out = self.experts(tokens[order // self.top_k], ends)
        # In x's shape from here on: FSDP warns of a block that returns a view.
        out = out[order.argsort()].view(*x.shape[:-1], self.top_k, -1)
        mixed = (out * weights.to(logits.dtype).view(*x.shape[:-1], self.top_k, 1)).sum(-2)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            mixed = mixed + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return mixed
