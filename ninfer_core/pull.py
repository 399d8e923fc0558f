"""`pull`: from a model's name to verified files on this machine, or to an artifact converted on the way.

from ninfer_core.pull import pull

pull("qwen3.6:27b", progress=lambda status: print(status.phase, status.done, status.total))
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from . import hub, library, remote, store
from .download import MARGIN, Download, check_space, received
from .errors import (
    ArtifactError,
    DownloadError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestCancelledError,
)
from .lock import ProcessLock
from .remote import RemoteFile, Transfer
from .streamed import StreamedShards

CONFIG, MANIFEST = "config.json", store.MANIFEST
LOCK = ".ninfer-pull.lock"
_FRONTEND = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
             "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
             "video_preprocessor_config.json", "vocab.json", "merges.txt")  # fmt: skip
_MAGIC = b"NINFER\x00\x01"


@dataclass(frozen=True, slots=True)
class Status:
    """How far a pull is. Bytes: `done` of `size` of the current file, `all_done` of `total` of the whole pull.

    `phase` is `manifest`, `waiting` (another process downloads the same model), `download`, `convert` or `install`.
    """

    phase: str
    file: str = ""
    digest: str = ""
    done: int = 0
    size: int = 0
    all_done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pull will do: `files` of `repository` at `commit`, of which `missing` bytes are not here yet."""

    name: str
    repository: str
    commit: str
    files: tuple[RemoteFile, ...]
    folder: Path
    missing: int
    convert: bool = False

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def _ignore(status: Status) -> None:
    return


@dataclass(slots=True)
class Options:
    """How to pull. `source`: a repository in place of the usual one; `revision`: its branch, tag or commit.

    `convert` takes an original checkpoint and makes the artifact here. `progress` gets a `Status` some ten times a
    second; `cancelled` is asked as often. `environ` stands for the process's own environment.
    """

    source: str = ""
    revision: str = ""
    convert: bool = False
    offline: bool = False
    progress: Callable[[Status], None] = _ignore
    cancelled: Callable[[], bool] = lambda: False
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    transfer: Transfer = field(default_factory=Transfer)


def pull(name: str, options: Options | None = None) -> store.ModelEntry:
    """Make the model `name` usable on this machine; a model that is already complete is not asked about again.

    Raises:
        ModelNotFoundError: no known model and no repository of that name.
        InvalidRequestError: the repository holds nothing that can be pulled; says what it holds.
        DownloadError, PermissionDeniedError: the hub refused or failed, or sent wrong bytes.
        DiskSpaceError: checked before the first byte. ArtifactError: the artifact there is of another version.
        RequestCancelledError: `cancelled` said so; what has arrived is kept.
    """
    options = options or Options()
    found = _already_here(name, options)
    if found is not None:
        return found
    options.progress(Status("manifest"))
    source = _ask(name, options)
    with remote.client(source.repository.headers, options.transfer) as session:
        return _Pull(source, session, options).run()


def plan(name: str, options: Options | None = None) -> Plan:
    """What `pull` would do, after asking the hub; downloads the small manifest of a folder artifact and nothing else.

    Raises:
        As `pull`, but for the disk.
    """
    options = options or Options()
    source = _ask(name, options)
    with remote.client(source.repository.headers, options.transfer) as session:
        return _Pull(source, session, options).plan()


def _already_here(name: str, options: Options) -> store.ModelEntry | None:
    if options.source or options.revision or (options.convert and store.canonical(name) != "demo"):
        return None
    try:
        return store.describe(name, options.environ)
    except (ModelNotFoundError, ArtifactError):
        return None


@dataclass(frozen=True, slots=True)
class _Source:
    """A repository, what it is to give, and the known model it is pinned to (None takes what is there)."""

    name: str
    repository: hub.Repository
    revision: str
    pinned: store.KnownModel | None
    convert: bool


def _ask(name: str, options: Options) -> _Source:
    wanted = store.canonical(name)
    known = next((model for model in store.KNOWN if model.name == wanted), None)
    plain = name.strip().removesuffix(":latest")
    repository = options.source or (
        plain if known is None else known.checkpoint if options.convert else known.repository
    )
    if "/" not in repository or repository.startswith((".", "/", "~")):
        near = ", ".join(model.name for model in store.KNOWN if model.repository)
        raise ModelNotFoundError(
            f"there is no model {name!r} to pull; known: {near}; a repository of the hub is named owner/name"
        )
    if options.offline:
        raise DownloadError(f"{name} is not complete on this machine, and --offline forbids to ask {repository} for it")
    found = hub.repository(repository, options.revision or "main", options.environ, options.transfer)
    pinned = known if known and not (options.source or options.revision or options.convert) else None
    return _Source(known.name if known else wanted, found, options.revision or "main", pinned, options.convert)


