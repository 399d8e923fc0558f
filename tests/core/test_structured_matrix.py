"""A slice of the matrix of structured output (`tests/tools/structured_matrix.py`): every cell, a few outputs."""

from __future__ import annotations

import pytest
from agent_schemas import MATRIX

from tests.tools.structured_matrix import MODELS, Cell, Kept, parts, run

SMALL = {"demo": ["exclusive"], "random": ["const", "labels"]}
"""Schemas whose values are short; the second round of indices asks for them as arguments."""


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_every_cell_is_valid_and_the_same_with_drafts(model, thinking):
    names = sorted(MATRIX)
    indices = [names.index(name) + call * len(names) for call, name in enumerate(SMALL[model])]
    cells = [cell for part in parts([model], (thinking,), (0.0, 1.0)) for cell in run(part, indices, sequences=2)]
    assert len(cells) == 4
    for cell in cells:
        assert cell.wrong == [] and cell.valid + cell.cut == len(indices), cell
    assert sum(cell.valid for cell in cells) == 4 * len(indices)
    assert sum(cell.accepted for cell in cells) > 0


def test_finished_cells_are_kept_for_the_same_sources_only(tmp_path):
    part, cells = ("random", True, 1.0), [Cell("one", valid=3, texts=["x"]), Cell("two", wrong=["bad"])]
    file = tmp_path / "cells.jsonl"
    assert Kept(file, "a").of(part) is None and Kept(None, "a").of(part) is None
    Kept(file, "a").add(part, cells)
    found = Kept(file, "a").of(part)
    assert found is not None and [str(cell) for cell in found] == [str(cell) for cell in cells]
    assert found[1].wrong == ["bad"]
    assert Kept(file, "b").of(part) is None and Kept(file, "a").of(("random", False, 1.0)) is None
