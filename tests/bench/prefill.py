"""Prefill of random models of full size: `python -m tests.bench.prefill --model 35b [--lengths 7680,64512] [--chunk N]`.

For every length: the first pass (kernels built before, plans of the fused attention made within unless `--warm`), the
median of further ones with the time to the first drawn token, and the share of the rate of a large matrix product that
the operations of weights and attention come to. `--profile` adds the time of every kernel of the shortest.

`--experts`: instead, the two grouped products of one layer of the 35B by tiles and by how rows spread over the experts;
and whether a tile gives the bits of the first one. Workers compile beforehand.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import multiprocessing
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch

from ninfer_core.config import ModelConfig
from ninfer_core.footprint import chunks_of
from ninfer_core.kernels import moe_prefill as moe
from ninfer_core.kernels._tiles_prefill import Grouped
from ninfer_core.model.fused import FusedDecoder
from ninfer_core.model.fused_prefill import FusedPrefill
from ninfer_core.packed import random_packed
from ninfer_core.state import FusedState
from tests.bench import kernel_inputs
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
UP = Grouped(64, 128, 4, 4), Grouped(64, 128, 4, 4, 3), Grouped(64, 128, 4, 3, 3), Grouped(64, 256, 8, 4, 4)
DOWN = Grouped(128, 128, 4, 4), Grouped(128, 128, 4, 4, 3), Grouped(128, 128, 4, 3, 3), Grouped(128, 256, 8, 4, 4)
"""Tiles to compare, the first of which others must equal to the bit."""
SPREADS = {"even": 0.0, "uneven": 1.0}
"""Standard deviation of what an expert's logits have in common for all rows; those of a row have 1."""


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
    """All figures of one length; without repeats those of the first pass, and of one to the first token."""
    cold = seconds(lambda: bench.read(count), bench.device, times=1, warm=0)
    finite = bool(bench.last.isfinite().all())
    took = seconds(lambda: bench.read(count), bench.device, repeats, warm=0) if repeats else cold
    if repeats:
        bench.with_drafts(count)
    first = statistics.median(bench.first_token(count) for _ in range(max(1, repeats)))
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


class Experts:
    """One layer's experts of the 35B, and a chunk of `rows` rows that are spread over them."""

    def __init__(self, rows: int, spread: float, tiny: bool, device: str) -> None:
        kernel_inputs.DEVICE = device
        torch.manual_seed(0)
        self.count, self.active, width, inner = (4, 1, 128, 128) if tiny else (256, 8, 2048, 512)
        self.up = kernel_inputs.random_matrix(self.count * 2 * inner, width, "Q4")
        self.down = kernel_inputs.random_matrix(self.count * width, inner, "Q5")
        logits = torch.randn(rows, self.count + 8, device=device)
        logits[:, : self.count] += torch.randn(self.count, device=device) * spread
        self.rows, self.device, self.logits = rows, device, logits
        self.x = torch.randn(rows, width, device=device).bfloat16()
        self.h, self.y = (torch.zeros(rows * self.active, n, device=device).bfloat16() for n in (inner, width))

    def routing(self, tokens: int) -> moe.Routing:
        """Rows sorted by expert in tiles of `tokens`, those of an expert in order: as the first tile has them."""
        made = moe.Routing.empty(self.rows, self.count, self.active, tokens, self.device)
        counts = torch.zeros(self.count, dtype=torch.int32, device=self.device)
        moe.route(self.logits, counts, made, self.count, self.active)
        order = made.ids.long().argsort(stable=True)
        made.row_of.copy_(order // self.active)
        made.place[order] = torch.arange(len(order), dtype=torch.int32, device=self.device)
        return made

    def product(self, down: bool, tile: Grouped, routing: moe.Routing) -> None:
        """The grouped product by a tile."""
        if down:
            moe.expert_down(self.down, self.h, routing, self.y, tile)
        else:
            moe.expert_gate_up(self.up, self.x, routing, self.h, tile)

    def times(self, down: bool, tiles: tuple[Grouped, ...], repeats: int) -> dict[str, dict[str, Any]]:
        """Microseconds and TFLOP/s (of the rows alone) of every tile, and whether it gives the bits of the first."""
        weight, out = (self.down, self.y) if down else (self.up, self.h)
        done = 2.0 * self.rows * self.active * weight.rows / self.count * weight.columns
        found: dict[str, dict[str, Any]] = {}
        first = None
        for tile in tiles:
            routing = self.routing(tile.tokens)
            out.fill_(float("nan"))
            self.product(down, tile, routing)
            first = out.clone() if first is None else first
            took = seconds(partial(self.product, down, tile, routing), self.device, repeats)
            same = bool(torch.equal(out, first))
            found[str(tuple(tile))] = {"us": took * 1e6, "TFLOP/s": done / took / 1e12, "same bits": same}
        return found


def build_tile(job: tuple[bool, Grouped, bool, str]) -> str:
    """In a worker: run a tile once, so that its kernel is compiled; the fault if that fails."""
    down, tile, tiny, device = job
    try:
        experts = Experts(8 if tiny else 64, 0.0, tiny, device)
        experts.product(down, tile, experts.routing(tile.tokens))
        synchronize(device)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "ok"


def compare_tiles(record: Record, options: argparse.Namespace, device: str) -> int:
    """`--experts`: the tiles that can be built, at every number of rows and spread; 1 if one gives other bits."""
    tiny = options.tiny
    up, down = ((Grouped(32, 16, 4, 1), Grouped(32, 16, 4, 1, 2)),) * 2 if tiny else (UP, DOWN)
    jobs = [(kind, tile, tiny, device) for kind, tiles in ((False, up), (True, down)) for tile in tiles]
    built: dict[bool, list[Grouped]] = {False: [], True: []}
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(2 if tiny else options.workers, mp_context=context) as pool:
        for (kind, tile, *_), fault in zip(jobs, pool.map(build_tile, jobs), strict=True):
            if fault == "ok":
                built[kind].append(tile)
            else:
                record.add(f"{'down' if kind else 'up'} {tuple(tile)}", fault)
    wrong = False
    for rows in (8,) if tiny else (8192, 16384):
        for name, spread in list(SPREADS.items())[: 1 if tiny else None]:
            experts = Experts(rows, spread, tiny, device)
            for kind, tiles in built.items():
                found = experts.times(kind, tuple(tiles), 1 if tiny else 5)
                for label, figures in found.items():
                    record.add(f"{rows} {name} {'down' if kind else 'up'} {label}", figures)
                    wrong = wrong or not figures["same bits"]
    return int(wrong)


def main() -> int:
    """Measure every length; with `--prepare` read a little, which builds the kernels."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="35b")
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--chunk", type=int, help="tokens; default: the longest of an engine")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="make the plans of the fused attention first")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--experts", action="store_true", help="only the grouped products, by tiles")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile for --experts")
    options: argparse.Namespace = parser.parse_args()
    device = device_of(options)
    lengths = [3] if options.tiny else sorted(int(n) for n in options.lengths.split(","))
    chunk = 4 if options.tiny else options.chunk or chunks_of(config_of(options.model, False))[0]
    record = Record(options.json, device)
    rate = matrix_rate(device, options.tiny)
    record.add("bf16 matrix TFLOP/s", rate / 1e12)
    if options.experts:
        return compare_tiles(record, options, device)
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
