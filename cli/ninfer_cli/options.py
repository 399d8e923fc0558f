"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_model(incomplete: str) -> list[str]:
    """Installed names that begin so."""
    from ninfer_core import store

    try:
        return [entry.name for entry in store.installed() if entry.name.startswith(incomplete)]
    except Exception:
        return []  # a shell completion has no place to show an error


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name (qwen3.6:27b, qwen3.6:35b-a3b, demo) or path of an artifact.",
        autocompletion=complete_model,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")]
Host = Annotated[
    str,
    typer.Option(
        "--host",
        envvar="NINFER_HOST",
        metavar="ADDRESS",
        help="The server: host, :port, host:port or a URL. [default: 127.0.0.1:11434]",
    ),
]
