"""Loading and memory on one GPU: GB/s from file to kernel order, what is given back, and 262,144 tokens under a cap.

    python -m tests.bench.memory make FILE [--model 35b]     a .ninfer file of the published layout, random payload
    python -m tests.bench.memory load [FILE]                 load, free, load again; every failure, and what is left;
                                                             without FILE one is made for this, 22 GB in the temporary folder
    python -m tests.bench.memory fit [--model 27b] [--cap 31.5]  the full context within so many GB of device memory

Driver memory is what `cudaMemGetInfo` says; it is compared with its value before anything was loaded.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ninfer_core import packed
from ninfer_core.artifact import Artifact
from ninfer_core.benchmarks.harness import Method, one_run
from ninfer_core.benchmarks.subject import RandomSubject, Target
from ninfer_core.cards import cards
from ninfer_core.container import plan_directory
from ninfer_core.errors import ContentError, GeometryError, MemoryPlanError
from ninfer_core.footprint import RESERVE
from ninfer_core.inventory import FRONTEND, TOKEN_IDS, inventory
from ninfer_core.kernels._order import from_kernel_order
from ninfer_core.quant import unpack
from tests.bench.common import MODELS, Record, config_of, parser_of, shape_of

BLOCK = (64 << 20) + 4096 + 17
"""Bytes of the random block that payloads are cut from; not a power of two, so that no two planes are equal."""


def make(path: Path, model: str) -> None:
    """Write a file that opens as the published one does, with random bits instead of weights."""
    config = config_of(model, False)
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


def failing(record: Record, name: str, error: type[BaseException], base: int, run: Callable[[], object]) -> None:
    """Run something that must fail, and report the message and what is left on the device."""
    try:
        run()
    except error as caught:
        left = used() - base  # with the error alive, which refers to the frames that failed
        record.add(f"{name}: bytes left", left)
        record.add(f"{name}: message", str(caught)[:200])
    else:
        record.add(f"{name}: FAILED, no error", 0)
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


def load(path: Path, record: Record) -> None:
    """Speed, equality, and what every kind of failure leaves behind."""
    torch.zeros(1, device="cuda").add_(1)
    from ninfer_core.kernels._order import to_kernel_order

    to_kernel_order(torch.zeros(64 * 64 + 64 * 4, dtype=torch.uint8, device="cuda"), "Q4", 64, 128)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = used()
    record.add("cores", os.cpu_count())
    record.add("file bytes", path.stat().st_size)
    for threads in (None, None, 4, 8, 16):
        weights, seconds, rate = timed_load(path, threads=threads)
        name = f"load, {threads or 'default'} threads"
        name += ", again" * (name in record.values)
        record.add(name, {"seconds": seconds, "GB/s": rate})
        record.add("weights, bytes over plan on the driver", used() - base - weights.nbytes)
        record.add("peak of the allocator over the weights", torch.cuda.max_memory_allocated() - weights.nbytes)
        if threads is None and "matrices equal" not in record.values:
            record.add("matrices equal", compare(path, weights))
        weights.free()
        torch.cuda.empty_cache()
        record.add("bytes left after free", used() - base)
    failures(record, path, base)


def failures(record: Record, path: Path, base: int) -> None:
    """Interrupted, changed, cut off, too little memory, killed; the file is damaged by the last ones."""
    stamp = path.stat()
    half = at_share(0.5, interrupt)
    failing(record, "Ctrl-C at half", KeyboardInterrupt, base, lambda: timed_load(path, progress=half))
    share = (used() + 8e9) / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(share)
    failing(record, "too little memory", MemoryPlanError, base, lambda: timed_load(path))
    torch.cuda.set_per_process_memory_fraction(1.0)
    killed(record, path, base)
    touch = at_share(0.5, lambda: os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1)))
    failing(record, "touched at half", ContentError, base, lambda: timed_load(path, progress=touch))
    cut = at_share(0.3, lambda: os.truncate(path, stamp.st_size // 2))
    failing(record, "cut off at a third", GeometryError, base, lambda: timed_load(path, progress=cut))
    record.add("bytes left at the end", used() - base)


def killed(record: Record, path: Path, base: int) -> None:
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
    record.add("killed at half: bytes of the process before", used() - base)
    child.kill()
    child.wait()
    for _ in range(50):
        if used() - base < 1 << 20:
            break
        time.sleep(0.1)
    record.add("killed at half: bytes left", used() - base)


def fit(model: str, cap: float, record: Record, tiny: bool) -> None:
    """One sequence of the model's full context with drafts, planned and run within `cap` GB, the driver's own included.

    Random weights in the published formats behind the engine's own loading, plan and runner. A prompt that leaves room
    for the answer is made of copied pages; its last chunk and an answer with drafts run at the end of the context.
    """
    device = "cpu" if tiny else "cuda"
    before, context, options = 0, 0, {}
    if not tiny:
        before = cards()[0].free
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
        context = before - cards()[0].free
        budget = int(cap * 1e9) - context - RESERVE
        torch.cuda.set_per_process_memory_fraction((budget + RESERVE) / torch.cuda.mem_get_info()[1])
        options = {"memory": budget}
    target = Target(random=shape_of(model, tiny), device=device, options=options)
    subject = RandomSubject(target, draft_tokens=3, max_sequences=1, context=None)
    try:
        made = subject.plan
        print(made.table(), flush=True)
        record.add(f"{model}: context of the plan", made.context_length)
        record.add(f"{model}: prompt chunk of the plan", made.footprint.chunk)
        record.add(f"{model}: driver, before anything", context)
        tokens = 16 if tiny else 128
        run = one_run(subject, made.context_length - tokens - 8, Method(tokens=tokens), 1, copy=True)
        record.add(f"{model}: tok/s at the end of the context", run.decode_rate)
        last_chunk(subject, record, model)
        record.add(f"{model}: planned", made.nbytes)
    finally:
        if not tiny:
            peaks(record, model, before, cap)
        subject.release()


def last_chunk(subject: RandomSubject, record: Record, model: str) -> None:
    """A whole chunk of prompt that ends where the context does, with its rows of the draft layer."""
    runner, made = subject.runner, subject.plan
    rows = min(made.footprint.chunk, made.context_length)
    tokens = torch.randint(0, subject.addressable, (rows,), device=subject.device)
    table = torch.arange(made.footprint.pages(made.context_length), device=subject.device)
    start = made.context_length - rows
    with torch.inference_mode():
        began = time.perf_counter()
        hidden = runner._decoder.prefill(runner.reuse._state, tokens, 0, start, table)
        runner._rounds._mtp.prefill(runner.reuse._state, tokens, hidden, start, table)
        record.add(f"{model}: the last chunk, finite", bool(hidden.isfinite().all()))
    record.add(f"{model}: ms of the last chunk, plans made within", (time.perf_counter() - began) * 1e3)


def peaks(record: Record, model: str, before: int, cap: float) -> None:
    """What the allocator and the driver say of this process."""
    torch.cuda.synchronize()
    record.add(f"{model}: allocator, peak in use", torch.cuda.max_memory_allocated())
    record.add(f"{model}: allocator, peak reserved", torch.cuda.max_memory_reserved())
    used_bytes = before - cards()[0].free
    record.add(f"{model}: driver, all of the process", used_bytes)
    record.add(f"{model}: within {cap} GB", used_bytes <= cap * 1e9)


def main() -> int:
    """See the module docstring."""
    parser: argparse.ArgumentParser = parser_of(__doc__)
    parser.add_argument("part", choices=("make", "load", "fit"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--cap", type=float, default=31.5, help="GB of device memory")
    parser.add_argument("--model", choices=MODELS, default="35b")
    options = parser.parse_args()
    record = Record(options.json, "cpu" if options.tiny else "cuda")
    if options.part == "fit":
        fit(options.model, options.cap, record, options.tiny)
    elif options.part == "load" and options.file is None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "random.ninfer"
            make(path, options.model)
            load(path, record)
    elif options.file is None:
        parser.error("make needs FILE")
    elif options.part == "make":
        make(options.file, options.model)
    else:
        load(options.file, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
