"""decode_step on a GPU: the correctness rule, replays for other lengths, neighbours that are not touched (K10, G2)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from astrai_kernels import DecodeStep, StepLayer, decode_step
from astrai_kernels.reference_step import decode_step as reference

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

LENS = {1: [577], 2: [1, 130], 4: [16, 17, 1000, 127], 8: [1, 2, 15, 64, 129, 300, 2049, 128]}


class Model:
    """A random model and its pool: slots in disorder, what nobody may read NaN."""

    def __init__(
        self, head_dim: int, page: int, dtype: torch.dtype, *, qk_norm: bool, bias: bool, layers: int = 2
    ) -> None:
        self.hidden, self.ffn, self.heads, self.kv_heads, self.dim, self.vocab = 256, 384, 6, 2, head_dim, 1000
        self.page, self.dtype = page, dtype
        width = (self.heads + 2 * self.kv_heads) * head_dim
        self.max_len = 2176
        self.slots = 9 * self.max_len
        self.weights = []
        for _ in range(layers):
            pool = torch.full((2, self.slots, self.kv_heads, head_dim), torch.nan, dtype=dtype, device="cuda")
            layer = StepLayer(
                input_norm=self.vector(self.hidden, 1.0),
                qkv=self.matrix(width, self.hidden),
                o=self.matrix(self.hidden, self.heads * head_dim),
                post_norm=self.vector(self.hidden, 1.0),
                gate_up=self.matrix(2 * self.ffn, self.hidden),
                down=self.matrix(self.hidden, self.ffn),
                k_buffer=pool[0],
                v_buffer=pool[1],
                qkv_bias=self.vector(width) if bias else None,
                o_bias=self.vector(self.hidden) if bias else None,
                q_norm=self.vector(head_dim, 1.0) if qk_norm else None,
                k_norm=self.vector(head_dim, 1.0) if qk_norm else None,
            )
            self.weights.append(layer)
        angles = torch.rand(self.max_len, head_dim // 2, device="cuda") * 6.0
        self.rest = (
            self.matrix(self.vocab, self.hidden) * self.hidden**0.5,
            self.vector(self.hidden, 1.0),
            self.matrix(self.vocab, self.hidden),
            angles.cos(),
            angles.sin(),
        )
        self.step = DecodeStep(self.weights, *self.rest, n_heads=self.heads)

    def vector(self, width: int, mean: float = 0.0) -> Tensor:
        return (mean + 0.2 * torch.randn(width, device="cuda")).to(self.dtype)

    def matrix(self, features: int, depth: int) -> Tensor:
        return (torch.randn(features, depth, device="cuda") / depth**0.5).to(self.dtype)

    def inputs(self, lens: list[int]) -> dict[str, Tensor]:
        """Fill the pool up to each length and return a step's inputs; the table leads nowhere behind them."""
        pages = torch.randperm(self.slots // self.page, device="cuda")
        slots = (pages[:, None] * self.page + torch.arange(self.page, device="cuda")).flatten()
        table = torch.full((9, self.max_len), 2**30, dtype=torch.int32, device="cuda")
        rows = torch.randperm(9, device="cuda")[: len(lens)]
        for layer in self.weights:
            layer.k_buffer.fill_(torch.nan)
            layer.v_buffer.fill_(torch.nan)
        start, locs = 0, []
        for row, n in zip(rows.tolist(), lens, strict=True):
            own = slots[start : start + n]
            start += -(-n // self.page) * self.page
            table[row, :n] = own.int()
            locs.append(own[-1])
            for layer in self.weights:
                for buffer in (layer.k_buffer, layer.v_buffer):
                    buffer[own[:-1]] = torch.randn(n - 1, self.kv_heads, self.dim, device="cuda").to(self.dtype)
        return {
            "ids": torch.randint(self.vocab, (len(lens),), device="cuda"),
            "position_ids": torch.tensor(lens, device="cuda") - 1,
            "out_cache_loc": torch.stack(locs),
            "seq_lens": torch.tensor(lens, dtype=torch.int32, device="cuda"),
            "req_to_token": table,
            "req_indices": rows,
        }

    def twin(self, dtype: torch.dtype, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[StepLayer]]:
        """The twin in a type, on copies of the pools."""

        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(dtype, copy=True)

        names = [field.name for field in dataclasses.fields(StepLayer)]
        layers = [StepLayer(**{name: cast(getattr(layer, name)) for name in names}) for layer in self.weights]
        embedding, final_norm, head, cos, sin = self.rest
        rest = (cast(embedding), cast(final_norm), cast(head), cos, sin)
        return *reference(layers, *rest, **inputs, n_heads=self.heads), layers


def angle(left: Tensor, right: Tensor) -> float:
    """By how much the cosine of two tensors differs from 1."""
    return 1.0 - float(torch.nn.functional.cosine_similarity(left.double().flatten(), right.double().flatten(), dim=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    ("head_dim", "qk_norm", "bias"), [(64, False, False), (64, False, True), (128, True, False), (128, False, True)]
)
def test_step_obeys_the_rule(fresh_seed, obeys_rule, head_dim, qk_norm, bias, page, dtype):
    """Logits, hidden states, new keys and values; every other slot keeps its bits.

    The rule's bound on the cosine is one operation's. Two layers round some thirty times, which alone turns bf16 by 1.6e-5;
    so the ops one by one, in the same type, are the measure.
    """
    model = Model(head_dim, page, dtype, qk_norm=qk_norm, bias=bias)
    for lens in LENS.values():
        inputs = model.inputs(lens)
        exact, exact_hidden, exact_layers = model.twin(torch.float32, inputs)
        same, same_hidden, same_layers = model.twin(dtype, inputs)
        before = [(layer.k_buffer.clone(), layer.v_buffer.clone()) for layer in model.weights]
        logits, hidden = decode_step(model.step, **inputs)
        obeys_rule(logits, exact, same, cosine=max(5e-6, 2 * angle(same, exact)))
        obeys_rule(hidden, exact_hidden, same_hidden)
        locs = inputs["out_cache_loc"]
        for layer, wide, narrow, old in zip(model.weights, exact_layers, same_layers, before, strict=True):
            for name, was in zip(("k_buffer", "v_buffer"), old, strict=True):
                obeys_rule(getattr(layer, name)[locs], getattr(wide, name)[locs], getattr(narrow, name)[locs])
                was[locs] = getattr(layer, name)[locs]
                assert torch.equal(was.view(torch.int16), getattr(layer, name).view(torch.int16)), "wrote elsewhere"


@torch.no_grad()
def test_a_captured_step_replays_for_any_lengths(fresh_seed):
    """Lengths are read on the device, and the scratch is left as the next step needs it; a thousand replays do not drift."""
    model = Model(64, 16, torch.bfloat16, qk_norm=False, bias=False)
    held = model.inputs([5, 2000, 130])
    decode_step(model.step, **held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, _ = decode_step(model.step, **held)
    for lens in ([5, 2000, 130], [1, 1, 1], [2049, 17, 900], [64, 128, 256]):
        for name, value in model.inputs(lens).items():
            held[name].copy_(value)
        graph.replay()
        first = logits.clone()
        expected, _ = decode_step(model.step, **held)
        assert torch.equal(first, expected)
        for _ in range(250):
            graph.replay()
        assert torch.equal(logits, expected)
    torch.cuda.synchronize()
    assert not model.step.workspace[:128].any(), "the barrier's counters are zero between steps"


def test_rows_outside_are_nan_and_write_nothing(fresh_seed):
    """An id outside the vocabulary and a slot outside the pool: a kernel can neither raise nor guess."""
    model = Model(128, 1, torch.bfloat16, qk_norm=True, bias=False)
    inputs = model.inputs([40, 7, 300])
    expected, _ = decode_step(model.step, **inputs)
    inputs["out_cache_loc"][1] = -1
    before = [layer.k_buffer.clone() for layer in model.weights]
    logits, _ = decode_step(model.step, **inputs)
    assert torch.equal(logits, expected), "the newest key is not read from the pool"
    for layer, was in zip(model.weights, before, strict=True):
        assert torch.equal(was.view(torch.int16), layer.k_buffer.view(torch.int16))
    inputs["ids"][1] = model.vocab
    logits, _ = decode_step(model.step, **inputs)
    assert logits[1].isnan().all()
    assert torch.equal(logits[[0, 2]], expected[[0, 2]])


def test_op_passes_opcheck(fresh_seed):
    model = Model(64, 16, torch.bfloat16, qk_norm=False, bias=False, layers=1)
    i = model.inputs([9, 70])
    layer = model.weights[0]
    arguments = (
        *(i["ids"], i["position_ids"], i["out_cache_loc"], i["seq_lens"], i["req_indices"], i["req_to_token"]),
        *(*model.rest, model.step.table, model.step.maps, model.step.workspace, [layer.k_buffer], [layer.v_buffer]),
        *(model.heads, model.ffn, 1e-6, model.dim**-0.5),
    )
    # Not test_aot_dispatch: it runs the op on copies of the pools, which the table of addresses does not know.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.astrai.decode_step.default, arguments, test_utils=utilities)
