"""Settings of the engine."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from astrai_core.config.base import CONFIG, BaseConfig, dataclass

LORA_RANKS = (8, 16, 32, 64)
DEFAULT_LORA_RANK = 16
"""Legal values of ``max_lora_rank``, and what it is where nothing says more."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class EngineConfig(BaseConfig):
    """How much the engine holds and runs at once."""

    max_seq_len: int | None = Field(default=None, gt=1)
    """Longest prompt plus completion in tokens; None means the model's context."""
    max_num_seqs: int = Field(default=64, gt=0, le=4096)
    """Requests that run at once; the others wait."""
    max_batch_tokens: int = Field(default=2048, gt=0)
    """Token budget of one step, shared by decoding requests (one token each) and chunks of prompts."""
    max_chunk_tokens: int | None = Field(default=None, gt=0)
    """Most tokens of prompts in a step in which other requests decode. Few keep the time between tokens even, many finish
    prompts sooner; None leaves them the whole budget."""
    max_waiting: int = Field(default=65536, gt=0)
    """Requests that may wait; one more is refused."""
    page_size: Literal[1, 8, 16, 32, 64] = 16
    """Tokens per page of the KV cache."""
    cache_mode: Literal["paged", "contiguous"] = "paged"
    """"contiguous" reserves one piece of the cache per sequence: no prefix cache, no preemption."""
    prefix_cache: bool = True
    """Keep keys and values of finished requests and reuse them for prompts that begin alike. Without it, layers with
    an attention window keep that window only, however long a sequence is."""
    kv_cache_bytes: int | None = Field(default=None, gt=0)
    """Memory of the KV cache; None sizes it from ``memory_fraction`` and what the limits above can use."""
    memory_fraction: float = Field(default=0.85, gt=0, le=1)
    """Share of the free memory of a CUDA device, after the weights, that the engine may take: for the KV cache, and for
    what its steps need."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"] = "auto"
    """Storage type of keys and values; "auto" is the model's. float8_e4m3fn halves their memory and, for many or long
    sequences, most of the time of attention; each token and head has a scale of its own."""
    deterministic: bool = False
    """Sum in an order that depends on a request alone, so that its tokens do not depend bit by bit on what runs beside it,
    on how its prompt is cut, or on graphs. On a CUDA device with the backend cuda only; a tenth slower. What is recomputed
    after a preemption is summed as a prompt is."""
    speculation: Literal["ngram", "draft"] | None = None
    """Guess what comes next and check several guesses in one step, which changes no token. "ngram": what followed the same
    tokens earlier in the prompt or the answer; for text that repeats itself. "draft": what a small model says. Both are
    for few requests at a time."""
    draft_model: str | None = None
    """The small model of "draft": a directory, a .gguf file, a Hugging Face id or ``smollm2``, of the same vocabulary."""
    max_draft_tokens: int = Field(default=5, ge=1, le=31)
    """Most guesses for a request in a step; each request has its own number up to that, by how its guesses went."""
    max_loras: int | None = Field(default=None, ge=0, le=1024)
    """Adapters that there is room for beside the model, of the projections of every layer; None: as many as are given at
    the start. Without any, steps are what they are without adapters."""
    max_lora_rank: Literal[8, 16, 32, 64] | None = None
    """Largest rank of an adapter, to which all are padded; None: that of the adapters given at the start, else 16."""
    backend: str | None = None
    """Attention backend by name; None picks by priority (see ``ASTR_BACKEND``)."""
    cuda_graphs: bool | None = None
    """Capture steps once and replay them. None: on a CUDA device, if the backend allows it; True: refuse to start where it
    cannot be done."""
    step_kernel: bool | None = None
    """Decode by one kernel that stays on the device for all layers of a step. For dense models with heads of 64 or 128 on
    the backend cuda and compute capability 9.0, without adapters, an e4m3 cache or deterministic mode. None: there, for a
    request alone of a model with small layers (0.6B), where it is faster than the ops; True: for up to eight requests, and
    refuse to start where it cannot be done; False: never."""
    pack_weights: bool = True
    """On a CPU with room for it, keep a second copy of fp32 weights in the layout that decoding reads fastest."""
    seed: int = Field(default=0, ge=0)
    """Seeds the requests that bring no seed of their own."""

    @property
    def n_rows(self) -> int:
        """Rows of a step without chunks: running requests, and guesses. A request alone has room for all of its guesses."""
        return max(self.max_num_seqs, 0 if self.speculation is None else 1 + self.max_draft_tokens)

    @model_validator(mode="after")
    def _draft_model_is_used(self) -> Self:
        check_draft(self.speculation, self.draft_model)
        return self

    @model_validator(mode="after")
    def _budget_covers_decodes(self) -> Self:
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be >= max_num_seqs ({self.max_num_seqs}), "
                "or decoding requests would starve"
            )
        return self


def check_draft(speculation: str | None, draft_model: str | None) -> None:
    """Raise ValueError if a draft model is named that would not be used."""
    if draft_model is not None and speculation != "draft":
        raise ValueError(
            f"draft_model is given but speculation is {speculation!r}; set speculation to 'draft', or leave it out"
        )
