"""The optimizers of a recipe: one object over the parts (Muon, AdamW, ...) that share out a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from astrai_core.errors import CheckpointError
from astrai_train.optim.lr_schedule import LRSchedule

COUNTER = "steps"
"""Key of a group's own count of finished steps, for the optimizers whose step depends on it."""

_MOVING = frozenset({"lr", COUNTER, "params", "param_names"})
"""Keys of a group that change during a run, or that are not options."""


class CompositeOptimizer(Optimizer):
    """Several optimizers that act as one.

    It is a torch optimizer in all respects: its ``param_groups`` are the parts' groups, its ``state`` their state, and
    ``state_dict`` has torch's own flat form, whatever the parts are.

    Parameters
    ----------
    parts
        Name of each part -> the optimizer, whose groups become this object's; parameters must not overlap. Each group
        gets its part's name as ``part`` and its learning rate as ``base_lr``.

    Attributes
    ----------
    parts
        As given; their ``param_groups`` and ``state`` are shared with this object.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)
        groups: list[dict[str, Any]] = []
        for name, part in self.parts.items():
            for group in part.param_groups:
                group["part"] = name
                group.setdefault("base_lr", group["lr"])
                groups.append(group)
        super().__init__(groups, {})
        self._share()

    def set_lr(self, schedule: LRSchedule, step: int) -> None:
        """Give every group the learning rate that `schedule` has for optimizer step `step` (counted from 0).

        A group's rate follows from the step and its ``base_lr`` alone, so nothing of the schedule needs saving.
        """
        for group in self.param_groups:
            group["lr"] = schedule(step, group["base_lr"])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; run `closure` first, exactly once (row O1).

        Returns
        -------
        What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss

    @property
    def can_decide_on_device(self) -> bool:
        """Whether :meth:`step_if` is there for these parts: torch's fused AdamW on whole weights, and no other."""
        fused = all(isinstance(part, AdamW) and part.defaults["fused"] for part in self.parts.values())
        return fused and not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"])

    def step_if(self, good: Tensor) -> None:
        """Do :meth:`step`, but let weights and state be what they are if `good`, a bool on their device, is False.

        Nothing is read back: the host goes on while the device decides, by the flag of the fused kernels that
        ``torch.amp.GradScaler`` sets too.
        """
        flag = (~good).float()
        for part in self.parts.values():
            part.found_inf = flag  # type: ignore[attr-defined]  # looked up by name in torch's step
        try:
            self.step()
        finally:
            for part in self.parts.values():
                del part.found_inf  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit.

        Raises
        ------
        CheckpointError
            If the state is of another optimizer, of other parameters, or was saved with other options.
        """
        self._check_saved(state_dict)
        # An option that a newer torch has added is missing from the file: it keeps the value it has here.
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        merged = [{**group, **saved} for group, saved in groups]
        super().load_state_dict({**state_dict, "param_groups": merged})
        self._restore_dtypes(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let the parts work on this object's groups and state: loading replaces both."""
        for name, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["part"] == name]
            part.state = self.state

    def _check_saved(self, state_dict: Mapping[str, Any]) -> None:
        saved_groups = state_dict["param_groups"]
        if len(saved_groups) != len(self.param_groups):
            raise CheckpointError(
                f"the saved optimizer has {len(saved_groups)} parameter groups, this one {len(self.param_groups)}; "
                "resume with the recipe that it was saved with"
            )
        for saved, group in zip(saved_groups, self.param_groups, strict=True):
            where = f"of the part {group['part']!r}"
            # In order: torch gives the saved state to parameters by their position.
            if saved.get("param_names") != group["param_names"]:
                raise CheckpointError(
                    f"the saved optimizer's parameters {where} are not this model's; "
                    "resume with the model and recipe that it was saved with"
                )
            for key in sorted((saved.keys() & group.keys()) - _MOVING):
                if _plain(saved.get(key)) != _plain(group.get(key)):
                    raise CheckpointError(
                        f"optimizer option {key!r} {where} is {group.get(key)!r}, the checkpoint has "
                        f"{saved.get(key)!r}; resume with that value"
                    )

    def _restore_dtypes(self, state_dict: Mapping[str, Any]) -> None:
        """Put back what torch rounded: it loads state in the parameter's dtype, float32 state of bf16 ones included."""
        saved = state_dict["state"]
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(ids, parameters, strict=True):
            for key, value in saved.get(index, {}).items():
                loaded = self.state[parameter][key]
                if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                    self.state[parameter][key] = value.to(loaded.device)


def _plain(value: object) -> object:
    """Sequences compare by content: a file may turn tuples into lists."""
    return tuple(value) if isinstance(value, list) else value
