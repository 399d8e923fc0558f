"""Weights in kernel order on a device: the tree that the Triton path runs on, from an artifact or random.

Every matrix keeps its codes and scales exactly; only their places change. All tensors of a tree are views of one
allocation, so a model costs what `packed_bytes` says and is freed as one piece. Matrices that the kernels read as one
(`proj`) are stored as one: where a model keeps the parts in two formats, the narrower codes are stored in the wider
format, which changes no value.

Filling happens in jobs of some rows each: read the rows' planes, bring them to the device, repack them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from . import quant
from .config import ModelConfig
from .errors import GeometryError, InventoryError
from .inventory import Recipe, default_recipe, inventory
from .kernels._order import GROUP, KernelMatrix, from_kernel_order, pack_codes, unpack_payload
from .weights import Weights, from_objects

ALIGN = 256
"""Every tensor starts at a multiple of this many bytes of the allocation."""

JOB_CODES = 1 << 24
"""Codes in one job: bounds the temporaries of repacking to some hundred MB."""

WIDER = ("Q4", "Q5", "Q6", "W8")
"""A format's values are exact in every later one."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class PackedGdn:
    """Gated DeltaNet: `proj` rows q, k, v, z; `side [2V, E]` bf16 rows a, b; `taps [4, C]` bf16; `a_log`, `dt_bias`
    fp32 `[V]`; `norm [128]` bf16, the plain gain.
    """

    proj: KernelMatrix
    side: Tensor
    taps: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    output: KernelMatrix


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Gated attention: `proj` rows q, k, gate, v; `q_norm`, `k_norm [256]` bf16, gains 1 + w."""

    proj: KernelMatrix
    q_norm: Tensor
    k_norm: Tensor
    output: KernelMatrix


@dataclass(frozen=True, slots=True)
class PackedMlp:
    """Dense SwiGLU. The rows of `gate_up` alternate, 32 of gate and 32 of up: `mlp_decode.interleave_gate_up`."""

    gate_up: KernelMatrix
    down: KernelMatrix


@dataclass(frozen=True, slots=True)
class PackedMoe:
    """`router [X + 1, E]` bf16 (the last row gates the shared expert); `gate_up [X * 2I, E]`, gate rows first in every
    expert; `down [X * E, I]`; the shared expert `[2I, E]` (gate rows first) and W8 `[E, I]`.
    """

    router: Tensor
    gate_up: KernelMatrix
    down: KernelMatrix
    shared_gate_up: KernelMatrix
    shared_down: KernelMatrix


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One decoder layer; norms bf16 `[E]`, gains 1 + w."""

    input_norm: Tensor
    mixer: PackedGdn | PackedAttention
    post_norm: Tensor
    ffn: PackedMlp | PackedMoe


@dataclass(frozen=True, slots=True)
class PackedDraftHead:
    """The reduced output head; row i proposes token `ids[i]` (int32)."""

    weight: KernelMatrix
    ids: Tensor


@dataclass(frozen=True, slots=True)
class PackedMtp:
    """The draft layer: `proj` takes the normed embedding (first E columns) and the normed hidden row."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    proj: KernelMatrix
    layer: PackedLayer
    final_norm: Tensor


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """All weights of the text model. `embedding` is W8 or Q6. Parts that the source does not hold are None."""

    embedding: KernelMatrix
    layers: tuple[PackedLayer, ...]
    final_norm: Tensor
    head: KernelMatrix
    draft_head: PackedDraftHead | None
    mtp: PackedMtp | None

    @property
    def nbytes(self) -> int:
        """Bytes of the one allocation behind all tensors."""
        return self.final_norm.untyped_storage().nbytes()


class Stored(Protocol):
    """Shape and format of a stored object."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def format(self) -> str: ...  # noqa: D102


