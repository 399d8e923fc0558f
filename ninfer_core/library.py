"""Changes to what is installed: where downloads go and how they become models, further names, and removal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import store
from .errors import InvalidRequestError
from .remote import RemoteFile

_NAME = re.compile(r"[a-z0-9][a-z0-9._:-]{0,99}")
_UNFINISHED = (".part", ".journal", ".partial", ".checkpoint", ".incomplete")
DAY = 86_400.0


class Place(ABC):
    """Where the files of one repository at one commit go: a folder for what arrives, and the final form."""

    def __init__(self, repository: str, commit: str, revision: str, environ: Mapping[str, str]) -> None:
        self.repository, self.commit, self.revision = repository, commit, revision
        self.environ = environ

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The folder that receives files; the lock and the disk check are about it."""

    @abstractmethod
    def target(self, file: RemoteFile) -> Path:
        """Where a verified file lies."""

    @abstractmethod
    def installed(self, files: Sequence[RemoteFile]) -> Path | None:
        """The artifact if exactly these files have been made a model already."""

    @abstractmethod
    def install(self, files: Sequence[RemoteFile]) -> Path:
        """Make the verified files a model; the path of its artifact."""


class HubCache(Place):
    """The cache that all hub tools share: blobs by digest, snapshots of links to them, references to commits."""

    @property
    def root(self) -> Path:
        """The repository's folder in the cache."""
        return store.hub_dir(self.environ) / ("models--" + self.repository.replace("/", "--"))

    @property
    def folder(self) -> Path:
        """The blobs."""
        return self.root / "blobs"

    def target(self, file: RemoteFile) -> Path:
        """A blob is named by its digest."""
        return self.folder / file.digest

    def installed(self, files: Sequence[RemoteFile]) -> Path | None:
        """All files of the snapshot are there; the references are pointed at it."""
        snapshot = self.root / "snapshots" / self.commit
        if not all(_has_size(snapshot / file.name, file) for file in files):
            return None
        return self.install(files)

    def install(self, files: Sequence[RemoteFile]) -> Path:
        """Link the snapshot's files, the manifest last, then point the references at it."""
        snapshot = self.root / "snapshots" / self.commit
        for file in sorted(files, key=lambda file: file.name == store.MANIFEST):
            link = snapshot / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.unlink(missing_ok=True)
                _link(self.target(file), link)
        names = {"ninfer"} if re.fullmatch(r"[0-9a-f]{40}", self.revision) else {"ninfer", self.revision}
        for name in names:
            _write_whole(self.root / "refs" / name, self.commit)
        return _artifact_in(snapshot, files)


class ModelsFolder(Place):
    """The project's own folder of artifacts: one file, or one folder that appears when it is complete."""

    @property
    def _single(self) -> Path:
        return store.models_dir(self.environ)

    @property
    def name(self) -> str:
        """The folder's name, which is the model's."""
        return self.repository.rpartition("/")[2].casefold()

    @property
    def folder(self) -> Path:
        """A folder of its own until the model is complete."""
        return self._single / (self.name + ".partial")

    def target(self, file: RemoteFile) -> Path:
        """Under its own name."""
        return self.folder / file.name

    def installed(self, files: Sequence[RemoteFile]) -> Path | None:
        """What is there has the digest of what would be fetched; a folder's manifest vouches for the rest."""
        final = self._final(files)
        first = next((file for file in files if file.name == store.MANIFEST), files[0])
        if not all(_has_size(final if final.is_file() else final / file.name, file) for file in files):
            return None
        hasher = first.hasher()
        with open(final if final.is_file() else final / first.name, "rb") as stored:
            while block := stored.read(8 << 20):
                hasher.update(block)
        return final if hasher.hexdigest() == first.digest else None

    def _final(self, files: Sequence[RemoteFile]) -> Path:
        single = len(files) == 1 and files[0].name.endswith(".ninfer")
        return self._single / (files[0].name if single else self.name)

    def install(self, files: Sequence[RemoteFile]) -> Path:
        """Move the file, or rename the folder."""
        final = self._final(files)
        if len(files) == 1 and files[0].name.endswith(".ninfer"):
            os.replace(self.target(files[0]), final)
            shutil.rmtree(self.folder, ignore_errors=True)
            return final
        listed = {file.name for file in files}
        for path in self.folder.iterdir():
            if path.name not in listed:
                path.unlink()  # of an earlier revision, whose download was cut short
        if final.exists():
            shutil.rmtree(_out_of_sight(final))
        self.folder.rename(final)
        return final


def place_for(repository: str, commit: str, revision: str, environ: Mapping[str, str]) -> Place:
    """Downloads go to `NINFER_MODELS` if it is set, else to the cache that all hub tools share."""
    kind = ModelsFolder if environ.get("NINFER_MODELS") else HubCache
    return kind(repository, commit, revision, environ)


