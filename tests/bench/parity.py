"""Logits of full-size random models, kernels against transformers on one GPU: `python -m tests.bench.parity 35b 27b`.

transformers' own layers run one after the other in fp32 and bf16 on the dequantised weights, so that a model of 70 GB
needs the memory of one layer. For the kernels of rounds, whose activations are int8, and for those of prompts (bf16):
relative error of the logits, top-1 agreement, KL; and the same between the two, the effect of the int8 activations.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from ninfer_core.config import ModelConfig
from ninfer_core.packed import (
    PackedAttention,
    PackedGdn,
    PackedLayer,
    PackedMoe,
    PackedWeights,
    dequantize,
    random_packed,
)
from tests.bench.common import MODELS, Record, compare, config_of, device_of, parser_of, recipe_of


def transformers_module(config: ModelConfig):
    """The family's modelling module and its text configuration."""
    if config.is_moe:
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as module

        made = module.Qwen3_5MoeTextConfig(
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            moe_intermediate_size=config.moe_intermediate_size,
            shared_expert_intermediate_size=config.shared_expert_intermediate_size,
            **shared_fields(config),
        )
        return module, "Qwen3_5Moe", made
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    return (
        module,
        "Qwen3_5",
        module.Qwen3_5TextConfig(intermediate_size=config.intermediate_size, **shared_fields(config)),
    )


def shared_fields(config: ModelConfig) -> dict:
    """What both families are configured by."""
    names = (
        "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim linear_num_key_heads "
        "linear_num_value_heads linear_key_head_dim linear_value_head_dim vocab_size max_position_embeddings rms_norm_eps"
    )
    rope = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        "mrope_section": list(config.mrope_section),
        "mrope_interleaved": True,
    }
    return {name: getattr(config, name) for name in names.split()} | {
        "layer_types": list(config.layer_types),
        "rope_parameters": rope,
        "attn_implementation": "sdpa",
        "experts_implementation": "eager",
    }


def layer_tensors(layer: PackedLayer, config: ModelConfig) -> dict[str, Tensor]:
    """A packed layer under the checkpoint's names."""
    out = {"input_layernorm.weight": layer.input_norm, "post_attention_layernorm.weight": layer.post_norm}
    mixer = layer.mixer
    if isinstance(mixer, PackedGdn):
        rows = dequantize(mixer.proj)
        gates = config.linear_num_value_heads
        out |= {
            "linear_attn.in_proj_qkv.weight": rows[: config.conv_channels],
            "linear_attn.in_proj_z.weight": rows[config.conv_channels :],
            "linear_attn.in_proj_a.weight": mixer.side[:gates],
            "linear_attn.in_proj_b.weight": mixer.side[gates:],
            "linear_attn.conv1d.weight": mixer.taps.t().unsqueeze(1),
            "linear_attn.A_log": mixer.a_log,
            "linear_attn.dt_bias": mixer.dt_bias,
            "linear_attn.norm.weight": mixer.norm,
            "linear_attn.out_proj.weight": dequantize(mixer.output),
        }
    else:
        assert isinstance(mixer, PackedAttention)
        q, k, gate, v = dequantize(mixer.proj).split(
            [config.query_width, config.kv_width, config.query_width, config.kv_width]
        )
        heads = (config.num_attention_heads, config.head_dim, -1)
        out |= {
            "self_attn.q_proj.weight": torch.stack((q.view(heads), gate.view(heads)), 1).flatten(0, 2),
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.q_norm.weight": mixer.q_norm,
            "self_attn.k_norm.weight": mixer.k_norm,
            "self_attn.o_proj.weight": dequantize(mixer.output),
        }
    ffn = layer.ffn
    if isinstance(ffn, PackedMoe):
        gate, up = dequantize(ffn.shared_gate_up).chunk(2)
        out |= {
            "mlp.gate.weight": ffn.router[:-1],
            "mlp.shared_expert_gate.weight": ffn.router[-1:],
            "mlp.experts.gate_up_proj": dequantize(ffn.gate_up).unflatten(0, (config.num_experts, -1)),
            "mlp.experts.down_proj": dequantize(ffn.down).unflatten(0, (config.num_experts, -1)),
            "mlp.shared_expert.gate_proj.weight": gate,
            "mlp.shared_expert.up_proj.weight": up,
            "mlp.shared_expert.down_proj.weight": dequantize(ffn.shared_down),
        }
    else:
        rows = dequantize(ffn.gate_up)
        gate, up = rows.view(-1, 2, 32, rows.shape[1]).unbind(1)
        out |= {
            "mlp.gate_proj.weight": gate.reshape(-1, rows.shape[1]),
            "mlp.up_proj.weight": up.reshape(-1, rows.shape[1]),
            "mlp.down_proj.weight": dequantize(ffn.down),
        }
    return out


