"""What reaches the terminal: answer on stdout, everything else on stderr, and no escape code where none belongs."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO

DIM, RESET, CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"

# Models can emit any byte; on a terminal control characters would move the cursor or change its mode, so they are
# shown as Unicode control pictures. Files and pipes get them unchanged.
_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {127: "\u2421"}
_VISIBLE |= {code: f"\\x{code:02x}" for code in range(128, 160)}


_COLUMNS = 101
_FENCE = "```"


class OutputClosedError(Exception):
    """The reader of stdout went away (`| head -1`): not an error, only the end."""


class Console:
    """The two output streams and what each of them can show.

    `styled_out` and `styled_err` say whether escape codes may be written: only to a terminal, and not under
    `NO_COLOR` (any value but the empty one) or `TERM=dumb`.
    """

    def __init__(self, environ: Mapping[str, str], *, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = sys.stdout if out is None else out
        self.err = sys.stderr if err is None else err
        plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
        self.out_is_terminal = self.out.isatty()
        self.err_is_terminal = self.err.isatty()
        self.styled_out = self.out_is_terminal and not plain
        self.styled_err = self.err_is_terminal and not plain
        self.progress_shown = False

    def write(self, text: str) -> None:
        """Answer text to stdout, at once.

        Raises:
            OutputClosedError: nobody reads stdout any more.
        """
        _write(self.out, text.translate(_VISIBLE) if self.out_is_terminal else text)

    def style(self, code: str) -> None:
        """An escape code to stdout, where stdout can show it."""
        if self.styled_out:
            _write(self.out, code)

    def line(self, text: str = "") -> None:
        """One line to stdout."""
        self.write(text + "\n")

    def note(self, text: str) -> None:
        """One line to stderr, in place of a progress line if one is shown."""
        if self.progress_shown:
            self.err.write(CLEAR_LINE)
            self.progress_shown = False
        self.error_text(text + "\n")

    def error_text(self, text: str) -> None:
        """Text to stderr as it is; a closed stderr is not worth an error."""
        try:
            self.err.write(text.translate(_VISIBLE) if self.err_is_terminal else text)
            self.err.flush()
        except (OSError, ValueError):
            return

    @property
    def columns(self) -> int:
        """Width of the terminal that stderr is, in cells; asked anew each time, for windows are resized."""
        return _columns(self.err)

    @property
    def out_columns(self) -> int:
        """The same of stdout."""
        return _columns(self.out)

    def json(self, value: Any) -> None:
        """One JSON document to stdout."""
        self.line(json.dumps(value, indent=2, ensure_ascii=False))


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (AttributeError, OSError, ValueError):
        return _COLUMNS


def _write(stream: TextIO, text: str) -> None:
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        raise OutputClosedError from None


class Notes(logging.Handler):
    """Warnings that the library logs, as notes on stderr."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        self._console.note(f"note: {record.getMessage()}")


class AnswerView:
    """Shows one streamed answer: text on stdout; thinking dim on a terminal, else dropped or on stderr.

    `show_thinking` None: shown on a terminal only; True: on stderr too when stdout is not a terminal; False: never.
    `wrap`: lines on a terminal break between words.
    """

    def __init__(self, console: Console, *, show_thinking: bool | None = None, wrap: bool = False) -> None:
        self.console = console
        self._lines = Wrapping(lambda: console.out_columns) if wrap and console.out_is_terminal else None
        self._to_out = console.out_is_terminal and show_thinking is not False
        self._to_err = not console.out_is_terminal and show_thinking is True
        self._thinking = False
        self._last_out = ""
        self._last_err = ""

    def reasoning(self, text: str) -> None:
        """More of the think block."""
        if not text:
            return
        if self._to_out:
            if not self._thinking:
                self._thinking = True
                self.console.style(DIM)
                if not self.console.styled_out:
                    self._out("[thinking]\n")
            self._out(text)
        elif self._to_err:
            self.console.error_text(text)
            self._last_err = text

    def text(self, text: str) -> None:
        """More of the answer."""
        if not text:
            return
        self._leave_thinking("[answer]\n")
        self._out(text)

    def tool_call(self, line: str) -> None:
        """A complete tool call, as one JSON line."""
        self._leave_thinking("[answer]\n")
        self._end_line()
        self.console.line(line)
        self._last_out = "\n"

    def end(self) -> None:
        """Leave both streams at the start of a line and without style."""
        self._leave_thinking("")
        self._end_line()

    def _out(self, text: str) -> None:
        self._last_out = text
        self.console.write(self._lines.feed(text) if self._lines else text)

    def _leave_thinking(self, marker: str) -> None:
        if self._thinking:
            self._thinking = False
            if self._lines:
                self.console.write(self._lines.end())
            self.console.style(RESET)
            self._end_line()
            if not self.console.styled_out:
                self._out(marker)
            elif marker:
                self._out("\n")
        if self._last_err and not self._last_err.endswith("\n"):
            self.console.error_text("\n")
            self._last_err = "\n"

    def _end_line(self) -> None:
        if self._lines:
            self.console.write(self._lines.end())
        if self._last_out and not self._last_out.endswith("\n"):
            self._out("\n")


