"""Decode kernels under Triton's interpreter against torch twins, on tiny shapes. A program: prints one JSON line a case.

Run with TRITON_INTERPRET=1 in a process of its own: the interpreter is chosen when Triton is first imported.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch.nn.functional import silu, softplus

from ninfer_core.kernels import (
    _tiles,
    attention_decode,
    embedding_decode,
    gated_delta_decode,
    head_decode,
    linear_decode,
    mlp_decode,
    moe_decode,
    moe_listed_decode,
    residual_decode,
)
from ninfer_core.kernels._order import GROUP, Activation, fine_rows_ref, pack_codes, quantize_rows_ref
from ninfer_core.kernels._parts import PartialSums
from tests.kernels.interpreter import run

NAN = float("nan")
EXACT = 1e-6
"""fp32 sums in another order."""
FINE = 0.002
"""Rows of two planes with one scale per 32 values, against unrounded ones."""
MIXED = 0.005
"""The same behind values that are rounded to bf16 on the way, a few of them to the other side."""


def matrix(rows, columns, fmt):
    low = {"W8": -127, "Q4": -8, "Q5": -16, "Q6": -32}[fmt]
    high = {"W8": 128, "Q4": 8, "Q5": 16, "Q6": 32}[fmt]
    codes = torch.randint(low, high, (rows, columns))
    scales = (torch.rand(rows, columns // GROUP[fmt]) * 0.01).half()
    values = (codes.float().view(rows, -1, GROUP[fmt]) * scales.float()[..., None]).view(rows, columns)
    return pack_codes(codes, scales, fmt), values


def activation(rows, columns):
    return Activation.from_rows(torch.randn(rows, columns), torch.rand(rows, columns // 32) * columns)


def near(out, ref, limit, what):
    error = ((out.double() - ref.double()).norm() / ref.double().norm()).item()
    assert error < limit, f"{what}: relative error {error:.2e}, allowed {limit:.0e}"


def same(out, ref, what):
    assert torch.equal(out, ref), f"{what}: {(out != ref).sum().item()} of {ref.numel()} values differ"


def project(fmt):
    weight, values = matrix(32, 256, fmt)
    rows = 9 if fmt == "W8" else 2  # nine rows: a second block of eight, mostly empty
    a = activation(rows, 256)
    x, parts = a.values(rows), a.rows(rows)[2]
    factor = torch.rsqrt(parts.sum(1, keepdim=True) / 256 + 1e-6)
    heads = torch.rsqrt(parts.view(rows, 2, 4).sum(-1) / 128 + 1e-6)
    expected = {
        "row": (x @ values.T) * factor,
        "none": x @ values.T,
        "head": (x.view(rows, 2, 128) * heads[..., None]).view(rows, 256) @ values.T,
    }
    run = 4 if fmt == "W8" else 2
    for norm, tile in (("row", (2, 1, 4)), ("head", (1, run, 2)), ("none", (2, 2, 1))):
        out = torch.full((rows, 32), NAN)
        linear_decode.project(weight, a, out, norm=norm, tile=_tiles.Tile(*tile))
        near(out, expected[norm], EXACT, f"{fmt} {norm}")


def side_rows():
    """High-precision rows of one to three fours of rows, in one block and in two: a row's bits are the same in each."""
    weight, _ = matrix(32, 256, "W8")
    rows = 11
    a = activation(rows, 256)
    u, side = torch.randn(rows, 256), torch.randn(9, 256).bfloat16()
    factor = torch.rsqrt(a.rows(rows)[2].sum(1, keepdim=True) / 256 + 1e-6)
    expected = (u @ side.float().T) * factor
    found = []
    for count in (rows, 7, 3, 1):
        out, extra = torch.full((count, 32), NAN), torch.full((count, 9), NAN)
        linear_decode.project(weight, a, out, u=u[:count].contiguous(), side=side, side_out=extra)
        near(extra, expected[:count], EXACT, f"side rows of {count}")
        found.append((out, extra))
    for out, extra in found[1:]:
        count = len(out)
        assert torch.equal(out, found[0][0][:count]) and torch.equal(extra, found[0][1][:count]), (
            f"bits of {count} rows"
        )


