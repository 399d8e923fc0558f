"""Decode rounds of random models of full size, without scheduler and text: `python -m tests.bench.rounds --model 35b`.

Tokens a second and device time of a round by sequences, drafts, context, greedy or sampled; pages hold random values.
Where drafts are accepted, that is forced, with a stated mean, and the name says so. `--profile` adds the time of every
kernel of a round. Rounds replay graphs, one ahead of the host, as in the engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ninfer_core.benchmarks.bandwidth import read_bandwidth
from ninfer_core.benchmarks.floors import step_floor
from ninfer_core.inventory import TOKEN_IDS, default_recipe, inventory
from ninfer_core.model.fused import FusedDecoder, FusedMTP
from ninfer_core.packed import random_packed
from ninfer_core.runtime.flights import Start
from ninfer_core.runtime.graphs import DeviceRounds
from ninfer_core.runtime.validation import SamplingParams
from ninfer_core.state import FusedState
from tests.bench.common import MODELS, Record, config_of, device_of, parser_of, recipe_of

ACCEPTED = [3, 2, 2, 2, 2, 1, 3, 2, 2, 2, 2, 3, 2, 2, 2, 3] * 4
"""Forced drafts of a sequence's rounds in turn: 2.19 of 3."""
SAMPLED = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=3)
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences of `tokens` tokens each, with `drafts` a round; `forced`: `ACCEPTED` of them count."""

    batch: int
    drafts: int
    tokens: int
    sampled: bool = False
    forced: bool = False

    @property
    def name(self) -> str:
        """What stands beside the figures."""
        law = "sampled" if self.sampled else "greedy"
        forced = f", forced {sum(ACCEPTED) / 64:.2f} of 3" if self.forced else ""
        return f"{self.batch} x {self.tokens}, mtp{self.drafts}, {law}{forced}"


def cases(model: str) -> list[Case]:
    """The bars first, then what explains them."""
    found = [Case(1, 0, 7680), Case(1, 3, 7680, forced=True), Case(1, 0, 7680, sampled=True)]
    found += [Case(1, 3, 7680, sampled=True, forced=True)]
    found += [Case(1, 0, tokens) for tokens in (64_512, 130_048, 260_096)]
    found += [Case(batch, 0, 1024) for batch in (8, 32, 64)]
    if model == "35b":
        found += [Case(batch, 0, 7680) for batch in (8, 32, 64)] + [Case(8, 3, 1024, forced=True)]
    return found


TINY = [Case(1, 1, 20, sampled=True, forced=True)]


class Bench:
    """A random model with room for a list of cases."""

    def __init__(self, model: str, wanted: list[Case], tiny: bool, device: str) -> None:
        self.config, self.device = config_of(model, tiny), device
        self.limit = self.config.max_position_embeddings
        longest = max(case.tokens for case in wanted)
        self.context = min(self.limit, longest + 2048)
        self.pages_of = {case: -(-min(self.limit, case.tokens + 1088) // 64) for case in wanted}
        pages = max(case.batch * self.pages_of[case] for case in wanted)
        slots = max(case.batch for case in wanted)
        weights = random_packed(self.config, seed=0, device=device, recipe=recipe_of(tiny))
        decoder = FusedDecoder(weights, self.config, context=self.context)
        state = FusedState(self.config, slots=slots, pages=pages, max_draft=3, device=device)
        for codes, scales in zip(state.kv_codes, state.kv_scales, strict=True):
            codes.random_(-127, 128)
            scales.uniform_(0, 0.02)
        self.rounds = DeviceRounds(
            decoder, FusedMTP(decoder), state, slots=slots, pages=self.context // 64 + 1,
            addressable=TOKEN_IDS.get(self.config.model_id, self.config.vocab_size),
        )  # fmt: skip

    def seat(self, case: Case) -> None:
        """Make the lanes of a case."""
        pages, law = self.pages_of[case], SAMPLED if case.sampled else GREEDY
        for slot in range(case.batch):
            mine = list(range(slot * pages, (slot + 1) * pages))
            drafts = [1, 2, 3, 4, 5][: case.drafts]
            self.rounds.seat(slot, mine, Start(5 + slot, case.tokens, 0, 1, 8000, law, drafts))

    def force(self, case: Case) -> None:
        """The pattern of accepted drafts; set once for a case, as graphs are made for it."""
        counts = torch.tensor(ACCEPTED, dtype=torch.int32, device=self.device) if case.forced else None
        if (counts is None) != (self.rounds.pattern is None):
            self.rounds.pattern = counts

    def steps(self, case: Case, count: int) -> Iterator[list[Any]]:
        """Launch `count` rounds of all sequences, in as few launches as they fit; yields the results one behind."""
        seen = min(self.limit, case.tokens + 1024)
        most = max(1, self.rounds.rows_within(seen) // (case.drafts + 1))
        groups = [list(range(a, min(a + most, case.batch))) for a in range(0, case.batch, most)]
        flying: list[Any] = []
        for _ in range(count):
            launched = [self.rounds.launch(g, case.drafts + 1, case.drafts, seen) for g in groups]
            if flying:
                yield flying
            flying = launched
        yield flying

    def measure(self, case: Case, count: int) -> dict[str, Any]:
        """Tokens a second over all sequences, and the median round in microseconds."""
        self.force(case)
        self.seat(case)
        tokens, times, finite = 0, [], True
        warm, began = count // 8, time.perf_counter()
        for i, flying in enumerate(self.steps(case, count)):
            results = [row for launched in flying for row in launched.read()]
            if i == warm:
                began = time.perf_counter()
            if i > warm:
                tokens += sum(len(row.tokens) for row in results)
                times.append(sum(launched.seconds() or 0.0 for launched in flying))
            finite = finite and all(row.finite for row in results)
        took = time.perf_counter() - began
        return {
            "tok/s": tokens / took, "round us": 1e6 * sorted(times)[len(times) // 2], "launches": len(flying),
            "finite": finite,
        }  # fmt: skip

    def profile(self, case: Case, count: int) -> dict[str, Any]:
        """Launches and microseconds of every kernel of a round."""
        from torch.profiler import ProfilerActivity, profile

        self.force(case)
        self.seat(case)
        for flying in self.steps(case, min(4, count)):
            flying[-1].read()
        activity = ProfilerActivity.CUDA if self.device == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as found:
            for flying in self.steps(case, count):
                flying[-1].read()
        events = [(e.key[:48], e.count / count, e.self_device_time_total / count) for e in found.key_averages()]
        rows = sorted((e for e in events if e[2] or self.device == "cpu"), key=lambda e: -e[2])
        kernels = {name: [launches, us] for name, launches, us in rows[:30]}
        return {"launches": sum(e[1] for e in rows), "us": sum(e[2] for e in rows), "kernels": kernels}


def floors(bench: Bench, case: Case, bandwidth: float) -> float:
    """The least microseconds of a round: its bytes over the bandwidth."""
    config = bench.config
    formats = inventory(config, default_recipe(config), vision=False)
    found = step_floor(config, formats, context=case.tokens, sequences=case.batch, drafts=case.drafts)
    return 1e6 * found.total / bandwidth


def main() -> int:
    """Run all cases, or with `--prepare` two short rounds of each, which compiles what they launch."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="35b")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--match", default="", metavar="TEXT", help="only cases with TEXT in their name; all are profiled"
    )
    parser.add_argument("--prepare", action="store_true")
    options: argparse.Namespace = parser.parse_args()
    device = device_of(options)
    wanted = TINY if options.tiny else [case for case in cases(options.model) if options.match in case.name]
    record = Record(options.json, device)
    bandwidth = 1.0 if options.prepare or options.tiny else read_bandwidth(torch.device(device))
    record.add("read bandwidth GB/s", bandwidth / 1e9)
    with torch.inference_mode():
        bench = Bench(options.model, wanted, options.tiny, device)
        if device == "cuda":
            began = time.perf_counter()
            built = bench.rounds.compile(3)
            record.add("first start", {"kernels": built, "seconds": time.perf_counter() - began})
        for case in wanted:
            try:
                found = bench.measure(case, 2 if options.tiny else 6 if options.prepare else options.rounds)
            except Exception as error:
                record.add(case.name, {"failed": f"{type(error).__name__}: {error}"[:300]})
                continue
            if not options.tiny:
                found["floor us"] = floors(bench, case, bandwidth)
                found["share of floor"] = found["floor us"] / found["round us"] if found["round us"] else 0.0
            record.add(case.name, found)
        if options.profile:
            for case in wanted if options.tiny or options.match else (wanted[0], wanted[2], wanted[3]):
                record.add(f"kernels of {case.name}", bench.profile(case, 1 if options.tiny else 10))
    return 0


if __name__ == "__main__":
    sys.exit(main())
