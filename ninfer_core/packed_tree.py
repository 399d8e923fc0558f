"""The tree of weights in kernel order that the Triton path runs on, and the way back to values.

Names follow `weights.py`. All tensors of a tree are views of one allocation: a model is freed as one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig
from .kernels._order import KernelMatrix, from_kernel_order
from .weights import Weights, from_objects


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
    """All weights of the text model. Parts that the source does not hold are None.

    `embedding` is W8 or Q6, and may lie in pinned host memory instead of the device.
    """

    embedding: KernelMatrix
    layers: tuple[PackedLayer, ...]
    final_norm: Tensor
    head: KernelMatrix
    draft_head: PackedDraftHead | None
    mtp: PackedMtp | None

    @property
    def nbytes(self) -> int:
        """Bytes of the one allocation on the device."""
        return self.final_norm.untyped_storage().nbytes()

    def free(self) -> None:
        """Give the allocation back now, whoever still holds a tensor of it. Nothing may be reading the weights."""
        self.final_norm.untyped_storage().resize_(0)


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
