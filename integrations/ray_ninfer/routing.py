"""Which replica gets a request: the one that holds the conversation's prefix, unless it is too busy. No Ray here."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXT = 256
_HEAD_ROLES = ("system", "developer")
_FOLLOWED = 2.0


@dataclass(frozen=True, slots=True)
class Key:
    """What a request shares with others: `head` is system text and tools, `conversation` these and the first turn."""

    head: str | None
    conversation: str


def conversation_key(body: Any) -> Key | None:
    """The key of a request body of any of the APIs, parsed from JSON; None if it holds no prompt.

    Every turn of a conversation has the same key, because later turns repeat the first one. The key of a plain prompt
    is made of its first 256 characters (or tokens).
    """
    if not isinstance(body, Mapping):
        return None
    fixed = [body.get(name) for name in ("system", "instructions", "tools", "functions")]
    turns = body.get("messages", body.get("input"))
    if isinstance(turns, list) and any(isinstance(turn, Mapping) for turn in turns):
        first = next((i for i, turn in enumerate(turns) if _role(turn) not in _HEAD_ROLES), len(turns))
        head = [*fixed, *map(_plain, turns[:first])]
        return Key(_digest(head) if any(head) else None, _digest([*head, *map(_plain, turns[first : first + 1])]))
    prompt = body.get("prompt", turns)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if not prompt:
        return None
    shared = _digest(fixed) if any(fixed) else None
    return Key(shared, _digest([*fixed, prompt[:_TEXT] if isinstance(prompt, (str, list)) else prompt]))


def _role(turn: Any) -> str:
    return str(turn.get("role", "")) if isinstance(turn, Mapping) else ""


def _plain(turn: Any) -> Any:
    """A turn without what clients change when they send it again: ids, cache marks; one text part is its text."""
    if not isinstance(turn, Mapping):
        return turn
    content = turn.get("content")
    if isinstance(content, list):
        parts = [_part(part) for part in content]
        content = parts[0]["text"] if len(parts) == 1 and isinstance(parts[0], dict) and "text" in parts[0] else parts
    return [turn.get("role"), content, turn.get("images")]


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return {name: value for name, value in part.items() if name not in ("cache_control", "annotations", "id")}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


class Affinity:
    """Remembers which replica answered a conversation last, the least recently used of `remembered` keys forgotten.

    A conversation goes back to its replica while that runs at most `spread` requests more than the idlest one.
    Nobody's memory is needed for a stable choice: without it a conversation goes to the replica with the highest
    hash of both names among those with the least to do, so several routers agree, and a lost replica moves only what
    it held.
    """

    def __init__(self, spread: int, remembered: int = 100_000) -> None:
        if spread < 0 or remembered < 1:
            raise ValueError(f"spread must be at least 0 and remembered at least 1, not {spread} and {remembered}")
        self.spread, self.remembered = spread, remembered
        self._homes: OrderedDict[str, str] = OrderedDict()

    def order(self, key: Key | None, loads: Mapping[str, int], avoid: Collection[str] = ()) -> list[str]:
        """The replicas from best to worst, those to `avoid` last.

        `loads` has the requests that each available one runs or keeps waiting.
        """
        if not loads:
            return []
        idlest = min(loads.values())
        if key is None:
            return sorted(loads, key=lambda name: (name in avoid, loads[name], name))
        home = self._homes.get(key.conversation)
        if home is not None and loads.get(home, idlest) > idlest + self.spread:
            home = None
        shared = self._homes.get(key.head) if key.head else None

        def rank(name: str) -> tuple[bool, bool, int, bool, str]:
            return (name in avoid, name != home, loads[name], name != shared, _inverse(key.conversation, name))

        return sorted(loads, key=rank)

    def routed(self, key: Key | None, replica: str) -> None:
        """The request went to this replica."""
        if key is None:
            return
        for part in (key.head, key.conversation):
            if part is not None:
                self._homes[part] = replica
                self._homes.move_to_end(part)
        while len(self._homes) > self.remembered:
            self._homes.popitem(last=False)

    def keep(self, replicas: Sequence[str]) -> None:
        """Forget what replicas held that are gone."""
        alive = set(replicas)
        for part in [part for part, home in self._homes.items() if home not in alive]:
            del self._homes[part]


class Balance:
    """The choice for every request of one router, with what it sent where and has not seen end.

    `spread` as in `Affinity`. Times are seconds of any steady clock.
    """

    def __init__(self, spread: int) -> None:
        self._affinity = Affinity(spread)
        self._sent: dict[str, str] = {}  # request to replica
        self._meant: dict[str, tuple[str, float]] = {}  # chosen, not sent yet: a burst must not see an idle replica

    def order(
        self, request: str, key: Key | None, replicas: Collection[str], now: float, avoid: Collection[str] = ()
    ) -> list[str]:
        """The available replicas from best to worst for a request, which counts as meant for the best for a while."""
        # A choice that was not followed, because the replica was full or the client left, soon stops counting.
        self._meant = {name: choice for name, choice in self._meant.items() if now - choice[1] < _FOLLOWED}
        loads = dict.fromkeys(replicas, 0)
        for name in [*self._sent.values(), *(choice for own, (choice, _) in self._meant.items() if own != request)]:
            if name in loads:
                loads[name] += 1
        order = self._affinity.order(key, loads, avoid)
        if request and order:
            self._meant[request] = (order[0], now)
        return order

    def sent(self, request: str, key: Key | None, replica: str) -> None:
        """The replica has taken the request."""
        self._meant.pop(request, None)
        self._sent[request] = replica
        self._affinity.routed(key, replica)

    def ended(self, request: str) -> None:
        """The request has ended, in whatever way."""
        self._sent.pop(request, None)

    def keep(self, replicas: Sequence[str]) -> None:
        """Replicas have come or gone; these are there."""
        self._affinity.keep(replicas)


def _inverse(key: str, replica: str) -> str:
    """Sorts replicas by descending rendezvous hash."""
    digest = hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest()
    return bytes(255 - byte for byte in digest).hex()
