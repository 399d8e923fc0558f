"""Checkpoint -> artifact: planned and checked first, then streamed object by object in bounded memory, resumable.

Everything is checked before the first byte is written: configuration, presence and shape of every source tensor,
frontend files, token counts, free disk space. Output grows in `<dst>.partial/` and takes its name when it is complete;
an interrupted run leaves that folder behind, which opens nowhere, and the same call continues it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from . import quant, shortlist
from .artifact import PREFIX, REQUIRED_FRONTEND, Artifact, sha256_file
from .checkpoint import Checkpoint
from .config import PUBLISHED, ModelConfig, config_from_dict
from .container import plan_directory
from .errors import ArtifactError, ConvertError, DiskSpaceError
from .inventory import FRONTEND, RECIPES, Inventory, Recipe, default_recipe, draft_rows, inventory
from .manifest import CONFIG, MANIFEST, MAX_SHARD, manifest_json, shard_header, shard_plan
from .sources import MTP, VISION, RowReader, Source, bind

CHUNK_WEIGHTS = 4 << 20  # weights a worker reads, encodes and writes at a time
SYNC_BYTES = 256 << 20  # output is flushed to disk and journaled about this often
JOURNAL, SINGLE = "journal.jsonl", "model.ninfer"
IDS = "text/draft_head_token_ids"
Progress = Callable[[str, int, int], None]


class Shards(Protocol):
    """Brings files of a checkpoint that is not here as a whole; every file must be there with its size and header."""

    def provide(self, files: frozenset[str], later: frozenset[str]) -> None:
        """Return once `files` can be read; what is neither among them nor needed `later` may go."""


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What `convert` did. `resumed` counts objects kept from an interrupted run; `nbytes` is the size of the result."""

    path: Path
    model_id: str
    encoder: str
    objects: int
    resumed: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an object's payload goes: a file of the partial folder and the offset of its first byte."""

    file: str
    offset: int


@dataclass(slots=True)
class _Plan:
    checkpoint: Checkpoint
    config: ModelConfig
    recipe: Recipe
    encoder: str
    objects: Inventory
    sources: dict[str, Source]
    draft_ids: torch.Tensor | None
    places: dict[str, _Place]
    heads: dict[str, tuple[bytes, int]]  # file -> (bytes before the payloads, size of the file)
    small: dict[str, bytes]  # finished files of the folder form
    shards: dict[str, list[str]]
    digest: str

    @property
    def total(self) -> int:
        """Bytes of the result, without the manifest."""
        return sum(size for _, size in self.heads.values()) + sum(map(len, self.small.values()))

    def files_of(self, name: str) -> frozenset[str]:
        """Checkpoint files that an object is read from."""
        source = self.sources.get(name)
        return frozenset(
            file
            for part in (source.parts if source else ())
            for table, key in (
                (self.checkpoint.tensors, part.source),
                (self.checkpoint.scales, self.checkpoint.scale_name(part.source)),
            )
            for file, _ in ([table[key]] if key in table else ())
        )


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    recipe: Recipe | str | None = None,
    encoder: str = "search",
    counts: Any = None,
    progress: Progress | None = None,
    form: str = "safetensors",
    model_id: str = "",
    mtp: bool | None = None,
    vision: bool | None = None,
    draft: bool | None = None,
    workers: int | None = None,
    max_shard: int = MAX_SHARD,
    shards: Shards | None = None,
) -> ConvertReport:
    """Convert a Hugging Face checkpoint folder (BF16, or FP8 with 128 x 128 blocks) to an artifact.

    Args:
        src: the folder with config.json, the safetensors shards and the frontend files.
        dst: the artifact folder (or `.ninfer` file) to make; it must not exist.
        recipe: formats per role, or the model id whose recipe to take; None takes the model's own.
        encoder: `search` (less error) or `maxabs` (bytes as published).
        counts: token counts that choose the draft head's rows, see `shortlist.load_counts`, or the path of an artifact
            whose choice to copy; None takes the ranking shipped for the Qwen3.6 vocabulary.
        progress: called with (object name, bytes done, bytes in all); may raise to stop.
        form: `safetensors` (a folder) or `ninfer` (one file; published models only).
        model_id: identity to record; None takes that of config.json or of the published model of the same shape.
        mtp, vision, draft: include the MTP layer, vision tower, draft head; None takes what the checkpoint holds (the
            draft head: what the recipe asks for).
        workers: threads; None takes one per CPU, at most 16.
        max_shard: bytes of tensors in one shard.
        shards: asked for the files of each object before it is read; None where the whole checkpoint is in `src`.

    Raises:
        ConvertError: the checkpoint, the options or the counts cannot be used; says what to change.
        DiskSpaceError: not enough room, found before the first byte or while writing; the partial result is kept.
        FileExistsError: `dst` exists.
    """
    started, dst = time.monotonic(), Path(dst)
    if encoder not in quant.ENCODERS:
        raise ConvertError(f"unknown encoder {encoder!r}; choose one of {', '.join(quant.ENCODERS)}")
    if form not in ("safetensors", "ninfer"):
        raise ConvertError(f"unknown form {form!r}; choose safetensors or ninfer")
    if dst.exists():
        raise FileExistsError(f"{dst} already exists; choose another name or remove it")
    checkpoint = Checkpoint(src)
    plan = _plan(checkpoint, recipe, encoder, counts, form, model_id, (mtp, vision, draft), max_shard)
    partial = dst.with_name(dst.name + ".partial")
    done = _open_partial(partial, plan)
    resumed = len(done)
    try:
        _check_space(partial, plan)
        _write(partial, plan, done, progress, workers or min(16, os.cpu_count() or 1), shards)
        _finish(partial, dst, plan, form)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        missing = plan.total - _allocated(partial)
        raise DiskSpaceError(str(partial), max(missing, 1), shutil.disk_usage(partial).free) from error
    nbytes = dst.stat().st_size if form == "ninfer" else sum(f.stat().st_size for f in dst.iterdir())
    seconds = time.monotonic() - started
    return ConvertReport(dst, plan.config.model_id, encoder, len(plan.objects), resumed, nbytes, seconds)


