"""Several low-rank adapters beside one base, each row of a batch with its own: their factors at fixed addresses.

Training's adapters (:mod:`astrai_core.model.lora`) are the model's own parameters; those here belong to whoever serves it,
come and go while it runs, and never touch a weight (S-LoRA, arXiv 2311.03285; Punica, arXiv 2310.18547).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from astrai_core import linear_ops
from astrai_core.config.lora import ATTENTION_AND_MLP
from astrai_core.errors import ConfigError
from astrai_core.model.layers import Linear
from astrai_core.model.lora import projections

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM


class SlotFactors(nn.Module):
    """The factors of every slot for neighbouring parts of one projection, and of a fused one's parts side by side.

    Parts share a pair of factors as long as their ranks fit into one pass: A holds theirs one below the other, B theirs
    in the rows and columns that are a part's own, zeros elsewhere. So q, k and v are two launches and not six.

    Parameters
    ----------
    linear
        The projection.
    rows
        Dotted Hugging Face name of each part -> its half-open range of rows, in storage order.
    n_slots, rank
        Of the slots.
    """

    a: Tensor
    b: Tensor

    def __init__(self, linear: Linear, rows: Mapping[str, tuple[int, int]], n_slots: int, rank: int) -> None:
        super().__init__()
        ranges = list(rows.values())
        self.start, self.stop = ranges[0][0], ranges[-1][1]
        self._rank = rank
        self.parts = {
            name: (i, start - self.start, stop - self.start) for i, (name, (start, stop)) in enumerate(rows.items())
        }
        like = linear.weight.detach()
        width = len(rows) * rank
        self.register_buffer("a", like.new_zeros(n_slots, width, linear.in_features), persistent=False)
        self.register_buffer("b", like.new_zeros(n_slots, self.stop - self.start, width), persistent=False)

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Let a slot add nothing."""
        self.a[slot].zero_()
        self.b[slot].zero_()

    @torch.no_grad()
    def write(self, slot: int, name: str, a: Tensor, b: Tensor) -> None:
        """Put the factors ``[r, in_features]`` and ``[part's rows, r]`` of one part into a cleared slot."""
        i, start, stop = self.parts[name]
        first, last = i * self._rank, i * self._rank + a.shape[0]
        self.a[slot, first:last].copy_(a)
        self.b[slot, start:stop, first:last].copy_(b)


class SlotLoRA(nn.Module):
    """What :attr:`Linear.adapter` is while slots are attached to a model."""

    def __init__(self, linear: Linear, rows: Mapping[str, tuple[int, int]], slots: AdapterSlots) -> None:
        super().__init__()
        self._slots = slots
        names = list(rows)
        most = linear_ops.LORA_RANK // slots.rank
        for i in range(0, len(names), most):
            some = {name: rows[name] for name in names[i : i + most]}
            self.add_module(str(i), SlotFactors(linear, some, slots.n_slots, slots.rank))

    def factors(self) -> Iterator[SlotFactors]:
        """Yield the factors of neighbouring parts, in storage order."""
        for module in self.children():
            assert isinstance(module, SlotFactors), "only factors are added"
            yield module

    def forward(self, x: Tensor, base: Tensor) -> Tensor:
        """Return `base` plus what the adapter of each row makes of `x`; `base` is overwritten.

        Parameters
        ----------
        x
            ``[..., in_features]``.
        base
            ``[..., out_features]``: what the projection itself makes of it.
        """
        ids = self._slots.adapter_ids
        if ids is None:
            return base
        inputs, outputs = x.reshape(-1, x.shape[-1]), base.view(-1, base.shape[-1])
        for each in self.factors():
            part = outputs[:, each.start : each.stop]
            linear_ops.add_lora_inplace(part, inputs, each.a, each.b, ids, self._slots.scaling)
        return base


class AdapterSlots:
    """Room for adapters on the projections of every layer of a model, allocated once and attached to it.

    Outside of :meth:`applied` the model computes what it would without.

    Parameters
    ----------
    model
        Without adapters of its own.
    n_slots
        Adapters that there is room for.
    rank
        Largest rank of one: a multiple of 8 up to :data:`astrai_core.ops.LORA_RANK`.

    Raises
    ------
    ConfigError
        If the model has adapters, or a width that the kernels do not take.

    Attributes
    ----------
    shapes
        Dotted Hugging Face name of each projection with room -> (in_features, out_features).
    scaling
        ``[n_slots]`` float32.
    adapter_ids
        Slot of each row that :meth:`applied` was given, else None.
    """

    def __init__(self, model: CausalLM, n_slots: int, rank: int) -> None:
        assert rank % 8 == 0 and 0 < rank <= linear_ops.LORA_RANK, "checked by the engine's config"
        self.model = model
        self.n_slots = n_slots
        self.rank = rank
        self.adapter_ids: Tensor | None = None
        self.scaling = torch.zeros(n_slots, device=model.device)
        self.shapes: dict[str, tuple[int, int]] = {}
        self._factors: dict[str, SlotFactors] = {}
        rows_of: dict[Linear, dict[str, tuple[int, int]]] = {}
        for name, (linear, part, rows) in projections(model):
            if part in ATTENTION_AND_MLP:
                rows_of.setdefault(linear, {})[name] = rows
                self.shapes[name] = linear.in_features, rows[1] - rows[0]
        for linear in rows_of:
            if linear.adapter is not None:
                raise ConfigError("adapters cannot be served beside those that the model has already; merge them first")
            if model.device.type == "cuda" and linear.in_features % 8:
                raise ConfigError(
                    f"adapters need widths that are multiples of 8 on a CUDA device, the model has {linear.in_features}; "
                    "merge the adapter into the model"
                )
        self._linears = tuple(rows_of)
        for linear, names in rows_of.items():
            linear.adapter = adapter = SlotLoRA(linear, names, self)
            for factors in adapter.factors():
                self._factors.update(dict.fromkeys(factors.parts, factors))

    def detach(self) -> None:
        """Take the slots off the model. Idempotent."""
        for linear in self._linears:
            linear.adapter = None

    @contextmanager
    def applied(self, adapter_ids: Tensor) -> Iterator[None]:
        """Let the model add adapters inside.

        Parameters
        ----------
        adapter_ids
            ``[rows]`` int32 or int64, one for each token of the pass: the slot of its adapter; negative: none. Read on
            the device, so that a captured pass replays for any.
        """
        # A CPU can look before: a pass of the base alone then costs what it would without slots (a tenth less).
        idle = adapter_ids.device.type == "cpu" and not bool((adapter_ids >= 0).any())
        self.adapter_ids = None if idle else adapter_ids
        try:
            yield
        finally:
            self.adapter_ids = None

    @torch.no_grad()
    def write(self, slot: int, factors: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> None:
        """Put an adapter into a slot that no row of a running pass has.

        Parameters
        ----------
        factors
            Dotted name of a projection -> A ``[r, in]`` and B ``[out, r]``, in the model's own layout; see
            :func:`astrai_core.checkpoint.adapter.fitting_factors`.
        scale
            Factor of the adapter's output.
        """
        for each in self._factors.values():
            each.clear(slot)
        for name, (a, b) in factors.items():
            self._factors[name].write(slot, name, a, b)
        self.scaling[slot] = scale
