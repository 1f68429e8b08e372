"""Launchers of the compiled module; addresses, strides (in elements) and the stream are integers.

Each raises ValueError for arguments out of range and RuntimeError when CUDA refuses the launch. dtype: 0 float32,
1 float16, 2 bfloat16.
"""

_Rows = tuple[int, int, int]  # address, outer stride, inner stride
_Heads = tuple[int, int, int, int, int, int, int]  # in, out, their token and head strides, heads

def rms_norm(
    dtype: int,
    device: int,
    stream: int,
    x: _Rows,
    weight: int,
    out: _Rows,
    rows: int,
    inner: int,
    hidden: int,
    eps: float,
    /,
) -> None: ...
def add_rms_norm(
    dtype: int,
    device: int,
    stream: int,
    x: _Rows,
    residual: _Rows,
    weight: int,
    out: _Rows,
    residual_out: _Rows,
    rows: int,
    inner: int,
    hidden: int,
    eps: float,
    /,
) -> None: ...
def rotary(
    dtype: int,
    device: int,
    stream: int,
    q: _Heads,
    k: _Heads,
    cos: int,
    cos_stride: int,
    sin: int,
    sin_stride: int,
    max_pos: int,
    position_ids: int,
    position_stride: int,
    positions_are_64_bit: bool,
    tokens: int,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    /,
) -> None: ...
def build_info() -> dict[str, str | int]: ...
