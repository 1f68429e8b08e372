"""Shards: every rank holds a part of each weight, gradient and optimizer state (FSDP2, ``fully_shard``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from astrai_core.model.lora import apply_lora
from astrai_train.parallel.mode import ParallelMode

if TYPE_CHECKING:
    from astrai_core.model.transformer import CausalLM
    from astrai_train.data.collate import TrainBatch
    from astrai_train.parallel.world import World
    from astrai_train.strategy.base import BaseStrategy, LossOutput


class FSDP(ParallelMode):
    """Each decoder block is gathered and freed by itself; embedding, final norm and projection are one more unit.

    That last unit stays gathered from the forward to the end of the backward pass: strategies project hidden states
    themselves, after the model's forward pass, and a tied weight is used at both ends.

    Parameters
    ----------
    world
        The ranks.
    reshard_after_forward
        Free a block's weights after its forward pass and gather them again for its backward pass, and send the
        gradients of every micro-batch on. Otherwise weights and summed gradients stay whole on every rank until the
        step's last backward pass: one exchange a step (row TR4).
    dtype
        ``precision.dtype`` of the recipe. Under ``bf16_mixed`` the blocks are gathered in bfloat16; gradients are added
        up in float32 always.
    """

    def __init__(self, world: World, *, reshard_after_forward: bool, dtype: str) -> None:
        super().__init__(world)
        self.reshard_after_forward = reshard_after_forward
        self._block_dtype = torch.bfloat16 if dtype == "bf16_mixed" else None
        self._root: FSDPModule | None = None

    def prepare(self, model: CausalLM) -> None:
        """Shard the model in place, by rows; names and ties stay."""
        mesh = init_device_mesh(self.world.device.type, (self.world.size,), mesh_dim_names=("data",))
        # The residual stream stays in the dtype that it has in one process.
        policies = [
            MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            for dtype in (self._block_dtype, None)
        ]
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policies[0], reshard_after_forward=self.reshard_after_forward)
        self._root = fully_shard(model, mesh=mesh, mp_policy=policies[1], reshard_after_forward=False)
        register_fsdp_forward_method(model, "hidden_states")
        for module in _units(model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def loss(self, strategy: BaseStrategy, batch: TrainBatch, *, last: bool) -> LossOutput:
        """Compute the loss; see `reshard_after_forward` for what is exchanged when."""
        assert self._root is not None, "prepare comes first"
        self._root.set_is_last_backward(last)
        if not self.reshard_after_forward:
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)
        return strategy(batch)

    def end_evaluation(self, model: CausalLM) -> None:
        """Free what was gathered: the parameters are the shards again."""
        for module in _units(model):
            module.reshard()

    @torch.no_grad()
    def whole(self, model: CausalLM) -> CausalLM | None:
        """Gather one weight after another; rank 0 keeps them, as a model of its own on the host (row D1)."""
        gathered: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if self.world.is_first:
                gathered[name] = full.to("cpu", copy=True)
        if not self.world.is_first:
            return None
        with torch.device("meta"):
            twin = type(model)(model.config)
            if model.lora is not None:
                apply_lora(twin, model.lora)
        twin.load_state_dict(gathered, assign=True, strict=False)
        twin.tie_weights()
        return twin

    def add_up_shards(self, values: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        return self.world.add_up(values)

    @torch.no_grad()
    def total_norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Add up the squares of the shards' norms; float64, since the square of a float32 norm may not be finite."""
        norm = super().total_norm(grads).double()
        return self.world.add_up(norm.square()).sqrt().float()


def _units(model: CausalLM) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
