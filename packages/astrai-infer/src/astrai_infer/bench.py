"""Speed of the engine: decode, prefill and start, with random or real weights, beside transformers in the same run.

Rows BM1 and BM2: without a model the 1.2 B preset below is measured with random weights, and the KV cache is sized from
the prompt and the tokens to be generated, whatever they are.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from astrai_core.auto import AutoModel
from astrai_core.config.model import ModelConfig
from astrai_core.errors import MissingDependencyError
from astrai_core.model.transformer import CausalLM
from astrai_core.types import Request, SamplingParams
from astrai_infer.config import EngineConfig
from astrai_infer.engine import InferenceEngine
from astrai_infer.task import Task
from astrai_infer.testing import byte_tokenizer

PRESET: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100_000,
    "hidden_size": 1536,
    "intermediate_size": 6912,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""1.204 B parameters, head_dim 64."""

WARM_STEPS = 5


@dataclass(frozen=True)
class Measurement:
    """One figure: medians over the trials."""

    what: str
    """"decode" or "prefill"."""
    engine: str
    """"astrai" or "transformers"."""
    batch: int
    prompt_len: int
    """Tokens per prompt."""
    new_tokens: int
    """Tokens generated per sequence; 1 for prefill."""
    seconds: float
    """Of one trial."""
    tokens_per_s: float
    """Generated (decode) or fed (prefill) tokens of all sequences per second."""
    limit_tokens_per_s: float | None = None
    """Of decode: what a plain copy's rate would allow, for the bytes that every step must read."""

    @classmethod
    def of(
        cls, what: str, engine: str, batch: int, prompt_len: int, new_tokens: int, trials: list[float]
    ) -> Measurement:
        """Summarise the trials' seconds."""
        seconds = statistics.median(trials)
        tokens = batch * (new_tokens if what == "decode" else prompt_len)
        return cls(what, engine, batch, prompt_len, new_tokens, seconds, tokens / seconds)


def preset_model(config: ModelConfig | None = None, dtype: str | None = None, device: str | None = None) -> CausalLM:
    """Build a model with random weights: the preset, or another architecture."""
    generator_device = "cpu" if device in (None, "auto") and not torch.cuda.is_available() else (device or "cuda")
    generator = torch.Generator(generator_device).manual_seed(0)
    return AutoModel.from_config(config or ModelConfig.from_dict(PRESET), dtype, device, generator).eval()


