"""The command line: every command with its options, the environment, and errors turned into exit codes."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer

from ninfer_core import __version__

from . import exits
from .chat import PARAMETERS, Settings, check_parameter
from .display import Console, OutputClosedError
from .grouped import grouped
from .options import AsJson, ContextLength, Model, Quiet

if TYPE_CHECKING:
    from types import FrameType

P = ParamSpec("P")
R = TypeVar("R")

_EXIT_HELP = "Exit codes: " + "; ".join(f"{code} {text}" for code, text in exits.TABLE.items()) + "."
_ENV_HELP = (
    "Environment: NINFER_MODELS (folder of artifacts), NINFER_PRESETS (file of presets), NINFER_HOST, "
    "NINFER_CONTEXT_LENGTH, NINFER_NOHISTORY, "
    "NINFER_EDITOR (Ctrl-G in a conversation), "
    "NINFER_DEBUG=1 (tracebacks), NO_COLOR, TERM=dumb."
)


def _typer(*, completion: bool) -> typer.Typer:
    # Rich help would triple the start-up time, and colours in help are not worth that.
    return typer.Typer(
        name="ninfer",
        help="Run Qwen3.6-27B and Qwen3.6-35B-A3B on one GPU; `ninfer run demo` runs a tiny model on any machine.",
        epilog=f"{_ENV_HELP}\n\n{_EXIT_HELP}",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        add_completion=completion,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


app = _typer(completion=False)


class Encoder(StrEnum):
    """How scales are chosen when weights are quantized."""

    search = "search"
    maxabs = "maxabs"


class Form(StrEnum):
    """What an artifact looks like on disk."""

    safetensors = "safetensors"
    ninfer = "ninfer"


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command: its errors become one line on stderr and an exit code; `NINFER_DEBUG=1` adds the traceback."""

    @functools.wraps(command)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        debug = False
        try:
            debug = exits.flag(os.environ, "NINFER_DEBUG")
            return command(*args, **kwargs)
        except OutputClosedError:
            _drop_stdout()
            raise typer.Exit(exits.OK) from None
        except KeyboardInterrupt:
            raise typer.Exit(exits.INTERRUPTED) from None
        except Exception as error:
            if type(error).__module__.startswith(("typer", "click")):
                raise
            if debug:
                import traceback

                traceback.print_exc()
            sys.stderr.write(f"error: {exits.text_of(error)}\n")
            if isinstance(error, OSError):
                _drop_stdout()
            raise typer.Exit(exits.code_of(error)) from None

    return inner


