"""What the host tells a round on the device under a grammar: tokens that may stand, and how many may come. No torch.

While the device computes the rows of a round, the host works out from the last results and the drafts what may stand in
each row. The device then draws by that; nothing that it emits has to be taken back. Two things end a round early: the
first row whose token may be replaced, since the value might have to be closed there, and a think block whose budget is
used up. Tokens that are certain are handed over before the device has them: it owes them, and the next rows are held to
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .grammar import Row

if TYPE_CHECKING:
    from .running import Running

AHEAD = 5
"""Owed tokens that are made the drafts of the next round, at most: those that a lane holds."""


@dataclass(frozen=True, slots=True)
class Order:
    """One sequence's part of a round.

    `most`: tokens that it may emit; 0 leaves it as it is. `rows`: what may stand, from the first row on; as many as can
    matter. `known`: if the last token emitted is that of the last of `rows`, those that follow it.
    """

    most: int
    rows: tuple[Row, ...] = ()
    known: tuple[int, ...] = ()


VOID = Order(0)
"""Emit nothing: the rows began with a token that does not stand, or nobody waits for them."""


def held(sequence: Running) -> bool:
    """Whether every round of a sequence needs an order."""
    return sequence.sampler.grammar is not None or sequence.session.guided


def order(sequence: Running, drafts: Sequence[int]) -> Order:
    """The order for a round over the sequence's anchor and `drafts`.

    Raises:
        SchemaError: the grammar cannot be followed any further.
    """
    owed, count = sequence.owed, len(drafts) + 1
    rows = [Row(forced=token) for token in owed[:count]]
    wrong = next((i for i, (a, b) in enumerate(zip(owed, drafts, strict=False)) if a != b), None)
    if wrong is not None or len(owed) >= count:
        rows = rows if wrong is None else rows[: wrong + 1]
        return Order(len(rows), tuple(rows), tuple(owed[len(rows) : len(rows) + AHEAD]))
    grammar, ahead = sequence.sampler.grammar, drafts[len(owed) :]
    found = [Row()] * (len(ahead) + 1) if grammar is None else grammar.rows(ahead)
    if (burst := sequence.session.burst) is not None:
        found = found[: max(1, burst)]
    last = next((i for i, row in enumerate(found) if row.last), len(found))
    rows += found[: last + 1]
    return Order(len(rows), tuple(rows))


def write(row: Row, bits: np.ndarray) -> bool:
    """The ids that may stand, one bit each, lowest first, into `bits` uint8 `[n]`; False if all may."""
    if row.forced is not None:
        bits.fill(0)
        bits[row.forced >> 3] = 1 << (row.forced & 7)
    elif row.mask is not None:
        bits[: len(row.mask)] = np.frombuffer(row.mask, np.uint8)
        bits[len(row.mask) :] = 0
    elif row.banned is not None and row.banned.size:
        bits.fill(255)
        np.bitwise_and.at(bits, row.banned >> 3, (~(1 << (row.banned & 7)) & 255).astype(np.uint8))
    else:
        return False
    return True