def prompts(batch: int, prompt_len: int, vocab_size: int) -> list[list[int]]:
    """Return random token ids, different for each sequence so that no prefix is shared."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (batch, prompt_len), generator=generator).tolist()


def step_bytes(engine: InferenceEngine, batch: int, kv_len: float) -> float:
    """Bytes that a decode step must read: each weight once (a table that is only gathered from, not at all), and the
    keys and values of `batch` sequences of `kv_len`."""
    model = engine.model
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.model.embed_tokens.weight.nbytes
    return weights + batch * kv_len * sum(group.spec.token_bytes for group in engine.pool.groups)


@functools.lru_cache
def copy_rate(device: torch.device) -> float:
    """Measure how many bytes a second an elementwise kernel reads and writes there, the best of some rounds."""
    source = torch.ones(1 << 25, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        synchronize(device)
        start = time.perf_counter()
        torch.neg(source, out=target)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


class EngineBench:
    """Times an engine's steps on one model.

    Parameters
    ----------
    model
        Weights to measure.
    backend
        Attention backend by name; None picks by priority.
    speculation
        Fields of :class:`~astrai_infer.config.EngineConfig` that say how it guesses; every sequence has room for all of its
        guesses. The prompts are random, so what comes of it depends on the model alone.
    draft_model
        A loaded draft model.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: str | None = None,
        speculation: Mapping[str, Any] | None = None,
        draft_model: CausalLM | None = None,
    ) -> None:
        self.model = model
        self.backend = backend
        self.speculation = dict(speculation or {})
        self.draft_model = draft_model

    def decode(self, batch: int, prompt_len: int, new_tokens: int, trials: int) -> Measurement:
        """Time `trials` stretches of `new_tokens` steps after the prompts are in."""
        # An engine that runs ahead has a token more on its way than it tells of.
        total_len = prompt_len + WARM_STEPS + new_tokens * trials + 2
        if self.speculation:  # whose guesses are right is ahead of the others
            total_len += new_tokens * trials
        engine = self._engine(batch, prompt_len, total_len)
        step = self._submit(engine, batch, prompt_len, total_len - prompt_len)
        while any(task.output_len < WARM_STEPS for task in engine.scheduler.running) or engine.scheduler.n_steps == 0:
            step()
        if self.speculation:
            tasks = engine.scheduler.running.copy()
            stretches = [self._until(tasks, batch * new_tokens, step) for _ in range(trials)]
            return Measurement.of("decode", "astrai", batch, prompt_len, new_tokens, stretches)
        seconds = [self._timed(lambda: [step() for _ in range(new_tokens)]) for _ in range(trials)]
        kv_len = prompt_len + WARM_STEPS + new_tokens * trials / 2
        limit = batch * copy_rate(self.model.device) / step_bytes(engine, batch, kv_len)
        found = Measurement.of("decode", "astrai", batch, prompt_len, new_tokens, seconds)
        return replace(found, limit_tokens_per_s=limit)

    def prefill(self, batch: int, prompt_len: int, trials: int) -> Measurement:
        """Time `trials` rounds from the queue to the first token of every sequence."""
        seconds = []
        for trial in range(trials + 1):
            engine = self._engine(batch, prompt_len, prompt_len + 1)
            step = self._submit(engine, batch, prompt_len, 1)

            def drain(engine: InferenceEngine = engine, step: Callable[[], bool] = step) -> None:
                while engine.scheduler.has_work:
                    step()

            elapsed = self._timed(drain)
            if trial:  # the first round warms up
                seconds.append(elapsed)
        return Measurement.of("prefill", "astrai", batch, prompt_len, 1, seconds)

    def _until(self, tasks: list[Task], n_tokens: int, step: Callable[[], bool]) -> float:
        """Step until the tasks have so many tokens more, or have ended; return the seconds that so many take."""
        before = sum(task.output_len for task in tasks)
        got = 0

        def run() -> None:
            nonlocal got
            while got < n_tokens and step():
                got = sum(task.output_len for task in tasks) - before

        return self._timed(run) * n_tokens / got

    def _engine(self, batch: int, prompt_len: int, total_len: int) -> InferenceEngine:
        guesses = EngineConfig.from_dict(self.speculation)
        n_rows = batch if guesses.speculation is None else batch * (1 + guesses.max_draft_tokens)
        config = EngineConfig(
            max_num_seqs=n_rows,
            max_seq_len=total_len + 1,
            max_batch_tokens=max(batch * prompt_len, n_rows),
            backend=self.backend,
            prefix_cache=False,
            speculation=guesses.speculation,
            max_draft_tokens=guesses.max_draft_tokens,
        )
        return InferenceEngine(self.model, byte_tokenizer(), config, draft_model=self.draft_model)

    def _submit(self, engine: InferenceEngine, batch: int, prompt_len: int, max_tokens: int) -> Callable[[], bool]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for ids in prompts(batch, prompt_len, self.model.config.vocab_size):
            request = Request(prompt_token_ids=tuple(ids), params=params)
            engine.scheduler.submit(engine.tasks.make(request, lambda delta: None))
        return engine.scheduler.step

    def _timed(self, run: Callable[[], object]) -> float:
        synchronize(self.model.device)
        start = time.perf_counter()
        run()
        synchronize(self.model.device)
        return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def transformers_model(model: CausalLM) -> Any:
    """Build transformers' model with the same weights, sharing no memory.

    Raises
    ------
    MissingDependencyError
        If transformers is not installed.
    """
    import tempfile

    from astrai_core.checkpoint.hf_adapter import save_pretrained

    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise MissingDependencyError("comparing needs transformers; run `pip install transformers`") from None
    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(model, f"{directory}/model")
        theirs: Any = AutoModelForCausalLM.from_pretrained(f"{directory}/model", dtype=model.dtype)
        return theirs.to(model.device).eval()


class TransformersBench:
    """The same measurements through transformers' forward pass with its dynamic cache, greedy."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def decode(self, batch: int, prompt_len: int, new_tokens: int, trials: int) -> Measurement:
        """See :meth:`EngineBench.decode`."""
        ids = torch.tensor(prompts(batch, prompt_len, self.model.config.vocab_size), device=self.model.device)
        out = self.model(ids, use_cache=True, logits_to_keep=1)

        def run(n: int) -> None:
            nonlocal out
            for _ in range(n):
                token = out.logits[:, -1:].argmax(-1)
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)

        run(WARM_STEPS)
        seconds = []
        for _ in range(trials):
            synchronize(self.model.device)
            start = time.perf_counter()
            run(new_tokens)
            synchronize(self.model.device)
            seconds.append(time.perf_counter() - start)
        return Measurement.of("decode", "transformers", batch, prompt_len, new_tokens, seconds)

    @torch.inference_mode()
    def prefill(self, batch: int, prompt_len: int, trials: int) -> Measurement:
        """See :meth:`EngineBench.prefill`."""
        ids = torch.tensor(prompts(batch, prompt_len, self.model.config.vocab_size), device=self.model.device)
        seconds = []
        for trial in range(trials + 1):
            synchronize(self.model.device)
            start = time.perf_counter()
            self.model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
            if trial:
                seconds.append(time.perf_counter() - start)
        return Measurement.of("prefill", "transformers", batch, prompt_len, 1, seconds)


def start_seconds(model: str, device: str | None = None, dtype: str | None = None) -> float:
    """Time a fresh process from its start to the first token of a short prompt."""
    code = (
        "import sys; from astrai_infer import InferenceEngine, SamplingParams\n"
        "with InferenceEngine.from_pretrained(sys.argv[1], device=sys.argv[2] or None, dtype=sys.argv[3] or None) as e:\n"
        "    e.generate('Hello', SamplingParams(temperature=0, max_tokens=1))"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, model, device or "", dtype or ""], check=True)
    return time.perf_counter() - start
