"""The full-size vision tower on a GPU: against transformers, and its time beside the measured matrix rate.

    python -m tests.bench.vision                  # one NVIDIA GPU
    python -m tests.bench.vision --tiny           # the same code on a small tower, on the CPU

And the demo model from an image file to its first token. The large tower has random weights. Work is counted as the matrices' and the attention's floating-point operations; the rate they are set
against is that of a bf16 product of 8,192 x 8,192 x 8,192 in the same run. Medians.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ninfer_core.config import QWEN36_35B_A3B, ModelConfig, VisionConfig
from ninfer_core.kernels.vision import patch_rows
from ninfer_core.model.vision import VisionTower
from ninfer_core.weights import VisionBlock, VisionLinear, VisionNorm, VisionWeights
from tests.bench.common import Record, matrix_rate, parser_of, seconds

TINY = VisionConfig(depth=2, hidden_size=144, num_heads=2, intermediate_size=200, out_hidden_size=64)
SIZES = {"1080p": (1088, 1920), "4K": (2176, 3840), "768 x 1024": (768, 1024)}


def random_weights(c: VisionConfig, device: str, dtype: torch.dtype) -> VisionWeights:
    """A tower whose values stay of the order of one."""
    g = torch.Generator(device).manual_seed(0)

    def linear(rows: int, columns: int) -> VisionLinear:
        weight = torch.randn(columns, rows, generator=g, device=device) / columns**0.5
        return VisionLinear(weight.to(dtype), (torch.randn(rows, generator=g, device=device) * 0.1).to(dtype))

    def norm() -> VisionNorm:
        wide = (c.hidden_size,)
        return VisionNorm(
            1 + 0.1 * torch.randn(wide, generator=g, device=device), 0.1 * torch.randn(wide, generator=g, device=device)
        )

    def block() -> VisionBlock:
        w, m = c.hidden_size, c.intermediate_size
        return VisionBlock(norm(), linear(3 * w, w), linear(w, w), norm(), linear(m, w), linear(w, m))

    merged = c.hidden_size * c.spatial_merge_size**2
    return VisionWeights(
        linear(c.hidden_size, c.patch_dim),
        torch.randn(c.num_position_embeddings, c.hidden_size, generator=g, device=device) * 0.1,
        tuple(block() for _ in range(c.depth)),
        norm(),
        linear(merged, merged),
        linear(c.out_hidden_size, merged),
    )


def oracle(w: VisionWeights, c: VisionConfig, device: str, dtype: torch.dtype) -> Any:
    """The tower of transformers with the same weights."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    fields = {
        name: getattr(c, name) for name in ("depth", "hidden_size", "num_heads", "intermediate_size", "patch_size")
    }
    made = Qwen3_5VisionConfig(
        **fields, out_hidden_size=c.out_hidden_size, num_position_embeddings=c.num_position_embeddings
    )
    made._attn_implementation = "sdpa"
    model = Qwen3_5VisionModel(made).to(device, dtype).eval()
    state: dict[str, Tensor] = {"pos_embed.weight": w.position}

    def put(name: str, part: VisionLinear | VisionNorm) -> None:
        state[f"{name}.weight"] = part.dense.t() if isinstance(part, VisionLinear) else part.weight
        state[f"{name}.bias"] = part.bias

    put("patch_embed.proj", w.patch)
    for i, b in enumerate(w.blocks):
        for name, part in (("norm1", b.norm1), ("norm2", b.norm2), ("attn.qkv", b.qkv), ("attn.proj", b.output)):
            put(f"blocks.{i}.{name}", part)
        put(f"blocks.{i}.mlp.linear_fc1", b.fc1)
        put(f"blocks.{i}.mlp.linear_fc2", b.fc2)
    put("merger.norm", w.merger_norm)
    put("merger.linear_fc1", w.merger_fc1)
    put("merger.linear_fc2", w.merger_fc2)
    own = model.state_dict()
    missing = set(own) - set(state)
    assert not missing, missing
    model.load_state_dict({name: state[name].reshape(own[name].shape).to(dtype) for name in own})
    return model


