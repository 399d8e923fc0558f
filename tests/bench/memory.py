"""Loading and memory on one GPU: GB/s from file to kernel order, what is given back, and 262,144 tokens under a cap.

    python tests/bench/memory.py make FILE [--model 35b-a3b]     a .ninfer file of the published layout, random payload
    python tests/bench/memory.py load FILE [--json OUT]          load, free, load again; every failure, and what is left
    python tests/bench/memory.py fit [--model 27b] [--cap 31.5]  the full context within so many GB of device memory

Driver memory is what `cudaMemGetInfo` says; it is compared with its value before anything was loaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from ninfer_core import packed
from ninfer_core.artifact import Artifact
from ninfer_core.cards import cards
from ninfer_core.config import PUBLISHED, ModelConfig
from ninfer_core.container import plan_directory
from ninfer_core.errors import ContentError, GeometryError, MemoryPlanError
from ninfer_core.footprint import fused_footprint
from ninfer_core.inventory import FRONTEND, TOKEN_IDS, inventory
from ninfer_core.kernels._order import from_kernel_order
from ninfer_core.quant import unpack
from ninfer_core.runtime.options import EngineOptions
from ninfer_core.runtime.planning import RESERVE, plan
from ninfer_core.state import FusedState

BLOCK = (64 << 20) + 4096 + 17
"""Bytes of the random block that payloads are cut from; not a power of two, so that no two planes are equal."""


def config_of(model: str) -> ModelConfig:
    """A published configuration by its short or full name."""
    return PUBLISHED[model if model in PUBLISHED else f"qwen3.6-{model}"]


def make(path: Path, model: str) -> None:
    """Write a file that opens as the published one does, with random bits instead of weights."""
    config = config_of(model)
    tensors = inventory(config)
    directory, prefix = plan_directory(config.model_id, {f"frontend/{name}": 64 for name in FRONTEND}, tensors)
    block = np.random.default_rng(0).integers(0, 256, BLOCK, dtype=np.uint8)
    ids = np.random.default_rng(1).permutation(TOKEN_IDS[config.model_id]).astype("<i4")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(prefix)
        for index, record in enumerate(directory.records):
            file.seek(directory.payload_start + record.offset)
            if record.name.endswith("draft_head_token_ids"):
                file.write(ids[: record.nbytes // 4].tobytes())
                continue
            left, start = record.nbytes, index * 4099 % BLOCK
            while left:
                piece = block[start : start + left]
                file.write(memoryview(piece))
                left, start = left - len(piece), 0
    print(f"{path}: {path.stat().st_size:,} bytes")


def used() -> int:
    """Bytes in use on the device, by the driver."""
    free, total = torch.cuda.mem_get_info()
    return total - free


class Report:
    """Figures by name, written after each one."""

    def __init__(self, path: str | None) -> None:
        self.values: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        self._path = path

    def add(self, name: str, value: Any) -> None:
        """Print and keep one figure."""
        self.values[name] = value
        print(f"{name:<44} {value}", flush=True)
        if self._path:
            Path(self._path).write_text(json.dumps(self.values, indent=1) + "\n")


def timed_load(path: Path, **options: Any) -> tuple[packed.PackedWeights, float, float]:
    """The weights, seconds, and GB/s of packed bytes."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    with Artifact.open(path) as artifact:
        weights = packed.load_packed(artifact, "cuda", **options)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return weights, seconds, weights.nbytes / seconds / 1e9


