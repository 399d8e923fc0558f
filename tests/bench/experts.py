"""The routed experts of all 40 layers in decode: gate/up and down by rows of a call, each beside its floor, and exactness.

    python -m tests.bench.experts [--json FILE] [--rows 1,2,4,8,16,32,64] [--workers N] [--no-checks] [--registers]

Every layer and row has router logits of its own, so that rows share experts by chance only. The floor is the bytes of
the experts that were chosen (a layer's every expert once) over the read bandwidth measured in the same run. With
`--registers` only: gate/up and down by steps and bounds on registers, compiled by the workers beforehand.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ninfer_core.kernels import _tiles
from ninfer_core.kernels import moe_decode as moe
from ninfer_core.kernels._order import Activation, KernelMatrix
from ninfer_core.kernels._tiles import ExpertRegisters
from tests.bench.common import Record
from tests.bench.kernel_checks import check_choice, check_moe, faults
from tests.bench.kernel_inputs import DEVICE, graph_time, random_activation, random_matrix, read_bandwidth

LAYERS, EXPERTS, TOP_K, INNER, WIDTH = 40, 256, 8, 512, 2048
ROWS = (1, 2, 4, 8, 16, 32, 64)
CHECKED = (1, 2, 4, 8, 9, 16, 64)
SWEEP: dict[str, dict[str, Any]] = {"default": {}} | {
    f"{steps} steps, at most {most}": {
        "expert_steps": steps,
        "item_steps": steps,
        "expert_registers": ExpertRegisters(*[most] * len(ExpertRegisters._fields)),
    }
    for steps, most in ((1, 80), (2, 80), (2, 96), (2, 128), (4, 128), (4, None))
} | {"nothing held": {"held": 0}}  # fmt: skip
"""Fields of `_tiles.Family` to compare."""
SWEPT = dict.fromkeys((1, 4), ("default", "4 steps, at most 128", "nothing held")) | dict.fromkeys(
    (8, 32, 64), tuple(SWEEP)
)
"""By rows, what is compared; calls of up to four, of five to eight and of more rows share their kernels."""
FAMILIES = dict(_tiles.FAMILIES)


def select(name: str) -> None:
    """Launch with these fields of `SWEEP` from now on."""
    _tiles.FAMILIES.update({n: family._replace(**SWEEP[name]) for n, family in FAMILIES.items()})


class Experts:
    """Weights of all layers, and the buffers of a call of `rows` rows in each."""

    def __init__(self, layers: Sequence[int] = range(LAYERS)) -> None:
        q6 = (34, 38, 39)
        self.up = [random_matrix(EXPERTS * 2 * INNER, WIDTH, "Q4") for _ in layers]
        self.down = [random_matrix(EXPERTS * WIDTH, INNER, "Q6" if i in q6 else "Q5") for i in layers]
        self.shared_down = [random_matrix(WIDTH, INNER, "W8") for _ in layers]
        self.norm = (torch.randn(WIDTH, device=DEVICE) * 0.1).bfloat16()

    def call(self, rows: int) -> Call:
        """Buffers and routings of `rows` rows."""
        return Call(self, rows)


class Call:
    """One row call through all layers, launch by launch."""

    def __init__(self, experts: Experts, rows: int) -> None:
        self.experts, self.rows, self.layers = experts, rows, range(len(experts.up))
        self.a = random_activation(rows, WIDTH)
        self.logits = torch.randn(len(self.layers), rows, EXPERTS + 1, device=DEVICE)
        self.shared = torch.randn(rows, 2 * INNER, device=DEVICE)
        self.ids = torch.zeros(len(self.layers), rows, TOP_K, dtype=torch.int32, device=DEVICE)
        self.weights = torch.zeros(len(self.layers), rows, TOP_K, device=DEVICE)
        self.h = [moe.ExpertRows.empty(rows, TOP_K, INNER, DEVICE, experts=EXPERTS, width=WIDTH) for _ in self.layers]
        self.x, self.out, self.u = (torch.randn(rows, WIDTH, device=DEVICE) for _ in range(3))
        self.a_out = Activation.empty(rows, WIDTH, WIDTH // 32, DEVICE)

    def gate_up(self, i: int) -> None:
        """Choice, and inner rows of layer `i`."""
        moe.expert_gate_up(
            self.experts.up[i], self.a, self.logits[i], self.shared, self.h[i], self.ids[i], self.weights[i],
            ahead=self.experts.down[i],
        )  # fmt: skip

    def down(self, i: int) -> None:
        """Results of layer `i`."""
        moe.expert_down(
            self.experts.down[i], self.experts.shared_down[i], self.h[i], self.ids[i], self.weights[i],
            self.logits[i], self.x, self.experts.norm, self.out, self.u, self.a_out,
        )  # fmt: skip

    def fill(self) -> None:
        """Choice and inner rows of all layers."""
        for i in self.layers:
            self.gate_up(i)

    def halves(self) -> dict[str, float]:
        """Microseconds of gate/up, of down, and of both, all layers."""
        parts = {"up": [self.gate_up], "down": [self.down], "up and down": [self.gate_up, self.down]}
        return {
            name: graph_time(lambda calls=calls: [call(i) for i in self.layers for call in calls], 7)
            for name, calls in parts.items()
        }

    def times(self, bandwidth: float) -> dict[str, Any]:
        """Microseconds of all layers, and floors; the choice alone where it is a launch of its own."""
        self.fill()
        distinct = [len(self.ids[i].unique()) for i in self.layers]

        def floor(matrices: list[KernelMatrix]) -> float:
            return sum(m.nbytes / EXPERTS * n for m, n in zip(matrices, distinct, strict=True)) / bandwidth / 1e6

        shared = sum(m.nbytes for m in self.experts.shared_down) / bandwidth / 1e6
        found: dict[str, Any] = {"experts": sum(distinct) / len(distinct)}
        parts = {"up": [self.gate_up], "down": [self.down], "up and down": [self.gate_up, self.down]}
        if self.rows > 8:
            parts["choice"] = [lambda i: moe.choose(self.logits[i], self.h[i], self.ids[i], self.weights[i])]
        for name, calls in parts.items():
            found[name] = graph_time(lambda calls=calls: [call(i) for i in self.layers for call in calls], 9)
        found["floor up"], found["floor down"] = floor(self.experts.up), floor(self.experts.down) + shared
        return found


def prepare(job: tuple[str, int]) -> list[str]:
    """In a worker, at once with others: a check, for its faults; or two layers, so that all kernels are compiled."""
    kind, rows = job
    try:
        torch.cuda.set_device(0)
        torch.manual_seed(0)
        if kind == "choice":
            return faults(check_choice(), kind)
        if kind == "moe":
            return faults(check_moe(rows), f"{kind} {rows}")
        select(kind)
        call = Experts((0, LAYERS - 1)).call(rows)  # both formats
        for i in call.layers:
            call.gate_up(i)
            call.down(i)
        torch.cuda.synchronize()
        return []
    except Exception as error:
        return [f"{kind}, {rows} rows: {type(error).__name__}: {str(error)[:300]}"]


def main() -> int:
    """Checks, then times by rows; 1 if a check found a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as they come")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--workers", type=int, default=12, help="processes that check and compile beforehand")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument(
        "--registers",
        action="store_true",
        help="no checks; only the halves, by steps and bounds (with 17 workers at once)",
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    record = Record(options.json, "cuda")
    counts = [int(n) for n in options.rows.split(",")]
    jobs = [("default", rows) for rows in counts]
    if options.registers:
        jobs = [(name, rows) for rows in (8, 32, 4, 1) for name in SWEPT[rows]]
    elif not options.no_checks:
        jobs += [("choice", 0), *(("moe", rows) for rows in CHECKED)]
    wrong = []
    with futures.ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for (kind, rows), found in zip(jobs, pool.map(prepare, jobs), strict=True):
            wrong += found
            record.add(f"{kind} {rows}", found or "ok")
    bandwidth = read_bandwidth()
    record.add("read bandwidth TB/s", bandwidth)
    experts = Experts()
    if options.registers:
        for rows, names in SWEPT.items():
            call = experts.call(rows)
            call.fill()
            for name in names:
                select(name)
                record.add(f"{rows} rows, {name}, us", call.halves())
        return bool(wrong)
    for rows in counts:
        record.add(f"{rows} rows, us", experts.call(rows).times(bandwidth))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
