"""A tokenizer as the grammar compiler sees it: the bytes of every token, special ones apart, and spelled-out marks."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Protocol

import llguidance
import numpy as np


class Tokens(Protocol):
    """What is needed of a tokenizer."""

    addressable: int
    special: Any

    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        """Token ids of a text."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token."""


PLANS = 32
"""Compiled constraints that one vocabulary keeps."""


class Recent:
    """A few values by key, the last ones used. Any thread may use it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Any:
        """The value, or None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: str, value: Any) -> Any:
        """Keep a value; returns it."""
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return value


class _Wrapper:
    """The library's view of a tokenizer: its own names for the same things."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Tokens, table: Sequence[bytes], eos: int) -> None:
        self._tokens = tokens
        self.tokens = table
        self.eos_token_id = eos
        self.special_token_ids = sorted(tokens.special.values())

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return self._tokens.encode(text, allow_special=False)


class Vocabulary:
    """Made once per tokenizer (`Vocabulary.of`): building takes seconds for a quarter of a million tokens.

    Attributes:
        size: ids with text; masks have this many entries.
        eos: the ids that end an output, in order; `end`: the usual one of them.
        library: the compiler's own tokenizer object.
        plans: constraints compiled for it, by what they were made of.
    """

    _made: ClassVar[weakref.WeakKeyDictionary[Any, Vocabulary]] = weakref.WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, tokens: Tokens, eos: Sequence[int]) -> None:
        self.size = tokens.addressable
        self.plans = Recent(PLANS)
        self.end = eos[0]
        self.eos = np.array(sorted(eos))
        self._special = dict(tokens.special)
        self._table = [tokens.token_bytes(i) for i in range(self.size)]
        self._singles = {data: i for i, data in enumerate(self._table) if len(data) == 1}
        wrapper: Any = _Wrapper(tokens, self._table, eos[0])
        self.library = llguidance.LLTokenizer(wrapper, eos_token=list(eos))

    @classmethod
    def of(cls, tokens: Any, eos: Sequence[int]) -> Vocabulary:
        """The vocabulary of a tokenizer, from the second call on without delay."""
        with cls._lock:
            if tokens not in cls._made:
                cls._made[tokens] = cls(tokens, eos)
            return cls._made[tokens]

    def id(self, text: str) -> int | None:
        """The id of an added token, if there is such a token."""
        return self._special.get(text)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._table[token] if token < self.size else b""

    def spell(self, text: str) -> list[int]:
        """A text as tokens of one byte each."""
        return [self._singles[bytes([byte])] for byte in text.encode()]

    def spell_all(self) -> list[int]:
        """The tokens of one byte each, by byte."""
        return [self._singles[data] for data in sorted(self._singles)]

    @cached_property
    def newlines(self) -> dict[int, int]:
        """Tokens of one or two newlines and nothing else, with their number."""
        return {i: len(data) for i, data in enumerate(self._table) if data in (b"\n", b"\n\n")}

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        special = set(self._special.values())
        order = sorted((i for i in range(self.size) if i not in special), key=self._table.__getitem__)
        return [self._table[i] for i in order], order

    def completing(self, mark: str) -> list[np.ndarray]:
        """Which ordinary tokens spell a mark: entry n for a text that ends with its first n bytes.

        Entry 0 holds the tokens with the whole mark inside, entry n those that begin with the rest from byte n on.
        """
        key = f"_marks{mark}"
        if key not in self.__dict__:
            self.__dict__[key] = self._completing(mark.encode())
        found: list[np.ndarray] = self.__dict__[key]
        return found

    def _completing(self, mark: bytes) -> list[np.ndarray]:
        table, order = self._sorted
        found = [[i for data, i in zip(table, order, strict=True) if mark in data]]
        for n in range(1, len(mark)):
            rest = mark[n:]
            start = bisect_left(table, rest)
            end = start
            while end < len(table) and table[end].startswith(rest):
                end += 1
            found.append(order[start:end])
        return [np.array(ids, dtype=np.int64) for ids in found]
