"""The Triton kernels of the vision tower under the interpreter. `test_prefill_kernels.py` builds them for every card."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.programs import interpreted

CASES = (
    "turned 72", "turned 64", "attention 72", "attention 64", "attention 16", "attention, large scores", "rows", "tower",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_kernel_against_its_twin(case):
    fault = interpreted("interpreted_vision.py", CASES)[case]
    assert fault is None, fault
