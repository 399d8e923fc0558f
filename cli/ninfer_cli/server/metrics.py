"""`/metrics`: our own Prometheus series, and on request the names that vLLM and llama.cpp dashboards query."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ninfer_core.types import Finish, Usage

if TYPE_CHECKING:
    from .context import RequestRecord
    from .generation import Generation
    from .host import ModelHost

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08)
_SECONDS = (*_FAST, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
# Our histogram's name without prefix, what it says.
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token", _SECONDS),
    "inter_token_latency_seconds": ("From one output of a request to its next", _SECONDS),
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


_REASONS = ("stop", "length", "tool_calls")
# Our gauge's name, the engine's own for the figure, what it says.
_GAUGES = {
    "num_requests_running": ("running", "Requests that run"),
    "num_requests_waiting": ("waiting", "Requests that wait"),
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of cache pages in use by running requests, 0 to 1"),
    "draft_depth": ("draft_depth", "Tokens drafted per round and sequence at the present load"),
    "kv_pages": ("pages_total", "Pages of the KV cache"),
    "kv_pages_cached": ("pages_cached", "Pages that only the prefix cache holds; a request that needs them gets them"),
    "prefix_cache_checkpoints": ("checkpoints", "States that the prefix cache keeps"),
    "prefix_cache_checkpoint_slots": ("checkpoints_total", "States that it can keep"),
    "prefix_cache_checkpoints_evicted": ("checkpoints_evicted", "States that made room for others since loading"),
    "prefix_cache_lookups": ("prefix_queries", "Prompts looked up in the prefix cache since loading"),
    "prefix_cache_lookup_hits": ("prefix_hits", "Prompts of which it had a beginning"),
    "prefix_cache_host_checkpoints": ("host_checkpoints", "States that it keeps in host memory"),
    "prefix_cache_host_bytes": ("host_bytes", "Bytes of host memory that these and their pages take"),
    "prefix_cache_host_bytes_limit": ("host_bytes_total", "Bytes of host memory that they may take"),
    "prefix_cache_host_stored": ("host_stored", "States copied to host memory since loading"),
    "prefix_cache_host_restored": ("host_restored", "Prompts resumed from host memory since loading"),
    "prefix_cache_host_evicted": ("host_evicted", "States that made room for others there since loading"),
}
_ALWAYS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_IN_USE = "Pages of the KV cache that running requests hold"


class _Series:
    """The histograms and counters of one model."""

    def __init__(self, name: str, histograms: Mapping[str, Histogram], counters: Mapping[str, Counter]) -> None:
        self.histograms = {short: family.labels(name) for short, family in histograms.items()}
        self.counters = {short: family.labels(name) for short, family in counters.items()}
        self.by_position: list[int] = []

    def total(self, name: str) -> float:
        """The value of a counter."""
        return float(self.counters[name]._value.get())


class Metrics:
    """Counts what the server does; one registry per server, so several can live in one process.

    The label `model_name` is the main name of the model that did it: it follows what is loaded.
    """

    def __init__(self, host: ModelHost, compat: frozenset[str] = frozenset()) -> None:
        self.registry = CollectorRegistry()
        self.compat = compat
        self.host = host
        self.longest = 0
        labels = ("model_name",)
        self._histograms = {
            name: Histogram(f"ninfer:{name}", text, labels, buckets=buckets, registry=self.registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"ninfer:{name}", text, labels, registry=self.registry) for name, text in _COUNTERS.items()
        }
        reasons = (*labels, "finished_reason")
        self.success = Counter("ninfer:request_success", "Complete choices", reasons, registry=self.registry)
        self._ended = Counter("ninfer:request_end", "Requests by outcome", (*labels, "outcome"), registry=self.registry)
        self._http = Counter("ninfer:http_requests", "HTTP answers", ("path", "status"), registry=self.registry)
        self.series: dict[str, _Series] = {}
        self.registry.register(_Gauges(self))
        if compat:
            self.registry.register(_Aliases(self))

    @property
    def model_name(self) -> str:
        """The model that is loaded, or was last."""
        return self.host.last.card.name

    @property
    def current(self) -> _Series:
        """The series of that model."""
        name = self.model_name
        found = self.series.get(name)
        if found is None:
            found = self.series[name] = _Series(name, self._histograms, self._counters)
            for reason in _REASONS:
                self.success.labels(name, reason)
        return found

    def generation_started(self, generation: Generation) -> None:
        """A request was queued."""
        self.longest = max(self.longest, generation.prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """Time to the first token of a request."""
        self.current.histograms["time_to_first_token_seconds"].observe(seconds)

    def token_gap(self, seconds: float) -> None:
        """Time between two outputs of a request, each one token or several that came together."""
        self.current.histograms["inter_token_latency_seconds"].observe(seconds)

    def generation_ended(self, record: RequestRecord, ends: Sequence[Finish], outcome: str) -> None:
        """A request came to its end; `ends` are those of its choices that finished by themselves."""
        self._ended.labels(self.model_name, outcome).inc()
        for end in ends:
            self._count(end.usage, end)
            if end.reason in _REASONS:
                self.success.labels(self.model_name, end.reason).inc()
        if ends:
            usages = [end.usage for end in ends]
            histograms = self.current.histograms
            histograms["request_prompt_tokens"].observe(usages[0].prompt_tokens)
            histograms["request_max_num_generation_tokens"].observe(max(u.completion_tokens for u in usages))
            histograms["e2e_request_latency_seconds"].observe(record.elapsed())

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
        series = self.current
        for name, value in add.items():
            series.counters[name].inc(max(0, value))
        places = series.by_position
        places += [0] * (len(usage.accepted_by_position) - len(places))
        for place, count in enumerate(usage.accepted_by_position):
            places[place] += count
        self.longest = max(self.longest, usage.total_tokens)
        series.histograms["request_queue_time_seconds"].observe(end.timings.queue)
        series.histograms["request_prefill_time_seconds"].observe(end.timings.prefill)
        series.histograms["request_decode_time_seconds"].observe(end.timings.decode)
        series.histograms["request_generation_tokens"].observe(usage.completion_tokens)

    def http_answer(self, path: str, status: int) -> None:
        """An HTTP answer; `path` is the route's pattern, never the client's text."""
        self._http.labels(path, str(status)).inc()

    def gauges(self) -> dict[str, float]:
        """The engine's state now, by our gauges' names; what an engine does not tell is left out."""
        stats = self.host.stats()
        found = {name: stats[key] for name, (key, _) in _GAUGES.items() if key in stats}
        if "pages_total" in stats:
            found["kv_pages_in_use"] = stats["pages_total"] - stats["pages_free"]
        return {**dict.fromkeys(_ALWAYS, 0.0), **found}

    def render(self) -> bytes:
        """The exposition text."""
        assert self.current  # the series of a model exist from its loading on
        return generate_latest(self.registry)

    def total(self, name: str) -> float:
        """The value of one of our counters over all models."""
        return sum(series.total(name) for series in self.series.values())


class _Gauges:
    """The state of the loaded engine, read at every scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """All gauges."""
        texts = {name: text for name, (_, text) in _GAUGES.items()}
        for name, value in self.metrics.gauges().items():
            family = GaugeMetricFamily(f"ninfer:{name}", texts.get(name, _IN_USE), labels=["model_name"])
            family.add_metric([self.metrics.model_name], value)
            yield family


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
        metrics = self.metrics
        now = metrics.gauges()
        for name in _ALWAYS:
            family = GaugeMetricFamily(f"vllm:{name}", name, labels=["model_name"])
            family.add_metric([metrics.model_name], now[name])
            yield family
        for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"):
            counter = CounterMetricFamily(f"vllm:{name}", name, labels=["model_name"])
            for model, series in metrics.series.items():
                counter.add_metric([model], series.total(name))
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Complete choices", labels=["model_name", "finished_reason"]
        )
        for sample in next(iter(metrics.success.collect())).samples:
            if sample.name.endswith("_total"):
                success.add_metric([sample.labels["model_name"], sample.labels["finished_reason"]], sample.value)
        yield success
        for short in _HISTOGRAMS:
            yield self._histogram(short)

    def _histogram(self, short: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"vllm:{short}", _HISTOGRAMS[short][0], labels=["model_name"])
        for model, series in self.metrics.series.items():
            samples = list(series.histograms[short]._child_samples())
            buckets = [(s.labels["le"], s.value) for s in samples if s.name == "_bucket"]
            family.add_metric([model], buckets, next(s.value for s in samples if s.name == "_sum"))
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
        columns = zip_longest(*(series.by_position for series in metrics.series.values()), fillvalue=0)
        for place, count in enumerate([sum(column) for column in columns] or [0]):
            places.add_metric([str(place)], count)
        yield places
        gauges = {
            "prompt_tokens_seconds": metrics.total("prompt_tokens") / read if read else 0.0,
            "predicted_tokens_seconds": metrics.total("generation_tokens") / made if made else 0.0,
            "requests_processing": now["num_requests_running"],
            "requests_deferred": now["num_requests_waiting"],
            "n_tokens_max": metrics.longest,
            "n_busy_slots_per_decode": metrics.total("generation_tokens") / rounds if rounds else 0.0,
        }
        for name, gauge in gauges.items():
            yield GaugeMetricFamily(f"llamacpp:{name}", name, value=gauge)
