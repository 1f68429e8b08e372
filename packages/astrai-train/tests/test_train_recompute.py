"""Activation checkpointing and compilation: less memory or time, the same numbers and names."""

from __future__ import annotations

import collections
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from astrai_core import AutoModel, ModelConfig
from astrai_core.config.lora import LoRAConfig
from astrai_core.errors import ConfigError
from astrai_core.model.lora import apply_lora
from astrai_train import TrainConfig, compilation
from astrai_train.data.collate import Span, TrainBatch, collate
from astrai_train.metrics.memory_estimate import estimate_memory
from astrai_train.models import blank_model
from astrai_train.precision import attention_kernels, autocast, set_up_kernels
from astrai_train.recompute import KEPT, recompute_activations
from astrai_train.run import build
from astrai_train.strategy import cross_entropy
from astrai_train.strategy.seq import SeqStrategy

Recipe = Callable[..., dict[str, Any]]
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
WAYS = {
    "full": {"mode": "full"},
    "every second": {"mode": "full", "every": 2},
    "products kept": {"mode": "selective"},
    "by class": {"mode": "selective", "modules": ["SwiGLU"]},
    "by name": {"mode": "selective", "modules": ["layers.1", "layers.0.mlp.down_proj"]},
}


def make_model(**changes: Any) -> Any:
    config = ModelConfig.from_dict(SHAPE | changes)
    return AutoModel.from_config(config, device="cpu", generator=torch.Generator().manual_seed(0)).train()


def batch(*rows: tuple[int, ...]) -> TrainBatch:
    draw = np.random.default_rng(sum(map(len, rows)))
    return collate([[Span(draw.integers(0, 61, n)) for n in row] for row in rows], pad_id=0, seq_len=32)


WHOLE, PACKED = batch((32,), (32,)), batch((5, 20), (12, 20))


def gradient(strategy: SeqStrategy, data: TrainBatch) -> dict[str, torch.Tensor]:
    strategy.model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    strategy(data).loss_sum.backward()
    return {name: value.grad.clone() for name, value in strategy.model.named_parameters()}


def saved_bytes(compute: Callable[[], Any], own: Any = ()) -> int:
    """Bytes that `compute` keeps for a backward pass, storage by storage, those of the parameters `own` left out."""
    known = {parameter.untyped_storage().data_ptr() for parameter in own}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(storage.nbytes() for storage in kept.values())


def strategy_of(model: Any) -> SeqStrategy:
    return SeqStrategy(model, label_smoothing=0.0, loss_chunk_tokens=16)


# ---- recomputation ----


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputation_changes_no_gradient(way: str, dropout: float) -> None:
    """Training rule 12: bit for bit on a CPU, with dropout drawn anew from the same stream; names stay (rule 7)."""
    plain, other = (make_model(attention_dropout=dropout) for _ in range(2))
    recompute_activations(other, **WAYS[way])
    for data in (WHOLE, PACKED):
        expected, found = gradient(strategy_of(plain), data), gradient(strategy_of(other), data)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_what_is_recomputed_is_not_kept() -> None:
    """Of a block only its input: under half of the memory with every second block, under a fifth with all."""
    kept = {}
    for name, every in (("none", 0), ("second", 2), ("all", 1)):
        model = make_model()
        if every:
            names = recompute_activations(model, "full", every=every)
            assert names == [f"model.layers.{n}" for n in range(0, 4, every)]
        kept[name] = saved_bytes(lambda model=model: model.hidden_states(WHOLE.input_ids), model.parameters())
    assert kept["second"] < 0.65 * kept["none"]
    assert kept["all"] < 0.2 * kept["none"]


class Counter(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_selective_computes_no_product_again() -> None:
    """Products and attention run once forward; under ``full`` they run again in the backward pass."""
    products, attention = "aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"
    layers, counts = SHAPE["num_hidden_layers"], {}
    for mode in ("none", "selective", "full"):
        model = make_model()
        recompute_activations(model, mode)
        with Counter() as counter:
            model.hidden_states(WHOLE.input_ids).sum().backward()
        counts[mode] = counter.counts[products], counter.counts[attention]
    assert {products, attention} <= KEPT
    assert counts["none"] == counts["selective"] == (layers * 4 * 3, layers)
    # The last product of a block is not needed again: nothing behind it in the block keeps anything.
    assert counts["full"][1] == 2 * layers and counts["full"][0] >= layers * (4 * 3 + 3)


def test_a_copy_computes_with_its_own_weights() -> None:
    """A frozen copy of a model is no alias of it."""
    model = make_model()
    recompute_activations(model, "full")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twin.hidden_states(WHOLE.input_ids).abs().sum() > 0


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["SwiGlu"], "no module 'SwiGlu' \\(did you mean 'SwiGLU'"),
        (["DecoderBlock", "mlp"], "model.layers.0.mlp lies in model.layers.0"),
    ],
)
def test_modules_that_do_not_fit_are_refused(modules: list[str], message: str) -> None:
    """Row CF2."""
    with pytest.raises(ConfigError, match=f"gradient_checkpointing_modules': .*{message}"):
        recompute_activations(make_model(), "selective", modules=modules)


