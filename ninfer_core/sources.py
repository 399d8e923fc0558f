"""Which checkpoint tensors, and which of their rows, make up each object of an artifact.

Fused matrices are lists of row ranges in order. Query and output-gate rows are interleaved per head in the checkpoint
(`head_dim` query rows, then `head_dim` gate rows) and apart in the artifact; splitting the source in two halves instead
would give plausible shapes and wrong numbers. Nothing else is permuted, shifted or scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import ConvertError
from .inventory import Inventory

TEXT, VISION, MTP = "model.language_model.", "model.visual.", "mtp."


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `first : first + rows` of one source tensor seen as a matrix; `rows` 0 takes all.

    `head`: the rows asked for are every other run of `head` rows: query rows of the interleaved query and gate
    projection, or gate rows with `gate`.
    """

    source: str
    shape: tuple[int, ...]
    first: int = 0
    rows: int = 0
    head: int = 0
    gate: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """How to build one object: parts in row order. `kind`: `rows`, `convolution` (transposed) or `draft` (gathered)."""

    parts: tuple[Part, ...]
    kind: str = "rows"


def bind(config: ModelConfig, objects: Inventory, checkpoint: Checkpoint) -> dict[str, Source]:
    """Find the sources of all objects and check that they exist, have the right shapes, and that none is left over.

    Args:
        config: the model.
        objects: the inventory to build; its `text/draft_head_token_ids` has no source.
        checkpoint: where the tensors are.

    Raises:
        ConvertError: a tensor is missing, has another shape, or is not used.
    """
    wanted: dict[str, Source] = {
        "text/token_embedding": _whole(f"{TEXT}embed_tokens.weight", config.vocab_size, config.hidden_size),
        "text/final_norm": _whole(f"{TEXT}norm.weight", config.hidden_size),
        "text/output_head": _whole("lm_head.weight", config.vocab_size, config.hidden_size),
    }
    wanted["text/draft_head"] = Source(wanted["text/output_head"].parts, "draft")
    for layer, kind in enumerate(config.layer_types):
        for name, source in _layer(config, checkpoint, f"{TEXT}layers.{layer}.", kind, config.is_moe):
            wanted[f"text/layers/{layer}/{name}"] = source
    h = config.hidden_size
    for name, tensor in (("embedding_norm", "pre_fc_norm_embedding"), ("hidden_norm", "pre_fc_norm_hidden")):
        wanted[f"mtp/{name}"] = _whole(f"{MTP}{tensor}.weight", h)
    wanted["mtp/input_projection"] = _whole(f"{MTP}fc.weight", h, 2 * h)
    wanted["mtp/final_norm"] = _whole(f"{MTP}norm.weight", h)
    for name, source in _layer(config, checkpoint, f"{MTP}layers.0.", "full_attention", fused=True):
        wanted[f"mtp/layer/{name}"] = source
    if config.vision is not None:
        wanted |= _vision(config)
    bound = {name: wanted[name] for name in objects if name != "text/draft_head_token_ids"}
    _check(bound, checkpoint)
    return bound


def _whole(source: str, *shape: int) -> Source:
    return Source((Part(source, shape),))


def _join(*parts: tuple[str, tuple[int, ...]]) -> Source:
    return Source(tuple(Part(source, shape) for source, shape in parts))


def _layer(
    config: ModelConfig, checkpoint: Checkpoint, prefix: str, kind: str, fused: bool
) -> Iterator[tuple[str, Source]]:
    h = config.hidden_size
    yield "input_norm", _whole(f"{prefix}input_layernorm.weight", h)
    yield "post_attention_norm", _whole(f"{prefix}post_attention_layernorm.weight", h)
    if kind == "full_attention":
        yield from _attention(config, f"{prefix}self_attn.", fused)
    else:
        yield from _gdn(config, f"{prefix}linear_attn.", fused)
    yield from _moe(config, checkpoint, f"{prefix}mlp.") if config.is_moe else _mlp(config, f"{prefix}mlp.")


