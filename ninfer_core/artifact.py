"""Model artifacts: open, read, verify and write, as a `.ninfer` file or as a folder of safetensors shards.

The folder form holds

    manifest.json                        format version, model_id, every object and every file with size and SHA-256
    config.json                          the checkpoint's configuration
    tokenizer.json, chat_template.jinja, ...   the frontend files
    model-00001-of-0000N.safetensors     grouped objects as their exact payload bytes (U8), the rest in its own dtype

Object names, shapes and payload bytes are the same in both forms. Three levels of checks: structure (always, on open),
inventory (on open, unless only inspecting), content (`Artifact.verify`, reads everything). Opening does not import
torch, so that a model can be described at once; reading tensors does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .config import PUBLISHED, ModelConfig, config_from_dict
from .container import check_plain_name, parse_json, read_directory, read_safetensors
from .errors import ContentError, GeometryError, InventoryError, UnknownIdentityError
from .files import SourceFile, Stamp
from .formats import payload_bytes
from .inventory import FRONTEND, TOKEN_IDS, check_inventory, default_recipe, inventory, published_inventories
from .manifest import CONFIG, MANIFEST, MAX_SHARD, manifest_json, read_manifest, shard_header, shard_plan, stored_as

if TYPE_CHECKING:
    import torch

REQUIRED_FRONTEND = FRONTEND[:4]
PREFIX = "frontend/"

PUBLISHED_FILES = {
    17_495_365_888: "74fac75f3a6b7ab7b52e08c36969c7a33a8ba23465910eccd72d195adb497127",
    22_373_184_256: "9e8378398d2b789a77224b5110c7590adbbc6fd4accd139b918157b2b9da7163",
    22_783_246_080: "5194407dd6d3092b8c2f81ce41e014b50ca0d6f1ba4e5d8c1492b8652bfa267f",
}
"""Size -> SHA-256 of the published `.ninfer` files."""

PUBLISHED_RESOURCES = {
    "tokenizer.json": "5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42",
    "tokenizer_config.json": "5186f0defcd7f232382c7f0aebcd2252d073bb921ab240e407b7ae8745d2b29b",
    "chat_template.jinja": "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",
    "generation_config.json": "e70c136c1b78ddc1fb0905bac8e733a4dc448d4f852a5dd75143fffc70be550e",
    "preprocessor_config.json": "27225450ac9c6529872ee1924fcb0962ff5634834f817040f444118116f4e516",
    "video_preprocessor_config.json": "7768af27c1fafa9cc9011c1dc20067e03f8915e03b63504550e11d5066986d13",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: its logical shape, format name and stored size in bytes."""

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `Artifact.verify` read. `published`: a `.ninfer` file equal to a published one, byte for byte."""

    files: dict[str, str]  # file name -> SHA-256
    tensors: int
    published: bool


@dataclass(frozen=True, slots=True)
class _Span:
    file: str
    start: int
    nbytes: int


class _Resources(Mapping[str, bytes]):
    """Frontend files by name, read when asked for."""

    def __init__(self, artifact: Artifact, spans: Mapping[str, _Span]) -> None:
        self._artifact, self._spans = artifact, spans

    def __getitem__(self, name: str) -> bytes:
        span = self._spans[name]
        return self._artifact._file(span.file).read(span.start, span.nbytes) if span.nbytes else b""

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


class Artifact:
    """An opened artifact. A file that changes after it was opened is noticed when it is read.

    Attributes:
        path: the file or folder.
        model_id: the model the objects belong to.
        config: its configuration; parts the artifact lacks (vision, MTP) are absent here too.
        tensors: name -> `TensorInfo`, in file order.
        resources: frontend file name -> bytes, read on access.
        recipe, encoder: how the folder form was made; empty for a `.ninfer` file, which does not say.
    """

    def __init__(
        self,
        path: Path,
        model_id: str,
        tensors: Mapping[str, TensorInfo],
        spans: Mapping[str, _Span],
        resources: Mapping[str, _Span],
    ) -> None:
        self.path, self.model_id, self.tensors = path, model_id, tensors
        self.recipe = self.encoder = ""
        self.resources: Mapping[str, bytes] = _Resources(self, resources)
        self._config: ModelConfig | None = None
        self._spans, self._resource_spans = spans, resources
        self._digests: dict[str, tuple[int, str]] = {}  # folder form: file -> (bytes, SHA-256)
        self._files: dict[str, SourceFile] = {}
        names = {span.file for span in (*spans.values(), *resources.values())}
        self._stamps = {name: Stamp.of(self.path / name) for name in names}

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, inspect: bool = False) -> Artifact:
        """Open a `.ninfer` file or an artifact folder and check its structure and inventory.

        Args:
            path: the file or folder.
            inspect: check the structure only, so that the objects of an unknown model can be listed.

        Raises:
            FramingError: not an artifact, or cut off.
            DirectoryError, GeometryError: its directory is damaged.
            UnknownIdentityError: an unknown model, format or a newer version.
            InventoryError: objects or frontend files are missing, unexpected or different.
            ContentError: the draft head's token ids are repeated or out of range.
            OSError: a file cannot be read.
        """
        path = Path(path)
        artifact = _open_folder(path) if path.is_dir() else _open_file(path)
        if not inspect:
            _bind(artifact)
        return artifact

    @property
    def config(self) -> ModelConfig:
        """The model's configuration.

        Raises:
            UnknownIdentityError: opened with `inspect` and the model is unknown.
        """
        if self._config is None:
            raise UnknownIdentityError(f"{self.path}: no configuration is known for model_id {self.model_id!r}")
        return self._config

    @property
    def form(self) -> str:
        """`ninfer` (one file) or `safetensors` (a folder)."""
        return "safetensors" if self._digests else "ninfer"

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def _file(self, name: str) -> SourceFile:
        if name not in self._files:
            self._files[name] = SourceFile(self.path / name, self._stamps[name])
        return self._files[name]

    def extent(self, name: str) -> tuple[SourceFile, int]:
        """The file that holds a tensor, and where in it the tensor's stored bytes start."""
        span = self._spans[name]
        return self._file(span.file), span.start

    def digests(self) -> dict[SourceFile, str]:
        """The SHA-256 that each file with tensors must have.

        Raises:
            ContentError: none is known, because this is a `.ninfer` file that was not published.
        """
        if self.form == "safetensors":
            shards = dict.fromkeys(span.file for span in self._spans.values())
            return {self._file(name): self._digests[name][1] for name in shards}
        size = self._stamps[""].size
        if size not in PUBLISHED_FILES:
            raise ContentError(
                f"{self.path} has {size:,} bytes, the size of no published file, and a .ninfer file holds no digest of "
                "its own; load it without verification"
            )
        return {self._file(""): PUBLISHED_FILES[size]}

    def payload(self, name: str) -> torch.Tensor:
        """Stored bytes of a tensor, uint8 `[nbytes]`.

        Raises:
            ContentError, GeometryError: the file was changed or cut off after it was opened.
        """
        import torch

        span = self._spans[name]
        out = torch.empty(span.nbytes, dtype=torch.uint8)
        self._file(span.file).read_into(span.start, out.numpy().data)
        return out

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor decoded to `dtype` (default fp32) in its logical shape (I32 stays int32)."""
        import torch

        from . import quant

        info = self.tensors[name]
        return quant.decode(self.payload(name), info.format, info.shape, dtype or torch.float32)

    def resource(self, name: str) -> bytes:
        """A frontend file, by its name without folder.

        Raises:
            InventoryError: the artifact does not hold it.
        """
        if name not in self._resource_spans:
            raise InventoryError(f"{self.path} has no {name}; it holds {', '.join(self._resource_spans) or 'no files'}")
        return self.resources[name]

    def verify(
        self, *, published: bool = False, progress: Callable[[str, int, int], None] | None = None
    ) -> VerifyReport:
        """Read everything: digests of all files and the content of every tensor.

        Args:
            published: demand a published `.ninfer` file: digest of the file and of each frontend file.
            progress: called with (object name, bytes done, bytes in all).

        Raises:
            ContentError: a digest differs or a stored value violates its format; names the file or object.
        """
        import torch

        from . import quant

        files = self._verify_digests(published)
        official = self.form == "ninfer" and files[self.path.name] in PUBLISHED_FILES.values()
        done, total = 0, self.nbytes
        for name, info in self.tensors.items():
            payload = self.payload(name)
            quant.check(payload, info.format, info.shape, name)
            if official and name.endswith(("/a_log", "/dt_bias")) and bool((payload.view(torch.int32) & 0xFFFF).any()):
                raise ContentError(f"{name}: a value was not widened from BF16")
            done += info.nbytes
            if progress:
                progress(name, done, total)
        return VerifyReport(files, len(self.tensors), official)

    def _verify_digests(self, published: bool) -> dict[str, str]:
        if self.form == "safetensors":
            if published:
                raise ContentError(f"{self.path} is a folder; only .ninfer files are published")
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter
                found = dict(
                    zip(self._digests, pool.map(sha256_file, map(self.path.joinpath, self._digests)), strict=True)
                )
            for name, (_, digest) in self._digests.items():
                if found[name] != digest:
                    raise ContentError(
                        f"{self.path / name} is damaged or was edited: SHA-256 {found[name]}, manifest {digest}"
                    )
            return found
        digest = sha256_file(self.path)
        if published:
            wanted = PUBLISHED_FILES.get(self.path.stat().st_size)
            if digest != wanted:
                raise ContentError(f"{self.path} is not a published file: SHA-256 {digest}, expected {wanted}")
            for name, wanted in PUBLISHED_RESOURCES.items():
                found_digest = hashlib.sha256(self.resource(name)).hexdigest()
                if found_digest != wanted:
                    raise ContentError(f"{PREFIX}{name}: SHA-256 {found_digest}, expected {wanted}")
        return {self.path.name: digest}

    def close(self) -> None:
        """Close the files; reading on opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Artifact:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sha256_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- opening ---------------------------------------------------------------------------------------------------------


