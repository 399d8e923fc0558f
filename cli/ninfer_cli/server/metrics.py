"""`/metrics`: our own Prometheus series, and on request the names that vLLM and llama.cpp dashboards query."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ninfer_core.types import Finish, Usage

if TYPE_CHECKING:
    from .context import RequestRecord
    from .generation import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08)
_SECONDS = (*_FAST, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
# Our histogram's name without prefix, what it says.
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token", _SECONDS),
    "inter_token_latency_seconds": ("Between two output events of one request", _SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end", _SECONDS),
    "request_queue_time_seconds": ("Waiting for a place", _SECONDS),
    "request_prefill_time_seconds": ("Reading the prompt", _SECONDS),
    "request_decode_time_seconds": ("From the first to the last token", _SECONDS),
    "request_prompt_tokens": ("Prompt length", _TOKENS),
    "request_generation_tokens": ("Answer length", _TOKENS),
    "request_max_num_generation_tokens": ("Longest choice of a request", _TOKENS),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens, cached ones included",
    "generation_tokens": "Generated tokens",
    "reasoning_tokens": "Generated tokens inside think blocks",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "draft_tokens": "Tokens proposed by the draft head",
    "accepted_tokens": "Proposed tokens that were accepted",
    "rounds": "Decode rounds",
    "prompt_seconds": "Time spent reading prompts",
    "predicted_seconds": "Time spent generating",
}


class Metrics:
    """Counts what the server does; one registry per server, so several can live in one process."""

    def __init__(self, model_name: str, compat: frozenset[str] = frozenset()) -> None:
        self.registry = CollectorRegistry()
        self.compat = compat
        self.model_name = model_name
        self.engine: Any = None
        self._longest = 0
        self._by_position: list[int] = []
        labels = ("model_name",)
        self._histograms = {
            name: Histogram(f"ninfer:{name}", text, labels, buckets=buckets, registry=self.registry).labels(model_name)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"ninfer:{name}", text, labels, registry=self.registry).labels(model_name)
            for name, text in _COUNTERS.items()
        }
        reasons = (*labels, "finished_reason")
        self._success = Counter("ninfer:request_success", "Complete choices", reasons, registry=self.registry)
        self._ended = Counter("ninfer:request_end", "Requests by outcome", (*labels, "outcome"), registry=self.registry)
        self._http = Counter("ninfer:http_requests", "HTTP answers", ("path", "status"), registry=self.registry)
        self._running = Gauge("ninfer:num_requests_running", "Requests that run", labels, registry=self.registry)
        self._waiting = Gauge("ninfer:num_requests_waiting", "Requests that wait", labels, registry=self.registry)
        self._cache = Gauge("ninfer:kv_cache_usage_perc", "Share of cache pages in use, 0 to 1", labels,
                            registry=self.registry)  # fmt: skip
        for reason in ("stop", "length", "tool_calls"):
            self._success.labels(model_name, reason)
        if compat:
            self.registry.register(_Aliases(self))

    def generation_started(self, generation: Generation) -> None:
        """A request was queued."""
        if generation.prompt_tokens > self._longest:
            self._longest = generation.prompt_tokens

    def first_token(self, seconds: float) -> None:
        """Time to the first token of a request."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def token_gap(self, seconds: float) -> None:
        """Time between two output events."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def generation_ended(self, record: RequestRecord, ends: Sequence[Finish], outcome: str) -> None:
        """A request came to its end; `ends` are those of its choices that finished by themselves."""
        self._ended.labels(self.model_name, outcome).inc()
        for end in ends:
            self._count(end.usage, end)
            if end.reason in ("stop", "length", "tool_calls"):
                self._success.labels(self.model_name, end.reason).inc()
        if ends:
            usages = [end.usage for end in ends]
            self._histograms["request_prompt_tokens"].observe(usages[0].prompt_tokens)
            self._histograms["request_max_num_generation_tokens"].observe(max(u.completion_tokens for u in usages))
            self._histograms["e2e_request_latency_seconds"].observe(record.elapsed())

    def _count(self, usage: Usage, end: Finish) -> None:
        add = {
            "prompt_tokens": usage.prompt_tokens,
            "generation_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "prefix_cache_queries": usage.prompt_tokens,
            "prefix_cache_hits": usage.cached_tokens,
            "draft_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "rounds": usage.rounds,
            "prompt_seconds": end.timings.prefill,
            "predicted_seconds": end.timings.decode,
        }
        for name, value in add.items():
            self._counters[name].inc(max(0, value))
        self._by_position += [0] * (len(usage.accepted_by_position) - len(self._by_position))
        for place, count in enumerate(usage.accepted_by_position):
            self._by_position[place] += count
        self._longest = max(self._longest, usage.total_tokens)
        self._histograms["request_queue_time_seconds"].observe(end.timings.queue)
        self._histograms["request_prefill_time_seconds"].observe(end.timings.prefill)
        self._histograms["request_decode_time_seconds"].observe(end.timings.decode)
        self._histograms["request_generation_tokens"].observe(usage.completion_tokens)

    def http_answer(self, path: str, status: int) -> None:
        """An HTTP answer; `path` is the route's pattern, never the client's text."""
        self._http.labels(path, str(status)).inc()

    def gauges(self) -> dict[str, float]:
        """The engine's state now."""
        stats = self.engine.stats() if self.engine is not None else {}
        cache = stats.get("kv_cache_usage", 0.0)
        return {"running": stats.get("running", 0), "waiting": stats.get("waiting", 0), "cache": cache}

    def render(self) -> bytes:
        """The exposition text."""
        now = self.gauges()
        self._running.labels(self.model_name).set(now["running"])
        self._waiting.labels(self.model_name).set(now["waiting"])
        self._cache.labels(self.model_name).set(now["cache"])
        return generate_latest(self.registry)

    def total(self, name: str) -> float:
        """The value of one of our counters."""
        return float(self._counters[name]._value.get())