class Wrapping:
    """Breaks lines between words as text streams in; a word is held back until it is whole.

    The terminal breaks the rest by itself: a word longer than a line, text of wide characters, lines of a fenced
    block, rows of a table.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        self._word = ""
        self._cells = 0
        self._long = False  # the word at hand is longer than a line and goes on
        self._head = ""  # how the line begins: three characters are enough to tell what it is
        self._fenced = False

    def feed(self, text: str) -> str:
        """What can be shown of the text so far; the rest comes later."""
        columns = self._columns()
        return "".join([self._next(character, columns) for character in text])

    def end(self) -> str:
        """The word that is held back."""
        return self._placed(self._columns())

    def _next(self, character: str, columns: int) -> str:
        cells = _cells(character)
        if character in " \t\n" or cells == 2:
            shown = self._placed(columns)
            self._long = False
            return shown + self._between(character, cells, columns)
        if len(self._head) < len(_FENCE):
            self._head += character
        self._word += character
        self._cells += cells
        self._long = self._long or self._cells > columns
        return self._placed(columns) if self._long else ""

    def _between(self, character: str, cells: int, columns: int) -> str:
        if character == "\n":
            self._fenced ^= self._head == _FENCE
            self._column, self._head = 0, ""
        elif cells == 2:
            self._head = self._head or character
            self._column = 2 if self._column + 2 > columns else self._column + 2
        else:
            # A blank at the edge would go to the next line by itself, and the break after it would leave an empty one.
            fits = self._column < columns or not self._breaks
            self._column += 8 - self._column % 8 if character == "\t" else 1
            return character if fits else ""
        return character

    @property
    def _breaks(self) -> bool:
        return not (self._long or self._fenced or self._head.startswith(("|", _FENCE)))

    def _placed(self, columns: int) -> str:
        word, cells = self._word, self._cells
        self._word, self._cells = "", 0
        if self._column > 0 and self._column + cells > columns and cells and self._breaks:
            self._column = cells
            return "\n" + word
        self._column += cells
        if self._long:
            self._column %= columns
        return word


class Progress:
    """Progress of one long step on stderr: a redrawn line on a terminal, else a plain line every few seconds.

    Use as a context manager. `quiet` shows nothing. `unit` names what is counted.
    """

    REDRAW, PLAIN = 0.1, 5.0

    def __init__(self, console: Console, label: str, *, quiet: bool = False, unit: str = "bytes") -> None:
        self._console, self._label, self._quiet, self._unit = console, label, quiet, unit
        self._live = console.styled_err
        # The first plain line comes a full interval after the first report: a step that ends sooner needs none.
        self._next: float | None = time.monotonic() if self._live else None

    def __enter__(self) -> Progress:
        if not self._quiet and self._live:
            self._draw(f"{self._label} ...")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._console.progress_shown:
            self._draw("")
            self._console.progress_shown = False

    def _draw(self, text: str) -> None:
        # A line that wraps could not be cleared any more, and would be left behind at every redraw.
        self._console.err.write(CLEAR_LINE + cut(text, self._console.columns - 1))
        self._console.err.flush()
        self._console.progress_shown = True

    def update(self, done: int, total: int, detail: str = "") -> None:
        """Report `done` of `total` (0: unknown); drawn at a bounded rate."""
        now = time.monotonic()
        if self._next is None:
            self._next = now + self.PLAIN
        if self._quiet or now < self._next:
            return
        self._next = now + (self.REDRAW if self._live else self.PLAIN)
        amount = f"{size(done)} of {size(total)}" if self._unit == "bytes" else f"{done:,} of {total:,} {self._unit}"
        share = f"{100 * done / total:3.0f} %  " if total else ""
        text = f"{self._label}  {share}{amount}" + (f"  {detail}" if detail else "")
        if self._live:
            room = max(4, min(24, self._console.columns // 4))
            filled = round(room * done / total) if total else 0
            self._draw(f"{self._label} [{'#' * filled}{'.' * (room - filled)}] {share}{amount}  {detail}")
        else:
            self._console.note(text)


@contextmanager
def loading(console: Console, name: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Progress of loading a model: a function that takes (bytes done, bytes in all) and shows them with their rate."""
    start = time.monotonic()
    with Progress(console, f"loading {name}", quiet=quiet) as line:

        def seen(done: int, total: int) -> None:
            line.update(done, total, f"{done / 1e9 / max(1e-3, time.monotonic() - start):.1f} GB/s")

        yield seen


def size(count: float) -> str:
    """A byte count for people, in powers of 1000: `17.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def ago(seconds: float) -> str:
    """A time span for people: `3 hours ago`."""
    for unit, length in (("year", 31_536_000), ("month", 2_592_000), ("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def duration(seconds: float) -> str:
    """A time span for people: `3 min`, `1 h 20 min`."""
    if seconds < 60:
        return f"{max(0, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def width(text: str) -> int:
    """Cells that a text takes on a terminal: two for wide East Asian characters, none for combining ones."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, cells: int) -> str:
    """The beginning of a text that fits into so many cells."""
    for end, character in enumerate(text):
        cells -= _cells(character)
        if cells < 0:
            return text[:end]
    return text


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Text columns two spaces apart; the columns in `right` are right-aligned."""
    widths = [max(width(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        gaps = [" " * (widths[i] - width(cell)) for i, cell in enumerate(row)]
        cells = [gaps[i] + cell if i in right else cell + gaps[i] for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines
