"""The attention seam: :class:`AttentionBackend`, its factory and how one is chosen."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from astrai_core import ops
from astrai_core.errors import BackendError
from astrai_core.registry import BaseFactory

if TYPE_CHECKING:
    from astrai_core.attention.metadata import KVCache
    from astrai_core.attention.rotary import Rope

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
    norm_eps: float = 1e-6

    @property
    def scale(self) -> float:
        """Factor of the scores: head_dim ** -0.5."""
        return self.head_dim**-0.5


class AttentionBackend(ABC):
    """Runs the attention of one step against the pool. ``fwd_*`` allocate no slots and never read the device."""

    @staticmethod
    @abstractmethod
    def unavailable(device: torch.device, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """Return why this backend cannot run there, with the remedy, or None if it can.

        Parameters
        ----------
        dtype, kv_dtype
            Types of the queries, and of the keys and values in the pool.
        """

    @staticmethod
    def supports_graph() -> bool:
        """Whether a step through this backend can be captured in a CUDA graph."""
        return False

    @abstractmethod
    def plan(self, cache: KVCache, specs: Sequence[AttentionSpec], *, overlap: bool = False) -> None:
        """Prepare ``metadata.plan`` of every group of the cache for one step.

        Parameters
        ----------
        specs
            A layer of each attention window that the model has; layers with the same window differ in nothing that a
            plan depends on.
        overlap
            The caller's word that the metadata is older than the launch ahead, which is no product: a plan may be made
            beside it.
        """

    def qkv_norm_rope_write(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        cache: KVCache,
        rope: Rope,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Tensor:
        """Split the fused projection, norm and rotate q and k, write k and v into the pool.

        Parameters
        ----------
        qkv
            ``[tokens, (n_heads + 2 * n_kv_heads) * head_dim]``.
        rope
            Of the step's tokens; layers without ``use_rope`` do not rotate.
        q_norm, k_norm
            ``[head_dim]`` weights of the per-head norms, if the model has them.

        Returns
        -------
        q ``[tokens, n_heads, head_dim]``
        """
        k_buffer, v_buffer, metadata = cache.of(spec.layer)
        k_scale, v_scale = cache.scales(spec.layer)
        return ops.qkv_norm_rope_write(
            qkv,
            k_buffer,
            v_buffer,
            metadata.out_cache_loc,
            spec.n_heads,
            spec.n_kv_heads,
            rope=rope if spec.use_rope else None,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=spec.norm_eps,
            k_scale=k_scale,
            v_scale=v_scale,
            # Slots and positions were there before the embedding of the step's tokens, which is no product.
            overlap=ops.OVERLAP,
        )

    def attend(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        cache: KVCache,
        rope: Rope,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Tensor:
        """Do :meth:`qkv_norm_rope_write` and attend; from the projection to ``[tokens, n_heads, head_dim]``."""
        q = self.qkv_norm_rope_write(qkv, spec, cache, rope, q_norm, k_norm)
        run = self.fwd_decode if cache.phase == "decode" else self.fwd_prefill
        return run(q, spec, cache)

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


class AttentionBackendFactory(BaseFactory[AttentionBackend]):
    """Attention backends by name."""


AttentionBackendFactory.register("cuda", "astrai_core.attention.cuda:CudaBackend")
AttentionBackendFactory.register("flash", "astrai_core.attention.flash:FlashAttnBackend")
AttentionBackendFactory.register("torch_native", "astrai_core.attention.torch_native:TorchNativeBackend")
AttentionBackendFactory.register("torch", "astrai_core.attention.torch_native:TorchNativeBackend")


def resolve_backend(
    choice: str | type[AttentionBackend] | AttentionBackend | None,
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Return the backend to use.

    Parameters
    ----------
    choice
        A name, a class or an instance. None takes ``ASTR_BACKEND`` from the environment, and if that is unset the
        first of :data:`PRIORITY` that can run.
    dtype, kv_dtype
        Types of the model, and of the keys and values in the pool; None for the model's.

    Raises
    ------
    BackendError
        If the one asked for cannot run: a backend chosen by hand is never replaced in silence.
    RegistryError
        If the name is unknown.
    """
    if isinstance(choice, AttentionBackend):
        return choice
    needs = device, head_dim, dtype, kv_dtype or dtype
    choice = choice or os.environ.get(ENVIRONMENT) or None
    if choice is None:
        for name in PRIORITY:
            backend = AttentionBackendFactory.get(name)
            if backend.unavailable(*needs) is None:
                return backend()
        raise BackendError(f"no attention backend can run on {device} with head_dim {head_dim} and {dtype}")
    backend = AttentionBackendFactory.get(choice) if isinstance(choice, str) else choice
    reason = backend.unavailable(*needs)
    if reason is not None:
        name = choice if isinstance(choice, str) else choice.__name__
        raise BackendError(f"attention backend {name!r} cannot run on {device}: {reason}")
    return backend()
