"""Named tolerances, oracles and small builders shared by the tests of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ninfer_core.config import ModelConfig
from ninfer_core.state import State
from ninfer_core.weights import Weights, load_weights

LOGITS_DENSE = 1e-4
"""fp32 logits of a few layers against another implementation, dense MLP; relative to the largest value."""
LOGITS_MOE = 1.5e-4
"""The same through experts, whose inner values are larger."""
GDN_STATE = 2e-5
"""Recurrent state and convolution rows in fp32 after some hundred rows."""
VISION = 5e-6
"""fp32 vision features."""
EXACT_FP64 = 1e-13
"""Two algebraically equal forms in fp64."""
ONE_OP = 3e-6
"""One op in fp32 against a direct formula in fp64."""
INT8_KV = 1.0 / 127
"""Relative error of a group of 64 rounded to INT8 with an fp16 scale."""


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest wanted magnitude; infinite when something is not finite."""
    if got.shape != want.shape or not torch.isfinite(got).all():
        return float("inf")
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes and equal bits."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def reference_model(config: dict[str, Any], seed: int = 0) -> Any:
    """The transformers model of a tiny `config.json`, fp32, with random norms and gates too."""
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    if config["model_type"].endswith("_moe"):
        made = transformers.Qwen3_5MoeConfig(**config)
        kind = moe.Qwen3_5MoeForConditionalGeneration
    else:
        made = transformers.Qwen3_5Config(**config)
        kind = dense.Qwen3_5ForConditionalGeneration
    made._attn_implementation = "eager"
    model = kind(made).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1:
                value.copy_(torch.randn_like(value) * 0.3)
                if ("visual" in name and "norm" in name and name.endswith("weight")) or "linear_attn.norm" in name:
                    value.add_(1)
            else:
                value.copy_(torch.randn_like(value) / value[0].numel() ** 0.5)
    return model


def mtp_tensors(config: ModelConfig, like: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Random draft-layer tensors under checkpoint names, shaped like the trunk's last (attention) layer."""
    generator = torch.Generator().manual_seed(seed)
    last = f"model.language_model.layers.{config.attention_layers[-1]}."
    shapes = {f"mtp.layers.0.{n.removeprefix(last)}": t.shape for n, t in like.items() if n.startswith(last)}
    hidden = config.hidden_size
    shapes |= {"mtp.fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{n}.weight": (hidden,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    made = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else torch.Size(shape[1:]).numel() ** -0.5
        made[name] = torch.randn(*shape, generator=generator) * scale
    return made


def poisoned_state(config: ModelConfig, **options: Any) -> State:
    """A state whose every float is NaN (INT8 codes 77): what is read before it is written shows."""
    state = State(config, **options)
    for tensor in (state.kv_codes, state.kv_scales, state.s, state.conv, state.window_k, state.window_e):
        if tensor is not None:
            tensor.fill_(77 if tensor.dtype == torch.int8 else float("nan"))
    state.window_decay.fill_(float("nan"))
    return state


def random_weights(config: ModelConfig, seed: int = 0, scale: float = 0.05) -> Weights:
    """Random weights of any shape, built through the objects of the artifact format."""
    from ninfer_core.inventory import default_recipe, inventory

    generator = torch.Generator().manual_seed(seed)
    shapes = {name: shape for name, (shape, _) in inventory(config, default_recipe(config)).items()}

    class Source:
        tensors = shapes

        def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            if name.endswith("token_ids"):
                return torch.randperm(config.vocab_size, generator=generator)[: shapes[name][0]]
            return torch.randn(*shapes[name], generator=generator) * scale

    source = Source()
    source.config = config  # type: ignore[attr-defined]
    return load_weights(source)  # type: ignore[arg-type]
