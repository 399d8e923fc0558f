"""Variants of the decode kernels on one GPU, most valuable first: `python -m tests.bench.variants --minutes 8 --json FILE`.

Times one greedy step of the 35B as a graph (`chain.py`), whole and by part, for every variant, beside the floor and the
default; then attention by context, and what other experts cost in every round. Before that every kernel is checked against
its twin (an empty list of faults is good) and all variants are compiled, in parallel. What FILE holds is not run again; a
variant that fails leaves its error. `--list` names the variants.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ninfer_core.kernels import _tiles
from ninfer_core.kernels._tiles import ExpertRegisters, Tile
from tests.bench.chain import PARTS, Chain, context_times, routing_cost, run_chain
from tests.bench.common import Record
from tests.bench.kernel_checks import CHECKS, faults
from tests.bench.kernel_inputs import read_bandwidth

BOUNDS = ExpertRegisters()
FAMILY = {
    "default": {},
    "no ahead": {"ahead": 0},
    "down 168": {"expert_registers": BOUNDS._replace(down_row=168)},
    "up free": {"expert_registers": BOUNDS._replace(up_row=None)},
    "late": {"early": False},
    "free registers": {"registers": None},
    "out 2 8 8": {"residual": Tile(2, 8, 8)},
    "in 1 8 4": {"projection": Tile(1, 8, 4)},
    "in 2 4 4": {"projection": Tile(2, 4, 4)},
    "router 1 8 4": {"router": Tile(1, 8, 4)},
    "router 2 8 4": {"router": Tile(2, 8, 4)},
}
"""Fields of `_tiles.Family`."""
FIRST = ("default", "no ahead", "down 168", "late")
"""What answers the open questions; everything else comes behind the contexts and routings."""
CONTEXTS = (7_680, 130_048, 260_096)
ATTENTION = {"default": 1.0, "fewer": 3 / 4, "half": 1 / 2}
"""Splits as a share of the default."""


@contextmanager
def applied(name: str) -> Iterator[None]:
    """The tile tables of a variant of `FAMILY`."""
    families = dict(_tiles.FAMILIES)
    _tiles.FAMILIES.update({n: f._replace(**FAMILY.get(name, {})) for n, f in families.items()})
    try:
        yield
    finally:
        _tiles.FAMILIES.update(families)


def prepare(job: tuple[str, int]) -> object:
    """In a worker: compile what a variant launches; or run a check, for its faults."""
    name, rows = job
    try:
        torch.cuda.set_device(0)
        torch.manual_seed(0)
        if not rows:
            return faults(CHECKS[name]())
        with applied(name):
            Chain(rows, (34, 35)).step()
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{name}, {rows} rows: {type(error).__name__}: {str(error)[:300]}"


class Sweep:
    """Runs what is not in the record, until the time is up."""

    def __init__(self, record: Record, known: dict, minutes: float) -> None:
        self.record, self.until = record, time.time() + 60 * minutes
        record.values.update({name: value for name, value in known.items() if name not in ("device", "torch")})
        self.chains: dict[int, Chain] = {}

    def chain(self, rows: int) -> Chain:
        """The step with so many rows; one at a time, as each holds all weights."""
        if rows not in self.chains:
            self.chains.clear()
            torch.cuda.empty_cache()
            self.chains[rows] = Chain(rows)
        return self.chains[rows]

    def add(self, name: str, run: Callable[[], object], seconds: float = 3.0) -> None:
        """One figure, unless it is known or there is no time for it; an error is a figure too."""
        if name in self.record.values or time.time() + seconds > self.until:
            return
        try:
            self.record.add(name, run())
        except Exception as error:
            self.record.add(name, {"failed": f"{type(error).__name__}: {str(error)[:300]}"})

    def variant(self, name: str, rows: int, bandwidth: float) -> None:
        """A step under one variant."""

        def run() -> object:
            with applied(name):
                return run_chain(bandwidth, rows, self.chain(rows))

        self.add(f"{rows} rows, {name}", run, 4.0)


def table(values: dict, rows: int) -> str:
    """Every variant's step and parts in microseconds, and what it saves against the default."""
    start = f"{rows} rows, "
    found = {name.removeprefix(start): v for name, v in values.items() if name.startswith(start) and "us" in v}
    base = found.get("default", {}).get("us", 0.0)
    lines = [
        f"| {rows} rows | us | floor | saved | " + " | ".join(PARTS) + " |",
        "| --- |" + " ---: |" * (3 + len(PARTS)),
    ]
    for name, v in sorted(found.items(), key=lambda item: item[1]["us"]):
        cells = [
            f"{v['us']:.0f}",
            f"{v['floor_us']:.0f}",
            f"{base - v['us']:.0f}",
            *(f"{v[part]:.0f}" for part in PARTS),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sweep(options: argparse.Namespace) -> None:
    """All parts in the order of their worth."""
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    record = Record(options.json, "cuda")
    run = Sweep(record, known, options.minutes)
    counts = [int(n) for n in options.rows.split(",")]
    names = list(FIRST) if options.first else [*FIRST, *(n for n in FAMILY if n not in FIRST)]
    jobs = [(name, rows) for name in names for rows in counts if f"{rows} rows, {name}" not in record.values]
    checks = [(name, 0) for name in CHECKS if f"check {name}" not in record.values]
    # The default first: what it compiles, the others find.
    parts = ([job for job in jobs if job[0] == "default"], [job for job in jobs if job[0] != "default"])
    for part in (parts[0] + checks, parts[1]) if options.workers else ():
        with futures.ProcessPoolExecutor(
            options.workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as pool:
            for (name, rows), found in zip(part, pool.map(prepare, part), strict=True):
                if found or not rows:
                    record.add(f"not compiled: {name}, {rows} rows" if rows else f"check {name}", found)
    if options.compile:
        return
    bandwidth = read_bandwidth()
    record.add("read bandwidth TB/s", bandwidth)
    for name in FIRST:
        for rows in counts:
            run.variant(name, rows, bandwidth)
    for tokens in CONTEXTS:
        for rows in counts:
            for name, share in ATTENTION.items():
                most = int(share * _tiles.most_splits(torch.device("cuda", 0), 2))
                run.add(
                    f"attention, {tokens} tokens, {rows} rows, {name}",
                    lambda a=(rows, bandwidth, tokens, most): context_times(*a),
                )
    for rows in counts:
        run.add(f"routing, {rows} rows", lambda rows=rows: routing_cost(run.chain(rows)), 6.0)
        for name in names:
            if name not in FIRST:
                run.variant(name, rows, bandwidth)
    for rows in counts:
        print(table(record.values, rows), flush=True)


def main() -> int:
    """Sweep, or name the variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--workers", type=int, default=14, help="processes that check and compile beforehand; 0: none")
    parser.add_argument("--compile", action="store_true", help="check and compile only")
    parser.add_argument("--first", action="store_true", help="only what answers the open questions")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print("\n".join([*FIRST, *(n for n in FAMILY if n not in FIRST)]))
    else:
        sweep(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