# ---- compilation ----


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile traces, differentiates and partitions, but generates no code, which would take a minute."""
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    piece = torch.compile(cross_entropy.loss_and_gradient, backend="aot_eager")
    monkeypatch.setattr(cross_entropy, "_compiled_piece", lambda: piece)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_gradients_are_the_same(eager_backend: None) -> None:
    """Training rule 12: rows of one document, of several, training and evaluation; layers share one compilation."""
    plain, other = make_model(num_hidden_layers=3), make_model(num_hidden_layers=3)
    recompute_activations(other, "selective")
    strategy = strategy_of(other)
    torch._dynamo.utils.counters.clear()
    compilation.compile_training(other, strategy, "default")
    assert strategy.compiled
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for data in (WHOLE, PACKED, batch((7, 9), (3, 4, 25))):
        expected, found = gradient(strategy_of(plain), data), gradient(strategy, data)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)
    # First and later layers, whole and packed rows, last norm and loss: not one for each layer or batch.
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 4 <= graphs <= 14, graphs
    with torch.no_grad():
        loss = strategy_of(plain.eval())(WHOLE).loss_sum
        assert strategy_of(other.eval())(WHOLE).loss_sum == pytest.approx(loss.item(), rel=1e-6)


# ---- by recipe ----


@pytest.mark.parametrize(
    "precision",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective", "checkpointing_every": 2},
        {"activation_checkpointing": "selective", "gradient_checkpointing_modules": ["mlp"]},
        {"attention": "math"},
        {"attention": "flash"},
    ],
)
def test_a_recipe_reaches_them(run_recipe: Recipe, tmp_path: Path, precision: dict[str, Any]) -> None:
    """The field changes how a run computes, and neither its losses nor its files."""
    losses = []
    for name, changes in (("plain", {}), ("other", precision)):
        recipe = run_recipe({"max_steps": 3, "output_dir": str(tmp_path / name)})
        recipe["precision"] |= changes
        trainer = build(TrainConfig.from_dict(recipe), device="cpu")
        block = trainer.context.model.model.layers[0]
        if changes.get("activation_checkpointing") == "full":
            assert type(block).__mro__[1].__name__ == "_Recomputed"
        assert trainer.train().step == 3
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    AutoModel.from_pretrained(tmp_path / "other" / "checkpoints" / "step_3", device="cpu")


def test_a_recipe_compiles(run_recipe: Recipe) -> None:
    """Every block and the last norm, and nothing where the recipe does not say so."""
    for changes in ({}, {"compile": "default"}):
        recipe = run_recipe({"output_dir": run_recipe()["output_dir"] + str(len(changes))})
        recipe["precision"] |= changes
        context = build(TrainConfig.from_dict(recipe), device="cpu").context
        modules = [*context.model.model.layers, context.model.model.norm]
        assert [module._compiled_call_impl is not None for module in modules] == [bool(changes)] * len(modules)
        assert context.strategy.compiled == bool(changes)


def test_attention_by_name_is_strict(run_recipe: Recipe) -> None:
    """No silent fallback: what cannot run here is refused before the first step."""
    with pytest.raises(ConfigError, match="field 'precision.attention': 'cudnn' needs a CUDA device"):
        build(TrainConfig.from_dict(run_recipe({"precision": {"dtype": "bf16", "attention": "cudnn"}})), device="cpu")


def test_attention_on_a_gpu(run_recipe: Recipe) -> None:
    """cuDNN first for rows of one length; not where its plans or its order of additions would hurt."""
    cuda = torch.device("cuda")

    def first(changes: dict[str, Any]) -> str:
        kernels = attention_kernels(TrainConfig.from_dict(run_recipe(changes)), cuda)
        assert kernels is not None
        return kernels[0].name

    assert first({}) == "CUDNN_ATTENTION"
    assert first({"data.packing": "none"}) == "FLASH_ATTENTION"
    assert first({"precision": {"deterministic": True}}) == "FLASH_ATTENTION"
    assert attention_kernels(TrainConfig.from_dict(run_recipe({})), torch.device("cpu")) is None
    strict = attention_kernels(TrainConfig.from_dict(run_recipe({"precision": {"attention": "math"}})), cuda)
    assert [kernel.name for kernel in strict or ()] == ["MATH"]


# ---- memory ----


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16_mixed"])
def test_estimated_activations_are_those_that_are_kept(recipe: Recipe, dtype: str) -> None:
    """Within a sixth of what eager steps keep for the backward pass."""
    config = TrainConfig.from_dict(
        recipe(
            {
                "model": {"architecture": SHAPE, "tokenizer": "any"},
                "strategy": {"name": "seq", "loss_chunk_tokens": 16},
                "data.seq_len": 32,
                "batch_size": 2,
                "micro_batch_size": 2,
                "precision": {"dtype": dtype},
            }
        )
    )
    model = make_model().to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    strategy = strategy_of(model)
    set_up_kernels(config, model, strategy)
    with autocast(config, model.device):
        kept = saved_bytes(lambda: model.hidden_states(WHOLE.input_ids), model.parameters())
    if dtype == "bf16_mixed":  # autocast's copies of the matrices count as weights
        kept -= 2 * sum(layer.weight.numel() for layer in model.model.layers.modules() if hasattr(layer, "in_features"))
    assert estimate_memory(config, blank_model(config)).activations == pytest.approx(kept, rel=1 / 6)


def test_estimate_by_hand(recipe: Recipe) -> None:
    """Weights, gradients, moments and averages of every trained weight, for one process and for shards."""
    base = {"model": {"architecture": SHAPE, "tokenizer": "any"}, "strategy": {"name": "seq"}, "log": {"metrics": []}}
    n = sum(parameter.numel() for parameter in make_model().parameters())

    def found(changes: dict[str, Any], ranks: int = 1) -> tuple[int, int, int]:
        config = TrainConfig.from_dict(recipe(base | changes))
        estimate = estimate_memory(config, blank_model(config), ranks=ranks)
        assert estimate.total == sum(vars(estimate).values())
        return estimate.weights, estimate.gradients, estimate.optimizer

    assert found({"precision": {"dtype": "bf16"}}) == (2 * n, 2 * n, 4 * n)
    assert found({"precision": {"dtype": "fp32"}, "ema_decay": 0.9}) == (4 * n, 4 * n, 12 * n)
    assert found({"precision": {"dtype": "bf16_mixed"}, "log": {"metrics": ["grad_snr"]}}) == (6 * n, 4 * n, 16 * n)
    shards = {"precision": {"dtype": "fp32"}, "parallel": {"mode": "fsdp", "reshard_after_forward": True}}
    assert found(shards, ranks=2) == (2 * n, 2 * n, 4 * n)
    line = estimate_memory(TrainConfig.from_dict(recipe(base)), blank_model(TrainConfig.from_dict(recipe(base)))).line(
        torch.device("cpu")
    )
    assert line.startswith("memory: about ") and "activations" in line and "\n" not in line


@pytest.mark.parametrize(
    ("strategy", "adapted", "copies"),
    [
        ({"reference": "auto"}, False, 1),
        ({"reference": "cached"}, False, 0),
        ({"loss": "simpo"}, False, 0),
        ({"reference": "auto"}, True, 0),
        ({"reference": "copy"}, True, 1),
    ],
)
def test_a_reference_is_estimated_where_there_is_one(
    recipe: Recipe, strategy: dict[str, Any], adapted: bool, copies: int
) -> None:
    """Beside adapters too, if a copy was asked for."""
    model = make_model()
    n = sum(parameter.numel() for parameter in model.parameters())
    changes: dict[str, Any] = {"model": {"pretrained": "any"}, "strategy": {"name": "dpo", **strategy}}
    if adapted:
        changes["lora"] = {"rank": 4}
        apply_lora(model, LoRAConfig(rank=4))
    config = TrainConfig.from_dict(recipe({**changes, "precision": {"dtype": "fp32"}}))
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert estimate_memory(config, model).weights == 4 * (whole + copies * n)


def test_less_is_estimated_for_recomputation(recipe: Recipe) -> None:
    base = {"model": {"architecture": SHAPE, "tokenizer": "any"}, "strategy": {"name": "seq"}}
    found = []
    for precision in ({}, {"activation_checkpointing": "selective"}, {"activation_checkpointing": "full"}):
        config = TrainConfig.from_dict(recipe(base | {"precision": precision}))
        found.append(estimate_memory(config, blank_model(config)).activations)
    assert found[0] > found[1] > found[2]
