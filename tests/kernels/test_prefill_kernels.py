"""The Triton prefill kernels: results under the interpreter, and builds for every supported card without a GPU."""

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
    "opened W8", "opened Q4", "opened Q5", "opened Q6", "experts Q4 Q5", "experts Q5 Q6", "experts W8 W8", "rows",
    "inverse", "delta 1", "delta 63 and 2", "delta 64 and 65", "attention 1", "attention 63, 2", "attention 64, 66",
    "joined", "sparse model", "dense model",
)  # fmt: skip
BLOCK_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory of one block in KB."""


def lines(program: str, *arguments: str, interpret: bool) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    done = subprocess.run(
        [sys.executable, str(HERE / program), *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@cache
def interpreted() -> dict[str, str | None]:
    """Every case's fault, from two processes at once: the interpreter is slow and uses one core."""
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(
            lambda names: lines("interpreted_prefill.py", *names, interpret=True), (CASES[::2], CASES[1::2])
        )
    return {line["case"]: line["fault"] for half in halves for line in half}


@pytest.mark.parametrize("case", CASES)
def test_kernel_against_its_twin(case):
    assert interpreted()[case] is None, interpreted()[case]


@pytest.mark.parametrize(
    "capability",  # half a minute each unless in the compiler's cache; 86 has the least memory; the rest before a release
    [86, *(pytest.param(other, marks=pytest.mark.slow) for other in BLOCK_MEMORY if other != 86)],
)
def test_builds_and_fits(capability):
    built = lines("compile_prefill.py", str(capability), interpret=False)
    assert len(built) >= 18
    for line in built:
        assert line["shared"] <= BLOCK_MEMORY[capability] * 1024, line
        if (
            line["case"].startswith("experts") and capability != 100
        ):  # words reach the matrix unit without changing lanes
            assert line["moved"] == 0, line
