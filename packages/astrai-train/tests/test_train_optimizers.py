"""Optimizers as a recipe names them: groups, options, closures, schedules and exact resume (rows O1, O2, O3)."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from astrai_core import ModelConfig
from astrai_core.errors import CheckpointError, ConfigError, RegistryError
from astrai_core.model.transformer import CausalLM
from astrai_train import AdamWConfig, ManoAdamWConfig, MuonAdamWConfig, NoraNAdamWConfig
from astrai_train.optim.composite import CompositeOptimizer
from astrai_train.optim.groups import OptimizerFactory, decay_groups, optimized_parameters
from astrai_train.optim.lr_schedule import LRScheduleFactory

CONFIGS = {
    "adamw": AdamWConfig(lr=1e-2),
    "muon_adamw": MuonAdamWConfig(lr=1e-2),
    "mano_adamw": ManoAdamWConfig(lr=1e-2),
    "nora_nadamw": NoraNAdamWConfig(lr=1e-2),
}
NAMES = list(CONFIGS)
MATRICES = NAMES[1:]


def tiny(tied: bool = True, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = ModelConfig.from_dict(
        {
            "model_type": "qwen2",
            "vocab_size": 24,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 16,
            "tie_word_embeddings": tied,
        }
    )
    model = CausalLM(config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model.to(dtype)


def build(name: str, model: nn.Module, **changes: Any) -> CompositeOptimizer:
    options = CONFIGS[name].to_dict() | changes
    del options["name"]
    optimizer = OptimizerFactory.create(name, model, **options)
    assert isinstance(optimizer, CompositeOptimizer)
    return optimizer


def train(model: nn.Module, optimizer: CompositeOptimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint holds it: read without executing anything."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class TestGroups:
    def test_roles(self) -> None:
        items = {item.name: item for item in optimized_parameters(tiny(tied=False))}
        layer = "model.layers.0."
        assert {name: item.role for name, item in items.items()} == {
            "model.embed_tokens.weight": "embedding",
            f"{layer}input_layernorm.weight": "norm",
            f"{layer}self_attn.qkv_proj.weight": "matrix",
            f"{layer}self_attn.qkv_proj.bias": "bias",
            f"{layer}self_attn.o_proj.weight": "matrix",
            f"{layer}post_attention_layernorm.weight": "norm",
            f"{layer}mlp.gate_up_proj.weight": "matrix",
            f"{layer}mlp.down_proj.weight": "matrix",
            "model.norm.weight": "norm",
            "lm_head.weight": "head",
        }
        assert items[f"{layer}self_attn.qkv_proj.weight"].row_groups == (8, 4, 4)
        assert items[f"{layer}mlp.gate_up_proj.weight"].row_groups == (12, 12)
        assert items[f"{layer}mlp.down_proj.weight"].row_groups == ()
        assert items[f"{layer}self_attn.qkv_proj.bias"].row_groups == ()

    def test_tied_weight_is_one_embedding(self) -> None:
        model = tiny(tied=True)
        tables = [item for item in optimized_parameters(model) if item.parameter is model.lm_head.weight]
        assert [(item.name, item.role) for item in tables] == [("model.embed_tokens.weight", "embedding")]

    def test_head_met_before_its_embedding(self) -> None:
        """The role of a tied weight does not hang on the order of the modules."""
        model = nn.ModuleDict({"lm_head": nn.Linear(4, 6, bias=False), "table": nn.Embedding(6, 4)})
        model["table"].weight = model["lm_head"].weight
        (item,) = optimized_parameters(model)
        assert (item.name, item.role) == ("lm_head.weight", "embedding")

    def test_adapters_routers_convolutions_scalars(self) -> None:
        """Maths 1: low-rank factors and routers are not hidden matrices."""

        class Part(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lora_A = nn.Linear(4, 2, bias=False)
                self.router = nn.Linear(4, 3, bias=False)
                self.conv = nn.Conv1d(4, 4, 3, bias=False)
                self.experts = nn.Parameter(torch.zeros(3, 4, 4))
                self.temperature = nn.Parameter(torch.zeros(()))
                self.frozen = nn.Linear(4, 4).requires_grad_(False)

        assert {item.name: item.role for item in optimized_parameters(Part())} == {
            "lora_A.weight": "projection",
            "router.weight": "projection",
            "conv.weight": "other",
            "experts": "matrix",
            "temperature": "other",
        }

    def test_names_are_free_of_wrappers(self) -> None:
        """Training rule 7."""
        model = tiny()
        wrapped = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"module": model})})  # as torch.compile and DDP name it
        assert [item.name for item in optimized_parameters(wrapped)] == [i.name for i in optimized_parameters(model)]

    def test_decay(self) -> None:
        decayed, plain = decay_groups(optimized_parameters(tiny(tied=False)), 0.3)
        assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
        assert {name for name, _ in plain["params"] if not name.endswith(("norm.weight", "bias"))} == set()
        assert {parameter.ndim for _, parameter in decayed["params"]} == {2}
        assert len(decayed["params"]) + len(plain["params"]) == 10
        without, _ = decay_groups(optimized_parameters(tiny()), 0.3, decay_embeddings=False)
        assert "model.embed_tokens.weight" not in {name for name, _ in without["params"]}

    def test_nothing_to_train(self) -> None:
        with pytest.raises(ConfigError, match="no trainable parameter"):
            build("adamw", tiny().requires_grad_(False))

    @pytest.mark.parametrize("name", MATRICES)
    def test_no_matrix_is_refused(self, name: str) -> None:
        """Asked for by name, a matrix optimizer never turns into its companion alone."""
        model = tiny()
        for item in optimized_parameters(model):
            item.parameter.requires_grad_(item.role != "matrix")
        with pytest.raises(ConfigError, match=f"{name!r} found no trainable hidden matrix"):
            build(name, model)


class TestOptions:
    def test_registered(self) -> None:
        """O1."""
        assert OptimizerFactory.names() == sorted(NAMES)

    @pytest.mark.parametrize("name", NAMES)
    def test_every_parameter_once(self, name: str) -> None:
        model = tiny()
        held = [id(p) for group in build(name, model).param_groups for p in group["params"]]
        assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())

    @pytest.mark.parametrize("name", NAMES)
    def test_unknown_option_is_refused(self, name: str) -> None:
        with pytest.raises(RegistryError, match="warmth"):
            build(name, tiny(), warmth=1)

    @pytest.mark.parametrize(
        ("name", "options", "found"),
        [
            ("adamw", {"betas": (0.8, 0.7), "eps": 1e-6, "weight_decay": 0.3}, ("betas", "eps", "weight_decay")),
            (
                "muon_adamw",
                {
                    "weight_decay": 0.3,
                    "muon_momentum": 0.8,
                    "muon_nesterov": False,
                    "muon_ns_steps": 3,
                    "muon_ns_coefficients": (2.0, -1.5, 0.5),
                    "muon_ns_dtype": "fp32",
                    "muon_eps": 1e-6,
                    "muon_scale": "original",
                },
                (
                    "weight_decay",
                    "momentum",
                    "nesterov",
                    "ns_steps",
                    "ns_coefficients",
                    "ns_dtype",
                    "eps",
                    "scale",
                ),
            ),
            (
                "mano_adamw",
                {"weight_decay": 0.3, "mano_momentum": 0.8, "mano_nesterov": False, "mano_eps": 1e-6},
                ("weight_decay", "momentum", "nesterov", "eps"),
            ),
            (
                "nora_nadamw",
                {"weight_decay": 0.3, "nora_beta": 0.8, "nora_momentum": 0.7, "nora_eps": 1e-6},
                ("weight_decay", "beta", "momentum", "eps"),
            ),
        ],
    )
    def test_options_reach_the_groups(self, name: str, options: dict[str, Any], found: tuple[str, ...]) -> None:
        group = build(name, tiny(), lr=0.5, **options).param_groups[0]
        assert group["lr"] == group["base_lr"] == 0.5
        assert tuple(group[key] for key in found) == tuple(options.values())

    @pytest.mark.parametrize(
        ("name", "prefix"), [("muon_adamw", "adamw"), ("mano_adamw", "adamw"), ("nora_nadamw", "nadamw")]
    )
    def test_options_reach_the_companion(self, name: str, prefix: str) -> None:
        changes = {"lr": 0.5, "betas": (0.8, 0.7), "eps": 1e-6, "weight_decay": 0.3}
        optimizer = build(name, tiny(), **{f"{prefix}_{key}": value for key, value in changes.items()})
        decayed, plain = (group for group in optimizer.param_groups if group["part"] == prefix)
        assert {key: decayed[key] for key in changes} == changes
        assert {key: plain[key] for key in changes} == changes | {"weight_decay": 0.0}
        assert decayed["param_names"] == ["model.embed_tokens.weight"]
        assert optimizer.param_groups[0]["lr"] == 1e-2

    def test_mano_companion_is_torchs_fused_adamw(self) -> None:
        """O3."""
        optimizer = build("mano_adamw", tiny())
        companion = optimizer.parts["adamw"]
        assert type(companion) is torch.optim.AdamW
        assert {(g["fused"], g["betas"], g["lr"]) for g in companion.param_groups} == {(True, (0.9, 0.95), 1e-2)}

    def test_adamw_equals_torch(self) -> None:
        mine, theirs = tiny(), tiny()
        items = optimized_parameters(theirs)
        reference = torch.optim.AdamW(
            [
                {"params": [i.parameter for i in items if i.parameter.ndim == 2], "weight_decay": 0.1},
                {"params": [i.parameter for i in items if i.parameter.ndim == 1], "weight_decay": 0.0},
            ],
            lr=1e-2,
            betas=(0.9, 0.95),
            fused=False,
        )
        train(mine, build("adamw", mine), range(3))
        train(theirs, reference, range(3))  # type: ignore[arg-type]
        torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
class TestStep:
    def test_closure_runs_once(self, name: str) -> None:
        """O1: once a step, with gradients, before any part moves."""
        model = tiny()
        optimizer = build(name, model)
        before, calls = weights(model), []

        def closure() -> float:
            calls.append(all(torch.equal(value, before[key]) for key, value in weights(model).items()))
            optimizer.zero_grad()
            loss = model(torch.arange(8)[None]).logits.square().mean()
            loss.backward()
            return loss.item()

        loss = optimizer.step(closure)
        assert calls == [True]
        assert loss > 0
        moved = {key for key, value in weights(model).items() if not torch.equal(value, before[key])}
        assert moved == set(before)

    def test_zero_grad(self, name: str) -> None:
        model = tiny()
        optimizer = build(name, model)
        model(torch.arange(8)[None]).logits.sum().backward()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        before = weights(model)
        optimizer.step()
        assert all(torch.equal(value, before[key]) for key, value in weights(model).items())

    def test_learns(self, name: str) -> None:
        """Thirty steps on one batch, at a learning rate that suits all of them."""
        model = tiny()
        optimizer = build(name, model, lr=1e-2)
        ids = torch.randint(24, (2, 12), generator=torch.Generator().manual_seed(0))
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]

    def test_schedule_scales_each_base(self, name: str) -> None:
        optimizer = build(name, tiny(), **({} if name == "adamw" else {f"{name.partition('_')[2]}_lr": 4e-2}))
        schedule = LRScheduleFactory.create("constant", total_steps=100, warmup=10)
        for step in (4, 0):
            optimizer.set_lr(schedule, step)
            assert [g["lr"] for g in optimizer.param_groups] == [
                g["base_lr"] * (step + 1) / 10 for g in optimizer.param_groups
            ]
            assert all(g["lr"] < g["base_lr"] for part in optimizer.parts.values() for g in part.param_groups)
        assert {g["base_lr"] for g in optimizer.param_groups} == ({1e-2} if name == "adamw" else {1e-2, 4e-2})


@pytest.mark.parametrize("name", NAMES)
class TestResume:
    """Training rule 5; maths 3: after an odd number of steps Mano goes on with the rows."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bit_exact(self, name: str, dtype: torch.dtype) -> None:
        straight = tiny(dtype=dtype)
        train(straight, build(name, straight), range(3))

        first = tiny(dtype=dtype)
        optimizer = build(name, first)
        train(first, optimizer, range(1))
        state, values = through_file(optimizer.state_dict()), first.state_dict()

        second = tiny(dtype=dtype)
        second.load_state_dict(values)
        resumed = build(name, second)
        resumed.load_state_dict(state)
        train(second, resumed, range(1, 3))
        for key, value in weights(straight).items():
            assert torch.equal(value, second.get_parameter(key)), key
        assert_same_state(resumed.state_dict(), through_file(resumed.state_dict()))

    def test_loading_twice_is_loading_once(self, name: str) -> None:
        """The parts follow when loading replaces groups and state."""
        model = tiny()
        optimizer = build(name, model)
        train(model, optimizer, range(1))
        values, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        outcomes = []
        for _ in range(2):
            model.load_state_dict(values)
            optimizer.load_state_dict(copy.deepcopy(state))  # torch works on the tensors that it is given
            train(model, optimizer, range(1, 3))
            outcomes.append(weights(model))
        assert all(torch.equal(outcomes[0][key], outcomes[1][key]) for key in outcomes[0])

    def test_copy_goes_its_own_way(self, name: str) -> None:
        model = tiny()
        optimizer = build(name, model)
        train(model, optimizer, range(1))
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        kept = weights(model)
        train(twin, twin_optimizer, range(1, 2))
        assert all(torch.equal(value, kept[key]) for key, value in weights(model).items())
        train(model, optimizer, range(1, 2))
        assert all(torch.equal(value, weights(twin)[key]) for key, value in weights(model).items())

    def test_other_options_are_refused(self, name: str) -> None:
        model = tiny()
        saved = build(name, model, weight_decay=0.2).state_dict()
        with pytest.raises(CheckpointError, match=r"option 'weight_decay' .* the checkpoint has 0.2"):
            build(name, model).load_state_dict(saved)

    def test_other_model_is_refused(self, name: str) -> None:
        saved = build(name, tiny(tied=False)).state_dict()
        with pytest.raises(CheckpointError, match="not this model's"):
            build(name, tiny()).load_state_dict(saved)


def test_other_optimizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="parameter groups"):
        build("muon_adamw", tiny()).load_state_dict(build("adamw", tiny()).state_dict())
    with pytest.raises(CheckpointError, match=r"option|not this model's"):
        build("muon_adamw", tiny()).load_state_dict(build("mano_adamw", tiny()).state_dict())


def assert_same_state(state: Any, other: Any) -> None:
    """Equal in every value and dtype."""
    if isinstance(state, dict):
        assert state.keys() == other.keys()
        for key in state:
            assert_same_state(state[key], other[key])
    elif isinstance(state, Tensor):
        assert state.dtype == other.dtype
        assert torch.equal(state, other)
    else:
        assert state == other