# --- planning ------------------------------------------------------------------------------------------------------


def _plan(
    checkpoint: Checkpoint,
    recipe: Recipe | str | None,
    encoder: str,
    counts: Any,
    form: str,
    model_id: str,
    parts: tuple[bool | None, bool | None, bool | None],
    max_shard: int,
) -> _Plan:
    config = _configure(checkpoint, model_id, parts[0], parts[1])
    if form == "ninfer" and config.model_id not in PUBLISHED:
        raise ConvertError(f"form 'ninfer' is for {', '.join(PUBLISHED)}; use the folder form for {config.model_id!r}")
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ConvertError(f"unknown recipe {recipe!r}; known: {', '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    recipe = recipe or default_recipe(config)
    if parts[2] is False:
        recipe = replace(recipe, draft_rows=0)
    resources = _resources(checkpoint, config, form)
    objects = inventory(config, recipe)
    if form == "ninfer" and objects != inventory(PUBLISHED[config.model_id]):
        raise ConvertError(
            "a .ninfer file carries no configuration, so only a published model with its own recipe and all parts can "
            "be written as one; use the folder form"
        )
    draft_ids = _draft_ids(counts, draft_rows(config, recipe), resources, config.vocab_size)
    sources = bind(config, objects, checkpoint)
    checkpoint.check_scales()
    plan = _Plan(checkpoint, config, recipe, encoder, objects, sources, draft_ids, {}, {}, {}, {}, "")
    _lay_out(plan, resources, form, max_shard)
    ids = b"" if draft_ids is None else draft_ids.numpy().tobytes()
    identity = {
        "source": [str(checkpoint.path.resolve()), checkpoint.files()],
        "heads": {file: hashlib.sha256(head).hexdigest() for file, (head, _) in plan.heads.items()},
        "small": {name: hashlib.sha256(data).hexdigest() for name, data in plan.small.items()},
        "rest": [config.model_id, encoder, hashlib.sha256(ids).hexdigest(), form],
    }
    plan.digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return plan


def _configure(checkpoint: Checkpoint, model_id: str, mtp: bool | None, vision: bool | None) -> ModelConfig:
    """The model the checkpoint holds, with the parts asked for; tensors of parts left out are dropped."""
    try:
        config = config_from_dict(checkpoint.config)
    except ArtifactError as error:
        raise ConvertError(str(error)) from None
    config = replace(config, model_id=model_id or config.model_id or _published_id(config) or checkpoint.path.name)
    has_mtp = any(name.startswith(MTP) for name in checkpoint.tensors)
    has_vision = any(name.startswith(VISION) for name in checkpoint.tensors)
    for part, wanted, present in (("MTP layer", mtp, has_mtp), ("vision tower", vision, has_vision)):
        if wanted and not present:
            raise ConvertError(f"the checkpoint holds no {part}; leave it out or use the original checkpoint")
    if has_vision and vision is not False and config.vision is None:
        raise ConvertError(
            "the checkpoint holds vision tensors but config.json has no vision_config; pass vision=False"
        )
    keep_mtp, keep_vision = has_mtp and mtp is not False, has_vision and vision is not False
    for prefix, keep in ((MTP, keep_mtp), (VISION, keep_vision)):
        if not keep:
            for table in (checkpoint.tensors, checkpoint.scales):
                for name in [name for name in table if name.startswith(prefix)]:
                    del table[name]
    return replace(config, mtp_num_hidden_layers=int(keep_mtp), vision=config.vision if keep_vision else None)


def _published_id(config: ModelConfig) -> str:
    """The published model with the same text decoder, whatever parts the checkpoint lacks; empty if there is none."""

    def text(c: ModelConfig) -> ModelConfig:
        c = replace(c, image_token_id=None, video_token_id=None, vision_start_token_id=None, vision_end_token_id=None)
        return replace(c, model_id="", vision=None, mtp_num_hidden_layers=0)

    return next((name for name, known in PUBLISHED.items() if text(known) == text(config)), "")


def _resources(checkpoint: Checkpoint, config: ModelConfig, form: str) -> dict[str, bytes]:
    found = checkpoint.frontend()
    needed = FRONTEND if form == "ninfer" else REQUIRED_FRONTEND + (FRONTEND[4:5] if config.vision else ())
    missing = [name for name in needed if not found.get(name)]
    if missing:
        hint = ", or pass vision=False" if missing[0] in FRONTEND[4:] else ""
        raise ConvertError(
            f"{checkpoint.path} has no {', '.join(missing)}; copy it there from the original repository{hint}"
        )
    return {name: data for name, data in found.items() if data}


def _draft_ids(counts: Any, rows: int, resources: Mapping[str, bytes], vocab_size: int) -> torch.Tensor | None:
    if rows == 0:
        return None
    ids, forced, known = shortlist.vocabulary(resources)
    if ids > vocab_size:
        raise ConvertError(f"the tokenizer has {ids} ids, the embedding {vocab_size} rows; they do not belong together")
    if counts is None and not known:
        raise ConvertError(
            "no token counts are shipped for this vocabulary: pass counts=, or draft=False to leave the draft head out"
        )
    if isinstance(counts, str | os.PathLike) and (Path(counts).is_dir() or Path(counts).suffix == ".ninfer"):
        return _copied_ids(Path(counts), rows, ids)
    table = shortlist.default_counts(ids) if counts is None else shortlist.load_counts(counts, ids)
    return shortlist.select(table, rows, forced)


def _copied_ids(path: Path, rows: int, ids: int) -> torch.Tensor:
    """The draft head's ids of another artifact: the way to the same bytes as a published file."""
    with Artifact.open(path, inspect=True) as other:
        found = other.tensor(IDS).clone() if IDS in other.tensors else torch.empty(0, dtype=torch.int32)
    if found.shape != (rows,) or int(found.min()) < 0 or int(found.max()) >= ids or found.unique().numel() != rows:
        raise ConvertError(f"{path} does not hold {rows} different draft ids below {ids} to copy")
    return found


def _lay_out(plan: _Plan, resources: Mapping[str, bytes], form: str, max_shard: int) -> None:
    """Fix the place of every object and the bytes around them."""
    if form == "ninfer":
        sizes = {PREFIX + name: len(data) for name, data in resources.items()}
        directory, prefix = plan_directory(plan.config.model_id, sizes, plan.objects)
        head = prefix + b"".join(resources.values())
        plan.heads[SINGLE] = (head, directory.file_bytes)
        for record in directory.records:
            if not record.is_resource:
                plan.places[record.name] = _Place(SINGLE, directory.payload_start + record.offset)
        return
    plan.shards = shard_plan(plan.objects, max_shard)
    for shard, names in plan.shards.items():
        starts, prefix, size = shard_header(plan.objects, names)
        plan.heads[shard] = (prefix, size)
        plan.places |= {name: _Place(shard, start) for name, start in starts.items()}
    plan.small = {CONFIG: (json.dumps(plan.checkpoint.config, indent=1) + "\n").encode(), **resources}


# --- the partial folder ----------------------------------------------------------------------------------------------


def _open_partial(partial: Path, plan: _Plan) -> set[str]:
    """Make or continue the partial folder; returns the objects that are already in it."""
    journal = partial / JOURNAL
    if partial.exists():
        if not journal.is_file() and (not partial.is_dir() or any(partial.iterdir())):
            raise FileExistsError(f"{partial} exists and is not a conversion in progress; move it away")
        lines = _journal_lines(journal) if journal.is_file() else []
        if lines and lines[0].get("plan") == plan.digest:
            sizes = {f: (partial / f).stat().st_size if (partial / f).is_file() else -1 for f in plan.heads}
            intact = {f for f, (_, size) in plan.heads.items() if sizes[f] == size}
            listed = {line.get("object") for line in lines[1:]}
            return {name for name, place in plan.places.items() if name in listed and place.file in intact}
        shutil.rmtree(partial)  # another source, recipe or encoder: nothing of it can be used
    partial.mkdir(parents=True)
    journal.write_text(json.dumps({"plan": plan.digest}) + "\n")
    return set()


def _journal_lines(path: Path) -> list[dict[str, Any]]:
    out = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            out.append(json.loads(line))
        except ValueError:  # the line that was being written when the machine stopped
            break
    return [line for line in out if isinstance(line, dict)]


def _allocated(partial: Path) -> int:
    """Bytes of the partial folder that disk space has been given to; files are sparse until they are filled."""
    return sum(getattr(s, "st_blocks", s.st_size // 512) * 512 for s in (f.stat() for f in partial.iterdir()))


def _check_space(partial: Path, plan: _Plan) -> None:
    needed, free = plan.total - _allocated(partial) + (1 << 20), shutil.disk_usage(partial).free
    if needed > free:
        raise DiskSpaceError(str(partial), needed, free)


# --- writing ---------------------------------------------------------------------------------------------------------


def _write(
    partial: Path, plan: _Plan, done: set[str], progress: Progress | None, workers: int, shards: Shards | None
) -> None:
    for file, (head, size) in plan.heads.items():
        path = partial / file
        if not (path.is_file() and path.stat().st_size == size):
            with open(path, "wb") as out:
                out.write(head)
                out.truncate(size)
    for name, data in plan.small.items():
        (partial / name).write_bytes(data)
    sizes = {name: quant.payload_bytes(fmt, shape) for name, (shape, fmt) in plan.objects.items()}
    total, written, unsynced = sum(sizes.values()), sum(sizes[name] for name in done), 0
    waiting: list[str] = []
    pool = ThreadPoolExecutor(workers, thread_name_prefix="convert", initializer=torch.set_num_threads, initargs=(1,))
    try:
        todo = [name for name in plan.objects if name not in done]
        for position, name in enumerate(todo):
            if shards is not None:
                later = (plan.files_of(other) for other in todo[position + 1 :])
                shards.provide(plan.files_of(name), frozenset().union(*later))
            for nbytes in _run(pool, _chunks(partial, plan, name), 2 * workers):
                written += nbytes
                if progress:
                    progress(name, written, total)
            waiting.append(name)
            unsynced += sizes[name]
            if unsynced >= SYNC_BYTES:
                _sync(partial, plan, waiting)
                unsynced = 0
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        _sync(partial, plan, waiting)


def _run(pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], int]], ahead: int) -> Iterator[int]:
    """Run jobs with at most `ahead` of them in flight; yields their results in order of completion."""
    flying: set[Future[int]] = set()
    try:
        for job in jobs:
            flying.add(pool.submit(job))
            if len(flying) >= ahead:
                ready, flying = wait(flying, return_when=FIRST_COMPLETED)
                yield from (f.result() for f in ready)
        ready, flying = wait(flying)[0], set()
        yield from (f.result() for f in ready)
    finally:
        for f in flying:
            f.cancel()


