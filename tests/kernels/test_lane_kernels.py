"""Lanes, the device's draw and the kernels between layers: results under the interpreter."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("triton")

from tests.kernels.test_decode_kernels import lines

CASES = (
    "draw", "draw ties", "draw sick", "accept", "open and keep", "rope", "finish", "draft input", "workspace",
)  # fmt: skip


@cache
def interpreted() -> dict[str, str | None]:
    """Every case's fault."""
    return {line["case"]: line["fault"] for line in lines("lane_cases.py", *CASES, interpret=True)}


@pytest.mark.parametrize("case", CASES)
def test_kernel_against_the_host(case):
    assert interpreted()[case] is None, interpreted()[case]
