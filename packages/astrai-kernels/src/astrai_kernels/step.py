"""A whole decode step in one kernel: from the token ids of up to eight requests to their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _checks as checks
from ._library import register
from ._loader import extension

MOST_ROWS = 8
HEAD_DIMS = (64, 128)
MOST_GROUP = 8
"""Most query heads of a kv head."""

_OP = "decode_step"
_STEP = 64
_OCTET = 8


@dataclass(frozen=True, eq=False)
class StepLayer:
    """The tensors of one layer, all contiguous but the pools; an optional one is given in every layer or in none."""

    input_norm: Tensor
    """``[hidden]``."""
    qkv: Tensor
    """``[(n_heads + 2 * n_kv_heads) * head_dim, hidden]``."""
    o: Tensor
    """``[hidden, n_heads * head_dim]``."""
    post_norm: Tensor
    """``[hidden]``."""
    gate_up: Tensor
    """``[2 * intermediate, hidden]``: gate rows first."""
    down: Tensor
    """``[hidden, intermediate]``."""
    k_buffer: Tensor
    """``[size, n_kv_heads, head_dim]``, the last dimension contiguous; strides are those of all layers."""
    v_buffer: Tensor
    """The same for values."""
    qkv_bias: Tensor | None = None
    """``[(n_heads + 2 * n_kv_heads) * head_dim]``."""
    o_bias: Tensor | None = None
    """``[hidden]``."""
    q_norm: Tensor | None = None
    """``[head_dim]``, with `k_norm`: RMSNorm of each head before the rotation."""
    k_norm: Tensor | None = None


_ORDER = (
    *("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "post_norm", "gate_up", "down"),
    *("k_buffer", "v_buffer"),
)
"""Members of csrc/include/astrai/step/params.h's StepLayer."""
_MAP_WORDS = 16


