"""The manifest and shard layout of the folder form of an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import formats
from .container import check_plain_name, parse_json, plan_safetensors
from .errors import DirectoryError, FramingError, UnknownIdentityError

MANIFEST, CONFIG = "manifest.json", "config.json"
FORM, VERSION = "ninfer-artifact", 1
MAX_SHARD = 2 << 30  # bytes of tensors in one shard

_DIRECT_DTYPES = {formats.BF16: "BF16", formats.FP32: "F32", formats.I32: "I32"}


def stored_as(fmt: str, shape: tuple[int, ...], nbytes: int) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of an object inside a safetensors shard."""
    return ("U8", (nbytes,)) if formats.format_of(fmt).grouped else (_DIRECT_DTYPES[fmt], shape)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check the manifest of an artifact folder.

    Raises:
        FramingError: the folder is not an artifact.
        UnknownIdentityError: another version, or an unknown weight format.
        DirectoryError: damaged JSON or schema.
    """
    file = path / MANIFEST
    if not file.is_file():
        hint = "; convert a checkpoint with `ninfer convert`" if (path / CONFIG).is_file() else ""
        raise FramingError(f"{path} holds no {MANIFEST}: it is not a model artifact{hint}")
    manifest = parse_json(file.read_bytes(), str(file))
    if not isinstance(manifest, dict) or manifest.get("format") != FORM:
        raise FramingError(f"{file} does not describe a model artifact (format must be {FORM!r})")
    version = manifest.get("version")
    if version != VERSION or type(version) is not int:
        advice = "upgrade ninfer" if isinstance(version, int) and version > VERSION else "convert the model again"
        raise UnknownIdentityError(
            f"{file}: version {version!r} found, this ninfer supports version {VERSION}; {advice}"
        )
    _check_manifest(manifest, str(file))
    return manifest


def _check_manifest(manifest: dict[str, Any], where: str) -> None:
    objects, files = manifest.get("objects"), manifest.get("files")
    if not isinstance(manifest.get("model_id"), str) or not manifest["model_id"]:
        raise DirectoryError(f"{where}: model_id must be a non-empty string; found {manifest.get('model_id')!r}")
    if not isinstance(objects, dict) or not objects or not isinstance(files, dict):
        raise DirectoryError(f"{where}: objects and files must be non-empty objects")
    for name, item in files.items():
        check_plain_name(name, where)
        size, digest = (item.get("bytes"), item.get("sha256")) if isinstance(item, dict) else (None, None)
        if not isinstance(size, int) or isinstance(size, bool) or size < 0 or not isinstance(digest, str):
            raise DirectoryError(f"{where}: file {name!r} needs bytes and sha256; found {item!r}")
    for name, item in objects.items():
        shape = item.get("shape") if isinstance(item, dict) else None
        if not isinstance(shape, list) or not all(
            isinstance(d, int) and not isinstance(d, bool) and d > 0 for d in shape
        ):
            raise DirectoryError(f"{where}: object {name!r} needs a shape of positive integers; found {item!r}")
        if not isinstance(item.get("shard"), str) or item["shard"] not in files:
            raise DirectoryError(f"{where}: object {name!r} lies in {item.get('shard')!r}, which is not a listed file")
        formats.format_of(item.get("format"))


def shard_plan(tensors: Mapping[str, tuple[tuple[int, ...], str]], limit: int = MAX_SHARD) -> dict[str, list[str]]:
    """Distribute objects over shards of at most `limit` bytes, unless one alone exceeds it: file -> object names."""
    groups: list[list[str]] = []
    room = 0
    for name, (shape, fmt) in tensors.items():
        nbytes = formats.payload_bytes(fmt, shape)
        if not groups or nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= nbytes
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def shard_header(
    tensors: Mapping[str, tuple[tuple[int, ...], str]], names: Iterable[str]
) -> tuple[dict[str, int], bytes, int]:
    """Where the objects of one shard go: name -> start, the bytes before the first, and the size of the file."""
    stored = {}
    for name in names:
        shape, fmt = tensors[name]
        nbytes = formats.payload_bytes(fmt, shape)
        stored[name] = (*stored_as(fmt, shape, nbytes), nbytes)
    entries, prefix = plan_safetensors(stored)
    return {n: e.start for n, e in entries.items()}, prefix, max(e.start + e.nbytes for e in entries.values())


def manifest_json(
    model_id: str,
    recipe: str,
    encoder: str,
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    shards: Mapping[str, Iterable[str]],
    files: Mapping[str, tuple[int, str]],
) -> bytes:
    """The manifest: `shards` file -> object names, `files` file -> (bytes, SHA-256)."""
    where = {name: shard for shard, names in shards.items() for name in names}
    root = {
        "format": FORM,
        "version": VERSION,
        "model_id": model_id,
        "recipe": recipe,
        "encoder": encoder,
        "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()},
        "objects": {n: {"shape": list(s), "format": f, "shard": where[n]} for n, (s, f) in tensors.items()},
    }
    return (json.dumps(root, indent=1) + "\n").encode()
