"""The host tier of the prefix cache: what the device gives up moves to host memory, and is found there again.

A tier is a prefix cache over pools of its own. Here pages and states lie in blocks of one size, so no part of the host
memory is set aside for either. Whole pages that several checkpoints share on the device are copied once.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..hosted import Ticket
from .pool import Pool
from .prefix import Checkpoint, Keys, Match, PrefixCache

log = logging.getLogger("ninfer.engine")
HOST_STATS = (
    "host_checkpoints", "host_bytes", "host_bytes_total", "host_stored", "host_restored", "host_evicted"
)  # fmt: skip
MOST = 65_536
"""Checkpoints in host memory at most; the blocks run out long before."""


class Host(Protocol):
    """What the tier needs of the host memory; `hosted.HostState`."""

    blocks: int
    state_blocks: int

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""

    def store(
        self, slot: int, slot_blocks: Sequence[int], pages: Sequence[int], page_blocks: Sequence[int], carry: Any
    ) -> tuple[Any, Ticket]:
        """Copy a slot, pages and a hidden row to the host."""

    def restore(
        self, slot_blocks: Sequence[int], slot: int, page_blocks: Sequence[int], pages: Sequence[int], carry: Any
    ) -> Any:
        """The way back."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A checkpoint whose copy is under way."""

    keys: tuple[Hashable, ...]
    checkpoint: Checkpoint
    ticket: Ticket


class HostTier:
    """Checkpoints in host memory. `pages`: the device's pool, whose pages the copies are of.

    A checkpoint's `pages` are here blocks: those of its state, then one for each page.
    """

    def __init__(self, host: Host, pages: Pool) -> None:
        self._host, self._device = host, pages
        self.blocks = Pool(host.blocks, "host block")
        self._marks = Pool(MOST, "host checkpoint")
        self.cache = PrefixCache(self.blocks, self._marks)
        self._pending: list[_Pending] = []
        self._twins: dict[int, tuple[int, int, int]] = {}
        self.stored = self.restored = 0

    # to the host

    def take(self, keys: tuple[Hashable, ...], checkpoint: Checkpoint, *, passed: bool) -> None:
        """The device gives this up: copy it, unless it is here or all that would have to go for it is worth more."""
        self.settle()
        if self._has(keys, checkpoint):
            return
        shared = {page: block for page in checkpoint.pages[:-1] if (block := self._twin(page)) is not None}
        self.blocks.share(shared.values())  # making room must not free them
        new = [page for page in checkpoint.pages if page not in shared]
        need = self._host.state_blocks + len(new)
        mark = self.cache.admit(keys, checkpoint.length, need, passed=passed)
        fresh = self.blocks.take(need) if mark is not None else None
        if mark is None or fresh is None:
            self.blocks.give(shared.values())
            return
        state, places = fresh[: self._host.state_blocks], dict(zip(new, fresh[self._host.state_blocks :], strict=True))
        try:
            carry, ticket = self._host.store(checkpoint.slot, state, new, list(places.values()), checkpoint.carry)
        except BaseException:
            self.blocks.give([*fresh, *shared.values()])
            self._marks.give([mark])
            raise
        self._remember({page: places[page] for page in new if page != checkpoint.pages[-1]})
        blocks = (*state, *((shared | places)[page] for page in checkpoint.pages))
        made = Checkpoint(checkpoint.length, mark, blocks, checkpoint.kind, checkpoint.exact, carry, passed=passed)
        checkpoint.copy = made
        self._pending.append(_Pending(keys, made, ticket))
        self.stored += 1
        self.settle()

    def _has(self, keys: tuple[Hashable, ...], checkpoint: Checkpoint) -> bool:
        length = checkpoint.length
        coming = any(p.checkpoint.length == length and p.keys == keys for p in self._pending)
        return coming or self.cache.has(keys, length)

    def settle(self) -> None:
        """Offer what is written by now. Copies end in the order they began in."""
        while self._pending and self._pending[0].ticket.query():
            done = self._pending.pop(0)
            self.cache.insert(done.keys, done.checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Do not offer a copy; if it is under way, not when it is written either."""
        self._pending, gone = (
            [p for p in self._pending if p.checkpoint is not checkpoint],
            [p for p in self._pending if p.checkpoint is checkpoint],
        )
        for pending in gone:  # the next to write there comes behind on the same stream
            self.blocks.give(pending.checkpoint.pages)
            self._marks.give([pending.checkpoint.slot])
        self.cache.drop(checkpoint)

    def forget_prompt(self, keys: Keys) -> None:
        """Offer nothing any more that a prompt of these keys could resume from."""
        whole = tuple(keys)
        for pending in [p for p in self._pending if p.keys == whole[: len(p.keys)]]:
            self.forget(pending.checkpoint)
        while (found := self.cache.match(whole, len(whole)).checkpoint) is not None:
            self.cache.drop(found)

    def clear(self) -> None:
        """Forget everything."""
        for pending in list(self._pending):
            self.forget(pending.checkpoint)
        self.cache.clear()
        self._twins.clear()

    # to the device

    def match(self, keys: Keys, limit: int) -> Match:
        """What is known here of a prompt, as `PrefixCache.match`."""
        self.settle()
        return self.cache.match(keys, limit)

    def same(self, found: Checkpoint, near: Checkpoint | None) -> int:
        """How many first pages of a checkpoint on the device are those of one here, so that they can be shared."""
        whole = near.pages[:-1] if near is not None else ()
        blocks = found.pages[self._host.state_blocks : -1]
        return next((i for i, pair in enumerate(zip(whole, blocks, strict=False)) if self._twin(pair[0]) != pair[1]),
                    min(len(whole), len(blocks)))  # fmt: skip

    def restore(self, found: Checkpoint, skip: int, slot: int, pages: Sequence[int], carry: Any) -> Any:
        """Copy the state into a slot, and all pages but the first `skip` into `pages`; the hidden row on the device.

        The blocks must be held by the caller, who keeps `carry` too: making room may have given `found` up.
        """
        state, blocks = self._host.state_blocks, found.pages[self._host.state_blocks + skip :]
        row = self._host.restore(found.pages[:state], slot, blocks, pages, carry)
        self._remember(dict(zip(pages[:-1], blocks[:-1], strict=True)))
        self.restored += 1
        if found.alive:
            self.cache.use(found)
        return row

    def _remember(self, places: dict[int, int]) -> None:
        """These whole pages on the device and these blocks hold the same."""
        for page, block in places.items():
            self._twins[page] = (self._device.serial(page), block, self.blocks.serial(block))

    def _twin(self, page: int) -> int | None:
        """The block that holds what a page of the device holds."""
        known = self._twins.get(page)
        if known is None:
            return None
        serial, block, taken = known
        same = self._device.serial(page) == serial and self.blocks.serial(block) == taken and self.blocks.owners(block)
        return block if same else None

    def stats(self) -> dict[str, int]:
        """Gauges and counters."""
        block = self._host.nbytes // self.blocks.size
        used = block * (self.blocks.size - self.blocks.free)
        values = (len(self.cache), used, self._host.nbytes, self.stored, self.restored, self.cache.evicted)
        return dict(zip(HOST_STATS, values, strict=True))
