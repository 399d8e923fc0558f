"""Scores of the training model on held-out words: exact answers, draft acceptance, bits per byte, free-running ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from . import tasks
from .images import caption_task, marks, pixels, video_task
from .model import Model
from .packing import CELL, Batch, Packer
from .sumtasks import sum99_task, sum999_task

MAKERS: dict[str, Callable[[Any], tasks.Task]] = {
    "tool": tasks.tool_task, "parallel": tasks.parallel_task, "no_tool": tasks.no_tool_task, "result": tasks.result_task, "chain": tasks.chain_task,
    "memory": tasks.memory_task, "json": tasks.json_task, "repeat": tasks.repeat_task, "sum": tasks.sum_task, "fact": tasks.fact_task,
    "talk": tasks.talk_task, "unknown": tasks.unknown_task, "phrase": lambda draw: tasks.phrase_task(draw, {}), "choice": tasks.choice_task,
    "integer": tasks.integer_task, "foreign": tasks.foreign_task, "nested": tasks.nested_task, "sum99": sum99_task, "sum999": sum999_task,
    "long": lambda draw: tasks.needle_task(draw, None), "caption": caption_task, "video": video_task,
}  # fmt: skip


def to_device(batch: Batch, device: Any) -> dict[str, Any]:
    """A batch as tensors; images are drawn on the device."""
    out: dict[str, Any] = {
        "ids": torch.from_numpy(batch.ids).long(), "weights": torch.from_numpy(batch.weights).float(),
        "segments": torch.from_numpy(batch.segments).int(), "positions": torch.from_numpy(batch.positions), "places": torch.from_numpy(batch.places),
    }  # fmt: skip
    out = {key: value.to(device, non_blocking=True) for key, value in out.items()}
    out["pixels"] = pixels(batch.scenes, *batch.size, device=device) if batch.scenes else None
    found = marks(batch.scenes, *batch.size, CELL)
    out["marks"] = torch.tensor(found, dtype=torch.long).reshape(-1, 3).to(device, non_blocking=True)
    return out


def embeddings(model: Model, data: dict[str, Any], features: torch.Tensor | None = None) -> torch.Tensor:
    """Input embeddings of a batch, image features in place; `features` [n, cells, hidden] if they are known."""
    if data["pixels"] is None or model.visual is None:
        return model.embed(data["ids"])
    features = model.visual(data["pixels"]).float() if features is None else features
    return model.embed(data["ids"], features.reshape(-1, model.c.hidden), data["places"])


@torch.no_grad()
def predict(model: Model, batch: Batch, device: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """Greedy ids of the trunk [rows, T] and of three draft depths, teacher-forced; T is the length less 4."""
    data = to_device(batch, device)
    T = batch.ids.shape[1] - 4
    x = embeddings(model, data)
    hidden, _, _ = model.trunk(x[:, :T], data["segments"][:, :T], data["positions"][:, :T])
    drafts, _ = model.drafts(hidden, x, data["segments"], data["positions"])

    def greedy(h: torch.Tensor) -> np.ndarray:
        rows = [F.linear(part.to(model.lm_head.weight.dtype), model.lm_head.weight).argmax(-1) for part in h.split(8)]
        return torch.cat(rows).cpu().numpy()

    return greedy(hidden), [greedy(d) for d in drafts]


def rounds(trunk: np.ndarray, drafts: list[np.ndarray], start: int, end: int) -> tuple[int, int, list[int], list[int]]:
    """Plays the engine's draft rounds over answer tokens [start, end): (accepted, offered, accepted and tried by depth).

    The anchor is chosen by the trunk; depth k (0-based) of the row before it judges the token k+1 after it.
    """
    anchor, accepted, offered = start, 0, 0
    by_depth, tried = [0, 0, 0], [0, 0, 0]
    while anchor < end - 1:
        run = 0
        offered += min(len(drafts), end - 1 - anchor)
        for k, draft in enumerate(drafts):
            if anchor + k + 1 >= end:
                break
            tried[k] += 1
            if draft[anchor - 1] != trunk[anchor + k]:
                break
            by_depth[k] += 1
            run += 1
        accepted += run
        anchor += run + 1
    return accepted, offered, by_depth, tried


def score(
    model: Model,
    packer: Packer,
    counts: dict[str, int],
    device: Any,
    thinking: bool | None = None,
    size: tuple[int, int] = (128, 128),
) -> dict[str, Any]:
    """Exact answers and draft acceptance per kind of task; questions about images apart by what they ask for."""
    documents = []
    for kind, count in counts.items():
        while count:
            task = packer.generator.task(MAKERS[kind], thinking)
            document = packer.document(task, size)
            if task.fixed and len(document.ids) <= packer.length - 4:
                document.kind = f"{kind} {task.detail}".strip()
                documents.append(document)
                count -= 1
    result: dict[str, dict[str, Any]] = {}
    while documents:
        length, packer.length = packer.length, packer.length - 4
        batch = packer.batch(documents, size)
        packer.length = length
        for name in ("ids", "weights", "segments", "positions"):
            array = getattr(batch, name)
            tail = [(0, 0), (0, 4), *[(0, 0)] * (array.ndim - 2)]
            setattr(batch, name, np.pad(array, tail, constant_values=-2 if name == "segments" else 0))
        batch.places = batch.places // (length - 4) * length + batch.places % (length - 4)
        trunk, drafts = predict(model, batch, device)
        for kind, row, start, end in batch.spans:
            entry = result.setdefault(
                kind,
                {
                    "count": 0,
                    "exact": 0,
                    "tokens": 0,
                    "right": 0,
                    "accepted": 0,
                    "offered": 0,
                    "by_depth": [0, 0, 0],
                    "tried": [0, 0, 0],
                },
            )
            same = trunk[row, start - 1 : end - 1] == batch.ids[row, start:end]
            accepted, offered, by_depth, tried = rounds(trunk[row], [d[row] for d in drafts], start, end)
            entry["count"] += 1
            entry["exact"] += int(same.all())
            entry["tokens"] += int(same.size)
            entry["right"] += int(same.sum())
            entry["accepted"] += accepted
            entry["offered"] += offered
            entry["by_depth"] = [a + b for a, b in zip(entry["by_depth"], by_depth, strict=True)]
            entry["tried"] = [a + b for a, b in zip(entry["tried"], tried, strict=True)]
    return result


def table(result: dict[str, Any]) -> str:
    """The scores as text."""
    lines = [f"{'task':10} {'exact':>12} {'tokens':>8} {'accepted/offered':>18}  by depth"]
    for kind, e in result.items():
        depth = " ".join(f"{a / max(t, 1):.3f}" for a, t in zip(e["by_depth"], e["tried"], strict=True))
        lines.append(
            f"{kind:10} {e['exact']:5}/{e['count']:<5} {e['exact'] / e['count']:.3f} {e['right'] / e['tokens']:.4f} {e['accepted']:7}/{e['offered']:<7} {e['accepted'] / max(1, e['offered']):.3f}  {depth}"
        )
    accepted, offered = (sum(e[key] for e in result.values()) for key in ("accepted", "offered"))
    lines.append(f"{'all':10} drafts accepted {accepted}/{offered} = {accepted / max(1, offered):.3f}")
    return "\n".join(lines)


@torch.no_grad()
def bits_per_byte(
    model: Model, tokens: np.ndarray, tokenizer: Tokenizer, device: Any, rows: int, length: int
) -> tuple[float, int]:
    """Bits per UTF-8 byte of held-out text in windows of `length`, and the bytes counted; first tokens are not scored."""
    windows = min(len(tokens) // length, rows)
    ids = np.zeros((rows, length), np.int64)
    ids[:windows] = tokens[: windows * length].astype(np.int64).reshape(windows, length)
    x = torch.from_numpy(ids).to(device)
    positions = torch.arange(length, device=device, dtype=torch.int32)[None, :, None].expand(rows, length, 3)
    hidden, _, _ = model.trunk(model.embed(x), torch.zeros_like(x, dtype=torch.int32), positions)
    nats = 0.0
    for row in range(windows):
        logits = F.linear(hidden[row, :-1].to(model.lm_head.weight.dtype), model.lm_head.weight).float()
        nats += float(F.cross_entropy(logits, x[row, 1:], reduction="sum"))
    size = sum(len(tokenizer.decode(row[1:].tolist(), skip_special_tokens=False).encode()) for row in ids[:windows])
    return nats / np.log(2) / size, size


@torch.no_grad()
def generate(
    model: Model, prompts: list[list[int]], stop: int, device: Any, rows: int, length: int, limit: int = 256
) -> list[list[int]]:
    """Greedy answers without a cache: every step runs the whole window of `length` tokens."""
    out: list[list[int]] = []
    for first in range(0, len(prompts), rows):
        group = [p for p in prompts[first : first + rows] if len(p) + limit <= length]
        ids = torch.zeros(rows, length, dtype=torch.long, device=device)
        for i, prompt in enumerate(group):
            ids[i, : len(prompt)] = torch.tensor(prompt, device=device)
        ends = torch.tensor([len(p) for p in group] + [1] * (rows - len(group)), device=device)
        starts = ends.clone()
        open_rows = torch.tensor([True] * len(group) + [False] * (rows - len(group)), device=device)
        positions = torch.arange(length, device=device, dtype=torch.int32)[None, :, None].expand(rows, length, 3)
        segment = torch.zeros(rows, length, dtype=torch.int32, device=device)
        index = torch.arange(rows, device=device)
        for _ in range(limit):
            hidden, _, _ = model.trunk(model.embed(ids), segment, positions)
            token = F.linear(hidden[index, ends - 1].to(model.lm_head.weight.dtype), model.lm_head.weight).argmax(-1)
            ids[index[open_rows], ends[open_rows]] = token[open_rows]
            ends = ends + open_rows
            open_rows = open_rows & (token != stop)
            if not bool(open_rows.any()):
                break
        out += [ids[i, starts[i] : ends[i]].tolist() for i in range(len(group))]
    return out
