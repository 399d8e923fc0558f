"""Free lists of KV pages and state slots. Taking and giving back is all they do; what they number is in `state`."""

from __future__ import annotations

from collections.abc import Iterable


class Pool:
    """Numbers 0..size-1, each free or taken. Lowest first, so that small loads touch little memory."""

    def __init__(self, size: int, what: str) -> None:
        self.size = size
        self._what = what
        self._free = list(range(size - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Take `count` numbers; None, and nothing taken, if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._taken.update(taken)
        return taken

    def give(self, numbers: Iterable[int]) -> None:
        """Give numbers back.

        Raises:
            ValueError: a number that is not taken: it was given back twice, or never taken.
        """
        for number in numbers:
            if number not in self._taken:
                raise ValueError(f"{self._what} {number} is given back but was not taken")
            self._taken.remove(number)
            self._free.append(number)
