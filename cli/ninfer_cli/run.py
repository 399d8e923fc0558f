"""`ninfer run`: find the model, load it, then answer once or talk."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninfer_core import __version__, store
from ninfer_core.errors import InvalidRequestError, ModelNotFoundError
from ninfer_core.types import Message, Part, Text

from . import exits
from .answer import Turn, statistics, statistics_lines, take_turn
from .chat import Chat, Settings
from .display import AnswerView, Console, Notes, loading
from .inputs import read_messages
from .pictures import content
from .presets import find_preset
from .remote import keep
from .server.durations import parse_duration

if TYPE_CHECKING:
    from ninfer_core import Engine
    from ninfer_core.client import Client
    from ninfer_core.runtime.interface import EngineInterface

# After this many seconds without a byte on stdin, say what the program waits for.
_STDIN_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the user said about the engine; None leaves the engine's own default."""

    context: int | str | None = None
    draft_tokens: int | None = None
    device: str | None = None
    threads: int | None = None
    vision: bool = False
    progress: Callable[[int, int], None] | None = None


Loader = Callable[[str, Path, LoadOptions], "Engine"]


@dataclass(slots=True)
class RunOptions:
    """Everything `ninfer run` was told."""

    model: str
    prompt: str | None = None
    messages: Path | None = None
    media: tuple[Part, ...] = ()
    settings: Settings = field(default_factory=Settings)
    load: LoadOptions = LoadOptions()
    show_thinking: bool | None = None
    verbose: bool = False
    quiet: bool = False
    stats_json: Path | None = None
    no_history: bool = False
    wrap: bool = True
    host: str = ""
    keep_alive: str | None = None
    no_server: bool = False


def load_engine(name: str, path: Path, options: LoadOptions) -> Engine:
    """Load the artifact at `path` in this process."""
    from ninfer_core.engine import Engine

    chosen: dict[str, Any] = {
        "context_length": options.context,
        "draft_tokens": options.draft_tokens,
        "device": options.device,
        "threads": options.threads,
        "vision": options.vision or None,
    }
    fields = {key: value for key, value in chosen.items() if value is not None}
    return Engine.load(str(path), max_sequences=1, progress=options.progress, **fields)


