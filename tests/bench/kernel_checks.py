"""Exactness of every decode kernel on a GPU: against torch, rows alone against rows together, a graph against launches."""

from __future__ import annotations

import torch

from ninfer_core.kernels import _tiles, lanes_decode
from ninfer_core.kernels import attention_decode as attention
from ninfer_core.kernels import embedding_decode as embedding
from ninfer_core.kernels import gated_delta_decode as delta
from ninfer_core.kernels import head_decode as heads
from ninfer_core.kernels import linear_decode as linear
from ninfer_core.kernels import mlp_decode as mlp
from ninfer_core.kernels import moe_decode as moe
from ninfer_core.kernels import residual_decode as residual
from ninfer_core.kernels._order import Activation, dequantize_rows_ref, fine_values_ref, pack_codes
from ninfer_core.kernels._parts import PartialSums
from ninfer_core.kernels.sampling import pick, uniform
from ninfer_core.runtime.validation import SamplingParams
from tests.bench.kernel_inputs import DEVICE, coded_matrix, part_of, random_activation, relative


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
    xr = whole.values(T, fine=False)
    hr = dequantize_rows_ref(h.words(), h.s)
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


def check_choice():
    """Experts chosen of 256, by rows of many ties: against a stable sort, and the work items of calls above 8 rows."""
    experts, top_k, inner, width = 256, 8, 64, 64
    up, _ = coded_matrix(experts * 2 * inner, width, "Q4")
    entry = {"op": "choice"}
    for T in (1, 8, 9, 64):
        for kind in ("ties", "equal", "plain"):
            logits = torch.randn(T, experts + 1, device=DEVICE) * {"ties": 2.0, "equal": 0.0, "plain": 1.0}[kind]
            logits = (logits.round() if kind == "ties" else logits) + 0.0  # no -0.0, which sorts below 0.0
            a, shared = random_activation(T, width), torch.randn(T, 2 * inner, device=DEVICE)
            h = moe.ExpertRows.empty(T, top_k, inner, DEVICE, experts=experts, width=width)
            ids = torch.full((T, top_k), -1, dtype=torch.int32, device=DEVICE)
            weights = torch.full((T, top_k), float("nan"), device=DEVICE)
            moe.expert_gate_up(up, a, logits, shared, h, ids, weights)
            best, order = torch.sort(logits[:, :experts], dim=-1, descending=True, stable=True)
            entry[f"{kind} {T} ids"] = torch.equal(ids.long(), order[:, :top_k])
            entry[f"{kind} {T} x"] = relative(weights, best[:, :top_k].softmax(-1))
            if T > 8:
                got = h.items[: int(h.used), :5].tolist()
                entry[f"{kind} {T} items"] = got == work_items(ids.flatten().tolist(), experts)
    return entry


def work_items(chosen, experts):
    """Lines of four pairs, the last of fewer repeated, and their expert, from the expert of every pair."""
    lines = []
    for e in range(experts):
        pairs = [p for p, own in enumerate(chosen) if own == e]
        pairs += pairs[-1:] * (-len(pairs) % 4)
        lines += [[*pairs[i : i + 4], e] for i in range(0, len(pairs), 4)]
    return lines


def check_side():
    """High-precision rows beside a projection at 1 to 64 rows: error against fp64, and equal bits in every call size."""
    matrix, _ = coded_matrix(2048, 2048, "W8")
    a, u = random_activation(64, 2048), torch.randn(64, 2048, device=DEVICE)
    side = torch.randn(65, 2048, device=DEVICE).bfloat16()
    factor = torch.rsqrt(a.rows(64)[2].sum(1, keepdim=True).double() / 2048 + 1e-6)
    entry, whole = {"op": "side"}, None
    for T in (64, 32, 16, 9, 8, 4, 1):
        out = torch.full((T, 2048), float("nan"), device=DEVICE)
        got = torch.full((T, 65), float("nan"), device=DEVICE)
        linear.project(matrix, part_of(a, 0, T), out, u=u[:T].contiguous(), side=side, side_out=got)
        whole = (out, got) if whole is None else whole
        entry[f"error {T}"] = relative(got, (u[:T].double() @ side.double().T) * factor[:T])
        entry[f"bits {T}"] = torch.equal(got, whole[1][:T]) and torch.equal(out, whole[0][:T])
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
    got = fine_values_ref(single[0], single[1]).view(n, hv, 128) * factor[..., None]
    parts = [delta_batch(projected, ab, taps, a_log, dt_bias, norm, size) for size in (1, n)]
    return {
        "op": "gated_delta", "fine_error": relative(got, ref),
        "bits": all(torch.equal(a, b) for a, b in zip(single, window, strict=True)),
        "bits of many sequences": all(torch.equal(a, b) for a, b in zip(*parts, strict=True)),
    }  # fmt: skip


