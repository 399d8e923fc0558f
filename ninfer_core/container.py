"""Byte containers: the `.ninfer` frame and its directory, safetensors headers, plain file names.

    0            8             16                16+J            P = up(16+J, 4096)             end of file
    | magic      | J (u64 LE)  | JSON, J bytes    | padding      | payload: object bytes and gaps |

Everything here is structure: sizes, names, bounds. Whether the objects make up a model is decided in `artifact.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from . import formats
from .errors import DirectoryError, FramingError, GeometryError, UnknownIdentityError

MAGIC = b"NINFER\x00\x01"
PAYLOAD_ALIGN, TENSOR_ALIGN, MAX_RANK = 4096, 256, 16
MAX_DIRECTORY = 64 << 20  # bytes; the largest known directory has 174 KB
_LAYOUTS = {"contiguous-le-v1": False, "row-split-k128-v1": True}  # name -> holds grouped formats
MAX_NAME = 255  # bytes of a file name, as file systems have it
_ENCODING = "raw-bytes-v1"
_TENSOR_KEYS = {"name", "kind", "shape", "format", "layout", "offset", "bytes"}
_RESOURCE_KEYS = {"name", "kind", "encoding", "offset", "bytes"}
SAFETENSORS_DTYPES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}


@dataclass(frozen=True, slots=True)
class Record:
    """One object of a `.ninfer` directory. `format` is empty for a resource; `offset` counts from the payload start."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int
    nbytes: int

    @property
    def is_resource(self) -> bool:
        """Whether this is a raw file instead of a tensor."""
        return not self.format


@dataclass(frozen=True, slots=True)
class Directory:
    """The checked directory of a `.ninfer` file; `payload_start` is P."""

    model_id: str
    records: tuple[Record, ...]
    payload_start: int

    @property
    def file_bytes(self) -> int:
        """Size of a file that ends at its last object."""
        return self.payload_start + self.records[-1].offset + self.records[-1].nbytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def parse_json(text: bytes, what: str) -> Any:
    """Parse JSON that someone else wrote: no doubled members, no NaN, no surprise from depth or digits.

    Raises:
        DirectoryError: the text is not UTF-8 or not such JSON.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise DirectoryError(f"{what}: member {twice!r} is given twice in one object")
        return out

    def constant(word: str) -> NoReturn:
        raise DirectoryError(f"{what}: {word} is not JSON")

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except DirectoryError:
        raise
    except (ValueError, RecursionError) as error:
        raise DirectoryError(f"{what} is not valid JSON: {error}") from None


# --- the .ninfer frame -----------------------------------------------------------------------------------------------


def read_directory(path: str | os.PathLike[str]) -> Directory:
    """Read and check the frame and directory of a `.ninfer` file, without touching the payload.

    Raises:
        FramingError: not such a file, or cut off inside the directory.
        DirectoryError, UnknownIdentityError, GeometryError: see `parse_directory`.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(16)
        if prefix[:8] != MAGIC:
            raise FramingError(f"{path} is not a .ninfer file: {_describe(prefix, size)}")
        if len(prefix) < 16:
            raise FramingError(f"{path} is cut off: {size} bytes, not even its 16-byte prefix")
        length = int.from_bytes(prefix[8:], "little")
        if not 1 <= length <= min(MAX_DIRECTORY, size - 16):
            raise FramingError(
                f"{path}: the directory claims {length:,} bytes; the file has {size:,}, the limit is {MAX_DIRECTORY:,}"
            )
        start = formats.up(16 + length, PAYLOAD_ALIGN)
        if size < start:
            raise FramingError(f"{path} is cut off: {size:,} bytes, the payload starts at {start:,}")
        text = file.read(length)
    return parse_directory(text, start, size - start)


def _describe(prefix: bytes, size: int) -> str:
    if size == 0:
        return "it is empty"
    if prefix[:6] == MAGIC[:6]:
        return f"its framing revision is {prefix[7:8].hex() or 'missing'}, this version reads 01"
    if prefix[:4] == b"GGUF":
        return "it is a GGUF file"
    if prefix[8:9] == b"{":
        return "it looks like a safetensors file; pass the folder that holds it"
    return f"it starts with {prefix[:8].hex(' ')}, expected {MAGIC.hex(' ')}"


