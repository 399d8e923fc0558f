"""The fewest bytes a step must move: weights in their stored formats, recurrent state, KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import quant
from ..config import ModelConfig
from ..footprint import PAGE, page_bytes

Formats = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes of one step by part."""

    weights: float
    experts: float
    state: float
    kv: float
    drafts: float = 0.0

    @property
    def total(self) -> float:
        """All bytes."""
        return self.weights + self.experts + self.state + self.kv + self.drafts

    def as_dict(self) -> dict[str, int]:
        """Rounded bytes by part."""
        parts = ("weights", "experts", "state", "kv", "drafts")
        return {name: round(getattr(self, name)) for name in parts if getattr(self, name)}


def step_floor(
    config: ModelConfig, formats: Formats, *, context: int, sequences: int = 1, drafts: int = 0, kv_cache: str = "int8"
) -> Floor:
    """The floor of one step of `sequences` at `context` tokens each; with drafts, of a whole round.

    A round verifies `drafts + 1` rows per sequence and then runs the draft layer once per draft. Routed experts count
    once for each distinct one: the expectation for independent uniform choices, the worst case of random weights.
    Every sequence reads its own KV cache and reads and writes its own recurrent state once.
    """
    rows = sequences * (drafts + 1)
    weights = experts = 0.0
    chosen = distinct_share(config, rows)
    for name, (shape, fmt) in formats.items():
        size = quant.payload_bytes(fmt, shape)
        if not name.startswith("text/") or name.startswith("text/draft_head"):
            continue
        if name == "text/token_embedding":
            weights += size / shape[0] * rows
        elif "/moe/routed_" in name:
            experts += size * chosen
        else:
            weights += size
    token, slot = _per_token(config, kv_cache)
    layers = len(config.attention_layers)
    cache = token * layers * context * sequences
    return Floor(
        weights, experts, 2 * slot * sequences, cache, _draft_bytes(config, formats, context, sequences, drafts, token)
    )


def distinct_share(config: ModelConfig, rows: int) -> float:
    """The expected share of routed experts that `rows` independent uniform choices touch."""
    if not config.is_moe:
        return 0.0
    return 1 - (1 - config.num_experts_per_tok / config.num_experts) ** rows


def _draft_bytes(
    config: ModelConfig, formats: Formats, context: int, sequences: int, drafts: int, token: float
) -> float:
    """Bytes of `drafts` passes through the draft layer and its head."""
    if not drafts:
        return 0.0
    size = 0.0
    head = "text/draft_head" if "text/draft_head" in formats else "text/output_head"
    for name, (shape, fmt) in formats.items():
        if name.startswith("mtp/") or name == head:
            share = distinct_share(config, sequences) if "/moe/routed_" in name else 1.0
            size += quant.payload_bytes(fmt, shape) * share
    return drafts * (size + token * context * sequences)


def _per_token(config: ModelConfig, kv_cache: str) -> tuple[float, float]:
    """Bytes of one token in one attention layer, and of the recurrent state of one sequence."""
    page = page_bytes(config, kv_cache)
    layers = len(config.attention_layers) + config.mtp_num_hidden_layers
    heads = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    return page / PAGE / layers, 4.0 * heads * len(config.gdn_layers)
