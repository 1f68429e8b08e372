"""The attention seam: :class:`AttentionBackend`, its factory and how one is chosen."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from astrai_core import ops
from astrai_core.attention.metadata import KVCache
from astrai_core.errors import BackendError
from astrai_core.registry import BaseFactory

ENVIRONMENT = "ASTR_BACKEND"
PRIORITY = ("cuda", "flash", "torch_native")
"""Order in which backends are tried when none is named."""


@dataclass(frozen=True)
class AttentionSpec:
    """The facts of one attention layer that a backend needs."""

    layer: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int | None = None
    """Keys a query sees, its own included; None for all."""
    use_rope: bool = True
    interleaved: bool = False
    norm_eps: float = 1e-6

    @property
    def scale(self) -> float:
        """Factor of the scores: head_dim ** -0.5."""
        return self.head_dim**-0.5


class AttentionBackend(ABC):
    """Runs the attention of one step against the pool. ``fwd_*`` allocate no slots and never read the device."""

    @staticmethod
    @abstractmethod
    def unavailable(device: torch.device, head_dim: int) -> str | None:
        """Return why this backend cannot run there, with the remedy, or None if it can."""

    @staticmethod
    def supports_graph() -> bool:
        """Whether a step through this backend can be captured in a CUDA graph."""
        return False

    @abstractmethod
    def plan(self, cache: KVCache, windows: tuple[int | None, ...]) -> None:
        """Prepare ``cache.metadata.plan`` for one step.

        Parameters
        ----------
        windows
            The distinct attention windows of the model's layers.
        """

    def qkv_norm_rope_write(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        cache: KVCache,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Tensor:
        """Split the fused projection, norm and rotate q and k, write k and v into the pool.

        Parameters
        ----------
        qkv
            ``[tokens, (n_heads + 2 * n_kv_heads) * head_dim]``.
        cos, sin
            ``[tokens, 1, rotary_dim]`` fp32, see :func:`astrai_core.ops.rotary`.
        q_norm, k_norm
            ``[head_dim]`` weights of the per-head norms, if the model has them.

        Returns
        -------
        q ``[tokens, n_heads, head_dim]``
        """
        q, k, v = split_qkv(qkv, spec, cos, sin, q_norm, k_norm)
        cache.write(spec.layer, k.to(cache.k_buffer.dtype), v.to(cache.v_buffer.dtype))
        return q

    @abstractmethod
    def fwd_prefill(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """Causal attention of ragged queries; keys and values are read from the pool only.

        Parameters
        ----------
        q
            ``[tokens, n_heads, head_dim]``; a request's queries are the last of its ``seq_lens`` positions.

        Returns
        -------
        ``[tokens, n_heads, head_dim]``
        """

    @abstractmethod
    def fwd_decode(self, q: Tensor, spec: AttentionSpec, cache: KVCache) -> Tensor:
        """The same with one query per request: q ``[batch, n_heads, head_dim]``."""


def split_qkv(
    qkv: Tensor,
    spec: AttentionSpec,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection ``[tokens, ...]`` into normed, rotated q, k and plain v, ``[tokens, heads, head_dim]``."""
    heads = qkv.view(qkv.shape[0], spec.n_heads + 2 * spec.n_kv_heads, spec.head_dim)
    n_queries, n_rotated = spec.n_heads, spec.n_heads + spec.n_kv_heads
    v = heads[:, n_rotated:]
    if q_norm is None or k_norm is None:
        qk = heads[:, :n_rotated]
        if spec.use_rope:
            qk = ops.rotary(qk, cos, sin, interleaved=spec.interleaved)
        return qk[:, :n_queries], qk[:, n_queries:], v
    q = ops.rms_norm(heads[:, :n_queries], q_norm, spec.norm_eps)
    k = ops.rms_norm(heads[:, n_queries:n_rotated], k_norm, spec.norm_eps)
    if spec.use_rope:
        q = ops.rotary(q, cos, sin, interleaved=spec.interleaved)
        k = ops.rotary(k, cos, sin, interleaved=spec.interleaved)
    return q, k, v


class AttentionBackendFactory(BaseFactory[AttentionBackend]):
    """Attention backends by name."""


AttentionBackendFactory.register("torch_native", "astrai_core.attention.torch_native:TorchNativeBackend")
AttentionBackendFactory.register("torch", "astrai_core.attention.torch_native:TorchNativeBackend")


def resolve_backend(
    choice: str | type[AttentionBackend] | AttentionBackend | None,
    device: torch.device,
    head_dim: int,
) -> AttentionBackend:
    """Return the backend to use.

    Parameters
    ----------
    choice
        A name, a class or an instance. None takes ``ASTR_BACKEND`` from the environment, and if that is unset the
        first of :data:`PRIORITY` that can run.

    Raises
    ------
    BackendError
        If the one asked for cannot run: a backend chosen by hand is never replaced in silence.
    RegistryError
        If the name is unknown.
    """
    if isinstance(choice, AttentionBackend):
        return choice
    choice = choice or os.environ.get(ENVIRONMENT) or None
    if choice is None:
        for name in PRIORITY:
            if name in AttentionBackendFactory.names():
                backend = AttentionBackendFactory.get(name)
                if backend.unavailable(device, head_dim) is None:
                    return backend()
        raise BackendError(f"no attention backend can run on {device} with head_dim {head_dim}")
    backend = AttentionBackendFactory.get(choice) if isinstance(choice, str) else choice
    reason = backend.unavailable(device, head_dim)
    if reason is not None:
        name = choice if isinstance(choice, str) else choice.__name__
        raise BackendError(f"attention backend {name!r} cannot run on {device}: {reason}")
    return backend()
