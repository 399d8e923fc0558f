"""Whether drafting pays for a sequence: measured, per sequence, so that it is never much slower than plain decoding.

A round with drafts costs more than a single step and gives between one and k + 1 tokens. Both costs are measured by the
clock; the tokens per round are followed for each sequence. Where drafts do not pay, the sequence decodes without them
for a while, then tries again, more rarely each time it was in vain. The output does not depend on any of this.
"""

from __future__ import annotations

from dataclasses import dataclass

LEARN = 6
"""Rounds with drafts before they are judged."""
HOPELESS, AGAIN = 3, 2
"""Rounds that are enough where no draft at all was right: at first, and when drafting is tried again."""
REST, LONGEST = 32, 512
"""Single steps before drafting is tried again: at first, and at most."""


@dataclass(slots=True)
class Pace:
    """The drafting of one sequence: on or off, and what it has brought lately."""

    drafting: bool = True
    tokens: float = 0.0
    rounds: int = 0
    rest: int = 0
    span: int = REST


class Pacer:
    """Costs of rounds, shared by all sequences of an engine. `enabled` False keeps every sequence drafting."""

    def __init__(self, draft_tokens: int, *, enabled: bool = True) -> None:
        self._full = draft_tokens + 1
        self._enabled = enabled and draft_tokens > 0
        self._seconds: dict[tuple[bool, int], float] = {}

    def measured(self, drafting: bool, sequences: int, seconds: float) -> None:
        """A round of so many sequences took so long."""
        key = (drafting, sequences)
        known = self._seconds.get(key)
        # A pause of the machine must not look like a cost: what is far above the mean moves it little.
        self._seconds[key] = seconds if known is None else known + 0.15 * (min(seconds, 3 * known) - known)

    def update(self, pace: Pace, tokens: int, sequences: int) -> bool:
        """A sequence got `tokens` from its last round; returns whether it is to begin drafting again."""
        if not self._enabled:
            return False
        if not pace.drafting:
            return self._rest(pace, sequences)
        pace.rounds += 1
        pace.tokens += (tokens - pace.tokens) / min(pace.rounds, 12)
        if pace.rounds < LEARN and not self._hopeless(pace):
            return False
        pays = self._pays(pace.tokens, sequences)
        if pays is None:  # the cost of a single step is not known yet: find out, unless drafts do well anyway
            if pace.tokens < 0.75 * self._full:
                pace.drafting, pace.rest = False, 4
        elif pays:
            pace.span = REST
        else:
            pace.drafting, pace.rest, pace.span = False, pace.span, min(2 * pace.span, LONGEST)
        return False

    def _hopeless(self, pace: Pace) -> bool:
        return pace.tokens <= 1.0 and pace.rounds >= (HOPELESS if pace.span == REST else AGAIN)

    def _rest(self, pace: Pace, sequences: int) -> bool:
        pace.rest -= 1
        if pace.rest > 0:
            return False
        if self._pays(pace.tokens, sequences) is False and pace.rounds and pace.span == REST:
            # the first look at a single step's cost is over, and drafts lose: rest properly
            pace.rest, pace.span, pace.rounds = pace.span, 2 * pace.span, 0
            return False
        pace.drafting, pace.rounds, pace.tokens = True, 0, 0.0
        return True

    def _pays(self, tokens: float, sequences: int) -> bool | None:
        full, single = self._seconds.get((True, sequences)), self._seconds.get((False, sequences))
        if full is None or single is None:
            return None
        return tokens * single >= full