def _open_file(path: Path) -> Artifact:
    directory = read_directory(path)
    tensors, spans, resources = {}, {}, {}
    for r in directory.records:
        span = _Span("", directory.payload_start + r.offset, r.nbytes)
        if r.is_resource:
            resources[r.name.removeprefix(PREFIX)] = span
        else:
            tensors[r.name], spans[r.name] = TensorInfo(r.name, r.shape, r.format, r.nbytes), span
    return Artifact(path, directory.model_id, tensors, spans, resources)


def _open_folder(path: Path) -> Artifact:
    manifest = read_manifest(path)
    sizes = {name: (path / name).stat().st_size if (path / name).is_file() else -1 for name in manifest["files"]}
    for name, item in manifest["files"].items():
        if sizes[name] < 0:
            raise InventoryError(f"{path / name} is missing; the manifest lists it")
        if sizes[name] != item["bytes"]:
            what = "cut off" if sizes[name] < item["bytes"] else "too long"
            raise GeometryError(f"{path / name} is {what}: {sizes[name]:,} bytes, the manifest says {item['bytes']:,}")
    headers = {s: read_safetensors(path / s) for s in dict.fromkeys(o["shard"] for o in manifest["objects"].values())}
    tensors, spans = {}, {}
    for name, item in manifest["objects"].items():
        shape, fmt, shard = tuple(item["shape"]), item["format"], item["shard"]
        entry = headers[shard].get(name)
        if entry is None:
            raise InventoryError(f"{path / shard} does not hold {name!r}, which the manifest places there")
        nbytes = payload_bytes(fmt, shape)
        if (entry.dtype, entry.shape, entry.nbytes) != (*stored_as(fmt, shape, nbytes), nbytes):
            raise GeometryError(
                f"{path / shard}: {name} is stored as {entry.dtype} {list(entry.shape)} with {entry.nbytes:,} bytes; "
                f"{fmt} {list(shape)} takes {nbytes:,}"
            )
        tensors[name], spans[name] = TensorInfo(name, shape, fmt, nbytes), _Span(shard, entry.start, nbytes)
    resources = {name: _Span(name, 0, sizes[name]) for name in FRONTEND if name in sizes}
    artifact = Artifact(path, manifest["model_id"], tensors, spans, resources)
    artifact.recipe, artifact.encoder = str(manifest.get("recipe", "")), str(manifest.get("encoder", ""))
    artifact._digests = {name: (item["bytes"], item["sha256"]) for name, item in manifest["files"].items()}
    return artifact


