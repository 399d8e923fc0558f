"""`ninfer doctor`: the checkup of this machine, the server's place, and an exit code for what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from . import exits
from .display import DIM, RESET, Console
from .options import AsJson

if TYPE_CHECKING:
    from ninfer_core.checkup import Finding

_MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


def _server() -> Iterator[Finding]:
    """Who answers where a server would listen."""
    from ninfer_core.checkup import Finding
    from ninfer_core.errors import NinferError

    from .remote import find_server
    from .server.address import holder_of, parse_address

    try:
        address = parse_address(os.environ.get("NINFER_HOST", "").rpartition("://")[2].partition("/")[0])
    except NinferError as error:
        yield Finding("server", "fail", f"NINFER_HOST: {error.message}", "unset or mend it", type(error))
        return
    where = f"{address.host}:{address.port}"
    if find_server("", os.environ):
        yield Finding("server", "ok", f"a ninfer server runs at {where}; `ninfer run` uses it")
        return
    holder = holder_of(address)
    if holder:
        yield Finding("server", "note", f"{where} is taken{holder}", "ninfer serve MODEL --port N takes another port")
    else:
        yield Finding("server", "ok", f"nobody listens at {where}; `ninfer serve` can")


def _presets() -> Iterator[Finding]:
    """Whether the presets file can be read, where there is one."""
    from ninfer_core.checkup import Finding
    from ninfer_core.errors import InvalidRequestError

    from .presets import presets_path, read_presets

    path = presets_path(os.environ)
    try:
        found = read_presets(path)
    except InvalidRequestError as error:
        yield Finding("presets", "fail", error.message, "mend the file, or name another in NINFER_PRESETS", type(error))
    else:
        if found:
            yield Finding("presets", "ok", f"{', '.join(found)} in {path}")


def doctor(
    verify: Annotated[
        bool, typer.Option("--verify", help="Also read every installed model: digests, scales, padding.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what works on this machine, what would not, and how to mend it."""
    from ninfer_core.checkup import checkup

    console, findings = Console(os.environ), []
    for source in (checkup(os.environ, verify=verify), _presets(), _server()):
        for finding in source:
            findings.append(finding)
            if not as_json:
                _show(finding, console)
    failed = [finding for finding in findings if finding.level == "fail"]
    if as_json:
        console.json(
            {
                "healthy": not failed,
                "findings": [
                    {"name": f.name, "level": f.level, "text": f.text, "mend": f.mend or None} for f in findings
                ],
            }
        )
    if failed:
        error = failed[0].error
        raise typer.Exit(exits.code_of(error("")) if error else exits.INTERNAL)


def _show(finding: Finding, console: Console) -> None:
    console.write(f"{_MARKS[finding.level]}  {finding.name:<10} {finding.text}\n")
    if finding.mend:
        console.style(DIM)
        console.write(f"{'':<17}-> {finding.mend}\n")
        console.style(RESET)