def windows():
    """A row alone and among three, five: windows of 1, 4 and 8 live rows give it the same bits."""
    weight, _ = matrix(64, 128, "Q5")
    norm = (torch.randn(64) * 0.1).bfloat16()
    every, x = activation(5, 128), torch.randn(5, 64)
    none, found = PartialSums.empty(8, 64, 1, "cpu"), []
    for rows in (1, 3, 5):
        out, inner = torch.full((rows, 64), NAN), Activation.empty(rows, 32, 1, "cpu")
        linear_decode.project(weight, every, out)
        heads, logits = head_decode.Candidates.empty(rows, 64, "cpu"), torch.full((rows, 64), NAN)
        head_decode.head(weight, every, heads, logits, addressable=64)
        mlp_decode.gate_up(weight, every, rows, inner, none)
        new, u, a = torch.full((rows, 64), NAN), torch.full((rows, 64), NAN), Activation.empty(rows, 64, 2, "cpu")
        residual_decode.project_residual(weight, every, x[:rows], norm, new, u, a, none)
        found.append([t[0] for t in (out, logits, heads.value, heads.row, new, u, *inner.rows(1)[:2], *a.rows(1))])
    for other in found[1:]:
        for i, (one, more) in enumerate(zip(found[0], other, strict=True)):
            same(more, one, f"tensor {i}")


def residual():
    weight, values = matrix(64, 128, "Q5")
    a, x = activation(3, 128), torch.randn(3, 64)
    norm = (torch.randn(64) * 0.1).bfloat16()
    x_out, u_out, out = torch.full((3, 64), NAN), torch.full((3, 64), NAN), Activation.empty(3, 64, 2, "cpu")
    residual_decode.project_residual(weight, a, x, norm, x_out, u_out, out, PartialSums.empty(8, 64, 1, "cpu"))
    near(x_out, x + a.values(3) @ values.T, EXACT, "x")
    same(u_out, x_out * (1 + norm.float()), "u")
    q, s, parts = out.rows(3)
    words, scales = fine_rows_ref(u_out)
    same(q, words, "codes")
    near(s, scales, EXACT, "scales")
    near(parts.sum(1), (x_out**2).sum(1), EXACT, "sums of squares")


def shared(fmt, columns, tile, heads):
    """Several programs for each group: a row alone, in a window and in two blocks; stages with and without a remainder."""
    weight, values = matrix(64, columns, fmt)
    every, x = activation(11, columns), torch.randn(11, 64)
    y = every.values(11)
    if heads:
        squares = every.rows(11)[2].view(11, -1, 4).sum(-1, keepdim=True)
        y = (y.view(11, -1, 128) * torch.rsqrt(squares / 128 + 1e-6)).view(11, columns)
    norm, sums, found = (torch.randn(64) * 0.1).bfloat16(), PartialSums.empty(11, 64, tile.parts, "cpu"), []
    for rows in (11, 3, 1):
        new, u, a = torch.full((rows, 64), NAN), torch.full((rows, 64), NAN), Activation.empty(rows, 64, 2, "cpu")
        sums.values.fill_(NAN)
        residual_decode.project_residual(
            weight, every, x[:rows], norm, new, u, a, sums, norm="head" if heads else "none", tile=tile
        )
        assert not sums.arrived.any(), "counts are left behind"
        near(new, x[:rows] + y[:rows] @ values.T, EXACT, f"{rows} rows")
        found.append([t[:1] for t in (new, u, *a.rows(1))])
    for other in found[1:]:
        for i, (one, more) in enumerate(zip(found[0], other, strict=True)):
            same(more, one, f"tensor {i}")
    try:
        residual_decode.project_residual(
            weight, every, x, norm, x, x, a, PartialSums.empty(8, 64, tile.parts, "cpu"), tile=tile
        )
    except ValueError as error:
        assert "give the workspace more parts" in str(error)
    else:
        raise AssertionError("more rows than there is room for")


