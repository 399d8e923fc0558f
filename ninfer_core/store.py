"""Model names and the artifacts on this machine: what is installed, where it lies, and which name means which file.

A name is resolved without reading weights and without torch, so listing and completing names is instant. Only the
directory of a `.ninfer` file or the manifest of an artifact directory is read: enough to tell a finished artifact
from one whose copy or download was cut short. Reading the objects themselves is the business of `artifact`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import (
    ArtifactError,
    DirectoryError,
    FramingError,
    GeometryError,
    InvalidRequestError,
    ModelNotFoundError,
    UnknownIdentityError,
)

_MAGIC = b"NINFER\x00\x01"
_ALIGNMENT = 4096
_DIRECTORY_CAP = 64 << 20
MANIFEST, _MANIFEST_FORM, _MANIFEST_VERSION = "manifest.json", "ninfer-artifact", 1
_TEMPORARY = (".tmp", ".part", ".partial", ".incomplete", ".checkpoint")
ALIASES = "aliases.json"
REFERENCES = ("ninfer", "main")
"""Which commit of a cached repository counts: the one that was pulled last, else the one other tools call current."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model this engine is made for; `repository` and `file` name its published artifact, `checkpoint` its origin.

    `size` (bytes) and `sha256` are those of the published file, known before anybody is asked.
    """

    name: str
    model_id: str
    aliases: tuple[str, ...]
    licence: str
    checkpoint: str = ""
    repository: str = ""
    file: str = ""
    size: int = 0
    sha256: str = ""


KNOWN = (
    KnownModel(
        "qwen3.6:27b",
        "qwen3.6-27b",
        ("qwen3.6-27b", "qwen3_6_27b", "qwen/qwen3.6-27b", "neroued/qwen3.6-27b-ninfer"),
        "Apache-2.0",
        "Qwen/Qwen3.6-27B",
        "neroued/Qwen3.6-27B-NInfer",
        "qwen3_6_27b.ninfer",
        17_495_365_888,
        "74fac75f3a6b7ab7b52e08c36969c7a33a8ba23465910eccd72d195adb497127",
    ),
    KnownModel(
        "qwen3.6:35b-a3b",
        "qwen3.6-35b-a3b",
        ("qwen3.6-35b-a3b", "qwen3_6_35b_a3b", "qwen/qwen3.6-35b-a3b", "neroued/qwen3.6-35b-a3b-ninfer"),
        "Apache-2.0",
        "Qwen/Qwen3.6-35B-A3B",
        "neroued/Qwen3.6-35B-A3B-NInfer",
        "qwen3_6_35b_a3b.ninfer",
        22_783_246_080,
        "5194407dd6d3092b8c2f81ce41e014b50ca0d6f1ba4e5d8c1492b8652bfa267f",
    ),
    KnownModel("demo", "ninfer-demo", ("ninfer-demo",), "Apache-2.0"),
)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One artifact on disk. `size` in bytes, `modified` in seconds since the epoch.

    `form` is "ninfer" (one file) or "safetensors" (a directory). `digest` is the sha256 of the artifact's own
    directory or manifest: an identity that is cheap to compute, not a check of the payload. `problem` is empty for a
    usable artifact and otherwise says why it is not. `alias_of` is set where the name was made by `ninfer cp`.
    """

    name: str
    path: Path
    size: int
    model_id: str
    modified: float
    form: str
    digest: str
    problem: str = ""
    alias_of: str = ""

    @property
    def repository(self) -> str:
        """The hub repository in whose cache folder the artifact lies; empty elsewhere."""
        return _repository_of(self.path)

    @property
    def known(self) -> KnownModel | None:
        """What this project knows about the model, or None for a private one."""
        return next((model for model in KNOWN if model.model_id == self.model_id), None)


def demo_path() -> Path:
    """Where the demo artifact lies inside the package."""
    return Path(__file__).with_name("demo") / "artifact"


def models_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of this project's own artifacts: `NINFER_MODELS`, else `ninfer/models` in the user's cache.

    Raises:
        InvalidRequestError: `NINFER_MODELS` names something that is not a folder.
    """
    env = os.environ if environ is None else environ
    value = env.get("NINFER_MODELS", "")
    if not value:
        return _cache_home(env) / "ninfer" / "models"
    path = Path(value).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise InvalidRequestError(
            f"NINFER_MODELS={value!r} is a file; it must name the folder that holds the artifacts",
            param="NINFER_MODELS",
        )
    return path


def history_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where the interactive prompt keeps its history: `ninfer/history` in the user's state folder."""
    env = os.environ if environ is None else environ
    base = env.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ninfer" / "history"


