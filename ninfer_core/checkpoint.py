"""Source checkpoints: a folder of Hugging Face safetensors files, read in row blocks.

Rows are read into fresh buffers instead of through a memory map, so the process never holds more of a checkpoint than
the rows it works on. Names are normalised once, here; the rest of the converter knows one spelling.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import torch

from .container import Entry, parse_json, read_safetensors
from .errors import ArtifactError, ConvertError
from .inventory import FRONTEND

INDEX = "model.safetensors.index.json"
FP8_BLOCK = 128  # rows and columns that share one inverse scale in block-FP8 checkpoints

# Spellings of the same tensors in the wild, most specific first.
_PREFIXES = (
    (re.compile(r"^(model\.)?language_model\.model\.language_model\."), "model.language_model."),
    (re.compile(r"^(model\.)?language_model\.model\."), "model.language_model."),
    (re.compile(r"^(model\.)?language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^model\.lm_head\."), "lm_head."),
    (re.compile(r"^(model\.)?language_model\.mtp\."), "mtp."),
    (re.compile(r"^model\.mtp\."), "mtp."),
    (re.compile(r"^language_model\."), "model.language_model."),
    (re.compile(r"^(layers|embed_tokens|norm)\."), r"model.language_model.\1."),
    (re.compile(r"^model\.(layers|embed_tokens|norm)\."), r"model.language_model.\1."),
    (re.compile(r"^visual\."), "model.visual."),
)
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")  # derived values some exports add
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}


def normal_name(name: str) -> str:
    """The name of a tensor as the original checkpoints spell it."""
    for pattern, replacement in _PREFIXES:
        renamed, hits = pattern.subn(replacement, name)
        if hits:
            return renamed
    return name


class Checkpoint:
    """An opened checkpoint folder.

    Attributes:
        path: the folder.
        config: `config.json`, parsed.
        tensors: normalised name -> (file name, entry), scales of FP8 weights left out.

    Raises:
        ConvertError: no usable checkpoint: config or shards missing, cut off, or a dtype that cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ConvertError(f"{self.path} is not a folder; pass the folder that holds config.json and the shards")
        self.config: dict[str, Any] = self._json("config.json")
        self._check_quantization()
        self.tensors: dict[str, tuple[str, Entry]] = {}
        self.scales: dict[str, tuple[str, Entry]] = {}
        self._scale_values: dict[str, torch.Tensor] = {}
        for file, names in self._files().items():
            self._add(file, names)

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.is_file():
            raise ConvertError(f"{file} is missing; a checkpoint folder needs it")
        try:
            root = parse_json(file.read_bytes(), str(file))
        except ArtifactError as error:
            raise ConvertError(str(error)) from None
        if not isinstance(root, dict):
            raise ConvertError(f"{file} does not hold a JSON object")
        return root

    def _check_quantization(self) -> None:
        q = self.config.get("quantization_config")
        if not q:
            return
        method, block = q.get("quant_method"), q.get("weight_block_size")
        if method != "fp8" or block != [FP8_BLOCK, FP8_BLOCK]:
            raise ConvertError(
                f"the checkpoint is quantized with {method!r}, block {block}; the converter reads BF16 and FP8 with "
                f"blocks of [{FP8_BLOCK}, {FP8_BLOCK}] only: use the original BF16 checkpoint"
            )

    def _files(self) -> dict[str, set[str] | None]:
        """Shard file -> names to take from it; None takes all."""
        present = sorted(f.name for f in self.path.glob("*.safetensors"))
        if not (self.path / INDEX).is_file():
            if not present:
                raise ConvertError(f"{self.path} holds no safetensors files")
            return dict.fromkeys(present)
        weight_map = self._json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ConvertError(f"{self.path / INDEX} has no weight_map")
        out: dict[str, set[str] | None] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise ConvertError(f"{self.path / INDEX}: {file!r} is not a plain file name")
            taken = out.setdefault(file, set())
            assert taken is not None
            taken.add(name)
        missing = [file for file in out if file not in present]
        if missing:
            raise ConvertError(f"{len(missing)} of {len(out)} shards are missing from {self.path}, first {missing[0]}")
        for file in present:  # some repositories add a file of MTP weights that the index does not know
            if file not in out:
                names = {n for n in self._header(file) if normal_name(n).startswith("mtp.")}
                out[file] = names - set(weight_map)
        return out

    def _header(self, file: str) -> dict[str, Entry]:
        try:
            return read_safetensors(self.path / file)
        except ArtifactError as error:
            raise ConvertError(str(error)) from None

    def _add(self, file: str, names: set[str] | None) -> None:
        header = self._header(file)
        for name in header if names is None else sorted(names):
            entry = header.get(name)
            if entry is None:
                raise ConvertError(f"{self.path / file} does not hold {name!r}, which {INDEX} places there")
            if _IGNORED.search(name):
                continue
            normal = normal_name(name)
            if normal.endswith("_scale_inv"):
                self.scales[normal] = (file, entry)
                continue
            if entry.dtype not in _DTYPES:
                raise ConvertError(f"{name} is stored as {entry.dtype}; the converter reads {', '.join(_DTYPES)}")
            if normal in self.tensors:
                raise ConvertError(f"two tensors mean {normal!r}; one of them is {name!r} in {file}")
            self.tensors[normal] = (file, entry)

    def files(self) -> dict[str, tuple[int, int]]:
        """Identity of the source: shard -> (bytes, modification time in ns)."""
        names = sorted({file for file, _ in self.tensors.values()})
        stats = {name: (self.path / name).stat() for name in names}
        return {name: (s.st_size, s.st_mtime_ns) for name, s in stats.items()}

    def frontend(self) -> dict[str, bytes]:
        """The frontend files the folder holds, in artifact order; an inline chat template counts as its file."""
        out = {name: (self.path / name).read_bytes() for name in FRONTEND if (self.path / name).is_file()}
        if "chat_template.jinja" not in out:
            for name in ("chat_template.json", "tokenizer_config.json"):
                template = self._json(name).get("chat_template") if (self.path / name).is_file() else None
                if isinstance(template, str):
                    out["chat_template.jinja"] = template.encode()
                    break
        return {name: out[name] for name in FRONTEND if name in out}

    def scale_name(self, name: str) -> str:
        """Name of the inverse scales of an FP8 tensor."""
        return name + "_scale_inv"

    def rows(self, name: str, start: int, count: int, columns: int) -> torch.Tensor:
        """Rows of a tensor seen as `[numel / columns, columns]`.

        Returns:
            `[count, columns]` in the stored dtype; FP8 as float32, multiplied by its block scales.
        """
        file, entry = self.tensors[name]
        dtype = _DTYPES[entry.dtype]
        data = self._read(file, entry.start + start * columns * dtype.itemsize, count * columns * dtype.itemsize)
        values = data.view(dtype).view(count, columns)
        return self._unscale(name, values, torch.arange(start, start + count)) if entry.dtype == "F8_E4M3" else values

    def gather(self, name: str, ids: torch.Tensor, columns: int) -> torch.Tensor:
        """Single rows by number, in the order of `ids`; else like `rows`. Reads in file order, neighbours at once."""
        file, entry = self.tensors[name]
        dtype = _DTYPES[entry.dtype]
        width = columns * dtype.itemsize
        order = torch.argsort(ids)
        ascending = ids[order]
        breaks = (ascending.diff() != 1).nonzero()[:, 0] + 1
        data = torch.empty(ids.numel() * width, dtype=torch.uint8)
        view = memoryview(data.numpy().data)
        with open(self.path / file, "rb", buffering=0) as source:
            for a, b in itertools.pairwise([0, *breaks.tolist(), ids.numel()]):
                source.seek(entry.start + int(ascending[a]) * width)
                self._fill(source, view[a * width : b * width])
        values = torch.empty_like(data).view(dtype).view(-1, columns)
        values[order] = data.view(dtype).view(-1, columns)
        return self._unscale(name, values, ids.long()) if entry.dtype == "F8_E4M3" else values

    def _unscale(self, name: str, values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        shape = self.tensors[name][1].shape
        scales = self._scales(name)
        per_matrix, matrix_rows = scales.shape[0] // math.prod(shape[:-2]), shape[-2]
        block = (row // matrix_rows) * per_matrix + (row % matrix_rows) // FP8_BLOCK
        wide = scales[block].repeat_interleave(FP8_BLOCK, dim=1)[:, : values.shape[1]]
        return values.float() * wide

    def _scales(self, name: str) -> torch.Tensor:
        """Inverse scales float32 `[matrices * ceil(rows / 128), ceil(columns / 128)]` of an FP8 tensor."""
        found = self._scale_values.get(name)
        if found is None:
            file, entry = self.scales[self.scale_name(name)]
            raw = self._read(file, entry.start, entry.nbytes).view(_DTYPES[entry.dtype])
            found = raw.view(-1, entry.shape[-1]).float()
            self._scale_values = {name: found}  # tensors are read one after the other: keep the last only
        return found

    def check_scales(self) -> None:
        """Every FP8 tensor has scales of the right shape, and every scale belongs to a tensor.

        Raises:
            ConvertError: names the first one that does not.
        """
        orphans = set(self.scales)
        for name, (_, entry) in self.tensors.items():
            if entry.dtype != "F8_E4M3":
                continue
            scale = self.scale_name(name)
            if scale not in self.scales:
                raise ConvertError(f"{name} is FP8 but {scale} is missing")
            found = self.scales[scale][1]
            wanted = (*entry.shape[:-2], -(-entry.shape[-2] // FP8_BLOCK), -(-entry.shape[-1] // FP8_BLOCK))
            if found.shape != wanted or found.dtype not in ("BF16", "F32"):
                raise ConvertError(f"{scale} is {found.dtype} {list(found.shape)}, expected F32 or BF16 {list(wanted)}")
            orphans.discard(scale)
        if orphans:
            raise ConvertError(f"{min(orphans)} belongs to no FP8 tensor")

    def _read(self, file: str, start: int, nbytes: int) -> torch.Tensor:
        out = torch.empty(nbytes, dtype=torch.uint8)
        with open(self.path / file, "rb", buffering=0) as source:  # opened per read: threads share nothing
            source.seek(start)
            self._fill(source, memoryview(out.numpy().data))
        return out

    def _fill(self, source: io.FileIO, view: memoryview) -> None:
        done = 0
        while done < len(view):
            got = source.readinto(view[done:])
            if not got:
                raise ConvertError(f"{self.path / str(source.name)} became shorter while it was read")
            done += got

    def describe(self) -> str:
        """One line for logs: dtypes and their counts."""
        counts: dict[str, int] = {}
        for _, entry in self.tensors.values():
            counts[entry.dtype] = counts.get(entry.dtype, 0) + 1
        return f"{len(self.tensors)} tensors: {json.dumps(counts)}"
