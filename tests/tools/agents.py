"""Runs coding agents headless against the scripted server, on loopback alone: does a whole task get done?

    npm install --prefix DIR @openai/codex opencode-ai @anthropic-ai/claude-code
    python -m tests.tools.agents DIR [--agent codex] [--case overflow] [--record FOLDER]

Each agent gets a temporary home and working folder, is told to make a file, and must end with exit code 0, the file
and the final words. The cases vary what the server does meanwhile. The script moves itself into a network namespace
without any network where the kernel lets it (`unshare`), so that nothing leaves the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_core.errors import EngineBusyError
from ninfer_core.testing import Delay, Refuse, Reply, Script, ScriptedEngine
from ninfer_core.types import Request, ToolCall
from tests.server.conftest import Running, running

TASK = "Make a file named made.txt that holds the word hello, then say ALL DONE."
COMMAND = "echo hello > made.txt"
FINAL = "ALL DONE. The file is there."
# How each known shell tool takes a command.
SHELLS: dict[str, Callable[[], dict[str, Any]]] = {
    "exec_command": lambda: {"cmd": COMMAND},
    "shell_command": lambda: {"command": COMMAND},
    "shell": lambda: {"command": ["bash", "-lc", COMMAND]},
    "Bash": lambda: {"command": COMMAND, "description": "Write the file"},
    "bash": lambda: {"command": COMMAND, "description": "Write the file"},
}


@dataclass(frozen=True, slots=True)
class Case:
    """What the server does: requests to refuse first, seconds of silence before an answer, the context it serves."""

    refusals: int = 0
    silence: float = 0.0
    context: int = 1 << 20
    overflows: bool = False
    parallel: bool = False


CASES = {
    "plain": Case(),
    "busy": Case(refusals=2),
    "slow": Case(silence=8.0),
    "parallel": Case(parallel=True),
    "overflow": Case(context=2000, overflows=True),
}


def answer(request: Request, case: Case) -> list[Any] | Reply:
    """The scripted model: a call of the agent's shell tool, then the final words; titles for everything else."""
    shell = next((tool.name for tool in request.tools if tool.name in SHELLS), None)
    if shell is None:
        return Reply("Making a file")
    called = any(message.role == "tool" for message in request.messages)
    calls = [ToolCall("", shell, SHELLS[shell]())]
    if case.parallel:
        calls.append(ToolCall("", shell, {**SHELLS[shell]()}))
    thinking = request.thinking is not False
    reply = Reply(FINAL) if called else Reply("I will make it.", reasoning="A file is wanted.", tool_calls=calls)
    return [Delay(case.silence), reply.raw(thinking)] if case.silence else reply


def codex(folder: Path, server: Running) -> tuple[list[str], dict[str, str]]:
    """Command and environment of Codex."""
    provider = f'{{name="ninfer",base_url="{server.url}/v1",wire_api="responses"}}'
    options = ["-c", "model_provider=ninfer", "-c", f"model_providers.ninfer={provider}", "-m", "scripted"]
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *options, *flags, TASK], {}


def codex_oss(folder: Path, server: Running) -> tuple[list[str], dict[str, str]]:
    """Command and environment of Codex in the mode that probes an Ollama server first."""
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = ["codex", "exec", "--oss", "--local-provider", "ollama", "-m", "scripted", *flags, TASK]
    return command, {"CODEX_OSS_BASE_URL": server.url + "/v1"}


def opencode(folder: Path, server: Running) -> tuple[list[str], dict[str, str]]:
    """Command and environment of OpenCode."""
    limit = {"context": 65536, "output": 8192}
    model = {"name": "scripted", "tool_call": True, "reasoning": True, "limit": limit}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ninfer",
        "options": {"baseURL": server.url + "/v1", "apiKey": "none"},
        "models": {"scripted": model},
    }
    config = {
        "model": "ninfer/scripted",
        "small_model": "ninfer/scripted",
        "provider": {"ninfer": provider},
        "autoupdate": False,
        "share": "disabled",
    }
    (folder / "opencode.json").write_text(json.dumps(config))
    return ["opencode", "run", "--auto", TASK], {
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
    }


def claude(folder: Path, server: Running) -> tuple[list[str], dict[str, str]]:
    """Command and environment of Claude Code."""
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL")
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(names, "scripted"),
    }
    return ["claude", "-p", TASK, "--allowedTools", "Bash"], environment


AGENTS = {"codex": codex, "codex-oss": codex_oss, "opencode": opencode, "claude": claude}


def attempt(agent: str, name: str, packages: Path, record: Path | None) -> tuple[bool, str]:
    """Whether the agent did what the case asks for, and what happened in one line."""
    case = CASES[name]
    scripts = [Script(Refuse(EngineBusyError("full", retry_after=1.0)), times=case.refusals)] if case.refusals else []
    engine = ScriptedEngine(*scripts, Script(lambda r: answer(r, case), burst=4), context_length=case.context)
    with tempfile.TemporaryDirectory() as home, running(engine, heartbeat=2.0) as server:
        work = Path(home) / "work"
        work.mkdir()
        command, extra = AGENTS[agent](work, server)
        binary = str(packages / "node_modules/.bin" / command[0])
        path = os.environ.get("PATH", "/usr/bin:/bin")
        environment = {"HOME": home, "PATH": path, "TERM": "dumb", "XDG_CONFIG_HOME": f"{home}/.config", **extra}
        began = time.monotonic()
        try:
            done = subprocess.run(
                [binary, *command[1:]],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=150,
            )
        except subprocess.TimeoutExpired:
            return False, "did not end within 150 s"
        made = work / "made.txt"
        text = made.read_text().strip() if made.exists() else None
        output = done.stdout + done.stderr
        if record is not None:
            record.mkdir(parents=True, exist_ok=True)
            (record / f"{agent}_{name}.txt").write_text(output)
        seconds = time.monotonic() - began
        line = f"exit {done.returncode}, file {text!r}, {len(engine.requests)} generations, {seconds:.0f} s"
        if case.overflows:
            good = (
                not engine.requests and text is None and ("2000" in output or "long" in output or "context" in output)
            )
        else:
            good = done.returncode == 0 and text == "hello" and "ALL DONE" in output
        good = good and server.idle()
        return good, line if good else f"{line}\n    {output.strip()[-1500:]}"


def main() -> int:
    """Run what was asked for; 1 if anything failed."""
    parser = argparse.ArgumentParser(description="Run coding agents against the scripted server.")
    parser.add_argument("packages", type=Path, help="folder in which npm installed the agents")
    parser.add_argument("--agent", choices=AGENTS, action="append")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--record", type=Path, help="folder for the agents' outputs")
    options = parser.parse_args()
    if shutil.which("unshare") and "NINFER_AGENTS_INSIDE" not in os.environ:
        inner = 'ip link set lo up && exec "$@"'
        command = ["unshare", "-rn", "sh", "-c", inner, "sh", sys.executable, "-m", "tests.tools.agents", *sys.argv[1:]]
        return subprocess.call(command, env={**os.environ, "NINFER_AGENTS_INSIDE": "1"})
    failed = 0
    for agent in options.agent or AGENTS:
        if not (options.packages / "node_modules/.bin" / agent.partition("-")[0]).exists():
            print(f"{agent}: not installed in {options.packages}")
            failed += 1
            continue
        for case in options.case or CASES:
            good, line = attempt(agent, case, options.packages.resolve(), options.record)
            print(f"{'ok  ' if good else 'FAIL'} {agent} {case}: {line}", flush=True)
            failed += not good
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
