"""`ninfer launch`: agent programs on a running server's model, by environment and arguments; no file is written."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import typer

from ninfer_core.errors import InvalidRequestError, ModelNotFoundError

from .display import Console
from .options import Host, complete_model

PROVIDER = "ninfer"


@dataclass(frozen=True, slots=True)
class Target:
    """The server and model that a program is pointed at; `context` in tokens."""

    url: str
    model: str
    context: int
    key: str

    @property
    def openai(self) -> str:
        """Base URL of the OpenAI interfaces."""
        return self.url + "/v1"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a program needs: environment variables (None unsets one) and arguments in front of the user's own."""

    environ: dict[str, str | None] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Program:
    """An agent program: its executable, how it is installed, and its setup for a target."""

    executable: str
    install: str
    setup: Callable[[Target], Setup]


def _claude(target: Target) -> Setup:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL",
              "ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")  # fmt: skip
    return Setup(
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.key,
            "ANTHROPIC_API_KEY": None,  # it would go to our server in place of the token
            **dict.fromkeys(models, target.model),
            # It believes in a larger window otherwise, and would fold its history too late.
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context),
            # A line that changes with every request would cost the whole cached prompt.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def _codex(target: Target) -> Setup:
    provider = {
        "name": PROVIDER,
        "base_url": target.openai,
        "wire_api": "responses",
        "env_key": "NINFER_CODEX_KEY",
    }
    values = {
        "model_provider": PROVIDER,
        "model_context_window": target.context,
        **{f"model_providers.{PROVIDER}.{name}": value for name, value in provider.items()},
    }
    settings = [f"{name}={json.dumps(value)}" for name, value in values.items()]  # strings and numbers: as in TOML
    arguments = [item for setting in settings for item in ("-c", setting)]
    return Setup({"NINFER_CODEX_KEY": target.key}, [*arguments, "-m", target.model])


def _opencode(target: Target) -> Setup:
    limit = {"context": target.context, "output": min(32_000, target.context // 2)}
    model = {"name": target.model, "limit": limit, "tool_call": True, "reasoning": True}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": target.openai, "apiKey": target.key},
        "models": {target.model: model},
    }
    chosen = f"{PROVIDER}/{target.model}"
    config = {"provider": {PROVIDER: provider}, "model": chosen, "small_model": chosen}
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen(target: Target) -> Setup:
    return Setup({"OPENAI_BASE_URL": target.openai, "OPENAI_API_KEY": target.key, "OPENAI_MODEL": target.model})


def _aider(target: Target) -> Setup:
    environ: dict[str, str | None] = {"OPENAI_API_BASE": target.openai, "OPENAI_API_KEY": target.key}
    return Setup(environ, ["--model", f"openai/{target.model}"])


PROGRAMS = {
    "claude": Program("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Program("codex", "npm install -g @openai/codex", _codex),
    "opencode": Program("opencode", "npm install -g opencode-ai", _opencode),
    "qwen": Program("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "aider": Program("aider", "pip install aider-chat", _aider),
}


def _complete_program(incomplete: str) -> list[str]:
    return [name for name in PROGRAMS if name.startswith(incomplete)]


def target_of(host: str, model: str) -> Target:
    """The server at `host` and its model: the one named, else the one that is loaded.

    Raises:
        ServerUnreachableError: no server. ModelNotFoundError: it does not have the model.
    """
    from .remote import call, served_name, server_url

    url = server_url(host)
    entries = call(url, "/v1/models", os.environ)["data"]
    name = served_name(url, model, os.environ) if model else str(entries[0]["id"])
    entry = next((item for item in entries if item["id"] == name), None)
    if name is None or entry is None:
        known = ", ".join(str(item["id"]) for item in entries)
        raise ModelNotFoundError(f"the server at {url} has no model {model!r}; it has {known}")
    key = os.environ.get("NINFER_API_KEY", "").partition(",")[0].strip() or "none"
    return Target(url, name, int(entry["context_length"]), key)


def shell_lines(program: Program, setup: Setup, arguments: list[str]) -> list[str]:
    """The same by hand, for a POSIX shell."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in setup.environ.items() if value is not None]
    lines += [f"unset {name}" for name, value in setup.environ.items() if value is None]
    return [*lines, shlex.join([program.executable, *setup.arguments, *arguments])]


def launch(
    name: Annotated[
        str,
        typer.Argument(metavar="PROGRAM", help=f"One of {', '.join(PROGRAMS)}.", autocompletion=_complete_program),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="What the program itself is to be given.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="The model. [default: the loaded one]", autocompletion=complete_model)
    ] = "",
    host: Host = "",
    print_only: Annotated[
        bool, typer.Option("--print", help="Print what would be set and run, as shell lines, and stop.")
    ] = False,
) -> None:
    """Start an agent program on a running server's model."""
    program = PROGRAMS.get(name)
    if program is None:
        raise InvalidRequestError(f"{name!r} is not a program known here; known: {', '.join(PROGRAMS)}")
    target = target_of(host, model)
    setup, given = program.setup(target), list(arguments or ())
    if print_only:
        for line in shell_lines(program, setup, given):
            Console(os.environ).line(line)
        return
    path = shutil.which(program.executable)
    if path is None:
        raise InvalidRequestError(f"{program.executable} is not installed; install it with: {program.install}")
    environ = {key: value for key, value in os.environ.items() if setup.environ.get(key, "") is not None}
    environ |= {key: value for key, value in setup.environ.items() if value is not None}
    command = [path, *setup.arguments, *given]
    if os.name == "posix":
        sys.stdout.flush()
        os.execve(path, command, environ)
    raise typer.Exit(subprocess.run(command, env=environ, check=False).returncode)