def _has_size(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size


def _artifact_in(snapshot: Path, files: Sequence[RemoteFile]) -> Path:
    single = next((file.name for file in files if file.name.endswith(".ninfer")), "")
    return snapshot / single if single else snapshot


def _link(blob: Path, link: Path) -> None:
    """A relative link, as other tools make it; where the system has none, the file itself moves."""
    try:
        os.symlink(os.path.relpath(blob, link.parent), link)
    except OSError:
        os.replace(blob, link)


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _out_of_sight(path: Path) -> Path:
    """Rename what is about to be deleted, so that no half of it is ever found."""
    hidden = path.with_name(f".removed-{os.getpid()}-{path.name}")
    path.rename(hidden)
    return hidden


# --- what interrupted downloads leave behind --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leftover:
    """An unfinished file or folder: bytes on the disk, and seconds since anything in it changed."""

    path: Path
    size: int
    age: float


def leftovers(environ: Mapping[str, str] | None = None) -> list[Leftover]:
    """Everything unfinished in the models folder and, of downloads made here, in the hub cache."""
    env = os.environ if environ is None else environ
    folders = [store.models_dir(env)]
    if not env.get("NINFER_MODELS") and store.hub_dir(env).is_dir():
        folders += sorted(store.hub_dir(env).glob("models--*/blobs"))
    found = []
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            # Other tools end their own unfinished files in .incomplete; whether those still grow is theirs to know.
            if path.suffix in _UNFINISHED[:-1] or path.name.startswith(".removed-"):
                found.append(_leftover(path))
    return found


def _leftover(path: Path) -> Leftover:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    size, changed = 0, 0.0
    for file in files:
        with contextlib.suppress(OSError):
            status = file.stat()
            size += getattr(status, "st_blocks", status.st_size // 512) * 512
            changed = max(changed, status.st_mtime)
    return Leftover(path, size, max(0.0, time.time() - changed))


def prune(folder: Path, keep: Iterable[Path]) -> None:
    """Delete parts in a download folder that nothing continues: not among `keep`, and older than a day."""
    kept = {f"{path.name}{suffix}" for path in keep for suffix in (".part", ".journal")}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.suffix in (".part", ".journal") and path.name not in kept and _leftover(path).age > DAY:
            path.unlink(missing_ok=True)


# --- further names and removal ----------------------------------------------------------------------------------------


def add_alias(source: str, name: str, environ: Mapping[str, str] | None = None) -> store.ModelEntry:
    """Give an installed model a further name; nothing is copied. The entry under the new name.

    Raises:
        ModelNotFoundError, ArtifactError: there is no such model, or it is not usable.
        InvalidRequestError: the name cannot be one, or another model has it.
    """
    entry = store.describe(source, environ)
    plain = name.strip().casefold().removesuffix(":latest")
    if not _NAME.fullmatch(plain):
        raise InvalidRequestError(
            f"{name!r} cannot be a model's name: letters, digits and . _ : - are allowed, up to 100 of them",
            param="destination",
        )
    aliases = store.aliases(environ)
    taken = {item.name for item in store.survey(environ) if not item.alias_of} | {m.name for m in store.KNOWN}
    if store.canonical(plain) in taken:
        raise InvalidRequestError(f"{name!r} is the name of a model already; choose another", param="destination")
    target = entry.alias_of or entry.name
    if not any(item.name == target for item in store.installed(environ)):
        raise InvalidRequestError(
            f"{source} is known by its path alone; put it into {store.models_dir(environ)} to give it names",
            param="source",
        )
    _write_aliases({**aliases, plain: target}, environ)
    return store.describe(plain, environ)


def _write_aliases(aliases: Mapping[str, str], environ: Mapping[str, str] | None) -> None:
    _write_whole(store.models_dir(environ) / store.ALIASES, json.dumps(aliases, indent=1, sort_keys=True) + "\n")


@dataclass(frozen=True, slots=True)
class Removal:
    """What `remove` did: bytes freed, and the further names that went with the model."""

    name: str
    freed: int
    aliases: tuple[str, ...] = ()


def remove(name: str, environ: Mapping[str, str] | None = None) -> Removal:
    """Delete an installed model, or only the name if `ninfer cp` made it. Broken and unfinished ones can go too.

    Raises:
        ModelNotFoundError: nothing of that name is installed.
        InvalidRequestError: it ships with the program, or it is a path outside of the store.
    """
    wanted = store.canonical(name)
    entries = store.survey(environ)
    entry = next((item for item in entries if item.name == wanted), None)
    entry = entry or next((item for item in entries if item.repository.casefold() == wanted), None)
    if entry is None:
        entry = store.describe(name, environ)  # a path, or an error that says what is installed
        raise InvalidRequestError(f"{entry.path} is not in the store; delete it yourself", param="model")
    aliases = store.aliases(environ)
    if entry.alias_of:
        _write_aliases({key: value for key, value in aliases.items() if key != entry.name}, environ)
        return Removal(entry.name, 0)
    if entry.path == store.demo_path():
        raise InvalidRequestError("the demo model ships with the program and is not removed", param="model")
    freed = _remove_snapshots(entry.path) if entry.repository else _remove_path(entry.path)
    dropped = tuple(key for key, value in aliases.items() if value == entry.name)
    if dropped and entry.name not in {item.name for item in store.installed(environ)}:
        _write_aliases({key: value for key, value in aliases.items() if key not in dropped}, environ)
    else:
        dropped = ()
    return Removal(entry.name, freed, dropped)


def _remove_path(path: Path) -> int:
    freed = _leftover(path).size
    hidden = _out_of_sight(path)
    shutil.rmtree(hidden) if hidden.is_dir() else hidden.unlink()
    return freed


def _remove_snapshots(path: Path) -> int:
    """Delete every cached revision of the artifact, its references, and the blobs that no other snapshot uses."""
    snapshots = next(parent for parent in path.parents if parent.name == "snapshots")
    root, before = snapshots.parent, _leftover(snapshots.parent).size
    for snapshot in [item for item in snapshots.iterdir() if any(store.candidates(item))]:
        shutil.rmtree(_out_of_sight(snapshot))
        for reference in [item for item in (root / "refs").rglob("*") if item.is_file()]:
            if reference.read_text().strip() == snapshot.name:
                reference.unlink()
    if not any(snapshots.iterdir()):
        shutil.rmtree(_out_of_sight(root))
        return before
    used = {item.resolve() for item in snapshots.rglob("*") if item.is_symlink()}
    for blob in (root / "blobs").iterdir():
        if blob.resolve() not in used and blob.suffix not in _UNFINISHED:
            blob.unlink()
    return before - _leftover(root).size
