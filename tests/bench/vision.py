"""Images on one GPU: the vision tower against transformers and the matrix rate, and an image to the first token.

    python -m tests.bench.vision [PART,...]       # one NVIDIA GPU
    python -m tests.bench.vision --tiny           # the same code on a small tower, on the CPU

Parts: `tower` (its time alone, against the rate of a bf16 product of 8,192 x 8,192 x 8,192 in the same run), `whole` (the
35B with its tower, random weights of full size: from a request of 100 text tokens with an image, and from its file, to
the first token), `demo` (the demo model from a file), `agreement` (the large tower with random weights against
transformers in fp32, within named tolerances). Work is counted as the matrices' and the attention's floating-point
operations. Medians. `--results DIR` keeps the figures of `tower` and `whole` in the device's result file.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ninfer_core.benchmarks import results
from ninfer_core.benchmarks.bandwidth import read_bandwidth
from ninfer_core.benchmarks.floors import step_floor
from ninfer_core.benchmarks.results import Figure
from ninfer_core.benchmarks.subject import RandomSubject, Target
from ninfer_core.config import QWEN36_35B_A3B, VisionConfig
from ninfer_core.model.vision import VisionTower
from ninfer_core.weights import VisionBlock, VisionLinear, VisionNorm, VisionWeights
from tests.bench.common import Record, matrix_rate, parser_of, seconds, shape_of
from tests.bench.prefill import operations

TOWER = 7e-3
"""The tower in bf16 against transformers in fp32, relative; measured 5e-3, transformers in bf16 1.2e-2."""
BESIDE = 1.0
"""As a multiple of the error of transformers in bf16, at most."""
SETTINGS = b'{"size": {"shortest_edge": 65536, "longest_edge": 16777216}}'
"""Those of the published models."""
TEXT = 100
"""Tokens beside the image."""
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


class Bench:
    """What the parts share: figures as they come, and those for the result file."""

    def __init__(self, options: Any) -> None:
        self.tiny, self.times = options.tiny, 1 if options.tiny else options.times
        self.device = "cpu" if self.tiny else "cuda"
        self.record, self.figures = Record(options.json, self.device), list[Figure]()
        config = TINY if self.tiny else QWEN36_35B_A3B.vision
        assert config is not None
        self.config: VisionConfig = config
        self.rate = matrix_rate(self.device, self.tiny)
        self.record.add("matrix TFLOP/s", self.rate / 1e12)
        self.failed = 0

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Names and pixels of the images as the tower gets them."""
        return {"small": (256, 320)} if self.tiny else SIZES

    def tower(self) -> None:
        """Time, share of the matrix rate and memory of one image of each size, its pixels on the host."""
        dtype = torch.float32 if self.tiny else torch.bfloat16
        tower = VisionTower(random_weights(self.config, self.device, dtype), self.config)
        for name, (height, width) in self.sizes().items():
            patches = height // 16 * (width // 16)
            picture = torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8).numpy()
            pixels: Any = SimpleNamespace(frames=picture, mean=(0.5,) * 3, std=(0.5,) * 3)

            def encode(pixels: Any = pixels, grid: Any = (1, height // 16, width // 16)) -> None:
                encoding = tower.begin(pixels, grid)
                while not encoding.advance(1 << 62):
                    pass

            took = seconds(encode, self.device, self.times)
            done = work(self.config, patches)
            found = {"ms": took * 1e3, "TFLOP": done / 1e12, "share of the matrix rate": done / took / self.rate}
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                encode()
                peak = torch.cuda.max_memory_allocated() - before
                found |= {"peak MiB": peak / 2**20, "planned MiB": tower.workspace(patches) / 2**20}
            self.record.add(name, found)
            about = {"weights": "random", "pixels": f"{width} x {height}", "TFLOP": done / 1e12}
            self._keep(f"tower/{name}", took * 1e3, done / self.rate * 1e3, about)

    def whole(self) -> None:
        """The 35B: a file to pixels in the decoding process, and from the request to the first token."""
        target = Target(random=shape_of("35b", self.tiny), device=self.device, options={"vision": True})
        subject = RandomSubject(target, draft_tokens=3, max_sequences=1, context=1024 if self.tiny else 16384)
        try:
            bandwidth = read_bandwidth(subject.device)
            for name, (height, width) in self.sizes().items():
                self._first_tokens(subject, name, height, width, bandwidth)
        finally:
            subject.release()

    def _first_tokens(self, subject: RandomSubject, name: str, height: int, width: int, bandwidth: float) -> None:
        from ninfer_core.frontend import media
        from ninfer_core.types import Image
        from tests.media_files import drawn, encoded

        config = subject.config
        assert config.vision is not None
        files, firsts, tokens = [], [], 0
        settings = dict.fromkeys(("preprocessor_config.json", "video_preprocessor_config.json"), SETTINGS)
        with mock.patch.object(media, "find_spec", bool):  # images alone need no PyAV
            loader = media.MediaLoader(settings, config.vision)
        loader.load(Image(data=encoded(drawn(64, 64), "JPEG")))  # starts the process
        try:
            for i in range(2 + self.times):
                data = encoded(drawn(height - 8, width - 8 - i), "JPEG")
                began = time.perf_counter()
                medium = loader.load(Image(data=data))
                files.append(time.perf_counter() - began)
                pads = medium.text.count("<|image_pad|>")
                span, ids = (TEXT // 2, TEXT // 2 + pads), subject.prompt(TEXT, i)
                prompt = ids[: span[0]] + [config.image_token_id or 0] * pads + ids[span[0] :]
                tokens = len(prompt)
                placed: Any = SimpleNamespace(media=medium, spans=(span,))
                began = time.perf_counter()
                events = iter(subject.enqueue(_request(prompt), prompt, 2, i, media=(placed,)))
                next(events)
                firsts.append(time.perf_counter() - began)
                for _ in events:
                    pass
        finally:
            loader.close()
        first, file = (statistics.median(values[2:]) for values in (firsts, files))
        seen = work(config.vision, height // 16 * (width // 16)) / self.rate
        read = max(operations(config, tokens) / self.rate, _weight_bytes(subject, tokens) / bandwidth)
        about = {
            "weights": "random", "route": subject.route, "prompt_tokens": tokens, "file_ms": file * 1e3,
            "floor_tower_ms": seen * 1e3, "floor_prompt_ms": read * 1e3,
        }  # fmt: skip
        found = {"ms": first * 1e3, "floor ms": (seen + read) * 1e3, "share": (seen + read) / first} | about
        self.record.add(f"35B, {name} image to the first token", found)
        self._keep(f"first-token-image/{name}", first * 1e3, (seen + read) * 1e3, about)

    def _keep(self, name: str, value: float, floor: float, about: dict[str, Any]) -> None:
        self.figures.append(Figure(f"qwen3.6-35b-a3b-random/{name}", value, "ms", None, self.times, floor, about))

    def demo(self) -> None:
        """The demo model from an image file to its first token."""
        for side in (64,) if self.tiny else (224, 448, 1024):
            found = first_token(self.device, side, self.times)
            self.record.add(f"demo model, {side} x {side} pixels to the first token", found)

    def agreement(self) -> None:
        """An image, a video of two pairs and an image of 1,088 x 1,920 pixels against transformers."""
        torch.backends.cudnn.allow_tf32 = False  # transformers cuts patches by a convolution
        dtype, c = torch.float32 if self.tiny else torch.bfloat16, self.config
        weights = random_weights(c, self.device, dtype)
        tower, exact, half = (
            VisionTower(weights, c),
            *(oracle(weights, c, self.device, d) for d in (torch.float32, dtype)),
        )
        cases = {"image": [(1, 16, 20)], "video": [(2, 12, 8)], "both": [(2, 6, 10), (1, 14, 6)]}
        for name, grids in (cases if self.tiny else cases | {"1080p": [(1, 68, 120)]}).items():
            count = sum(t * h * w for t, h, w in grids)
            levels = torch.randint(0, 256, (count, c.patch_dim), device=self.device)
            rows, grid = (levels / 127.5 - 1).to(dtype), torch.tensor(grids, device=self.device)
            with torch.inference_mode():
                want, beside = (getattr(out, "pooler_output", out).float() for out in (
                    exact(rows.float(), grid_thw=grid), half(rows, grid_thw=grid)
                ))  # fmt: skip
            mine, theirs = (
                float((x.float() - want).norm() / want.norm()) for x in (tower.features(rows, grids), beside)
            )
            held = mine <= TOWER and (self.tiny or mine <= BESIDE * theirs)
            self.failed += not held
            self.record.add(f"against transformers, {name}", {"error": mine, "theirs in bf16": theirs, "held": held})


def _request(prompt: list[int]) -> Any:
    from ninfer_core.types import Request

    return Request(prompt=tuple(prompt))


def _weight_bytes(subject: RandomSubject, tokens: int) -> float:
    """Bytes of weights that a prompt of so many tokens reads once."""
    floor = step_floor(subject.config, subject.formats, context=0, sequences=tokens)
    return floor.weights + floor.experts


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
            events = iter(handle)
            next(events)
            made.append(time.perf_counter() - began)
            for _ in events:
                pass
            tokens = handle.result(600).usage.prompt_tokens
    return {"ms": 1e3 * sorted(made[1:])[times // 2], "prompt tokens": tokens}


PARTS = {"tower": Bench.tower, "whole": Bench.whole, "demo": Bench.demo, "agreement": Bench.agreement}


def main() -> int:
    """Run the parts asked for; 1 if one failed or a tolerance did not hold."""
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="?", default=",".join(PARTS))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder of result files")
    options = parser.parse_args()
    wanted = options.parts.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    bench = Bench(options)
    for part in wanted:
        try:
            PARTS[part](bench)
        except ImportError as error:
            bench.record.add(f"{part}: skipped", str(error))
        except Exception as error:
            bench.failed += 1
            bench.record.add(f"{part}: failed", f"{type(error).__name__}: {error}"[:500])
    if options.results is not None and not options.tiny:
        device, command = results.device_of(bench.device), f"python -m tests.bench.vision {options.parts}"
        results.save(options.results, device, bench.figures, command=command, commit=results.commit_of())
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