def _attention(config: ModelConfig, prefix: str, fused: bool) -> Iterator[tuple[str, Source]]:
    h, q, kv, d = config.hidden_size, config.query_width, config.kv_width, config.head_dim
    both = (2 * q, h)
    query = Part(f"{prefix}q_proj.weight", both, rows=q, head=d)
    gate = Part(f"{prefix}q_proj.weight", both, rows=q, head=d, gate=True)
    key, value = Part(f"{prefix}k_proj.weight", (kv, h)), Part(f"{prefix}v_proj.weight", (kv, h))
    if fused:
        yield "attention/query_key_gate_value", Source((query, key, gate, value))
    else:
        yield "attention/query_key", Source((query, key))
        yield "attention/gate_value", Source((gate, value))
    yield "attention/query_norm", _whole(f"{prefix}q_norm.weight", d)
    yield "attention/key_norm", _whole(f"{prefix}k_norm.weight", d)
    yield "attention/output", _whole(f"{prefix}o_proj.weight", h, q)


def _gdn(config: ModelConfig, prefix: str, fused: bool) -> Iterator[tuple[str, Source]]:
    h, heads, key, value = (
        config.hidden_size,
        config.linear_num_value_heads,
        config.gdn_key_width,
        config.gdn_value_width,
    )
    qkv, qkv_shape = f"{prefix}in_proj_qkv.weight", (2 * key + value, h)
    z = Part(f"{prefix}in_proj_z.weight", (value, h))
    a, b = (f"{prefix}in_proj_a.weight", (heads, h)), (f"{prefix}in_proj_b.weight", (heads, h))
    yield "gdn/a_log", _whole(f"{prefix}A_log", heads)
    yield "gdn/dt_bias", _whole(f"{prefix}dt_bias", heads)
    conv = Part(f"{prefix}conv1d.weight", (config.conv_channels, 1, config.linear_conv_kernel_dim))
    yield "gdn/convolution", Source((conv,), "convolution")
    if fused:
        yield "gdn/a_b_projection", _join(a, b)
        yield "gdn/query_key_value_z", Source((Part(qkv, qkv_shape), z))
    else:
        yield "gdn/a_projection", _join(a)
        yield "gdn/b_projection", _join(b)
        yield "gdn/query_key", Source((Part(qkv, qkv_shape, 0, 2 * key),))
        yield "gdn/value_z", Source((Part(qkv, qkv_shape, 2 * key, value), z))
    yield "gdn/norm", _whole(f"{prefix}norm.weight", config.linear_value_head_dim)
    yield "gdn/output", _whole(f"{prefix}out_proj.weight", h, value)


def _mlp(config: ModelConfig, prefix: str) -> Iterator[tuple[str, Source]]:
    h, width = config.hidden_size, config.intermediate_size
    yield "mlp/gate_up", _join((f"{prefix}gate_proj.weight", (width, h)), (f"{prefix}up_proj.weight", (width, h)))
    yield "mlp/down", _whole(f"{prefix}down_proj.weight", h, width)


