"""Which vocabulary rows the reduced draft head holds, and the token counts that decide it.

The draft head proposes tokens that the full head then checks, so this choice changes speed, never output. Ids are kept
in descending frequency: the first m rows are the best smaller head.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import ConvertError

# A few entries that tell the Qwen3.6 vocabulary, for which `data/` holds a ranking, from any other: id -> entry.
_KNOWN = {11: ",", 13: ".", 198: "\u010a", 220: "\u0120", 271: "\u010a\u010a", 279: "\u0120the"}
_KNOWN_ENTRIES = 248044
RANKING = "qwen3_6_token_ranking.bin"


def select(counts: torch.Tensor, rows: int, forced: Iterable[int] = ()) -> torch.Tensor:
    """Choose the rows of a draft head.

    Math: order ids by count, descending, equal counts by id; take the first `rows - |forced|` ids that are not forced;
    append the forced ids, ascending; sort the result by count, descending and stable.

    Args:
        counts: int64 `[ids]`, one count for every id that is a token; padding rows are no candidates.
        rows: how many ids to take.
        forced: ids taken whatever their count: the special tokens.

    Returns:
        int32 `[rows]`.

    Raises:
        ConvertError: more rows than ids, more forced ids than rows, or a forced id outside the counts.
    """
    must = sorted(set(forced))
    if not len(must) <= rows <= counts.numel() or (must and not 0 <= must[0] <= must[-1] < counts.numel()):
        raise ConvertError(
            f"a draft head of {rows} rows cannot be chosen from {counts.numel()} ids, {len(must)} of them special"
        )
    order = torch.argsort(counts, descending=True, stable=True)
    free = order[~torch.isin(order, torch.tensor(must, dtype=order.dtype))][: rows - len(must)]
    chosen = torch.cat((free, torch.tensor(must, dtype=order.dtype)))
    return chosen[torch.argsort(counts[chosen], descending=True, stable=True)].to(torch.int32)


def vocabulary(resources: Mapping[str, bytes]) -> tuple[int, tuple[int, ...], bool]:
    """What the tokenizer files say about ids.

    Returns:
        Number of ids that are tokens; the special ids, ascending; whether this is the Qwen3.6 vocabulary.

    Raises:
        ConvertError: the tokenizer files are missing or not of the expected form.
    """
    try:
        tokenizer = json.loads(resources["tokenizer.json"])
        entries: dict[str, int] = tokenizer["model"]["vocab"]
        added = {int(item["id"]): bool(item.get("special")) for item in tokenizer.get("added_tokens", [])}
        table = json.loads(resources.get("tokenizer_config.json", b"{}")).get("added_tokens_decoder", {})
        added |= {int(i): bool(item.get("special")) for i, item in table.items()}
        count = max([*entries.values(), *added]) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(f"tokenizer.json or tokenizer_config.json cannot be read: {error!r}") from None
    known = len(entries) == _KNOWN_ENTRIES and all(entries.get(entry) == i for i, entry in _KNOWN.items())
    return count, tuple(sorted(i for i, special in added.items() if special)), known


def load_counts(source: Any, ids: int) -> torch.Tensor:
    """Token counts from a file or an array.

    Args:
        source: an array or tensor `[n]` or `[r, n]` (the first row is the total); a path to `.npy`, to JSON (a list, or
            an object id -> count), or to raw little-endian int64 values.
        ids: how many ids are tokens; counts of later ids (padding rows) are dropped.

    Returns:
        int64 `[ids]`; missing ids count 0.

    Raises:
        ConvertError: not readable as counts, or negative.
    """
    try:
        if isinstance(source, str | os.PathLike):
            source = _read_counts(Path(source), ids)
        values = torch.as_tensor(np.asarray(source))
        if values.is_floating_point() or values.dtype == torch.bool:
            raise ConvertError(f"token counts must be integers; found {values.dtype}")
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConvertError):
            raise
        raise ConvertError(f"token counts cannot be read: {error}") from None
    values = values[0] if values.dim() == 2 else values
    if values.dim() != 1 or not values.numel() or int(values.min()) < 0:
        raise ConvertError(f"token counts must be one row of numbers, 0 or more; found shape {list(values.shape)}")
    out = torch.zeros(ids, dtype=torch.int64)
    n = min(ids, values.numel())
    out[:n] = values[:n]
    return out


def _read_counts(path: Path, ids: int) -> Any:
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    if path.suffix != ".json":
        raw = np.fromfile(path, dtype="<i8")
        rows = 6 if raw.size and raw.size % 6 == 0 and raw.size // 6 >= ids else 1
        return raw.reshape(rows, -1)
    root = json.loads(path.read_text())
    if isinstance(root, dict):
        out = np.zeros(ids, dtype=np.int64)
        for key, count in root.items():
            if 0 <= int(key) < ids:
                out[int(key)] = count
        return out
    return np.asarray(root)


def default_counts(ids: int) -> torch.Tensor:
    """The shipped ranking of the Qwen3.6 vocabulary as counts: int64 `[ids]`, higher is more frequent.

    `data/README.md` says how it was made and how much text it covers.
    """
    packed = files("ninfer_core").joinpath("data", RANKING).read_bytes()
    ranking = unpack_ranking(packed)
    out = torch.zeros(ids, dtype=torch.int64)
    out[ranking] = torch.arange(ranking.numel(), 0, -1)
    return out


def pack_ranking(ids: np.ndarray) -> bytes:
    """A ranking as bytes: low, middle and high bytes of the ids in three runs, compressed."""
    words = ids.astype("<u4").view(np.uint8).reshape(-1, 4)
    return zlib.compress(np.ascontiguousarray(words[:, :3].T).tobytes(), 9)


def unpack_ranking(packed: bytes) -> torch.Tensor:
    """The ids of `pack_ranking`, int64, most frequent first."""
    planes = np.frombuffer(zlib.decompress(packed), dtype=np.uint8).reshape(3, -1).astype(np.int64)
    return torch.from_numpy(planes[0] | planes[1] << 8 | planes[2] << 16)