def _drop_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail on a closed pipe or full disk."""
    try:
        target = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), target)
    except (OSError, ValueError):
        return


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ninfer {__version__}")
        raise typer.Exit


def _help(context: typer.Context, value: bool) -> None:
    if value:
        typer.echo(context.get_help())
        raise typer.Exit


# For the commands that must answer at once: typer's own help option makes it import pydantic for every call.
FastHelp = Annotated[
    bool, typer.Option("--help", "-h", callback=_help, is_eager=True, help="Show this message and exit.")
]


@app.callback(add_help_option=False)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    show_help: FastHelp = False,
) -> None:
    """Run Qwen3.6-27B and Qwen3.6-35B-A3B on one GPU; `ninfer run demo` runs a tiny model on any machine."""


def _parameter(name: str) -> Any:
    """The option of a generation parameter, with the help that the interactive prompt shows too."""
    text = PARAMETERS[name].help
    return typer.Option("--" + name.replace("_", "-"), help=f"{text[0].upper()}{text[1:]}.")


_RUN_GROUPS = {
    "Input": ("messages", "image", "video", "system", "tools"),
    "Output": (
        "think", "show_thinking", "response_format", "wordwrap", "verbose", "stats_json", "quiet", "no_history",
    ),
    "Generation": (*PARAMETERS, "draft_tokens"),
    "Model": ("vision", "context_length", "device", "threads", "host", "no_server", "keep_alive"),
}  # fmt: skip


@app.command(cls=grouped(_RUN_GROUPS))
@guarded
def run(
    context: typer.Context,
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; `-` reads it from stdin. Without it: a conversation.")
    ] = None,
    messages: Annotated[
        Path | None, typer.Option(help="JSON file with a conversation to continue.", metavar="FILE")
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Show an image; repeatable. Paths in PROMPT are found too (./a.png)."),
    ] = None,
    video: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Show a video; repeatable.")] = None,
    vision: Annotated[
        bool, typer.Option("--vision", help="Load the vision tower, so that /image and paths work in a conversation.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    think: Annotated[
        bool | None, typer.Option("--think/--no-think", help="Let the model think first. [default: the model's own]")
    ] = None,
    show_thinking: Annotated[
        bool | None,
        typer.Option(
            "--show-thinking/--hide-thinking",
            help="Show the thinking; on stderr where stdout is not a terminal. [default: on a terminal only]",
        ),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file with function tools; calls are printed as JSON lines."),
    ] = None,
    response_format: Annotated[
        str | None,
        typer.Option(
            "--format", "--schema", metavar="json|SCHEMA.json", help="Answer in JSON, or JSON of a schema in a file."
        ),
    ] = None,
    temperature: Annotated[float | None, _parameter("temperature")] = None,
    top_p: Annotated[float | None, _parameter("top_p")] = None,
    top_k: Annotated[int | None, _parameter("top_k")] = None,
    min_p: Annotated[float | None, _parameter("min_p")] = None,
    presence_penalty: Annotated[float | None, _parameter("presence_penalty")] = None,
    frequency_penalty: Annotated[float | None, _parameter("frequency_penalty")] = None,
    repetition_penalty: Annotated[float | None, _parameter("repetition_penalty")] = None,
    thinking_budget: Annotated[int | None, _parameter("thinking_budget")] = None,
    seed: Annotated[int | None, _parameter("seed")] = None,
    max_tokens: Annotated[int | None, _parameter("max_tokens")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; repeatable.")] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(min=0, max=5, help="Tokens to draft per round; changes speed, never the answer.")
    ] = None,
    context_length: ContextLength = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cuda|cpu", help="Where to run. [default: auto]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Use the server there. [default: one at NINFER_HOST, if it runs]")
    ] = "",
    keep_alive: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long a server keeps the model afterwards: seconds, 5m, -1; 0 unloads."),
    ] = None,
    no_server: Annotated[bool, typer.Option("--no-server", help="Load the model here, whatever runs.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Figures of each answer on stderr.")] = False,
    stats_json: Annotated[
        Path | None, typer.Option("--stats-json", metavar="FILE", help="Write the figures to this file.")
    ] = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", envvar="NINFER_NOHISTORY", help="Keep no history file.")
    ] = False,
    wordwrap: Annotated[
        bool, typer.Option("--wordwrap/--no-wordwrap", help="Break lines between words on a terminal.")
    ] = True,
    quiet: Quiet = False,
) -> None:
    """Answer a prompt, or talk. stdout carries the answer alone; text on stdin goes in front of PROMPT."""
    from . import run as command
    from .inputs import argument_text, read_format, read_tools
    from .pictures import medium

    parameters: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "thinking_budget": thinking_budget,
        "seed": seed,
        "max_tokens": max_tokens,
    }
    parameters = {name: value for name, value in parameters.items() if value is not None}
    for name, value in [*parameters.items(), *(("stop", text) for text in stop or ())]:
        check_parameter(name, value)
    if stop:
        parameters["stop"] = tuple(stop)
    options = command.RunOptions(
        model=model,
        prompt=None if prompt is None else argument_text(prompt, "the prompt"),
        messages=messages,
        settings=Settings(
            system and argument_text(system, "--system"),
            think,
            parameters,
            read_tools(tools) if tools else (),
            read_format(response_format) if response_format else None,
        ),
        media=(*(medium(name, "image") for name in image or ()), *(medium(name, "video") for name in video or ())),
        load=command.LoadOptions(context_length, draft_tokens, device, threads, vision),
        show_thinking=show_thinking,
        verbose=verbose,
        quiet=quiet,
        stats_json=stats_json,
        no_history=no_history,
        wrap=wordwrap,
        host=host,
        keep_alive=keep_alive,
        no_server=no_server or context.obj is not None,
    )
    loader = context.obj or command.load_engine
    raise typer.Exit(command.run(options, Console(os.environ), os.environ, loader))


@app.command("list", add_help_option=False)
@guarded
def list_models(as_json: AsJson = False, show_help: FastHelp = False) -> None:
    """List the models on this machine. Also: ls."""
    from . import commands

    commands.list_models(Console(os.environ), os.environ, as_json=as_json)


app.command("ls", hidden=True, add_help_option=False)(list_models)


@app.command()
@guarded
def show(
    model: Model,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a model can do, how it is stored and what its files are."""
    from .show import show as run

    run(model, Console(os.environ), os.environ, template=template, as_json=as_json)


