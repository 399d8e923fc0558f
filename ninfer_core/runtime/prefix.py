"""The prefix cache: a radix tree over prompt keys whose nodes hold resume points, and what is given up when.

A key is what one position of a prompt is: its token id, or for a medium anything hashable that names its content.
Attention can be cut at any position, recurrent state only where it was kept, so the tree is searched for the deepest
*checkpoint* on the way: a state slot, the KV pages of everything before it, and the hidden row that the draft layer
still waits for. Host side only: which slots and pages those are, not what is in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .pool import Pool

Keys = Sequence[Hashable]
PROTECTED = 16_384
"""Most tokens that count for a checkpoint: even the longest conversation that nobody goes on with makes room."""
Kind = Literal["system", "turn", "answer", "ladder"]
"""Where a checkpoint lies: behind the system turn; where the next turn can first differ; behind an answer; between."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A state that can be resumed: that of the first `length` positions.

    `pages`: the KV pages of these positions, one reference each. The last one is never shared with a sequence that
    resumes, which takes a copy: others write behind it, and the draft layer's row of the last position is not there
    yet. `carry`: the trunk's hidden row of the last position, for that row. `exact`: made by prompt chunks alone.
    """

    length: int
    slot: int
    pages: tuple[int, ...]
    kind: Kind
    exact: bool
    carry: Any = None
    used: float = 0.0
    passed: bool = False
    node: _Node | None = None
    copy: Checkpoint | None = None

    @property
    def alive(self) -> bool:
        """Whether the cache still holds it."""
        return self.node is not None


@dataclass(slots=True, eq=False)
class _Node:
    """The positions between its parent and itself: `edge`; `length` is their number from the root."""

    edge: tuple[Hashable, ...]
    length: int
    parent: _Node | None
    children: dict[Hashable, _Node] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache knows of a prompt: the deepest usable checkpoint, how many positions are known at all, and
    what it holds instead behind them (empty if nothing, or if the prompt simply goes on or ends)."""

    checkpoint: Checkpoint | None
    common: int
    instead: tuple[Hashable, ...]


