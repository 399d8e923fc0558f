"""How many bytes a model takes on a device, from its inventory and configuration alone. No torch.

These are the sizes of what `packed`, `weights`, `state` and `model` allocate; a test holds them together. Weights,
pages and slots are exact. Buffers of a path are as close as a description needs: an engine asks the path itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .config import ModelConfig
from .errors import GeometryError, UnsupportedError
from .formats import format_of, up
from .inventory import Inventory

ALIGN = 256
"""Every packed tensor starts at a multiple of this many bytes."""

WIDER = ("Q4", "Q5", "Q6", "W8")
"""A format's values are exact in every later one."""

PAGE = 64
"""Tokens in a KV page."""

KV_GROUP = 64
"""Values of the head axis that share a scale in INT8 pages."""

RING = 16
"""Tokens that a slot of `FusedState` remembers one by one: two windows of eight rows, or one and the convolution."""

ROWS = 64
"""Most rows in a call of the fused path."""

SHORT = 64
"""Pages of a context up to which an attention split is one of them: few splits for many sequences, enough for one."""

FEWEST_SPLITS = 16
"""Attention splits of the shortest context."""

MULTIPROCESSORS = 132
"""Of the card that sizes are described for; buffers of partial results grow with them."""

RESERVE = 512 << 20
"""Device memory beside the plan: compiled kernels, CUDA graphs, fragments, and what other programs ask for."""

OVERHEAD = RESERVE + (512 << 20)
"""What a process takes beside the plan in all: the driver's context too."""

CHUNKS = (16384, 8192, 4096, 2048)
"""Prompt tokens per step on a GPU where `prefill_chunk` is "auto": the first that costs no context (`chunk_for`).

Longer ones read prompts faster, as experts and weights are opened once a chunk; shorter ones need smaller buffers.
"""

BLOCK = 8192
"""Rows of a chunk that the mixers take at once, between which it may wait; the experts take all of them together."""

_ALLOWED = {"token_embedding": ("Q6", "W8"), "shared_down": ("W8",)}
_FUSED = {
    "gate_value": "query_key",
    "value_z": "query_key",
    "b_projection": "a_projection",
}
"""Last words of objects that are stored below another one of the same layer, as one tensor."""


def kernel_format(names: Sequence[str], formats: Sequence[str]) -> str:
    """The format in which the kernels read these objects as one matrix: the widest of theirs, or the next allowed.

    Raises:
        GeometryError: an object is not quantized.
    """
    for name, fmt in zip(names, formats, strict=True):
        if not format_of(fmt).grouped:
            raise GeometryError(f"{name} is stored as {fmt}; the kernels read matrices in {', '.join(WIDER)} only")
    widest = max(WIDER.index(fmt[:2]) for fmt in formats)
    allowed = _ALLOWED.get(names[0].rsplit("/", 1)[1], WIDER)
    return next(fmt for fmt in WIDER[widest:] if fmt in allowed)


