"""One token per row of logits: argmax, and draws without a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks as checks
from ._library import refuse_grad, register
from ._loader import extension

MAX_VOCAB = 1 << 21

Penalties = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""presence, frequency, repetition ``[rows]`` or ``[rows, 1]`` float32; counts ``[rows, vocab]`` int32; seen
``[rows, vocab]`` bool."""

_PENALTIES = ("presence", "frequency", "repetition", "counts", "seen")


def _check_logits(op: str, logits: Tensor) -> None:
    checks.check_device(op, "logits", logits)
    checks.check_float(op, "logits", logits)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_VOCAB:
        raise ValueError(
            f"{op}: logits has shape {tuple(logits.shape)}, expected [rows, vocab] with vocab between 1 and {MAX_VOCAB}"
        )
    checks.check_last_dim(op, "logits", logits)


def _check_per_row(op: str, name: str, tensor: Tensor, dtype: torch.dtype, logits: Tensor) -> None:
    checks.check_device(op, name, tensor, logits.device)
    checks.check_dtype(op, name, tensor, dtype)
    if tuple(tensor.shape) not in ((logits.shape[0],), (logits.shape[0], 1)):
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected [rows] or [rows, 1] (rows of logits)")


def _check_out(op: str, out: Tensor, logits: Tensor) -> None:
    checks.check_device(op, "out", out, logits.device)
    checks.check_dtype(op, "out", out, torch.int64)
    checks.check_shape(op, "out", out, (logits.shape[0],), "rows of logits")
    if out.shape[0] > 1 and out.stride(0) < 1:
        raise ValueError(f"{op}: out has strides {tuple(out.stride())}: its elements overlap")