def _sync(partial: Path, plan: _Plan, names: list[str]) -> None:
    """Bring finished objects to the disk, then note them in the journal."""
    if not names:
        return
    for file in {plan.places[name].file for name in names}:
        with open(partial / file, "r+b") as out:
            os.fsync(out.fileno())
    with open(partial / JOURNAL, "a") as journal:
        journal.writelines(json.dumps({"object": name}) + "\n" for name in names)
        journal.flush()
        os.fsync(journal.fileno())
    names.clear()


def _chunks(partial: Path, plan: _Plan, name: str) -> Iterator[Callable[[], int]]:
    """Jobs that together write one object; each returns the payload bytes it wrote."""
    shape, fmt = plan.objects[name]
    place = plan.places[name]
    path, search = partial / place.file, plan.encoder == "search"
    if not quant.format_of(fmt).grouped:
        payload = _direct(plan, name)
        yield lambda: _put(path, [(place.offset, payload)])
        return
    reader = RowReader(plan.checkpoint, plan.sources[name], shape[1])
    ids = plan.draft_ids if plan.sources[name].kind == "draft" else None

    def job(start: int, stop: int) -> Callable[[], int]:
        def run() -> int:
            w = reader.read(start, stop) if ids is None else reader.gather(ids[start:stop])
            try:
                return _put(path, encode_rows(w, fmt, shape, start, place.offset, search))
            except ConvertError as error:
                raise ConvertError(f"{name}, rows from {start}: {error}") from None

        return run

    for start, stop in quant.row_blocks(shape[0], shape[1], CHUNK_WEIGHTS):
        yield job(start, stop)