def run(options: RunOptions, console: Console, environ: Mapping[str, str], loader: Loader = load_engine) -> int:
    """The command. All that can be wrong with the input is found before the model is loaded; returns the exit code.

    Raises:
        NinferError: as the steps do.
        KeyboardInterrupt: Ctrl-C before or after the answer.
    """
    preset = find_preset(options.model, environ)
    if preset is not None:
        options = replace(options, model=preset.model, settings=preset.settings(options.settings))
    if options.keep_alive is not None:
        parse_duration(options.keep_alive, "--keep-alive")
    remote = _served_elsewhere(options, environ)
    if options.keep_alive is not None and remote is None:
        raise InvalidRequestError("--keep-alive is about a running server, and none has this model")
    entry = None if remote else store.describe(options.model, environ)
    interactive = options.prompt is None and options.messages is None and sys.stdin.isatty()
    if interactive and not console.out_is_terminal:
        raise InvalidRequestError("give a PROMPT: a conversation needs a terminal, and stdout is not one")
    if interactive and (options.settings.tools or options.stats_json):
        raise InvalidRequestError("--tools and --stats-json need a PROMPT or --messages")
    messages = () if interactive else _one_shot_messages(options, console)
    if options.stats_json is not None and not options.stats_json.absolute().parent.is_dir():
        raise InvalidRequestError(f"--stats-json: there is no folder {options.stats_json.absolute().parent}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_noted(console, options.quiet))
        engine: EngineInterface
        seconds: float | None = None
        if remote is not None:
            if options.keep_alive is not None:
                stack.callback(keep, str(remote.model), options.keep_alive, remote.base_url, environ)
            engine = stack.enter_context(remote)
            name, source = str(remote.model), remote.base_url
        else:
            assert entry is not None
            name, source = entry.name, str(entry.path)
            if options.media or any(not isinstance(message.content, str) for message in messages):
                options.load = replace(options.load, vision=True)  # an image asks for the tower as --vision does
            engine, seconds = stack.enter_context(_loaded(name, entry.path, options, console, loader))
        name = preset.name if preset else name
        if interactive:
            return _converse(engine, name, source, options, console, environ, seconds)
        return _answer_once(engine, name, messages, options, console, seconds)


def _served_elsewhere(options: RunOptions, environ: Mapping[str, str]) -> Client | None:
    """A client of the server that answers for the model: the one named with `--host`, else a running one if it can.

    Raises:
        ServerUnreachableError, ModelNotFoundError: the named server does not answer, or lacks the model.
        InvalidRequestError: options of loading together with `--host`.
    """
    from .remote import call, find_server, served_name, server_url

    if options.host:
        if options.no_server or options.load != LoadOptions():
            raise InvalidRequestError(
                "--host uses a model that a server has loaded; --no-server, --context, --draft-tokens, --device, "
                "--threads and --vision are about loading it here"
            )
        url: str | None = server_url(options.host)
        call(str(url), "/api/version", environ)
    elif options.no_server or options.load != LoadOptions():
        return None
    else:
        url = find_server("", environ)
    name = served_name(url, options.model, environ) if url else None
    if url is None or name is None:
        if options.host:
            raise ModelNotFoundError(
                f"the server at {url} has no model {options.model!r}; `ninfer list` is about files"
            )
        return None
    from ninfer_core.client import Client

    key = environ.get("NINFER_API_KEY", "").partition(",")[0].strip()
    return Client(url, model=name, api_key=key or None)


@contextlib.contextmanager
def _noted(console: Console, quiet: bool) -> Iterator[None]:
    """Show what the engine logs, or with `quiet` nothing of it; without a handler Python would print it bare."""
    logger = logging.getLogger("ninfer")
    handler = logging.NullHandler() if quiet else Notes(console)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def _loaded(
    name: str, path: Path, options: RunOptions, console: Console, loader: Loader
) -> Iterator[tuple[Engine, float]]:
    start = time.monotonic()
    with loading(console, name, quiet=options.quiet) as progress:
        engine = loader(name, path, replace(options.load, progress=progress))
    try:
        yield engine, time.monotonic() - start
    finally:
        engine.close()


def _one_shot_messages(options: RunOptions, console: Console) -> tuple[Message, ...]:
    """The conversation of a one-shot run: the file, then the text of stdin and the argument as one user turn."""
    messages: tuple[Message, ...] = ()
    if options.messages is not None:
        messages = read_messages(options.messages)
    piped = ""
    if options.prompt == "-" or (options.messages is None and not sys.stdin.isatty()):
        piped = _read_stdin(console, options)
    prompt = options.prompt if options.prompt is not None and options.prompt != "-" else ""
    asked = content(options.media, prompt, strict=True)
    if isinstance(asked, str):
        text = "\n\n".join(part for part in (piped, asked) if part.strip())
        if text:
            return (*messages, Message("user", text))
    elif piped.strip() or prompt.strip():
        before = (Text(piped + "\n\n"),) if piped.strip() else ()
        return (*messages, Message("user", (*before, *asked)))
    if not messages or options.media:
        raise InvalidRequestError("the prompt is empty: give a PROMPT, --messages FILE, or text on stdin")
    return messages


def _read_stdin(console: Console, options: RunOptions) -> str:
    """All of stdin. A pipe that nobody writes to would look like a hang, so the wait is announced."""

    def announce() -> None:
        console.note("waiting for text on stdin (end it with Ctrl-D, or run with < /dev/null)")

    timer = threading.Timer(_STDIN_PATIENCE, announce)
    timer.daemon = True
    if not options.quiet:
        timer.start()
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").strip("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the text on stdin is not UTF-8 (byte {error.start})") from None
    finally:
        timer.cancel()


def _answer_once(
    engine: EngineInterface,
    name: str,
    messages: tuple[Message, ...],
    options: RunOptions,
    console: Console,
    load_seconds: float | None,
) -> int:
    request = options.settings.request(messages)
    view = AnswerView(console, show_thinking=options.show_thinking, wrap=options.wrap)
    turn = take_turn(engine, request, view)
    stats = statistics(turn, load_seconds)
    if options.verbose:
        for line in statistics_lines(stats):
            console.note(line)
    if options.stats_json is not None:
        record = {"model": name, "version": __version__, **stats}
        options.stats_json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if not (options.quiet or options.verbose):
        _say_if_cut(turn, console)
    if turn.interrupted:
        return exits.INTERRUPTED
    # A document that was cut is no document; whoever asked for one must not take it for the answer.
    cut = options.settings.response_format is not None and turn.completion.finish_reason == "length"
    return exits.SERVER if cut else exits.OK


def _say_if_cut(turn: Turn, console: Console) -> None:
    if turn.completion.finish_reason == "length":
        count = turn.completion.usage.completion_tokens
        thinking = " while still thinking" if turn.message.reasoning and not turn.message.text else ""
        console.note(
            f"note: the answer was cut after {count} tokens{thinking} (--max-tokens or the context is used up)"
        )


def _opening(options: RunOptions) -> Chat:
    """A conversation whose first message comes with the media of the command line."""
    chat = Chat(options.settings)
    for found in options.media:
        chat.show(found)
    return chat


def _converse(
    engine: EngineInterface,
    name: str,
    source: str,
    options: RunOptions,
    console: Console,
    environ: Mapping[str, str],
    load_seconds: float | None,
) -> int:
    from .line_editor import Editor, PlainReader, Reader
    from .repl import Repl

    repl = Repl(
        engine,
        _opening(options),
        console,
        name=name,
        source=source,
        verbose=options.verbose,
        show_thinking=options.show_thinking,
        wrap=options.wrap,
        load_seconds=load_seconds,
        texts=lambda what: _text_of(what, engine, source, environ),
    )
    reader: Reader
    if environ.get("TERM") == "dumb":
        reader = PlainReader()
    else:
        reader = Editor(
            repl.words,
            store.history_path(environ),
            keep=not options.no_history,
            colour=not environ.get("NO_COLOR"),
            editor=environ.get("NINFER_EDITOR") or None,
        )
    return repl.run(reader)


def _text_of(what: str, engine: EngineInterface, source: str, environ: Mapping[str, str]) -> str:
    """The `license` or the `template` of the model that answers, here or at a server."""
    from ninfer_core.client import Client

    if isinstance(engine, Client):
        from .remote import call

        return str(call(source, "/api/show", environ, {"model": engine.model}).get(what) or "")
    entry = store.inspect_path(Path(source))
    if what == "license":
        return entry.known.licence if entry.known else ""
    from ninfer_core.artifact import Artifact

    with Artifact.open(entry.path) as artifact:
        return artifact.resource("chat_template.jinja").decode("utf-8", "replace")
