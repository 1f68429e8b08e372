"""From prompts and requests to tasks: what a model can be asked is checked here. No torch here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, cast

from astrai_core.errors import RequestError
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_core.types import MAX_SEED, Request, SamplingParams
from astrai_infer.call import Message, Prompt, is_conversation
from astrai_infer.sampling.grammar import Grammar, GrammarCompiler
from astrai_infer.task import Delta, Task
from astrai_infer.text.detokenize import TextStream

if TYPE_CHECKING:
    from astrai_infer.adapters import Adapter, AdapterTable


class TaskFactory:
    """Makes the tasks of one model.

    Parameters
    ----------
    eos_ids
        Ids that end a completion unless the request ignores them.
    max_seq_len
        Longest prompt and completion together, in tokens.
    capacity
        Tokens that one request alone can hold in the KV cache.
    seed
        Seeds the requests that bring none.
    grammars
        For requests with structured output; without it they are refused.
    adapters
        For requests that name one; without it they are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        max_seq_len: int,
        capacity: int,
        seed: int,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._max_seq_len = max_seq_len
        self._capacity = capacity
        self._seeds = random.Random(seed)
        self._grammars = grammars
        self._adapters = adapters

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
            ids = self._tokenizer.encode(prompt) if prompt else []
        elif is_conversation(prompt):
            ids = self._tokenizer.apply_chat_template(list(cast("Sequence[Message]", prompt)))
        elif isinstance(prompt, Sequence) and all(isinstance(token, Integral) for token in prompt):
            ids = [int(token) for token in cast("Sequence[int]", prompt)]
        else:
            raise RequestError(f"a prompt is text, a list of messages or a list of token ids, not {prompt!r:.60}")
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        return ids

    def make(self, request: Request, on_delta: Callable[[Delta], None], prompt_index: int = 0) -> list[Task]:
        """Check a request against the model and make a task for each of its n choices."""
        params, prompt = request.params, request.prompt_token_ids
        self._check_ids(prompt, params)
        if len(prompt) >= self._max_seq_len:
            raise RequestError(
                f"prompt has {len(prompt)} tokens, max_seq_len is {self._max_seq_len} for prompt and completion; "
                "shorten the prompt or raise max_seq_len"
            )
        adapter = self._adapter(request.adapter)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        if params.min_tokens and params.allowed_token_ids is not None and stop_ids.issuperset(params.allowed_token_ids):
            raise RequestError(
                f"min_tokens is {params.min_tokens} but each of allowed_token_ids ends the completion; allow another id or "
                "leave out min_tokens"
            )
        grammar = self._grammar(params)
        tasks: list[Task] = []
        for index in range(params.n):
            task = Task(
                request.request_id,
                prompt,
                params,
                seed=self._seed(params.seed, index),
                max_total_len=min(self._max_seq_len, self._capacity),
                stop_ids=stop_ids,
                text=TextStream(self._tokenizer, params),
                on_delta=on_delta,
                index=index,
                prompt_index=prompt_index,
                priority=request.priority,
                first=tasks[0] if tasks else None,
                grammar=grammar if grammar is None or not index else grammar.copy(),
                adapter=adapter,
            )
            tasks.append(task)
        return tasks

    def _check_ids(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        vocab = self._vocab_size
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

    def _adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        if self._adapters is None:
            raise RequestError(f"adapter {name!r}: this engine serves none; leave it out")
        return self._adapters.find(name)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured is None:
            return None
        if self._grammars is None:
            raise RequestError("structured: this engine has no vocabulary to constrain; leave it out")
        return self._grammars.compile(params.structured)

    def _seed(self, seed: int | None, index: int) -> int:
        """Derive a choice's seed; a request without one draws it from the engine's."""
        if seed is None:
            return self._seeds.getrandbits(63)
        return random.Random(f"{seed}/{index}").randint(0, MAX_SEED)