def packed_bytes(objects: Inventory, *, mtp: bool = True, embedding: bool = True) -> int:
    """Device bytes of the text model in kernel order.

    Args:
        objects: name -> (shape, format) of the artifact.
        mtp: count the draft layer and the reduced draft head.
        embedding: count the embedding table.

    Raises:
        GeometryError: a matrix that the kernels do not take.
    """
    total = 0
    for name, (shape, fmt) in objects.items():
        prefix, last = name.rsplit("/", 1)
        skipped = not mtp and (name.startswith("mtp/") or last.startswith("draft_head"))
        skipped = skipped or (not embedding and last == "token_embedding")
        if skipped or not name.startswith(("text/", "mtp/")) or last in _FUSED:
            continue
        parts = [name] + [f"{prefix}/{other}" for other, first in _FUSED.items() if first == last]
        parts = [part for part in parts if part in objects]
        rows = sum(objects[part][0][0] for part in parts)
        if not format_of(fmt).grouped and len(shape) == 2 and last not in _DIRECT:
            kernel_format(parts, [objects[part][1] for part in parts])
        if format_of(fmt).grouped:
            short = kernel_format(parts, [objects[part][1] for part in parts])
            total += sum(up(size, ALIGN) for size in _plane_bytes(short, rows, shape[1]))
        else:
            total += up(rows * math.prod(shape[1:]) * format_of(fmt).bits // 8, ALIGN)
    return total


_DIRECT = ("convolution", "a_b_projection", "a_projection", "router_shared_gate")


def _plane_bytes(short: str, rows: int, columns: int) -> tuple[int, int, int]:
    """Words, high words and scales of a matrix in kernel order: what the file's planes hold, without padding."""
    bits, group = {"Q4": (4, 64), "Q5": (5, 64), "Q6": (6, 64), "W8": (8, 32)}[short]
    count = rows * columns
    return count * (8 if bits == 8 else 4) // 8, count * (0 if bits == 8 else bits - 4) // 8, count // group * 2


def reference_bytes(objects: Inventory, itemsize: int, *, mtp: bool = True, vision: bool = False) -> int:
    """Bytes of the torch path's weights, within one percent: matrices in the compute type, the rest in fp32."""
    total = 0
    for name, (shape, fmt) in objects.items():
        last = name.rsplit("/", 1)[1]
        if name.startswith("vision/"):
            continue
        if (mtp or not (name.startswith("mtp/") or last.startswith("draft_head"))) and not name.startswith("dflash/"):
            plain = len(shape) == 1 or last in ("router_shared_gate", "convolution")
            total += math.prod(shape) * (8 if fmt == "I32" else 4 if plain else itemsize)
    return total + (tower_bytes(objects, itemsize) if vision else 0)


def tower_bytes(objects: Inventory, itemsize: int) -> int:
    """Bytes of the vision tower, whose matrices are opened into the compute type when it is loaded."""
    total = 0
    for name, (shape, _) in objects.items():
        if name.startswith("vision/"):
            fp32 = "norm" in name or name.endswith("position_embedding")
            total += math.prod(shape) * (4 if fp32 else itemsize)
    return total


# --- state -----------------------------------------------------------------------------------------------------------


def page_bytes(config: ModelConfig, kv_cache: str) -> int:
    """Bytes of one KV page over all attention layers and the draft layer."""
    layers = len(config.attention_layers) + config.mtp_num_hidden_layers
    size = {"int8": 1, "bf16": 2, "fp32": 4}[kv_cache] * config.head_dim
    scales = 2 * (config.head_dim // KV_GROUP) if kv_cache == "int8" else 0
    return layers * 2 * config.num_key_value_heads * PAGE * (size + scales)


def slot_bytes(config: ModelConfig, drafts: int) -> int:
    """Bytes of one slot of `State`: recurrent state, convolution rows and a window of `drafts` + 1 rows, fp32."""
    heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    window = (drafts + 1) * (config.gdn_key_width + config.gdn_value_width + heads)
    rows = (config.linear_conv_kernel_dim - 1 + drafts + 1) * config.conv_channels
    return len(config.gdn_layers) * 4 * (heads * key * value + window + rows)


def fused_slot_bytes(config: ModelConfig) -> int:
    """Bytes of one slot of `FusedState`: fp32 recurrent state and rings of the last tokens."""
    heads = config.linear_num_value_heads
    state = 4 * heads * config.linear_key_head_dim * config.linear_value_head_dim
    ring = 2 * config.conv_channels + 4 * (config.gdn_key_width + config.gdn_value_width + heads)
    return len(config.gdn_layers) * (state + RING * ring)


# --- workspaces of the fused path ------------------------------------------------------------------------------------


def attention_splits(kv_heads: int, processors: int = MULTIPROCESSORS) -> int:
    """Most splits of a row's context: as many attention programs as a card holds at once, two a multiprocessor.

    Two of 255 registers a thread fit, those of four rows.
    """
    return min(128, 2 * processors // kv_heads)


def splits_of(tokens: int, most: int) -> int:
    """Attention programs along a sequence that cover every row which sees at most `tokens` tokens."""
    pages = -(-tokens // PAGE)
    return min(most, max(min(pages, SHORT), -(-pages // 2)))


def attention_parts(rows: int, splits: int) -> int:
    """Rows x splits that a workspace has room for: half of its rows at the most splits, and all of them at `SHORT`."""
    return max(max(RING // 2, rows // 2) * splits, rows * min(splits, SHORT))


SHARED_PARTS = 4
"""Parts of K of a projection into the residual stream that there is room for."""


def decode_workspace_bytes(config: ModelConfig, context: int, rows: int = ROWS) -> int:
    """About the bytes of `model.fused.Workspace` for calls of up to `rows` rows over `context` tokens."""

    def activation(columns: int, parts: int) -> int:
        return rows * (columns // 32 * 68 + 4 * parts)

    hidden, width, heads = config.hidden_size, config.gdn_value_width, config.linear_num_value_heads
    most = attention_splits(config.num_key_value_heads)
    parts = attention_parts(rows, max(FEWEST_SPLITS, splits_of(context + RING // 2, most)))
    total = 5 * rows * hidden * 4 + 2 * activation(hidden, hidden // 32) + activation(2 * hidden, 1)
    total += activation(width, 4 * heads) + activation(config.query_width, 1)
    total += rows * hidden * 4 * SHARED_PARTS + rows // 8 * hidden // 32 * 4
    total += rows * (2 * (config.conv_channels + width) + 8 * heads + 4 * (config.query_width + config.kv_width))
    total += parts * config.num_attention_heads * (256 + 2) * 4
    if config.is_moe:
        pairs = config.num_experts_per_tok
        total += rows * (4 * (config.num_experts + 1) + 8 * config.moe_intermediate_size + 8 * pairs)
        total += rows * (pairs + 1) * config.moe_intermediate_size // 32 * 36 + rows * pairs * hidden * 4
        total += config.num_experts * (ROWS + 1) * 4
        total += config.num_experts * (rows + 1) * 4 + rows * pairs * hidden * 4
    else:
        total += activation(config.intermediate_size, 1)
    return total + rows * (512 + config.vocab_size * 4 + config.vocab_size // 32 * 8)


SCRATCH = 64 << 20
"""Values of the scratch that dense weights are opened into for a prompt chunk."""


def prefill_workspace_bytes(config: ModelConfig, rows: int, context: int) -> int:
    """About the bytes of `model.fused_prefill.FusedPrefill` for chunks of `rows` rows within `context` tokens."""
    hidden, value, heads = config.hidden_size, config.gdn_value_width, config.linear_num_value_heads
    query, kv, inner = config.query_width, config.kv_width, config.intermediate_size
    block = min(rows, BLOCK)
    padded, room = up(block, PAGE), max(context, rows) + 1024
    delta = padded * (2 * config.conv_channels + 8 * heads + 4 * value)
    delta += padded // PAGE * heads * config.linear_key_head_dim * config.linear_value_head_dim * 2
    gdn = delta + block * (2 * (config.conv_channels + value) + 8 * heads + 2 * value)
    attention = block * (4 * (query + kv) + 8 * query + 4 * config.num_attention_heads) + 4 * kv * room
    router = up(config.num_experts + 1, 8)
    if config.is_moe:
        shared, active = config.shared_expert_intermediate_size, config.num_experts_per_tok
        mlp = rows * (
            4 * router + 6 * shared + 2 * hidden + active * (2 * config.moe_intermediate_size + 2 * hidden + 32)
        )
    else:
        mlp = rows * 2 * (3 * inner + hidden)
    widest = max(config.conv_channels + value, 2 * (query + kv), 2 * inner)
    both = (config.conv_channels + 2 * value) * hidden if rows > block else 0
    scratch = 2 * min(max(widest * max(hidden, inner), both), SCRATCH)
    drafts = rows * 4 * hidden + block * (8 * hidden + 4 * (query + kv))
    rest = rows * hidden * 8 + scratch
    rest += rows * 8 * hidden + block * (4 * query + 8 * config.num_attention_heads)  # what lives for one chunk
    routers = config.num_hidden_layers * router * hidden * 2 if config.is_moe else 0
    rest += config.num_hidden_layers * max(1, config.num_experts) * 4
    return max(gdn, attention, mlp, drafts if config.mtp_num_hidden_layers else 0) + rest + routers


# --- what a model needs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Footprint:
    """What must be held, in bytes: `weights`; `page`, one KV page of all layers; `slot`, one sequence's state.

    `workspaces(context)` gives the buffers by name. `drafts`: tokens drafted beyond the last one. `chunk`: prompt
    tokens per step.
    """

    weights: int
    page: int
    slot: int
    drafts: int
    workspaces: Callable[[int], Mapping[str, int]]
    chunk: int

    def pages(self, context: int) -> int:
        """Pages of one sequence that fills the context, with room for the drafts beyond its last token."""
        return -(-(context + self.drafts) // PAGE)

    def kept(self, tokens: int) -> int:
        """Bytes of host memory for the state and pages of a prompt that the prefix cache keeps there."""
        return (-(-self.slot // self.page) + -(-tokens // PAGE)) * self.page

    def total(self, context: int, slots: int = 1) -> int:
        """Bytes for one full context, with the state of `slots` sequences and checkpoints."""
        fixed = self.weights + sum(self.workspaces(context).values()) + slots * self.slot
        return fixed + self.pages(context) * self.page

    def longest(self, budget: int, limit: int, slots: int = 1) -> int:
        """The longest context, at most `limit`, that fits in `budget` bytes; 0 if none does."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.total(middle, slots) <= budget:
                low = middle
            else:
                high = middle - 1
        return low


def chunks_of(config: ModelConfig) -> tuple[int, ...]:
    """The chunk lengths in question for a model, falling: beyond a block only experts gain, as each gets more rows."""
    return CHUNKS if config.is_moe else tuple(chunk for chunk in CHUNKS if chunk <= BLOCK)


def chunk_for(config: ModelConfig, of: Callable[[int], Footprint], budget: int, limit: int, slots: int = 1) -> int:
    """The longest of `chunks_of` with which as long a context, up to `limit`, fits in `budget` bytes as with the
    shortest. `of` gives the footprint with a chunk length. What fits with none gets the shortest.
    """
    longest = {chunk: of(chunk).longest(budget, limit, slots) for chunk in chunks_of(config)}
    most = longest[CHUNKS[-1]]
    return next(chunk for chunk in longest if longest[chunk] == most) if most else CHUNKS[-1]


def fused_footprint(
    config: ModelConfig,
    objects: Inventory,
    *,
    kv_cache: str = "int8",
    drafts: int = 3,
    chunk: int = CHUNKS[-1],
    embedding: bool = True,
    vision: bool = False,
) -> Footprint:
    """What the Triton path needs; `embedding`: the table lies on the device; `vision`: so does the vision tower.

    Raises:
        UnsupportedError: a KV type that its kernels do not read.
        GeometryError: a matrix that its kernels do not take.
    """
    if kv_cache not in ("int8", "bf16"):
        raise UnsupportedError(
            f"kv_cache is {kv_cache!r}; the Triton kernels keep keys and values in int8 or bf16: use one of these, or "
            'device="cpu"',
            param="kv_cache",
        )

    def workspaces(context: int) -> Mapping[str, int]:
        return {
            "workspace of a round": decode_workspace_bytes(config, context),
            "workspace of a prompt chunk": prefill_workspace_bytes(config, chunk, context),
        }

    weights = packed_bytes(objects, mtp=drafts > 0, embedding=embedding) + (tower_bytes(objects, 2) if vision else 0)
    return Footprint(weights, page_bytes(config, kv_cache), fused_slot_bytes(config), drafts, workspaces, chunk)


def reference_footprint(
    config: ModelConfig,
    objects: Inventory,
    *,
    itemsize: int,
    kv_cache: str,
    drafts: int,
    chunk: int,
    vision: bool = False,
) -> Footprint:
    """What the torch path needs; `itemsize`: bytes of its compute type."""
    weights = reference_bytes(objects, itemsize, mtp=drafts > 0, vision=vision)
    return Footprint(
        weights, page_bytes(config, kv_cache), slot_bytes(config, drafts), drafts, lambda context: {}, chunk
    )
