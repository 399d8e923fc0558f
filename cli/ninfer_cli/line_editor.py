"""Reading what the user types: keys, multi-line input, Tab completion and the history file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings

# (command line so far, kind of its argument: "path" or empty) for Tab completion
Commands = Callable[[], Iterable[tuple[str, str]]]
FENCE = '"""'


class Reader(Protocol):
    """Reads one message at a time; Ctrl-C raises KeyboardInterrupt and Ctrl-D EOFError.

    `keeps_history` says whether what is typed goes into the history file, and may be set; None: there is none.
    """

    typed: bool
    keeps_history: bool | None

    def read(self) -> str:
        """The next message, as typed."""
        ...


def unfinished(text: str) -> bool:
    """Whether Enter must start a new line: an open triple quote, or a backslash at the end of the line."""
    if text.lstrip().startswith(FENCE):
        return text.count(FENCE) < 2
    # A command may end in a path with a backslash; prose may not.
    return text.endswith("\\")


def message_of(text: str) -> str:
    """What was meant: triple quotes taken off, backslash and line end joined to a line end."""
    body = text.strip()
    if body.startswith(FENCE):
        body = body[len(FENCE) :]
        return (body[: -len(FENCE)] if body.endswith(FENCE) else body).strip("\n")
    return text.replace("\\\n", "\n").strip()


class PlainReader:
    """For terminals that cannot move the cursor (`TERM=dumb`): lines by `input`, no editing, no history."""

    def __init__(self) -> None:
        self.typed = False
        self.keeps_history: bool | None = None

    def read(self) -> str:
        """The next message; continues over several lines while it is unfinished."""
        self.typed = False
        text = self._line(">>> ")
        self.typed = bool(text)
        while unfinished(text):
            text += "\n" + self._line("... ")
        return message_of(text)

    @staticmethod
    def _line(prompt: str) -> str:
        sys.stdout.write(prompt)
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class Editor:
    """The line editor of a full terminal. `history` is the file of earlier lines, read and written if `keep`.

    Ctrl-G opens the message in a program: `editor`, else `VISUAL`, `EDITOR`, or what the system has.

    `typed` says after a KeyboardInterrupt whether there was text in the line.
    """

    def __init__(
        self, commands: Commands, history: Path, *, keep: bool, colour: bool, editor: str | None = None
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output
        from prompt_toolkit.output.color_depth import ColorDepth
        from prompt_toolkit.output.vt100 import Vt100_Output
        from prompt_toolkit.shortcuts import CompleteStyle

        output = create_output()
        if isinstance(output, Vt100_Output):
            # Asking where the cursor is prints a warning in terminals that do not answer, and an answer that comes
            # after the prompt has closed ends up as typed text.
            output.enable_cpr = False
        self.typed = False
        self.keeps_history: bool | None = keep
        self._pasted = False
        self._program = editor
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            key_bindings=self._keys(),
            history=self._file_history(history),
            completer=_completer(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            output=output,
            prompt_continuation="... ",
            color_depth=None if colour else ColorDepth.DEPTH_1_BIT,
            enable_suspend=True,
        )

    def read(self) -> str:
        """The next message, its lines joined and its fences taken off."""
        self._pasted = False
        self.typed = False
        try:
            return message_of(self._session.prompt(">>> "))
        except KeyboardInterrupt:
            self.typed = bool(self._session.default_buffer.text)
            raise

    def _keys(self) -> KeyBindings:
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.keys import Keys

        keys = KeyBindings()

        @keys.add("enter")
        def enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if unfinished(buffer.text):
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def newline(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-g")
        def edit(event: KeyPressEvent) -> None:
            if self._program is not None:
                os.environ["VISUAL"] = self._program  # where the line editor looks first
            event.current_buffer.open_in_editor()

        @keys.add(Keys.BracketedPaste)
        def paste(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            self._pasted = self._pasted or "\n" in text
            event.current_buffer.insert_text(text)

        return keys

    def _file_history(self, path: Path) -> FileHistory:
        from prompt_toolkit.history import FileHistory

        editor = self

        class PrivateHistory(FileHistory):
            """History of typed lines; pasted blocks stay in memory, they may be the contents of private files."""

            def load_history_strings(self) -> Iterable[str]:
                return super().load_history_strings() if editor.keeps_history else ()

            def store_string(self, string: str) -> None:
                if editor.keeps_history and not editor._pasted:
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    # Created before the first write, so that it is never readable by others, not even for a moment.
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
                    path.chmod(0o600)
                    super().store_string(string)

        return PrivateHistory(str(path))


def _completer(commands: Commands):  # type: ignore[no-untyped-def]
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class CommandCompleter(Completer):
        """Completes slash commands, their words, and paths where a path is due."""

        def __init__(self) -> None:
            self._paths = PathCompleter(expanduser=True)

        def get_completions(self, document: Document, complete_event: object) -> Iterator[Completion]:
            text = document.text_before_cursor
            if not text.startswith("/"):
                return
            for command, kind in commands():
                if command.startswith(text):
                    yield Completion(command[len(text.rpartition(" ")[0]) :].lstrip(), -len(text.rpartition(" ")[2]))
                elif kind == "path" and text.startswith(command + " "):
                    rest = Document(text[len(command) + 1 :])
                    yield from self._paths.get_completions(rest, complete_event)  # type: ignore[arg-type]

    return CommandCompleter()
