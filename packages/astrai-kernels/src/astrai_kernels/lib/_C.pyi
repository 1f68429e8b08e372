"""Launchers of the compiled module; addresses, strides (in elements) and the stream are integers.

Each raises ValueError for arguments out of range and RuntimeError when CUDA refuses the launch. dtype: 0 float32,
1 float16, 2 bfloat16.
"""

_Rows = tuple[int, int, int]  # address, outer stride, inner stride
_Matrix = tuple[int, int]  # address, stride of the rows
_StepShape = tuple[int, int, int, int, int, int, int]  # rows, hidden, intermediate, heads, kv heads, head_dim, vocab
_Adapters = tuple[int, int, bool, int]  # adapter_ids, their stride, whether they have 64 bits; adapters
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
    overlap: bool,
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
def linear(
    dtype: int,
    device: int,
    stream: int,
    x: _Matrix,
    weight: _Matrix,
    bias: int,
    residual: _Matrix,
    out: _Matrix,
    norm_weight: int,
    norm_eps: float,
    rows: int,
    features: int,
    depth: int,
    swiglu: bool,
    fixed_order: bool,
    /,
) -> None: ...
def lora_shrink(
    dtype: int,
    device: int,
    stream: int,
    x: _Matrix,
    a: _Rows,  # address, adapter stride, row stride
    adapters: _Adapters,
    out: _Matrix,
    rows: int,
    rank: int,
    depth: int,
    /,
) -> None: ...
def lora_expand(
    dtype: int,
    device: int,
    stream: int,
    base: _Matrix,
    hidden: _Matrix,
    b: _Rows,  # address, adapter stride, row stride
    adapters: _Adapters,
    scaling: int,
    out: _Matrix,
    rows: int,
    rank: int,
    features: int,
    /,
) -> None: ...
def qkv_norm_rope_write(
    dtype: int,
    device: int,
    stream: int,
    qkv: tuple[int, int],
    q: _Rows,  # address, token stride, head stride
    k_buffer: _Rows,  # address, slot stride, head stride
    v_buffer: _Rows,
    k_scale: tuple[int, int],
    v_scale: tuple[int, int],
    q_norm: int,
    k_norm: int,
    cos: tuple[int, int],
    sin: tuple[int, int],
    max_pos: int,
    position_ids: tuple[int, int],
    positions_are_64_bit: bool,
    out_cache_loc: tuple[int, int],
    locs_are_64_bit: bool,
    pool_size: int,
    tokens: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    eps: float,
    interleaved: bool,
    overlap: bool,
    /,
) -> None: ...
def gated_activation(
    dtype: int,
    kind: int,  # 0 silu, 1 gelu_tanh, 2 gelu
    device: int,
    stream: int,
    x: _Rows,
    out: _Rows,
    rows: int,
    inner: int,
    width: int,
    /,
) -> None: ...
def embedding(
    dtype: int,
    device: int,
    stream: int,
    ids: tuple[int, int],
    ids_are_64_bit: bool,
    table: tuple[int, int],
    out: tuple[int, int],
    next: tuple[int, int, int],
    tokens: int,
    vocab: int,
    hidden: int,
    /,
) -> None: ...
def sample(
    dtype: int,
    device: int,
    stream: int,
    logits: tuple[int, int],
    out: tuple[int, int],
    rows: int,
    vocab: int,
    filters: list[tuple[int, int]],  # temperature, top_k, top_p, min_p, seed, position: address (0: absent), stride
    penalties: list[tuple[int, int]],  # presence, frequency, repetition
    counts: tuple[int, int],
    seen: tuple[int, int],
    /,
) -> None: ...

_HeadRows = tuple[int, int, int]  # address, token and head stride
_Keys = tuple[int, int, int, int]  # address; slot, head and batch stride
_Table = tuple[int, int]  # address (0: none), row stride
_Shape = tuple[int, int, int, int, int]  # heads, kv heads, head_dim, q_len, window (0: none)
_Scratch = tuple[int, int, int, int, int]  # plan, partial_out, partial_ml, counters, max_chunks

def attention_decode(
    dtype: int,
    device: int,
    stream: int,
    q: _HeadRows,
    out: _HeadRows,
    lse: int,
    k: _Keys,
    v: _Keys,
    k_scale: _Rows,  # address (0: none), slot and batch stride
    v_scale: _Rows,
    table: _Table,
    mask: _Table,
    sinks: int,
    shape: _Shape,
    scale: float,
    softcap: float,
    overlap: bool,
    batch: int,
    fixed_len: int,
    scratch: _Scratch,
    /,
) -> None: ...
def qkv_attention_decode(
    dtype: int,
    device: int,
    stream: int,
    qkv: _Matrix,
    k_buffer: _HeadRows,
    v_buffer: _HeadRows,
    q_norm: int,
    k_norm: int,
    cos: _Matrix,
    sin: _Matrix,
    max_pos: int,
    position_ids: _Matrix,
    positions_are_64_bit: bool,
    out_cache_loc: _Matrix,
    locs_are_64_bit: bool,
    pool_size: int,
    batch: int,
    rotary_dim: int,
    eps: float,
    interleaved: bool,
    overlap: bool,
    out: _HeadRows,
    table: _Table,
    shape: _Shape,
    scale: float,
    fixed_len: int,
    scratch: _Scratch,
    /,
) -> None: ...
def attention_prefill(
    dtype: int,
    device: int,
    stream: int,
    q: _HeadRows,
    out: _HeadRows,
    lse: int,
    k: _Keys,
    v: _Keys,
    k_scale: _Rows,  # address (0: none), slot and batch stride
    v_scale: _Rows,
    table: _Table,
    mask: _Table,
    sinks: int,
    shape: _Shape,
    scale: float,
    softcap: float,
    batch: tuple[int, int, int, int],
    n_tokens: int,
    /,
) -> None: ...
def attention_scalar(
    dtype: int,
    device: int,
    stream: int,
    q: _HeadRows,
    out: _HeadRows,
    lse: int,
    k: _Keys,
    v: _Keys,
    k_scale: _Rows,
    v_scale: _Rows,
    table: _Table,
    mask: _Table,
    sinks: int,
    shape: _Shape,
    scale: float,
    softcap: float,
    batch: tuple[int, int, int, int],
    n_tokens: int,
    /,
) -> None: ...
def attention_plan(
    device: int,
    stream: int,
    seq_lens: int,
    req_indices: int,
    plan: int,
    batch: int,
    max_chunks: int,
    shape: _Shape,
    fixed_len: int,
    overlap: bool,
    /,
) -> None: ...
def attention_capacity(
    head_dim: int, n_heads: int, n_kv_heads: int, q_len: int, batch: int, device: int, /
) -> tuple[int, int]: ...
def decode_step(
    dtype: int,
    device: int,
    stream: int,
    shape: _StepShape,
    inputs: tuple[int, int, int, int, int],
    req_to_token: _Matrix,
    layers: tuple[int, int],
    maps: int,
    weights: tuple[int, int, int],
    angles: tuple[int, int, int, int, int],
    pool: tuple[int, int, int, int, int],
    outputs: tuple[int, int],
    workspace: int,
    eps: float,
    scale: float,
    /,
) -> None: ...
def step_capacity(device: int, shape: _StepShape, n_layers: int, /) -> tuple[int, int]: ...
def step_maps(dtype: int, device: int, shape: _StepShape, layers: list[list[int]], head: int, /) -> bytes: ...
def build_info() -> dict[str, str | int]: ...
