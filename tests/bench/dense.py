"""The dense projections of the 27B, each alone and one behind the other, in variants: `python -m tests.bench.dense --json FILE`.

Times a call over weights that no call shortly before has read, in one graph of twenty, beside its floor. Before that all
variants are compiled, in parallel, and checked: against one program for each group, a row alone against the same row among
four, and twenty more times, whose bits must not change. `--only out,down` and `--rows 1` leave parts out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ninfer_core.kernels import _tiles, compile_ahead
from ninfer_core.kernels import head_decode as heads
from ninfer_core.kernels import linear_decode as linear
from ninfer_core.kernels import mlp_decode as mlp
from ninfer_core.kernels import residual_decode as residual
from ninfer_core.kernels._order import Activation
from ninfer_core.kernels._parts import PartialSums
from ninfer_core.kernels._tiles import Tile
from tests.bench import kernel_inputs
from tests.bench.common import Record
from tests.bench.kernel_inputs import graph_time, random_activation, random_matrix, read_bandwidth, relative

Fields = dict[str, object]
"""Fields of `_tiles.Family`."""


@dataclass(frozen=True, slots=True)
class Role:
    """A matrix and the variants of its launch; the first is what was there before, the others what it is compared with."""

    rows: int
    columns: int
    format: str
    variants: dict[str, Fields]


def shared(steps: int, warps: int, parts: int, registers: int | None) -> Fields:
    """A residual projection by `parts` programs a group."""
    return {"shared": Tile(2, steps, warps, parts), "shared_registers": registers, "shared_dense": True}


def up(steps: int, warps: int, parts: int, registers: int | None = 128) -> Fields:
    """Gate and up with the groups left over in `parts` parts; 1: not shared."""
    return {"mlp": Tile(4, steps, warps, parts), "registers": registers}


def into(tiles: int, steps: int, warps: int, registers: int | None = 128) -> Fields:
    """The input projection."""
    return {"long": Tile(tiles, steps, warps), "projection": Tile(2, 8, warps), "registers": registers}


ONE: Fields = {"shared": Tile(2, 2, 4, 1)}
ROLES = {
    "out": Role(5120, 6144, "Q5", {
        "one": ONE, "4 parts, 2 4 / 96": shared(2, 4, 4, 96), "4 parts, 2 4 / 128": shared(2, 4, 4, 128),
        "4 parts, 4 4 / 96": shared(4, 4, 4, 96), "4 parts, 6 4 / 104": shared(6, 4, 4, 104),
        "2 parts, 2 8 / 128": shared(2, 8, 2, 128), "2 parts, 6 8 / 128": shared(6, 8, 2, 128),
        "8 parts, 2 2 / 96": shared(2, 2, 8, 96), "8 parts, 6 2 / 104": shared(6, 2, 8, 104),
    }),
    "down": Role(5120, 17408, "Q5", {
        "one": ONE, "4 parts, 2 4 / 96": shared(2, 4, 4, 96), "4 parts, 2 4 / 128": shared(2, 4, 4, 128),
        "4 parts, 1 4 / 80": shared(1, 4, 4, 80), "4 parts, 3 4 / 104": shared(3, 4, 4, 104),
        "4 parts, 4 4 / 128": shared(4, 4, 4, 128), "2 parts, 2 8 / 128": shared(2, 8, 2, 128),
        "8 parts, 2 2 / 96": shared(2, 2, 8, 96),
    }),
    "up": Role(34816, 5120, "Q4", {
        "one": up(5, 8, 1), "5 parts": up(5, 8, 5), "2 parts": up(5, 8, 2), "2 8": up(2, 8, 1), "5 parts, 2 8": up(2, 8, 5),
        "5 parts, 2 4": up(2, 4, 5), "5 parts, free": up(5, 8, 5, None),
    }),
    "in": Role(16384, 5120, "Q5", {
        "one": into(1, 10, 4), "1 10 4, 104": into(1, 10, 4, 104), "1 5 4, 80": into(1, 5, 4, 80), "1 5 4": into(1, 5, 4),
        "2 5 4": into(2, 5, 4), "1 10 2": into(1, 10, 2),
    }),
    "draft head": Role(131072, 5120, "Q4", {
        "one": {}, "80": {"head_registers": 80}, "96": {"head_registers": 96}, "2 2 8": {"projection": Tile(2, 2, 4)},
        "2 2 8 / 80": {"projection": Tile(2, 2, 4), "head_registers": 80},
        "2 10 8 / 128": {"projection": Tile(2, 10, 4), "head_registers": 128},
    }),
    "out 35B": Role(2048, 4096, "W8", {
        "one": {}, "2 parts, 8 8": shared(8, 8, 2, None), "2 parts, 4 8 / 96": shared(4, 8, 2, 96),
        "4 parts, 8 4 / 128": shared(8, 4, 4, 128), "4 parts, 8 4 / 96": shared(8, 4, 4, 96),
    }),
}  # fmt: skip
LAYER = {"one": ONE | up(5, 8, 1), "out and down shared": up(5, 8, 1), "up shared": ONE, "default": {}}
"""Input projection, output projection, gate/up and down of ten layers, without the mixers; the values mean nothing."""
COPIES = 10
CALLS = 20


@contextmanager
def fields(changed: Fields) -> Iterator[None]:
    """The tile tables with these fields."""
    kept = dict(_tiles.FAMILIES)
    _tiles.FAMILIES.update({n: f._replace(**changed) for n, f in kept.items()})
    try:
        yield
    finally:
        _tiles.FAMILIES.update(kept)


class Calls:
    """Buffers of calls of `rows` rows of one role, over the same `weights` for all."""

    def __init__(self, role: str, rows: int, weights: list, every: Activation | None = None) -> None:
        self.role, self.rows, self.weights = role, rows, weights
        n, k, device = weights[0].rows, weights[0].columns, kernel_inputs.DEVICE
        self.a = every if every is not None else random_activation(rows, k)
        generator = torch.Generator(device).manual_seed(1)
        self.x = [
            torch.randn(rows, min(n, 5120), device=device, generator=generator),
            torch.zeros(rows, n, device=device),
        ]
        self.side = torch.zeros(96, k, device=device, dtype=torch.bfloat16)
        self.norm = torch.zeros(n, device=device, dtype=torch.bfloat16)
        self.wide = torch.zeros(rows, n, device=device, dtype=torch.bfloat16)
        self.u = torch.zeros(rows, k if role == "in" else n, device=device)
        self.gates = torch.zeros(rows, 96, device=device)
        self.out = Activation.empty(rows, n // 2 if role == "up" else n, 1 if role == "up" else n // 32, device)
        self.best = heads.Candidates.empty(rows, n, device)
        self.sums = PartialSums.empty(max(rows, 8), 5120, 16, device)

    def run(self, i: int) -> None:
        """One call over weights `i`."""
        w = self.weights[i % len(self.weights)]
        if self.role == "in":
            linear.project(w, self.a, self.wide, u=self.u, side=self.side, side_out=self.gates)
        elif self.role == "draft head":
            heads.head(w, self.a, self.best, None, addressable=w.rows)
        elif self.role == "up":
            mlp.gate_up(w, self.a, self.rows, self.out, self.sums)
        else:
            x, y = self.x
            norm = "none" if self.role == "down" else "head"
            residual.project_residual(w, self.a, x, self.norm, y, self.u, self.out, self.sums, norm=norm)

    def result(self) -> list[torch.Tensor]:
        """What the last call left."""
        if self.role == "in":
            return [self.wide]
        if self.role == "draft head":
            return [self.best.value, self.best.row]
        codes, scales, squares = self.out.rows(self.rows)
        return [codes, scales] if self.role == "up" else [self.x[1], codes, scales, squares]


def values(call: Calls) -> torch.Tensor:
    """The result as numbers."""
    if call.role == "in":
        return call.wide.float()
    if call.role == "draft head":
        return call.best.value
    return call.out.values(call.rows) if call.role == "up" else call.x[1] - call.x[0]


def checked(role: str, weights: list, changed: Fields) -> dict[str, object]:
    """A variant's distance from one program a group, and whether its bits stay."""
    many = Calls(role, 4, weights)
    few = Calls(role, 1, weights, many.a)
    few.x[0] = many.x[0][:1].contiguous()
    with fields(ROLES[role].variants["one"]):
        many.run(0)
        expected = values(many).clone()
    found: dict[str, object] = {}
    with fields(changed):
        many.run(0)
        few.run(0)
        found["error"] = relative(values(many), expected)
        found["bits"] = all(torch.equal(a[:1], b[:1]) for a, b in zip(many.result(), few.result(), strict=True))
        wrong = torch.zeros((), dtype=torch.int64, device=kernel_inputs.DEVICE)
        for call in (few, many):
            first = []
            for turn in range(20):
                for i in range(len(weights)):
                    call.run(i)
                    left = call.result()
                    if not turn:
                        first.append([t.clone() for t in left])
                    for a, b in zip(left, first[i], strict=True):
                        wrong += (a != b).any()
        found["changed"] = int(wrong)
        found["counts left"] = int(few.sums.arrived.any() or many.sums.arrived.any())
    return found


