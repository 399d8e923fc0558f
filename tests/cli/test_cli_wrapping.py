"""Lines that break between words while text streams in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ninfer_cli.display import Wrapping, width

TEXT = "the quick brown fox jumps over the lazy dog"


def wrapped(pieces: list[str], columns: int) -> str:
    lines = Wrapping(lambda: columns)
    return "".join([*map(lines.feed, pieces), lines.end()])


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        (TEXT, 80, TEXT),
        (TEXT, 10, "the quick \nbrown fox \njumps over\nthe lazy \ndog"),
        ("one two\nthree four", 9, "one two\nthree \nfour"),
        ("see https://example.org/a/long/address now", 12, "see https://example.org/a/long/address now"),
        ("\u4e2d\u6587\u5b57 word", 5, "\u4e2d\u6587\u5b57 \nword"),
        ("a\tbcd", 10, "a\t\nbcd"),
        ("  indented by two", 10, "  indented\nby two"),
        ("```py\na = some + long + line\n```\nthe next line", 8,
         "```py\na = some + long + line\n```\nthe next\nline"),
        ("| a table | of words |\nand some text", 8, "| a table | of words |\nand some\ntext"),
        ("e\u0301te\u0301 e\u0301te\u0301", 7, "e\u0301te\u0301 e\u0301te\u0301"),
    ],
)  # fmt: skip
def test_where_lines_break(text: str, columns: int, shown: str) -> None:
    assert wrapped([text], columns) == shown
    assert wrapped(list(text), columns) == shown


words = st.text(st.sampled_from("abcdefghe\u0301"), min_size=1, max_size=8)


@given(st.lists(words, max_size=12), st.integers(16, 40), st.integers(1, 7))
def test_nothing_is_lost_and_no_line_is_too_long(found: list[str], columns: int, size: int) -> None:
    text = " ".join(found)
    shown = wrapped([text[i : i + size] for i in range(0, len(text), size)], columns)
    assert all(width(line) <= columns for line in shown.split("\n"))
    assert "".join(shown.split()) == "".join(text.split())
    assert shown == wrapped([text], columns)


def test_a_word_is_shown_once_it_is_whole_or_cannot_fit() -> None:
    lines = Wrapping(lambda: 10)
    assert lines.feed("he") == "" and lines.feed("llo ") == "hello "
    assert lines.feed("world") == "" and lines.end() == "\nworld"
    assert lines.feed("x" * 11) == "x" * 11, "longer than a line: nothing is gained by holding it back"
