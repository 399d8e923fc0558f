"""The Triton prefill kernels: results under the interpreter, and builds for every supported card without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.programs import interpreted, lines

CASES = (
    "opened W8", "opened Q4", "opened Q5", "opened Q6", "experts Q4 Q5", "experts Q5 Q6", "experts W8 W8",
    "experts, narrow last tiles", "rows", "inverse", "delta 1", "delta 63 and 2", "delta 64 and 65", "attention 1",
    "attention 63, 2", "attention 64, 66", "attention bf16", "attention padded", "joined", "sparse model",
    "sparse model in blocks", "dense model, bf16 pages",
)  # fmt: skip
BLOCK_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory of one block in KB."""


@pytest.mark.parametrize("case", CASES)
def test_kernel_against_its_twin(case):
    fault = interpreted("interpreted_prefill.py", CASES)[case]
    assert fault is None, fault


@pytest.mark.parametrize(
    "capability",  # half a minute each unless in the compiler's cache; 86 has the least memory; the rest before a release
    [86, *(pytest.param(other, marks=pytest.mark.slow) for other in BLOCK_MEMORY if other != 86)],
)
def test_builds_and_fits(capability):
    built = lines("compile_prefill.py", str(capability), interpret=False)
    assert len(built) >= 18
    for line in built:
        assert line["shared"] <= BLOCK_MEMORY[capability] * 1024, line
        assert line["overwritten"] == 0, line
        if (
            line["case"].startswith("experts") and capability != 100
        ):  # words reach the matrix unit without changing lanes
            assert line["moved"] == 0, line