def _column(tensor: Tensor | None) -> tuple[int, int]:
    """Address and stride of a number per row; zeros if absent."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))


def _launch(logits: Tensor, out: Tensor, filters: list[Tensor | None], penalties: list[Tensor | None]) -> None:
    if logits.shape[0] == 0:
        return
    extension().sample(
        checks.DTYPE_NUMBERS[logits.dtype],
        logits.device.index,
        torch.cuda.current_stream(logits.device).cuda_stream,
        _column(logits),
        _column(out),
        logits.shape[0],
        logits.shape[1],
        [_column(tensor) for tensor in filters],
        [_column(tensor) for tensor in penalties[:3]],
        _column(penalties[3]),
        _column(penalties[4]),
    )


def _argmax_fake(logits: Tensor) -> Tensor:
    _check_logits("argmax", logits)
    return torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)


def _argmax_out_fake(logits: Tensor, out: Tensor) -> None:
    _check_logits("argmax", logits)
    _check_out("argmax", out, logits)


def _argmax_out(logits: Tensor, out: Tensor) -> None:
    _argmax_out_fake(logits, out)
    _launch(logits, out, [None] * 6, [None] * 5)


def _argmax(logits: Tensor) -> Tensor:
    out = _argmax_fake(logits)
    _launch(logits, out, [None] * 6, [None] * 5)
    return out


def _sample_fake(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
    presence: Tensor | None,
    frequency: Tensor | None,
    repetition: Tensor | None,
    counts: Tensor | None,
    seen: Tensor | None,
) -> Tensor:
    op = "sample"
    _check_logits(op, logits)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seed", seed, torch.int64),
        ("position", position, torch.int64),
        ("presence", presence, torch.float32),
        ("frequency", frequency, torch.float32),
        ("repetition", repetition, torch.float32),
    ):
        if tensor is not None:
            _check_per_row(op, name, tensor, dtype, logits)
    given = dict(zip(_PENALTIES, (presence, frequency, repetition, counts, seen), strict=True))
    missing = [name for name, tensor in given.items() if tensor is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"{op}: {missing[0]} is None, expected all of {', '.join(_PENALTIES)} or none")
    for name, tensor, dtype in (("counts", counts, torch.int32), ("seen", seen, torch.bool)):
        if tensor is not None:
            checks.check_device(op, name, tensor, logits.device)
            checks.check_dtype(op, name, tensor, dtype)
            checks.check_shape(op, name, tensor, tuple(logits.shape), "that of logits")
            checks.check_last_dim(op, name, tensor)
    return torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)


def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
    presence: Tensor | None,
    frequency: Tensor | None,
    repetition: Tensor | None,
    counts: Tensor | None,
    seen: Tensor | None,
) -> Tensor:
    filters = [temperature, top_k, top_p, min_p, seed, position]
    penalties = [presence, frequency, repetition, counts, seen]
    out = _sample_fake(logits, temperature, top_k, top_p, min_p, seed, position, *penalties)
    _launch(logits, out, filters, penalties)
    return out


def _sample_out_fake(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
    presence: Tensor | None,
    frequency: Tensor | None,
    repetition: Tensor | None,
    counts: Tensor | None,
    seen: Tensor | None,
    out: Tensor,
) -> None:
    penalties = (presence, frequency, repetition, counts, seen)
    _sample_fake(logits, temperature, top_k, top_p, min_p, seed, position, *penalties)
    _check_out("sample", out, logits)


def _sample_out(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
    presence: Tensor | None,
    frequency: Tensor | None,
    repetition: Tensor | None,
    counts: Tensor | None,
    seen: Tensor | None,
    out: Tensor,
) -> None:
    penalties = (presence, frequency, repetition, counts, seen)
    _sample_out_fake(logits, temperature, top_k, top_p, min_p, seed, position, *penalties, out)
    _launch(logits, out, [temperature, top_k, top_p, min_p, seed, position], list(penalties))


_SCHEMA = (
    "(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor seed, Tensor position, "
    "Tensor? presence, Tensor? frequency, Tensor? repetition, Tensor? counts, Tensor? seen"
)
_argmax_op = register("argmax(Tensor logits) -> Tensor", _argmax, _argmax_fake)
_argmax_out_op = register("argmax_out(Tensor logits, Tensor(a!) out) -> ()", _argmax_out, _argmax_out_fake)
_sample_op = register(f"sample{_SCHEMA}) -> Tensor", _sample, _sample_fake)
_sample_out_op = register(f"sample_out{_SCHEMA}, Tensor(a!) out) -> ()", _sample_out, _sample_out_fake)


def argmax(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the id of each row's largest logit: the smallest of equals; NaN is larger than every number.

    Parameters
    ----------
    logits : Tensor
        ``[rows, vocab]``, float32, float16 or bfloat16, on a CUDA device; last dimension contiguous; vocab up to 2^21.
    out : Tensor, optional
        ``[rows]`` int64.

    Returns
    -------
    Tensor
        ``out``, or a new tensor ``[rows]`` int64.

    Raises
    ------
    ValueError, TypeError
        Naming the argument whose device, shape, strides, value or type is not accepted.
    RuntimeError
        If CUDA refuses the launch.
    ImportError
        If the compiled module is missing.
    """
    refuse_grad("argmax", logits=logits)
    if out is None:
        result: Tensor = _argmax_op(logits)
        return result
    _argmax_out_op(logits, out)
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
    *,
    penalties: Penalties | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token per row: penalties, temperature, top-k, top-p, min-p, then the inverse of the distribution.

    Nothing is sorted: thresholds are found by histograms. Weights are fixed-point integers (40 bits after the point,
    relative to the likeliest token), so a row's token depends on that row alone, bitwise. One launch, no host read.

    The draw takes the first token at which the running sum of the kept weights passes u times the whole, in falling
    order of scores with ties by rising id if the row asks for any filter, else in the order of the ids: the orders of
    ``astrai_kernels.reference.sample``, from which a token differs only where u falls within rounding of a boundary.
    u comes from SplitMix64's finaliser keyed by seed and position (Steele et al. 2014).

    Parameters
    ----------
    logits : Tensor
        ``[rows, vocab]``, float32, float16 or bfloat16, on a CUDA device; last dimension contiguous; vocab up to 2^21.
    temperature : Tensor
        ``[rows]`` or ``[rows, 1]`` float32, as all numbers per row in any stride. 0: the row's argmax, which a row
        whose largest score is infinite or NaN gives too.
    top_k : Tensor or None
        int64. Keep the k largest scores, of equals those with the smallest ids; 0 is off.
    top_p : Tensor or None
        float32. Keep tokens before which less than p of the mass lies, of what top_k left; 1 is off.
    min_p : Tensor or None
        float32. Drop tokens whose probability is below min_p times the largest; 0 is off. The likeliest token is
        kept by all three.
    seed, position : Tensor
        int64: the key and the counter of the generator.
    penalties : tuple of Tensor, optional
        (presence, frequency, repetition, counts, seen), as :func:`astrai_kernels.reference.apply_penalties`.
    out : Tensor, optional
        ``[rows]`` int64.

    Returns
    -------
    Tensor
        ``out``, or a new tensor ``[rows]`` int64.

    Raises
    ------
    ValueError, TypeError, RuntimeError, ImportError
        As :func:`argmax`.
    """
    refuse_grad("sample", logits=logits)
    arguments = (logits, temperature, top_k, top_p, min_p, seed, position, *(penalties or (None,) * 5))
    if out is None:
        result: Tensor = _sample_op(*arguments)
        return result
    _sample_out_op(*arguments, out)
    return out