def experts(fmt_up, fmt_down, rows, inner=64, tile=None):
    """With two units of the inner width, and of a warp of gate/up, one of them waits in shared memory."""
    count, top_k, width = 4, 2, 256
    up, up_values = matrix(count * 2 * inner, width, fmt_up)
    down, down_values = matrix(count * width, inner, fmt_down)
    shared_up, shared_up_values = matrix(2 * inner, width, "W8")
    shared_down, shared_down_values = matrix(width, inner, "W8")
    x, router = torch.randn(rows, width), torch.randn(count + 1, width).bfloat16()
    norm = (torch.randn(width) * 0.1).bfloat16()
    a = Activation.from_rows(x, (x**2).view(rows, -1, 32).sum(-1))
    factor = torch.rsqrt((x**2).mean(1, keepdim=True) + 1e-6)
    logits, shared = torch.full((rows, count + 1), NAN), torch.full((rows, 2 * inner), NAN)
    h = moe_decode.ExpertRows.empty(rows, top_k, inner, "cpu", experts=count, width=width)
    ids, weights = torch.full((rows, top_k), -1, dtype=torch.int32), torch.full((rows, top_k), NAN)
    moe_decode.route_and_shared(shared_up, router, a, x, shared, logits)
    near(logits, (x @ router.float().T) * factor, EXACT, "logits")
    first = a.values(rows, fine=False)
    near(shared, (first @ shared_up_values.T) * factor, EXACT, "shared gate/up")
    moe_decode.expert_gate_up(up, a, logits, shared, h, ids, weights, ahead=down, tile=tile)
    best, order = logits[:, :count].topk(top_k)
    same(ids.long(), order, "ids")
    near(weights, best.softmax(-1), EXACT, "weights")
    y = torch.einsum("tsik,tk->tsi", up_values.view(count, 2 * inner, width)[order], first) * factor[..., None]
    hidden = (silu(y[..., :inner]) * y[..., inner:]).view(-1, inner)
    hidden = torch.cat([hidden, silu(shared[:, :inner]) * shared[:, inner:]])
    words, scales = quantize_rows_ref(hidden)
    near(h.s, scales, 1e-5, "inner scales")
    assert (h.words() != words).sum() <= 2, "inner codes"  # a value at a rounding border may fall either way
    codes = h.words().view(torch.int8).view(-1, inner // 32, 32).float()
    inner_rows = (codes * h.s[..., None]).view(-1, inner)
    x_out, u_out, out = (
        torch.full((rows, width), NAN),
        torch.full((rows, width), NAN),
        Activation.empty(rows, width, width // 32, "cpu"),
    )
    moe_decode.expert_down(down, shared_down, h, ids, weights, logits, x, norm, x_out, u_out, out)
    parts = torch.einsum(
        "tsdi,tsi->tsd", down_values.view(count, width, inner)[order], inner_rows[:-rows].view(rows, top_k, inner)
    )
    expected = (parts * weights[..., None]).sum(1) + torch.sigmoid(logits[:, count:]) * (
        inner_rows[-rows:] @ shared_down_values.T
    )
    near(x_out - x, expected, 1e-5, "x")
    same(out.rows(rows)[0], fine_rows_ref(u_out)[0], "codes")
    near(out.rows(rows)[2].sum(1), (x_out**2).sum(1), EXACT, "sums of squares")
    if rows == 1:
        return
    h = moe_decode.ExpertRows.empty(1, top_k, inner, "cpu")
    alone, u, part = torch.full((1, width), NAN), torch.full((1, width), NAN), Activation.empty(1, width, 8, "cpu")
    one = Activation.from_rows(x[:1], (x[:1] ** 2).view(1, -1, 32).sum(-1))
    moe_decode.expert_gate_up(up, one, logits[:1], shared[:1], h, ids[:1], weights[:1], tile=tile)
    moe_decode.expert_down(
        down, shared_down, h, ids[:1], weights[:1], logits[:1], x[:1], norm, alone, u, part
    )  # fmt: skip
    same(alone, x_out[:1], "a row alone")
    same(part.rows(1)[0], out.rows(rows)[0][:1], "codes of a row alone")


def ties():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 9.0], [-1.0, -1.0, -1.0, -5.0, 0.0]])
    a, shared = activation(2, 64), torch.randn(2, 128)
    up, _ = matrix(4 * 128, 64, "Q4")
    h, weights = moe_decode.ExpertRows.empty(2, 2, 64, "cpu"), torch.full((2, 2), NAN)
    ids = torch.full((2, 2), -1, dtype=torch.int32)
    moe_decode.expert_gate_up(up, a, logits, shared, h, ids, weights)
    assert ids.tolist() == [[1, 2], [0, 1]], ids.tolist()
    same(weights, torch.full((2, 2), 0.5), "weights of equal logits")


