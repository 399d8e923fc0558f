"""The commands that read or make artifacts: list, inspect, convert."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninfer_core import store
from ninfer_core.errors import ConvertError, InvalidRequestError

from .display import Console, Progress, ago, size, table
from .presets import Preset, preset_json, presets_path, read_presets

if TYPE_CHECKING:
    from ninfer_core.artifact import TensorInfo

FORMAT_HEADER = ("FORMAT", "TENSORS", "WEIGHTS", "BYTES", "BITS")


def list_models(console: Console, environ: Mapping[str, str], *, as_json: bool) -> None:
    """Print the usable models and the presets; what is broken is named on stderr (in JSON: under `unusable`)."""
    entries = store.survey(environ)
    usable = store.usable(entries)
    broken = [(entry.name, entry.path, entry.problem) for entry in entries if entry.problem]
    presets = _presets(usable, environ, broken)
    if as_json:
        console.json(
            {
                "models": [entry_json(entry) for entry in usable],
                "presets": [preset_json(preset) for preset, _ in presets],
                "unusable": [{"name": name, "path": str(path), "problem": problem} for name, path, problem in broken],
            }
        )
        return
    now = time.time()
    rows = [
        (entry.name, entry.digest[:12], size(entry.size), ago(now - entry.modified), str(entry.path))
        for entry in usable
    ]
    rows += [
        (preset.name, entry.digest[:12], size(entry.size), "-", f"preset of {entry.name}") for preset, entry in presets
    ]
    for line in table(("NAME", "ID", "SIZE", "MODIFIED", "PATH"), rows, right=(2,)):
        console.line(line)
    for _, path, problem in broken:
        console.note(f"not usable: {path}: {problem}")


def _presets(
    usable: Sequence[store.ModelEntry], environ: Mapping[str, str], broken: list[tuple[str, Path, str]]
) -> list[tuple[Preset, store.ModelEntry]]:
    """The presets with their models; those that have none, or a file that is wrong, are added to `broken`."""
    path, models = presets_path(environ), {entry.name: entry for entry in usable}
    found = []
    try:
        presets = read_presets(path)
    except InvalidRequestError as error:
        broken.append(("presets", path, error.message))
        return []
    for preset in presets.values():
        entry = models.get(store.canonical(preset.model))
        if entry is None and Path(preset.model).expanduser().exists():
            entry = store.inspect_path(Path(preset.model).expanduser())
        if entry is None:
            broken.append((preset.name, path, f"the preset {preset.name} needs {preset.model}, which is not installed"))
        else:
            found.append((preset, entry))
    return found


def entry_json(entry: store.ModelEntry) -> dict[str, Any]:
    """An installed model as `list --json` and `show --json` give it."""
    return {
        "name": entry.name,
        "model_id": entry.model_id,
        "path": str(entry.path),
        "form": entry.form,
        "size": entry.size,
        "digest": entry.digest,
        "modified": entry.modified,
    }


# --- what show and inspect share ------------------------------------------------------------------------------------


def by_format(tensors: Iterable[TensorInfo]) -> list[dict[str, Any]]:
    """Per format, largest first: tensors, weights, bytes, bits per weight (scales and padding included)."""
    rows: dict[str, dict[str, Any]] = {}
    for info in tensors:
        row = rows.setdefault(info.format, {"format": info.format, "tensors": 0, "weights": 0, "bytes": 0})
        row["tensors"] += 1
        row["weights"] += math.prod(info.shape)
        row["bytes"] += info.nbytes
    for row in rows.values():
        row["bits_per_weight"] = 8 * row["bytes"] / row["weights"]
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def format_rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells of `FORMAT_HEADER` for `facts["formats"]`."""
    return [
        (
            row["format"],
            f"{row['tensors']:,}",
            f"{row['weights']:,}",
            f"{row['bytes']:,}",
            f"{row['bits_per_weight']:.2f}",
        )
        for row in facts["formats"]
    ]


# --- inspect ---------------------------------------------------------------------------------------------------------


def inspect(file: str, console: Console, *, verify: bool, as_json: bool, quiet: bool) -> None:
    """Print the objects of any structurally valid artifact, known model or not; `verify` reads all of it."""
    from ninfer_core.artifact import Artifact

    path = Path(file) if Path(file).exists() else store.resolve(file)
    with Artifact.open(path, inspect=True) as artifact:
        tensors = [
            {"name": info.name, "shape": list(info.shape), "format": info.format, "bytes": info.nbytes}
            for info in artifact.tensors.values()
        ]
        resources = [{"name": name, "bytes": len(data)} for name, data in artifact.resources.items()]
        value: dict[str, Any] = {
            "path": str(artifact.path),
            "form": artifact.form,
            "model_id": artifact.model_id,
            "tensors": tensors,
            "resources": resources,
            "tensor_bytes": artifact.nbytes,
            "formats": by_format(artifact.tensors.values()),
            "verified": None,
        }
        if verify:
            with Progress(console, f"verifying {path.name}", quiet=quiet) as progress:
                report = artifact.verify(progress=lambda name, done, total: progress.update(done, total, name))
            value["verified"] = {"files": report.files, "tensors": report.tensors, "published": report.published}
    if as_json:
        console.json(value)
    else:
        for line in _object_lines(value):
            console.line(line)


def _object_lines(value: dict[str, Any]) -> Sequence[str]:
    rows = [(item["name"], "-", "file", f"{item['bytes']:,}") for item in value["resources"]]
    rows += [
        (item["name"], "x".join(map(str, item["shape"])) or "scalar", item["format"], f"{item['bytes']:,}")
        for item in value["tensors"]
    ]
    lines = table(("OBJECT", "SHAPE", "FORMAT", "BYTES"), rows, right=(3,))
    lines += ["", *table(FORMAT_HEADER, format_rows(value), right=(1, 2, 3, 4))]
    lines += ["", f"{value['model_id']}: {len(value['tensors']):,} tensors, {value['tensor_bytes']:,} bytes"]
    verified = value["verified"]
    if verified:
        lines += [f"{digest}  {name}" for name, digest in verified["files"].items()]
        kind = "equal to a published artifact" if verified["published"] else "digests and contents are right"
        lines.append(f"verified: {kind}")
    return lines


# --- convert ---------------------------------------------------------------------------------------------------------

# Errors of the converter speak of its arguments; these are the options that set them.
_OPTIONS = {"vision=False": "--no-vision", "draft=False": "--no-draft-head", "counts=": "--counts FILE"}


def convert(source: Path, destination: Path, console: Console, *, quiet: bool, **options: Any) -> None:
    """Make an artifact and say what came of it; `options` are those of `ninfer_core.convert.convert`.

    Raises:
        ConvertError: with the names of the options to change.
        KeyboardInterrupt: Ctrl-C; what is done is kept and said to be.
    """
    from ninfer_core.convert import convert as run

    try:
        with Progress(console, f"converting {source.name or source}", quiet=quiet) as progress:
            report = run(
                source, destination, progress=lambda name, done, total: progress.update(done, total, name), **options
            )
    except ConvertError as error:
        text = error.message
        for argument, option in _OPTIONS.items():
            text = text.replace(argument, option)
        raise ConvertError(text) from error
    except KeyboardInterrupt:
        if not quiet:
            console.note("stopped; the same command goes on from here")
        raise
    if not quiet:
        resumed = f" ({report.resumed} of them from an earlier run)" if report.resumed else ""
        console.note(
            f"{report.path}: {report.model_id}, {report.objects:,} objects{resumed}, {size(report.nbytes)} "
            f"in {report.seconds:.0f} s"
        )