# --- binding to a model ----------------------------------------------------------------------------------------------


def _bind(artifact: Artifact) -> None:
    """Level 2: the objects are exactly those of the model."""
    found = {name: (t.shape, t.format) for name, t in artifact.tensors.items()}
    if artifact.form == "ninfer":
        variants = published_inventories(artifact.model_id)
        with_dflash = len(variants) > 1 and any(name.startswith("dflash/") for name in found)
        check_inventory(found, variants[1 if with_dflash else 0], exact=True)
        artifact._config = PUBLISHED[artifact.model_id]
        required: tuple[str, ...] = FRONTEND
    else:
        artifact._config = _bind_folder(artifact, found)
        required = REQUIRED_FRONTEND + (FRONTEND[4:5] if artifact._config.vision else ())
    missing = [name for name in required if name not in artifact.resources]
    if missing:
        raise InventoryError(
            f"{artifact.path}: {', '.join(missing)} missing; a model cannot run without its frontend files"
        )
    _check_draft_ids(artifact)


def _bind_folder(artifact: Artifact, found: Mapping[str, tuple[tuple[int, ...], str]]) -> ModelConfig:
    file = artifact.path / CONFIG
    if CONFIG not in artifact._digests:
        raise InventoryError(f"{file} is missing from the manifest; the model's shape is unknown without it")
    config = config_from_dict(parse_json(file.read_bytes(), str(file)), artifact.model_id)
    has = {part: any(name.startswith(part) for name in found) for part in ("mtp/", "vision/", "dflash/")}
    if not has["vision/"]:
        config = replace(config, vision=None)
    config = replace(config, mtp_num_hidden_layers=int(has["mtp/"]))
    recipe = default_recipe(config)
    draft = found.get("text/draft_head_token_ids", ((0,), ""))[0]
    recipe = replace(recipe, draft_rows=draft[0] if draft else 0)
    check_inventory(found, inventory(config, recipe, dflash=has["dflash/"]), exact=False)
    return config


