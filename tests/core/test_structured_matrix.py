"""A slice of the matrix of structured output (`tests/tools/structured_matrix.py`): every cell, a few outputs."""

from __future__ import annotations

import pytest
from agent_schemas import MATRIX

from tests.tools.structured_matrix import MODELS, run

SMALL = {"demo": ["exclusive"], "random": ["const", "labels"]}
"""Schemas whose values are short; the second round of indices asks for them as arguments."""


@pytest.mark.parametrize("model", MODELS)
def test_every_cell_is_valid_and_the_same_with_drafts(model):
    names = sorted(MATRIX)
    indices = [names.index(name) + call * len(names) for call, name in enumerate(SMALL[model])]
    cells = list(run([model], indices, sequences=2))
    assert len(cells) == 8
    for cell in cells:
        assert cell.wrong == [] and cell.valid + cell.cut == len(indices), cell
    assert sum(cell.valid for cell in cells) == 8 * len(indices)
    assert sum(cell.accepted for cell in cells) > 0
