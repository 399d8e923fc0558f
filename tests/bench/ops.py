"""Decode kernels on one GPU: exactness against torch, tile sweep by role, and a whole token's launches in one graph.

    python tests/bench/ops.py [--out DIR] [--parts check,compile,chain,sweep] [--workers N]

Weights are random in the published formats. Every time is the median of graph replays that walk through more weight
bytes than the L2 holds; `floor` is the bytes of the role over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import itertools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from ninfer_core.kernels import attention_decode as attention
from ninfer_core.kernels import embedding_decode as embedding
from ninfer_core.kernels import gated_delta_decode as delta
from ninfer_core.kernels import head_decode as heads
from ninfer_core.kernels import linear_decode as linear
from ninfer_core.kernels import mlp_decode as mlp
from ninfer_core.kernels import moe_decode as moe
from ninfer_core.kernels._order import (
    GROUP,
    HIGH_WORDS,
    Activation,
    KernelMatrix,
    dequantize_rows_ref,
    pack_codes,
)
from ninfer_core.kernels._tiles import Tile

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


# ---------------------------------------------------------------- roles


class Role:
    """One matrix role: builds weight copies, runs one call."""

    def __init__(self, name, rows, columns, fmt, kind, tiles):
        self.name, self.rows, self.columns, self.fmt, self.kind, self.tiles = name, rows, columns, fmt, kind, tiles

    def tiles_of(self, T):
        """Tiles to try with T rows: with many rows only the first, the default."""
        return self.tiles if T <= 8 else self.tiles[:1]

    def make(self):
        """One copy of the role's weights."""
        if self.kind == "experts_down":
            return random_matrix(self.rows, self.columns, self.fmt), random_matrix(2048, 512, "W8")
        if self.kind == "side":
            return random_matrix(self.rows, self.columns, self.fmt), torch.randn(
                64, self.columns, device=DEVICE
            ).bfloat16()
        if self.kind == "router":
            return random_matrix(self.rows, self.columns, self.fmt), torch.randn(
                257, self.columns, device=DEVICE
            ).bfloat16()
        return (random_matrix(self.rows, self.columns, self.fmt),)

    def bytes(self, T, copy):
        """Bytes one call must move (weights; distinct experts of the fixed routing)."""
        m = copy[0]
        if self.kind.startswith("experts"):
            return m.nbytes / 256 * min(8 * T, 256) + (copy[1].nbytes if len(copy) > 1 else 0)
        return m.nbytes + sum(t.numel() * 2 for t in copy[1:])

    def buffers(self, T):
        """Inputs and outputs shared by all copies."""
        a = random_activation(T, self.columns)
        u = torch.randn(T, self.columns, device=DEVICE)
        wide = {
            "u": u, "out": torch.empty(T, self.rows, dtype=torch.bfloat16, device=DEVICE),
            "side": torch.empty(T, 64, device=DEVICE), "logits": torch.randn(T, 257, device=DEVICE),
            "shared": torch.randn(T, 1024, device=DEVICE), "x": torch.randn(T, min(self.rows, 8192), device=DEVICE),
        }  # fmt: skip
        if self.kind in ("residual", "experts_down"):
            n = 2048 if self.kind == "experts_down" else self.rows
            wide |= {
                "x": torch.randn(T, n, device=DEVICE), "xo": torch.empty(T, n, device=DEVICE),
                "uo": torch.empty(T, n, device=DEVICE), "ao": Activation.empty(T, n, n // 32, DEVICE),
                "norm": torch.zeros(n, device=DEVICE).bfloat16(),
            }  # fmt: skip
        if self.kind == "head":
            wide["candidates"] = heads.Candidates.empty(T, self.rows, DEVICE)
            wide["vocabulary"] = torch.empty(T, self.rows, device=DEVICE)
        if self.kind == "mlp":
            wide["inner"] = Activation.empty(T, self.rows // 2, 1, DEVICE)
        wide["h"] = moe.ExpertRows.empty(T, 8, 512, DEVICE, experts=256, width=2048)
        order = torch.stack([torch.randperm(256, device=DEVICE) for _ in range(1)])[0]
        wide["ids"] = order.repeat(-(-T // 32))[: 8 * T].view(T, 8).int().contiguous()
        wide["weights"] = torch.full((T, 8), 0.125, device=DEVICE)
        if self.kind == "experts_up":  # the routing of `ids`, distinct experts
            wide["logits"] = torch.zeros(T, 257, device=DEVICE)
            wide["logits"].scatter_(1, wide["ids"].long(), torch.arange(8, 0, -1, device=DEVICE).float().repeat(T, 1))
        return a, wide

    def call(self, copy, a, b, tile):
        """Run once."""
        m = copy[0]
        if self.kind == "plain":
            linear.project(m, a, b["out"], tile=tile)
        elif self.kind == "head":
            heads.head(m, a, b["candidates"], b["vocabulary"], addressable=self.rows, tile=tile)
        elif self.kind == "mlp":
            mlp.gate_up(m, a, len(b["u"]), b["inner"], tile=tile)
        elif self.kind == "side":
            linear.project(m, a, b["out"], u=b["u"], side=copy[1], side_out=b["side"], tile=tile)
        elif self.kind == "residual":
            linear.project_residual(m, a, b["x"], b["norm"], b["xo"], b["uo"], b["ao"],
                                    norm="none" if self.columns > 8192 else "head", tile=tile)  # fmt: skip
        elif self.kind == "router":
            moe.route_and_shared(m, copy[1], a, b["u"], b["shared"], b["logits"], tile=tile)
        elif self.kind == "experts_up":
            moe.expert_gate_up(m, a, b["logits"], b["shared"], b["h"], b["ids"], b["weights"], tile=tile)
        else:
            moe.expert_down(
                m, copy[1], b["h"], b["ids"], b["weights"], b["logits"], b["x"], b["norm"], b["xo"], b["uo"], b["ao"],
            )  # fmt: skip


def tiles(count, steps, warps):
    return [Tile(*t) for t in itertools.product(count, steps, warps)]


ROLES = [
    Role("35B gdn in", 12288, 2048, "W8", "side",
         [Tile(*t) for t in ((2, 8, 4), (1, 8, 4), (1, 16, 4), (2, 16, 4), (2, 4, 8), (1, 8, 8), (2, 8, 8))]),
    Role("35B attention in", 9216, 2048, "W8", "plain",
         [Tile(*t) for t in ((2, 8, 4), (1, 8, 4), (1, 16, 4), (2, 8, 8), (1, 8, 8))]),
    Role("35B out", 2048, 4096, "W8", "residual", tiles((2,), (4, 8, 16), (8,)) + tiles((2,), (4, 8), (16,))),
    Role("35B router+shared", 1024, 2048, "W8", "router",
         [Tile(*t) for t in ((1, 8, 8), (1, 16, 4), (1, 8, 4), (2, 8, 8))]),
    Role("35B experts up", 262144, 2048, "Q4", "experts_up",
         [Tile(*t) for t in ((2, 4, 8), (2, 8, 4), (2, 4, 4), (2, 2, 8), (2, 2, 16))]),
    Role("35B experts down", 524288, 512, "Q5", "experts_down", [Tile(2, 8, 8)]),
    Role("35B head", 248320, 2048, "Q6", "head", [Tile(*t) for t in ((2, 8, 4), (2, 4, 4), (2, 4, 8), (2, 16, 2))]),
    Role("35B draft head", 131072, 2048, "Q4", "head",
         [Tile(*t) for t in ((2, 8, 4), (2, 4, 4), (2, 4, 8), (2, 16, 2))]),
    Role("27B value_z", 12288, 5120, "Q5", "plain",
         [Tile(*t) for t in ((2, 10, 4), (1, 10, 4), (1, 20, 4), (1, 10, 8), (2, 5, 8))]),
    Role("27B gate/up", 34816, 5120, "Q4", "mlp",
         [Tile(*t) for t in ((4, 2, 8), (4, 5, 8), (4, 5, 4), (4, 10, 8), (4, 4, 4))]),
    Role("27B down", 5120, 17408, "Q5", "residual", [Tile(*t) for t in ((2, 2, 8), (2, 4, 4), (2, 17, 8), (2, 17, 16))]),
]  # fmt: skip
SWEEP_ROWS = (1, 4)


def compile_one(job):
    """Worker: one exactness check, or one candidate once so that the compiler's disk cache holds it."""
    if job[0] in CHECKS:
        try:
            torch.cuda.set_device(0)
            torch.manual_seed(0)
            return {job[0]: CHECKS[job[0]]()}
        except Exception as error:
            return {job[0]: f"{type(error).__name__}: {str(error)[:600]}"}
    index, tile, T = job
    try:
        torch.cuda.set_device(0)
        if index == "chain":
            Chain(T, (34, 35)).step()
            torch.cuda.synchronize()
            return None
        role = ROLES[index]
        copy = role.make()
        a, b = role.buffers(T)
        role.call(copy, a, b, tile)
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[:300]}"


def precompile(jobs, workers):
    """Run checks and compile candidates in parallel processes; results and error texts."""
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        return [e for e in pool.map(compile_one, jobs, chunksize=1) if e]


CHECKS = {
    "linear": lambda: check_linear(),
    **{f"moe {T}": (lambda T=T: check_moe(T)) for T in (1, 4, 8, 16, 64)},
    "delta": lambda: check_delta(),
    "attention": lambda: check_attention(),
}


def sweep(bandwidth, role):
    """Every candidate of a role at every number of rows."""
    rows = []
    first = role.make()
    size = sum(
        t.numel() * t.element_size()
        for m in first
        for t in ((m.words, m.high) if isinstance(m, KernelMatrix) else (m,))
    )
    copies = [first] + [role.make() for _ in range(max(1, min(40, int(1.2e9 // max(size, 1)))) - 1)]
    calls = max(len(copies), 8)
    for T in SWEEP_ROWS:
        a, b = role.buffers(T)
        floor = role.bytes(T, first) / bandwidth / 1e6
        for tile in role.tiles_of(T):

            def chain(a=a, b=b, tile=tile):
                for i in range(calls):
                    role.call(copies[i % len(copies)], a, b, tile)

            try:
                took = graph_time(chain, 9) / calls
                rows.append({"role": role.name, "T": T, "tile": list(tile), "us": took, "floor_us": floor})
            except Exception as error:
                rows.append({"role": role.name, "T": T, "tile": list(tile), "error": str(error)[:200]})
    torch.cuda.empty_cache()
    return rows


# ---------------------------------------------------------------- exactness


def relative(out, ref):
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def check_linear():
    """All formats at T = 1, 4, 8, 16, 64: error against fp64, and equal bits of a row in every call size."""
    found = []
    for fmt in ("W8", "Q4", "Q5", "Q6"):
        matrix, values = coded_matrix(2048, 2048, fmt)
        a = random_activation(64, 2048)
        x = a.values(64)
        factor = torch.rsqrt(a.rows(64)[2].sum(1, keepdim=True) / 2048 + 1e-6)
        ref = (x.double() @ values.double().T) * factor.double()
        alone = torch.full((64, 2048), float("nan"), device=DEVICE)
        for t in range(64):
            linear.project(matrix, part_of(a, t, t + 1), alone[t : t + 1])
        entry = {"op": "project", "format": fmt, "error": relative(alone, ref)}
        for T in (2, 4, 8, 16, 64):
            out = torch.full((T, 2048), float("nan"), device=DEVICE)
            linear.project(matrix, part_of(a, 0, T), out)
            entry[f"bits_{T}"] = torch.equal(out, alone[:T])
        found.append(entry)
    return found


def check_moe(T):
    """Three MoE kernels at the 35B width (32 experts): errors against torch, rows alone equal rows together."""
    experts, inner, width = 32, 512, 2048
    up, up_values = coded_matrix(experts * 2 * inner, width, "Q4")
    down, down_values = coded_matrix(experts * width, inner, "Q5")
    shared_up, shared_up_values = coded_matrix(2 * inner, width, "W8")
    shared_down, shared_down_values = coded_matrix(width, inner, "W8")
    router = (torch.randn(experts + 1, width, device=DEVICE) * 0.05).bfloat16()
    norm = (torch.randn(width, device=DEVICE) * 0.1).bfloat16()
    x = torch.randn(T, width, device=DEVICE)
    u = x.clone()
    whole = Activation.from_rows(u, (x**2).view(T, width // 32, 32).sum(-1))

    def run(lo, hi):
        n = hi - lo
        nan = float("nan")
        a = part_of(whole, lo, hi)
        logits = torch.full((n, experts + 1), nan, device=DEVICE)
        shared = torch.full((n, 2 * inner), nan, device=DEVICE)
        h = moe.ExpertRows.empty(n, 8, inner, DEVICE, experts=experts, width=width)
        ids = torch.full((n, 8), -1, dtype=torch.int32, device=DEVICE)
        weights = torch.full((n, 8), nan, device=DEVICE)
        xo, uo = torch.full((n, width), nan, device=DEVICE), torch.full((n, width), nan, device=DEVICE)
        ao = Activation.empty(n, width, width // 32, DEVICE)
        moe.route_and_shared(shared_up, router, a, u[lo:hi].contiguous(), shared, logits)
        moe.expert_gate_up(up, a, logits, shared, h, ids, weights)
        moe.expert_down(down, shared_down, h, ids, weights, logits, x[lo:hi].contiguous(), norm, xo, uo, ao)
        return logits, shared, h, ids, weights, xo, uo, ao

    logits, shared, h, ids, _, xo, uo, ao = run(0, T)
    factor = torch.rsqrt((x**2).mean(1, keepdim=True) + 1e-6)
    xr = whole.values(T)
    hr = dequantize_rows_ref(h.q, h.s)
    best, order = logits[:, :experts].topk(8)
    gates = up_values.view(experts, 2 * inner, width)[ids.long()]
    y = torch.einsum("tsik,tk->tsi", gates, xr) * factor[:, :, None]
    ref_h = torch.nn.functional.silu(y[..., :inner]) * y[..., inner:]
    out = torch.einsum(
        "tsdi,tsi->tsd", down_values.view(experts, width, inner)[ids.long()], hr[: T * 8].view(T, 8, inner)
    )
    routed = (out * best.softmax(-1)[..., None]).sum(1)
    ref_x = x + routed + torch.sigmoid(logits[:, experts:]) * (hr[T * 8 :] @ shared_down_values.T)
    back = ao.values(T)
    entry = {
        "op": "moe", "T": T, "logits": relative(logits, (u @ router.float().T) * factor),
        "shared": relative(shared, (xr @ shared_up_values.T) * factor), "ids": torch.equal(ids.long(), order),
        "h_int8": relative(hr[: T * 8].view(T, 8, inner), ref_h), "x": relative(xo - x, ref_x - x),
        "codes": relative(back, uo),
    }  # fmt: skip
    entry["bits"] = all(torch.equal(run(t, t + 1)[5][0], xo[t]) for t in range(T))
    return entry


def check_delta():
    """Gated DeltaNet at 35B heads: 24 tokens one by one against windows of 4 with rejected rows, bit for bit."""
    hk, hv, n = 16, 32, 24
    c = (2 * hk + hv) * 128
    projected = torch.randn(n, c + hv * 128, device=DEVICE).bfloat16()
    ab = torch.randn(n, 2 * hv, device=DEVICE)
    taps = torch.randn(4, c, device=DEVICE).bfloat16()
    a_log, dt_bias = torch.randn(hv, device=DEVICE) * 0.3, torch.randn(hv, device=DEVICE)
    norm = torch.rand(128, device=DEVICE).bfloat16()

    def run(plan):
        state = delta.DeltaState.empty(3, hk, hv, DEVICE)
        at, commit, got = 0, 0, []
        for rows, kept in plan:
            p, g = projected[at : at + rows].clone(), ab[at : at + rows].clone()
            p[kept:] = torch.randn_like(p[kept:])
            out = Activation.empty(rows, hv * 128, hv * 4, DEVICE)
            ints = [torch.tensor([v], dtype=torch.int32, device=DEVICE) for v in (1, at, commit)]
            delta.gated_delta(p, g, taps, a_log, dt_bias, norm, state, *ints, out)
            got.append(out.rows(kept))
            at, commit = at + kept, kept
        return [torch.cat(parts) for parts in zip(*got, strict=True)]

    single = run([(1, 1)] * n)
    window = run([(4, 2), (4, 4), (4, 1), (4, 3), (4, 4), (4, 4), (4, 2), (4, 4)])
    ref = delta_reference(projected, ab, taps, a_log, dt_bias, norm, hk, hv)
    factor = torch.rsqrt(single[2].view(n, hv, 4).sum(-1) / 128 + 1e-6)
    got = dequantize_rows_ref(single[0], single[1]).view(n, hv, 128) * factor[..., None]
    return {
        "op": "gated_delta", "int8_error": relative(got, ref),
        "bits": all(torch.equal(a, b) for a, b in zip(single, window, strict=True)),
    }  # fmt: skip


def delta_reference(projected, ab, taps, a_log, dt_bias, norm, hk, hv):
    """The recurrence in fp64."""
    f = torch.nn.functional
    c = taps.shape[1]
    n = projected.shape[0]
    raw = torch.cat([torch.zeros(3, c, device=DEVICE), projected[:, :c].float()])
    s = torch.stack([f.silu((raw[t : t + 4] * taps.float()).sum(0)) for t in range(n)]).bfloat16().double()
    q, k, v = s.split([hk * 128, hk * 128, hv * 128], 1)
    q, k = (t.view(n, hk, 128).repeat_interleave(hv // hk, 1) for t in (q, k))
    v = v.view(n, hv, 128)
    q = q / torch.sqrt((q**2).sum(-1, keepdim=True) + 1e-6) / 128**0.5
    k = k / torch.sqrt((k**2).sum(-1, keepdim=True) + 1e-6)
    g = -torch.exp(a_log.double()) * f.softplus(ab[:, :hv].double() + dt_bias)
    beta = torch.sigmoid(ab[:, hv:].double())
    state = torch.zeros(hv, 128, 128, dtype=torch.double, device=DEVICE)
    outs = []
    for t in range(n):
        state = state * torch.exp(g[t])[:, None, None]
        e = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * e[:, None, :]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    o = torch.stack(outs)
    z = projected[:, c:].double().view(n, hv, 128)
    return o / torch.sqrt((o**2).mean(-1, keepdim=True) + 1e-6) * norm.double() * f.silu(z)


def check_attention():
    """Attention at 35B heads over 700 tokens against torch; a window of 4 against single rows, bit for bit."""
    heads, kv, tokens = 16, 2, 704
    projected = torch.randn(tokens, 2 * (heads + kv) * 256, device=DEVICE).bfloat16()
    gain = (torch.randn(256, device=DEVICE) * 0.1).bfloat16()
    angle = torch.arange(tokens, device=DEVICE).double()[:, None] * 1e7 ** (
        -torch.arange(32, device=DEVICE).double() / 32
    )
    cos, sin = torch.cat([angle.cos()] * 2, 1).float(), torch.cat([-angle.sin(), angle.sin()], 1).float()
    table = torch.randperm(16, device=DEVICE).int()[None]

    def run(plan):
        codes = torch.zeros(2, kv, 16, 64, 256, dtype=torch.int8, device=DEVICE)
        scales = torch.full((2, kv, 16, 64, 4), float("nan"), device=DEVICE).half()
        at, got = 0, []
        for rows in plan:
            work = attention.AttentionWorkspace.empty(rows, 1024, heads, DEVICE)
            out, span = Activation.empty(rows, heads * 256, 1, DEVICE), slice(at, at + rows)
            attention.attention(
                projected[span].contiguous(), gain, gain, cos[span].contiguous(), sin[span].contiguous(), codes, scales,
                table, torch.tensor([at], dtype=torch.int32, device=DEVICE), work, out, heads=heads,
            )  # fmt: skip
            got.append(out.rows(rows)[:2])
            at += rows
        return [torch.cat(p) for p in zip(*got, strict=True)]

    single, window = run([1] * tokens), run([4] * (tokens // 4))
    q, k, gate, v = projected.float().view(tokens, -1, 256).split([heads, kv, heads, kv], 1)

    def turned(x):
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + gain.float())
        turn = torch.cat([x[..., 32:64], x[..., :32]], -1)
        return torch.cat([x[..., :64] * cos[:, None] + turn * sin[:, None], x[..., 64:]], -1)

    q, k = turned(q).double(), turned(k).double().repeat_interleave(8, 1)
    score = torch.einsum("qhd,khd->hqk", q, k) / 16
    score = score.masked_fill(torch.ones(tokens, tokens, device=DEVICE).triu(1).bool(), float("-inf"))
    ref = torch.einsum("hqk,khd->qhd", score.softmax(-1), v.double().repeat_interleave(8, 1)) * torch.sigmoid(gate)
    return {
        "op": "attention", "int8_error": relative(dequantize_rows_ref(*single), ref.flatten(1)),
        "bits": all(torch.equal(a, b) for a, b in zip(single, window, strict=True)),
    }  # fmt: skip


# ---------------------------------------------------------------- a token's chain


CONTEXT = 7680
CHAIN_ROWS = (1, 4)


def kv_pages():
    """Random INT8 pages for `CONTEXT` tokens and a window: 2 KV heads."""
    pages = CONTEXT // 64 + 2
    codes = torch.randint(-127, 128, (2, 2, pages, 64, 256), dtype=torch.int8, device=DEVICE)
    return codes, (torch.rand(2, 2, pages, 64, 4, device=DEVICE) * 0.02).half()


class Chain:
    """All launches of one greedy 35B-A3B decode step at `CONTEXT` tokens: published weight formats, random values."""

    def __init__(self, T, layers=range(40)):
        self.T = T
        self.layers = []
        for i in layers:
            full = i % 4 == 3
            down = "Q6" if i in (34, 38, 39) else "Q5"
            self.layers.append({
                "attention": full,
                "in": random_matrix(9216 if full else 12288, 2048, "W8"),
                "ab": None if full else (torch.randn(64, 2048, device=DEVICE) * 0.02).bfloat16(),
                "out": random_matrix(2048, 4096, "W8"),
                "router": (torch.randn(257, 2048, device=DEVICE) * 0.05).bfloat16(),
                "shared_up": random_matrix(1024, 2048, "W8"), "shared_down": random_matrix(2048, 512, "W8"),
                "up": random_matrix(262144, 2048, "Q4"), "down": random_matrix(524288, 512, down),
                "norm": (torch.randn(2048, device=DEVICE) * 0.1).bfloat16(),
                "taps": torch.randn(4, 8192, device=DEVICE).bfloat16(),
                "a_log": torch.randn(32, device=DEVICE) * 0.3, "dt": torch.randn(32, device=DEVICE),
                "gnorm": torch.ones(128, device=DEVICE).bfloat16(),
                "kv": kv_pages() if full else None,
                "state": None if full else delta.DeltaState.empty(1, 16, 32, DEVICE),
            })  # fmt: skip
        self.table_rows = random_matrix(248320, 2048, "W8")
        self.head = random_matrix(248320, 2048, "Q6")
        self.buffers()

    def buffers(self):
        """Working buffers of one step."""
        T = self.T
        self.x = [torch.randn(T, 2048, device=DEVICE) for _ in range(2)]
        self.u = self.x[0].clone()
        self.a = random_activation(T, 2048)
        self.mid = random_activation(T, 4096)
        self.proj = torch.zeros(T, 12288, dtype=torch.bfloat16, device=DEVICE)
        self.attn = torch.zeros(T, 9216, dtype=torch.bfloat16, device=DEVICE)
        self.ab = torch.zeros(T, 64, device=DEVICE)
        self.logits = torch.zeros(T, 257, device=DEVICE)
        self.shared = torch.zeros(T, 1024, device=DEVICE)
        self.h = moe.ExpertRows.empty(T, 8, 512, DEVICE, experts=256, width=2048)
        self.ids = torch.zeros(T, 8, dtype=torch.int32, device=DEVICE)
        self.weights = torch.zeros(T, 8, device=DEVICE)
        self.vocabulary = torch.empty(T, 248320, device=DEVICE)
        self.candidates = heads.Candidates.empty(T, 248320, DEVICE)
        self.tokens = torch.arange(T, dtype=torch.int32, device=DEVICE)
        self.cos, self.sin = torch.ones(T, 64, device=DEVICE), torch.zeros(T, 64, device=DEVICE)
        self.gain = torch.zeros(256, device=DEVICE).bfloat16()
        self.table = torch.arange(CONTEXT // 64 + 2, dtype=torch.int32, device=DEVICE)[None]
        self.work = attention.AttentionWorkspace.empty(T, CONTEXT + 64, 16, DEVICE)
        self.slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.full((1,), CONTEXT, dtype=torch.int32, device=DEVICE)
        self.commits = torch.full((1,), 1, dtype=torch.int32, device=DEVICE)

    def step(self, parts="eimaorudh"):
        """One greedy step; `parts` leaves launches out to place the time."""
        x, y = self.x
        if "e" in parts:
            embedding.embed(self.table_rows, self.tokens, self.layers[0]["norm"], x, self.u, self.a)
        for w in self.layers:
            if "i" in parts:
                if w["attention"]:
                    linear.project(w["in"], self.a, self.attn)
                else:
                    linear.project(w["in"], self.a, self.proj, u=self.u, side=w["ab"], side_out=self.ab)
            if "m" in parts and not w["attention"]:
                delta.gated_delta(
                    self.proj, self.ab, w["taps"], w["a_log"], w["dt"], w["gnorm"], w["state"], self.slots,
                    self.lengths, self.commits, self.mid,
                )  # fmt: skip
            if "a" in parts and w["attention"]:
                attention.attention(
                    self.attn, self.gain, self.gain, self.cos, self.sin, *w["kv"], self.table, self.lengths, self.work,
                    self.mid, heads=16,
                )  # fmt: skip
            if "o" in parts:
                norm = "none" if w["attention"] else "head"
                linear.project_residual(w["out"], self.mid, x, w["norm"], y, self.u, self.a, norm=norm)
            if "r" in parts:
                moe.route_and_shared(w["shared_up"], w["router"], self.a, self.u, self.shared, self.logits)
            if "u" in parts:
                moe.expert_gate_up(w["up"], self.a, self.logits, self.shared, self.h, self.ids, self.weights)
            if "d" in parts:
                moe.expert_down(
                    w["down"], w["shared_down"], self.h, self.ids, self.weights, self.logits, y, w["norm"], x, self.u,
                    self.a,
                )  # fmt: skip
        if "h" in parts:
            heads.head(self.head, self.a, self.candidates, self.vocabulary, addressable=248077)
            heads.greedy(self.candidates, self.tokens)

    def bytes(self):
        """Least bytes of one step with T rows of distinct experts (state read and written once)."""
        total = self.head.nbytes
        for w in self.layers:
            total += w["in"].nbytes + w["out"].nbytes + w["shared_up"].nbytes + w["shared_down"].nbytes
            total += w["router"].numel() * 2 + (w["up"].nbytes + w["down"].nbytes) / 256 * 8 * self.T
            if w["attention"]:
                total += CONTEXT * 1056
            else:
                total += 2 * w["state"].s.numel() * 4 + w["ab"].numel() * 2
        return total


def run_chain(bandwidth, T):
    """Time of a step with T rows, whole and by part."""
    chain = Chain(T)
    entry = {"T": T, "us": graph_time(chain.step), "floor_us": chain.bytes() / bandwidth / 1e6}
    entry["finite"] = bool(torch.isfinite(chain.vocabulary).all())
    for part in "eimaorudh":
        entry[part] = graph_time(lambda part=part: chain.step(part), 9)
    torch.cuda.empty_cache()
    return entry


def registers():
    """Registers, spills and shared memory of every kernel compiled in this process."""
    found = []
    modules = (linear, moe, mlp, delta, attention, heads, embedding)
    for kernel in {k for m in modules for k in vars(m).values() if hasattr(k, "device_caches")}:
        for key, compiled in kernel.device_caches[0][0].items():
            if hasattr(compiled, "n_regs"):
                found.append({
                    "kernel": kernel.__name__, "registers": compiled.n_regs, "spills": compiled.n_spills,
                    "shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps, "key": str(key)[-160:],
                })  # fmt: skip
    return found


def main():
    """Run the parts asked for and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--parts", default="check,compile,chain,sweep")
    parser.add_argument("--name", default="ops.json", help="file of the results in DIR")
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    out = Path(options.out)
    parts = options.parts.split(",")
    began = time.time()
    result = {"card": torch.cuda.get_device_name(0), "torch": torch.__version__}

    def save(key, value):
        result[key] = value
        (out / options.name).write_text(json.dumps(result, indent=1))
        print(f"[{time.time() - began:.0f}s] {key}", flush=True)

    bandwidth = read_bandwidth()
    save("read_TBps", bandwidth)
    print(f"read bandwidth {bandwidth:.2f} TB/s")
    for part in parts:
        if part == "check":
            checks = precompile([(name, None, 0) for name in CHECKS], options.workers)
            save("checks", checks)
            print("\n".join(json.dumps(entry) for entry in checks))
        elif part == "compile":
            jobs = [("chain", None, T) for T in CHAIN_ROWS]
            jobs += [(i, t, T) for T in SWEEP_ROWS for i, role in enumerate(ROLES) for t in role.tiles_of(T)]
            save("compile_errors", precompile(jobs, options.workers))
            print(result["compile_errors"][:3])
        elif part == "precompile":  # what the chain needs, no more
            save("compile_errors", precompile([("chain", None, T) for T in CHAIN_ROWS], options.workers))
        elif part == "chain":
            for T in CHAIN_ROWS:
                save(f"chain {T}", run_chain(bandwidth, T))
                print({k: round(v, 1) for k, v in result[f"chain {T}"].items()}, flush=True)
        elif part == "sweep":
            for role in ROLES:
                save(role.name, sweep(bandwidth, role))
                best = {}
                for row in result[role.name]:
                    if "us" in row and row["us"] <= best.get(row["T"], row)["us"]:
                        best[row["T"]] = row
                for T, row in best.items():
                    share = row["floor_us"] / row["us"]
                    print(
                        f"{role.name:20s} T={T} tile={row['tile']} {row['us']:7.2f} us, floor {row['floor_us']:7.2f}, {share:.0%}"
                    )
        else:
            raise SystemExit(f"no part {part}; there are check, compile, precompile, chain and sweep")
    save("registers", registers())
    for entry in result["registers"]:
        if entry["spills"]:
            print(entry)


if __name__ == "__main__":
    main()
