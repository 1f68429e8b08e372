"""What attention refuses of an e4m3 cache and its scales; on meta tensors, so no GPU is needed (row K10)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from astrai_kernels import prefill_attention, scalar_attention

FP8 = torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


OPERANDS = {
    "q": empty(5, 6, 64, dtype=torch.bfloat16),
    "k": empty(32, 2, 64, dtype=FP8),
    "v": empty(32, 2, 64, dtype=FP8),
    "qo_indptr": empty(3, dtype=torch.int32),
    "seq_lens": empty(2, dtype=torch.int32),
    "req_to_token": empty(2, 16, dtype=torch.int32),
    "k_scale": empty(32, 2),
    "v_scale": empty(32, 2),
}


@pytest.mark.parametrize("op", [prefill_attention, scalar_attention])
def test_operands_are_accepted(op) -> None:
    assert op(**OPERANDS).shape == (5, 6, 64)
    contiguous = {name: empty(2, 16, *OPERANDS[name].shape[1:], dtype=OPERANDS[name].dtype) for name in ("k", "v")}
    scales = {f"{name}_scale": empty(2, 16, 2) for name in "kv"}
    assert op(**{**OPERANDS, **contiguous, **scales, "req_to_token": None}).shape == (5, 6, 64)


@pytest.mark.parametrize("op", [prefill_attention, scalar_attention])
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k_scale": None, "v_scale": None}, ValueError, "k has dtype torch.float8_e4m3fn but k_scale and v_scale are"),
        ({"v_scale": None}, ValueError, "v_scale is None, expected both scales or none"),
        ({"k": empty(32, 2, 64, dtype=torch.bfloat16)}, TypeError, "k has dtype torch.bfloat16, expected torch.float8"),
        ({"k_scale": empty(31, 2)}, ValueError, r"k_scale has shape \(31, 2\), expected \(32, 2\)"),
        ({"v_scale": empty(32, 2, dtype=torch.float16)}, TypeError, "v_scale has dtype torch.float16"),
        (
            {"v": empty(32, 2, 72, dtype=FP8)[..., :64]},
            ValueError,
            "v has strides .* expected multiples of 16 elements",
        ),
    ],
)
def test_operands_are_refused(op, changed, error, message) -> None:
    with pytest.raises(error, match=f"{op.__name__}: {message}"):
        op(**{**OPERANDS, **changed})
