"""The two models, and the demo, as frozen dataclasses read from a checkpoint's `config.json`.

Field names are those of the checkpoint where they exist. Reading checks every value the engine relies on and refuses
the rest by name: a silently ignored key is how wrong numbers start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InventoryError

MAX_LAYERS = 1000
"""Layers of a decoder or vision tower; the published models have 64."""

MAX_SIZE = 2**31 - 1
"""Largest size or count."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower. `out_hidden_size` is the text width the merger projects to."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    patch_size: int = 16
    temporal_patch_size: int = 2
    in_channels: int = 3
    spatial_merge_size: int = 2
    num_position_embeddings: int = 2304

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values in one patch row: channels x frames x patch x patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def grid_side(self) -> int:
        """Side of the square position table."""
        return round(self.num_position_embeddings**0.5)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Qwen3.6 text decoder (dense or mixture of experts) with an optional MTP layer and vision tower."""

    model_id: str
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    vocab_size: int
    max_position_embeddings: int
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    rotary_dim: int = 64
    mrope_section: tuple[int, int, int] = (11, 11, 10)
    mtp_num_hidden_layers: int = 1
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    vision: VisionConfig | None = None

    @property
    def is_moe(self) -> bool:
        """Whether every MLP is a mixture of experts with a shared expert."""
        return self.num_experts > 0

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Zero-based indices of the full-attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Zero-based indices of the Gated DeltaNet layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def query_width(self) -> int:
        """Query heads x head size."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """KV heads x head size."""
        return self.num_key_value_heads * self.head_dim

    @property
    def gdn_key_width(self) -> int:
        """GDN key heads x key head size (queries have the same width)."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def gdn_value_width(self) -> int:
        """GDN value heads x value head size (the output gate z has the same width)."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: queries, keys, values."""
        return 2 * self.gdn_key_width + self.gdn_value_width


_NUMBERS = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_EXPERT_NUMBERS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


_VISION_NUMBERS = {
    "depth": MAX_LAYERS,
    **dict.fromkeys(("hidden_size", "num_heads", "intermediate_size", "out_hidden_size"), MAX_SIZE),
}
_VISION_DEFAULTS = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
}


