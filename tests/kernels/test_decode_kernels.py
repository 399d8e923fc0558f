"""The Triton decode kernels: results under the interpreter, and builds for every supported card without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = (
    "attention", "gated delta", "project W8", "experts grouped", "project Q4", "experts Q4 Q5", "project Q5", "side rows",
    "project Q6", "residual", "head", "expert ties", "embed W8", "dense gate/up", "embed Q6",
)  # fmt: skip
"""Two processes take every second one: each half takes about as long."""
LONG_CASES = ("experts W8 W8", "experts Q4 Q6")
"""The same code in other formats; before a release."""
PRODUCTS = {
    "gdn in", "gdn in 64", "gdn out", "head", "dense gate/up", "experts up, row", "experts up, window",
    "experts up, many", "experts rows 5", "experts down 5", "attention R=1",
}  # fmt: skip
"""Kernels with matrix instructions, all operands in lane layout; the others leave layouts to the compiler."""
SMALLEST_BLOCK_MEMORY = 99 * 1024
"""Shared memory of one block on the consumer cards (sm_86, sm_89, sm_120)."""


def lines(program: str, *arguments: str, interpret: bool) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    done = subprocess.run(
        [sys.executable, str(HERE / program), *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@cache
def interpreted(cases: tuple[str, ...]) -> dict[str, str | None]:
    """Every case's fault, from two processes at once: the interpreter is slow and uses one core."""
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(
            lambda names: lines("interpreted_cases.py", *names, interpret=True), (cases[::2], cases[1::2])
        )
    return {line["case"]: line["fault"] for half in halves for line in half}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in LONG_CASES)])
def test_kernel_against_its_twin(case):
    fault = interpreted(CASES if case in CASES else LONG_CASES)[case]
    assert fault is None, fault


@pytest.mark.parametrize(
    "capability",  # half a minute each unless in the compiler's cache; 90 has dependent launch; the rest before a release
    [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 86, 89, 100, 120))],
)
def test_builds_and_fits(capability):
    built = lines("compile_cases.py", str(capability), interpret=False)
    for line in built:
        assert line["shared"] <= SMALLEST_BLOCK_MEMORY, line
        # Another layout here means that the compiler computes the operands twice, or moves them through shared memory.
        lanes = f"sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [{line['warps']}, 1], order = [1, 0]"
        assert all(lanes in layout for layout in line["lanes"]), line
    assert {line["case"] for line in built if line["lanes"]} == PRODUCTS