def _moe(config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> Iterator[tuple[str, Source]]:
    h, experts = config.hidden_size, config.num_experts
    width, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    yield (
        "moe/router_shared_gate",
        _join((f"{prefix}gate.weight", (experts, h)), (f"{prefix}shared_expert_gate.weight", (1, h))),
    )
    if f"{prefix}experts.0.gate_proj.weight" in checkpoint.tensors:  # stored one by one: gate rows first
        one = [f"{prefix}experts.{e}." for e in range(experts)]
        pairs = [(f"{p}{m}_proj.weight", (width, h)) for p in one for m in ("gate", "up")]
        yield "moe/routed_gate_up", _join(*pairs)
        yield "moe/routed_down", _join(*((f"{p}down_proj.weight", (h, width)) for p in one))
    else:
        yield "moe/routed_gate_up", _whole(f"{prefix}experts.gate_up_proj", experts, 2 * width, h)
        yield "moe/routed_down", _whole(f"{prefix}experts.down_proj", experts, h, width)
    p = f"{prefix}shared_expert."
    yield "moe/shared_gate_up", _join((f"{p}gate_proj.weight", (shared, h)), (f"{p}up_proj.weight", (shared, h)))
    yield "moe/shared_down", _whole(f"{p}down_proj.weight", h, shared)


def _vision(config: ModelConfig) -> dict[str, Source]:
    v = config.vision
    assert v is not None
    w, m, merged = v.hidden_size, v.intermediate_size, v.hidden_size * v.spatial_merge_size**2
    out: dict[str, Source] = {}

    def linear(name: str, tensor: str, *shape: int) -> None:
        out[f"vision/{name}"] = _whole(f"{VISION}{tensor}.weight", *shape)
        out[f"vision/{name}_bias"] = _whole(f"{VISION}{tensor}.bias", shape[0])

    def norm(name: str, tensor: str) -> None:
        for part in ("weight", "bias"):
            out[f"vision/{name}/{part}"] = _whole(f"{VISION}{tensor}.{part}", w)

    patch = (v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    linear("patch_embedding", "patch_embed.proj", w, *patch)
    out["vision/position_embedding"] = _whole(f"{VISION}pos_embed.weight", v.num_position_embeddings, w)
    for b in range(v.depth):
        linear(f"layers/{b}/attention/qkv", f"blocks.{b}.attn.qkv", 3 * w, w)
        linear(f"layers/{b}/attention/output", f"blocks.{b}.attn.proj", w, w)
        linear(f"layers/{b}/mlp/fc1", f"blocks.{b}.mlp.linear_fc1", m, w)
        linear(f"layers/{b}/mlp/fc2", f"blocks.{b}.mlp.linear_fc2", w, m)
        norm(f"layers/{b}/norm1", f"blocks.{b}.norm1")
        norm(f"layers/{b}/norm2", f"blocks.{b}.norm2")
    linear("merger/fc1", "merger.linear_fc1", merged, merged)
    linear("merger/fc2", "merger.linear_fc2", v.out_hidden_size, merged)
    norm("merger/norm", "merger.norm")
    return out


def _check(bound: dict[str, Source], checkpoint: Checkpoint) -> None:
    used: set[str] = set()
    for name, source in bound.items():
        for part in source.parts:
            if part.source not in checkpoint.tensors:
                hint = "; pass mtp=False to leave the incomplete MTP layer out" if part.source.startswith(MTP) else ""
                raise ConvertError(f"the checkpoint has no {part.source!r}, needed for {name}{hint}")
            used.add(part.source)
            found = checkpoint.tensors[part.source][1].shape
            if found == part.shape:
                continue
            if source.kind == "convolution" and len(found) == 3 and found[2] == 1:
                raise ConvertError(
                    f"{part.source} has shape {list(found)}: an MLX export, whose norm weights are also shifted; "
                    "convert the original checkpoint instead"
                )
            raise ConvertError(f"{part.source} has shape {list(found)}; config.json asks for {list(part.shape)}")
    left = sorted(set(checkpoint.tensors) - used)
    if left:
        raise ConvertError(f"{len(left)} tensors of the checkpoint have no place in this model, first {left[0]!r}")


class RowReader:
    """Rows of one object, `[rows, columns]`, put together from its parts on demand. Safe to share between threads."""

    def __init__(self, checkpoint: Checkpoint, source: Source, columns: int) -> None:
        self._checkpoint, self._parts, self._columns = checkpoint, source.parts, columns
        self._ends: list[int] = []
        for part in source.parts:
            total = torch.Size(part.shape).numel() // columns
            self._ends.append((self._ends[-1] if self._ends else 0) + (part.rows or total - part.first))

    @property
    def rows(self) -> int:
        """Rows of the object."""
        return self._ends[-1]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop`, `[stop - start, columns]`; parts of different dtypes come as float32."""
        pieces, begin = [], 0
        for part, end in zip(self._parts, self._ends, strict=True):
            if start < end and stop > begin:
                pieces += self._piece(part, max(start, begin) - begin, min(stop, end) - begin)
            begin = end
        if len({piece.dtype for piece in pieces}) > 1:
            pieces = [piece.float() for piece in pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _piece(self, part: Part, start: int, stop: int) -> list[torch.Tensor]:
        def rows(first: int, count: int) -> torch.Tensor:
            return self._checkpoint.rows(part.source, first, count, self._columns)

        if not part.head:
            return [rows(part.first + start, stop - start)]
        out, at = [], start
        while at < stop:
            run = min(stop - at, part.head - at % part.head)
            out.append(rows(at // part.head * 2 * part.head + at % part.head + part.gate * part.head, run))
            at += run
        return out

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Single rows by number, in the order of `ids`; for objects made of one whole tensor."""
        (part,) = self._parts
        return self._checkpoint.gather(part.source, ids, self._columns)