def _cache_home(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CACHE_HOME", "")
    return Path(base) if base else Path.home() / ".cache"


def hub_dir(env: Mapping[str, str]) -> Path:
    """The hub cache, by the same rules as huggingface_hub (whose import would cost more than the listing)."""
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"]).expanduser()
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"]).expanduser() / "hub"
    return _cache_home(env) / "huggingface" / "hub"


def canonical(name: str) -> str:
    """The canonical form of a model name: case and `:latest` dropped, aliases replaced."""
    plain = name.strip().casefold().removesuffix(":latest")
    for model in KNOWN:
        if plain in (model.name, *model.aliases):
            return model.name
    return plain


def installed(environ: Mapping[str, str] | None = None) -> list[ModelEntry]:
    """Every usable artifact of this machine, one entry per name, in the order of names.

    The models folder comes before the hub cache (which is not looked at when `NINFER_MODELS` is set); where a name is
    found twice the first one counts, so a name always means the same file as `resolve` gives.
    """
    return usable(survey(environ))


def usable(entries: Iterable[ModelEntry]) -> list[ModelEntry]:
    """The entries without a problem, the first of each name, in the order of names."""
    found: dict[str, ModelEntry] = {}
    for entry in entries:
        if not entry.problem:
            found.setdefault(entry.name, entry)
    return sorted(found.values(), key=lambda entry: entry.name)


def survey(environ: Mapping[str, str] | None = None) -> list[ModelEntry]:
    """All artifacts found, broken and unfinished ones (with `problem` set) included, in the order of precedence."""
    env = os.environ if environ is None else environ
    found: list[ModelEntry] = []
    if demo_path().is_dir():
        found.append(inspect_path(demo_path(), "demo"))
    folders = [models_dir(env)] if env.get("NINFER_MODELS") else [models_dir(env), *_snapshots(hub_dir(env))]
    for folder in folders:
        found.extend(inspect_path(path, "") for path in candidates(folder))
    return found + _alias_entries(found, aliases(env))


def aliases(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Names made by `ninfer cp`: name -> the installed name it stands for. A damaged file holds none."""
    try:
        value = json.loads((models_dir(environ) / ALIASES).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: target for name, target in value.items() if isinstance(target, str)}


def _alias_entries(entries: list[ModelEntry], names: Mapping[str, str]) -> list[ModelEntry]:
    out = []
    for name, target in names.items():
        entry = next((entry for entry in entries if entry.name == target and not entry.problem), None)
        if entry is not None:
            out.append(replace(entry, name=name, alias_of=target))
        else:
            gone = f"it stands for {target}, which is not installed; remove it with: ninfer rm {name}"
            out.append(ModelEntry(name, Path(name), 0, "", 0.0, "alias", "", gone, target))
    return out


def resolve(name: str, environ: Mapping[str, str] | None = None) -> Path:
    """The artifact that `name` means. Raises as `describe` does."""
    return describe(name, environ).path


def describe(name: str, environ: Mapping[str, str] | None = None) -> ModelEntry:
    """The entry that `name` means: an installed model, an alias of one, a pulled repository, or a path.

    Raises:
        ModelNotFoundError: nothing of that name; the message lists what is installed and how to get the rest.
        ArtifactError: the artifact of that name is there but broken or unfinished.
    """
    wanted = canonical(name)
    entries = survey(environ)
    named = [entry for entry in entries if entry.name == wanted]
    named += [entry for entry in entries if wanted and entry.repository.casefold() == wanted and not entry.alias_of]
    for entry in named:
        if not entry.problem:
            return entry
    for entry in named:
        raise ArtifactError(f"the artifact of {entry.name} at {entry.path} is not usable: {entry.problem}")
    if _is_path(name) and (Path(name).expanduser().exists() or not _known_name(wanted)):
        path = _resolve_path(name)
        return next((entry for entry in entries if entry.path == path), None) or inspect_path(path)
    raise ModelNotFoundError(_not_found(name, wanted, [entry.name for entry in entries if not entry.problem], environ))


def _known_name(name: str) -> KnownModel | None:
    return next((model for model in KNOWN if model.name == name), None)


def _is_path(name: str) -> bool:
    return name.endswith(".ninfer") or name.startswith(("~", ".")) or "/" in name or os.sep in name


def _resolve_path(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.exists():
        raise ModelNotFoundError(f"there is no model artifact at {name}: the path does not exist")
    if path.is_dir() and not (path / MANIFEST).is_file():
        hint = "it has no manifest.json"
        if (path / "config.json").is_file():
            hint += "; a checkpoint folder becomes an artifact with: ninfer convert SOURCE DESTINATION"
        raise ModelNotFoundError(f"the folder {name} is not a model artifact: {hint}")
    return path.absolute()


def _not_found(name: str, wanted: str, names: list[str], environ: Mapping[str, str] | None) -> str:
    known = _known_name(wanted)
    lines = [f"model {name!r} is not installed" if known else f"model {name!r} is unknown"]
    if not known:
        from difflib import get_close_matches

        near = get_close_matches(wanted, sorted({*names, *(model.name for model in KNOWN)}), n=1, cutoff=0.5)
        if near:
            lines[0] += f", did you mean {near[0]}"
    lines.append("installed: " + (", ".join(sorted(set(names))) or "none"))
    if known and known.repository:
        lines.append(f"to get it: ninfer pull {known.name} ({known.size / 1e9:.1f} GB)")
    elif not known:
        lines.append("a path to a .ninfer file or an artifact folder works too")
    return "; ".join(lines)


# --- finding ---------------------------------------------------------------------------------------------------------


def _snapshots(hub: Path) -> Iterator[Path]:
    """The current snapshot folder of every model repository in the hub cache."""
    if not hub.is_dir():
        return
    for repository in sorted(hub.glob("models--*")):
        for reference in (repository / "refs" / name for name in REFERENCES):
            snapshot = repository / "snapshots" / (reference.read_text().strip() if reference.is_file() else "")
            if reference.is_file() and snapshot.is_dir():
                yield snapshot
                break


def candidates(folder: Path) -> Iterator[Path]:
    """Artifacts directly in `folder`, or the folder itself; hidden and temporary names are never candidates."""
    if not folder.is_dir():
        return
    if (folder / MANIFEST).is_file():
        yield folder
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.suffix in _TEMPORARY:
            continue
        if path.suffix == ".ninfer" or (path.is_dir() and (path / MANIFEST).is_file()):
            yield path


def inspect_path(path: Path, name: str = "") -> ModelEntry:
    """The entry of one artifact. Never raises for a bad artifact: `problem` says what is wrong with it."""
    form = "safetensors" if path.is_dir() else "ninfer"
    model_id, size, digest, problem, modified = "", 0, "", "", 0.0
    try:
        modified = path.stat().st_mtime
        if form == "safetensors":
            size = sum(item.stat().st_size for item in path.iterdir() if item.is_file())
            model_id, digest = _probe_directory(path)
        else:
            size = path.stat().st_size
            model_id, digest = _probe_file(path, size)
    except ArtifactError as error:
        problem = str(error)
    except OSError as error:
        problem = error.strerror or str(error)
    return ModelEntry(name or _name_of(path, model_id), path, size, model_id, modified, form, digest, problem)


def _name_of(path: Path, model_id: str) -> str:
    """The name of an artifact: what its owner called it, so that two builds of one model can stand side by side.

    In the hub cache, whose folder names are digests, it is the model's own name, or that of a private repository.
    """
    known = next((model for model in KNOWN if model.model_id == model_id), None)
    repository = _repository_of(path)
    if repository:
        return known.name if known else canonical(repository.rpartition("/")[2])
    return canonical(path.name.removesuffix(".ninfer"))


def _repository_of(path: Path) -> str:
    folder = next((part for part in path.parts if part.startswith("models--")), "")
    return folder.removeprefix("models--").replace("--", "/") if "snapshots" in path.parts else ""


def _probe_file(path: Path, size: int) -> tuple[str, str]:
    """(model id, sha256 of the directory text) of a `.ninfer` file that is as long as its directory says."""
    with path.open("rb") as file:
        head = file.read(16)
        if len(head) < 16 or head[:6] != _MAGIC[:6]:
            raise FramingError("this is not a .ninfer file (its first bytes are not NINFER)")
        if head[:8] != _MAGIC:
            raise FramingError(f"framing revision {head[7]} is not readable; this version reads revision {_MAGIC[7]}")
        length = int.from_bytes(head[8:], "little")
        if not 0 < length <= min(size - 16, _DIRECTORY_CAP):
            raise FramingError(f"the directory claims {length:,} bytes in a file of {size:,}: cut short or damaged")
        text = file.read(length)
    directory = _json_object(text, "the directory")
    start = -(-(16 + length) // _ALIGNMENT) * _ALIGNMENT
    try:
        last = max(int(item["offset"]) + int(item["bytes"]) for item in directory["objects"])
        model_id = str(directory["model_id"])
    except (KeyError, TypeError, ValueError) as error:
        raise DirectoryError(f"the directory is not well formed: {error!r}") from None
    if start + last > size:
        raise GeometryError(f"unfinished: {size:,} of {start + last:,} bytes are there")
    return model_id, hashlib.sha256(text).hexdigest()


def _probe_directory(path: Path) -> tuple[str, str]:
    """(model id, sha256 of the manifest) of an artifact folder that holds all files of its manifest in full."""
    text = (path / MANIFEST).read_bytes()
    manifest = _json_object(text, MANIFEST)
    if manifest.get("format") != _MANIFEST_FORM:
        raise FramingError(f"{MANIFEST} does not describe a model artifact")
    if manifest.get("version") != _MANIFEST_VERSION:
        raise UnknownIdentityError(
            f"its version is {manifest.get('version')!r}; this ninfer reads version {_MANIFEST_VERSION}"
        )
    try:
        files = {str(name): int(item["bytes"]) for name, item in manifest["files"].items()}
        model_id = str(manifest["model_id"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DirectoryError(f"{MANIFEST} is not well formed: {error!r}") from None
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            raise GeometryError(f"unfinished: {name} is missing")
        if file.stat().st_size != size:
            raise GeometryError(f"unfinished or damaged: {name} has {file.stat().st_size:,} of {size:,} bytes")
    return model_id, hashlib.sha256(text).hexdigest()


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DirectoryError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DirectoryError(f"{what} is not a JSON object")
    return value