@app.command()
@guarded
def inspect(
    file: Annotated[str, typer.Argument(help="A .ninfer file or an artifact folder of any model, or a model's name.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything: digests, scales, padding.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """List the objects of an artifact with shapes, formats and bytes."""
    from . import commands

    commands.inspect(file, Console(os.environ), verify=verify, as_json=as_json, quiet=quiet)


@app.command()
@guarded
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of the checkpoint.", exists=True, file_okay=False)],
    destination: Annotated[
        Path,
        typer.Argument(help="The artifact to make; must not exist. Until it is complete it is DESTINATION.partial."),
    ],
    recipe: Annotated[
        str | None, typer.Option(metavar="MODEL_ID", help="Take the formats of this model. [default: the model's own]")
    ] = None,
    encoder: Annotated[Encoder, typer.Option(help="How scales are chosen; search is closer.")] = Encoder.search,
    counts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, help="Token counts, or an artifact, that choose the words of the draft head."
        ),
    ] = None,
    form: Annotated[Form, typer.Option(help="A folder of safetensors, or one .ninfer file.")] = Form.safetensors,
    model_id: Annotated[str, typer.Option(help="Identity to record. [default: the checkpoint's]")] = "",
    mtp: Annotated[
        bool | None, typer.Option("--mtp/--no-mtp", help="The layer that drafts. [default: if there]")
    ] = None,
    vision: Annotated[
        bool | None, typer.Option("--vision/--no-vision", help="The vision tower. [default: if there]")
    ] = None,
    draft_head: Annotated[
        bool | None,
        typer.Option("--draft-head/--no-draft-head", help="The short output head for drafts. [default: the recipe's]"),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads. [default: one per CPU, at most 16]")] = None,
    quiet: Quiet = False,
) -> None:
    """Quantize a checkpoint into an artifact. An interrupted conversion goes on where it was."""
    from . import commands

    commands.convert(
        source,
        destination,
        Console(os.environ),
        quiet=quiet,
        recipe=recipe,
        encoder=encoder.value,
        counts=counts,
        form=form.value,
        model_id=model_id,
        mtp=mtp,
        vision=vision,
        draft=draft_head,
        workers=workers,
    )


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    # An exception rather than an exit: the engine is closed and partial files are removed on the way out.
    raise SystemExit(exits.TERMINATED)


# Commands of their own modules: name -> (module, function, summary). They are imported when they are called.
_ELSEWHERE = {
    "pull": ("models", "pull", "Download a model: verified, resumable, checked for space first."),
    "rm": ("models", "rm", "Delete models, or further names of them."),
    "cp": ("models", "cp", "Give a model a further name; nothing is copied."),
    "ps": ("remote", "ps", "Show what a running server has loaded and does."),
    "stop": ("remote", "stop", "Unload a running server's model once its requests have ended."),
    "serve": ("server.command", "serve", "Serve models to OpenAI, Anthropic and Ollama clients."),
    "launch": ("launch", "launch", "Start an agent program on a running server's model."),
    "bench": ("bench", "group", "Measure speed: decode, batches, serving, each beside its floor."),
    "doctor": ("doctor", "doctor", "Say what works on this machine, what would not, and how to mend it."),
}


def _register(target: typer.Typer, name: str) -> None:
    module, function, summary = _ELSEWHERE[name]
    home = importlib.import_module(f".{module}", __package__)
    found = getattr(home, function)
    if name == "bench":
        target.add_typer(found(guarded), name=name)
    elif name == "serve":
        # Services are set up by their environment: options without a variable of their own get NINFER_SERVE_<NAME>.
        environment = {"auto_envvar_prefix": "NINFER_SERVE"}
        target.command(name, help=summary, cls=grouped(home.GROUPS), context_settings=environment)(guarded(found))
    else:
        target.command(name, help=summary)(guarded(found))


def _summary(text: str) -> Callable[[], None]:
    """A command that is only listed: of a list nobody needs the options, and parsing them takes half a second."""

    def listed() -> None:
        return

    listed.__doc__ = text
    return listed


def program(argv: list[str]) -> typer.Typer:
    """The app with what `argv` needs: one command, all of them for a completion, or their summaries for a list."""
    first = argv[0] if argv else "--help"
    own = {
        command.name or command.callback.__name__: command for command in app.registered_commands if command.callback
    }
    completing = "_NINFER_COMPLETE" in os.environ
    chosen = _typer(completion=completing or first not in {*own, *_ELSEWHERE})
    chosen.registered_callback = app.registered_callback
    if completing:
        chosen.registered_commands = list(app.registered_commands)
        for name in _ELSEWHERE:
            _register(chosen, name)
    elif first in own:
        chosen.registered_commands = [own[first]]
    elif first in _ELSEWHERE:
        _register(chosen, first)
    else:
        for name, command in own.items():
            text = (command.callback.__doc__ or "") if command.callback else ""
            chosen.command(name, hidden=command.hidden, add_help_option=False)(_summary(text))
        for name, (_, _, text) in _ELSEWHERE.items():
            chosen.command(name, add_help_option=False)(_summary(text))
    return chosen


def main(argv: list[str] | None = None, *, loader: Any = None) -> None:
    """The entry point; never returns. `loader` replaces how an engine is loaded (tests play scripted ones)."""
    signal.signal(signal.SIGTERM, _terminate)
    # A stream that the caller closed (`>&-`) is None here; everything below may then write to nothing.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - lives as long as the process
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        program(sys.argv[1:] if argv is None else argv)(args=argv, obj=loader, prog_name="ninfer")
    except KeyboardInterrupt:
        sys.exit(exits.INTERRUPTED)
    except OSError as error:
        # Help and version are printed outside of any command.
        sys.stderr.write(f"error: {exits.text_of(error)}\n")
        _drop_stdout()
        sys.exit(exits.code_of(error))


if __name__ == "__main__":
    main()
