"""What the measuring scripts share: figures kept as they come, the models, and a way to run small on a CPU.

Every script takes `--json FILE`, which is written after each figure, so that one that is stopped loses nothing, and
`--tiny`, which runs the whole of it on a small model without a GPU: under Triton's interpreter
(`TRITON_INTERPRET=1`) where it uses the kernels. The figures of such a run mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ninfer_core.config import PUBLISHED, ModelConfig

MODELS = {"35b": "qwen3.6-35b-a3b", "27b": "qwen3.6-27b"}


class Record:
    """Figures by name, printed and written as they come."""

    def __init__(self, path: Path | None, device: str) -> None:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self.values: dict[str, Any] = {"device": name, "torch": torch.__version__}
        self._path, self._began = path, time.time()

    def add(self, name: str, value: Any) -> None:
        """Keep one figure; fractions are rounded to five digits."""
        self.values[name] = rounded(value)
        print(f"[{time.time() - self._began:4.0f}s] {name:<48} {json.dumps(self.values[name])}", flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """`value` with its fractions, at any depth, at five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def parser_of(document: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as they come")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to try the script")
    return parser


def device_of(options: argparse.Namespace) -> str:
    """The GPU, or "cpu" for a small run; the interpreter is made quick where it serves the kernels."""
    if not options.tiny:
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.interpreter import quicken

        quicken()
    return "cpu"


def config_of(model: str, tiny: bool) -> ModelConfig:
    """A published configuration by its short name, or two layers of the same kind."""
    if not tiny:
        return PUBLISHED[MODELS[model]]
    from tests.kernels import fused_case

    return fused_case.config_of("moe" if PUBLISHED[MODELS[model]].is_moe else "dense")


def shape_of(model: str, tiny: bool) -> str:
    """What `--random-weights` calls a model of `MODELS`, or the demo's shape."""
    from ninfer_core.benchmarks.subject import RANDOM

    return "demo" if tiny else next(shape for shape, name in RANDOM.items() if name == MODELS[model])


def recipe_of(tiny: bool) -> Any:
    """The recipe of random weights: None for the published one."""
    from ninfer_core.inventory import RECIPE_DEMO

    return RECIPE_DEMO if tiny else None


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any], device: str, times: int = 5, warm: int = 1) -> float:
    """The median wall-clock time of a call, device work included."""
    made = []
    for i in range(warm + times):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        if i >= warm:
            made.append(time.perf_counter() - began)
    return statistics.median(made)


def matrix_rate(device: str, tiny: bool) -> float:
    """Operations a second of a large bf16 product: what shares of the matrix rate are stated against."""
    side = 256 if tiny else 8192
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b, device)


def compare(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """Logits `[T, V]` against others: relative error, agreement of the likeliest token, mean KL from `want` to `got`."""
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    return {
        "relative_error": ((got.double() - want.double()).norm() / want.double().norm()).item(),
        "top1": (got.argmax(-1) == want.argmax(-1)).double().mean().item(),
        "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
    }