def encode_rows(
    w: torch.Tensor, fmt: str, shape: tuple[int, ...], start: int, offset: int, search: bool
) -> list[tuple[int, torch.Tensor]]:
    """Encode rows `start : start + len(w)` of a matrix of `shape` whose payload begins at byte `offset` of a file.

    Returns:
        (byte offset, uint8 bytes) pieces, one per plane.
    """
    codes, scales = quant.quantize(w, fmt, search=search)
    base, high = quant.pack_rows(codes, fmt)
    b, h, s = quant.planes(fmt, shape).spans(start, start + w.shape[0])
    pieces = [(offset + b[0], base), (offset + s[0], scales.view(torch.uint8))]
    return pieces if high is None else [*pieces, (offset + h[0], high)]


def _direct(plan: _Plan, name: str) -> torch.Tensor:
    """Payload of an object that is stored unquantized: uint8, one dimension."""
    shape, fmt = plan.objects[name]
    if name == IDS:
        assert plan.draft_ids is not None
        return quant.encode(plan.draft_ids, fmt)
    source = plan.sources[name]
    if source.kind == "convolution":
        taps, channels = shape
        w = RowReader(plan.checkpoint, source, taps).read(0, channels).T
    else:
        reader = RowReader(plan.checkpoint, source, shape[-1])
        w = reader.read(0, reader.rows).view(shape)
    return quant.encode(w.to(quant.DTYPES[fmt]), fmt)


def _put(path: Path, pieces: list[tuple[int, torch.Tensor]]) -> int:
    written = 0
    with open(path, "r+b") as out:
        for offset, data in pieces:
            out.seek(offset)
            out.write(data.contiguous().view(-1).numpy().data)
            written += data.numel()
    return written


def _finish(partial: Path, dst: Path, plan: _Plan, form: str) -> None:
    """Digests, manifest, final name."""
    if form == "ninfer":
        (partial / SINGLE).rename(dst)
        (partial / JOURNAL).unlink()
        partial.rmdir()
        return
    names = [*plan.small, *plan.heads]
    files = {name: ((partial / name).stat().st_size, sha256_file(partial / name)) for name in names}
    text = manifest_json(plan.config.model_id, plan.recipe.name, plan.encoder, plan.objects, plan.shards, files)
    for path in partial.iterdir():  # leftovers of an earlier layout would be foreign files in the result
        if path.name not in files and path.name != JOURNAL:
            path.unlink()
    with open(partial / MANIFEST, "wb") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    (partial / JOURNAL).unlink()
    partial.rename(dst)
