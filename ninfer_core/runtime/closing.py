"""A short way from a grammar's state to an end of its value, for outputs whose room runs out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from .language import CLOSERS
from .vocabulary import Vocabulary

_ORDER = "0@a.0b-1c:2d/3e_4f+56789TZPDghijklmnopqrstuvwxyzABCEFGHIJKLMNOQRSUVWXY\"'{[,()|=!?#$%&*;<>^`~\\ \n\t"
"""Characters to fill in with where the grammar leaves a choice, in turn; what formats ask for comes often."""


_SAME = 4
"""So many equal characters in a row lead nowhere: others get their turn."""
_ALIKE, _TRIES = 8, 2
"""Tokens of a way that must be those of a known one before the rest of that is tried, and how often it is tried."""


def completion(matcher: Any, vocabulary: Vocabulary, most: int, known: Sequence[int] = ()) -> list[int] | None:
    """Token ids that bring a matcher from its present state to an accepting one; None if none of `most` were found.

    `known`: a way from an earlier state. Once the new one runs like a part of it, the rest of it is taken, where that
    completes the value with less than `most`: longer perhaps than it had to be, but found without a search.

    The way is short where the grammar is JSON or a tool call: what is open is closed, what is missing is filled with
    the least. In other grammars characters take turns, which leads out of any loop, though not always by the shortest
    way. The matcher is left as it was.
    """
    matcher = matcher.deep_copy()
    path: list[int] = []
    closers = [vocabulary.spell(text) for text in CLOSERS]
    turns = [vocabulary.spell(char)[0] for char in _ORDER]
    blanks = vocabulary.spell("\n \t\r")
    turns += [token for token in vocabulary.spell_all() if token not in {*turns, *blanks}] + blanks
    turn = 0
    end, bracket, colon, comma, quote = (vocabulary.spell(char)[0] for char in '}]:,"')
    probes = [vocabulary.spell(char)[0] for char in "zZ_9~"]
    table, tries = array("i", known).tobytes(), _TRIES if len(known) > _ALIKE else 0

    def fits(*tokens: int) -> bool:
        return bool(matcher.validate_tokens(list(tokens)) == len(tokens))

    while not matcher.is_accepting():
        step = matcher.compute_ff_tokens() or next((way for way in closers if fits(*way)), None)
        if not step:
            inside = fits(quote) and any(map(fits, probes))  # of a string, where brackets are text
            order = [quote] if inside else [end, bracket, colon, comma, quote]
            found = next((token for token in order if fits(token)), None)
            if found is None or path[-_SAME:] == [found] * _SAME:
                turn = next((i for i in [*range(turn, len(turns)), *range(turn)] if fits(turns[i])), -1) + 1
                if not turn:
                    return None
                found = turns[turn - 1]
            step = [found]
        path += step
        if len(path) > most or not matcher.consume_tokens(step):
            return None
        if tries and len(path) >= _ALIKE:
            at, apart = divmod(table.find(array("i", path[-_ALIKE:]).tobytes()), array("i").itemsize)
            rest = known[at + _ALIKE :] if at >= 0 and not apart else ()
            if rest and len(path) + len(rest) < most:
                tries -= 1
                if completes(matcher, rest):
                    return [*path, *rest]
    return path


def completes(matcher: Any, path: Sequence[int]) -> bool:
    """Whether these tokens bring the matcher to an accepting state. It is left as it was."""
    if matcher.validate_tokens(list(path)) < len(path):
        return False
    matcher = matcher.deep_copy()
    return bool(matcher.consume_tokens(list(path)) and matcher.is_accepting())
