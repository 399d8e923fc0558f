"""The commands that change what is installed: pull, rm, cp."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ninfer_core import store

from .display import Console, Notes, Progress, duration, size
from .options import AsJson, Model, Quiet, complete_model

if TYPE_CHECKING:
    from ninfer_core.pull import Plan, Status


def _complete_known(incomplete: str) -> list[str]:
    return [model.name for model in store.KNOWN if model.repository and model.name.startswith(incomplete)]


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="qwen3.6:27b, qwen3.6:35b-a3b, or a repository OWNER/NAME that holds an artifact.",
            autocompletion=_complete_known,
        ),
    ],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit, taken as it is there. [default: main]")] = "",
    source: Annotated[str, typer.Option(metavar="OWNER/NAME", help="Take the model from this repository.")] = "",
    convert: Annotated[
        bool,
        typer.Option("--convert", help="Take the original checkpoint and quantize it here, one shard at a time."),
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Make no connection; fail if anything is missing.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be downloaded, and stop.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also read everything once more: digests, scales, padding.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Download a model; interrupted, the same command goes on from where it was."""
    from ninfer_core import pull as pulling

    console = Console(os.environ)
    options = pulling.Options(
        source=source, revision=revision, convert=convert, offline=offline, environ=dict(os.environ)
    )
    if dry_run:
        _show_plan(pulling.plan(model, options), console, as_json)
        return
    logger, notes = logging.getLogger("ninfer"), logging.NullHandler() if quiet else Notes(console)
    logger.addHandler(notes)
    try:
        with _PullView(console, model, quiet) as view:
            options.progress = view.show
            entry = pulling.pull(model, options)
    except KeyboardInterrupt:
        if not quiet:
            console.note("stopped; what has arrived is kept, and the same command goes on from here")
        raise
    finally:
        logger.removeHandler(notes)
    if verify:
        _verify(entry, console, quiet)
    if as_json:
        console.json({"name": entry.name, "path": str(entry.path), "size": entry.size, "verified": verify})
    elif not quiet:
        console.note(f"{entry.name}: {size(entry.size)} at {entry.path}; try: ninfer run {entry.name}")


def _show_plan(plan: Plan, console: Console, as_json: bool) -> None:
    if as_json:
        files = [{"name": f.name, "bytes": f.size, "digest": f.digest, "url": f.url} for f in plan.files]
        console.json(
            {
                "name": plan.name,
                "repository": plan.repository,
                "commit": plan.commit,
                "folder": str(plan.folder),
                "files": files,
                "bytes": plan.total,
                "missing": plan.missing,
                "convert": plan.convert,
            }
        )
        return
    for file in plan.files:
        console.line(f"{size(file.size):>10}  {file.name}")
    what = "to convert on the way, shard by shard" if plan.convert else f"of them {size(plan.missing)} to download"
    console.line(f"{size(plan.total)} from {plan.repository} at {plan.commit[:12]}, {what}, to {plan.folder}")


def _verify(entry: store.ModelEntry, console: Console, quiet: bool) -> None:
    from ninfer_core.artifact import Artifact

    with (
        Artifact.open(entry.path, inspect=True) as artifact,
        Progress(console, f"verifying {entry.name}", quiet=quiet) as progress,
    ):
        artifact.verify(progress=lambda name, done, total: progress.update(done, total, name))


class _PullView:
    """A pull's statuses as progress lines: one per phase, with the rate and what is left."""

    def __init__(self, console: Console, name: str, quiet: bool) -> None:
        self._console, self._name, self._quiet = console, name, quiet
        self._phase, self._line = "", Progress(console, f"asking for {name}", quiet=quiet)
        self._start: tuple[float, int] = (0.0, 0)

    def __enter__(self) -> _PullView:
        self._line.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._line.__exit__(None, None, None)

    def show(self, status: Status) -> None:
        """Bring one status to the screen."""
        if status.phase != self._phase:
            labels = {
                "manifest": f"asking for {self._name}",
                "waiting": f"waiting for {status.file}, which downloads {self._name}",
                "download": f"pulling {self._name}",
                "convert": f"converting {self._name}",
                "install": f"installing {self._name}",
            }
            self._line.__exit__(None, None, None)
            self._phase, self._line = status.phase, Progress(self._console, labels[status.phase], quiet=self._quiet)
            self._line.__enter__()
            self._start = (time.monotonic(), status.all_done)
        if not status.total:
            return
        seconds, count = time.monotonic() - self._start[0], status.all_done - self._start[1]
        detail = status.file if status.phase == "convert" else ""
        if status.phase != "convert" and seconds > 1 and count > 0:
            rate = count / seconds
            detail = f"{size(rate)}/s, {duration((status.total - status.all_done) / rate)} left"
        self._line.update(status.all_done, status.total, detail)


def rm(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="What to delete.", autocompletion=complete_model)
    ],
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Also a model that a running server has loaded.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Delete models, or further names of them."""
    from ninfer_core import library

    from .remote import loaded_names, unload

    console, done = Console(os.environ), []
    for name in models:
        busy = [loaded for loaded in loaded_names(os.environ) if store.canonical(loaded) == store.canonical(name)]
        if busy and name not in store.aliases(os.environ):
            if not force:
                from ninfer_core.errors import EngineConflictError

                raise EngineConflictError(
                    f"{name} is loaded by the running server; unload it with `ninfer stop {name}`, or use --force"
                )
            unload(busy[0], os.environ)
        removal = library.remove(name, os.environ)
        done.append({"name": removal.name, "freed": removal.freed, "aliases": list(removal.aliases)})
        if not (quiet or as_json):
            also = f", and its further names {', '.join(removal.aliases)}" if removal.aliases else ""
            console.note(f"removed {removal.name}{also}; {size(removal.freed)} freed")
    if as_json:
        console.json({"removed": done})


def cp(
    source: Model,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The further name.")],
    quiet: Quiet = False,
) -> None:
    """Give a model a further name; nothing is copied."""
    from ninfer_core import library

    entry = library.add_alias(source, name, os.environ)
    if not quiet:
        Console(os.environ).note(f"{entry.name} now stands for {entry.alias_of}")
