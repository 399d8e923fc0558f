"""Lanes, the device's draw and the kernels between layers: results under the interpreter."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from tests.kernels.programs import HERE, interpreted, printed

CASES = (
    "draw", "draw ties", "draw crowd", "draw sick", "accept", "open and keep", "many rounds", "rope", "finish",
    "draft input", "workspace", "masked one", "masked near", "masked far", "masked half", "masked most",
    "accept by orders", "keep by orders", "rounds by orders",
)  # fmt: skip


@pytest.mark.timeout(1500)  # the first runs all cases
@pytest.mark.parametrize("case", CASES)
def test_kernel_against_the_host(case):
    fault = interpreted("lane_cases.py", CASES)[case]
    assert fault is None, fault


HIDDEN = 0.06
"""Int8 activations in groups of 32 through two layers, against fp32."""


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_whole_model_under_the_interpreter(kind):
    for what, error in json.loads(printed(str(HERE / "fused_case.py"), kind, interpret=True, seconds=2400)).items():
        assert error < HIDDEN, (what, error)
