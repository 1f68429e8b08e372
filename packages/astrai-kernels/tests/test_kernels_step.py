"""decode_step without a GPU: what it refuses and how it says so, its fake kernel, its schema."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from astrai_kernels import DecodeStep, StepLayer, decode_step
from astrai_kernels import step as module


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layer(**changes: Any) -> StepLayer:
    return dataclasses.replace(
        StepLayer(
            input_norm=meta(128),
            qkv=meta(512, 128),
            o=meta(128, 256),
            post_norm=meta(128),
            gate_up=meta(384, 128),
            down=meta(128, 192),
            k_buffer=meta(99, 2, 64),
            v_buffer=meta(99, 2, 64),
        ),
        **changes,
    )


@pytest.fixture(autouse=True)
def capacity(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for the compiled module, which needs a device to say how much shared memory there is."""
    found = SimpleNamespace(stages=8)
    found.step_capacity = lambda device, shape, n_layers: (1024, found.stages)
    found.step_maps = lambda dtype, device, shape, layers, head: bytes(128 * (4 * len(layers) + 1))
    monkeypatch.setattr(module, "extension", lambda: found)
    monkeypatch.setattr(module, "_index", lambda device: 0)
    return found


def build(*layers: StepLayer, n_heads: int = 4, eps: float = 1e-6, **changes: Tensor) -> DecodeStep:
    weights = {"embedding": meta(80, 128), "final_norm": meta(128), "head": meta(80, 128)}
    angles = {name: meta(32, 32, dtype=torch.float32) for name in ("cos", "sin")}
    arguments = weights | angles | changes
    return DecodeStep(layers or (layer(), layer()), *arguments.values(), n_heads=n_heads, eps=eps)


def inputs(rows: int = 3, **changes: Tensor) -> dict[str, Tensor]:
    vectors = {name: meta(rows, dtype=torch.int64) for name in ("ids", "position_ids", "out_cache_loc")}
    return (
        vectors | {"seq_lens": meta(rows, dtype=torch.int32), "req_to_token": meta(5, 32, dtype=torch.int32)} | changes
    )


def test_results_have_the_rows_of_the_ids():
    logits, hidden = decode_step(build(), **inputs())
    assert (tuple(logits.shape), logits.dtype) == ((3, 80), torch.bfloat16)
    assert (tuple(hidden.shape), hidden.dtype) == ((3, 128), torch.bfloat16)
    assert decode_step(build(), **inputs(0))[0].shape == (0, 80)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: build(*[]) and DecodeStep([], *[meta(8)] * 5, n_heads=1), ValueError, "layers is empty"),
        (lambda: build(eps=-1.0), ValueError, "eps is -1.0, expected a finite number"),
        (lambda: build(layer(), layer(down=meta(128, 191))), ValueError, r"down of layer 1 has shape \(128, 191\)"),
        (lambda: build(layer(qkv=meta(448, 128))), ValueError, r"qkv of layer 0 has shape .* expected \(512, 128\)"),
        (lambda: build(layer(o=meta(256, 128).t())), ValueError, "o of layer 0 has stride"),
        (lambda: build(layer(o=meta(128, 512)[:, ::2])), ValueError, "o of layer 0 has stride 2"),
        (lambda: build(layer(o=meta(128, 264)[:, :256])), ValueError, "o of layer 0 has strides .* contiguous"),
        (lambda: build(layer(gate_up=meta(384, 128, dtype=torch.half))), TypeError, "gate_up of layer 0 has dtype"),
        (lambda: build(layer(q_norm=meta(64))), ValueError, "k_norm of layer 0 is None, expected both"),
        (lambda: build(layer(), layer(o_bias=meta(128))), ValueError, "o_bias of layer 1 is given, unlike"),
        (lambda: build(layer(qkv_bias=meta(512)), layer()), ValueError, "qkv_bias of layer 1 is missing, unlike"),
        (lambda: build(layer(k_buffer=meta(128, 64))), ValueError, r"k_buffer has shape .* expected \[size"),
        (lambda: build(layer(v_buffer=meta(98, 2, 64))), ValueError, "v_buffer of layer 0 has shape"),
        (
            lambda: build(layer(), layer(k_buffer=meta(99, 4, 64)[:, ::2])),
            ValueError,
            "k_buffer of layer 1 has strides .* expected those of layer 0",
        ),
        (lambda: build(layer(v_buffer=meta(99, 2, 65)[..., :64])), ValueError, "v_buffer of layer 0 has strides"),
        (lambda: build(head=meta(80, 120)), ValueError, r"head has shape \(80, 120\)"),
        (lambda: build(sin=meta(31, 32, dtype=torch.float32)), ValueError, "sin has shape"),
        (lambda: build(cos=meta(32, 16, dtype=torch.float32)), ValueError, "cos has shape"),
        (lambda: build(cos=meta(32, 32)), TypeError, "cos has dtype torch.bfloat16"),
        (lambda: build(embedding=torch.ones(80, 128).bfloat16()), ValueError, "embedding is on cpu, expected a CUDA"),
        (lambda: build(embedding=meta(80, 128, dtype=torch.float32)), TypeError, "embedding has dtype torch.float32"),
    ],
)
def test_models_are_checked_once(make, error, message):
    """Every tensor is named with its layer."""
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 80}, "head_dim is 80, expected 64 or 128"),
        ({"n_heads": 18}, "18 heads share 2 kv heads, expected 1 to 8"),
        ({"n_heads": 5}, "5 heads share 2 kv heads"),
        ({"hidden": 72}, "hidden is 72, expected a multiple of 64"),
        ({"intermediate": 0}, "intermediate is 0"),
        ({"vocab": 81}, "vocab is 81, expected a multiple of 8"),
    ],
)
def test_shapes_it_does_not_know_are_refused_by_name(changes, message):
    shape = {
        "hidden": 128,
        "intermediate": 192,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 64,
        "vocab": 80,
        "n_layers": 2,
    }
    assert module.unavailable(**shape, device=torch.device("meta")) is None
    assert message in (module.unavailable(**(shape | changes), device=torch.device("meta")) or "")


