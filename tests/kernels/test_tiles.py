"""The tile tables: what may follow the rows of a call, and what must not, since a row's bits follow from it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ninfer_core.kernels import _tiles
from ninfer_core.kernels._order import GROUP, HIGH_WORDS, KernelMatrix
from ninfer_core.kernels._parts import PartialSums

ROWS = (1, 2, 4, 5, 8, 9, 16, 33, 64)


def matrix(rows, columns, fmt):
    """A matrix without memory, on a card of 132 multiprocessors."""
    units = columns // GROUP[fmt]

    def words(*shape):
        return torch.empty(rows // 16, units, *shape, dtype=torch.int32, device="meta")

    return KernelMatrix(words(32, 4), words(32, HIGH_WORDS[fmt]), words(8), fmt, rows, columns)


@pytest.mark.parametrize(
    ("role", "shape", "heads", "parts"),
    [
        ("out", (5120, 6144, "Q5"), True, 4),
        ("attention out", (5120, 6144, "Q5"), False, 4),
        ("down", (5120, 17408, "Q5"), False, 4),
        ("draft input", (5120, 10240, "Q4"), False, 4),
        ("out of the 35B", (2048, 4096, "W8"), True, 1),
        ("few bytes", (5120, 1024, "Q5"), False, 1),
        ("as many groups as multiprocessors", (32 * 132, 6144, "Q5"), False, 1),
    ],
)
def test_parts_and_warps_do_not_follow_the_rows(role, shape, heads, parts):
    weight = matrix(*shape)
    tiles = [_tiles.residual(weight, rows, heads) for rows in ROWS]
    assert {tile.parts for tile in tiles} == {parts}
    assert len({tile.warps for tile in tiles}) == 1
    run = (4 if shape[2] == "W8" else 2) if heads else 1
    for tile in tiles:
        assert weight.groups % (tile.parts * tile.warps * run) == 0, tile
        assert tile.steps % run == 0, "a head is split between two steps"


def test_groups_left_over_are_shared():
    """27B: 544 groups are four for each of 132 multiprocessors and sixteen, in five parts each."""
    weight = matrix(34816, 5120, "Q4")
    tiles = [_tiles.mlp(weight, rows) for rows in ROWS]
    assert {(tile.warps, tile.parts) for tile in tiles} == {(8, 5)}
    assert _tiles.whole(544, tiles[0], weight.words) == 528
    assert _tiles.whole(528, tiles[0], weight.words) == 528, "nothing is left over"
    assert _tiles.whole(528 + 27, tiles[0], weight.words) == 528 + 27, "more parts than multiprocessors"
    assert _tiles.whole(100, tiles[0], weight.words) == 100, "less than one for each"
    assert _tiles.whole(544, tiles[0]._replace(parts=1), weight.words) == 544


def test_room_for_parts():
    sums = PartialSums.empty(9, 64, 2, "cpu")
    sums.check(64, 16, 2, 2)
    with pytest.raises(ValueError, match="parts"):
        sums.check(64, 17, 2, 2)
    with pytest.raises(ValueError, match="parts"):
        sums.check(64, 16, 2, 3)
