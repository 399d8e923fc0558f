"""Training weights <-> checkpoint form, and the shipped artifact.

`python -m ninfer_core.demo.make.export DATA CHECKPOINT ARTIFACT` completes the checkpoint folder that `train` wrote
(configuration, tokenizer, template), counts tokens for the draft head and converts it with the demo recipe.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .model import Model, Shape
from .tokenizer import ADDRESSABLE, token_id

CONTEXT = 4096
SHARD = 15_500_000


def checkpoint_tensors(model: Model, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """All weights under the checkpoint's names."""
    return {
        name if name.startswith(("lm_head.", "mtp.")) else "model." + name: tensor.detach()
        .to("cpu", dtype)
        .contiguous()
        for name, tensor in model.state_dict().items()
    }


def load_checkpoint(model: Model, folder: Path) -> None:
    """Read shards written by `write_shards` back into a model of the same shape."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(path)
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})


def config(shape: Shape) -> dict[str, Any]:
    """`config.json` in the form of the published mixture-of-experts checkpoints."""
    rope = {
        "mrope_interleaved": True,
        "mrope_section": list(shape.sections),
        "partial_rotary_factor": shape.rotary / shape.head,
        "rope_theta": shape.theta,
        "rope_type": "default",
    }
    end = token_id("<|endoftext|>")
    text = {
        "attention_bias": False, "attn_output_gate": True, "bos_token_id": end, "dtype": "bfloat16", "eos_token_id": end,
        "full_attention_interval": shape.interval, "head_dim": shape.head, "hidden_act": "silu", "hidden_size": shape.hidden,
        "layer_types": ["full_attention" if (i + 1) % shape.interval == 0 else "linear_attention" for i in range(shape.layers)],
        "linear_conv_kernel_dim": shape.conv, "linear_key_head_dim": shape.linear, "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads, "linear_value_head_dim": shape.linear, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": CONTEXT, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": shape.width,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": shape.heads,
        "num_experts": shape.experts, "num_experts_per_tok": shape.top, "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads, "partial_rotary_factor": shape.rotary / shape.head, "rms_norm_eps": 1e-6,
        "rope_parameters": rope, "shared_expert_intermediate_size": shape.shared, "tie_word_embeddings": False,
        "use_cache": True, "vocab_size": shape.vocab,
    }  # fmt: skip
    out: dict[str, Any] = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": token_id("<|image_pad|>"),
        "model_id": "ninfer-demo",
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "video_token_id": token_id("<|video_pad|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
    }
    if shape.vision:
        v = shape.vision
        out["vision_config"] = {
            "deepstack_visual_indexes": [], "depth": v.depth, "hidden_act": "gelu_pytorch_tanh", "hidden_size": v.hidden, "in_channels": 3,
            "intermediate_size": v.inner, "model_type": "qwen3_5_moe", "num_heads": v.heads, "num_position_embeddings": v.positions,
            "out_hidden_size": shape.hidden, "patch_size": v.patch, "spatial_merge_size": v.merge, "temporal_patch_size": v.temporal,
        }  # fmt: skip
    return out


def side_files() -> dict[str, dict[str, Any]]:
    """Generation and processor settings. The demo is greedy by default: it is meant to be predictable."""
    end = token_id("<|endoftext|>")
    patch = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
    }
    return {
        "generation_config.json": {
            "bos_token_id": end, "do_sample": False, "eos_token_id": [token_id("<|im_end|>"), end], "pad_token_id": end,
            "temperature": 0.0, "top_k": 20, "top_p": 0.95,
        },
        # Images are scaled to between 128 x 128 and 256 x 256 pixels' area: what the tower was trained on.
        "preprocessor_config.json": {
            **patch, "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor",
            "size": {"longest_edge": 65536, "shortest_edge": 16384},
        },
        "video_preprocessor_config.json": {
            **patch, "processor_class": "Qwen3VLProcessor", "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"longest_edge": 262144, "shortest_edge": 16384},
        },
    }  # fmt: skip


def write_shards(model: Model, out: Path) -> None:
    """Write bf16 shards below 16 MiB and their index."""
    tensors = checkpoint_tensors(model)
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if used + size > SHARD:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    out.mkdir(parents=True, exist_ok=True)
    index = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / (file + ".part"), metadata={"format": "pt"})
        (out / (file + ".part")).replace(out / file)
        index.update(dict.fromkeys(shard, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (out / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def write_side(shape: Shape, tokenizer: Path, template: Path, out: Path) -> None:
    """Write everything of a checkpoint but its weights."""
    out.mkdir(parents=True, exist_ok=True)
    files = {"config.json": config(shape), **side_files()}
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((tokenizer / name).read_bytes())
    (out / "chat_template.jinja").write_bytes(template.read_bytes())


def token_counts(folder: Path, template: Path, tasks: int = 4000) -> np.ndarray:
    """How often the model writes each id: answers of tasks in full, natural text at a tenth."""
    from .packing import Packer

    packer = Packer(folder, template, 77, 1, 1024, natural=0.2)
    counts = np.bincount(packer.corpus, minlength=ADDRESSABLE).astype(np.int64) // 100
    for _ in range(tasks):
        _, answer = packer.generator.render(packer.generator.task())
        np.add.at(counts, packer.encode(answer), 10)
    return counts


def main() -> None:
    from ...convert import convert
    from ...inventory import RECIPE_DEMO

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("artifact", type=Path)
    args = parser.parse_args()
    template = Path(__file__).parents[1] / "chat_template.jinja"
    write_side(Shape(), args.folder / "tok", template, args.checkpoint)
    if args.artifact.exists():
        shutil.rmtree(args.artifact)
    # A draft head of slightly less than half the rows keeps the package below 13 MB.
    recipe = replace(RECIPE_DEMO, draft_rows=2816)
    report = convert(
        args.checkpoint,
        args.artifact,
        recipe=recipe,
        counts=token_counts(args.folder, template),
        model_id="ninfer-demo",
    )
    print(
        f"{report.path}: {report.objects} objects, {report.nbytes / 1e6:.2f} MB, encoder {report.encoder}, {report.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