def parse_directory(text: bytes, payload_start: int, payload_size: int) -> Directory:
    """Check the JSON directory against the payload size.

    Raises:
        DirectoryError: JSON or schema wrong.
        UnknownIdentityError: a format, layout or encoding name that is not registered.
        GeometryError: sizes, alignment, order or bounds wrong.
    """
    root = parse_json(text, "the directory")
    if not isinstance(root, dict) or set(root) != {"model_id", "objects"}:
        found = sorted(root) if isinstance(root, dict) else type(root).__name__
        raise DirectoryError(f"the directory must have the members model_id and objects only; found {found}")
    model_id, objects = root["model_id"], root["objects"]
    if not isinstance(model_id, str) or not model_id:
        raise DirectoryError(f"model_id must be a non-empty string; found {model_id!r}")
    if not isinstance(objects, list) or not objects:
        raise DirectoryError("objects must be a non-empty array")
    records, names, cursor = [], set(), 0
    for index, item in enumerate(objects):
        record = _record(item, index)
        if record.name in names:
            raise DirectoryError(f"object name {record.name!r} is given twice")
        names.add(record.name)
        records.append(record)
    for record in records:
        _check_span(record, cursor, payload_size)
        cursor = record.offset + record.nbytes
    return Directory(model_id, tuple(records), payload_start)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _record(item: Any, index: int) -> Record:
    where = f"object {index}"
    if not isinstance(item, dict):
        raise DirectoryError(f"{where} must be an object; found {type(item).__name__}")
    kind, name = item.get("kind"), item.get("name")
    if kind not in ("tensor", "resource"):
        raise DirectoryError(f"{where}: kind must be 'tensor' or 'resource'; found {kind!r}")
    keys = _TENSOR_KEYS if kind == "tensor" else _RESOURCE_KEYS
    if set(item) != keys:
        raise DirectoryError(f"{where}: a {kind} has the members {sorted(keys)}; found {sorted(item)}")
    if not isinstance(name, str) or not name:
        raise DirectoryError(f"{where}: name must be a non-empty string; found {name!r}")
    offset, nbytes = item["offset"], item["bytes"]
    if not _is_int(offset) or offset < 0:
        raise DirectoryError(f"{name}: offset must be an integer, 0 or more; found {offset!r}")
    if not _is_int(nbytes) or nbytes < 1:
        raise DirectoryError(f"{name}: bytes must be an integer, 1 or more; found {nbytes!r}")
    if kind == "resource":
        if item["encoding"] != _ENCODING:
            raise UnknownIdentityError(f"{name}: unknown encoding {item['encoding']!r}; known: {_ENCODING}")
        return Record(name, (), "", offset, nbytes)
    shape, fmt, layout = item["shape"], item["format"], item["layout"]
    if not isinstance(shape, list) or not all(_is_int(d) and d > 0 for d in shape):
        raise DirectoryError(f"{name}: shape must be an array of positive integers; found {shape!r}")
    if not isinstance(fmt, str) or not isinstance(layout, str):
        raise DirectoryError(f"{name}: format and layout must be strings; found {fmt!r}, {layout!r}")
    grouped = formats.format_of(fmt).grouped
    if layout not in _LAYOUTS:
        raise UnknownIdentityError(f"{name}: unknown layout {layout!r}; known: {', '.join(_LAYOUTS)}")
    if _LAYOUTS[layout] != grouped:
        raise GeometryError(f"{name}: format {fmt} cannot be stored as {layout}")
    if not grouped and len(shape) > MAX_RANK:
        raise GeometryError(f"{name}: rank {len(shape)}, the limit is {MAX_RANK}")
    return Record(name, tuple(shape), fmt, offset, nbytes)


def _check_span(record: Record, cursor: int, payload_size: int) -> None:
    if not record.is_resource:
        size = formats.payload_bytes(record.format, record.shape)
        if size != record.nbytes:
            raise GeometryError(
                f"{record.name}: {record.format} {list(record.shape)} takes {size:,} bytes, "
                f"the directory says {record.nbytes:,}"
            )
        if record.offset % TENSOR_ALIGN:
            raise GeometryError(f"{record.name}: offset {record.offset:,} is not a multiple of {TENSOR_ALIGN}")
    if record.offset < cursor:
        raise GeometryError(
            f"{record.name}: offset {record.offset:,} lies before the end {cursor:,} of its predecessor"
        )
    end = record.offset + record.nbytes
    if end > payload_size:
        raise GeometryError(f"{record.name} ends at byte {end:,} of a payload of {payload_size:,}: the file is cut off")