class _Pull:
    """One pull: files chosen, a lock taken, everything fetched in order, and the result installed."""

    def __init__(self, source: _Source, session: httpx.Client, options: Options) -> None:
        self.source, self.session, self.options = source, session, options
        self.repository = source.repository
        self.place = library.place_for(self.repository.name, self.repository.commit, source.revision, options.environ)
        self._before, self._total = 0, 0

    def run(self) -> store.ModelEntry:
        """Do it."""
        if self.source.convert:
            return self._convert()
        folder = self.place.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with ProcessLock(folder.parent / f".{folder.name}{LOCK}") as lock:
            self._wait_for(lock, self._first_files())
            files = self._files()
            path = self.place.installed(files)
            if path is None:
                library.prune(folder, map(self.place.target, files))
                check_space(folder, self._missing(files))
                folder.mkdir(exist_ok=True)
                self._total = sum(file.size for file in files)
                for file in files:
                    self._fetch(file, self.place.target(file))
                self._status("install")
                path = self.place.install(files)
        entry = store.inspect_path(path)
        if entry.problem:
            raise ArtifactError(f"{self.repository.name} was downloaded, but it is not usable: {entry.problem}")
        return entry

    def plan(self) -> Plan:
        """What is to be done."""
        if self.source.convert:
            files = tuple(self._checkpoint_files())
            return Plan(self.source.name, self.repository.name, self.repository.commit, files,
                        store.models_dir(self.options.environ), sum(f.size for f in files), True)  # fmt: skip
        files = self._files()
        return Plan(
            self.source.name,
            self.repository.name,
            self.repository.commit,
            files,
            self.place.folder,
            self._missing(files),
        )

    def _missing(self, files: tuple[RemoteFile, ...]) -> int:
        if self.place.installed(files) is not None:
            return 0
        return sum(file.size - received(self.place.target(file), file) for file in files)

    # which files

    def _first_files(self) -> list[RemoteFile]:
        """What the metadata alone says will be fetched: enough to watch another process at it."""
        listed = self.repository.files
        singles = [file for name, file in listed.items() if name.endswith(".ninfer") and "/" not in name]
        return singles or [file for name, file in listed.items() if name.endswith(".safetensors")]

    def _files(self) -> tuple[RemoteFile, ...]:
        listed, name = self.repository.files, self.repository.name
        if self.source.pinned is not None:
            return (self._pinned(self.source.pinned),)
        if MANIFEST in listed:
            return self._manifest_files(listed[MANIFEST])
        singles = [file for key, file in listed.items() if key.endswith(".ninfer") and "/" not in key]
        if len(singles) == 1:
            self._check_framing(singles[0])
            return (singles[0],)
        if singles:
            names = ", ".join(file.name for file in singles)
            raise InvalidRequestError(
                f"{name} holds several artifacts ({names}); that cannot be told apart by its name"
            )
        if CONFIG in listed and any(key.endswith(".safetensors") for key in listed):
            raise InvalidRequestError(
                f"{name} holds a checkpoint, not an artifact; add --convert to download and quantize it shard by shard"
            )
        raise InvalidRequestError(f"{name} holds no model artifact: neither a .ninfer file nor {MANIFEST}")

    def _pinned(self, known: store.KnownModel) -> RemoteFile:
        """The published file, by the digest that this program knows and not by what the hub says today."""
        found = self.repository.files.get(known.file)
        if found is None:
            raise ModelNotFoundError(f"the repository {known.repository} does not hold {known.file} any more")
        if found.size != known.size or found.sha256 not in ("", known.sha256):
            raise DownloadError(
                f"{known.repository} now holds another {known.file} ({found.size:,} bytes, SHA-256 {found.sha256}) "
                f"than this ninfer knows ({known.size:,} bytes, {known.sha256}): upgrade ninfer, or take what is there "
                f"with --revision {self.source.revision}"
            )
        return RemoteFile(found.url, found.name, known.size, sha256=known.sha256)

    def _check_framing(self, file: RemoteFile) -> None:
        head = remote.read_range(self.session, file, 0, min(16, file.size), self.options.transfer)
        if head[:6] != _MAGIC[:6]:
            raise ArtifactError(f"{file.name} of {self.repository.name} is not a .ninfer file")
        if head[:8] != _MAGIC:
            raise ArtifactError(
                f"{file.name} of {self.repository.name} has framing revision {head[7]}, this ninfer reads revision "
                f"{_MAGIC[7]}: upgrade with pip install --upgrade ninfer, or pull another --revision"
            )

    def _manifest_files(self, manifest: RemoteFile) -> tuple[RemoteFile, ...]:
        """The manifest's files, with its digests where the hub has none; a difference between the two is an error."""
        from .manifest import read_manifest  # with torch behind it, which a published file does not need

        with tempfile.TemporaryDirectory(prefix="ninfer-") as scratch:
            copy = Path(scratch) / MANIFEST
            Download(manifest, copy, self.session, self.options.transfer, cancelled=self.options.cancelled).run()
            listed = read_manifest(Path(scratch))["files"]
        files = [manifest]
        for name, item in listed.items():
            found = self.repository.files.get(name)
            if found is None:
                raise ArtifactError(f"{self.repository.name} lacks {name}, which its {MANIFEST} lists")
            if found.size not in (0, item["bytes"]) or found.sha256 not in ("", item["sha256"]):
                raise ArtifactError(
                    f"{name} in {self.repository.name} is not the file its {MANIFEST} describes: {found.size:,} bytes "
                    f"where {item['bytes']:,} are listed, or another digest"
                )
            files.append(RemoteFile(found.url, name, item["bytes"], sha256=item["sha256"]))
        return tuple(files)

    # fetching

    def _status(self, phase: str, file: RemoteFile | None = None, done: int = 0) -> None:
        name, digest, size = (file.name, file.digest, file.size) if file else ("", "", 0)
        self.options.progress(Status(phase, name, digest, done, size, self._before + done, self._total))

    def _fetch(self, file: RemoteFile, target: Path) -> None:
        def progress(done: int, size: int) -> None:
            self._status("download", file, done)

        transfer = self.options.transfer
        Download(file, target, self.session, transfer, progress, self.options.cancelled).run()
        self._before += file.size

    def _wait_for(self, lock: ProcessLock, files: list[RemoteFile]) -> None:
        """Take the lock; while another process has it, tell how far that one is."""
        done = 0
        while not lock.acquire():
            if self.options.cancelled():
                raise RequestCancelledError(
                    f"gave up waiting for process {lock.holder()}, which downloads the same model"
                )
            # The parts are gone from where they were once the other has installed them.
            done = max(done, sum(received(self.place.target(file), file) for file in files))
            self.options.progress(
                Status("waiting", f"process {lock.holder()}", all_done=done, total=sum(file.size for file in files))
            )
            time.sleep(0.1)

    # converting

    def _checkpoint_files(self) -> list[RemoteFile]:
        listed = self.repository.files
        shards = [file for name, file in listed.items() if name.endswith(".safetensors") and "/" not in name]
        if CONFIG not in listed or not shards:
            raise InvalidRequestError(
                f"{self.repository.name} holds no checkpoint to convert: {CONFIG} and safetensors files are needed"
            )
        return [listed[name] for name in _FRONTEND if name in listed] + shards

    def _convert(self) -> store.ModelEntry:
        """Fetch a shard, convert what it holds, drop it: the checkpoint is never here as a whole."""
        from .convert import convert

        models = store.models_dir(self.options.environ)
        files = self._checkpoint_files()
        name = self.repository.name.rpartition("/")[2].casefold()
        destination, work = models / name, models / f"{name}.checkpoint"
        if destination.exists():
            return store.describe(str(destination), self.options.environ)
        work.mkdir(parents=True, exist_ok=True)
        shards = [file for file in files if file.name.endswith(".safetensors")]
        with ProcessLock(models / f".{name}{LOCK}") as lock:
            self._wait_for(lock, [])
            if destination.exists():
                return store.describe(str(destination), self.options.environ)
            check_space(work, max(file.size for file in shards), MARGIN)
            for file in files:
                if file not in shards:
                    self._fetch(file, work / file.name)
            self._before, self._total = 0, 0
            streamed = StreamedShards(
                work, shards, self.session, self.options.transfer,
                lambda file, done: self._status("download", file, done), self.options.cancelled,
            )  # fmt: skip
            streamed.prepare()

            def progress(name: str, done: int, total: int) -> None:
                if self.options.cancelled():
                    raise RequestCancelledError("the conversion was cancelled; the same command goes on from here")
                self.options.progress(Status("convert", name, "", done, total, done, total))

            convert(work, destination, progress=progress, shards=streamed)
            shutil.rmtree(work)
        return store.describe(str(destination), self.options.environ)