def unavailable(
    hidden: int,
    intermediate: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    vocab: int,
    n_layers: int,
    device: torch.device,
) -> str | None:
    """Return why a model of this shape cannot run in one kernel on a device, or None if it can.

    Parameters
    ----------
    hidden, intermediate, n_heads, n_kv_heads, head_dim, vocab, n_layers : int
        The model's shape.
    device : torch.device
        A CUDA device.
    """
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, expected {' or '.join(map(str, HEAD_DIMS))}"
    if n_heads % n_kv_heads or n_heads // n_kv_heads > MOST_GROUP:
        return f"{n_heads} heads share {n_kv_heads} kv heads, expected 1 to {MOST_GROUP} for each"
    for name, value, unit in (
        ("hidden", hidden, _STEP),
        ("intermediate", intermediate, _STEP),
        ("vocab", vocab, _OCTET),
    ):
        if value < unit or value % unit:
            return f"{name} is {value}, expected a multiple of {unit}"
    shape = (MOST_ROWS, hidden, intermediate, n_heads, n_kv_heads, head_dim, vocab)
    _, stages = extension().step_capacity(_index(device), shape, n_layers)
    if not stages and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs compute capability 9.0, whose copy engine brings the weights"
    if not stages:
        return (
            f"rows of {max(hidden, intermediate, n_heads * head_dim)} elements and {n_layers} layers leave no shared memory "
            "for the weights"
        )
    return None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class DecodeStep:
    """What a step reads at fixed addresses, and its scratch; serves steps of one stream, one after the other.

    Parameters
    ----------
    layers : sequence of StepLayer
        float16 or bfloat16, on a CUDA device. What they point to must stay where it is.
    embedding : Tensor
        ``[vocab, hidden]``.
    final_norm : Tensor
        ``[hidden]``.
    head : Tensor
        ``[vocab, hidden]``; may be the embedding.
    cos, sin : Tensor
        ``[max_pos, head_dim / 2]`` fp32; pairs are halves of a head (i, i + head_dim / 2).
    n_heads : int
        Query heads.
    eps : float
        Of all norms.
    scale : float, optional
        Of the scores; head_dim ** -0.5 if it is not given.

    Attributes
    ----------
    table : Tensor
        ``[n_layers, 12]`` int64: addresses.
    maps : Tensor
        ``[4 * n_layers + 1, 16]`` int64: descriptors of the weights for the device's copy engine.
    workspace : Tensor
        uint8, zero before the first step.

    Raises
    ------
    ValueError, TypeError
        Naming the tensor whose device, shape, type or strides are not accepted, or saying what :func:`unavailable` says.
    ImportError
        If the compiled module is missing.
    """

    def __init__(
        self,
        layers: Sequence[StepLayer],
        embedding: Tensor,
        final_norm: Tensor,
        head: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        n_heads: int,
        eps: float = 1e-6,
        scale: float | None = None,
    ) -> None:
        if not layers:
            raise ValueError(f"{_OP}: layers is empty, expected at least one")
        if not (math.isfinite(eps) and eps >= 0):
            raise ValueError(f"{_OP}: eps is {eps}, expected a finite number of at least 0")
        self.layers = tuple(layers)
        self.embedding, self.final_norm, self.head, self.cos, self.sin = embedding, final_norm, head, cos, sin
        first = self.layers[0]
        if first.k_buffer.dim() != 3:
            raise ValueError(
                f"{_OP}: k_buffer has shape {tuple(first.k_buffer.shape)}, expected [size, n_kv_heads, head_dim]"
            )
        _, n_kv_heads, head_dim = first.k_buffer.shape
        vocab, hidden = embedding.shape
        intermediate = first.down.shape[-1]
        self.shape = (hidden, intermediate, n_heads, n_kv_heads, head_dim, vocab)
        self.eps = eps
        self.scale = head_dim**-0.5 if scale is None else scale
        checks.check_device(_OP, "embedding", embedding)
        checks.check_dtype(_OP, "embedding", embedding, torch.float16, torch.bfloat16)
        self._check_model()
        reason = unavailable(*self.shape, len(self.layers), embedding.device)
        if reason is not None:
            raise ValueError(f"{_OP}: {reason}")
        pointers = [
            [0 if (t := getattr(layer, name)) is None else t.data_ptr() for name in _ORDER] for layer in self.layers
        ]
        self.table = torch.tensor(pointers, dtype=torch.int64).to(embedding.device)
        index, shape = _index(embedding.device), (MOST_ROWS, *self.shape)
        number = checks.DTYPE_NUMBERS[embedding.dtype]
        maps = extension().step_maps(number, index, shape, pointers, head.data_ptr())
        words = torch.frombuffer(bytearray(maps), dtype=torch.int64)
        self.maps = words.view(-1, _MAP_WORDS).to(embedding.device)
        n_bytes, _ = extension().step_capacity(index, shape, len(self.layers))
        self.workspace = torch.zeros(n_bytes, dtype=torch.uint8, device=embedding.device)

    def _check_model(self) -> None:
        hidden, intermediate, n_heads, n_kv_heads, head_dim, vocab = self.shape
        width = (n_heads + 2 * n_kv_heads) * head_dim
        size = self.layers[0].k_buffer.shape[0]
        pool = (size, n_kv_heads, head_dim)
        expected = {
            "input_norm": (hidden,),
            "qkv": (width, hidden),
            "qkv_bias": (width,),
            "q_norm": (head_dim,),
            "k_norm": (head_dim,),
            "o": (hidden, n_heads * head_dim),
            "o_bias": (hidden,),
            "post_norm": (hidden,),
            "gate_up": (2 * intermediate, hidden),
            "down": (hidden, intermediate),
            "k_buffer": pool,
            "v_buffer": pool,
        }
        for index, layer in enumerate(self.layers):
            if (layer.q_norm is None) != (layer.k_norm is None):
                missing = "q_norm" if layer.q_norm is None else "k_norm"
                raise ValueError(f"{_OP}: {missing} of layer {index} is None, expected both norms or none")
            for name in _ORDER:
                tensor: Tensor | None = getattr(layer, name)
                label = f"{name} of layer {index}"
                if (tensor is None) != (getattr(self.layers[0], name) is None):
                    raise ValueError(
                        f"{_OP}: {label} is {'missing' if tensor is None else 'given'}, unlike that of layer 0"
                    )
                if tensor is None:
                    continue
                self._check_tensor(label, tensor, expected[name], is_pool=tensor.dim() == 3)
                if tensor.dim() == 3 and tensor.stride() != getattr(self.layers[0], name).stride():
                    raise ValueError(f"{_OP}: {label} has strides {tensor.stride()}, expected those of layer 0")
        self._check_tensor("embedding", self.embedding, (vocab, hidden))
        self._check_tensor("head", self.head, (vocab, hidden))
        self._check_tensor("final_norm", self.final_norm, (hidden,))
        for name, angles in (("cos", self.cos), ("sin", self.sin)):
            checks.check_device(_OP, name, angles, self.embedding.device)
            checks.check_dtype(_OP, name, angles, torch.float32)
            checks.check_shape(_OP, name, angles, (self.cos.shape[0], head_dim // 2), "[max_pos, head_dim / 2]")
            checks.check_last_dim(_OP, name, angles)

    def _check_tensor(self, name: str, tensor: Tensor, shape: tuple[int, ...], is_pool: bool = False) -> None:
        checks.check_device(_OP, name, tensor, self.embedding.device)
        checks.check_dtype(_OP, name, tensor, self.embedding.dtype)
        checks.check_shape(_OP, name, tensor, shape, "by the embedding, the first pool and the first down projection")
        checks.check_last_dim(_OP, name, tensor)
        outer = [tensor.stride(i) for i in range(tensor.dim() - 1)]
        if is_pool and any(stride % _OCTET for stride in outer):
            raise ValueError(f"{_OP}: {name} has strides {tensor.stride()}, expected multiples of {_OCTET}")
        if not is_pool and not tensor.is_contiguous():
            raise ValueError(f"{_OP}: {name} has strides {tensor.stride()}, expected a contiguous tensor")
        if tensor.device.type == "cuda" and tensor.data_ptr() % 16:
            raise ValueError(f"{_OP}: {name} starts at {tensor.data_ptr():#x}, expected a multiple of 16 bytes")


class _Inputs(NamedTuple):
    """The op's arguments, in the order of its schema."""

    ids: Tensor
    position_ids: Tensor
    out_cache_loc: Tensor
    seq_lens: Tensor
    req_indices: Tensor | None
    req_to_token: Tensor
    embedding: Tensor
    final_norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor
    table: Tensor
    maps: Tensor
    workspace: Tensor
    k_buffers: Sequence[Tensor]
    v_buffers: Sequence[Tensor]
    n_heads: int
    intermediate: int
    eps: float
    scale: float


_SCHEMA = (
    "(Tensor ids, Tensor position_ids, Tensor out_cache_loc, Tensor seq_lens, Tensor? req_indices, Tensor req_to_token, "
    "Tensor embedding, Tensor final_norm, Tensor head, Tensor cos, Tensor sin, Tensor table, Tensor maps, "
    "Tensor(a!) workspace, Tensor(b!)[] k_buffers, Tensor(c!)[] v_buffers, int n_heads, int intermediate, float eps, "
    "float scale)"
)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Check a step's inputs, the model's having been checked by DecodeStep, and allocate its results."""
    i = _Inputs(*arguments)
    if i.ids.dim() != 1 or i.ids.shape[0] > MOST_ROWS:
        raise ValueError(f"{_OP}: ids has shape {tuple(i.ids.shape)}, expected [rows] with at most {MOST_ROWS} rows")
    rows = i.ids.shape[0]
    for name in ("ids", "position_ids", "out_cache_loc", "seq_lens", "req_indices"):
        vector: Tensor | None = getattr(i, name)
        if vector is None:
            continue
        checks.check_device(_OP, name, vector, i.embedding.device)
        checks.check_dtype(_OP, name, vector, torch.int32 if name == "seq_lens" else torch.int64)
        checks.check_shape(_OP, name, vector, (rows,), "one for each id")
        checks.check_last_dim(_OP, name, vector)
    checks.check_device(_OP, "req_to_token", i.req_to_token, i.embedding.device)
    checks.check_dtype(_OP, "req_to_token", i.req_to_token, torch.int32)
    if i.req_to_token.dim() != 2:
        raise ValueError(
            f"{_OP}: req_to_token has shape {tuple(i.req_to_token.shape)}, expected [requests, max_seq_len]"
        )
    checks.check_last_dim(_OP, "req_to_token", i.req_to_token)
    vocab, hidden = i.head.shape[0], i.embedding.shape[1]
    return i.embedding.new_empty((rows, vocab)), i.embedding.new_empty((rows, hidden))


def _kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
    logits, last_hidden = _fake(*arguments)
    i = _Inputs(*arguments)
    if logits.numel() == 0:
        return logits, last_hidden
    k, v = i.k_buffers[0], i.v_buffers[0]
    rows, vocab = logits.shape
    extension().decode_step(
        checks.DTYPE_NUMBERS[logits.dtype],
        logits.device.index,
        torch.cuda.current_stream(logits.device).cuda_stream,
        (rows, i.embedding.shape[1], i.intermediate, i.n_heads, k.shape[1], k.shape[2], vocab),
        (
            *(i.ids.data_ptr(), i.position_ids.data_ptr(), i.out_cache_loc.data_ptr(), i.seq_lens.data_ptr()),
            0 if i.req_indices is None else i.req_indices.data_ptr(),
        ),
        (i.req_to_token.data_ptr(), i.req_to_token.stride(0)),
        (i.table.data_ptr(), i.table.shape[0]),
        i.maps.data_ptr(),
        (i.embedding.data_ptr(), i.final_norm.data_ptr(), i.head.data_ptr()),
        (i.cos.data_ptr(), i.cos.stride(0), i.sin.data_ptr(), i.sin.stride(0), i.cos.shape[0]),
        (k.shape[0], k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        (logits.data_ptr(), last_hidden.data_ptr()),
        i.workspace.data_ptr(),
        i.eps,
        i.scale,
    )
    return logits, last_hidden


_op = register(f"{_OP}{_SCHEMA} -> (Tensor, Tensor)", _kernel, _fake)


def decode_step(
    step: DecodeStep,
    ids: Tensor,
    position_ids: Tensor,
    out_cache_loc: Tensor,
    seq_lens: Tensor,
    req_to_token: Tensor,
    req_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one token of up to eight requests through all layers, in one launch.

    The projections, norms and rotations give the bits of :func:`linear`, :func:`rms_norm` and
    :func:`qkv_norm_rope_write`; attention agrees with :func:`decode_attention` up to rounding, and how it cuts keys
    depends on how many requests there are. Thread blocks wait for one another: the launch is cooperative and takes every
    multiprocessor.

    Parameters
    ----------
    step : DecodeStep
        The model.
    ids, position_ids, out_cache_loc : Tensor
        ``[rows]`` int64: token, position, and slot for its key and value (outside the pool: they are not written). An
        id outside the vocabulary makes its row NaN.
    seq_lens : Tensor
        ``[rows]`` int32, at least 1: keys of each request with its own, which is the last; no request may read what another
        one of the same step writes.
    req_to_token : Tensor
        ``[requests, max_seq_len]`` int32: slot of each position.
    req_indices : Tensor, optional
        ``[rows]`` int64 rows of `req_to_token`; 0, 1, 2, ... if it is not given.

    Returns
    -------
    logits : Tensor
        ``[rows, vocab]``.
    last_hidden : Tensor
        ``[rows, hidden]``, after the final norm.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides or type is not accepted.
    RuntimeError
        If CUDA refuses the launch.
    """
    _, intermediate, n_heads, *_ = step.shape
    result: tuple[Tensor, Tensor] = _op(
        *(ids, position_ids, out_cache_loc, seq_lens, req_indices, req_to_token),
        *(step.embedding, step.final_norm, step.head, step.cos, step.sin, step.table, step.maps, step.workspace),
        [layer.k_buffer for layer in step.layers],
        [layer.v_buffer for layer in step.layers],
        *(n_heads, intermediate, step.eps, step.scale),
    )
    return result