@torch.inference_mode()
def transformers_logits(weights: PackedWeights, config: ModelConfig, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits [T, V] fp32 of transformers' layers on the same weights."""
    module, prefix, made = transformers_module(config)
    device = tokens.device
    x = table_rows(weights.embedding, tokens).to(dtype)[None]
    rotary = getattr(module, f"{prefix}TextRotaryEmbedding")(made).to(device)
    places = torch.arange(tokens.shape[0], device=device).view(1, 1, -1).expand(3, 1, -1)
    turn = rotary(x, places)
    for index, layer in enumerate(weights.layers):
        with torch.device("meta"):
            block = getattr(module, f"{prefix}DecoderLayer")(made, index)
        tensors = {name: value.to(device=device, dtype=dtype) for name, value in layer_tensors(layer, config).items()}
        block.load_state_dict(tensors, strict=True, assign=True)
        x = block.eval()(x, position_embeddings=turn, attention_mask=None, position_ids=places[0])
        x = x[0] if isinstance(x, tuple) else x
        del block, tensors
    norm = getattr(module, f"{prefix}RMSNorm")(config.hidden_size, eps=config.rms_norm_eps).to(
        device=device, dtype=dtype
    )
    norm.weight.data.copy_(weights.final_norm)
    h = norm(x)[0]
    step = 1 << 15
    parts = range(0, weights.head.rows, step)
    head = [dequantize(weights.head, (a, min(a + step, weights.head.rows)), dtype) for a in parts]
    return torch.cat([(h @ part.t()).float() for part in head], 1)


def table_rows(table, tokens: Tensor) -> Tensor:
    """Rows of the embedding."""
    wanted = sorted({int(t) // 16 for t in tokens})
    rows = {tile: dequantize(table, (16 * tile, 16 * tile + 16)) for tile in wanted}
    return torch.stack([rows[int(t) // 16][int(t) % 16] for t in tokens])


@torch.inference_mode()
def fused_logits(weights: PackedWeights, config: ModelConfig, tokens: Tensor, chunks: bool) -> Tensor:
    """Logits [T, V] fp32 of the kernels: of rounds, eight rows a call, or those of prompts, in one chunk."""
    from ninfer_core.model.fused import FusedDecoder
    from ninfer_core.model.fused_prefill import FusedPrefill
    from ninfer_core.state import FusedState

    count = tokens.shape[0]
    reader = FusedPrefill(weights, config, rows=count, context=count) if chunks else None
    decoder = FusedDecoder(weights, config, context=count, chunks=reader)
    pages = -(-count // 64)
    state = FusedState(config, slots=1, pages=pages, device=tokens.device)
    hidden = decoder.prefill(state, tokens, 0, 0, list(range(pages)))
    return torch.cat([decoder.logits(part).clone() for part in hidden.split(64)])


def soften(weights: PackedWeights, share: float) -> None:
    """Scale what every layer adds to the residual stream.

    With additions as large as the stream, rounding grows from layer to layer until transformers in bf16 agrees with
    itself in fp32 no better than by chance; trained models add little per layer.
    """
    for layer in weights.layers:
        outputs = [layer.mixer.output]
        outputs += [layer.ffn.down, layer.ffn.shared_down] if isinstance(layer.ffn, PackedMoe) else [layer.ffn.down]
        for matrix in outputs:
            scales = matrix.scales.view(torch.float16)
            for part in scales.split(1 << 14):
                part.mul_(share)


def measure(record: Record, model: str, options: argparse.Namespace, device: str) -> None:
    """All comparisons of one model."""
    config, count = config_of(model, options.tiny), 3 if options.tiny else options.tokens
    weights = random_packed(config, seed=options.seed, device=device, recipe=recipe_of(options.tiny))
    soften(weights, options.share)
    generator = torch.Generator(device).manual_seed(options.seed)
    tokens = torch.randint(0, min(248_000, config.vocab_size), (count,), device=device, generator=generator)
    rows, chunk = (fused_logits(weights, config, tokens, chunks) for chunks in (False, True))
    record.add(f"{model}: share of a layer", options.share)
    record.add(f"{model}: kernels of rounds against those of prompts", compare(rows, chunk))
    exact = transformers_logits(weights, config, tokens, torch.float32)
    record.add(f"{model}: kernels of rounds against transformers fp32", compare(rows, exact))
    record.add(f"{model}: kernels of prompts against transformers fp32", compare(chunk, exact))
    half = transformers_logits(weights, config, tokens, torch.bfloat16)
    record.add(f"{model}: kernels of rounds against transformers bf16", compare(rows, half))
    record.add(f"{model}: transformers bf16 against its fp32", compare(half, exact))


def main() -> int:
    """Compare the models named."""
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", default=["35b"], choices=sorted(MODELS))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.125, help="what a layer adds, against the stream it adds to")
    options = parser.parse_args()
    device = device_of(options)
    record = Record(options.json, device)
    for model in options.models:
        measure(record, model, options, device)
        if device == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