def listed(rows):
    """Choice, weights and work items."""
    count, top_k = 8, 2
    logits = torch.randn(rows, count + 1)
    h = moe_decode.ExpertRows.empty(rows, top_k, 64, "cpu", experts=count, width=64)
    ids, weights = torch.full((rows, top_k), -1, dtype=torch.int32), torch.full((rows, top_k), NAN)
    moe_listed_decode.choose(logits, h.items, h.used, ids, weights)
    best, order = logits[:, :count].topk(top_k)
    same(ids.long(), order, "ids")
    near(weights, best.softmax(-1), EXACT, "weights")
    lines = []
    for expert in range(count):
        pairs = [pair for pair, own in enumerate(order.flatten().tolist()) if own == expert]
        pairs += pairs[-1:] * (-len(pairs) % 4)
        lines += [[*pairs[i : i + 4], expert] for i in range(0, len(pairs), 4)]
    assert h.items[: int(h.used), :5].tolist() == lines


def delta():
    key_heads, heads, tokens = 1, 2, 4
    channels = (2 * key_heads + heads) * 128
    projected = torch.randn(tokens, channels + heads * 128).bfloat16()
    ab, taps = torch.randn(tokens, 2 * heads), torch.randn(4, channels).bfloat16()
    a_log, bias, norm = torch.randn(heads) * 0.3, torch.randn(heads), torch.rand(128).bfloat16()

    def run(plan):
        state = gated_delta_decode.DeltaState.empty(2, key_heads, heads, "cpu")
        at, commit, found = 0, 0, []
        for rows, kept in plan:
            p = projected[at : at + rows].clone()
            p[kept:] = torch.randn_like(p[kept:])  # rows that will be rejected
            out = Activation.empty(rows, heads * 128, heads * 4, "cpu")
            ints = [torch.tensor([v], dtype=torch.int32) for v in (1, at, commit)]
            gated_delta_decode.gated_delta(p, ab[at : at + rows].clone(), taps, a_log, bias, norm, state, *ints, out)
            found.append(out.rows(kept))
            at, commit = at + kept, kept
        return [torch.cat(part) for part in zip(*found, strict=True)]

    single, window = run([(1, 1)] * tokens), run([(3, 2), (2, 2)])
    for one, other, what in zip(single, window, ("codes", "scales", "sums"), strict=True):
        same(other, one, f"window against single rows: {what}")
    out = Activation.empty(tokens, heads * 128, heads * 4, "cpu")
    for t in range(tokens):
        out.q[0, :, t], out.s[0, :, t] = single[0][t], single[1][t]
    factor = torch.rsqrt(single[2].view(tokens, heads, 4).sum(-1) / 128 + 1e-6)
    got = out.values(tokens).view(tokens, heads, 128) * factor[..., None]
    near(got, delta_reference(projected, ab, taps, a_log, bias, norm, heads), MIXED, "output")


