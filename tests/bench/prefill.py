"""Prefill on one GPU with random weights of full size: tokens a second by chunk length, and the time of every kernel.

    python tests/bench/prefill.py [--model 35b|27b] [--lengths 7680,64512] [--chunk 8192] [--repeats 5]

One pass warms up (kernels are built, attention plans made). `kernels` is one pass under the profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.profiler import ProfilerActivity, profile

from ninfer_core.config import QWEN36_27B, QWEN36_35B_A3B
from ninfer_core.model.fused_prefill import FusedPrefill
from ninfer_core.packed import random_packed
from ninfer_core.state import FusedState

MODELS = {"35b": QWEN36_35B_A3B, "27b": QWEN36_27B}


def main() -> None:
    """Print one JSON line a length, then the kernels of the shortest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="35b")
    parser.add_argument("--lengths", default="7680,64512")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    config, device = MODELS[options.model], torch.device("cuda")
    lengths = sorted(int(n) for n in options.lengths.split(","))
    weights, pages = random_packed(config, seed=0, device=device), lengths[-1] // 64 + 1
    run = FusedPrefill(weights, config, rows=min(options.chunk, lengths[-1]), context=pages * 64)
    state = FusedState(config, slots=2, pages=pages, device=device)
    table = torch.randperm(pages, device=device)
    tokens = torch.randint(0, config.vocab_size, (lengths[-1],), device=device)

    def read(count: int) -> torch.Tensor:
        for start in range(0, count, run.work.rows):
            hidden = run.chunk(state, tokens[start : min(start + run.work.rows, count)], 1, start, table)
        return hidden

    for count in lengths:
        finite, seconds = bool(read(count).isfinite().all()), []
        for _ in range(options.repeats):
            torch.cuda.synchronize()
            began = time.perf_counter()
            read(count)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        took = statistics.median(seconds)
        print(json.dumps({"tokens": count, "seconds": took, "rate": count / took, "finite": finite}), flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        read(lengths[0])
        torch.cuda.synchronize()
    kernels = sorted((e for e in found.key_averages() if e.device_time_total), key=lambda e: -e.device_time_total)
    for event in kernels[:24]:
        print(f"{event.key[:60]:60s} {event.count:5d} {event.device_time_total / 1e3:9.2f} ms", flush=True)


if __name__ == "__main__":
    main()
