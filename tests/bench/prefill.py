"""Prefill of random models of full size: `python -m tests.bench.prefill --model 35b [--lengths 7680,64512] [--chunk 8192]`.

For every length: the first pass (kernels built before, plans of the fused attention made within unless `--warm`), the
median of further ones with the time to the first drawn token, and the share of the rate of a large matrix product that
the operations of weights and attention come to. `--profile` adds the time of every kernel of the shortest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from ninfer_core.config import ModelConfig
from ninfer_core.model.fused import FusedDecoder
from ninfer_core.model.fused_prefill import FusedPrefill
from ninfer_core.packed import random_packed
from ninfer_core.state import FusedState
from tests.bench.common import (
    MODELS,
    Record,
    config_of,
    device_of,
    matrix_rate,
    parser_of,
    recipe_of,
    seconds,
    synchronize,
)

LENGTHS = "7680,64512,130048"


def operations(config: ModelConfig, tokens: int) -> float:
    """Multiplications and additions of a prompt: active weights of all layers, causal attention; the rule of Gated
    DeltaNet by its chunked form (64 rows), the head for one row.
    """
    hidden, value, key = config.hidden_size, config.gdn_value_width, config.gdn_key_width
    gdn = hidden * (config.conv_channels + 2 * value + 2 * config.linear_num_value_heads)
    rule = config.linear_num_value_heads * (2 * 128 * 128 + 3 * 64 * 128) + 64 * key
    attention = hidden * (3 * config.query_width + 2 * config.kv_width)
    if config.is_moe:
        inner = config.num_experts_per_tok * config.moe_intermediate_size + config.shared_expert_intermediate_size
        mlp = hidden * (3 * inner + config.num_experts)
    else:
        mlp = 3 * hidden * config.intermediate_size
    full, rest = len(config.attention_layers), len(config.gdn_layers)
    weights = full * (attention + mlp) + rest * (gdn + rule + mlp)
    pairs = full * config.query_width * tokens  # two products over half of the pairs
    return 2.0 * tokens * (weights + pairs) + 2.0 * hidden * config.vocab_size


class Bench:
    """A random model with room for the longest prompt."""

    def __init__(self, model: str, longest: int, chunk: int, tiny: bool, device: str) -> None:
        self.config, self.device = config_of(model, tiny), device
        weights, pages = random_packed(self.config, seed=0, device=device, recipe=recipe_of(tiny)), longest // 64 + 1
        self.run = FusedPrefill(weights, self.config, rows=chunk, context=pages * 64)
        self.decoder = FusedDecoder(weights, self.config, context=pages * 64, chunks=self.run)
        self.state = FusedState(self.config, slots=2, pages=pages, device=device)
        self.table = torch.randperm(pages, device=device)
        self.tokens = torch.randint(0, self.config.vocab_size, (longest,), device=device)

    def read(self, count: int) -> None:
        """Read a prompt, without the draft layer; `last` has the hidden rows of its last chunk."""
        for start in range(0, count, self.run.work.rows):
            part = self.tokens[start : min(start + self.run.work.rows, count)]
            self.last = self.run.begin(self.state, part, 1, start, self.table).finish()

    def with_drafts(self, count: int) -> int:
        """Read a prompt as the engine does, keys and values of the draft layer too; the first token, greedily."""
        for start in range(0, count, self.run.work.rows):
            part = self.tokens[start : min(start + self.run.work.rows, count)]
            hidden = self.run.begin(self.state, part, 1, start, self.table).finish()
            if start + part.shape[0] == count:
                token = int(self.decoder.logits(hidden[-1:]).argmax())
            self.run.fill_drafts(self.state, part, hidden, start, self.table)
        return token

    def first_token(self, count: int) -> float:
        """Seconds until the first token is on the host."""
        synchronize(self.device)
        began = time.perf_counter()
        self.with_drafts(count)
        return time.perf_counter() - began


def measure(bench: Bench, count: int, repeats: int, rate: float) -> dict[str, Any]:
    """All figures of one length."""
    cold = seconds(lambda: bench.read(count), bench.device, times=1, warm=0)
    finite = bool(bench.last.isfinite().all())
    took = seconds(lambda: bench.read(count), bench.device, repeats, warm=0)
    bench.with_drafts(count)
    first = statistics.median(bench.first_token(count) for _ in range(repeats))
    done = operations(bench.config, count)
    return {
        "tok/s": count / took, "first pass tok/s": count / cold, "ms": took * 1e3, "TTFT ms": first * 1e3,
        "TFLOP": done / 1e12, "share of matrix rate": done / took / rate, "finite": finite,
    }  # fmt: skip


def profiled(bench: Bench, count: int) -> dict[str, list[float]]:
    """Launches and milliseconds of every kernel of one prompt."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if bench.device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        bench.read(count)
        synchronize(bench.device)
    events = sorted(found.key_averages(), key=lambda e: -e.device_time_total)
    return {e.key[:60]: [e.count, e.device_time_total / 1e3] for e in events[:30]}


def main() -> int:
    """Measure every length; with `--prepare` read a little, which builds the kernels."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="35b")
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="make the plans of the fused attention first")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--prepare", action="store_true")
    options: argparse.Namespace = parser.parse_args()
    device = device_of(options)
    lengths = [3] if options.tiny else sorted(int(n) for n in options.lengths.split(","))
    chunk = 4 if options.tiny else options.chunk
    record = Record(options.json, device)
    rate = matrix_rate(device, options.tiny)
    record.add("bf16 matrix TFLOP/s", rate / 1e12)
    bench = Bench(options.model, lengths[-1], chunk, options.tiny, device)
    record.add("chunk", bench.run.work.rows)
    if options.prepare:
        for count in (300, 1500, chunk):  # tiles follow the rows of a call
            bench.with_drafts(min(count, lengths[-1]))
        record.add("prepared", True)
        return 0
    bench.read(min(16, lengths[0]))  # the libraries' own start
    if options.warm:
        began = time.perf_counter()
        plans = sum(1 for _ in bench.run.warm())
        synchronize(device)
        record.add("plans made", {"count": plans, "seconds": time.perf_counter() - began})
    for count in lengths:
        record.add(f"{count} tokens", measure(bench, count, 1 if options.tiny else options.repeats, rate))
    if options.profile:
        record.add(f"kernels at {lengths[0]}", profiled(bench, lengths[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
