"""Random packed weights, activations and graph timing for the benches of decode kernels on one GPU."""

from __future__ import annotations

import torch

from ninfer_core.kernels._order import GROUP, HIGH_WORDS, Activation, KernelMatrix, pack_codes

LIMIT = {"W8": 127, "Q4": 7, "Q5": 15, "Q6": 31}
DEVICE = "cuda"


def random_matrix(rows: int, columns: int, fmt: str) -> KernelMatrix:
    """Random bits as a kernel-order matrix whose values have a standard deviation near columns ** -0.5."""
    groups = columns // GROUP[fmt]
    planes = HIGH_WORDS[fmt]

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE)

    spread = {"W8": 74.0, "Q4": 4.6, "Q5": 9.2, "Q6": 18.5}[fmt]
    scales = (torch.rand(rows, groups, device=DEVICE) + 0.5) / (spread * columns**0.5)
    return KernelMatrix(
        words(rows // 16, groups, 32, 4),
        words(rows // 16, groups, 32, planes),
        scales.half().view(torch.int32).view(rows // 16, groups, 8),
        fmt,
        rows,
        columns,
    )


def coded_matrix(rows: int, columns: int, fmt: str) -> tuple[KernelMatrix, torch.Tensor]:
    """A matrix made from codes, and its fp32 values."""
    low = -LIMIT[fmt] - (fmt != "W8")
    codes = torch.randint(low, LIMIT[fmt] + 1, (rows, columns), device=DEVICE)
    scales = (torch.rand(rows, columns // GROUP[fmt], device=DEVICE) * 0.01).half()
    values = (codes.float().view(rows, -1, GROUP[fmt]) * scales.float()[..., None]).view(rows, columns)
    return pack_codes(codes, scales, fmt), values


def part_of(a: Activation, low: int, high: int) -> Activation:
    """Rows low..high-1 of an activation as a call of their own."""
    parts = a.rows(high)
    out = Activation.empty(high - low, a.q.shape[1] * 32, a.ss.shape[1], DEVICE)
    for i in range(high - low):
        out.q[i // 8, :, i % 8], out.s[i // 8, :, i % 8], out.ss[i // 8, :, i % 8] = (p[low + i] for p in parts)
    return out


def random_activation(rows: int, columns: int) -> Activation:
    u = torch.randn(rows, columns, device=DEVICE)
    return Activation.from_rows(u, (u**2).view(rows, columns // 32, 32).sum(-1))


def graph_time(call, repeats: int = 15) -> float:
    """Median microseconds of one replay of `call` captured in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def read_bandwidth() -> float:
    """Read bandwidth in TB/s: the sum of 4 GB of fp32."""
    x = torch.randn(1 << 30, device=DEVICE)
    return x.numel() * 4 / graph_time(lambda: x.sum()) / 1e6


def relative(out, ref):
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()