def delta_batch():
    """A row of each of many sequences against each alone: the same bits of all it leaves."""
    key_heads, heads, slots = 1, 2, (3, 0, 5, 1, 4)
    count, channels = len(slots), (2 * key_heads + heads) * 128
    projected = torch.randn(count, channels + heads * 128).bfloat16()
    ab, taps = torch.randn(count, 2 * heads), torch.randn(4, channels).bfloat16()
    a_log, bias, norm = torch.randn(heads) * 0.3, torch.randn(heads), torch.rand(128).bfloat16()
    empty = gated_delta_decode.DeltaState.empty
    begun = empty(6, key_heads, heads, "cpu")
    begun.conv.normal_()
    for part in (begun.s, begun.k, begun.e, begun.g):
        part.normal_(std=0.3)
    begun.g.abs_().neg_()
    ints = torch.tensor([slots, (100, 0, 2, 17, 7), (1, 0, 2, 1, 3)], dtype=torch.int32)

    def run(parts):
        state, found = empty(6, key_heads, heads, "cpu"), []
        for name in ("s", "conv", "k", "e", "g"):
            getattr(state, name).copy_(getattr(begun, name))
        for part in parts:
            out = Activation.empty(len(ints[0, part]), heads * 128, heads * 4, "cpu")
            gated_delta_decode.gated_delta(
                projected[part].clone(), ab[part].clone(), taps, a_log, bias, norm, state,
                *(values[part].clone() for values in ints), out,
            )  # fmt: skip
            found.append(out.rows(len(ints[0, part])))
        made = [torch.cat(part) for part in zip(*found, strict=True)]
        return [*made, state.s, state.conv, state.k, state.e, state.g]

    alone, together = run([slice(i, i + 1) for i in range(count)]), run([slice(0, count)])
    names = ("codes", "scales", "sums", "state", "raw rows", "keys", "updates", "decays")
    for one, other, what in zip(alone, together, names, strict=True):
        same(other, one, f"many sequences against each alone: {what}")


