"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer


def complete_model(incomplete: str) -> list[str]:
    """Installed names, and presets, that begin so."""
    from ninfer_core import store

    from .presets import presets_path, read_presets

    try:
        names = [*(entry.name for entry in store.installed()), *read_presets(presets_path(os.environ))]
        return [name for name in names if name.startswith(incomplete)]
    except Exception:
        return []  # a shell completion has no place to show an error


def tokens_or_auto(text: str) -> int | str:
    """A number of tokens, or `auto`.

    Raises:
        typer.BadParameter: neither.
    """
    if text.strip().lower() == "auto":
        return "auto"
    if not text.strip().isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither a number of tokens from 1 on nor auto")
    return int(text)


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
ContextLength = Annotated[
    Any,
    typer.Option(
        "--context",
        "--max-context",
        parser=tokens_or_auto,
        metavar="TOKENS|auto",
        envvar="NINFER_CONTEXT_LENGTH",
        help="Longest prompt plus answer, in tokens; auto is the longest that fits. [default: auto]",
    ),
]
Host = Annotated[
    str,
    typer.Option(
        "--host",
        envvar="NINFER_HOST",
        metavar="ADDRESS",
        help="The server: host, :port, host:port or a URL. [default: 127.0.0.1:11434]",
    ),
]
