"""Shapes shared by tests and benchmarks: tiny models of both families, and the demo's shape."""

from __future__ import annotations

from typing import Any

from ninfer_core.config import ModelConfig, config_from_dict

WIDE = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 96,
    "out_hidden_size": 96,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
    "hidden_act": "gelu_pytorch_tanh",
}
MLP = {
    "dense": {"intermediate_size": 160},
    "moe": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 32,
    },
}
IDS = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}

DEMO = ModelConfig(
    model_id="ninfer-demo",
    hidden_size=256,
    num_hidden_layers=8,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=256,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    vocab_size=6144,
    max_position_embeddings=32768,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
)


def tiny_dict(kind: str) -> dict[str, Any]:
    """`config.json` of a tiny model, `kind` "dense" or "moe"."""
    moe = "_moe" if kind == "moe" else ""
    return {
        "model_type": f"qwen3_5{moe}",
        "text_config": {**WIDE, **MLP[kind], "model_type": f"qwen3_5{moe}_text"},
        "vision_config": dict(VISION),
        **IDS,
    }


def tiny_config(kind: str) -> ModelConfig:
    """The same as a `ModelConfig`."""
    return config_from_dict(tiny_dict(kind), f"tiny-{kind}")