def delta_batch(projected, ab, taps, a_log, dt_bias, norm, size):
    """Three rounds of a sequence for every row, `size` sequences a call: what is left of all."""
    n, hv = projected.shape[0], a_log.shape[0]
    state = delta.DeltaState.empty(n, (taps.shape[1] // 128 - hv) // 2, hv, DEVICE)
    slots, got = torch.randperm(n, generator=torch.Generator().manual_seed(0)).int().to(DEVICE), []
    for turn in range(3):
        for i in range(0, n, size):
            near = torch.roll(torch.arange(n, device=DEVICE), turn)[i : i + size]
            out = Activation.empty(size, hv * 128, hv * 4, DEVICE)
            ints = [torch.full((size,), v, dtype=torch.int32, device=DEVICE) for v in (turn, min(turn, 1))]
            delta.gated_delta(
                projected[near], ab[near], taps, a_log, dt_bias, norm, state, slots[i : i + size], *ints, out
            )
            got.append(out.rows(size))
    return [*(torch.cat(p) for p in zip(*got, strict=True)), state.s, state.conv, state.k, state.e, state.g]


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


def check_attention(int8=True):
    """Attention at 35B heads over 704 tokens against torch; windows against single rows, bit for bit.

    At most four splits a row, so that the length of splits changes at 257 and 513 tokens, in the middle of a window.
    """
    heads, kv, tokens = 16, 2, 704
    projected = torch.randn(tokens, 2 * (heads + kv) * 256, device=DEVICE).bfloat16()
    gain = (torch.randn(256, device=DEVICE) * 0.1).bfloat16()
    angle = torch.arange(tokens, device=DEVICE).double()[:, None] * 1e7 ** (
        -torch.arange(32, device=DEVICE).double() / 32
    )
    cos, sin = torch.cat([angle.cos()] * 2, 1).float(), torch.cat([-angle.sin(), angle.sin()], 1).float()
    table = torch.randperm(16, device=DEVICE).int()[None]

    def run(plan):
        codes = torch.zeros(2, kv, 16, 64, 256, dtype=torch.int8 if int8 else torch.bfloat16, device=DEVICE)
        scales = torch.full((2, kv, 16, 64, 4), float("nan"), device=DEVICE).half() if int8 else None
        at, got = 0, []
        for rows in plan:
            work = attention.AttentionWorkspace.empty(rows, 1024, heads, DEVICE, 4)
            work.out.fill_(float("nan"))
            out, span = Activation.empty(rows, heads * 256, 1, DEVICE), slice(at, at + rows)
            attention.attention(
                projected[span].contiguous(), gain, gain, cos[span].contiguous(), sin[span].contiguous(), codes, scales,
                table, torch.tensor([at], dtype=torch.int32, device=DEVICE), work, out, heads=heads,
            )  # fmt: skip
            got.append(out.rows(rows)[:2])
            at += rows
        return [torch.cat(p) for p in zip(*got, strict=True)]

    single = run([1] * tokens)
    odd = [1, 4, 8, 1, 4, 4] * 32
    assert sum(odd) == tokens
    plans = {"windows of 4": [4] * (tokens // 4), "windows of any size": odd, "windows of 2": [2] * (tokens // 2)}
    bits = {
        name: all(torch.equal(a, b) for a, b in zip(single, run(plan), strict=True)) for name, plan in plans.items()
    }
    q, k, gate, v = projected.float().view(tokens, -1, 256).split([heads, kv, heads, kv], 1)

    def turned(x):
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + gain.float())
        turn = torch.cat([x[..., 32:64], x[..., :32]], -1)
        return torch.cat([x[..., :64] * cos[:, None] + turn * sin[:, None], x[..., 64:]], -1)

    q, k = turned(q).double(), turned(k).double().repeat_interleave(8, 1)
    score = torch.einsum("qhd,khd->hqk", q, k) / 16
    score = score.masked_fill(torch.ones(tokens, tokens, device=DEVICE).triu(1).bool(), float("-inf"))
    ref = torch.einsum("hqk,khd->qhd", score.softmax(-1), v.double().repeat_interleave(8, 1)) * torch.sigmoid(gate)
    error = relative(fine_values_ref(*single), ref.flatten(1))
    return {"op": "attention", "pages": "int8" if int8 else "bf16", "fine_error": error, "bits": bits}


def check_head():
    """Logits of a Q6 head, its candidates and the greedy row, at 1, 4 and 64 rows; the same through a shortlist."""
    rows, width, limit = 8192, 2048, 8000
    matrix, values = coded_matrix(rows, width, "Q6")
    a = random_activation(64, width)
    factor = torch.rsqrt(a.rows(64)[2].sum(1, keepdim=True) / width + 1e-6)
    ref = (a.values(64, fine=False).double() @ values.double().T) * factor.double()
    names = torch.randperm(rows, device=DEVICE).int()
    entry, whole = {"op": "head"}, None
    for T in (64, 4, 1):
        logits, token = torch.full((T, rows), float("nan"), device=DEVICE), torch.zeros(T, device=DEVICE).int()
        found = heads.Candidates.empty(T, rows, DEVICE)
        heads.head(matrix, part_of(a, 0, T), found, logits, addressable=limit)
        heads.greedy(found, token)
        whole = logits if whole is None else whole
        entry[f"error {T}"] = relative(logits, ref[:T])
        entry[f"bits {T}"] = torch.equal(logits, whole[:T])
        entry[f"greedy {T}"] = torch.equal(token.long(), logits[:, :limit].argmax(1))
        heads.greedy(found, token, names)
        entry[f"mapped {T}"] = torch.equal(token, names[logits[:, :limit].argmax(1)])
    return entry


def check_draw():
    """The draw of 256 rows by eight laws against the host's; ties, and more of them than the kernel has room for."""
    size, limit, laws = 248_320, 248_077, []
    for i in range(8):
        law = {"temperature": (0.0, 0.6, 1.0, 1.3)[i % 4], "top_k": (20, 64, 1, 50)[i // 2], "seed": 2**40 + i}
        laws.append(SamplingParams(top_p=(1.0, 0.95)[i % 2], min_p=(0.0, 0.02)[i // 4], **law))
    lanes = torch.zeros(8, lanes_decode.LANE_WIDTH, dtype=torch.int32)
    for i, law in enumerate(laws):
        floats = torch.tensor([law.temperature, law.top_p, law.min_p]).view(torch.int32)
        lane = lanes_decode.LANE
        lanes[i, lane.temperature : lane.temperature + 3], lanes[i, lane.top_k] = floats, law.top_k
        lanes[i, lane.seed : lane.seed + 2] = torch.tensor([law.seed]).view(torch.int32)
    lanes, slots = lanes.to(DEVICE), torch.arange(8, dtype=torch.int32, device=DEVICE)
    entry = {"op": "draw"}
    for kind in ("plain", "ties", "crowd"):
        wrong, drawn = 0, 0
        for turn in range(4):
            logits = torch.randn(64, size, device=DEVICE) * 3
            logits = (
                (logits * 2).round() / 2 if kind == "ties" else logits.clamp(max=1.0) if kind == "crowd" else logits
            )
            value, at = logits[:, : limit // 32 * 32].view(64, -1, 32).max(-1)
            best = torch.full((64, size // 32), -torch.inf, device=DEVICE)
            row = torch.zeros(64, size // 32, dtype=torch.int32, device=DEVICE)
            count = value.shape[1]
            best[:, :count], row[:, :count] = value, (at + 32 * torch.arange(count, device=DEVICE)).int()
            rest = logits[:, count * 32 : limit]
            best[:, count], row[:, count] = rest.max(-1)[0], (rest.argmax(-1) + count * 32).int()
            token, bad = (torch.zeros(64, dtype=torch.int32, device=DEVICE) for _ in range(2))
            scratch = torch.zeros(64, lanes_decode.SCRATCH_WIDTH, dtype=torch.int32, device=DEVICE)
            lanes[:, lanes_decode.LANE.index] = 100 * turn
            lanes_decode.sample(
                logits, heads.Candidates(best, row), lanes, slots, scratch, scratch.float(), token, bad,
                addressable=limit,
            )  # fmt: skip
            cut = logits[:, :limit].cpu()
            for t in range(64):
                law = laws[t // 8]
                wrong += int(token[t]) != pick(cut[t], law, uniform(law.seed, 100 * turn + t % 8))
                drawn += 1
            wrong += int(bad.sum())
        entry[kind] = f"{wrong} of {drawn} wrong"
        entry[f"{kind} bits"] = wrong == 0
    return entry


def check_dense():
    """SwiGLU of a dense MLP and its down projection with residual at 27B width, 1 to 64 rows; groups whole and shared."""
    inner, width = 3072, 5120
    codes = torch.randint(-8, 8, (2 * inner, width), device=DEVICE)
    scales = (torch.rand(2 * inner, width // 64, device=DEVICE) * 0.01).half()
    values = (codes.float().view(2 * inner, -1, 64) * scales.float()[..., None]).view(2 * inner, width)
    up = pack_codes(mlp.interleave_gate_up(codes), mlp.interleave_gate_up(scales), "Q4")
    down, down_values = coded_matrix(width, inner, "Q5")
    a, sums = random_activation(64, width), PartialSums.empty(64, width, 4, DEVICE)
    x, norm = torch.randn(64, width, device=DEVICE), (torch.randn(width, device=DEVICE) * 0.1).bfloat16()
    y = (a.values(64, fine=False) @ values.T) * torch.rsqrt(a.rows(64)[2].sum(1, keepdim=True) / width + 1e-6)
    entry = {"op": "dense"}
    for name, up_tile, groups, down_tile in (
        ("", None, None, None),
        ("shared ", _tiles.Tile(4, 2, 8, 5), inner // 32 - 6, _tiles.Tile(2, 2, 4, 4)),
    ):
        whole = None
        for T in (64, 9, 8, 4, 1):
            h, out = Activation.empty(T, inner, 1, DEVICE), Activation.empty(T, width, width // 32, DEVICE)
            xo, uo = (torch.full((T, width), float("nan"), device=DEVICE) for _ in range(2))
            mlp.gate_up(up, part_of(a, 0, T), T, h, sums, tile=up_tile, whole=groups)
            residual.project_residual(down, h, x[:T].contiguous(), norm, xo, uo, out, sums, tile=down_tile)
            if whole is None:
                whole = (xo, h.rows(T)[0])
                entry[f"{name}fine_h"] = relative(h.values(T), torch.nn.functional.silu(y[:, :inner]) * y[:, inner:])
                entry[f"{name}x"] = relative(xo - x, h.values(T).double() @ down_values.double().T)
            entry[f"{name}bits {T}"] = torch.equal(xo, whole[0][:T]) and torch.equal(h.rows(T)[0], whole[1][:T])
    return entry


def check_embed():
    """Rows of the table in both formats, in three places of the call."""
    entry = {"op": "embed"}
    norm = (torch.randn(2048, device=DEVICE) * 0.1).bfloat16()
    for fmt in ("W8", "Q6"):
        table, values = coded_matrix(4096, 2048, fmt)
        tokens = torch.tensor([0, 4095, 777], dtype=torch.int32, device=DEVICE)
        x, u = (torch.full((3, 2048), float("nan"), device=DEVICE) for _ in range(2))
        out = Activation.empty(3, 2048, 64, DEVICE)
        embedding.embed(table, tokens, norm, x, u, out)
        entry[f"bits {fmt}"] = torch.equal(x, values[tokens.long()]) and torch.equal(u, x * (1 + norm.float()))
        entry[f"codes {fmt}"] = relative(out.values(3), u)
    return entry


def check_graph():
    """A step of four layers launched one by one, and the same as a graph, with and without early starts: equal bits."""
    from tests.bench.chain import Chain

    found = {"op": "graph"}
    for T in (1, 4):
        torch.manual_seed(1)
        chain = Chain(T, range(32, 36))
        chain.step()  # state and inputs of a step in the middle
        held = [t.clone() for t in chain.tensors()]

        def outcome(run, chain=chain, held=held):
            for tensor, value in zip(chain.tensors(), held, strict=True):
                tensor.copy_(value)
            torch.cuda.synchronize()
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            return [t.clone() for t in (chain.x[0], chain.vocabulary, chain.tokens)]

        want = outcome(chain.step)
        families = dict(_tiles.FAMILIES)
        for early in (False, True):
            _tiles.FAMILIES.update({n: f._replace(early=early) for n, f in families.items()})
            chain.step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain.step()
            got = outcome(graph.replay)
            same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            found[f"bits {T} rows{', early' if early else ''}"] = same
        _tiles.FAMILIES.update(families)
    return found


CHECKS = {
    "linear": check_linear,
    "side": check_side,
    **{f"moe {T}": (lambda T=T: check_moe(T)) for T in (1, 4, 8, 16, 64)},
    "choice": check_choice,
    "delta": check_delta,
    "attention": check_attention,
    "attention bf16": lambda: check_attention(False),
    "head": check_head,
    "draw": check_draw,
    "dense": check_dense,
    "embed": check_embed,
    "graph": check_graph,
}
LIMITS = {"error": 1e-5, "x": 1e-5, "logits": 1e-5, "shared": 1e-5, "codes": 0.002, "fine": 0.005, "h_int8": 0.02}
"""Relative errors: fp32 sums in another order; rows of two planes with one scale per 32 values, alone and behind values
that are rounded to bf16; rows of one plane."""


def faults(entry, name=""):
    """What is wrong in the result of a check: bits that differ, errors above their limit."""
    if isinstance(entry, dict):
        return [f for key, value in entry.items() for f in faults(value, f"{name} {key}".strip())]
    if isinstance(entry, list):
        return [f for value in entry for f in faults(value, name)]
    if isinstance(entry, bool):
        return [] if entry else [name]
    if isinstance(entry, str) and "Error" in entry:
        return [f"{name}: {entry}"]
    if isinstance(entry, float):
        limit = next((x for key, x in LIMITS.items() if name.split()[-1].startswith(key) or key in name.split()), None)
        return [] if limit is not None and entry < limit else [f"{name} = {entry:.2e}"]
    return []
