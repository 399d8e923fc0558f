"""Load on an OpenAI-compatible server, ours or any other: throughput, first tokens and gaps; second turns too."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..errors import EngineError, InvalidRequestError
from .results import Figure

LEVELS = (1, 2, 4, 8, 16, 32, 64)
PERCENTILES = (50, 90, 99)
SIDE_TOKENS = 53
"""About the prompt of the request that comes between two turns, as one that asks for a title."""


@dataclass(frozen=True, slots=True)
class Load:
    """What each request asks: about `prompt_tokens` tokens of prompt, exactly `max_tokens` of answer where the server
    knows `ignore_eos`.
    """

    url: str
    model: str
    key: str = ""
    prompt_tokens: int = 256
    max_tokens: int = 128
    ignore_eos: bool = True
    timeout: float = 600.0


@dataclass(slots=True)
class Sample:
    """One request: when it was sent, when text came and which, what it counted, and why it failed if it did."""

    sent: float
    stamps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first piece of text."""
        return self.stamps[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [b - a for a, b in zip(self.stamps[:-1], self.stamps[1:], strict=True)]

    @property
    def per_token(self) -> float | None:
        """Seconds a token behind the first; None for less than two tokens."""
        return (self.stamps[-1] - self.stamps[0]) / (self.tokens - 1) if self.tokens > 1 else None


def prompt_text(tokens: int, seed: int) -> str:
    """Prose of about so many tokens; no two seeds begin alike, so that no prefix cache helps."""
    from .workloads import prose

    words = prose(str.split, max(8, round(tokens * 0.75)), seed)  # type: ignore[arg-type]
    return f"{random.Random(seed).getrandbits(64):x}. " + " ".join(map(str, words)) + "\nGo on with these notes."


async def _send(client: httpx.AsyncClient, load: Load, seed: int, talk: Sequence[str] = ()) -> Sample:
    """One request: `talk` from the user's first words to the last, by turns; a prompt of its own if there is none."""
    turns = talk or [prompt_text(load.prompt_tokens, seed)]
    body: dict[str, Any] = {
        "model": load.model,
        "messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)],
        "max_tokens": load.max_tokens,
        "temperature": 1.0,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    sample = Sample(time.perf_counter())
    try:
        async with client.stream("POST", "/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                sample.error = f"HTTP {answer.status_code}: {text[:200]}"
                return sample
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                _take(sample, json.loads(line[5:]))
    except (httpx.HTTPError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    return sample


def _take(sample: Sample, chunk: dict[str, Any]) -> None:
    if chunk.get("error"):
        sample.error = str(chunk["error"])[:200]
        return
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            sample.stamps.append(time.perf_counter())
        sample.text += delta.get("content") or ""
    usage = chunk.get("usage")
    if usage:
        sample.prompt_tokens, sample.tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _client(load: Load) -> httpx.AsyncClient:
    """Connections to the server of a load, as many as are asked for."""
    headers = {"Authorization": f"Bearer {load.key}"} if load.key else {}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=load.url.rstrip("/"), headers=headers, timeout=load.timeout, limits=limits)


async def _closed(client: httpx.AsyncClient, load: Load, concurrency: int, requests: int, seed: int) -> list[Sample]:
    """Keep `concurrency` requests running until `requests` are done."""
    waiting = iter(range(requests))
    done: list[Sample] = []

    async def worker() -> None:
        for i in waiting:
            done.append(await _send(client, load, seed + i))

    await asyncio.gather(*(worker() for _ in range(min(concurrency, requests))))
    return done


async def _open(client: httpx.AsyncClient, load: Load, rate: float, requests: int, seed: int) -> list[Sample]:
    """Send `requests` at random times, `rate` a second on average, whatever is still running."""
    order = random.Random(seed)
    tasks = []
    for i in range(requests):
        tasks.append(asyncio.create_task(_send(client, load, seed + i)))
        if i < requests - 1:
            await asyncio.sleep(order.expovariate(rate))
    return list(await asyncio.gather(*tasks))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * share // 100).__int__() - 1))]


def summary(name: str, samples: Sequence[Sample], seconds: float, **details: Any) -> Figure:
    """The figure of one level: tokens a second over all requests, and percentiles in milliseconds.

    Raises:
        EngineError: every request failed, or the server reports no usage.
    """
    good = [sample for sample in samples if not sample.error and sample.stamps]
    failed = [sample.error or "no text came" for sample in samples if sample.error or not sample.stamps]
    if not good:
        raise EngineError(f"all {len(samples)} requests failed; the first: {failed[0]}")
    tokens = sum(sample.tokens for sample in good)
    if not tokens:
        raise EngineError("the server reports no usage in its stream (stream_options.include_usage): nothing to count")
    gaps = [gap for sample in good for gap in sample.gaps] or [0.0]
    paces = [pace for sample in good if (pace := sample.per_token) is not None] or [0.0]
    measured = {"first_token_ms": [s.first for s in good], "gap_ms": gaps, "per_token_ms": paces}
    about: dict[str, Any] = {
        **details,
        "requests": len(samples),
        "failed": len(failed),
        "completion_tokens": tokens,
        "prompt_tokens": round(sum(sample.prompt_tokens for sample in good) / len(good)),
        "seconds": round(seconds, 3),
    }
    for key, values in measured.items():
        about[key] = {f"p{p}": round(percentile(values, p) * 1e3, 2) for p in PERCENTILES}
        about[key]["max"] = round(max(values) * 1e3, 2)
    if failed:
        about["first_error"] = failed[0]
    return Figure(name, tokens / seconds, "tok/s", details=about)


async def serve_load(
    load: Load, *, levels: Sequence[int] = (), rates: Sequence[float] = (), requests: int | None = None, warm: int = 1
) -> list[Figure]:
    """One figure per concurrency level and per arrival rate; `requests` of each (None: four per level, at least 8).

    Raises:
        InvalidRequestError: nothing to measure, or a level or rate that is not positive.
        EngineError: every request of a level failed.
    """
    if not levels and not rates:
        raise InvalidRequestError("give at least one concurrency level or arrival rate")
    if any(level < 1 for level in levels) or any(rate <= 0 for rate in rates):
        raise InvalidRequestError("concurrency levels are whole numbers from 1, arrival rates are above 0")
    made = []
    base = load.url.rstrip("/")
    async with _client(load) as client:
        await _closed(client, load, 1, warm, 900_000)
        for level in levels:
            begin = time.perf_counter()
            samples = await _closed(client, load, level, requests or max(8, 4 * level), 10_000 * level)
            name = f"{load.model}/serve/concurrency/{level}"
            made.append(summary(name, samples, time.perf_counter() - begin, concurrency=level, server=base))
        for rate in rates:
            begin = time.perf_counter()
            samples = await _open(client, load, rate, requests or 32, 7_000_000)
            name = f"{load.model}/serve/rate/{rate:g}"
            made.append(summary(name, samples, time.perf_counter() - begin, rate=rate, server=base))
    return made


async def second_turns(load: Load, lengths: Sequence[int], *, runs: int = 3) -> list[Figure]:
    """Milliseconds to the first token of a second turn, by the length of the first prompt.

    Between the turns comes a small side request. Beside it the same turn of a conversation that the server has not
    seen: what it takes without the cache. Of `runs` conversations each.

    Raises:
        InvalidRequestError: no runs, or a length that is not positive.
        EngineError: a request failed.
    """
    if runs < 1 or any(length < 1 for length in lengths):
        raise InvalidRequestError("second turns need whole numbers of tokens and runs, from 1")
    base, made = load.url.rstrip("/"), []
    async with _client(load) as client:
        for length in lengths:
            known, cold, shares, prompts = [], [], [], []
            for run in range(runs):
                first, second, unseen = await _conversation(client, load, length, 2_000_000 + 10 * run + 1000 * length)
                known.append(second.first * 1e3)
                cold.append(unseen.first * 1e3)
                shares.append(second.cached_tokens / first.prompt_tokens if first.prompt_tokens else 0.0)
                prompts.append(first.prompt_tokens)
            details = {
                "server": base,
                "runs": runs,
                "prompt_tokens": round(statistics.mean(prompts)),
                "first_token_ms": round(statistics.median(known), 2),
                "first_token_ms_without_cache": round(statistics.median(cold), 2),
                "reused_share": round(min(shares), 4),
            }
            name = f"{load.model}/serve/second_turn/{length}"
            made.append(Figure(name, statistics.median(known), "ms", details=details))
    return made


async def _conversation(client: httpx.AsyncClient, load: Load, length: int, seed: int) -> tuple[Sample, Sample, Sample]:
    """The first turn, the second behind a side request, and the second of a conversation not seen before."""
    opening, unseen = prompt_text(length, seed), prompt_text(length, seed + 1)
    first = await _send(client, load, seed, [opening])
    side = await _send(client, load, seed, [prompt_text(SIDE_TOKENS, seed + 2)])
    reply, following = first.text or "Yes.", "Go on, in more detail."
    second = await _send(client, load, seed, [opening, reply, following])
    cold = await _send(client, load, seed, [unseen, reply, following])
    for sample in (first, side, second, cold):
        if sample.error or not sample.stamps:
            raise EngineError(f"a turn of {length} tokens failed: {sample.error or 'no text came'}")
    return first, second, cold


async def served_model(url: str, key: str = "") -> str:
    """The first model a server lists.

    Raises:
        EngineError: it cannot be reached, or lists none.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(headers=headers, timeout=20.0) as client:
            answer = await client.get(url.rstrip("/") + "/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise EngineError(f"{url} lists no models ({type(error).__name__}: {error}); give --served-model") from error


def serving_rows(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """Cells of a table: level, tok/s, first token and gap percentiles, failures."""
    rows = []
    for figure in figures:
        about = figure.details
        first, gap = about["first_token_ms"], about["gap_ms"]
        label = f"{about['concurrency']} at once" if "concurrency" in about else f"{about['rate']:g} a second"
        times = [f"{first[f'p{p}']:,.0f}" for p in PERCENTILES] + [f"{gap[f'p{p}']:,.1f}" for p in PERCENTILES]
        rows.append((label, f"{figure.value:,.1f}", *times, f"{about['failed']} of {about['requests']}"))
    return rows


def turn_rows(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """Cells of a table: tokens of the first turn, first token with and without the cache, share that was reused."""
    return [
        (
            f"{about['prompt_tokens']:,}",
            f"{about['first_token_ms']:,.0f}",
            f"{about['first_token_ms_without_cache']:,.0f}",
            f"{about['reused_share']:.1%}",
        )
        for about in (figure.details for figure in figures)
    ]


TURNS_HEADER = ("second turn behind tokens", "first token ms", "without the cache ms", "first prompt reused")
SERVING_HEADER = (
    "load", "tok/s", *(f"first token p{p} ms" for p in PERCENTILES), *(f"gap p{p} ms" for p in PERCENTILES), "failed"
)  # fmt: skip
