"""The engine: prompts in, completions or streams of deltas out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from astrai_core.attention.backend import resolve_backend
from astrai_core.auto import load_model, resolve_device, resolve_dtype
from astrai_core.checkpoint.adapter import AdapterFiles
from astrai_core.checkpoint.hf_adapter import load_tensors
from astrai_core.checkpoint.source import open_source
from astrai_core.errors import ConfigError, EngineError
from astrai_core.model.transformer import CausalLM
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_core.types import Request
from astrai_infer.adapters import open_adapters, read_adapters
from astrai_infer.admission import TaskFactory
from astrai_infer.cache.sizing import can_hold_packed, context_len, resolve_kv_dtype
from astrai_infer.call import Prompt, as_ids
from astrai_infer.config import EngineConfig
from astrai_infer.draft_model import open_draft, resolve_draft
from astrai_infer.generation import PromptFront
from astrai_infer.metrics import Health
from astrai_infer.runtime.build import build_runtime
from astrai_infer.sampling.grammar import GrammarCompiler
from astrai_infer.scheduler import InferenceScheduler
from astrai_infer.task import Delta

CLOSED = "the engine is closed; create a new one"
HALF_UPDATED = "the last update_weights failed half way; update the weights again"


class InferenceEngine(PromptFront):
    """Continuous batching over one model.

    Usable from many threads and from asyncio. A background thread steps while requests are live; it starts with the
    first request, and :meth:`close` (or leaving the context) ends it.

    >>> with InferenceEngine.from_pretrained("smollm2") as engine:          # doctest: +SKIP
    ...     print(engine.generate([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=32)).text)
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        generation_config: Mapping[str, Any] | None = None,
        name: str = "",
        adapters: Mapping[str, str | Path | AdapterFiles] | None = None,
        draft_model: CausalLM | None = None,
    ) -> None:
        super().__init__()
        self.config = config or EngineConfig()
        self.model = model
        draft = resolve_draft(self.config, model, tokenizer, draft_model)
        self.tokenizer = tokenizer
        tokenizer.stream_decoder()  # its table is built now, not in the first request
        self.name = name
        self.generation_config = dict(generation_config or {})
        self.eos_ids = frozenset(tokenizer.eos_token_ids) | frozenset(
            as_ids(self.generation_config.get("eos_token_id"))
        )
        self._packs = self.config.pack_weights and can_hold_packed(model)
        if self._packs:
            model.pack_weights()
            if draft is not None:
                draft.pack_weights()
        self.adapters = open_adapters(model, self.config, read_adapters(adapters or {}))
        try:
            runtime = build_runtime(model, self.config, self.adapters.slots, draft)
        except BaseException:
            self.adapters.close()
            raise
        self.pool = runtime.pool
        self.max_seq_len = runtime.plan.max_seq_len
        self.tasks = TaskFactory(
            tokenizer,
            vocab_size=model.config.vocab_size,
            eos_ids=self.eos_ids,
            max_seq_len=self.max_seq_len,
            capacity=self.pool.capacity,
            seed=self.config.seed,
            grammars=GrammarCompiler(tokenizer, model.config.vocab_size, self.eos_ids),
            adapters=self.adapters,
        )
        self._executor = runtime.executor
        self.scheduler = InferenceScheduler(self.config, self.pool, self._executor, self.tasks.make)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._owner = threading.Lock()
        """Whoever pauses, wakes or changes the engine does it alone."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        **config: Any,
    ) -> Self:
        """Load a model and build an engine for it.

        Parameters
        ----------
        model
            A directory, a .gguf file, a Hugging Face id, or ``smollm2``.
        device, dtype
            See :class:`astrai_core.AutoModel`.
        adapters
            Name -> directory of a PEFT adapter that requests can ask for; see :meth:`load_adapter`.
        **config
            Fields of :class:`~astrai_infer.config.EngineConfig`.
        """
        settings = EngineConfig.from_dict(config)
        source = open_source(model)
        architecture = source.config()
        context_len(architecture, settings)  # what was asked for is checked before the weights take their time
        found = read_adapters(adapters or {})
        place = resolve_device(device)
        wanted = resolve_dtype(dtype, architecture, place)
        resolve_backend(settings.backend, place, architecture.head_dim, wanted, resolve_kv_dtype(settings, wanted))
        tokenizer = source.tokenizer()
        open_draft(settings, architecture, tokenizer)
        weights = load_model(source, dtype, device)
        defaults = source.generation_config()
        return cls(weights, tokenizer, settings, generation_config=defaults, name=str(model), adapters=found)

    def submit(self, request: Request, deliver: Callable[[Delta], None], prompt_index: int = 0) -> None:
        """Queue one request and return; `deliver` gets its deltas, in the thread that steps.

        Raises
        ------
        RequestError
            If it can never be served, or the queue is full.
        EngineError
            If the engine is closed, or its weights are half updated.
        """
        self.check_alive()
        self.scheduler.submit(self.tasks.make(request, deliver, prompt_index=prompt_index))
        self._ensure_running()

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its choices finish with reason "abort"."""
        self.scheduler.abort(request_id)

    def health(self) -> Health:
        """Describe what the engine is doing now; any thread may ask at any time, also during a step."""
        scheduler, pool = self.scheduler, self.pool
        counts = None if scheduler.drafter is None else scheduler.drafter.counts
        return Health(
            status="stopped" if self._closed else "paused" if scheduler.paused else "ok",
            n_running=len(scheduler.running),
            n_waiting=scheduler.n_waiting,
            n_steps=scheduler.n_steps,
            seconds_since_step=scheduler.seconds_since_step,
            n_preemptions=scheduler.n_preemptions,
            n_pages_free=pool.n_free,
            n_pages_cached=pool.n_cached,
            n_pages_used=pool.n_used,
            weight_version=scheduler.weight_version,
            n_drafts=0 if counts is None else counts.n_drafts,
            n_drafted=0 if counts is None else counts.n_drafted,
            n_accepted=0 if counts is None else counts.n_accepted,
        )

    def pause(self) -> None:
        """Run no further step until :meth:`resume`; live requests keep their place, new ones queue up, aborts are served."""
        with self._owner:
            self.scheduler.pause()

    def resume(self) -> None:
        """Go on after :meth:`pause` or :meth:`sleep`; the KV cache's memory is taken again."""
        with self._owner:
            if self.pool.allocate():
                self._executor.prepare()
            self.scheduler.resume()

    def sleep(self) -> None:
        """Pause and give the KV cache's memory back; live requests are recomputed after :meth:`resume`."""
        with self._owner:
            self.scheduler.pause()
            with self.scheduler.between_steps(recompute=True):
                self._executor.forget()
                self.pool.free()

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy new weights over the old ones, which keep their addresses.

        Running requests keep their tokens and recompute their keys and values with the new weights; those that come
        meanwhile wait; the prefix cache is emptied; completions report `version` as their ``weight_version``.

        Parameters
        ----------
        tensors
            (Hugging Face name, tensor) for every weight of the model, in any order, dtype and device.
        version
            Larger than the last one.

        Raises
        ------
        ConfigError
            If `version` does not rise.
        CheckpointError
            If a tensor is missing, unknown or misshapen. The weights are then a mixture: live requests end with an error,
            and the engine refuses new ones until an update succeeds.
        """
        scheduler = self.scheduler
        with self._owner:
            if version <= scheduler.weight_version:
                raise ConfigError(f"version is {version}, it must be larger than {scheduler.weight_version}")
            with scheduler.between_steps(recompute=True):
                try:
                    load_tensors(self.model, tensors, "update_weights")
                    if self._packs:
                        self.model.pack_weights()
                except BaseException:
                    scheduler.end_all("an update of the weights failed half way", HALF_UPDATED)
                    raise
                scheduler.weight_version = version
                scheduler.refusal = CLOSED if self._closed else None

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """Let requests ask for one more adapter; the weights stay as they are, and what runs goes on.

        Parameters
        ----------
        directory
            Of PEFT's, for this model.

        Raises
        ------
        CheckpointError, ConfigError
            If it is damaged or does not fit the model, or the engine has no room for adapters (``max_loras``).
        RequestError
            If the name is taken, or every slot.
        """
        prepared, scheduler = self.adapters.prepare(name, directory), self.scheduler
        with scheduler.between_steps(recompute=False), scheduler.work:
            self.adapters.put(prepared, [task.adapter for task in scheduler.alive() if task.adapter is not None])

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; those that have it finish with it, and then its slot is free.

        Raises
        ------
        RequestError
            If it is not loaded.
        """
        with self.scheduler.work:
            self.adapters.remove(name)

    def close(self) -> None:
        """Stop the background thread and end what is still running with an error. Idempotent."""
        with self.scheduler.work:
            self._closed = True
            self.scheduler.work.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.scheduler.fail_all("the engine was closed", CLOSED)
        self.adapters.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn one prompt into token ids; see :meth:`TaskFactory.encode`."""
        return self.tasks.encode(prompt)

    def check_alive(self) -> None:
        """Raise EngineError if the engine is closed, or its weights are half updated."""
        if self._closed:
            raise EngineError(CLOSED)
        if self.scheduler.refusal is not None:
            raise EngineError(self.scheduler.refusal)

    def _ensure_running(self) -> None:
        with self.scheduler.work:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="astrai-engine", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        scheduler = self.scheduler
        try:
            while True:
                with scheduler.work:
                    scheduler.work.wait_for(lambda: scheduler.has_work or self._closed)
                if self._closed:
                    return
                scheduler.step()
        except BaseException as error:
            self._closed = True
            scheduler.fail_all(f"the engine stopped: {type(error).__name__}: {error}", CLOSED)
            raise