def delta_reference(projected, ab, taps, a_log, bias, norm, heads):
    channels, tokens = taps.shape[1], projected.shape[0]
    raw = torch.cat([torch.zeros(3, channels), projected[:, :channels].float()])
    mixed = torch.stack([silu((raw[t : t + 4] * taps.float()).sum(0)) for t in range(tokens)]).bfloat16().double()
    width = (channels - heads * 128) // 2
    q, k, v = mixed.split([width, width, heads * 128], 1)
    q, k = (p.view(tokens, -1, 128).repeat_interleave(heads * 128 // width, 1) for p in (q, k))
    q = q / torch.sqrt((q**2).sum(-1, keepdim=True) + 1e-6) / 128**0.5
    k = k / torch.sqrt((k**2).sum(-1, keepdim=True) + 1e-6)
    g = -torch.exp(a_log.double()) * softplus(ab[:, :heads].double() + bias)
    beta = torch.sigmoid(ab[:, heads:].double())
    state, out = torch.zeros(heads, 128, 128, dtype=torch.double), []
    for t in range(tokens):
        state = state * torch.exp(g[t])[:, None, None]
        e = beta[t][:, None] * (v.view(tokens, heads, 128)[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * e[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    o, z = torch.stack(out), projected[:, channels:].double().view(tokens, heads, 128)
    return o / torch.sqrt((o**2).mean(-1, keepdim=True) + 1e-6) * norm.double() * silu(z)


def kv_codes(x):
    groups = x.unflatten(-1, (-1, 64))
    scales = (groups.abs().amax(-1) / 127).half()
    step = scales.float().masked_fill(scales == 0, float("inf"))[..., None]
    return (groups / step).round().clamp(-127, 127).to(torch.int8).flatten(-2), scales


def attend(first, rows, most, int8, heads=2, kv_heads=1):
    """A window across a page border against torch, and each of its rows alone, bit for bit."""
    tokens = first + rows
    pages_used = -(-tokens // 64)
    table = torch.randperm(pages_used + 2)[:pages_used].int()[None]
    projected = torch.randn(tokens, 2 * (heads + kv_heads) * 256).bfloat16()
    q_gain, k_gain = (torch.randn(256) * 0.1).bfloat16(), (torch.randn(256) * 0.1).bfloat16()
    angle = torch.arange(tokens).double()[:, None] * 1e7 ** (-torch.arange(32).double() / 32)
    cos, sin = torch.cat([angle.cos()] * 2, 1).float(), torch.cat([-angle.sin(), angle.sin()], 1).float()

    def rotated(x, gain):
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + gain.float())
        turn = torch.cat([x[..., 32:64], x[..., :32]], -1)
        return torch.cat([x[..., :64] * cos[:, None] + turn * sin[:, None], x[..., 64:]], -1)

    q, k, gate, v = projected.float().view(tokens, -1, 256).split([heads, kv_heads, heads, kv_heads], 1)
    q, k = rotated(q, q_gain), rotated(k, k_gain)
    codes, scales = torch.stack([k, v]).bfloat16(), None  # [2, T, K, 256]
    stored = codes.float()
    if int8:
        codes, scales = kv_codes(torch.stack([k, v]))  # [2, T, K, 256], [2, T, K, 4]
        stored = (codes.unflatten(-1, (-1, 64)).float() * scales.float()[..., None]).flatten(-2)
    shape = (2, kv_heads, pages_used + 2, 64)

    def run(start, count):
        # What was never written must not reach a result.
        pages = (
            torch.randint(-127, 128, (*shape, 256)).to(codes.dtype)
            if int8
            else torch.full((*shape, 256), NAN).to(codes)
        )
        steps = torch.full((*shape, 4), NAN).half() if int8 else None
        for t in range(start):
            pages[:, :, table[0, t // 64], t % 64] = codes[:, t]
            if int8:
                steps[:, :, table[0, t // 64], t % 64] = scales[:, t]
        work = attention_decode.AttentionWorkspace.empty(count, tokens, heads, "cpu", most=most)
        work.out.fill_(NAN)
        out, span = Activation.empty(count, heads * 256, 1, "cpu"), slice(start, start + count)
        attention_decode.attention(
            projected[span].contiguous(), q_gain, k_gain, cos[span].contiguous(), sin[span].contiguous(), pages, steps,
            table, torch.tensor([start], dtype=torch.int32), work, out, heads=heads,
        )  # fmt: skip
        for t in range(start, start + count):
            assert (pages[:, :, table[0, t // 64], t % 64] != codes[:, t]).sum() <= 1, f"codes of token {t}"
            if int8:
                same(steps[:, :, table[0, t // 64], t % 64], scales[:, t], f"scales of token {t}")
        return out

    window = run(first, rows)
    for row, t in enumerate(range(first, tokens)):
        score = torch.einsum("hd,thd->ht", q[t], stored[0, : t + 1].repeat_interleave(heads // kv_heads, 1)) / 16
        y = torch.einsum("ht,thd->hd", score.softmax(-1), stored[1, : t + 1].repeat_interleave(heads // kv_heads, 1))
        near(window.values(rows)[row], (y * torch.sigmoid(gate[t])).flatten(), FINE, f"token {t}")
        if rows > 1 and row < (1 if tokens > 128 else 2):  # on both sides of the border; a long one takes long
            alone = run(t, 1).rows(1)
            same(alone[0][0], window.rows(rows)[0][row], f"token {t} alone: codes")
            same(alone[1][0], window.rows(rows)[1][row], f"token {t} alone: scales")


def dense():
    """Also with a group of two in parts, of a row alone and in two blocks."""
    inner, width, rows = 64, 256, 9
    codes, scales = torch.randint(-8, 8, (2 * inner, width)), (torch.rand(2 * inner, 4) * 0.1).half()
    values = (codes.view(2 * inner, 4, 64) * scales.float()[..., None]).view(2 * inner, width)
    weight = pack_codes(mlp_decode.interleave_gate_up(codes), mlp_decode.interleave_gate_up(scales), "Q4")
    a, sums = activation(rows, width), PartialSums.empty(rows, 64, 2, "cpu")
    factor = torch.rsqrt(a.rows(rows)[2].sum(1, keepdim=True) / width + 1e-6)
    y = (a.values(rows, fine=False) @ values.T) * factor
    words, expected = fine_rows_ref(silu(y[:, :inner]) * y[:, inner:])
    for tile, whole, count in ((None, None, 3), ((4, 2, 1, 2), 1, rows), ((4, 1, 2, 2), 1, 1), ((4, 1, 1, 4), 0, 1)):
        if tile == (4, 1, 1, 4):
            sums = PartialSums.empty(count, 128, 4, "cpu")
        sums.values.fill_(NAN)
        out = Activation.empty(count, inner, 1, "cpu")
        made = None if tile is None else _tiles.Tile(*tile)
        mlp_decode.gate_up(weight, a, count, out, sums, tile=made, whole=whole)
        near(out.rows(count)[1], expected[:count], 1e-5, f"scales by {tile}")
        # A value at a rounding border may fall either way.
        assert (out.rows(count)[0] != words[:count]).sum() <= 8, f"codes by {tile}"
        assert not sums.arrived.any(), "counts are left behind"


def head():
    codes, scales = torch.randint(-32, 32, (96, 64)), torch.full((96, 1), 0.01).half()
    codes[70] = codes[5]  # the same logit twice: the lower row wins
    codes[5, :] = codes[70, :] = 0
    weight, values = pack_codes(codes, scales, "Q6"), codes.float() * scales.float()
    a = activation(2, 64)
    found = head_decode.Candidates.empty(2, 96, "cpu")
    for addressable in (96, 60):
        logits, token = torch.full((2, 96), NAN), torch.full((2,), -1, dtype=torch.int32)
        head_decode.head(weight, a, found, logits, addressable=addressable)
        factor = torch.rsqrt(a.rows(2)[2].sum(1, keepdim=True) / 64 + 1e-6)
        near(logits, (a.values(2, fine=False) @ values.T) * factor, EXACT, "logits")
        head_decode.greedy(found, token)
        same(token.long(), logits[:, :addressable].argmax(1), "greedy token")
    names = torch.randperm(96).int()
    head_decode.head(weight, a, found, None, addressable=96)
    head_decode.greedy(found, token, names)
    same(token, names[logits.argmax(1)], "mapped token")
    tied = head_decode.Candidates(torch.tensor([[1.0, 4.0, 4.0]]), torch.tensor([[3, 40, 70]], dtype=torch.int32))
    head_decode.greedy(tied, token[:1])
    assert token[0] == 40, "ties go to the lower row"
    none = head_decode.Candidates(torch.full((1, 3), NAN), torch.full((1, 3), 2147483647, dtype=torch.int32))
    head_decode.greedy(none, token[:1], names)
    assert token[0] in names.tolist(), "of a row that is not finite a token that exists"


def embed(fmt):
    table, values = matrix(48, 256, fmt)
    tokens, norm = torch.tensor([0, 9, 47], dtype=torch.int32), (torch.randn(256) * 0.1).bfloat16()
    x, u, out = torch.full((3, 256), NAN), torch.full((3, 256), NAN), Activation.empty(3, 256, 8, "cpu")
    embedding_decode.embed(table, tokens, norm, x, u, out)
    same(x, values[tokens.long()], "rows")
    same(u, x * (1 + norm.float()), "u")
    same(out.rows(3)[0], fine_rows_ref(u)[0], "codes")
    near(out.rows(3)[2], (x**2).view(3, 8, 32).sum(-1), EXACT, "sums of squares")


CASES = {f"project {fmt}": (project, fmt) for fmt in ("W8", "Q4", "Q5", "Q6")} | {
    "windows": (windows,),
    "side rows": (side_rows,),
    "residual": (residual,),
    "shared": (shared, "Q5", 896, _tiles.Tile(2, 2, 1, 2), False),  # three stages and a step
    "shared heads": (shared, "Q5", 768, _tiles.Tile(2, 4, 1, 2), True),  # a stage and two steps
    "shared W8": (shared, "W8", 256, _tiles.Tile(2, 4, 1, 2), True),
    "experts Q4 Q5": (experts, "Q4", "Q5", 3, 128),
    "experts W8 W8": (experts, "W8", "W8", 1),
    "experts Q4 Q6": (experts, "Q4", "Q6", 1),
    "experts grouped": (experts, "Q4", "Q5", 9, 128, _tiles.Tile(2, 2, 2)),
    "expert ties": (ties,),
    "expert lists": (listed, 17),
    "dense gate/up": (dense,),
    "head": (head,),
    "embed W8": (embed, "W8"),
    "embed Q6": (embed, "Q6"),
    "gated delta": (delta,),
    "gated delta batch": (delta_batch,),
    "attention": (attend, 63, 3, 2, True, 3, 1),
    "attention splits": (attend, 255, 2, 4, True),
    "attention bf16": (attend, 64, 1, 2, False, 6, 2),
}


if __name__ == "__main__":
    run({name: partial(*case) for name, case in CASES.items()}, sys.argv[1:])