def _check_draft_ids(artifact: Artifact) -> None:
    if "text/draft_head_token_ids" not in artifact.tensors:
        return
    file, start = artifact.extent("text/draft_head_token_ids")
    ids = array("i", file.read(start, artifact.tensors["text/draft_head_token_ids"].nbytes))
    if sys.byteorder == "big":
        ids.byteswap()
    limit = TOKEN_IDS.get(artifact.model_id, artifact.config.vocab_size)
    if min(ids) < 0 or max(ids) >= limit:
        raise ContentError(f"text/draft_head_token_ids: ids {min(ids)} to {max(ids)} found, 0 to {limit - 1} allowed")
    if len(set(ids)) != len(ids):
        raise ContentError("text/draft_head_token_ids: some token ids are repeated")


# --- writing ---------------------------------------------------------------------------------------------------------


def write_artifact(
    path: str | os.PathLike[str],
    config_json: Mapping[str, Any],
    resources: Mapping[str, bytes],
    objects: Iterable[tuple[str, str, Iterable[int], torch.Tensor]],
    *,
    model_id: str = "",
    recipe: str = "",
    encoder: str = "maxabs",
    max_shard: int = MAX_SHARD,
    overwrite: bool = False,
) -> Path:
    """Write the folder form from payloads in memory (or mapped). Appears under its name only when complete.

    Args:
        path: the folder to make.
        config_json: contents of `config.json`.
        resources: frontend file name -> bytes.
        objects: (name, format, shape, payload uint8) in file order.
        model_id: default: `config_json["model_id"]`.
        recipe, encoder: recorded in the manifest.
        max_shard: bytes of tensors in one shard.
        overwrite: replace an artifact that is already there.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder exists and `overwrite` is off.
        GeometryError: a payload's size does not fit its format and shape.
        InventoryError: no model_id.
    """
    path = Path(path)
    if path.exists() and not (overwrite and (path / MANIFEST).is_file()):
        raise FileExistsError(f"{path} already exists; choose another folder or remove it")
    model_id = model_id or str(config_json.get("model_id", ""))
    if not model_id:
        raise InventoryError("config.json has no model_id and none was given")
    tensors, payloads = {}, {}
    for name, fmt, shape, payload in objects:
        tensors[name], payloads[name] = (tuple(shape), fmt), payload
        if payload.numel() != payload_bytes(fmt, tensors[name][0]):
            wanted = payload_bytes(fmt, tensors[name][0])
            raise GeometryError(
                f"{name}: {fmt} {list(tensors[name][0])} takes {wanted:,} bytes, got {payload.numel():,}"
            )
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, data in {CONFIG: (json.dumps(config_json, indent=1) + "\n").encode(), **resources}.items():
        (partial / check_plain_name(name, "resources")).write_bytes(data)
    shards = shard_plan(tensors, max_shard)
    for shard, names in shards.items():
        _, prefix, _ = shard_header(tensors, names)
        with open(partial / shard, "wb") as file:
            file.write(prefix)
            for name in names:
                file.write(payloads[name].contiguous().numpy().data)
    files = {f.name: (f.stat().st_size, sha256_file(f)) for f in sorted(partial.iterdir())}
    (partial / MANIFEST).write_bytes(manifest_json(model_id, recipe, encoder, tensors, shards, files))
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    return path