def test_every_weight_has_a_descriptor():
    assert build(layer(), layer(), layer()).maps.shape == (13, 16), "four of each layer, and the head"


def test_other_devices_than_hopper_are_refused_by_name(capacity, monkeypatch):
    capacity.stages = 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert module.unavailable(128, 192, 4, 2, 64, 80, 2, torch.device("cuda")) == (
        "it needs compute capability 9.0, whose copy engine brings the weights"
    )


def test_too_little_shared_memory_is_refused(capacity):
    capacity.stages = 0
    with pytest.raises(ValueError, match="rows of 256 elements and 2 layers leave no shared memory"):
        build()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ids": meta(9, dtype=torch.int64)}, ValueError, r"ids has shape \(9,\), expected \[rows\] with at most 8"),
        ({"ids": meta(3, dtype=torch.int32)}, TypeError, "ids has dtype torch.int32"),
        ({"position_ids": meta(4, dtype=torch.int64)}, ValueError, "position_ids has shape"),
        ({"seq_lens": meta(3, dtype=torch.int64)}, TypeError, "seq_lens has dtype torch.int64, expected torch.int32"),
        ({"out_cache_loc": meta(6, dtype=torch.int64)[::2]}, ValueError, "out_cache_loc has stride 2"),
        ({"req_indices": meta(2, dtype=torch.int64)}, ValueError, "req_indices has shape"),
        ({"req_to_token": meta(32, dtype=torch.int32)}, ValueError, "req_to_token has shape"),
        ({"req_to_token": meta(5, 32, dtype=torch.int64)}, TypeError, "req_to_token has dtype"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, ValueError, "seq_lens is on cpu, expected meta"),
    ],
)
def test_steps_are_checked(changes, error, message):
    with pytest.raises(error, match=message):
        decode_step(build(), **inputs(**changes))


def test_compilers_see_one_op_that_writes_pools_and_scratch():
    """The schema marks what is written, so that nothing is moved across it."""
    schema = torch.ops.astrai.decode_step.default._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"workspace", "k_buffers", "v_buffers"}
    step = build()
    trace = make_fx(
        lambda ids: decode_step(step, **inputs(ids=ids))[0], tracing_mode="fake", _allow_non_fake_inputs=True
    )
    nodes = [str(node.target) for node in trace(meta(3, dtype=torch.int64)).graph.nodes]
    assert [name for name in nodes if "astrai" in name] == ["astrai.decode_step.default"]
