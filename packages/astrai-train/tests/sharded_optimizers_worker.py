"""One rank of test_train_sharded_optimizers.py: train a model that is sharded, print what became of its weights.

python sharded_optimizers_worker.py STORE_FILE RANK WORLD_SIZE DEVICE
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from astrai_core import ModelConfig
from astrai_core.errors import ConfigError
from astrai_core.model.transformer import CausalLM
from astrai_train import AdamWConfig, ManoAdamWConfig, MuonAdamWConfig, NoraNAdamWConfig
from astrai_train.metrics.grad_snr import GradSNRTracker
from astrai_train.optim.groups import OptimizerFactory, optimized_parameters, trainable

CONFIGS = (
    AdamWConfig(lr=1e-2),
    MuonAdamWConfig(lr=1e-2, muon_ns_dtype="fp32"),
    ManoAdamWConfig(lr=1e-2),
    NoraNAdamWConfig(lr=1e-2),
)
STEPS = 4


def build_model(device: str) -> CausalLM:
    # Two ranks cut qkv_proj (6 + 2 + 2 rows) within q, and the projections to 9 hidden units into 5 and 4 rows.
    config = ModelConfig.from_dict(
        {
            "model_type": "qwen2",
            "vocab_size": 23,
            "hidden_size": 9,
            "head_dim": 2,
            "intermediate_size": 7,
            "num_hidden_layers": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "max_position_embeddings": 16,
            "tie_word_embeddings": True,
        }
    )
    model = CausalLM(config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model.to(device)


def shard(model: CausalLM, mesh: Any) -> CausalLM:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for _, parameter in trainable(model):
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = grad


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(trainable(model), trainable(other), strict=True)
    return max(float((whole(a) - whole(b)).detach().abs().max()) for (_, a), (_, b) in pairs)


def run(config: Any, mesh: Any) -> dict[str, Any]:
    options = config.to_dict()
    name = options.pop("name")
    alone = build_model(mesh.device_type)
    sharded, resumed = (shard(build_model(mesh.device_type), mesh) for _ in range(2))
    optimizer = OptimizerFactory.create(name, alone, **options)
    sharded_optimizer = OptimizerFactory.create(name, sharded, **options)
    trackers = [GradSNRTracker(trainable(model), 0.9) for model in (alone, sharded)]
    for step in range(STEPS):
        for model, moves, tracker in zip((alone, sharded), (optimizer, sharded_optimizer), trackers, strict=True):
            give_gradients(model, step)
            tracker.update()
            moves.step()
        if step == 0:
            saved = copy.deepcopy(get_optimizer_state_dict(sharded, sharded_optimizer))
            resumed.load_state_dict(sharded.state_dict())
            resumed_optimizer = OptimizerFactory.create(name, resumed, **options)
            set_optimizer_state_dict(resumed, resumed_optimizer, saved)
            continue
        give_gradients(resumed, step)
        resumed_optimizer.step()

    def add_up(sums: Tensor) -> Tensor:
        distributed.all_reduce(sums)
        return sums

    return {
        "sharded": all(isinstance(parameter, DTensor) for _, parameter in trainable(sharded)),
        "same_roles": [i.name for i in optimized_parameters(alone)] == [i.name for i in optimized_parameters(sharded)],
        "moved": difference(alone, build_model(mesh.device_type)),
        "difference": difference(sharded, alone),
        "resumed": difference(sharded, resumed),
        "ratios": [trackers[0].ratio(), trackers[1].ratio(add_up)],
    }


def refusals(mesh: Any) -> dict[str, str]:
    """What a column shard is answered with."""
    messages = {}
    for config in CONFIGS[2:]:
        model = build_model(mesh.device_type)
        down = model.model.layers[0].mlp.down_proj
        down.weight = nn.Parameter(distribute_tensor(down.weight.detach(), mesh, [Shard(1)]))
        options = config.to_dict()
        name = options.pop("name")
        try:
            OptimizerFactory.create(name, model, **options)
        except ConfigError as error:
            messages[name] = str(error)
    return messages


def main(store: str, rank: int, world_size: int, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    mesh = init_device_mesh(device, (world_size,))
    found = {config.name: run(config, mesh) for config in CONFIGS}
    refused = refusals(mesh)
    if rank == 0:
        print(json.dumps({"runs": found, "refused": refused}))  # noqa: T201
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
