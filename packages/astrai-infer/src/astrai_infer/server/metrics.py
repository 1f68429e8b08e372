"""What the server counts: Prometheus text, and totals for people. Names are vLLM's, under ``astrai:``."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from astrai_infer.client import EngineClient
from astrai_infer.metrics import Health
from astrai_infer.wire import End, Piece

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
N_LAST = 128
"""Finished choices that /stats lists."""


class Histogram:
    """Counts of observations up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus wants them."""
        total, listed = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            listed.append((bound, float(total)))
        return listed


@dataclass
class RequestRecord:
    """One choice that ended."""

    request_id: str
    model: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    latency_s: float


@dataclass
class Clock:
    """The times of one request; ``on_pieces`` is called with all that comes."""

    request_id: str
    n: int
    """Choices of each prompt."""
    metrics: ModelMetrics
    started_s: float = field(default_factory=time.monotonic)
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)

    def on_pieces(self, pieces: Sequence[Piece]) -> None:
        """Note the arrival of pieces."""
        now, metrics = time.monotonic(), self.metrics
        new: dict[int, int] = {}
        for piece in pieces:
            if piece.token_ids:
                new[piece.choice] = new.get(piece.choice, 0) + len(piece.token_ids)
        for choice, n_tokens in new.items():
            last = self.last_s.get(choice)
            if last is None:
                self.first_s[choice] = now
                metrics.ttft.observe(now - self.started_s)
            else:
                metrics.inter_token.observe((now - last) / n_tokens, n_tokens)
                metrics.decode_s += now - last
                metrics.n_decoded += n_tokens
            self.last_s[choice] = now
            metrics.n_generated += n_tokens
        for piece in pieces:
            if piece.end is not None:
                self._ended(piece.choice, piece.end, now)

    def _ended(self, choice: int, end: End, now: float) -> None:
        metrics, usage, first = self.metrics, end.usage, self.first_s.get(choice)
        metrics.finished[end.finish_reason] += 1
        metrics.latency.observe(now - self.started_s)
        metrics.generation_len.observe(usage.completion_tokens)
        if choice % self.n == 0:  # a prompt counts once
            metrics.n_prompt += usage.prompt_tokens
            metrics.n_cached += usage.cached_tokens
            metrics.prompt_len.observe(usage.prompt_tokens)
        record = RequestRecord(
            self.request_id,
            metrics.model,
            end.finish_reason,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            None if first is None else round(first - self.started_s, 6),
            round(now - self.started_s, 6),
        )
        metrics.last.append(record)


class ModelMetrics:
    """What is counted of the requests for one model: the base, or an adapter.

    Parameters
    ----------
    model
        Its name, the label of the metrics.
    last
        Takes the choices that end.
    """

    def __init__(self, model: str, last: deque[RequestRecord]) -> None:
        self.model = model
        self.last = last
        self.ttft, self.inter_token, self.latency = Histogram(_SECONDS), Histogram(_SECONDS), Histogram(_SECONDS)
        self.prompt_len, self.generation_len = Histogram(_TOKENS), Histogram(_TOKENS)
        self.n_prompt = self.n_cached = self.n_generated = 0
        self.n_decoded, self.decode_s = 0, 0.0
        self.finished: Counter[str] = Counter()


class ServerMetrics(Collector):
    """All counters of one server.

    Parameters
    ----------
    model
        The base's name: what is counted of the engine stands under it.
    prefixes
        Each metric is shown under each of them.
    """

    def __init__(self, client: EngineClient, model: str, prefixes: Sequence[str]) -> None:
        self._client = client
        self._model = model
        self._prefixes = prefixes
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.started_s = time.time()
        self.last: deque[RequestRecord] = deque(maxlen=N_LAST)
        self._models: dict[str, ModelMetrics] = {}
        self.of(model)

    def of(self, model: str) -> ModelMetrics:
        """Return what is counted of one model."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(model, self.last)
        return found

    @property
    def finished(self) -> Counter[str]:
        """Completions of all models that ended, by reason."""
        return sum((each.finished for each in self._models.values()), Counter[str]())

    def text(self) -> bytes:
        """Return Prometheus' text format."""
        return generate_latest(self._registry)

    def stats(self) -> dict[str, Any]:
        """Return totals of all models, what runs, means, and the last finished choices."""
        health, models = self._client.health, self._models.values()
        n_decoded, decode_s = sum(each.n_decoded for each in models), sum(each.decode_s for each in models)
        return {
            "uptime_s": round(time.time() - self.started_s, 3),
            "finished": dict(self.finished),
            "running": 0 if health is None else health.n_running,
            "waiting": 0 if health is None else health.n_waiting,
            "prompt_tokens": sum(each.n_prompt for each in models),
            "cached_tokens": sum(each.n_cached for each in models),
            "generation_tokens": sum(each.n_generated for each in models),
            "mean_ttft_s": mean(each.ttft for each in models),
            "mean_latency_s": mean(each.latency for each in models),
            "decode_tokens_per_s_per_request": n_decoded / decode_s if decode_s else None,
            "engine": None if health is None else asdict(health),
            "last": [asdict(record) for record in self.last],
        }

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are not reserved before the first collection."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every metric under every prefix."""
        for prefix in self._prefixes:
            yield from self._collect(f"{prefix}:")

    def _collect(self, prefix: str) -> Iterator[Metric]:
        labels, health = ["model_name"], self._client.health
        if health is not None:
            pages = health.n_pages_free + health.n_pages_cached + health.n_pages_used
            for name, text, value in (
                ("num_requests_running", "Completions that run.", health.n_running),
                ("num_requests_waiting", "Completions that wait.", health.n_waiting),
                ("kv_cache_usage_perc", "Share of the KV cache that is in use.", health.n_pages_used / max(pages, 1)),
            ):
                gauge = GaugeMetricFamily(prefix + name, text, labels=labels)
                gauge.add_metric([self._model], value)
                yield gauge
        for name, text, of_engine in _ENGINE_COUNTERS:
            total = CounterMetricFamily(prefix + name, text, labels=labels)
            total.add_metric([self._model], 0 if health is None else of_engine(health))
            yield total
        for name, text, count in _COUNTERS:
            counter = CounterMetricFamily(prefix + name, text, labels=labels)
            for model, counted in self._models.items():
                counter.add_metric([model], count(counted))
            yield counter
        success = CounterMetricFamily(
            prefix + "request_success", "Completions that ended.", labels=[*labels, "finished_reason"]
        )
        for model, counted in self._models.items():
            for reason, n in sorted(counted.finished.items()):
                success.add_metric([model, reason], n)
        yield success
        for name, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(prefix + name, text, labels=labels)
            for model, counted in self._models.items():
                found = histogram(counted)
                family.add_metric([model], found.buckets(), found.sum)
            yield family


_ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[Health], int]], ...] = (
    ("num_preemptions", "Completions that were sent back to the queue.", lambda health: health.n_preemptions),
    ("spec_decode_num_drafts", "Times that a completion had guesses in a step.", lambda health: health.n_drafts),
    ("spec_decode_num_draft_tokens", "Tokens guessed.", lambda health: health.n_drafted),
    ("spec_decode_num_accepted_tokens", "Tokens guessed right.", lambda health: health.n_accepted),
)


def mean(histograms: Iterable[Histogram]) -> float | None:
    """Return the mean of all observations of several histograms; None if there are none."""
    listed = list(histograms)
    count = sum(each.count for each in listed)
    return sum(each.sum for each in listed) / count if count else None


_COUNTERS: tuple[tuple[str, str, Callable[[ModelMetrics], int]], ...] = (
    ("prompt_tokens", "Tokens of prompts.", lambda counted: counted.n_prompt),
    ("generation_tokens", "Tokens of completions.", lambda counted: counted.n_generated),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda counted: counted.n_prompt),
    ("prefix_cache_hits", "Prompt tokens found there.", lambda counted: counted.n_cached),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    ("time_to_first_token_seconds", "From the request to its first token.", lambda counted: counted.ttft),
    ("inter_token_latency_seconds", "From token to token.", lambda counted: counted.inter_token),
    ("e2e_request_latency_seconds", "From the request to its end.", lambda counted: counted.latency),
    ("request_prompt_tokens", "Length of prompts.", lambda counted: counted.prompt_len),
    ("request_generation_tokens", "Length of completions.", lambda counted: counted.generation_len),
)
