"""Counted numbers: KV pages, which several owners may share, and state slots. What they number is in `state`."""

from __future__ import annotations

from collections.abc import Iterable


class Pool:
    """Numbers first..first + size - 1, each free or held by one owner or more.

    The lowest free ones go first, so that small loads touch little memory. `given` counts what owners gave back.
    """

    def __init__(self, size: int, what: str, first: int = 0) -> None:
        self.size = size
        self.given = 0
        self._what, self._first = what, first
        self._owners: dict[int, int] = {}
        self._serials = [0] * size
        self.clear()

    def clear(self) -> None:
        """All numbers are free again, whoever held them."""
        self._free = list(range(self._first + self.size - 1, self._first - 1, -1))
        self._owners.clear()

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def held(self) -> list[int]:
        """The numbers that somebody holds."""
        return list(self._owners)

    def owners(self, number: int) -> int:
        """How many hold this number; 0 if it is free."""
        return self._owners.get(number, 0)

    def serial(self, number: int) -> int:
        """How often a number was taken: who has seen it before knows by this whether it still is what it was."""
        return self._serials[number - self._first]

    def take(self, count: int) -> list[int] | None:
        """Take `count` free numbers; None, and nothing taken, if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._owners.update(dict.fromkeys(taken, 1))
        for number in taken:
            self._serials[number - self._first] += 1
        return taken

    def one(self) -> int:
        """Take one number.

        Raises:
            ValueError: none is free.
        """
        taken = self.take(1)
        if taken is None:
            raise ValueError(f"no {self._what} of {self.size} is free")
        return taken[0]

    def share(self, numbers: Iterable[int]) -> None:
        """Become one more owner of numbers that are held.

        Raises:
            ValueError: a number that is free.
        """
        for number in numbers:
            if number not in self._owners:
                raise ValueError(f"{self._what} {number} is shared but was not taken")
            self._owners[number] += 1

    def give(self, numbers: Iterable[int]) -> None:
        """Give numbers back; one whose last owner this was is free.

        Raises:
            ValueError: a number that is not taken: it was given back twice, or never taken.
        """
        for number in numbers:
            count = self._owners.get(number)
            if count is None:
                raise ValueError(f"{self._what} {number} is given back but was not taken")
            if count > 1:
                self._owners[number] = count - 1
            else:
                del self._owners[number]
                self._free.append(number)
            self.given += 1