class _Aliases:
    """The same figures under the names of other servers, made from ours at every scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """All alias series."""
        if "vllm" in self.metrics.compat:
            yield from self._vllm()
        if "llamacpp" in self.metrics.compat:
            yield from self._llamacpp()

    def _vllm(self) -> Iterable[Metric]:
        metrics, name = self.metrics, self.metrics.model_name
        now = metrics.gauges()
        gauges = {"num_requests_running": "running", "num_requests_waiting": "waiting", "kv_cache_usage_perc": "cache"}
        for alias, key in gauges.items():
            family = GaugeMetricFamily(f"vllm:{alias}", alias, labels=["model_name"])
            family.add_metric([name], now[key])
            yield family
        for counter in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"):
            yield self._counter(f"vllm:{counter}", metrics.total(counter))
        success = CounterMetricFamily(
            "vllm:request_success", "Complete choices", labels=["model_name", "finished_reason"]
        )
        for sample in next(iter(metrics._success.collect())).samples:
            if sample.name.endswith("_total"):
                success.add_metric([name, sample.labels["finished_reason"]], sample.value)
        yield success
        for short in _HISTOGRAMS:
            yield self._histogram(short)

    def _histogram(self, short: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"vllm:{short}", _HISTOGRAMS[short][0], labels=["model_name"])
        samples = list(self.metrics._histograms[short]._child_samples())
        buckets = [(s.labels["le"], s.value) for s in samples if s.name == "_bucket"]
        total = next(s.value for s in samples if s.name == "_sum")
        family.add_metric([self.metrics.model_name], buckets, total)
        return family

    def _counter(self, name: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, name, labels=["model_name"])
        family.add_metric([self.metrics.model_name], value)
        return family

    def _llamacpp(self) -> Iterable[Metric]:
        metrics = self.metrics
        now = metrics.gauges()
        read, made = metrics.total("prompt_seconds"), metrics.total("predicted_seconds")
        rounds, drafted = metrics.total("rounds"), metrics.total("draft_tokens")
        counters = {
            "prompt_tokens": metrics.total("prompt_tokens"),
            "prompt_seconds": read,
            "tokens_predicted": metrics.total("generation_tokens"),
            "tokens_predicted_seconds": made,
            "n_decode": rounds,
            "spec_decode_num_drafts": rounds if drafted else 0.0,
            "spec_decode_num_draft_tokens": drafted,
            "spec_decode_num_accepted_tokens": metrics.total("accepted_tokens"),
        }
        for name, value in counters.items():
            yield CounterMetricFamily(f"llamacpp:{name}", name, value=value)
        places = CounterMetricFamily(
            "llamacpp:spec_decode_num_accepted_tokens_per_pos", "by place", labels=["position"]
        )
        for place, count in enumerate(metrics._by_position or [0]):
            places.add_metric([str(place)], count)
        yield places
        gauges = {
            "prompt_tokens_seconds": metrics.total("prompt_tokens") / read if read else 0.0,
            "predicted_tokens_seconds": metrics.total("generation_tokens") / made if made else 0.0,
            "requests_processing": now["running"],
            "requests_deferred": now["waiting"],
            "n_tokens_max": metrics._longest,
            "n_busy_slots_per_decode": metrics.total("generation_tokens") / rounds if rounds else 0.0,
        }
        for name, gauge in gauges.items():
            yield GaugeMetricFamily(f"llamacpp:{name}", name, value=gauge)
