"""The interactive conversation: the read loop, its slash commands and what Ctrl-C means where."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ninfer_core.errors import ContextOverflowError, EngineClosedError, InvalidRequestError, NinferError

from . import exits
from .answer import Turn, statistics, statistics_lines, take_turn
from .chat import PARAMETERS, Chat
from .commands import list_models
from .display import AnswerView, Console
from .effort import EFFORT_BUDGETS
from .inputs import read_format
from .line_editor import Reader
from .pictures import content, find_media, medium

if TYPE_CHECKING:
    from ninfer_core.runtime.interface import EngineInterface
    from ninfer_core.types import Part, Request

# A second Ctrl-C this soon after the one that stopped a turn means "out", in seconds.
DOUBLE_PRESS = 1.0
_READ_LIMIT = 16 << 20
SETTINGS = ("parameter", "system", "format", "think", "nothink", "verbose", "quiet", "history", "nohistory",
            "wordwrap", "nowordwrap")  # fmt: skip
SHOWN = ("info", "parameters", "system", "license", "template")


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command: its handler takes the rest of the line. `kind` "path" completes file names."""

    run: Callable[[str], None]
    usage: str
    help: str
    kind: str = ""


class Leave(Exception):  # noqa: N818 - not an error
    """The user wants out, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Repl:
    """Reads messages and commands until the user leaves; `run` returns the exit code."""

    def __init__(
        self,
        engine: EngineInterface,
        chat: Chat,
        console: Console,
        *,
        name: str,
        source: str = "",
        verbose: bool = False,
        show_thinking: bool | None = None,
        wrap: bool = True,
        load_seconds: float | None = None,
        texts: Callable[[str], str] | None = None,
    ) -> None:
        self.engine, self.chat, self.console = engine, chat, console
        self._name, self._source = name, source
        self._verbose = verbose
        self._show_thinking = show_thinking
        self._wrap = wrap
        self._texts = texts
        self._reader: Reader | None = None
        self._load_seconds = load_seconds
        self._last: Turn | None = None
        self._armed = False
        self._stopped_at = float("-inf")
        self.commands = self._commands()

    def run(self, reader: Reader) -> int:
        """The loop. Errors of single turns and commands are shown and the loop goes on."""
        self._reader = reader
        self.console.note(f"{self._name}: type a message, /help for commands, Ctrl-D to leave")
        while True:
            try:
                text = reader.read()
            except EOFError:
                self.console.line()
                return exits.OK
            except KeyboardInterrupt:
                if self._interrupted_prompt(reader.typed):
                    return exits.INTERRUPTED
                continue
            self._armed = False
            if not text:
                continue
            try:
                self.handle(text)
            except Leave as leave:
                return leave.code
            except KeyboardInterrupt:
                return exits.INTERRUPTED
            except EngineClosedError:
                raise
            except (NinferError, OSError) as error:
                if exits.code_of(error) == exits.INTERNAL and not isinstance(error, NinferError):
                    raise
                self.console.note(f"error: {exits.text_of(error)}")

    def handle(self, text: str) -> None:
        """One message or command. `//` at the start sends a message that begins with a slash."""
        if text.startswith("//"):
            self._ask(text[1:])
        elif text.startswith("/"):
            self._command(text)
        else:
            self._ask(text)

    def words(self) -> Iterator[tuple[str, str]]:
        """What Tab completes: (command line so far, kind of its argument)."""
        for name, command in self.commands.items():
            yield name, command.kind
        for word in SETTINGS:
            yield f"/set {word}", ""
        for parameter in PARAMETERS:
            yield f"/set parameter {parameter}", ""
        for level in EFFORT_BUDGETS:
            yield f"/set think {level}", ""
        for word in SHOWN:
            yield f"/show {word}", ""

    def _interrupted_prompt(self, typed: bool) -> bool:
        """Ctrl-C at the prompt: with text it drops the line; on an empty line the second one leaves."""
        soon = time.monotonic() - self._stopped_at < DOUBLE_PRESS
        if not typed and (self._armed or soon):
            return True
        self._armed = not typed
        if self._armed:
            self.console.note("(Ctrl-C again, Ctrl-D or /bye leaves)")
        return False

    def _ask(self, text: str) -> None:
        try:
            self._turn(self.chat.ask(self._with_media(text)))
        except NinferError as error:
            self.chat.abandon()
            if isinstance(error, ContextOverflowError):
                self.console.note(f"error: {error.message} /undo drops the last turn, /clear drops all.")
                return
            raise

    def _with_media(self, text: str) -> str | tuple[Part, ...]:
        """A message with the files that paths in it name, if the model sees; other paths stay text, with a note."""
        if not self.engine.profile.get("image_inputs"):
            return text
        _, missing = find_media(text)
        for path in missing:
            self.console.note(f"(there is no file {path}: the model gets the path as text)")
        return content((), text, strict=False)

    def _turn(self, request: Request) -> None:
        view = AnswerView(self.console, show_thinking=self._show_thinking, wrap=self._wrap)
        turn = take_turn(self.engine, request, view)
        self.chat.answer(turn.message)
        self._last = turn
        if turn.interrupted:
            self._stopped_at = time.monotonic()
            self.console.note("(stopped; what was said so far is kept)")
        elif turn.completion.finish_reason == "length":
            self.console.note(f"(cut after {turn.completion.usage.completion_tokens} tokens: the limit was reached)")
        if self._verbose:
            for line in statistics_lines(statistics(turn, self._load_seconds)):
                self.console.note(line)
        self._load_seconds = None
        self.console.line()

    # --- commands ----------------------------------------------------------------------------------------------------

    def _commands(self) -> dict[str, Command]:
        return {
            "/set": Command(self._set, "/set WHAT [VALUE]", f"change a setting: {', '.join(SETTINGS)}"),
            "/show": Command(self._show, "/show WHAT", f"show {', '.join(SHOWN)}"),
            "/clear": Command(self._clear, "/clear", "forget the conversation"),
            "/regen": Command(self._regen, "/regen", "answer the last message again"),
            "/undo": Command(self._undo, "/undo", "take back the last message and its answer"),
            "/save": Command(self._save, "/save FILE", "write the conversation to a JSON file", "path"),
            "/load": Command(self._load, "/load FILE", "go on with a saved conversation", "path"),
            "/read": Command(self._read, "/read PATH", "put a text file in front of the next message", "path"),
            "/image": Command(self._image, "/image PATH", "show an image with the next message", "path"),
            "/video": Command(self._video, "/video PATH", "show a video with the next message", "path"),
            "/list": Command(self._list, "/list", "models on this machine"),
            "/tokens": Command(self._tokens, "/tokens", "how much of the context is used"),
            "/stats": Command(self._stats, "/stats", "figures of the last answer"),
            "/help": Command(self._help, "/help", "this list"),
            "/bye": Command(self._bye, "/bye", "leave"),
        }

    def _command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        word = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}.get(word, word)
        command = self.commands.get(word)
        if command is None:
            from difflib import get_close_matches

            near = get_close_matches(word, self.commands, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else "/help lists the commands"
            raise InvalidRequestError(f"unknown command {word}; {hint} (a message that starts with / is sent with //)")
        command.run(rest.strip())

    def _set(self, rest: str) -> None:
        what, _, value = rest.partition(" ")
        value = value.strip()
        if what == "parameter":
            name, _, text = value.partition(" ")
            if not name or not text.strip():
                raise InvalidRequestError("usage: /set parameter NAME VALUE (or default); /show parameters lists them")
            text = text.strip()
            if name == "stop":
                text = text.strip('"')
            now = self.chat.settings.set(name, text)
            self.console.note(f"{name}: {'default of the model' if now is None else now}")
        elif what == "system":
            self.chat.settings.system = value.strip('"') or None
            self.console.note("system message set" if value else "system message removed")
        elif what == "format":
            if not value:
                raise InvalidRequestError("usage: /set format json, /set format SCHEMA.json, or /set format text")
            self.chat.settings.response_format = None if value == "text" else read_format(value)
            self.console.note(f"answers: {value}")
        elif what in ("verbose", "quiet"):
            self._verbose = what == "verbose"
            self.console.note(f"figures after each answer: {'on' if self._verbose else 'off'}")
        elif what in ("think", "nothink"):
            self._set_thinking(what == "think", value)
        elif what in ("wordwrap", "nowordwrap"):
            self._wrap = what == "wordwrap"
            self.console.note(f"lines break between words: {'yes' if self._wrap else 'no'}")
        elif what in ("history", "nohistory"):
            self._set_history(what == "history")
        else:
            raise InvalidRequestError(f"/set knows {', '.join(SETTINGS)}")

    def _set_thinking(self, on: bool, level: str) -> None:
        settings = self.chat.settings
        if on:
            settings.think(level)
        else:
            settings.thinking = False
        budget = settings.parameters.get("thinking_budget")
        limit = f", up to {budget:,} tokens" if settings.thinking and budget else ""
        self.console.note(f"thinking: {'on' if settings.thinking else 'off'}{limit}")

    def _set_history(self, on: bool) -> None:
        if self._reader is None or self._reader.keeps_history is None:
            raise InvalidRequestError("this terminal cannot edit lines, so there is no history")
        self._reader.keeps_history = on
        self.console.note(f"what you type is {'kept' if on else 'not kept'} in the history file")

    def _show(self, rest: str) -> None:
        settings = self.chat.settings
        if rest in ("", "info"):
            self.console.line(f"model       {self._name}")
            if self._source:
                self.console.line(f"artifact    {self._source}")
            self.console.line(f"context     {self.engine.context_length:,} tokens")
            self.console.line(f"messages    {len(self.chat.messages)}")
            thinking = {None: "default of the model", True: "on", False: "off"}[settings.thinking]
            self.console.line(f"thinking    {thinking}")
        elif rest in ("parameters", "parameter"):
            for name, parameter in PARAMETERS.items():
                value = settings.parameters.get(name)
                self.console.line(f"{name:<19} {'default' if value is None else value!s:<10} {parameter.help}")
        elif rest == "system":
            self.console.line(settings.system or "(no system message)")
        elif rest in ("license", "template") and self._texts is not None:
            self.console.line(self._texts(rest).rstrip("\n") or f"(the model states no {rest})")
        else:
            raise InvalidRequestError(f"/show knows {', '.join(SHOWN)}")

    def _clear(self, rest: str) -> None:
        self.chat.clear()
        self.console.note("conversation cleared")

    def _regen(self, rest: str) -> None:
        request = self.chat.regenerate()
        if request is None:
            raise InvalidRequestError("there is no message to answer again")
        self._turn(request)

    def _undo(self, rest: str) -> None:
        if not self.chat.undo():
            raise InvalidRequestError("there is no message to take back")
        self.console.note(f"took back the last message; {len(self.chat.messages)} messages left")

    def _save(self, rest: str) -> None:
        path = _path(rest, "/save FILE")
        self.chat.save(path)
        self.console.note(f"saved {len(self.chat.messages)} messages to {path}")

    def _load(self, rest: str) -> None:
        path = _path(rest, "/load FILE")
        self.chat.load(path)
        self.console.note(f"loaded {len(self.chat.messages)} messages from {path}")

    def _read(self, rest: str) -> None:
        path = _path(rest, "/read PATH")
        size = path.stat().st_size
        if size > _READ_LIMIT:
            raise InvalidRequestError(f"{path} has {size:,} bytes; /read takes up to {_READ_LIMIT:,}")
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"{path} is not UTF-8 text (byte {error.start})") from None
        self.chat.attach(path.name, text)
        self.console.note(f"{path.name}: {len(text.splitlines())} lines go in front of your next message")

    def _image(self, rest: str) -> None:
        self._show_medium(rest, "image")

    def _video(self, rest: str) -> None:
        self._show_medium(rest, "video")

    def _show_medium(self, rest: str, kind: str) -> None:
        if not rest.strip():
            raise InvalidRequestError(f"usage: /{kind} PATH")
        found = medium(rest, kind)
        if not self.engine.profile.get("image_inputs"):
            raise InvalidRequestError("no vision tower is loaded: start with --vision to show images and videos")
        self.chat.show(found)
        self.console.note(f"{Path(str(found.path)).name} goes with your next message")

    def _list(self, rest: str) -> None:
        list_models(self.console, os.environ, as_json=False)

    def _tokens(self, rest: str) -> None:
        used = self.engine.count_tokens(self.chat.request()) if self.chat.messages else 0
        limit = self.engine.context_length
        self.console.line(f"{used:,} of {limit:,} tokens ({100 * used / limit:.1f} %)")

    def _stats(self, rest: str) -> None:
        if self._last is None:
            raise InvalidRequestError("no answer yet")
        for line in statistics_lines(statistics(self._last)):
            self.console.line(line)

    def _help(self, rest: str) -> None:
        width = max(len(command.usage) for command in self.commands.values())
        for command in self.commands.values():
            self.console.line(f"{command.usage:<{width}}  {command.help}")
        self.console.line()
        self.console.line('Several lines: """ before and after, a backslash at the end of a line, or Alt+Enter.')
        self.console.line("Ctrl-G opens the message in an editor (NINFER_EDITOR, VISUAL or EDITOR).")
        self.console.line("Ctrl-C stops an answer and keeps what was said; twice leaves. Tab completes commands.")

    def _bye(self, rest: str) -> None:
        raise Leave(exits.OK)


def _path(rest: str, usage: str) -> Path:
    text = rest.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    if not text:
        raise InvalidRequestError(f"usage: {usage}")
    return Path(text).expanduser()