def alone(role: str, call: Calls, changed: Fields) -> float:
    """Microseconds of a call."""

    def chain() -> None:
        for i in range(CALLS):
            call.run(i)

    with fields(changed):
        return graph_time(chain, 9) / CALLS


def measure(options: argparse.Namespace) -> None:
    """Compile, check, time."""
    record, rows = Record(options.json, "cuda"), [int(n) for n in options.rows.split(",")]
    roles = [name for name in ROLES if not options.only or name in options.only.split(",")]
    weights = {
        name: [random_matrix(role.rows, role.columns, role.format) for _ in range(COPIES)]
        for name, role in ROLES.items()
        if name in roles
    }
    calls = {(name, n): Calls(name, n, weights[name]) for name in roles for n in {1, 4, *rows}}

    def every() -> None:
        for name in roles:
            for changed in ROLES[name].variants.values():
                with fields(changed):
                    for n in {1, 4, *rows}:
                        calls[name, n].run(0)

    try:
        compile_ahead.compile_all(compile_ahead.noted(every))
    except RuntimeError as error:
        record.add("not compiled", str(error)[:500])
    bandwidth = read_bandwidth()
    record.add("read bandwidth TB/s", bandwidth)
    for name in roles:
        for label, changed in ROLES[name].variants.items():
            found: dict[str, object] = {"floor_us": weights[name][0].nbytes / bandwidth / 1e6}
            try:
                for n in rows:
                    found[f"us, {n} rows"] = alone(name, calls[name, n], changed)
                if not options.unchecked:
                    found |= checked(name, weights[name], changed)
            except Exception as error:
                found["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            record.add(f"{name}, {label}", found)
    if {"in", "out", "up", "down"} <= set(roles):
        for n in rows:
            for label, changed in LAYER.items():

                def layers(n: int = n) -> None:
                    for i in range(COPIES):
                        for name in ("in", "out", "up", "down"):
                            calls[name, n].run(i)

                with fields(changed):
                    record.add(f"layer, {label}, {n} rows", graph_time(layers, 9) / COPIES)


def main() -> int:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="ROLES", help=f"of {', '.join(ROLES)}")
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--unchecked", action="store_true", help="times alone")
    measure(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
