"""The demo model over HTTP against the same in process: `python -m tests.gpu.http_rate`. Tokens a second of a stream."""

from __future__ import annotations

import asyncio
import statistics
import sys

from ninfer_cli.bench import own_server

from ninfer_core.benchmarks import serving
from ninfer_core.engine import Engine
from ninfer_core.types import Message, Request, Sampling
from tests.bench.common import Record, parser_of

LEVELS = (1, 8, 32)


def in_process(device: str, tokens: int, runs: int) -> float:
    """Decode rate of one answer at a time, as `serving` asks for it."""
    rates = []
    with Engine.load("demo", device=device) as engine:  # type: ignore[arg-type]
        for seed in range(1 + runs):
            text = serving.prompt_text(256, seed)
            law = Sampling(temperature=1.0, seed=seed)
            asked = Request((Message("user", text),), max_tokens=tokens, ignore_eos=True, sampling=law)
            done = engine.submit(asked).result(600)
            rates.append((done.usage.completion_tokens - 1) / done.timings.decode)
    return statistics.median(rates[1:])


def main() -> int:
    """In process first, then over HTTP at some levels."""
    options = parser_of(__doc__).parse_args()
    device, tokens, runs = ("cpu", 16, 1) if options.tiny else ("cuda", 256, 8)
    record = Record(options.json, device)
    alone = in_process(device, tokens, runs)
    record.add("in process, one stream, tok/s", alone)
    with own_server("demo", 2 if options.tiny else max(LEVELS), device, quiet=True) as url:
        load = serving.Load(url, "demo", prompt_tokens=256, max_tokens=tokens)
        levels = (1,) if options.tiny else LEVELS
        figures = asyncio.run(serving.serve_load(load, levels=levels, requests=2 if options.tiny else None))
    for figure in figures:
        names = ("concurrency", "failed", "first_token_ms", "gap_ms", "per_token_ms")
        record.add(figure.name, {"tok/s": figure.value, **{name: figure.details[name] for name in names}})
    one = 1e3 / figures[0].details["per_token_ms"]["p50"]
    record.add("over HTTP, one stream, tok/s", one)
    record.add("share of the rate in process", one / alone)
    return 0


if __name__ == "__main__":
    sys.exit(main())
