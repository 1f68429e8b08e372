"""Decode attention over a paged or contiguous KV cache (rows K1-K9): the plan of a step and the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ._attention import HEAD_DIMS, check_operands, check_vector, key_strides, scale_strides
from ._checks import DTYPE_NUMBERS, check_device, check_dtype, check_shape
from ._library import refuse_grad, register
from ._loader import extension

CHUNK_ALIGN = 64
_CHUNK_WORDS = 8
_HEADER_WORDS = 4


class DecodePlan:
    """How the work of a step is cut into chunks of keys, and the scratch of its attention, at fixed addresses.

    Grid and memory follow from capacity; the lengths are read on the device, so a captured graph replays for any. The
    layers of a step share one plan if they share heads, head_dim and window.

    Parameters
    ----------
    max_batch : int
        Requests of a step at most.
    n_heads, n_kv_heads, head_dim : int
        Of the attention layers.
    device : torch.device
        A CUDA device.
    q_len : int
        Query rows of each request; they are the last of its positions.
    window : int, optional
        Keys a query sees, its own included.
    fixed_len : int, optional
        Cut at these multiples of tokens, a multiple of 64, from the start of each sequence: the result for a row then
        depends on that row and its keys alone (deterministic mode). Needs `max_tokens`.
    max_tokens : int, optional
        Keys of all requests together, which bounds the chunks when their length is fixed.

    Attributes
    ----------
    chunks : Tensor
        ``[4 + 8 * max_chunks]`` int32, what :meth:`update` writes.
    partial_out : Tensor
        ``[max_chunks, n_heads * q_len, head_dim]`` fp32, uninitialised: what is read was written before (row K7).
    partial_ml : Tensor
        ``[max_chunks, n_heads * q_len, 2]`` fp32: maximum in the log2 domain, and sum.
    counters : Tensor
        ``[max_batch, n_heads * q_len]`` int32, zero between launches.

    Raises
    ------
    ValueError
        Naming the argument that is out of range.
    ImportError
        If the compiled module is missing.
    """

    def __init__(
        self,
        max_batch: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        device: torch.device,
        *,
        q_len: int = 1,
        window: int | None = None,
        fixed_len: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        _check_shape(max_batch, n_heads, n_kv_heads, head_dim, q_len, window)
        self.max_batch = max_batch
        self.shape = (n_heads, n_kv_heads, head_dim, q_len, window or 0, fixed_len or 0)
        workers, units = extension().attention_capacity(head_dim, n_heads, n_kv_heads, q_len, max_batch, _index(device))
        if fixed_len is None:
            # Beyond a few rounds of thread blocks, finer chunks gain nothing.
            self.max_chunks = 2 * max_batch + 4 * -(-workers // units)
        else:
            if fixed_len < CHUNK_ALIGN or fixed_len % CHUNK_ALIGN:
                raise ValueError(f"DecodePlan: fixed_len is {fixed_len}, expected a positive multiple of {CHUNK_ALIGN}")
            if max_tokens is None or max_tokens < 1:
                raise ValueError(f"DecodePlan: max_tokens is {max_tokens}, expected a bound since fixed_len is given")
            self.max_chunks = 2 * max_batch + max_tokens // fixed_len
        rows = n_heads * q_len
        self.chunks = torch.zeros(_HEADER_WORDS + _CHUNK_WORDS * self.max_chunks, dtype=torch.int32, device=device)
        self.partial_out = torch.empty((self.max_chunks, rows, head_dim), dtype=torch.float32, device=device)
        self.partial_ml = torch.empty((self.max_chunks, rows, 2), dtype=torch.float32, device=device)
        self.counters = torch.zeros((max_batch, rows), dtype=torch.int32, device=device)

    def update(self, seq_lens: Tensor, req_indices: Tensor | None = None, *, overlap: bool = False) -> None:
        """Cut the requests of a step; one small launch, no allocation, no sync.

        Parameters
        ----------
        seq_lens : Tensor
            ``[batch]`` int32: keys of each request, its query rows' own included.
        req_indices : Tensor, optional
            ``[batch]`` int64: rows of ``req_to_token``; 0, 1, 2, ... if it is not given.
        overlap : bool
            The caller's word that both were written before the kernel ahead, and that this is neither :func:`linear` nor a
            library's product: they are then read while it still runs (csrc/include/astrai/common/pdl.cuh).

        Raises
        ------
        ValueError, TypeError
            Naming the argument whose device, shape or type is not accepted.
        """
        op = "DecodePlan.update"
        check_device(op, "seq_lens", seq_lens, self.chunks.device)
        check_dtype(op, "seq_lens", seq_lens, torch.int32)
        check_vector(op, "seq_lens", seq_lens)
        batch = seq_lens.shape[0]
        if batch > self.max_batch:
            raise ValueError(f"{op}: seq_lens has {batch} requests, expected at most max_batch = {self.max_batch}")
        if req_indices is not None:
            check_device(op, "req_indices", req_indices, self.chunks.device)
            check_dtype(op, "req_indices", req_indices, torch.int64)
            check_vector(op, "req_indices", req_indices)
            check_shape(op, "req_indices", req_indices, (batch,), "one per request")
        _plan_op(seq_lens, req_indices, self.chunks, self.max_chunks, list(self.shape), overlap)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: DecodePlan,
    *,
    req_to_token: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """Attention of each request's newest `q_len` positions over its whole KV cache, always causal (row K6).

    Parameters
    ----------
    q : Tensor
        ``[batch * q_len, n_heads, head_dim]`` float16 or bfloat16; a request's rows lie together.
    k, v : Tensor
        Paged: ``[size, n_kv_heads, head_dim]``, any page size, read through `req_to_token`. Contiguous:
        ``[batch, max_len, n_kv_heads, head_dim]``. Of q's type, or float8_e4m3fn with scales; strided views allowed.
    plan : DecodePlan
        Updated for this step's lengths.
    req_to_token : Tensor, optional
        ``[rows, max_len]`` int32: slot of each position; entries behind a request's last key are not read.
    scale : float, optional
        Of the scores; ``head_dim ** -0.5`` by default.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)`` before masking; 0 is off.
    sinks : Tensor, optional
        ``[n_heads]`` fp32 logits that take part in the softmax and carry no value (arXiv:2309.17453, section 3.2).
    mask : Tensor, optional
        ``[batch * q_len, max_len]`` bool, True where a key may be seen.
    k_scale, v_scale : Tensor, optional
        Of a float8_e4m3fn cache, as :func:`qkv_norm_rope_write` fills it: ``[size, n_kv_heads]``, or ``[batch, max_len,
        n_kv_heads]``, fp32; a key is ``k_scale * k``. Products are then taken in fp16: queries beyond 65,504 and values
        beyond 28,000 saturate.
    out : Tensor, optional
        Where to write, of q's shape and type.
    lse : Tensor, optional
        ``[batch * q_len, n_heads]`` fp32, receives the natural logarithm of the softmax denominators; -inf for a row
        that sees nothing, whose output is zero.
    overlap : bool
        Promise that all keys and values but those of the newest `q_len` positions were written two launches ago or
        earlier, and that the launch before this one is not :func:`linear`, which lets its successor in early: they are
        then fetched while the launch before this one still runs.

    Returns
    -------
    Tensor
        ``[batch * q_len, n_heads, head_dim]``

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, value or type is not accepted.
    RuntimeError
        If an input requires a gradient while gradients are enabled, or CUDA refuses the launch.
    """
    refuse_grad("decode_attention", q=q, k=k, v=v, out=out)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _decode_op(
        q, k, v, req_to_token, out, lse, mask, sinks, plan.chunks, plan.partial_out, plan.partial_ml, plan.counters,
        list(plan.shape), plan.max_chunks, q.shape[-1] ** -0.5 if scale is None else scale, softcap, overlap, k_scale,
        v_scale,
    )  # fmt: skip
    return out


def _check_shape(max_batch: int, n_heads: int, n_kv_heads: int, head_dim: int, q_len: int, window: int | None) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"DecodePlan: head_dim is {head_dim}, expected one of {', '.join(map(str, HEAD_DIMS))}")
    if n_kv_heads < 1 or n_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"DecodePlan: n_heads is {n_heads}, expected a multiple of n_kv_heads = {n_kv_heads}")
    if max_batch < 1:
        raise ValueError(f"DecodePlan: max_batch is {max_batch}, expected at least 1")
    if not 1 <= q_len <= 1024:
        raise ValueError(f"DecodePlan: q_len is {q_len}, expected 1 to 1024")
    if window is not None and window < 1:
        raise ValueError(f"DecodePlan: window is {window}, expected at least 1, or None")


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        raise ValueError(f"DecodePlan: device is {device}, expected a CUDA device")
    return torch.cuda.current_device() if device.index is None else device.index


def _check_decode(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, out: Tensor, lse: Tensor | None, mask: Tensor | None,
    sinks: Tensor | None, counters: Tensor, shape: list[int], softcap: float, k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:  # fmt: skip
    op = "decode_attention"
    n_heads, n_kv_heads, head_dim, q_len = shape[:4]
    check_device(op, "q", q)
    if q.dim() != 3:
        raise ValueError(f"{op}: q has shape {tuple(q.shape)}, expected [batch * q_len, n_heads, head_dim]")
    check_shape(op, "q", q, (q.shape[0], n_heads, head_dim), "the plan's heads and head_dim")
    if q.shape[0] % q_len or q.shape[0] // q_len > counters.shape[0]:
        raise ValueError(
            f"{op}: q has {q.shape[0]} rows, expected a multiple of the plan's q_len = {q_len} for at most "
            f"{counters.shape[0]} requests"
        )
    batch = None if table is not None else q.shape[0] // q_len
    check_operands(op, q, k, v, batch, n_kv_heads, out, lse, table, mask, sinks, k_scale, v_scale)
    if softcap < 0:
        raise ValueError(f"{op}: softcap is {softcap}, expected at least 0")


def _decode(
    q: Tensor, k: Tensor, v: Tensor, req_to_token: Tensor | None, out: Tensor, lse: Tensor | None,
    mask: Tensor | None, sinks: Tensor | None, chunks: Tensor, partial_out: Tensor, partial_ml: Tensor,
    counters: Tensor, shape: list[int], max_chunks: int, scale: float, softcap: float, overlap: bool,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    _check_decode(q, k, v, req_to_token, out, lse, mask, sinks, counters, shape, softcap, k_scale, v_scale)
    if q.numel() == 0:
        return
    extension().attention_decode(
        DTYPE_NUMBERS[q.dtype],
        q.device.index,
        torch.cuda.current_stream(q.device).cuda_stream,
        (q.data_ptr(), q.stride(0), q.stride(1)),
        (out.data_ptr(), out.stride(0), out.stride(1)),
        0 if lse is None else lse.data_ptr(),
        key_strides(k),
        key_strides(v),
        scale_strides(k_scale),
        scale_strides(v_scale),
        (0, 0) if req_to_token is None else (req_to_token.data_ptr(), req_to_token.stride(0)),
        (0, 0) if mask is None else (mask.data_ptr(), mask.stride(0)),
        0 if sinks is None else sinks.data_ptr(),
        (shape[0], shape[1], shape[2], shape[3], shape[4]),
        scale,
        softcap,
        overlap,
        q.shape[0] // shape[3],
        shape[5],
        (chunks.data_ptr(), partial_out.data_ptr(), partial_ml.data_ptr(), counters.data_ptr(), max_chunks),
    )


def _decode_fake(
    q: Tensor, k: Tensor, v: Tensor, req_to_token: Tensor | None, out: Tensor, lse: Tensor | None,
    mask: Tensor | None, sinks: Tensor | None, chunks: Tensor, partial_out: Tensor, partial_ml: Tensor,
    counters: Tensor, shape: list[int], max_chunks: int, scale: float, softcap: float, overlap: bool,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    _check_decode(q, k, v, req_to_token, out, lse, mask, sinks, counters, shape, softcap, k_scale, v_scale)


def _plan(
    seq_lens: Tensor, req_indices: Tensor | None, chunks: Tensor, max_chunks: int, shape: list[int], overlap: bool
) -> None:
    extension().attention_plan(
        seq_lens.device.index,
        torch.cuda.current_stream(seq_lens.device).cuda_stream,
        seq_lens.data_ptr(),
        0 if req_indices is None else req_indices.data_ptr(),
        chunks.data_ptr(),
        seq_lens.shape[0],
        max_chunks,
        (shape[0], shape[1], shape[2], shape[3], shape[4]),
        shape[5],
        overlap,
    )


def _plan_fake(
    seq_lens: Tensor, req_indices: Tensor | None, chunks: Tensor, max_chunks: int, shape: list[int], overlap: bool
) -> None:
    """Write nothing that has a shape."""


_decode_op = register(
    "attention_decode_out(Tensor q, Tensor k, Tensor v, Tensor? req_to_token, Tensor(a!) out, Tensor(b!)? lse, "
    "Tensor? mask, Tensor? sinks, Tensor chunks, Tensor(c!) partial_out, Tensor(d!) partial_ml, Tensor(e!) counters, "
    "int[] shape, int max_chunks, float scale, float softcap, bool overlap, Tensor? k_scale=None, Tensor? v_scale=None) "
    "-> ()",
    _decode,
    _decode_fake,
)
_plan_op = register(
    "attention_plan_out(Tensor seq_lens, Tensor? req_indices, Tensor(a!) chunks, int max_chunks, int[] shape, "
    "bool overlap) -> ()",
    _plan,
    _plan_fake,
)
