"""Weights in kernel order on a device: the tree that the Triton path runs on, from an artifact or random.

Every matrix keeps its codes and scales exactly; only their places change. All tensors of a tree are views of one
allocation, so a model costs what `packed_bytes` says and is freed as one piece. Matrices that the kernels read as one
(`proj`) are stored as one: where a model keeps the parts in two formats, the narrower codes are stored in the wider
format, which changes no value.

Filling happens in jobs of some rows each: read the rows' planes, bring them to the device, repack them there.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from . import quant
from .config import ModelConfig
from .errors import GeometryError, InventoryError, MemoryPlanError
from .files import SourceFile
from .footprint import ALIGN, kernel_format, packed_bytes
from .inventory import TOKEN_IDS, Inventory, Recipe, default_recipe, inventory
from .kernels._order import GROUP, KernelMatrix, pack_codes, unpack_payload
from .packed_tree import (
    PackedAttention,
    PackedDraftHead,
    PackedGdn,
    PackedLayer,
    PackedMlp,
    PackedMoe,
    PackedMtp,
    PackedWeights,
    dequantize,
    named,
    reference_weights,
)
from .staging import Progress, Task, transfer

__all__ = [
    "PackedAttention", "PackedDraftHead", "PackedGdn", "PackedLayer", "PackedMlp", "PackedMoe", "PackedMtp",
    "PackedWeights", "dequantize", "load_packed", "named", "packed_bytes", "random_packed", "reference_weights",
]  # fmt: skip

JOB_CODES = 1 << 24
"""Codes in one job: bounds the temporaries of repacking."""

TEMPORARY = 20 * JOB_CODES
"""Device bytes that repacking takes beside the weights; 16.3 a code were measured for the 35B."""


class Stored(Protocol):
    """Shape and format of a stored object."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> str: ...