def plan_directory(
    model_id: str, resources: Mapping[str, int], tensors: Mapping[str, tuple[Sequence[int], str]]
) -> tuple[Directory, bytes]:
    """Lay a new `.ninfer` file out: resources first, then tensors, each at the first permitted offset.

    Args:
        model_id: stored in the directory.
        resources: name -> length in bytes.
        tensors: name -> (shape, format).

    Returns:
        The directory and the bytes `[0, P)` of the file.
    """
    cursor, records, objects = 0, [], []
    for name, nbytes in resources.items():
        records.append(Record(name, (), "", cursor, nbytes))
        objects.append({"name": name, "kind": "resource", "encoding": _ENCODING, "offset": cursor, "bytes": nbytes})
        cursor += nbytes
    for name, (shape, fmt) in tensors.items():
        cursor, nbytes = formats.up(cursor, TENSOR_ALIGN), formats.payload_bytes(fmt, shape)
        layout = next(key for key, grouped in _LAYOUTS.items() if grouped == formats.format_of(fmt).grouped)
        records.append(Record(name, tuple(shape), fmt, cursor, nbytes))
        objects.append(
            {"name": name, "kind": "tensor", "shape": list(shape), "format": fmt, "layout": layout}
            | {"offset": cursor, "bytes": nbytes}
        )
        cursor += nbytes
    root = {"model_id": model_id, "objects": objects}
    text = json.dumps(root, separators=(",", ":"), ensure_ascii=False).encode()
    start = formats.up(16 + len(text), PAYLOAD_ALIGN)
    prefix = (MAGIC + len(text).to_bytes(8, "little") + text).ljust(start, b"\0")
    return Directory(model_id, tuple(records), start), prefix


# --- safetensors -----------------------------------------------------------------------------------------------------


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """Read the header of a safetensors file and check every span against the file size.

    Raises:
        FramingError: not a safetensors file, or cut off inside the header.
        DirectoryError: the header's JSON or schema is wrong.
        GeometryError: a tensor's bytes do not fit its shape, or lie outside the file (cut off).
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(MAX_DIRECTORY, size - 8):
            raise FramingError(f"{path} is not a safetensors file or is cut off ({size:,} bytes)")
        header = parse_json(file.read(length), f"the header of {path}")
    if not isinstance(header, dict):
        raise DirectoryError(f"{path}: the safetensors header is not an object")
    out = {}
    for name, item in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = item["dtype"], item["shape"], item["data_offsets"]
            fine = isinstance(dtype, str) and all(_is_int(n) and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            fine = False
        if not fine:
            raise DirectoryError(f"{path}: tensor {name!r} has a damaged header entry")
        if dtype in SAFETENSORS_DTYPES:
            count = SAFETENSORS_DTYPES[dtype]
            for d in shape:
                count *= d
            if count != end - begin:
                raise GeometryError(
                    f"{path}: {name} {dtype} {shape} takes {count:,} bytes, the header says {end - begin:,}"
                )
        if end > size - 8 - length or end < begin:
            raise GeometryError(
                f"{path}: {name} ends at byte {8 + length + end:,}, the file has {size:,}: it is cut off"
            )
        out[name] = Entry(dtype, tuple(shape), 8 + length + begin, end - begin)
    return out


def plan_safetensors(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> tuple[dict[str, Entry], bytes]:
    """Lay a safetensors file out.

    Args:
        tensors: name -> (dtype, shape, bytes), in file order.

    Returns:
        Entries and the bytes before the first tensor, padded with spaces so that the data starts at a multiple of 256.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    cursor = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [cursor, cursor + nbytes]}
        cursor += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    start = formats.up(8 + len(text), TENSOR_ALIGN)
    prefix = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    entries = {
        name: Entry(dtype, tuple(shape), start + header[name]["data_offsets"][0], nbytes)
        for name, (dtype, shape, nbytes) in tensors.items()
    }
    return entries, prefix


# --- file names -----------------------------------------------------------------------------------------------------


def _fits(name: str) -> bool:
    """Whether a file system takes this file name."""
    try:
        return "\0" not in name and len(name.encode()) <= MAX_NAME
    except UnicodeEncodeError:
        return False


def check_plain_name(name: Any, what: str) -> str:
    """A file name without a folder part.

    Raises:
        DirectoryError: the name could point outside the artifact's folder, or no file system takes it.
    """
    if isinstance(name, str) and not _fits(name):
        raise DirectoryError(
            f"{what}: the file name {name[:40]!r} has {len(name)} characters; it must be UTF-8 text of at most "
            f"{MAX_NAME} bytes"
        )
    if not isinstance(name, str) or not name or name in (".", "..") or Path(name).name != name or "\\" in name:
        raise DirectoryError(f"{what}: {name!r} is not a plain file name")
    return name