def compare(path: Path, weights: packed.PackedWeights) -> int:
    """How many matrices were compared code by code (first and last rows); raises where one differs."""
    objects = {name: found for name, found in packed.named(weights) if not isinstance(found, torch.Tensor)}
    count = 0
    with Artifact.open(path) as artifact:
        for name, matrix in objects.items():
            info = artifact.tensors.get(name)
            if info is None or name.endswith("mlp/gate_up") or info.format[:2] != matrix.format:
                continue
            payload = artifact.payload(name)
            for start in (0, matrix.rows - 64):
                tiles = slice(start // 16, start // 16 + 4)
                part = packed.KernelMatrix(
                    matrix.words[tiles], matrix.high[tiles], matrix.scales[tiles], matrix.format, 64, matrix.columns
                )
                codes, scales = (t.cpu() for t in from_kernel_order(part))
                want, words = unpack(payload, info.format, info.shape, (start, start + 64))
                same = torch.equal(codes, want) and torch.equal(scales.view(torch.int16), words.view(torch.int16))
                assert same, f"{name}: rows {start} on differ from the file"
            count += 1
    return count


def failing(report: Report, name: str, error: type[BaseException], base: int, run: Callable[[], object]) -> None:
    """Run something that must fail, and report the message and what is left on the device."""
    try:
        run()
    except error as caught:
        left = used() - base  # with the error alive, which refers to the frames that failed
        report.add(f"{name}: bytes left", left)
        report.add(f"{name}: message", str(caught)[:200])
    else:
        report.add(f"{name}: FAILED, no error", 0)
    gc.collect()
    torch.cuda.empty_cache()


def at_share(share: float, action: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress callback that acts once when a share of the bytes is there."""
    done = []

    def progress(count: int, total: int) -> None:
        if not done and count >= share * total:
            done.append(1)
            action()

    return progress


def interrupt() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


def load(path: Path, out: str | None) -> None:
    """Speed, equality, and what every kind of failure leaves behind."""
    report = Report(out)
    torch.zeros(1, device="cuda").add_(1)
    from ninfer_core.kernels._order import to_kernel_order

    to_kernel_order(torch.zeros(64 * 64 + 64 * 4, dtype=torch.uint8, device="cuda"), "Q4", 64, 128)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = used()
    report.add("cores", os.cpu_count())
    report.add("file bytes", path.stat().st_size)
    for threads in (None, None, 4, 8, 16):
        weights, seconds, rate = timed_load(path, threads=threads)
        name = f"load, {threads or 'default'} threads"
        report.add(name, f"{seconds:.2f} s, {rate:.2f} GB/s")
        report.add("weights, bytes over plan on the driver", used() - base - weights.nbytes)
        report.add("peak of the allocator over the weights", torch.cuda.max_memory_allocated() - weights.nbytes)
        if threads is None and "matrices equal" not in report.values:
            report.add("matrices equal", compare(path, weights))
        weights.free()
        torch.cuda.empty_cache()
        report.add("bytes left after free", used() - base)
    failures(report, path, base)


def failures(report: Report, path: Path, base: int) -> None:
    """Interrupted, changed, cut off, too little memory, killed; the file is damaged by the last ones."""
    stamp = path.stat()
    half = at_share(0.5, interrupt)
    failing(report, "Ctrl-C at half", KeyboardInterrupt, base, lambda: timed_load(path, progress=half))
    share = (used() + 8e9) / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(share)
    failing(report, "too little memory", MemoryPlanError, base, lambda: timed_load(path))
    torch.cuda.set_per_process_memory_fraction(1.0)
    killed(report, path, base)
    touch = at_share(0.5, lambda: os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1)))
    failing(report, "touched at half", ContentError, base, lambda: timed_load(path, progress=touch))
    cut = at_share(0.3, lambda: os.truncate(path, stamp.st_size // 2))
    failing(report, "cut off at a third", GeometryError, base, lambda: timed_load(path, progress=cut))
    report.add("bytes left at the end", used() - base)


def killed(report: Report, path: Path, base: int) -> None:
    """SIGKILL to a process at half of its load; the driver must have everything back soon after."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, '.')\n"
        "from tests.bench.memory import at_share, timed_load\n"
        "timed_load(Path(sys.argv[1]), progress=at_share(0.5, lambda: (print('half', flush=True), sys.stdin.read())))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    report.add("killed at half: bytes of the process before", used() - base)
    child.kill()
    child.wait()
    for _ in range(50):
        if used() - base < 1 << 20:
            break
        time.sleep(0.1)
    report.add("killed at half: bytes left", used() - base)


def fit(model: str, cap: float, out: str | None) -> None:
    """One sequence of the model's full context with drafts, planned and run within `cap` GB, the driver's own included.

    Random weights in the published formats. A round of four rows runs at the end of the context, as one graph.
    """
    before = cards()[0].free
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    report = Report(out)
    context = before - cards()[0].free
    budget = int(cap * 1e9) - context - RESERVE
    torch.cuda.set_per_process_memory_fraction((budget + RESERVE) / torch.cuda.mem_get_info()[1])
    config = config_of(model)
    footprint = fused_footprint(config, inventory(config), drafts=3)
    made = plan(config, EngineOptions(model=model, max_sequences=1, draft_tokens=3), footprint, budget=budget)
    print(made.table(), flush=True)
    report.add(f"{model}: context of the plan", made.context_length)
    report.add(f"{model}: driver, before anything", context)
    weights = packed.random_packed(config, device="cuda")
    state = FusedState(config, slots=made.slots + made.checkpoints, pages=made.pages, device="cuda")
    state.kv_codes.random_(-127, 128)
    state.kv_scales.fill_(0.02)
    run_rounds(weights, state, config, made.context_length, report, model)
    torch.cuda.synchronize()
    report.add(f"{model}: planned", made.nbytes)
    report.add(f"{model}: allocator, peak in use", torch.cuda.max_memory_allocated())
    report.add(f"{model}: allocator, peak reserved", torch.cuda.max_memory_reserved())
    used_bytes = before - cards()[0].free
    report.add(f"{model}: driver, all of the process", used_bytes)
    report.add(f"{model}: within {cap} GB", used_bytes <= cap * 1e9)


def run_rounds(
    weights: packed.PackedWeights, state: FusedState, config: ModelConfig, context: int, report: Report, model: str
) -> None:
    """Verify calls of four rows at the end of the context, captured and replayed, with the logits of all rows."""
    from ninfer_core.model.fused import FusedDecoder

    decoder = FusedDecoder(weights, config, context=context)
    tokens = torch.tensor([[17, 23, 42, 99]], device="cuda", dtype=torch.int32)
    pages = torch.arange(-(-(context + 3) // 64), device="cuda", dtype=torch.int32)[None]
    call = decoder.call(tokens, [0], [context - 4], [0], pages, [0])

    def step() -> torch.Tensor:
        hidden = decoder.forward(state, call)
        decoder.choose(4, config.vocab_size)
        return hidden

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(5):
        graph.replay()
    end.record()
    end.synchronize()
    report.add(f"{model}: ms of a four-row round at the end", start.elapsed_time(end) / 5)
    rows = torch.nn.functional.normalize(hidden, dim=-1)
    report.add(f"{model}: hidden std and likeness of two rows", f"{hidden.std():.3f}, {rows[0] @ rows[1]:.3f}")


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("make", "load", "fit"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--cap", type=float, default=31.5, help="GB of device memory")
    parser.add_argument("--model", default="35b-a3b")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.part == "fit":
        fit(options.model, options.cap, options.json)
    elif options.file is None:
        parser.error(f"{options.part} needs FILE")
    elif options.part == "make":
        make(options.file, options.model)
    else:
        load(options.file, options.json)


if __name__ == "__main__":
    main()
