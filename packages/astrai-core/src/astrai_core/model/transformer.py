"""The causal language model: embedding, decoder layers, final norm, output projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from astrai_core import ops
from astrai_core.attention.backend import AttentionBackend
from astrai_core.attention.gather import causal_mask
from astrai_core.config.lora import LoRAConfig
from astrai_core.config.model import ModelConfig
from astrai_core.errors import RequestError
from astrai_core.linear_ops import HalfNorm
from astrai_core.model.attention import DenseContext, PagedContext, attention_spec
from astrai_core.model.decoder_block import DecoderBlock
from astrai_core.model.documents import DocumentKernel, plan_documents
from astrai_core.model.layers import Embedding, Linear, RMSNorm
from astrai_core.model.moe import ExpertLinear, Experts, RouterStats
from astrai_core.model.rope import RotaryTable
from astrai_core.registry import BaseFactory

if TYPE_CHECKING:
    from astrai_core.attention.metadata import KVCache


@dataclass
class CausalLMOutput:
    """Result of a forward pass over whole sequences."""

    logits: Tensor
    """``[batch, seq, vocab]``"""
    last_hidden_state: Tensor
    """``[batch, seq, hidden]``, after the final norm."""


def computed_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type that products of weights of `dtype` are computed in: autocast's where it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTable(config)

    def forward(self, input_ids: Tensor, context: DenseContext, embedding_noise: Tensor | None = None) -> Tensor:
        """Return normed hidden states ``[batch, seq, hidden]`` for ``[batch, seq]`` ids."""
        x, residual = self.embed_tokens(input_ids), None
        if embedding_noise is not None:
            x = x + embedding_noise.to(x.dtype)
        # A table is no product, so autocast leaves it alone: the residual stream would be in fp32.
        x = x.to(computed_in(x.dtype, x.device))
        for layer in self.layers:
            x, residual, _ = layer(x, residual, context)
        return self.norm(x, residual)[0]

    def embed(self, input_ids: Tensor) -> tuple[Tensor, HalfNorm | None]:
        """Look up ``[tokens]`` ids for :meth:`step`, and do half of the first norm where that can be done."""
        rows = self.embed_tokens.weight[:1].expand(len(input_ids), -1)  # such as will be looked up
        if self.layers[0].can_add(rows):  # type: ignore[operator]
            return self.embed_tokens.begin(input_ids, self.layers[0].input_layernorm)  # type: ignore[arg-type]
        x = self.embed_tokens(input_ids)
        return x.to(computed_in(x.dtype, x.device)), None

    def step(
        self, x: Tensor, half: HalfNorm | None, context: PagedContext, head: Linear
    ) -> tuple[Tensor, Tensor | None, HalfNorm | None]:
        """Run the layers over the ``[tokens, hidden]`` of :meth:`embed` and a cache.

        Each norm that stands between two projections is shared out between them where that can be done, the last one
        between a projection and `head`.

        Returns
        -------
        What the last :class:`DecoderBlock` does: x, the residual stream, and half of the final norm.
        """
        norms: list[RMSNorm] = [layer.input_layernorm for layer in self.layers]  # type: ignore[misc]
        norms_behind = [*norms[1:], self.norm if head.can_fuse(x) else None]
        residual = None
        for layer, following in zip(self.layers, norms_behind, strict=True):
            x, residual, half = layer(x, residual, context, half, following)
        return x, residual, half


class CausalLM(nn.Module):
    """Decoder-only language model of every supported family; the same class trains and serves.

    Attributes
    ----------
    spec_of_window
        Attention window -> the first layer that has it.
    document_kernel
        What computes the attention of rows of several documents.
    lora
        What its adapters are, if :func:`astrai_core.model.lora.apply_lora` gave it some.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.document_kernel: DocumentKernel = "auto"
        self.lora: LoRAConfig | None = None
        self.model = Decoder(config)
        specs = [attention_spec(config, layer) for layer in range(config.num_hidden_layers)]
        self.spec_of_window = {spec.window: spec for spec in reversed(specs)}
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output projection the embedding itself, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def pack_weights(self) -> None:
        """Keep a second copy of the projections in the CPU library's own layout, which few-row products read faster.

        For serving only: call it again after the weights changed. Without effect where such a layout does not exist.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights: normal with std ``initializer_range``, zero biases, unit norms."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, ExpertLinear)):
                module.weight.normal_(0.0, self.config.initializer_range, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.model.embed_tokens.weight.dtype

    @property
    def supports_graph(self) -> bool:
        """Whether a pass without gradients reads nothing back from the device: it can be captured in a CUDA graph."""
        return all(module.supports_graph for module in self.modules() if isinstance(module, Experts))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the activations: that of the weights, or autocast's where it is on."""
        return computed_in(self.dtype, self.device)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> CausalLMOutput:
        """Compute the logits of whole sequences.

        Parameters
        ----------
        input_ids
            ``[batch, seq]`` int64.
        position_ids
            ``[batch, seq]`` or ``[seq]`` int64; 0, 1, 2, ... if None.
        attention_mask
            ``[batch, seq]``, nonzero where a token is real; padding may be on either side. Logits at padding are finite
            and without meaning.

        Raises
        ------
        RequestError
            If a shape is wrong or the sequence is longer than the model's context.
        """
        hidden = self.hidden_states(input_ids, position_ids, attention_mask)
        return CausalLMOutput(self.lm_head(hidden), hidden)

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        doc_lens: Sequence[int] | None = None,
        embedding_noise: Tensor | None = None,
        router_stats: RouterStats | None = None,
    ) -> Tensor:
        """Compute what :meth:`forward` projects to logits: ``[batch, seq, hidden]``, after the final norm.

        Parameters
        ----------
        input_ids, position_ids, attention_mask
            As in :meth:`forward`.
        doc_lens
            Lengths of the documents that make up the ``batch * seq`` tokens, row after row (padding counts as
            documents of its own); no document attends to another. None: every row is one document.
        embedding_noise
            ``[batch, seq, hidden]``: added to the token vectors.
        router_stats
            Filled by the layers with experts.

        Raises
        ------
        RequestError
            As in :meth:`forward`; if `doc_lens` does not add up, or is given beside `attention_mask`.
        """
        if input_ids.dim() != 2:
            raise RequestError(f"input_ids must be [batch, seq], got shape {tuple(input_ids.shape)}")
        batch, seq = input_ids.shape
        if seq > self.config.max_position_embeddings:
            raise RequestError(
                f"input_ids has {seq} positions, the model's context is {self.config.max_position_embeddings}; shorten it"
            )
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise RequestError(
                f"attention_mask must be [batch, seq] = {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}"
            )
        if position_ids is None:
            position_ids = torch.arange(seq, device=input_ids.device)
        rope = self.model.rotary(position_ids.expand(batch, seq).reshape(-1))
        rope.of_tokens()  # made here and not by the first layer, or torch.compile would make each layer anew
        device = input_ids.device
        windowed = any(window is not None and window < seq for window in self.spec_of_window)
        if windowed and doc_lens is None and attention_mask is None and device.type == "cuda":
            doc_lens = (seq,) * batch  # the kernel of documents knows windows; a mask of seq x seq is not made
        if doc_lens is not None:
            if attention_mask is not None or sum(doc_lens) != batch * seq:
                raise RequestError(
                    f"doc_lens must add up to batch x seq = {batch * seq} tokens and excludes attention_mask, got {doc_lens}"
                )
            documents = plan_documents(
                doc_lens,
                self.document_kernel,
                device=device,
                dtype=self.compute_dtype,
                head_dim=self.config.head_dim,
                dropout=self.config.attention_dropout if self.training else 0.0,
            )
            return self.model(input_ids, DenseContext(rope, {}, documents, router_stats), embedding_noise)
        masks = {window: self._dense_mask(seq, window, attention_mask, device) for window in self.spec_of_window}
        return self.model(input_ids, DenseContext(rope, masks, router=router_stats), embedding_noise)

    def forward_paged(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cache: KVCache,
        backend: AttentionBackend,
        logit_rows: Tensor | None = None,
    ) -> Tensor:
        """Run one engine step: write the tokens' keys and values into the pool, attend to it; return ``[rows, vocab]``.

        Parameters
        ----------
        input_ids, position_ids
            ``[tokens]`` int64: the step's tokens, request after request.
        cache
            View of the pool with this step's metadata; planned here.
        logit_rows
            ``[rows]`` int64: tokens whose logits are wanted; None for all.
        """
        x, half = self.model.embed(input_ids)
        # The step's metadata is older than the embedding, beside which the plan is then made.
        backend.plan(cache, tuple(self.spec_of_window.values()), overlap=ops.OVERLAP)
        context = PagedContext(self.model.rotary(position_ids), cache, backend)
        x, residual, half = self.model.step(x, half, context, self.lm_head)
        norm = self.model.norm
        if half is not None:
            half = half if logit_rows is None else HalfNorm(*(part[logit_rows] for part in half))
            return self.lm_head.fused(x, norm=norm, half=half)
        # The rows are taken behind the norm, which may read the residual stream before the launch ahead of it has ended.
        hidden = norm(x, residual)[0]
        logits: Tensor = self.lm_head(hidden if logit_rows is None else hidden[logit_rows])
        return logits

    @staticmethod
    def _dense_mask(seq: int, window: int | None, keep: Tensor | None, device: torch.device) -> Tensor | None:
        if keep is None and (window is None or window >= seq):
            return None
        mask = causal_mask(seq, seq, window, device)
        if keep is None:
            return mask
        # A padded query sees at least itself, so no row of the softmax is empty; real queries never see padding.
        itself = torch.eye(seq, dtype=torch.bool, device=device)
        return ((mask & keep.bool()[:, None, :]) | itself)[:, None]


class ModelFactory(BaseFactory[nn.Module]):
    """Model classes by ``model_type``."""


for _family in ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"):
    ModelFactory.register(_family, CausalLM)