def _need(section: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in section:
        raise InventoryError(f"config.json: {where}.{key} is missing")
    return section[key]


def _want(value: Any, expected: Any, what: str) -> None:
    if value != expected:
        raise InventoryError(f"config.json: {what} is {value!r}; this engine computes {expected!r} only")


def _integer(value: Any, what: str, low: int = 1, high: int = MAX_SIZE) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InventoryError(f"config.json: {what} is {_brief(value)}; it must be an integer from {low} to {high}")
    return value


def _positive(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
        raise InventoryError(f"config.json: {what} is {_brief(value)}; it must be a finite number above 0")
    return float(value)


def _section(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InventoryError(f"config.json: {what} is {_brief(value)}; it must be an object")
    return value


def _brief(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _token_id(config: Mapping[str, Any], key: str) -> int | None:
    return None if config.get(key) is None else _integer(config[key], key, 0)


def vision_config_from_dict(vision: Mapping[str, Any]) -> VisionConfig:
    """Read `vision_config`.

    Raises:
        InventoryError: a key is missing, a value has the wrong type or size, or asks for arithmetic that is not
            implemented.
    """
    _section(vision, "vision_config")
    _want(vision.get("deepstack_visual_indexes") or [], [], "vision_config.deepstack_visual_indexes")
    _want(vision.get("hidden_act", "gelu_pytorch_tanh"), "gelu_pytorch_tanh", "vision_config.hidden_act")
    return VisionConfig(
        **{
            key: _integer(_need(vision, key, "vision_config"), f"vision_config.{key}", high=high)
            for key, high in _VISION_NUMBERS.items()
        },
        **{
            key: _integer(vision.get(key, default), f"vision_config.{key}") for key, default in _VISION_DEFAULTS.items()
        },
    )


def config_from_dict(config: Mapping[str, Any], model_id: str = "") -> ModelConfig:
    """Read a checkpoint's `config.json` (already parsed).

    Raises:
        InventoryError: a needed key is missing, a value has the wrong type or size, or asks for arithmetic that is not
            implemented.
    """
    text = _section(_need(_section(config, "the file"), "text_config", "config"), "text_config")
    _want(bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))), False, "tie_word_embeddings")
    _want(text.get("output_gate_type", "swish"), "swish", "text_config.output_gate_type")
    _want(text.get("hidden_act", "silu"), "silu", "text_config.hidden_act")
    _want(bool(text.get("attention_bias", False)), False, "text_config.attention_bias")
    _want(bool(text.get("attn_output_gate", True)), True, "text_config.attn_output_gate")
    layers = _integer(_need(text, "num_hidden_layers", "text_config"), "text_config.num_hidden_layers", high=MAX_LAYERS)
    interval = _integer(text.get("full_attention_interval", 4), "text_config.full_attention_interval")
    rule = tuple("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))
    given = text.get("layer_types") or rule
    types = tuple(given) if isinstance(given, list | tuple) else given
    _want(types, rule, "text_config.layer_types")
    rope = _section(text.get("rope_parameters") or text.get("rope_scaling") or {}, "text_config.rope_parameters")
    _want(rope.get("rope_type", rope.get("type", "default")), "default", "rope_parameters.rope_type")
    _want(bool(rope.get("mrope_interleaved", True)), True, "rope_parameters.mrope_interleaved")
    head_dim = _integer(text.get("head_dim", 256), "text_config.head_dim")
    factor = _positive(
        rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25)), "partial_rotary_factor"
    )
    if factor > 1:
        raise InventoryError(f"config.json: partial_rotary_factor is {factor}; it must be 1 or less")
    rotary_dim = int(head_dim * factor)
    section = rope.get("mrope_section", (11, 11, 10))
    if not isinstance(section, list | tuple):
        raise InventoryError(f"config.json: mrope_section is {_brief(section)}; it must be three integers")
    section = tuple(_integer(n, "mrope_section") for n in section)
    if len(section) != 3 or sum(section) * 2 != rotary_dim:
        raise InventoryError(f"config.json: mrope_section {section} does not add up to {rotary_dim // 2} pairs")
    numbers = {key: _integer(_need(text, key, "text_config"), f"text_config.{key}") for key in _NUMBERS}
    if numbers["num_attention_heads"] % numbers["num_key_value_heads"]:
        raise InventoryError("config.json: num_attention_heads is not a multiple of num_key_value_heads")
    if numbers["linear_num_value_heads"] % numbers["linear_num_key_heads"]:
        raise InventoryError("config.json: linear_num_value_heads is not a multiple of linear_num_key_heads")
    experts = _integer(text.get("num_experts") or 0, "text_config.num_experts", 0)
    wanted = _EXPERT_NUMBERS if experts else ("intermediate_size",)
    mlp = {key: _integer(_need(text, key, "text_config"), f"text_config.{key}") for key in wanted}
    if mlp.get("num_experts_per_tok", 0) > experts:
        raise InventoryError(
            f"config.json: num_experts_per_tok is {mlp['num_experts_per_tok']}, but num_experts is {experts}"
        )
    vision = config.get("vision_config")
    return ModelConfig(
        model_id=model_id or str(config.get("model_id", "")),
        num_hidden_layers=layers,
        layer_types=types,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=_positive(rope.get("rope_theta", text.get("rope_theta", 1e7)), "rope_theta"),
        mrope_section=section,  # type: ignore[arg-type]
        linear_conv_kernel_dim=_integer(text.get("linear_conv_kernel_dim", 4), "text_config.linear_conv_kernel_dim"),
        rms_norm_eps=_positive(text.get("rms_norm_eps", 1e-6), "text_config.rms_norm_eps"),
        mtp_num_hidden_layers=_integer(text.get("mtp_num_hidden_layers", 1), "text_config.mtp_num_hidden_layers", 0),
        image_token_id=_token_id(config, "image_token_id"),
        video_token_id=_token_id(config, "video_token_id"),
        vision_start_token_id=_token_id(config, "vision_start_token_id"),
        vision_end_token_id=_token_id(config, "vision_end_token_id"),
        vision=vision_config_from_dict(vision) if vision else None,
        **numbers,
        **mlp,
    )


_VISION = VisionConfig(depth=27, hidden_size=1152, num_heads=16, intermediate_size=4304, out_hidden_size=5120)


def _layer_types(layers: int) -> tuple[str, ...]:
    return tuple("full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers))


QWEN36_27B = ModelConfig(
    model_id="qwen3.6-27b",
    hidden_size=5120,
    num_hidden_layers=64,
    layer_types=_layer_types(64),
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    vocab_size=248320,
    max_position_embeddings=262144,
    intermediate_size=17408,
    image_token_id=248056,
    video_token_id=248057,
    vision_start_token_id=248053,
    vision_end_token_id=248054,
    vision=_VISION,
)

QWEN36_35B_A3B = ModelConfig(
    model_id="qwen3.6-35b-a3b",
    hidden_size=2048,
    num_hidden_layers=40,
    layer_types=_layer_types(40),
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    vocab_size=248320,
    max_position_embeddings=262144,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    image_token_id=248056,
    video_token_id=248057,
    vision_start_token_id=248053,
    vision_end_token_id=248054,
    vision=VisionConfig(depth=27, hidden_size=1152, num_heads=16, intermediate_size=4304, out_hidden_size=2048),
)

PUBLISHED = {config.model_id: config for config in (QWEN36_27B, QWEN36_35B_A3B)}
