"""What both protocols stand on: prompts, limits, the engine, and the road from its pieces to events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astrai_core.errors import EngineError
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_core.types import SamplingParams
from astrai_infer.client import EngineClient, Generation
from astrai_infer.server.config import ServerConfig
from astrai_infer.server.errors import ApiError
from astrai_infer.server.metrics import Clock, ServerMetrics
from astrai_infer.wire import Piece

FROM_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Defaults that are taken from generation_config.json."""

SILENT_S = 10.0
"""An engine that was not heard of for so long is not well; it speaks several times a second."""

STEP_S = 120.0
"""A step that takes longer hangs."""


@dataclass(frozen=True)
class ServedAdapter:
    """One that clients can ask for."""

    path: str
    created: int
    """When it was loaded, in seconds since 1970."""


class Running:
    """Requests that run: ``async for pieces in running``."""

    def __init__(
        self, serving: Serving, request_id: str, prompts: Sequence[Sequence[int]], n: int, adapter: str | None = None
    ) -> None:
        self._generation = Generation(serving.client)
        self._adapter = adapter
        self._metrics = serving.metrics.of(adapter or serving.config.names[0])
        self._clock = Clock(request_id, n, self._metrics)
        self.n_prompt_tokens = sum(map(len, prompts))
        self.created = int(time.time())
        self.deadline_s = asyncio.get_running_loop().time() + serving.config.request_timeout
        """By the loop's clock."""

    async def submit(self, client: EngineClient, prompt: Sequence[int], params: SamplingParams, priority: int) -> None:
        """Add a request."""
        await client.submit(self._generation, prompt, params, priority, self._adapter)

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        async for pieces in self._generation:
            self._clock.on_pieces(pieces)
            error, made = None, []
            for piece in pieces:
                if piece.end is not None and piece.end.error is not None:
                    error = piece.end.error
                    piece = piece._replace(end=None)
                if piece.text or piece.token_ids or piece.end is not None:
                    made.append(piece)
            if made:
                yield made
            if error is not None:
                raise EngineError(error)

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        if self._generation.n_open:
            self._metrics.finished["abort"] += self._generation.n_open
            self._generation.n_open = 0
        self._generation.close()


class Serving:
    """One model behind an engine, and its adapters.

    Parameters
    ----------
    generation_config
        Content of the model's generation_config.json.

    Attributes
    ----------
    draining
        New requests are refused, those that run are finished.
    n_active
        HTTP requests in flight.
    n_embedding
        Requests for embeddings that run or wait.
    adapters
        Name -> adapter that clients can ask for as a model.
    """

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, config: ServerConfig, generation_config: Mapping[str, Any]
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self.draining = False
        self.n_active = self.n_embedding = 0
        prefixes = ("astrai", "vllm") if config.vllm_metrics else ("astrai",)
        self.metrics = ServerMetrics(client, config.names[0], prefixes)
        self.created = int(time.time())
        self.adapters = {name: ServedAdapter(path, self.created) for name, path in client.info.adapters.items()}
        self._loading = asyncio.Lock()
        self._defaults = {
            name: generation_config[name] for name in FROM_MODEL if generation_config.get(name) is not None
        }
        if generation_config.get("do_sample") is False:
            self._defaults["temperature"] = 0.0
        SamplingParams.from_dict(self._defaults)
        tokenizer.token_bytes(0)  # its table is built now, not in the first request

    def check_model(self, name: str) -> str | None:
        """Refuse a model that is not served; return the adapter that the name stands for, None for the model itself."""
        if name in self.adapters:
            return name
        if name not in self.config.names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; ask for {self.config.names[0]!r}",
                param="model",
                code="model_not_found",
            )
        return None

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve one more adapter.

        Raises
        ------
        ApiError, AstraiError
            If the name is the model's own; what :meth:`InferenceEngine.load_adapter` raises.
        """
        if name in self.config.names:
            raise ApiError(400, f"{name!r} is a name of the model itself; give the adapter another", param="lora_name")
        async with self._loading:
            await self.client.call("load_adapter", name, path)
            self.adapters[name] = ServedAdapter(path, int(time.time()))

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; those that run finish.

        Raises
        ------
        ApiError
            If there is none of that name.
        """
        async with self._loading:
            if name not in self.adapters:
                raise ApiError(404, f"no adapter {name!r} is loaded", param="lora_name", code="model_not_found")
            await self.client.call("unload_adapter", name)
            del self.adapters[name]

    def sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """Combine what the request says, what the model recommends, and the defaults of the HTTP API.

        Raises
        ------
        ConfigError
            Names the field, the value and the legal range.
        """
        fields = {name: value for name, value in given.items() if value is not None}
        return SamplingParams.from_dict({"rep_window": 0, **self._defaults, **fields})

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Turn texts into token ids, away from the event loop."""
        return await asyncio.to_thread(self.tokenizer.encode_batch, texts, add_special_tokens=add_special_tokens)

    async def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens included, away from the event loop."""
        return await asyncio.to_thread(self.tokenizer.decode, ids, skip_special_tokens=False)

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Refuse token ids outside of the vocabulary."""
        vocab = self.client.info.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            raise ApiError(400, f"{field}: a token id is outside the vocabulary of {vocab}; correct it", param=field)

    def check_length(self, what: str, ids: Sequence[int]) -> None:
        """Refuse a prompt that can never be served, before anything walks over its tokens."""
        longest = self.client.info.max_seq_len
        if len(ids) > longest:
            raise ApiError(
                400, f"{what} has {len(ids)} tokens, max_seq_len is {longest}; shorten it or raise max_seq_len"
            )

    def check_room(self, wanted: int) -> None:
        """Refuse so many more completions, or requests for embeddings, if the queue does not hold them."""
        limit = self.client.info.max_num_seqs + self.config.max_queue
        if wanted > limit:
            raise ApiError(400, f"the request asks for {wanted} completions, the server takes {limit}; ask for fewer")
        busy = self.client.n_open + self.n_embedding
        if busy + wanted > limit:
            message = f"{busy} requests run or wait and the server takes {limit}; try again later"
            raise ApiError(429, message, code="queue_full", retry_after_s=1)

    async def start(
        self,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        priority: int = 0,
        *,
        adapter: str | None = None,
    ) -> Running:
        """Queue requests; returns when the engine has taken all of them. Close what is returned.

        Parameters
        ----------
        adapter
            What :meth:`check_model` returned.

        Raises
        ------
        ApiError
            If the queue is full.
        RequestError, EngineError
            See :meth:`EngineClient.submit`.
        """
        self.check_room(params.n * len(prompts))
        for prompt in prompts:
            self.check_length("prompt", prompt)
        running = Running(self, request_id, prompts, params.n, adapter)
        try:
            async with asyncio.timeout_at(running.deadline_s):  # a grammar may wait long for its turn
                for prompt in prompts:
                    await running.submit(self.client, prompt, params, priority)
        except BaseException:
            running.close()
            raise
        return running

    def trouble(self) -> str | None:
        """Why the engine cannot serve now; None while all is well."""
        client, health = self.client, self.client.health
        if client.error is not None:
            return client.error
        if client.silent_s > SILENT_S:
            return f"the engine has said nothing for {client.silent_s:.0f} s"
        if health is None or health.status == "stopped":
            return "the engine stopped"
        if health.status == "ok" and health.n_running and health.seconds_since_step > STEP_S:
            return f"{health.n_running} completions run and no step has ended for {health.seconds_since_step:.0f} s"
        return None
