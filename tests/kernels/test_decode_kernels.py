"""The Triton decode kernels: results under the interpreter, and builds for every supported card without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.programs import interpreted, lines

CASES = (
    "attention", "attention splits", "project W8", "windows", "gated delta", "gated delta batch", "attention bf16", "experts grouped", "project Q4",
    "experts Q4 Q5", "project Q5", "side rows", "project Q6", "residual", "shared", "head", "expert ties", "embed W8",
    "dense gate/up", "shared heads", "embed Q6", "shared W8", "expert lists",
)  # fmt: skip
"""Two processes take every second one: each half takes about as long."""
LONG_CASES = ("experts W8 W8", "experts Q4 Q6")
"""The same code in other formats; before a release."""
PRODUCTS = {
    "gdn in", "gdn in R=1", "gdn in 64", "gdn out", "gdn out R=1", "down", "down R=1", "head", "dense gate/up", "experts up, a row", "experts up, pairs",
    "experts up, items", "experts rows 5", "experts down 5 R=1", "experts down 5 R=8", "attention INT8 R=1", "attention bf16 R=1",
}  # fmt: skip
"""Kernels with matrix instructions, all operands in lane layout; the others leave layouts to the compiler."""
SMALLEST_BLOCK_MEMORY = 99 * 1024
"""Shared memory of one block on the consumer cards (sm_86, sm_89, sm_120)."""


@pytest.mark.timeout(1500)  # the first runs all cases: half a minute, more on a busy machine
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in LONG_CASES)])
def test_kernel_against_its_twin(case):
    fault = interpreted("interpreted_cases.py", CASES if case in CASES else LONG_CASES)[case]
    assert fault is None, fault


@pytest.mark.timeout(1500)
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
        assert line.get("early", 1) > 0, f"{line}: all loads wait for the kernel in front"
    assert {line["case"] for line in built if line["lanes"]} == PRODUCTS
