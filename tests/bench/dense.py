"""The dense projections of the 27B, each alone and one behind the other, in variants: `python -m tests.bench.dense --json FILE`.

Times a call over weights that no call shortly before has read, in one graph of twenty, beside its floor. Before that all
variants are compiled, in parallel, and checked: against the first variant, a row alone against the same row among
four, and twenty more times, whose bits must not change. `--only out,down` and `--rows 1` leave parts out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ninfer_core.kernels import _tiles, compile_ahead
from ninfer_core.kernels import gated_delta_decode as delta
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


def up(steps: int, warps: int, parts: int, registers: int | None = 128) -> Fields:
    """Gate and up with the groups left over in `parts` parts; 1: not shared."""
    return {"mlp": Tile(4, steps, warps, parts), "registers": registers}


ONE: Fields = {"shared": Tile(2, 2, 4, 1)}
ROLES = {
    "out": Role(5120, 6144, "Q5", {"one": ONE, "default": {}, "112": {"shared_registers": 112}}),
    "down": Role(5120, 17408, "Q5", {"one": ONE, "default": {}}),
    "up": Role(34816, 5120, "Q4", {
        "one": up(4, 8, 1), "default": {}, "in stages": {"rolling": False}, "5 steps": up(5, 8, 5),
    }),
    "in": Role(16384, 5120, "Q5", {"default": {}}),
    "draft head": Role(131072, 5120, "Q4", {
        "one": {"head": Tile(2, 5, 8), "head_registers": None}, "default": {}, "112": {"head_registers": 112},
    }),
}  # fmt: skip
LAYER: dict[str, Fields] = {"default": {}, "late": {"early": False}}
"""Mixer and output projection of ten layers, and all their Gated DeltaNet launches; the values mean nothing."""
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
            residual.project_residual(
                w, self.a, x, self.norm, y, self.u, self.out, self.sums, norm=norm, fine=norm == "head"
            )

    def result(self) -> list[torch.Tensor]:
        """What the last call left."""
        if self.role == "in":
            return [self.wide]
        if self.role == "draft head":
            return [self.best.value, self.best.row]
        codes, scales, squares = self.out.rows(self.rows)
        return [codes, scales] if self.role == "up" else [self.x[1], codes, scales, squares]


class Mixer:
    """Gated DeltaNet between an input and an output projection."""

    def __init__(self, into: Calls, out: Calls) -> None:
        self.into, self.out, device = into, out, kernel_inputs.DEVICE
        self.states = [delta.DeltaState.empty(1, 16, 48, device) for _ in range(COPIES)]
        self.taps = torch.randn(4, 10240, device=device).bfloat16()
        self.a_log, self.dt = torch.randn(48, device=device) * 0.3, torch.randn(48, device=device)
        self.norm = torch.ones(128, device=device).bfloat16()
        self.numbers = [torch.full((1,), n, dtype=torch.int32, device=device) for n in (0, 100, 1)]

    def run(self, i: int) -> None:
        """The mixer of layer `i`."""
        delta.gated_delta(
            self.into.wide, self.into.gates, self.taps, self.a_log, self.dt, self.norm, self.states[i], *self.numbers,
            self.out.a,
        )  # fmt: skip


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
    with fields(next(iter(ROLES[role].variants.values()))):
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


def layer_steps(n: int, calls: dict[tuple[str, int], Calls]) -> dict[str, Callable[[int], None]]:
    """The launches of a layer of `n` rows by name, for the layer's number."""
    mixer = Mixer(calls["in", n], calls["out", n])
    return {name: calls[name, n].run for name in ("in", "out", "up", "down")} | {"mixer": mixer.run}


def layers(record: Record, n: int, steps: dict[str, Callable[[int], None]]) -> None:
    """Mixer and output projection, and whole layers, of `n` rows, under every variant of `LAYER`."""
    for part in (("mixer", "out"), ("in", "mixer", "out", "up", "down")):

        def chain(part: tuple[str, ...] = part) -> None:
            for i in range(COPIES):
                for name in part:
                    steps[name](i)

        for label, changed in LAYER.items():
            with fields(changed):
                record.add(f"{', '.join(part)}: {label}, {n} rows", graph_time(chain, 15) / COPIES)


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

    whole = {"in", "out", "up", "down"} <= set(roles)
    steps = {n: layer_steps(n, calls) for n in rows} if whole else {}

    def every() -> None:
        for name in roles:
            for changed in ROLES[name].variants.values():
                with fields(changed):
                    for n in {1, 4, *rows}:
                        calls[name, n].run(0)
        for changed in LAYER.values():
            with fields(changed):
                for launches in steps.values():
                    for launch in launches.values():
                        launch(0)

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
    for n in steps:
        layers(record, n, steps[n])


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
