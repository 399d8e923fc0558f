"""The read bandwidth of a device: what all byte floors are stated against, measured in the same run."""

from __future__ import annotations

import statistics
import time

import torch

CUDA_BYTES = 1 << 32
CPU_BYTES = 1 << 28
"""Far more than any cache holds."""


def read_bandwidth(device: torch.device, repeats: int = 9) -> float:
    """Bytes a second that a plain sum reads: the median of some repetitions, best of the shapes tried.

    On the CPU with as many threads as torch uses here; on a CUDA device timed by events.
    """
    if device.type == "cuda":
        values = torch.randn(CUDA_BYTES // 4, device=device)
        shapes = [values, values.view(torch.bfloat16), values.view(-1, 1 << 16)]
        return max(_cuda_rate(shape, repeats) for shape in shapes)
    values = torch.empty(CPU_BYTES // 4).uniform_()
    values.sum()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - begin)
    return CPU_BYTES / statistics.median(times)


def _cuda_rate(values: torch.Tensor, repeats: int) -> float:
    def work() -> torch.Tensor:
        return values.sum() if values.dim() == 1 else values.sum(-1)

    work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return values.numel() * values.element_size() / statistics.median(times)