class PackedSource(Protocol):
    """What the loader needs of an artifact."""

    @property
    def config(self) -> ModelConfig: ...  # noqa: D102

    @property
    def tensors(self) -> Mapping[str, Stored]: ...  # noqa: D102

    def payload(self, name: str) -> Tensor: ...  # noqa: D102


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
        short, target = self.format[:2], self.matrix.format
        codes, scales = unpack_payload(payload, short, self.rows, self.shape[1])
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
    """One allocation handed out piece by piece; on the meta device it only counts."""

    def __init__(self, device: torch.device, nbytes: int | None) -> None:
        self.used, self._meta = 0, nbytes is None
        self._memory = torch.empty(nbytes or 0, dtype=torch.uint8, device="meta" if nbytes is None else device)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        start, self.used = self.used, quant.up(self.used + nbytes, ALIGN)
        if self._meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._memory[start : start + nbytes].view(dtype).view(shape)


@dataclass
class _Builder:
    """Builds the tree with unfilled tensors and lists the jobs that fill it."""

    config: ModelConfig
    objects: Mapping[str, tuple[tuple[int, ...], str]]
    arena: _Arena
    jobs: list[Job] = field(default_factory=list)

    def stored(self, name: str) -> tuple[tuple[int, ...], str]:
        if name not in self.objects:
            raise InventoryError(f"the weights lack {name!r}, which {self.config.model_id or 'this model'} needs")
        return self.objects[name]

    def tensor(self, *names: str) -> Tensor:
        """Direct objects one below the other, in their stored type."""
        shapes, formats = zip(*(self.stored(name) for name in names), strict=True)
        out = self.arena.take((sum(s[0] for s in shapes), *shapes[0][1:]), quant.format_of(formats[0]).dtype)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            self.jobs.append(TensorJob(name, out[row : row + shape[0]]))
            row += shape[0]
        return out

    def matrix(self, *names: str, allowed: tuple[str, ...] = WIDER, interleave: bool = False) -> KernelMatrix:
        """Grouped objects one below the other, in the widest of their formats or the next one allowed."""
        parts = [(name, *self.stored(name)) for name in names]
        widest = max(WIDER.index(fmt[:2]) if quant.format_of(fmt).grouped else -1 for _, _, fmt in parts)
        if any(not quant.format_of(fmt).grouped for _, _, fmt in parts):
            raise GeometryError(f"{names[0]}: the kernels read quantized matrices; convert it to one of {WIDER}")
        target = next(fmt for fmt in WIDER[widest:] if fmt in allowed)
        rows, columns = sum(shape[0] for _, shape, _ in parts), parts[0][1][1]
        multiple = 64 if interleave else 16
        bad = [f"{name} {list(shape)}" for name, shape, _ in parts if shape[0] % multiple or shape[1] % quant.K_ALIGN]
        if bad:
            raise GeometryError(
                f"{bad[0]}: the kernels take rows in multiples of {multiple} and columns in multiples of "
                f"{quant.K_ALIGN}; run this model on the CPU"
            )
        out, row = self.empty(target, rows, columns), 0
        for name, shape, fmt in parts:
            self.jobs += _row_jobs(out, row, name, fmt, (shape[0], shape[1]), interleave)
            row += shape[0]
        return out

    def empty(self, format: str, rows: int, columns: int) -> KernelMatrix:
        """An unfilled matrix: kernel order is made of tiles of 16 rows, whatever is inside one."""
        codes = torch.empty(16, columns, dtype=torch.int8, device="meta")
        scales = torch.empty(16, columns // GROUP[format], dtype=torch.float16, device="meta")
        tile = pack_codes(codes, scales, format)
        words, high, scales = (
            self.arena.take((rows // 16, *t.shape[1:]), t.dtype) for t in (tile.words, tile.high, tile.scales)
        )
        return KernelMatrix(words, high, scales, format, rows, columns)

    def weights(self, mtp: bool) -> PackedWeights:
        draft = None
        if mtp and "text/draft_head" in self.objects:
            draft = PackedDraftHead(self.matrix("text/draft_head"), self.tensor("text/draft_head_token_ids"))
        has_mtp = mtp and any(name.startswith("mtp/") for name in self.objects)
        return PackedWeights(
            embedding=self.matrix("text/token_embedding", allowed=("Q6", "W8")),
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
            shared_down=self.matrix(prefix + "shared_down", allowed=("W8",)),
        )

    def mtp(self) -> PackedMtp:
        return PackedMtp(
            embedding_norm=self.tensor("mtp/embedding_norm"),
            hidden_norm=self.tensor("mtp/hidden_norm"),
            proj=self.matrix("mtp/input_projection"),
            layer=self.layer("mtp/layer/", "full_attention"),
            final_norm=self.tensor("mtp/final_norm"),
        )


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


def _build(
    config: ModelConfig, objects: Mapping[str, tuple[tuple[int, ...], str]], device: torch.device | str, mtp: bool
) -> tuple[PackedWeights, list[Job]]:
    builder = _Builder(config, objects, _Arena(torch.device(device), packed_bytes(config, objects, mtp=mtp)))
    return builder.weights(mtp), builder.jobs


def packed_bytes(config: ModelConfig, objects: Mapping[str, tuple[tuple[int, ...], str]], *, mtp: bool = True) -> int:
    """Device bytes of the packed weights of these objects (name -> shape and format), before anything is loaded.

    Raises:
        GeometryError: a matrix that the kernels do not take.
        InventoryError: an object is missing.
    """
    counter = _Arena(torch.device("meta"), None)
    _Builder(config, objects, counter).weights(mtp)
    return counter.used


# --- filling ---------------------------------------------------------------------------------------------------------


def load_packed(
    artifact: PackedSource, device: torch.device | str, *, mtp: bool = True, progress: Progress | None = None
) -> PackedWeights:
    """Read an artifact's text model onto a device in kernel order.

    Args:
        artifact: an open `artifact.Artifact`.
        device: where the weights go.
        mtp: load the draft layer and the reduced draft head if present.
        progress: called with (bytes done, bytes in all) as jobs end.

    Raises:
        GeometryError: a matrix has a shape the kernels do not take.
        InventoryError: an object is missing.
    """
    objects = {name: (info.shape, info.format) for name, info in artifact.tensors.items()}
    weights, jobs = _build(artifact.config, objects, device, mtp)
    total, done = sum(job.nbytes for job in jobs), 0
    for job in jobs:
        payload = torch.zeros(job.nbytes, dtype=torch.uint8)
        for name, offset, nbytes, place in job.spans():
            payload[place : place + nbytes] = artifact.payload(name)[offset : offset + nbytes]
        job.apply(payload.to(device))
        done += job.nbytes
        if progress:
            progress(done, total)
    return weights


def random_packed(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cuda",
    mtp: bool = True,
    draft_head: bool = True,
    recipe: Recipe | None = None,
) -> PackedWeights:
    """Random weights in the formats of a recipe (default: the published one), made on the device.

    Codes cover their whole range. Scales make a product of unit inputs a unit output, so activations stay of order 1
    through all layers. The same seed gives the same weights on the same kind of device.
    """
    objects = inventory(config, recipe or default_recipe(config), mtp=mtp, vision=False, draft=mtp and draft_head)
    weights, jobs = _build(config, objects, device, mtp)
    generator = torch.Generator(torch.device(device)).manual_seed(seed)
    limit = min(config.vocab_size, 248_077) if config.model_id.startswith("qwen3.6") else config.vocab_size
    for job in jobs:
        if isinstance(job, TensorJob):
            _random_tensor(job.name, job.target, generator, limit)
        else:
            job.apply(_random_payload(job, generator))
    return weights


_SPREAD = {"Q4": 4.61, "Q5": 9.23, "Q6": 18.47, "W8": 73.3}
"""Standard deviation of codes drawn evenly from a format's range."""


def _random_payload(job: MatrixJob, generator: torch.Generator) -> Tensor:
    device, p, short = job.matrix.words.device, job.planes, job.format[:2]
    payload = torch.randint(0, 256, (p.nbytes,), dtype=torch.uint8, device=device, generator=generator)
    if short == "W8":
        payload[payload == 0x80] = 0x81  # -128 is outside the format
    per_row = 1.0 if job.name.endswith("token_embedding") else job.shape[1] ** -0.5
    scales = torch.rand(job.rows * p.groups, device=device, generator=generator) + 0.5
    words = (scales * (per_row / _SPREAD[short])).to(torch.float16)
    payload[p.scale_offset : p.nbytes] = words.view(torch.uint8)
    return payload


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


# --- reading back ----------------------------------------------------------------------------------------------------


def dequantize(matrix: KernelMatrix, rows: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows `[start, stop)` (multiples of 16; default all) of a matrix as values `[n, K]`: scale times code."""
    start, stop = rows or (0, matrix.rows)
    tiles = slice(start // 16, stop // 16)
    part = KernelMatrix(
        matrix.words[tiles], matrix.high[tiles], matrix.scales[tiles], matrix.format, stop - start, matrix.columns
    )
    codes, scales = from_kernel_order(part)
    values = codes.view(stop - start, scales.shape[1], -1).float() * scales.float()[..., None]
    return values.view(stop - start, matrix.columns).to(dtype)


def named(weights: PackedWeights) -> Iterator[tuple[str, KernelMatrix | Tensor]]:
    """Every tensor under its artifact name; parts that are stored as one carry the name of the fused object."""
    yield "text/token_embedding", weights.embedding
    for index, layer in enumerate(weights.layers):
        yield from _named_layer(f"text/layers/{index}/", layer)
    yield "text/final_norm", weights.final_norm
    yield "text/output_head", weights.head
    if weights.draft_head is not None:
        yield "text/draft_head", weights.draft_head.weight
        yield "text/draft_head_token_ids", weights.draft_head.ids
    if weights.mtp is not None:
        mtp = weights.mtp
        yield "mtp/input_projection", mtp.proj
        yield "mtp/embedding_norm", mtp.embedding_norm
        yield "mtp/hidden_norm", mtp.hidden_norm
        yield from _named_layer("mtp/layer/", mtp.layer)
        yield "mtp/final_norm", mtp.final_norm


_GDN = {
    "query_key_value_z": "proj",
    "a_b_projection": "side",
    "convolution": "taps",
    **{name: name for name in ("a_log", "dt_bias", "norm", "output")},
}
_ATTENTION = {"query_key_gate_value": "proj", "query_norm": "q_norm", "key_norm": "k_norm", "output": "output"}
_MOE = {
    "router_shared_gate": "router",
    "routed_gate_up": "gate_up",
    "routed_down": "down",
    **{name: name for name in ("shared_gate_up", "shared_down")},
}


def _named_layer(prefix: str, layer: PackedLayer) -> Iterator[tuple[str, KernelMatrix | Tensor]]:
    yield prefix + "input_norm", layer.input_norm
    mixer, fields = ("gdn/", _GDN) if isinstance(layer.mixer, PackedGdn) else ("attention/", _ATTENTION)
    for name, attribute in fields.items():
        yield prefix + mixer + name, getattr(layer.mixer, attribute)
    yield prefix + "post_attention_norm", layer.post_norm
    mlp, fields = (
        ("moe/", _MOE) if isinstance(layer.ffn, PackedMoe) else ("mlp/", {"gate_up": "gate_up", "down": "down"})
    )
    for name, attribute in fields.items():
        yield prefix + mlp + name, getattr(layer.ffn, attribute)


def reference_weights(weights: PackedWeights, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Weights:
    """The same model for the torch path, on the device of the packed one: what its kernels are compared with."""
    objects = dict(named(weights))

    def get(name: str) -> Tensor:
        found = objects[name]
        if isinstance(found, Tensor):
            return found
        values = dequantize(found)
        if name.endswith("mlp/gate_up"):  # back from alternating runs of 32 rows
            values = values.view(-1, 2, 32, found.columns).transpose(0, 1).reshape(found.rows, found.columns)
        return values

    return from_objects(config, get, set(objects), weights.final_norm.device, dtype)
