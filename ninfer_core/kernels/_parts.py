"""Groups of rows whose K several programs share: partial sums in memory, and the last program to arrive that adds them.

Programs of equal work then spread evenly over a card among whose multiprocessors the groups alone do not divide. No
program waits for another: each stores its part and counts itself, and whoever counts last adds all parts in their
order, its own among them. So a sum's bits follow from the number of parts alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ._dequant import EARLY1, load_one


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Room for partial sums, for one launch at a time: launches that may run at once need one each.

    `values` fp32, `arrived` int32: programs of a group that have stored their part, all 0 between launches.
    """

    values: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def empty(rows: int, columns: int, parts: int, device: torch.device | str) -> PartialSums:
        """For `columns` results of `rows` rows in up to `parts` parts."""
        padded = -(-rows // 8) * 8
        return PartialSums(
            torch.zeros(parts * padded * columns, dtype=torch.float32, device=device),
            torch.zeros(padded // 8 * (columns // 32), dtype=torch.int32, device=device),
        )

    def check(self, columns: int, rows: int, groups: int, parts: int) -> None:
        """Whether `parts` parts of `columns` results of `rows` rows in `groups` groups fit.

        Raises:
            ValueError: they do not.
        """
        padded = -(-rows // 8) * 8
        values, counts = parts * padded * columns, padded // 8 * groups
        if values > self.values.numel() or counts > self.arrived.numel():
            raise ValueError(
                f"{parts} parts of {columns} results of {rows} rows need room for {values} sums and {counts} counts, "
                f"but there is room for {self.values.numel()} and {self.arrived.numel()}: give the workspace more parts"
            )


@triton.jit
def put_part(y, sums, TILES: tl.constexpr, R: tl.constexpr):
    """Store row tiles in lane form (`sum_warps`) from `sums` on; with one live row (`R`) the even columns alone."""
    lane = tl.arange(0, 32)
    for r in tl.static_range(TILES):
        for i in tl.static_range(4):
            if R > 1 or i % 2 == 0:
                tl.store(sums + (r * 4 + i) * 32 + lane, y[r][i])


@triton.jit
def is_last(arrived, PARTS: tl.constexpr):
    """Count this program at `arrived`; whether it is the last of `PARTS`, which then sees what the others stored.

    The last one sets the count back: what uses it next waits for this launch to end.
    """
    # All threads' stores come before the barrier, it before the count of one thread: a release at the scope of the card
    # covers them. The loads behind stand behind a barrier too, that of the compiler, which hands the count round.
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == PARTS - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def take_parts(
    sums, STRIDE: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr
):
    """The sum of `PARTS` parts, `STRIDE` values apart, in their order: what `sum_warps` gives."""
    lane = tl.arange(0, 32)
    values = ()
    for p in tl.static_range(PARTS):
        for r in tl.static_range(TILES):
            for i in tl.static_range(4):
                if R > 1 or i % 2 == 0:
                    # Past the first-level cache, which may hold what stood there before.
                    values = values + (load_one(sums + p * STRIDE + (r * 4 + i) * 32 + lane, EARLY1, PTX),)  # noqa: RUF005
                else:
                    values = values + (tl.zeros([32], tl.float32),)  # noqa: RUF005
    found = ()
    for r in tl.static_range(TILES):
        total = ()
        for i in tl.static_range(4):
            one = values[r * 4 + i]
            for p in tl.static_range(1, PARTS):
                one += values[(p * TILES + r) * 4 + i]
            total = total + (one,)  # noqa: RUF005
        found = found + (total,)  # noqa: RUF005
    return found