class PrefixCache:
    """Checkpoints of several conversations. `pages` and `slots`: the pools they hold references in.

    `leaving`, if set, sees each checkpoint that makes room for others while it still holds them.

    When room is needed, a checkpoint goes that the conversation has passed (a later one lies behind it and nothing
    else hangs on it); then the one with the lowest `used + gain`. The gain is the number of tokens that would have to
    be read again without it, so a long conversation outlives many short requests, but not forever: `used` is a clock
    that rises to the sum of whatever goes, so what is not used again goes in its turn. Among equals the oldest goes.
    """

    def __init__(self, pages: Pool, slots: Pool) -> None:
        self._pages = pages
        self._slots = slots
        self._root = _Node((), 0, None)
        self._held: dict[Checkpoint, None] = {}
        self._clock = 0.0
        self.leaving: Callable[[Checkpoint], None] | None = None
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    # looking up

    def match(self, keys: Keys, limit: int) -> Match:
        """The deepest checkpoint among the first `limit` positions of `keys`. Changes nothing."""
        keys = tuple(keys)
        node, found, common = self._root, None, 0
        while True:
            if node.checkpoint is not None and node.length <= limit:
                found = node.checkpoint
            child = node.children.get(keys[common]) if common < len(keys) else None
            if child is None:
                instead = next((c.edge for c in node.children.values()), ()) if common < len(keys) else ()
                return Match(found, common, instead)
            same = common_length(child.edge, keys, common)
            common += same
            if same < len(child.edge):
                return Match(found, common, child.edge[same:] if common < len(keys) else ())
            node = child

    def use(self, checkpoint: Checkpoint) -> None:
        """A sequence resumes here."""
        checkpoint.used = self._clock
        checkpoint.passed = False
        self._held[checkpoint] = self._held.pop(checkpoint)

    def has(self, keys: Keys, length: int) -> bool:
        """Whether there is a checkpoint at exactly this position of `keys`."""
        found = self.match(keys[:length], length).checkpoint
        return found is not None and found.length == length

    # keeping

    def admit(self, keys: Keys, length: int, pages: int = 0, *, passed: bool = False) -> int | None:
        """A slot for a checkpoint at this position, beside so many free pages. It belongs to the caller.

        None: all that would have to go is worth more. `passed`: the newcomer is worth nothing where room is short.
        """
        before = self.match(keys[:length], length - 1).checkpoint
        gain = 0 if passed else min(length - (before.length if before is not None else 0), PROTECTED)
        while self._held and not (self._slots.free and self._pages.free >= pages):
            old, score, worst = self._worst(None)
            if not old and score > self._clock + gain:
                self._clock += gain  # a newcomer that was refused makes the next one likelier
                return None
            self._give_up(old, score, worst)
        return self._slots.one() if self._slots.free and self._pages.free >= pages else None

    def insert(self, keys: Keys, checkpoint: Checkpoint) -> None:
        """Offer a checkpoint whose slot and pages are written. The slot and one reference to each page are its own.

        Raises:
            ValueError: there is one at this position already.
        """
        node = self._reach(tuple(keys[: checkpoint.length]))
        if node.checkpoint is not None:
            raise ValueError(f"position {checkpoint.length} of this prompt has a checkpoint already")
        node.checkpoint, checkpoint.node = checkpoint, node
        checkpoint.used = self._clock
        self._held[checkpoint] = None
        if checkpoint.kind in ("turn", "answer"):
            self._pass(node.parent, keep_turn=checkpoint.kind == "answer")

    def _pass(self, node: _Node | None, *, keep_turn: bool) -> None:
        """The conversation went on: the checkpoints before are needed only if it branches off again."""
        while node is not None:
            held = node.checkpoint
            if held is not None and held.kind != "system":
                # Behind an answer come two ways on: from its end, or from the turn if its reasoning is left out.
                held.passed = not (keep_turn and held.kind == "turn") or held.passed
                keep_turn = keep_turn and held.kind != "turn"
            node = node.parent

    def _reach(self, keys: tuple[Hashable, ...]) -> _Node:
        """The node that ends behind `keys`, made if need be."""
        node = self._root
        while node.length < len(keys):
            child = node.children.get(keys[node.length])
            if child is None:
                child = _Node(keys[node.length :], len(keys), node)
                node.children[child.edge[0]] = child
                return child
            same = common_length(child.edge, keys, node.length)
            if same < len(child.edge):
                upper = _Node(child.edge[:same], node.length + same, node, {child.edge[same]: child})
                node.children[upper.edge[0]] = upper
                child.edge, child.parent = child.edge[same:], upper
                child = upper
            node = child
        return node

    # giving up

    def reclaimable(self, spared: Checkpoint | None = None, leaving: Iterable[int] = ()) -> int:
        """Pages that would be free without the checkpoints, `spared` excepted. May be asked from any thread.

        `leaving`: pages about to be given back, once for each owner; they count as free where nobody else holds them.
        """
        counts = Counter(leaving)
        for checkpoint in tuple(self._held):
            if checkpoint is not spared:
                counts.update(checkpoint.pages)
        return sum(self._pages.owners(page) == count for page, count in counts.items())

    def evict(self, spared: Checkpoint | None = None) -> bool:
        """Give up the checkpoint that is worth least; False if there is none."""
        if len(self._held) <= (spared is not None and spared.alive):
            return False
        self._give_up(*self._worst(spared))
        return True

    def _give_up(self, passed: bool, score: float, worst: Checkpoint) -> None:
        if not passed:
            self._clock = max(self._clock, score)
        self.evicted += 1
        if self.leaving is not None:
            self.leaving(worst)
        self.drop(worst)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint and give its slot and pages back. Does nothing if that was done."""
        node = checkpoint.node
        if node is None:
            return
        node.checkpoint = checkpoint.node = checkpoint.carry = None
        del self._held[checkpoint]
        self._slots.give([checkpoint.slot])
        self._pages.give(checkpoint.pages)
        self._prune(node)

    def clear(self) -> None:
        """Forget everything."""
        for checkpoint in list(self._held):
            self.drop(checkpoint)

    def _prune(self, node: _Node) -> None:
        """Remove what leads nowhere, and join what no longer branches."""
        while node.parent is not None and node.checkpoint is None and not node.children:
            parent = node.parent
            del parent.children[node.edge[0]]
            node = parent
        if node.parent is not None and node.checkpoint is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge, child.parent = node.edge + child.edge, node.parent
            node.parent.children[child.edge[0]] = child

    def _worst(self, spared: Checkpoint | None) -> tuple[bool, float, Checkpoint]:
        """The checkpoint to give up first: whether it is a passed one, its score, itself."""
        keys = (
            (not self.idle(c), c.used + self._gain(c), order, c)
            for order, c in enumerate(self._held)
            if c is not spared
        )
        active, score, _, worst = min(keys, key=lambda entry: entry[:3])
        return not active, score, worst

    def idle(self, checkpoint: Checkpoint) -> bool:
        """Whether its conversation has passed it and none branches off here."""
        return checkpoint.passed and checkpoint.node is not None and len(checkpoint.node.children) == 1

    def _gain(self, checkpoint: Checkpoint) -> int:
        """Tokens between a checkpoint and the one that would serve in its place."""
        idle = self.idle(checkpoint)
        node = checkpoint.node.parent if checkpoint.node is not None else None
        while node is not None:
            if node.checkpoint is not None and (idle or not self.idle(node.checkpoint)):
                return min(checkpoint.length - node.length, PROTECTED)
            node = node.parent
        return min(checkpoint.length, PROTECTED)

    def keys(self, checkpoint: Checkpoint) -> tuple[Hashable, ...]:
        """The positions from the root to a checkpoint."""
        node, edges = checkpoint.node, []
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return tuple(key for edge in reversed(edges) for key in edge)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All of them, the one unused for longest first."""
        return tuple(self._held)


def common_length(edge: tuple[Hashable, ...], keys: tuple[Hashable, ...], start: int) -> int:
    """How many items of `edge` are equal to those of `keys` from `start` on. Compares slices, not item by item."""
    low, high = 0, min(len(edge), len(keys) - start)
    if edge[:high] == keys[start : start + high]:
        return high
    while low + 1 < high:  # edge[:low] is equal, edge[:high] is not
        middle = (low + high) // 2
        if edge[low:middle] == keys[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
