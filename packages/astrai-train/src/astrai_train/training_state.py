"""The state of a run beside its weights: what it is made of, and how it is put back (training rule 5).

Optimizer state is kept by the names of the parameters, not by their places, and apart from the model's layout: what
some ranks saved in shards, any number of ranks takes up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from astrai_train.checkpoint import TENSORS, TrainingState, load_training_state
from astrai_train.context import TrainContext
from astrai_train.parallel.shards import SEPARATOR, read_tensors
from astrai_train.rng import rng_state

_OPTIMIZER, _GRAD_SNR, _NOISE_SCALE, _EMA = "optimizer", "grad_snr", "noise_scale", "ema"


def collect(context: TrainContext) -> TrainingState:
    """Return the state after the last step; a collective."""
    tensors: dict[str, Tensor] = {}
    optimizer = context.optimizer.state_dict()
    name_of = _names(optimizer["param_groups"])
    for index, values in optimizer["state"].items():
        tensors |= {_join(_OPTIMIZER, key, name_of[index]): value for key, value in values.items()}
    plain = {
        "counters": vars(context.counters),
        "source": context.source.state_dict(),
        "rng": context.parallel.world.gather(rng_state(context.device)),
        _OPTIMIZER: optimizer["param_groups"],
        _GRAD_SNR: None,
        _NOISE_SCALE: None if context.noise_scale is None else context.noise_scale.state_dict(),
    }
    if context.grad_snr is not None:
        state = context.grad_snr.state_dict()
        for key in ("means", "squares"):
            tensors |= {_join(_GRAD_SNR, key, name): value for name, value in state.pop(key).items()}
        plain[_GRAD_SNR] = state
    if context.ema is not None:
        tensors |= {_join(_EMA, name): value for name, value in context.ema.values.items()}
    return TrainingState(plain, tensors)


def restore(context: TrainContext, checkpoint: Path) -> Mapping[str, Any] | None:
    """Take over the state of a checkpoint; the model must hold its weights.

    Returns
    -------
    Where this rank's random streams were, to be set when all is ready; None if the ranks that saved were fewer.

    Raises
    ------
    CheckpointError
        If it belongs to another optimizer or model.
    ConfigError
        If it belongs to other data.
    """
    plain = load_training_state(checkpoint)
    parameters = {
        n: p for g in context.optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)
    }
    tensors = read_tensors(checkpoint / TENSORS, parameters)
    _restore_optimizer(context.optimizer, plain[_OPTIMIZER], tensors)
    context.source.load_state_dict(plain["source"])
    for name, value in plain["counters"].items():
        setattr(context.counters, name, value)
    if context.grad_snr is not None and plain[_GRAD_SNR] is not None:
        averages = {key: _below(tensors, _join(_GRAD_SNR, key)) for key in ("means", "squares")}
        context.grad_snr.load_state_dict({**plain[_GRAD_SNR], **averages})
    if context.noise_scale is not None and plain.get(_NOISE_SCALE) is not None:
        context.noise_scale.load_state_dict(plain[_NOISE_SCALE])
    if context.ema is not None:
        context.ema.load(_below(tensors, _EMA))
    streams: list[Mapping[str, Any]] = plain["rng"]
    rank = context.parallel.world.rank
    return streams[rank] if rank < len(streams) else None


def _restore_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]], tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    index_of = {name: index for index, name in _names(groups).items()}
    for name, value in _below(tensors, _OPTIMIZER).items():
        key, _, parameter = name.partition(SEPARATOR)
        state.setdefault(index_of[parameter], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _names(groups: list[dict[str, Any]]) -> dict[int, str]:
    """Place of each parameter in torch's flat form -> its name."""
    return {index: name for group in groups for index, name in zip(group["params"], group["param_names"], strict=True)}


def _join(*parts: str) -> str:
    return SEPARATOR.join(parts)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = prefix + SEPARATOR
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
