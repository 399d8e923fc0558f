"""Seats for sequences, and prompts that were read before: the prefix cache with the device memory behind it.

A prompt is read in chunks whose ends follow from its own tokens: multiples of the chunk size, and the ends of the
system turn and of assistant headers. A prompt that goes on where an earlier one ended has the same ends up to there, so
a state that was kept at such an end has the bits that reading the whole prompt anew would give.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..state import FusedState, State
from .options import PAGE
from .pool import Pool
from .prefix import Checkpoint, Keys, Kind, Match, PrefixCache
from .session import Prompt
from .tiers import HOST_STATS, Host, HostTier

log = logging.getLogger("ninfer.engine")
LADDER = 16_384
"""Tokens between the checkpoints inside a long prompt, at least; 8 chunks where these are short."""
SHORTEST = 512
"""Tokens that a state of its own is worth, as reading them again takes a while; a quarter of shorter chunks."""
_NOTHING = Match(None, 0, ())


@dataclass(frozen=True, slots=True)
class Seat:
    """What a sequence runs with: its pages and its slot.

    `length`: tokens in the state. `carry`: the hidden row of the last one, which the draft layer waits for. `exact`:
    what is there has the bits of reading it anew. `known`: tokens that the cache knows of the prompt.
    """

    pages: list[int]
    slot: int
    length: int = 0
    carry: Any = None
    exact: bool = True
    known: int = 0


def prompt_keys(prompt: Prompt) -> list[Hashable]:
    """The keys of a prompt's positions: token ids, and where features begin the digest of their medium.

    The digest covers all pixels and the grid, so the pads behind it need no more than their ids.
    """
    keys: list[Hashable] = list(prompt.token_ids)
    for placed in prompt.media:
        for number, (start, _) in enumerate(placed.spans):
            keys[start] = (placed.media.digest, number)
    return keys


def worth(chunk: int) -> int:
    """Tokens behind the state before that make another one worth keeping."""
    return min(chunk // 4, SHORTEST)


def chunk_ends(cuts: Sequence[int], target: int, chunk: int) -> list[int]:
    """Where the chunks of a prompt of `target` tokens end, ascending.

    Multiples of `chunk`, and those of `cuts` that make no piece shorter than `worth` behind the end before.
    Whether a cut counts depends on what lies before it alone, so a longer prompt with the same beginning agrees.
    """
    ends = set(range(chunk, target, chunk))
    last = 0
    for cut in cuts:
        if cut < target and cut - max(last, cut - cut % chunk) >= worth(chunk):
            ends.add(cut)
            last = cut
    return sorted({*ends, target})


class Reuse:
    """Hands out slots and pages, and keeps states for prompts to come.

    Args:
        state: the device state: `slots` for sequences come first in it, then `checkpoints` for the cache.
        chunk: prompt tokens per chunk.
        host: host memory for what the device gives up, if there is any.
        answers: keep states behind answers too. They were made by decoding: what resumes there has the values, not
            always the last bits, of a run that reads the same tokens as a prompt.
        describe: the text of keys, for the log.
    """

    def __init__(
        self,
        state: State | FusedState,
        *,
        slots: int,
        pages: int,
        checkpoints: int,
        chunk: int,
        host: Host | None = None,
        answers: bool = True,
        describe: Callable[[Sequence[Any]], str] = str,
    ) -> None:
        self._state = state
        self._chunk = chunk
        self._describe = describe
        self.pages = Pool(pages, "page")
        self.slots = Pool(slots, "slot")
        self.saves = Pool(checkpoints, "checkpoint slot", first=slots)
        self.cache = PrefixCache(self.pages, self.saves)
        self.host = HostTier(host, self.pages) if host is not None else None
        self.cache.leaving = self._move
        self.enabled = checkpoints > 0
        self.answers = answers and self.enabled
        self._refused: tuple[object, int, int] | None = None
        self.queries = self.hits = 0

    def clear(self) -> None:
        """Forget every owner and everything kept, without touching the device: after a fault nothing there counts."""
        for pool in (self.pages, self.slots, self.saves):
            pool.clear()
        evicted = self.cache.evicted
        self.cache = PrefixCache(self.pages, self.saves)
        self.cache.evicted, self.cache.leaving = evicted, self._move
        if self.host is not None:
            self.host.clear()
        self._refused = None

    # seats

    def take_pages(self, count: int, spared: Checkpoint | None = None) -> list[int] | None:
        """Take pages, giving up checkpoints for them if need be; None, and nothing lost, if that would not do."""
        if self.pages.free < count:
            if self.pages.free + self.cache.reclaimable(spared) < count:
                return None
            while self.pages.free < count and self.cache.evict(spared):
                pass
        return self.pages.take(count)

    def seat(self, keys: Keys, limit: int, count: int, name: str) -> Seat | None:
        """A slot and `count` pages, resumed at the deepest checkpoint among the first `limit` keys; None if not free.

        `name`: the request's, for the log.
        """
        if not self.slots.free:
            return None
        asked = (name, self.pages.given, self.pages.free)
        if asked == self._refused:
            return None  # nothing has changed since
        match = self.cache.match(keys, limit) if self.enabled else _NOTHING
        near, seat, moved = match.checkpoint, None, False
        if self.host is not None:
            lower = self.host.match(keys, limit)
            far = lower.checkpoint
            if far is not None and (near is None or far.length > near.length):
                seat = self._fetch(keys, far, near, count)
                moved = seat is not None
            match = max(match, lower, key=lambda found: found.common)
        if seat is None and near is not None and near.alive:
            seat = self._resume(near, count)
        if seat is None:
            pages = self.take_pages(count)
            if pages is None:
                self._refused = asked
                return None
            seat = Seat(pages, self.slots.one())
            try:
                self._state.clear_slot(seat.slot)
            except BaseException:
                self._leave(seat)
                raise
        if self.enabled:
            self._note(keys, match, seat, name, moved)
        return replace(seat, known=max(match.common, seat.length))

    def _resume(self, found: Checkpoint, count: int) -> Seat | None:
        """A seat at a checkpoint: whole pages shared, the last one copied, or taken over where no page is left."""
        whole, last = found.pages[:-1], found.pages[-1]
        self.pages.share(whole)
        fresh = self.take_pages(count - len(whole), found)
        taken_over = fresh is None and self.pages.owners(last) == 1
        if taken_over:
            fresh = self.take_pages(count - len(found.pages), found)
        if fresh is None:
            self.pages.give(whole)
            return None
        slot = self.slots.one()
        seat = Seat([*whole, *fresh], slot, found.length, found.carry, found.exact)
        try:
            self._state.copy_slot(found.slot, slot)
            if not taken_over:
                self._state.copy_page(last, fresh[0])
        except BaseException:
            self._leave(seat)
            raise
        self.cache.use(found)
        if taken_over:
            self.pages.share([last])
            self._move(found)
            self.cache.drop(found)
            seat.pages.insert(len(whole), last)
        return seat

    def _leave(self, seat: Seat) -> None:
        """Give back what a seat was made of."""
        self.pages.give(seat.pages)
        self.slots.give([seat.slot])

    def _fetch(self, keys: Keys, found: Checkpoint, near: Checkpoint | None, count: int) -> Seat | None:
        """A seat at a checkpoint in host memory, whose first pages may still be those of `near`; None if not free.

        It is kept on the device again, where the next prompt can share its pages.
        """
        host = self.host
        assert host is not None
        skip, carry = host.same(found, near), found.carry
        seat = Seat(list(near.pages[:skip]) if near is not None else [], self.slots.one(), found.length)
        self.pages.share(seat.pages)
        host.blocks.share(found.pages)  # making room moves others there
        try:
            fresh = self.take_pages(count - skip)
            if fresh is None:
                self._leave(seat)
                return None
            seat.pages.extend(fresh)
            own = fresh[: (found.length - 1) // PAGE + 1 - skip]
            carry = host.restore(found, skip, seat.slot, own, carry)
            seat = replace(seat, carry=carry, exact=found.exact)
            made = self.keep(keys, seat, found.kind, found.passed)
            if made is not None:
                made.copy = found
            return seat
        except BaseException:
            self._leave(seat)
            raise
        finally:
            host.blocks.give(found.pages)

    def _move(self, checkpoint: Checkpoint) -> None:
        """A checkpoint leaves the device: host memory may take it."""
        if self.host is None:
            return
        try:
            keys = self.cache.keys(checkpoint)
            self.host.take(keys, checkpoint, passed=self.cache.idle(checkpoint))
        except Exception:  # the cache must not end a request that needs its room
            log.exception("a state could not be copied to host memory; host memory takes no more")
            self.host.clear()
            self.host = None

    def forget(self, checkpoint: Checkpoint) -> None:
        """Do not offer a checkpoint any more, nor a copy of it."""
        if self.host is not None and checkpoint.copy is not None:
            self.host.forget(checkpoint.copy)
        self.cache.drop(checkpoint)

    def forget_prompt(self, keys: Keys) -> None:
        """Offer nothing any more that a prompt of these keys could resume from."""
        while (found := self.cache.match(keys, len(keys)).checkpoint) is not None:
            self.forget(found)
        if self.host is not None:
            self.host.forget_prompt(keys)

    def _note(self, keys: Keys, match: Match, seat: Seat, name: str, moved: bool) -> None:
        """Count and log what was found; where much is read again, why."""
        self.queries += 1
        self.hits += seat.length > 0
        parts = [f"{name}: {seat.length:,} of {len(keys):,} prompt tokens from the cache"]
        if moved:
            parts[0] += ", brought back from host memory"
        if not seat.exact:
            parts.append("a state made by decoding, equal within rounding")
        where = match.common
        if len(keys) - seat.length > self._chunk and (match.instead or where > seat.length):
            parts.append(f"the first {where:,} are known")
            if match.instead:
                before, known, this = (
                    self._describe([key for key in part if isinstance(key, int)])
                    for part in (keys[max(0, where - 12) : where], match.instead[:12], keys[where : where + 12])
                )
                parts.append(f"behind {before!r} the nearest known prompt has {known!r}, this one {this!r}")
        log.info("%s", "; ".join(parts))

    # keeping

    def wanted(self, prompt: Prompt, ends: Sequence[int]) -> dict[int, tuple[Kind, bool]]:
        """Chunk ends of a prompt where a checkpoint pays: its kind, and whether a later one makes it a spare."""
        if not self.enabled:
            return {}
        made: dict[int, tuple[Kind, bool]] = {}

        def last_end(limit: int) -> int:
            at = bisect_left(ends, limit + 1) - 1
            return ends[at] if at >= 0 else 0

        target = ends[-1]
        turn = last_end(min(prompt.cuts[-1] if prompt.cuts else target, target - 1))
        step = max(1, min(8, LADDER // self._chunk)) * self._chunk
        while target // step > max(1, self.saves.size // 4):
            step *= 2
        for end in range(step, turn, step):
            made[end] = ("ladder", True)
        made[turn] = ("turn", False)
        for end in prompt.checkpoints:
            if not prompt.cuts or end != prompt.cuts[-1]:
                made[last_end(end)] = ("system", False)
        made.pop(0, None)
        return made

    def keep(self, keys: Keys, seat: Seat, kind: Kind, spare: bool = False) -> Checkpoint | None:
        """Keep the state in a seat's slot, which holds `seat.length` positions and no window. None: not worth it."""
        if self.cache.has(keys, seat.length):
            return None
        slot = self.cache.admit(keys, seat.length)
        if slot is None:
            return None
        try:
            self._state.copy_slot(seat.slot, slot)
        except BaseException:
            self.saves.give([slot])
            raise
        pages = tuple(seat.pages[: (seat.length - 1) // PAGE + 1])
        self.pages.share(pages)
        made = Checkpoint(seat.length, slot, pages, kind, seat.exact, seat.carry, passed=spare)
        self.cache.insert(keys, made)
        return made

    def stats(self, leaving: Sequence[int] = ()) -> dict[str, int]:
        """Gauges and counters. Free pages include those that only the cache holds: a request gets them.

        `leaving`: pages of sequences that have ended and are about to give them back.
        """
        return {
            "pages_free": self.pages.free + self.cache.reclaimable(leaving=leaving),
            "pages_total": self.pages.size,
            "pages_cached": self.cache.reclaimable(),
            "slots_free": self.slots.free,
            "slots_total": self.slots.size,
            "checkpoints": len(self.cache),
            "checkpoints_total": self.saves.size,
            "checkpoints_evicted": self.cache.evicted,
            "prefix_queries": self.queries,
            "prefix_hits": self.hits,
            **(self.host.stats() if self.host is not None else dict.fromkeys(HOST_STATS, 0)),
        }