def work(c: VisionConfig, patches: int) -> float:
    """Floating-point operations of one image: matrices and attention."""
    w, m, merged = c.hidden_size, c.intermediate_size, c.hidden_size * c.spatial_merge_size**2
    block = 2 * (4 * w * w + 2 * w * m) + 4 * w * patches
    merger = 2 * (merged * merged + merged * c.out_hidden_size) / c.spatial_merge_size**2
    return patches * (2 * w * c.patch_dim + c.depth * block + merger)


def first_token(device: str, side: int, times: int) -> dict[str, Any]:
    """Milliseconds from a request with a PNG of `side` x `side` pixels to its first token, each picture another one."""
    from ninfer_core.engine import Engine
    from ninfer_core.types import Image, Message, Request, Sampling, Text
    from tests.media_files import drawn, encoded

    made, tokens = [], 0
    with Engine.load("demo", device=device, vision=True, prefix_cache=False) as engine:
        for i in range(1 + times):
            file = encoded(drawn(side, side + i), "PNG")
            message = Message("user", (Image(data=file), Text("What is this?")))
            asked = Request((message,), max_tokens=2, thinking=False, sampling=Sampling(temperature=0.0))
            began = time.perf_counter()
            handle = engine.submit(asked)
            next(iter(handle))
            made.append(time.perf_counter() - began)
            tokens = handle.result(600).usage.prompt_tokens
    return {"ms": 1e3 * sorted(made[1:])[times // 2], "prompt tokens": tokens}


def encodings(record: Record, c: VisionConfig, tower: VisionTower, sizes: Any, rate: float, times: int) -> None:
    """Time, share of the matrix rate and memory of one image of each size."""
    device = "cuda" if tower.weights.position.is_cuda else "cpu"
    for name, (height, width) in sizes.items():
        patches = height // 16 * (width // 16)
        picture = torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8).numpy()
        pixels = SimpleNamespace(frames=picture, mean=(0.5,) * 3, std=(0.5,) * 3)

        def encode(pixels: Any = pixels, grid: Any = (1, height // 16, width // 16)) -> None:
            encoding = tower.begin(pixels, grid)
            while not encoding.advance(1 << 62):
                pass

        took = seconds(encode, device, times)
        done = work(c, patches) / took
        found = {"ms": took * 1e3, "TFLOP": work(c, patches) / 1e12, "share of the matrix rate": done / rate}
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            encode()
            peak = torch.cuda.max_memory_allocated() - before
            found |= {"peak MiB": peak / 2**20, "planned MiB": tower.workspace(patches) / 2**20}
        record.add(name, found)


def main() -> int:
    """The tower alone, the demo model, then the comparison with transformers."""
    parser = parser_of(__doc__)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    tiny, device = options.tiny, "cpu" if options.tiny else "cuda"
    model: ModelConfig = QWEN36_35B_A3B
    c = TINY if tiny else model.vision
    assert c is not None
    dtype = torch.float32 if tiny else torch.bfloat16
    weights = random_weights(c, device, dtype)
    tower, record = VisionTower(weights, c), Record(options.json, device)
    frames = torch.randint(0, 256, (1, 256, 320, 3), dtype=torch.uint8, device=device)
    rows = patch_rows(frames, 16, 2, 2, (0.5,) * 3, (0.5,) * 3, dtype)
    exact = VisionTower(random_weights(c, device, torch.float32), c).features(rows, [(1, 16, 20)])
    got = tower.features(rows, [(1, 16, 20)]).float()
    record.add("against fp32", float((got - exact).norm() / exact.norm()))
    rate = matrix_rate(device, tiny)
    record.add("matrix TFLOP/s", rate / 1e12)
    encodings(record, c, tower, {"small": (256, 320)} if tiny else SIZES, rate, 1 if tiny else options.times)
    for side in (64,) if tiny else (224, 448, 1024):
        try:
            found = first_token(device, side, 1 if tiny else options.times)
        except ImportError as error:  # a package of the media files or the engine's own requests
            found = {"skipped": str(error)}
        record.add(f"demo model, {side} x {side} pixels to the first token", found)
    with torch.inference_mode():  # last, as it needs transformers
        out = oracle(weights, c, device, dtype)(rows, grid_thw=torch.tensor([[1, 16, 20]], device=device))
    want = getattr(out, "pooler_output", out).float()
    record.add("transformers against fp32", float((want - exact).norm() / exact.norm()))
    record.add("against transformers", float((got - want).norm() / want.norm()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
