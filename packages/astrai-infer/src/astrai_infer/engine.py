"""The engine: prompts in, completions or streams of deltas out."""

from __future__ import annotations

import asyncio
import itertools
import queue
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

import torch

from astrai_core.attention.backend import resolve_backend
from astrai_core.auto import load_model
from astrai_core.checkpoint.source import open_source
from astrai_core.errors import AstraiError, EngineError, RequestError
from astrai_core.model.transformer import CausalLM
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_core.types import MAX_SEED, Completion, Request, SamplingParams, Usage
from astrai_infer.cache.pool import PagePool
from astrai_infer.cache.sizing import plan_cache
from astrai_infer.config import EngineConfig
from astrai_infer.runtime.executor import Executor
from astrai_infer.scheduler import InferenceScheduler
from astrai_infer.task import Delta, Task
from astrai_infer.text.detokenize import TextStream

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""Plain text, a conversation (its template is applied), or token ids."""
Result: TypeAlias = Completion | list[Completion]
"""One completion, or the n choices of a prompt with ``n > 1``."""


class InferenceEngine:
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
    ) -> None:
        self.config = config or EngineConfig()
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.generation_config = dict(generation_config or {})
        self.eos_ids = frozenset(tokenizer.eos_token_ids) | frozenset(
            _as_ids(self.generation_config.get("eos_token_id"))
        )
        plan = plan_cache(model, self.config)
        self.max_seq_len = plan.max_seq_len
        self.pool = PagePool(
            plan.spec,
            plan.n_pages,
            self.config.page_size,
            self.config.max_num_seqs,
            plan.max_seq_len,
            model.device,
            prefix_cache=self.config.prefix_cache,
        )
        backend = resolve_backend(self.config.backend, model.device, model.config.head_dim)
        executor = Executor(model, self.pool, backend, self.config.max_num_seqs)
        self.scheduler = InferenceScheduler(self.config, self.pool, executor, self._make_tasks)
        self._request_numbers = itertools.count(1)
        self._seeds = random.Random(self.config.seed)
        self._thread: threading.Thread | None = None
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        **config: Any,
    ) -> Self:
        """Load a model and build an engine for it.

        Parameters
        ----------
        model
            A directory, a .gguf file, a Hugging Face id, or ``smollm2``.
        device, dtype
            See :class:`astrai_core.AutoModel`.
        **config
            Fields of :class:`~astrai_infer.config.EngineConfig`.
        """
        settings = EngineConfig.from_dict(config)
        source = open_source(model)
        tokenizer = source.tokenizer()
        weights = load_model(source, dtype, device)
        return cls(weights, tokenizer, settings, generation_config=source.generation_config(), name=str(model))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
    ) -> Result | list[Result] | Iterator[Delta]:
        """Complete one prompt or many.

        Parameters
        ----------
        prompts
            Text, a conversation, token ids, or a list of these.
        params
            For all prompts, or a list with one entry per prompt.
        stream
            Return an iterator of :class:`~astrai_infer.task.Delta`; the last delta of each choice carries the
            completion. Dropping the iterator aborts what is left.

        Returns
        -------
        A completion per prompt (a list of n of them where ``params.n > 1``): one result for one prompt, a list for a
        list. In a list, a prompt that cannot be served yields a completion with ``finish_reason == "error"``.

        Raises
        ------
        RequestError
            If a single prompt is malformed or does not fit.
        EngineError
            If the engine failed.
        """
        inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        run = self._start(prompts, params, inbox.put)
        deltas = self._drain(run, inbox)
        return deltas if stream else run.results(list(deltas))

    def generate_async(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
    ) -> Awaitable[Result | list[Result]] | AsyncIterator[Delta]:
        """Do the same for asyncio: await the result, or iterate with ``async for`` when streaming."""
        deltas = self._stream_async(prompts, params)
        return deltas if stream else self._collect_async(prompts, params)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its choices finish with reason "abort"."""
        self.scheduler.abort(request_id)

    def close(self) -> None:
        """Stop the background thread and end what is still running with an error. Idempotent."""
        with self.scheduler.work:
            self._closed = True
            self.scheduler.work.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.scheduler.fail_all("the engine was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """Turn one prompt into token ids: text as it is, a conversation through the chat template.

        Raises
        ------
        RequestError
            If the prompt is empty or neither text, messages nor ids.
        ChatTemplateError
            If the template is missing or refuses the messages.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt) if prompt else []
        elif _is_conversation(prompt):
            ids = self.tokenizer.apply_chat_template(list(cast("Sequence[Message]", prompt)))
        else:
            ids = list(cast("Sequence[int]", prompt))
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        return ids

    def _start(self, prompts: Any, params: Any, deliver: Callable[[Delta], None]) -> _Run:
        """Queue all prompts of a call; a list's bad prompts are answered at once with an error completion."""
        if self._closed:
            raise EngineError("the engine is closed; create a new one")
        single = not _is_list_of_prompts(prompts)
        listed: list[Prompt] = [prompts] if single else list(prompts)
        each = _params_for(params, len(listed))
        run = _Run(single, [p.n for p in each])
        for i, (prompt, sampling) in enumerate(zip(listed, each, strict=True)):
            request_id = f"req-{next(self._request_numbers)}"
            run.request_ids.append(request_id)
            try:
                request = Request(prompt_token_ids=tuple(self.encode(prompt)), params=sampling, request_id=request_id)
                self.scheduler.submit(self._make_tasks(request, deliver, prompt_index=i))
            except AstraiError as error:
                if single:
                    raise
                for choice in range(sampling.n):
                    deliver(_refusal(str(error), request_id, choice, i))
        self._ensure_running()
        return run

    def _drain(self, run: _Run, inbox: queue.SimpleQueue[Delta]) -> Iterator[Delta]:
        try:
            while run.n_open:
                yield run.take(inbox.get())
        finally:
            self._abandon(run)

    async def _stream_async(self, prompts: Any, params: Any) -> AsyncIterator[Delta]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Delta] = asyncio.Queue()

        def deliver(delta: Delta) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, delta)

        run = await asyncio.to_thread(self._start, prompts, params, deliver)
        try:
            while run.n_open:
                yield run.take(await inbox.get())
        finally:
            self._abandon(run)

    async def _collect_async(self, prompts: Any, params: Any) -> Result | list[Result]:
        each = _params_for(params, len(prompts) if _is_list_of_prompts(prompts) else 1)
        shape = _Run(not _is_list_of_prompts(prompts), [p.n for p in each])
        return shape.results([delta async for delta in self._stream_async(prompts, params)])

    def _abandon(self, run: _Run) -> None:
        if run.n_open:
            for request_id in run.request_ids:
                self.scheduler.abort(request_id)

    def _make_tasks(self, request: Request, on_delta: Callable[[Delta], None], prompt_index: int = 0) -> list[Task]:
        """Check a request against the model and make a task for each of its n choices."""
        params, prompt = request.params, request.prompt_token_ids
        self._check_ids(prompt, params)
        if len(prompt) >= self.max_seq_len:
            raise RequestError(
                f"prompt has {len(prompt)} tokens, max_seq_len is {self.max_seq_len} for prompt and completion; "
                "shorten the prompt or raise max_seq_len"
            )
        eos = frozenset() if params.ignore_eos else self.eos_ids
        return [
            Task(
                request.request_id,
                prompt,
                params,
                seed=self._seed(params.seed, index),
                max_total_len=self.max_seq_len,
                stop_ids=eos | frozenset(params.stop_token_ids),
                text=TextStream(self.tokenizer, params),
                on_delta=on_delta,
                index=index,
                prompt_index=prompt_index,
                priority=request.priority,
            )
            for index in range(params.n)
        ]

    def _check_ids(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        vocab = self.model.config.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        for field, ids in (
            ("prompt", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", tuple(params.logit_bias or ())),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < vocab):
                bad = next(i for i in ids if not 0 <= i < vocab)
                raise RequestError(f"{field}: token id {bad} is outside the vocabulary of {vocab}; correct it")

    def _seed(self, seed: int | None, index: int) -> int:
        """Derive a choice's seed; a request without one draws it from the engine's."""
        if seed is None:
            return self._seeds.getrandbits(63)
        return random.Random(f"{seed}/{index}").randint(0, MAX_SEED)

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
            scheduler.fail_all(f"the engine stopped: {type(error).__name__}: {error}")
            raise


class _Run:
    """One call: how many prompts and choices it has, and which are still open."""

    def __init__(self, single: bool, counts: list[int]) -> None:
        self.single = single
        self.counts = counts
        self.n_open = sum(counts)
        self.request_ids: list[str] = []

    def take(self, delta: Delta) -> Delta:
        """Note a delta; the failure of a single prompt raises."""
        if delta.completion is not None:
            self.n_open -= 1
            if self.single and delta.completion.error is not None:
                raise EngineError(delta.completion.error)
        return delta

    def results(self, deltas: list[Delta]) -> Result | list[Result]:
        """Arrange the completions as the prompts were given."""
        found = {(d.prompt_index, d.choice): d.completion for d in deltas if d.completion is not None}
        listed: list[Result] = []
        for i, n in enumerate(self.counts):
            choices = [found[i, choice] for choice in range(n)]
            listed.append(choices[0] if n == 1 else choices)
        return listed[0] if self.single else listed


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _is_list_of_prompts(prompts: Any) -> bool:
    """A list of texts, conversations or id lists; a conversation or one list of ids is a single prompt."""
    if isinstance(prompts, str) or _is_conversation(prompts):
        return False
    return isinstance(prompts, Sequence) and len(prompts) > 0 and not isinstance(prompts[0], int)


def _params_for(params: Any, n_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n_prompts
    listed = list(params)
    if len(listed) != n_prompts:
        raise RequestError(f"{len(listed)} SamplingParams for {n_prompts} prompts; give one, or one for each")
    return listed


def _refusal(error: str, request_id: str, index: int, prompt_index: int) -> Delta:
    completion = Completion(
        text="",
        token_ids=(),
        finish_reason="error",
        usage=Usage(prompt_tokens=0, completion_tokens=0),
        index=index,
        request_id=request_id,
        error=error,
    )
    return Delta.of("", (), index, completion, prompt_index)


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
