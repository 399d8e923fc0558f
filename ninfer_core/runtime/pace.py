"""How deep to draft, and whether drafting pays for a sequence: measured, so that it is never much slower than without.

A round with k drafts costs more than a single step and gives between one and k + 1 tokens. Costs are measured, for each
k and number of sequences; how often the first, second, ... draft is right is followed for each sequence. Two choices
follow. All sequences that draft share one depth, the one that gives most tokens a second at the present load: it falls
as the batch grows and rows become dear. And a sequence whose drafts do not pay decodes without them for a while, then
tries again, more rarely each time it was in vain. The output does not depend on any of this.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

LEARN = 6
"""Rounds with drafts before they are judged."""
HOPELESS, AGAIN = 3, 2
"""Rounds that are enough where no draft at all was right: at first, and when drafting is tried again."""
REST, LONGEST = 32, 512
"""Single steps before drafting is tried again: at first, and at most."""
SETTLE, TRIAL, LOOK, RARELY = 24, 6, 64, 1024
"""Rounds of a load before another depth is tried, of a trial, and before depths are tried again: at first, at most."""
MANY = 4
"""Sequences from which on a depth of one is tried in any case: fewer rows may fit into fewer launches."""
WORTH = 1.03
"""How much faster another depth must be."""


@dataclass(slots=True)
class Hits:
    """How often the first i + 1 drafts were right, for each i, lately: over about `span` rounds."""

    span: int = 12
    shares: list[float] = field(default_factory=list)

    def count(self, accepted: int, drafts: int, rounds: int) -> None:
        """A round with so many drafts, the `rounds`-th."""
        self.shares += [0.0] * (drafts - len(self.shares))
        for i in range(drafts):
            self.shares[i] += ((i < accepted) - self.shares[i]) / min(rounds, self.span)

    def tokens(self, drafts: int) -> float:
        """What a round of so many drafts gives on average; a draft that was never judged counts as wrong."""
        return 1.0 + sum(self.shares[:drafts])


@dataclass(slots=True)
class Pace:
    """The drafting of one sequence: on or off, what it has brought lately, and over longer, for the choice of a depth.

    `among`: in how large a group it rests.
    """

    drafting: bool = True
    hits: Hits = field(default_factory=Hits)
    longer: Hits = field(default_factory=lambda: Hits(span=64))
    rounds: int = 0
    rest: int = 0
    span: int = REST
    among: int = 0


@dataclass(slots=True)
class Cost:
    """Seconds of what is done again and again. The first time may have compiled something, so it does not count.

    `share`: how much a further time moves the mean; of those up to number `least` the shortest counts.
    """

    share: float
    least: int = 2
    count: int = 0
    seconds: float = 0.0

    @property
    def known(self) -> float | None:
        """What it takes; None if that is not known yet."""
        return self.seconds if self.count >= 2 else None

    def add(self, seconds: float) -> None:
        """It took so long once more."""
        self.count += 1
        if self.count <= 2:
            self.seconds = seconds
        elif self.count <= self.least:
            self.seconds = min(self.seconds, seconds)
        else:  # a pause of the machine must not look like a cost: what is far above the mean moves it little
            self.seconds += self.share * (min(seconds, 3 * self.seconds) - self.seconds)


@dataclass(slots=True)
class _Load:
    """The choice of a depth at one load. `trial`: a depth that is tried for `left` more rounds."""

    depth: int
    trial: int = 0
    left: int = 0
    wait: int = SETTLE
    span: int = LOOK


class Pacer:
    """Costs of rounds, shared by all sequences of an engine. `enabled` False keeps every sequence at full depth.

    `depth`: drafts of the rounds that are launched now, for sequences that draft.
    """

    def __init__(self, draft_tokens: int, *, enabled: bool = True) -> None:
        self._most = self.depth = draft_tokens
        self._enabled = enabled and draft_tokens > 0
        self._costs: dict[tuple[int, int], Cost] = {}
        self._loads: dict[int, _Load] = {}
        self._usual = Hits(span=200)
        self._rounds = 0

    def measured(self, drafts: int, sequences: int, seconds: float) -> None:
        """A round of so many sequences with so many drafts each, and as many made for the next, took so long."""
        self._costs.setdefault((drafts, _crowd(sequences)), Cost(0.15, least=4)).add(seconds)

    def _known(self, sequences: int) -> dict[int, float]:
        """Costs that were measured at this load, by drafts."""
        crowd = _crowd(sequences)
        found = ((k, self._costs.get((k, crowd))) for k in range(self._most + 1))
        return {k: cost.seconds for k, cost in found if cost is not None and cost.known is not None}

    def expected(self, sequences: int) -> float:
        """Seconds of a round of so many sequences at the depth of now; 0 if that is not known."""
        known = self._known(sequences)
        return known.get(self.depth, known.get(0, 0.0))

    # the depth of all

    def look(self, paces: Sequence[Pace]) -> None:
        """Choose the depth of a round; `paces`: of the sequences that decode now."""
        drafting = [pace for pace in paces if pace.drafting]
        if self._enabled and self._most > 1 and drafting:
            load = self._loads.setdefault(_crowd(len(drafting)), _Load(self.depth))
            self.depth = self._choose(load, self._tokens(drafting), len(drafting))

    def _tokens(self, drafting: Sequence[Pace]) -> list[float]:
        """Tokens of a sequence's round by depth, on average; what is not known of some is as usual."""
        hits = [pace.longer if pace.rounds >= LEARN else self._usual for pace in drafting]
        return [sum(h.tokens(k) for h in hits) / len(hits) for k in range(self._most + 1)]

    def _choose(self, load: _Load, tokens: list[float], sequences: int) -> int:
        if load.left > 0:
            load.left -= 1
            if load.left > 0:
                return load.trial
        costs = self._known(sequences)
        if load.depth not in costs or self._rounds < LEARN:
            return load.depth
        rates = {k: tokens[k] / cost for k, cost in costs.items() if k}
        best = max(rates, key=lambda k: rates[k])
        if rates[best] > WORTH * rates[load.depth]:
            load.depth = best
        load.wait -= 1
        if load.wait > 0:
            return load.depth
        load.trial = self._other(load.depth, tokens, costs, sequences)
        if not load.trial:
            load.wait, load.span = load.span, min(2 * load.span, RARELY)
            return load.depth
        load.left = TRIAL
        new = load.trial not in costs
        load.wait = TRIAL if new else load.span
        load.span = load.span if new else min(2 * load.span, RARELY)
        return load.trial

    def _other(self, now: int, tokens: list[float], costs: dict[int, float], sequences: int) -> int:
        """A depth that may be faster than the one of now; 0 if none may."""
        rate = tokens[now] / costs[now]
        between = {k: tokens[k] / cost for k, cost in _between(costs).items()}
        best = max(between, key=lambda k: between[k], default=0)
        if best and between[best] > rate:
            return best
        if sequences >= MANY and 1 not in costs:
            return 1
        near = [k for k in (now - 1, now + 1) if 1 <= k <= self._most]
        for k in near:
            # Of a neighbour not measured the best is assumed: all of a round's cost is for its rows, or none of it.
            cost = costs[now] * (min(k, now) + 1) / (now + 1)
            if k not in costs and tokens[k] / cost > WORTH * rate:
                return k
        again = {k: tokens[k] / costs[k] for k in near if k in costs and tokens[k] / costs[k] > 0.8 * rate}
        return max(again, key=lambda k: again[k], default=0)

    # drafting of one

    def update(self, pace: Pace, tokens: int, sequences: int, drafts: int) -> bool:
        """A sequence got `tokens` from its last round, of so many drafts, in a group of `sequences`.

        Returns whether it is to begin drafting again.
        """
        if not self._enabled:
            return False
        if not pace.drafting:
            return self._rest(pace, sequences)
        if not drafts:
            return False  # a round that only took known tokens in
        pace.rounds += 1
        self._rounds += 1
        accepted = min(tokens - 1, drafts)
        pace.hits.count(accepted, drafts, pace.rounds)
        pace.longer.count(accepted, drafts, pace.rounds)
        self._usual.count(accepted, drafts, self._rounds)
        if pace.rounds < LEARN and not self._hopeless(pace):
            return False
        pays = self._pays(pace, sequences)
        if pays is None:  # the cost of a single step is not known yet: find out, unless drafts do well anyway
            if pace.hits.tokens(drafts) < 0.75 * (drafts + 1):
                pace.drafting, pace.rest, pace.among = False, 4, sequences
        elif pays:
            pace.span = REST
        else:
            pace.drafting, pace.rest, pace.among = False, pace.span, sequences
            pace.span = min(2 * pace.span, LONGEST)
        return False

    def _hopeless(self, pace: Pace) -> bool:
        return not pace.hits.shares[0] and pace.rounds >= (HOPELESS if pace.span == REST else AGAIN)

    def _rest(self, pace: Pace, sequences: int) -> bool:
        pace.rest -= 1
        if 2 * sequences <= pace.among:  # what did not pay among many may pay among few
            pace.rest, pace.among, pace.span = min(pace.rest, 2), sequences, REST
        if pace.rest > 0:
            return False
        if self._pays(pace, sequences) is False and pace.rounds and pace.span == REST:
            # the first look at a single step's cost is over, and drafts lose: rest properly
            pace.rest, pace.span, pace.rounds = pace.span, 2 * pace.span, 0
            return False
        pace.drafting, pace.rounds = True, 0
        return True

    def _pays(self, pace: Pace, sequences: int) -> bool | None:
        """Whether some depth gives the sequence tokens faster than single steps; None if that is not known."""
        costs = self._known(sequences)
        single = costs.pop(0, None)
        if single is None or not costs:
            return None
        likely = costs | _between({0: single, **costs})
        return any(pace.hits.tokens(k) * single >= cost for k, cost in likely.items())


def _between(costs: dict[int, float]) -> dict[int, float]:
    """Likely costs of depths that were not measured but lie between two that were."""
    made, known = {}, sorted(costs)
    for low, high in itertools.pairwise(known):
        for k in range(low + 1, high):
            made[k] = costs[low] + (costs[high] - costs[low]) * (k - low) / (high - low)
    return made


def _crowd(sequences: int) -> int:
    """Loads that count as one: up to 8 sequences each for itself, then in steps of at most a quarter."""
    step = 1 << max(0, (sequences - 1).bit_length() - 3)
    return -(-sequences // step) * step
