"""The commands that read or make artifacts: list, show, inspect, convert."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ninfer_core import store

from .display import Console, ago, size, table


def list_models(console: Console, environ: Mapping[str, str], *, as_json: bool) -> None:
    """Print the usable models; broken or unfinished artifacts are named on stderr (in JSON: under `unusable`)."""
    entries = store.survey(environ)
    usable = store.installed(environ)
    broken = [entry for entry in entries if entry.problem]
    if as_json:
        console.json(
            {
                "models": [_entry_json(entry) for entry in usable],
                "unusable": [
                    {"name": entry.name, "path": str(entry.path), "problem": entry.problem} for entry in broken
                ],
            }
        )
        return
    now = time.time()
    rows = [
        (entry.name, entry.digest[:12], size(entry.size), ago(now - entry.modified), str(entry.path))
        for entry in usable
    ]
    for line in table(("NAME", "ID", "SIZE", "MODIFIED", "PATH"), rows, right=(2,)):
        console.line(line)
    for entry in broken:
        console.note(f"not usable: {entry.path}: {entry.problem}")


def _entry_json(entry: store.ModelEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "model_id": entry.model_id,
        "path": str(entry.path),
        "form": entry.form,
        "size": entry.size,
        "digest": entry.digest,
        "modified": entry.modified,
    }