class PackedSource(Protocol):
    """What the loader needs of an artifact."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    def extent(self, name: str) -> tuple[SourceFile, int]: ...

    def digests(self) -> dict[SourceFile, str]: ...


# --- jobs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorJob:
    """Copy the whole object `name` into `target`."""

    name: str
    target: Tensor

    def spans(self) -> list[tuple[str, int, int, int]]:
        """`(object, offset in it, bytes, offset in the staged payload)`."""
        return [(self.name, 0, self.nbytes, 0)]

    @property
    def nbytes(self) -> int:
        """Bytes of the staged payload."""
        return self.target.numel() * self.target.element_size()

    def apply(self, payload: Tensor) -> None:
        """Store the staged payload (uint8, on the device of the target)."""
        self.target.view(torch.uint8).view(-1).copy_(payload)


@dataclass(frozen=True, slots=True)
class MatrixJob:
    """Repack some rows of the object `name` into rows `row` on of `matrix`.

    `pieces` are row ranges of the object that follow each other in the staged payload; with `interleave` the first
    half of the staged rows and the second half (gate, up) alternate in the matrix.
    """

    matrix: KernelMatrix
    row: int
    name: str
    format: str
    shape: tuple[int, int]
    pieces: tuple[tuple[int, int], ...]
    interleave: bool = False

    @property
    def rows(self) -> int:
        """Rows of this job."""
        return sum(stop - start for start, stop in self.pieces)

    @property
    def planes(self) -> quant.Planes:
        """Planes of the staged payload: the rows as an object of their own."""
        return quant.planes(self.format, (self.rows, self.shape[1]))

    @property
    def nbytes(self) -> int:
        """Bytes of the staged payload."""
        return self.planes.nbytes

    def spans(self) -> list[tuple[str, int, int, int]]:
        """`(object, offset in it, bytes, offset in the staged payload)` of every contiguous run."""
        whole, staged = quant.planes(self.format, self.shape), self.planes
        out, row = [], 0
        for start, stop in self.pieces:
            places = staged.spans(row, row + stop - start)
            for (first, last), (place, _) in zip(whole.spans(start, stop), places, strict=True):
                if last > first:
                    out.append((self.name, first, last - first, place))
            row += stop - start
        return out

    def apply(self, payload: Tensor) -> None:
        """Repack the staged payload (uint8, on the device of the matrix) into the matrix."""
        self.store(*unpack_payload(payload, self.format[:2], self.rows, self.shape[1]))

    def store(self, codes: Tensor, scales: Tensor) -> None:
        """Store the rows: codes `[rows, K]`, scales `[rows, K / group]`, in the format they have in the file."""
        short, target = self.format[:2], self.matrix.format
        if target == "W8" and short != "W8":  # two groups of 32 share what was one group of 64
            scales = scales.repeat_interleave(2, dim=1)
        if self.interleave:
            codes, scales = (_alternate(part) for part in (codes, scales))
        part = pack_codes(codes, scales, target)
        tile = self.row // 16
        for into, rows in (
            (self.matrix.words, part.words),
            (self.matrix.high, part.high),
            (self.matrix.scales, part.scales),
        ):
            into[tile : tile + rows.shape[0]] = rows


def _alternate(rows: Tensor) -> Tensor:
    from .kernels.mlp_decode import interleave_gate_up

    return interleave_gate_up(rows)


Job = TensorJob | MatrixJob


# --- building --------------------------------------------------------------------------------------------------------


class _Arena:
    """One allocation, handed out piece by piece."""

    def __init__(self, device: torch.device, nbytes: int, *, pinned: bool = False) -> None:
        self._used, self._memory = 0, torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        start, self._used = self._used, quant.up(self._used + nbytes, ALIGN)
        return self._memory[start : start + nbytes].view(dtype).view(shape)

    def free(self) -> None:
        self._memory.untyped_storage().resize_(0)


@dataclass
class _Builder:
    """Builds the tree with unfilled tensors and lists the jobs that fill it."""

    config: ModelConfig
    objects: Inventory
    arena: _Arena
    table: _Arena
    jobs: list[Job] = field(default_factory=list)

    def stored(self, name: str) -> tuple[tuple[int, ...], str]:
        if name not in self.objects:
            raise InventoryError(f"the weights lack {name!r}, which {self.config.model_id or 'this model'} needs")
        return self.objects[name]

    def tensor(self, *names: str) -> Tensor:
        """Direct objects one below the other, in their stored type."""
        shapes, formats = zip(*(self.stored(name) for name in names), strict=True)
        out = self.arena.take((sum(s[0] for s in shapes), *shapes[0][1:]), quant.DTYPES[formats[0]])
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            self.jobs.append(TensorJob(name, out[row : row + shape[0]]))
            row += shape[0]
        return out

    def matrix(self, *names: str, interleave: bool = False, arena: _Arena | None = None) -> KernelMatrix:
        """Grouped objects one below the other, in the format of `kernel_format`."""
        parts = [(name, *self.stored(name)) for name in names]
        target = kernel_format(names, [fmt for _, _, fmt in parts])
        multiple = 64 if interleave else 16
        bad = [f"{name} {list(shape)}" for name, shape, _ in parts if shape[0] % multiple or shape[1] % quant.K_ALIGN]
        if bad:
            raise GeometryError(
                f"{bad[0]}: the kernels take rows in multiples of {multiple} and columns in multiples of "
                f"{quant.K_ALIGN}; run this model on the CPU"
            )
        rows, columns, row = sum(shape[0] for _, shape, _ in parts), parts[0][1][1], 0
        out = self.empty(target, rows, columns, arena or self.arena)
        for name, shape, fmt in parts:
            self.jobs += _row_jobs(out, row, name, fmt, (shape[0], shape[1]), interleave)
            row += shape[0]
        return out

    def empty(self, format: str, rows: int, columns: int, arena: _Arena) -> KernelMatrix:
        """An unfilled matrix."""
        words, high, scales = (arena.take((rows // 16, *shape), dtype) for shape, dtype in _tile(format, columns))
        return KernelMatrix(words, high, scales, format, rows, columns)

    def weights(self, mtp: bool) -> PackedWeights:
        draft = None
        if mtp and "text/draft_head" in self.objects:
            draft = PackedDraftHead(self.matrix("text/draft_head"), self.tensor("text/draft_head_token_ids"))
        has_mtp = mtp and any(name.startswith("mtp/") for name in self.objects)
        return PackedWeights(
            embedding=self.matrix("text/token_embedding", arena=self.table),
            layers=tuple(self.layer(f"text/layers/{i}/", kind) for i, kind in enumerate(self.config.layer_types)),
            final_norm=self.tensor("text/final_norm"),
            head=self.matrix("text/output_head"),
            draft_head=draft,
            mtp=self.mtp() if has_mtp else None,
        )

    def layer(self, prefix: str, kind: str) -> PackedLayer:
        return PackedLayer(
            input_norm=self.tensor(prefix + "input_norm"),
            mixer=self.attention(prefix + "attention/") if kind == "full_attention" else self.gdn(prefix + "gdn/"),
            post_norm=self.tensor(prefix + "post_attention_norm"),
            ffn=self.moe(prefix + "moe/") if self.config.is_moe else self.mlp(prefix + "mlp/"),
        )

    def attention(self, prefix: str) -> PackedAttention:
        fused = prefix + "query_key_gate_value"
        names = (fused,) if fused in self.objects else (prefix + "query_key", prefix + "gate_value")
        return PackedAttention(
            proj=self.matrix(*names),
            q_norm=self.tensor(prefix + "query_norm"),
            k_norm=self.tensor(prefix + "key_norm"),
            output=self.matrix(prefix + "output"),
        )

    def gdn(self, prefix: str) -> PackedGdn:
        fused, gates = prefix + "query_key_value_z", prefix + "a_b_projection"
        names = (fused,) if fused in self.objects else (prefix + "query_key", prefix + "value_z")
        sides = (gates,) if gates in self.objects else (prefix + "a_projection", prefix + "b_projection")
        return PackedGdn(
            proj=self.matrix(*names),
            side=self.tensor(*sides),
            taps=self.tensor(prefix + "convolution"),
            a_log=self.tensor(prefix + "a_log"),
            dt_bias=self.tensor(prefix + "dt_bias"),
            norm=self.tensor(prefix + "norm"),
            output=self.matrix(prefix + "output"),
        )

    def mlp(self, prefix: str) -> PackedMlp:
        return PackedMlp(self.matrix(prefix + "gate_up", interleave=True), self.matrix(prefix + "down"))

    def moe(self, prefix: str) -> PackedMoe:
        return PackedMoe(
            router=self.tensor(prefix + "router_shared_gate"),
            gate_up=self.matrix(prefix + "routed_gate_up"),
            down=self.matrix(prefix + "routed_down"),
            shared_gate_up=self.matrix(prefix + "shared_gate_up"),
            shared_down=self.matrix(prefix + "shared_down"),
        )

    def mtp(self) -> PackedMtp:
        return PackedMtp(
            embedding_norm=self.tensor("mtp/embedding_norm"),
            hidden_norm=self.tensor("mtp/hidden_norm"),
            proj=self.matrix("mtp/input_projection"),
            layer=self.layer("mtp/layer/", "full_attention"),
            final_norm=self.tensor("mtp/final_norm"),
        )


@cache
def _tile(format: str, columns: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and types in one tile of 16 rows, of which kernel order is made, whatever is inside one."""
    codes = torch.zeros(16, columns, dtype=torch.int8)
    tile = pack_codes(codes, torch.zeros(16, columns // GROUP[format], dtype=torch.float16), format)
    return tuple((tuple(t.shape[1:]), t.dtype) for t in (tile.words, tile.high, tile.scales))


def _row_jobs(
    matrix: KernelMatrix, row: int, name: str, fmt: str, shape: tuple[int, int], interleave: bool
) -> Iterator[MatrixJob]:
    rows, columns = shape
    step = max(64, JOB_CODES // columns // 64 * 64)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        pieces: tuple[tuple[int, int], ...] = ((start, stop),)
        if interleave:
            half = rows // 2
            pieces = ((start // 2, stop // 2), (half + start // 2, half + stop // 2))
        yield MatrixJob(matrix, row + start, name, fmt, shape, pieces, interleave)


# --- filling ---------------------------------------------------------------------------------------------------------


def load_packed(
    artifact: PackedSource,
    device: torch.device | str,
    *,
    mtp: bool = True,
    host_embedding: bool = False,
    verify: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> PackedWeights:
    """Read an artifact's text model onto a device in kernel order.

    Whatever goes wrong, or Ctrl-C: the device memory is free again when this raises.

    Args:
        artifact: an open `artifact.Artifact`.
        device: where the weights go.
        mtp: load the draft layer and the reduced draft head if present.
        host_embedding: keep the embedding table in pinned host memory, from where kernels read its rows.
        verify: check the SHA-256 of the files at the same time.
        threads: threads that read; None takes the cores of this machine, at most eight.
        progress: called with (bytes done, bytes in all) on this thread.

    Raises:
        MemoryPlanError: the device has not enough memory.
        GeometryError: a matrix has a shape the kernels do not take, or a file is cut off.
        ContentError: a file was changed while it was read, or its digest differs.
        InventoryError: an object is missing.
    """
    digests = artifact.digests() if verify else {}
    found = {name: (info.shape, info.format) for name, info in artifact.tensors.items()}

    def fill(jobs: list[Job]) -> None:
        tasks = []
        for job in jobs:
            spans = []
            for name, offset, nbytes, place in job.spans():
                file, start = artifact.extent(name)
                spans.append((file, start + offset, nbytes, place))
            tasks.append(Task(job.nbytes, tuple(spans), job.apply))
        transfer(tasks, torch.device(device), digests=digests, threads=threads, progress=progress)

    return _make(artifact.config, found, torch.device(device), mtp, host_embedding, fill)


def _make(
    config: ModelConfig,
    objects: Inventory,
    device: torch.device,
    mtp: bool,
    host_embedding: bool,
    fill: Callable[[list[Job]], None],
) -> PackedWeights:
    """Allocate a tree and fill it; free it on any error, even where the error keeps references to it."""
    arena, size = None, packed_bytes(objects, mtp=mtp, embedding=not host_embedding)
    try:
        arena = table = _Arena(device, size)
        if host_embedding:
            rest = packed_bytes(objects, mtp=mtp) - size
            table = _Arena(torch.device("cpu"), rest, pinned=device.type == "cuda")
        builder = _Builder(config, objects, arena, table)
        weights = builder.weights(mtp)
        fill(builder.jobs)
        return weights
    except BaseException as error:
        if arena is not None:
            arena.free()
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, torch.OutOfMemoryError):
            _trim(device)
            raise MemoryPlanError(_too_little(device, size)) from None
        raise
    finally:
        _trim(device)


def _trim(device: torch.device) -> None:
    """Give the temporaries of repacking, which the allocator keeps for the next time, back to the driver."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _too_little(device: torch.device, size: int) -> str:
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"the weights need {size / 2**30:.2f} GiB and up to {TEMPORARY / 2**30:.2f} GiB while they are loaded; "
        f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB are free on {torch.cuda.get_device_name(device)}: end other "
        "programs on it, or take a smaller model"
    )


def random_packed(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cuda",
    mtp: bool = True,
    draft_head: bool = True,
    host_embedding: bool = False,
    recipe: Recipe | None = None,
) -> PackedWeights:
    """Random weights in the formats of a recipe (default: the published one), made on the device.

    Codes cover their whole range. Scales make a product of unit inputs a unit output, so activations stay of order 1
    through all layers. The same seed gives the same weights on the same kind of device, with a draft layer or without.
    """
    objects = inventory(config, recipe or default_recipe(config), mtp=mtp, vision=False, draft=mtp and draft_head)
    generator = torch.Generator(torch.device(device))
    limit = TOKEN_IDS.get(config.model_id, config.vocab_size)

    def fill(jobs: list[Job]) -> None:
        for job in jobs:
            row = 0 if isinstance(job, TensorJob) else job.row
            generator.manual_seed(crc32(f"{seed} {job.name} {row}".encode()))
            if isinstance(job, TensorJob):
                _random_tensor(job.name, job.target, generator, limit)
            else:
                job.store(*_random_rows(job, generator))

    return _make(config, objects, torch.device(device), mtp, host_embedding, fill)


def _random_rows(job: MatrixJob, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes and scales. The mean of the codes is 0: another would add up along K and make all rows alike."""
    device, f, (rows, columns) = generator.device, quant.format_of(job.format), (job.rows, job.shape[1])
    codes = torch.randint(-f.qmax, f.qmax + 1, (rows, columns), dtype=torch.int8, device=device, generator=generator)
    row = torch.arange(rows, device=device)
    codes[row, row * 37 % columns] = f.qmin  # one a row of what the range has on one side only
    spread = ((f.qmax + 1) * f.qmax / 3) ** 0.5
    size = 1.0 if job.name.endswith("token_embedding") else columns**-0.5
    scales = torch.rand(rows, columns // f.group, device=device, generator=generator) + 0.5
    return codes, (scales * (size / spread)).to(torch.float16)


def _random_tensor(name: str, target: Tensor, generator: torch.Generator, limit: int) -> None:
    kind = name.rsplit("/", 1)[1]
    if kind == "draft_head_token_ids":
        order = torch.randperm(limit, device=target.device, generator=generator)
        target.copy_(order[: target.shape[0]].sort().values)
        return
    values = torch.randn(target.shape, device=target.device, generator=generator)
    if kind == "a_log":  # the decay of a token lies between 0.5 and 0.999 for most heads
        values = values - 3
    elif kind == "norm":
        values = 1 + 0.1 * values  # the plain gain of the Gated DeltaNet output
    elif kind == "convolution":
        values = 0.5 * values
    elif kind.endswith("norm"):
        values = 0.1 * values
    elif values.dim() == 2:
        values = values * target.shape[1] ** -0.5
    target.copy_(values)
