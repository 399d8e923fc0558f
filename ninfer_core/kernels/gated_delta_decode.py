"""Triton decode mixer of Gated DeltaNet: convolution, gates, deferred commit, recurrence and output norm in one launch.

The state is `state.DeltaState`. A call first applies the `commit` accepted rows of the window
before (S <- exp(g) S + k e^T), stores S once, then runs its own rows from registers and leaves k, e, g in the ring:
one read and one write of S whatever the number of drafts, and no copy when a draft is rejected.
A program owns 32 of a head's 128 value columns, which is also one int8 group of the output row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..state import RING, DeltaState
from . import _tiles
from ._dequant import (
    EARLY1,
    EARLY2,
    EARLY4,
    FRESH1,
    FRESH2,
    WEIGHT1,
    WEIGHT2,
    from_lane,
    from_partner,
    load_four,
    load_one,
    load_two,
    round_bytes,
    silu,
    store_byte,
    store_four,
    store_one,
    wait_for_inputs,
)
from ._order import Activation

# Everything is in lane form, [4 warps, 32 lanes]: a warp owns eight of the program's 32 value columns (rows of the
# stored state) and a lane four of the 128 of k, so the state is 8 x 4 registers and a dot product over k one reduction
# within a warp. What belongs to a value column stands in lanes i, i + 8, i + 16 and i + 24 of its warp.


@triton.jit
def low_half(word):
    """The first bf16 of a pair, as fp32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(word):
    """The second bf16 of a pair, as fp32."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def four_values(words):
    """Two words of bf16 pairs as four fp32."""
    return low_half(words[0]), high_half(words[0]), low_half(words[1]), high_half(words[1])


@triton.jit
def own_half(word, index):
    """The bf16 with number `index` out of the pair that holds it, as fp32."""
    return tl.where(index % 2 == 0, low_half(word), high_half(word))


@triton.jit
def convolve(old, older, oldest, new, taps):
    """silu of the causal convolution of one channel, rounded to bf16 as the next step reads it."""
    y = oldest * taps[0] + older * taps[1] + old * taps[2] + new * taps[3]
    return silu(y).to(tl.bfloat16).to(tl.float32)


@triton.jit
def ring_words(ring, channel, n, C: tl.constexpr, RINGS: tl.constexpr, PTX: tl.constexpr):
    """Words of the three raw rows before token `n` at `channel` (even), oldest first: pairs for two channels each."""
    rows = ()
    for d in tl.static_range(3):
        token = n - 3 + d
        words = load_two(ring + ((token + RINGS) % RINGS) * (C // 2) + channel // 2, EARLY2, PTX)
        rows = rows + ((tl.where(token >= 0, words[0], 0), tl.where(token >= 0, words[1], 0)),)  # noqa: RUF005
    return rows


@triton.jit
def convolve_four(window, taps, r: tl.constexpr):
    """Four channels of row `r`; `window` are words from three rows before row 0 on, `taps` four pairs of words."""
    a = four_values(window[r])
    b = four_values(window[r + 1])
    c = four_values(window[r + 2])
    d = four_values(window[r + 3])
    first = four_values(taps[0])
    second = four_values(taps[1])
    third = four_values(taps[2])
    fourth = four_values(taps[3])
    found = ()
    for j in tl.static_range(4):
        weights = (first[j], second[j], third[j], fourth[j])
        found = found + (convolve(c[j], b[j], a[j], d[j], weights),)  # noqa: RUF005
    return found


@triton.jit
def dot_four(a, b):
    """Dot product of two 128-vectors held four to a lane, in every lane: [4, 1]."""
    part = tl.fma(a[3], b[3], tl.fma(a[2], b[2], tl.fma(a[1], b[1], a[0] * b[0])))
    return tl.sum(part, 1)[:, None]


@triton.jit
def exchange(d, HALF: tl.constexpr, PTX: tl.constexpr):
    """Keep one half of 2 HALF partial sums, by a bit of the lane number, and add the partner's share of it."""
    upper = (tl.arange(0, 32)[None, :] & HALF) != 0
    kept = ()
    for i in tl.static_range(HALF):
        mine = tl.where(upper, d[i + HALF], d[i])
        kept = kept + (mine + from_partner(tl.where(upper, d[i], d[i + HALF]), HALF, PTX),)  # noqa: RUF005
    return kept


@triton.jit
def scatter_sums(d, PTX: tl.constexpr):
    """Sums over lanes of eight tensors [4, 32]: lane i holds that of number i % 8. Nine exchanges instead of forty."""
    if PTX:
        total = exchange(exchange(exchange(d, 4, PTX), 2, PTX), 1, PTX)[0]
        total += from_partner(total, 8, PTX)
        return total + from_partner(total, 16, PTX)
    else:
        even = tl.join(tl.join(d[0], d[4]), tl.join(d[2], d[6]))
        total = tl.sum(tl.join(even, tl.join(tl.join(d[1], d[5]), tl.join(d[3], d[7]))), 1)
        return tl.reshape(tl.broadcast_to(tl.reshape(total, [4, 1, 8]), [4, 4, 8]), [4, 32])


@triton.jit
def grow(state, key, update, PTX: tl.constexpr, SPREAD: tl.constexpr):
    """state + update key^T; with SPREAD `update` is in lanes, else eight tensors, one per value column."""
    grown = ()
    for i in tl.static_range(8):
        e = from_lane(update, i, PTX) if SPREAD else update[i]
        row = state[i]
        grown = grown + (  # noqa: RUF005
            (row[0] + e * key[0], row[1] + e * key[1], row[2] + e * key[2], row[3] + e * key[3]),
        )
    return grown


@triton.jit
def scale(state, decay):
    """The state times a number."""
    scaled = ()
    for i in tl.static_range(8):
        row = state[i]
        scaled = scaled + ((row[0] * decay, row[1] * decay, row[2] * decay, row[3] * decay),)  # noqa: RUF005
    return scaled


@triton.jit
def read(state, vector, PTX: tl.constexpr):
    """state times a 128-vector: in the lanes of each value column."""
    parts = ()
    for i in tl.static_range(8):
        row = state[i]
        part = tl.fma(row[3], vector[3], tl.fma(row[2], vector[2], tl.fma(row[1], vector[1], row[0] * vector[0])))
        parts = parts + (part,)  # noqa: RUF005
    return scatter_sums(parts, PTX)


@triton.jit
def load_state(s_at, PTX: tl.constexpr):
    """The program's 32 x 128 of the state: eight rows a warp, four columns a lane."""
    state = ()
    for i in tl.static_range(8):
        state = state + (load_four(s_at + i * 128, EARLY4, PTX),)  # noqa: RUF005
    return state


@triton.jit
def commit_rows(state, s_at, ring_k, ring_e, ring_g, n, commit, HK: tl.constexpr, HV: tl.constexpr,
                RINGS: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Apply the last `commit` tokens before `n` from the rings, and store the state."""
    token = n - commit
    while token < n:
        at = token % RINGS
        decay = tl.exp(tl.load(ring_g + at * HV, cache_modifier=".cg"))
        key = load_four(ring_k + at * (HK * 128), EARLY4, PTX)
        update = ()
        for i in tl.static_range(8):
            update = update + (load_one(ring_e + at * (HV * 128) + i, EARLY1, PTX),)  # noqa: RUF005
        state = grow(scale(state, decay), key, update, PTX, False)
        token += 1
    if commit > 0:
        for i in tl.static_range(8):
            row = state[i]
            store_four(s_at + i * 128, row[0], row[1], row[2], row[3], row[0] == row[0], PTX)
    return state


@triton.jit
def gated_delta_kernel(
    projected, ab, taps, a_log, dt_bias, norm, s_ptr, conv_ptr, k_ptr, e_ptr, g_ptr, slots, lengths, commits,
    q_out, s_out, ss_out, eps,
    HK: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, RINGS: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Programs (head * 4 + slice, sequence): rows b * R .. b * R + R - 1 of `projected` [T, C + Hv * 128].

    `projected`, `taps` and `conv_ptr` are pairs of bf16 as int32, `q_out` bytes.
    """
    RATIO: tl.constexpr = HV // HK
    C: tl.constexpr = (2 * HK + HV) * 128
    WIDTH: tl.constexpr = C + HV * 128
    pid = tl.program_id(0)
    b = tl.program_id(1)
    head = pid // 4
    part = pid % 4
    key_head = head // RATIO
    slot = tl.load(slots + b).to(tl.int64)
    n = tl.load(lengths + b)
    commit = tl.load(commits + b)
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    column = head * 128 + part * 32 + warp * 8  # a warp's first value column
    own = column + lane % 8
    s_at = s_ptr + (slot * HV * 128 + column) * 128 + lane * 4
    ring_k = k_ptr + slot * (RINGS * HK * 128) + key_head * 128 + lane * 4 + warp * 0
    ring_e = e_ptr + slot * (RINGS * HV * 128)
    ring_g = g_ptr + slot * (RINGS * HV) + head
    conv = conv_ptr + slot * (RINGS * (C // 2))
    state = load_state(s_at, PTX)
    state = commit_rows(state, s_at, ring_k, ring_e + column + lane * 0, ring_g, n, commit, HK, HV, RINGS, PTX)
    q_channel = key_head * 128 + lane * 4 + warp * 0
    k_channel = HK * 128 + q_channel
    v_channel = 2 * HK * 128 + own
    q_window = ring_words(conv, q_channel, n, C, RINGS, PTX)
    k_window = ring_words(conv, k_channel, n, C, RINGS, PTX)
    v_window = ()
    q_taps = ()
    k_taps = ()
    v_taps = ()
    for d in tl.static_range(3):
        token = n - 3 + d
        word = load_one(conv + ((token + RINGS) % RINGS) * (C // 2) + v_channel // 2, EARLY1, PTX)
        v_window = v_window + (own_half(tl.where(token >= 0, word, 0), own),)  # noqa: RUF005
    for d in tl.static_range(4):
        q_taps = q_taps + (load_two(taps + d * (C // 2) + q_channel // 2, WEIGHT2, PTX),)  # noqa: RUF005
        k_taps = k_taps + (load_two(taps + d * (C // 2) + k_channel // 2, WEIGHT2, PTX),)  # noqa: RUF005
        v_taps = v_taps + (own_half(load_one(taps + d * (C // 2) + v_channel // 2, WEIGHT1, PTX), own),)  # noqa: RUF005
    rate = -tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head)
    weight = own_half(load_one(norm + (part * 32 + warp * 8 + lane % 8) // 2, WEIGHT1, PTX), own)
    wait_for_inputs(PDL)
    # All rows' inputs first: no load then stands behind a store.
    v_words = ()
    z_words = ()
    gates = ()
    for r in tl.static_range(R):
        line = projected + (b * R + r) * (WIDTH // 2)
        q_window = q_window + (load_two(line + q_channel // 2, FRESH2, PTX),)  # noqa: RUF005
        k_window = k_window + (load_two(line + k_channel // 2, FRESH2, PTX),)  # noqa: RUF005
        v_words = v_words + (load_one(line + v_channel // 2, FRESH1, PTX),)  # noqa: RUF005
        z_words = z_words + (load_one(line + (C + own) // 2, FRESH1, PTX),)  # noqa: RUF005
        x = tl.load(ab + (b * R + r) * (2 * HV) + head) + bias
        rise = 1.0 / (1.0 + tl.exp(-tl.load(ab + (b * R + r) * (2 * HV) + HV + head)))
        gates = gates + ((rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))), rise),)  # noqa: RUF005
    for r in tl.static_range(R):
        v_window = v_window + (own_half(v_words[r], own),)  # noqa: RUF005
    leads = (head % RATIO == 0) & (part == 0)
    most = tl.zeros([4, 32], tl.float32)
    squares = tl.zeros([4, 32], tl.float32)
    outputs = ()
    for r in tl.static_range(R):
        at = (n + r) % RINGS
        q = convolve_four(q_window, q_taps, r)
        k = convolve_four(k_window, k_taps, r)
        v = convolve(v_window[r + 2], v_window[r + 1], v_window[r], v_window[r + 3], v_taps)
        # q and k stay as they are; their inverse norms go into o and e.
        q_scale = 0.08838834764831845 / tl.sqrt_rn(dot_four(q, q) + 1e-6)
        k_scale = 1.0 / tl.sqrt_rn(dot_four(k, k) + 1e-6)
        g, beta = gates[r]
        state = scale(state, tl.exp(g))
        update = beta * (v - read(state, k, PTX) * k_scale) * k_scale
        o = (read(state, q, PTX) + update * dot_four(k, q)) * q_scale
        if r + 1 < R:
            state = grow(state, k, update, PTX, True)
        store_one(ring_e + at * (HV * 128) + own, update, lane + warp * 0 < 8, PTX)
        v_at = (conv + at * (C // 2) + v_channel // 2).to(tl.pointer_type(tl.float32), bitcast=True)
        store_one(v_at, v_words[r].to(tl.float32, bitcast=True), (lane % 2 == 0) & (lane + warp * 0 < 8), PTX)
        tl.store(ring_g + at * HV, g, mask=part == 0)
        store_four(ring_k + at * (HK * 128), k[0], k[1], k[2], k[3], leads & (warp + lane * 0 == 0), PTX)
        for j in tl.static_range(2):
            q_at = (conv + at * (C // 2) + q_channel // 2 + j).to(tl.pointer_type(tl.float32), bitcast=True)
            store_one(q_at, q_window[r + 3][j].to(tl.float32, bitcast=True), leads & (warp + lane * 0 == j), PTX)
            k_at = (conv + at * (C // 2) + k_channel // 2 + j).to(tl.pointer_type(tl.float32), bitcast=True)
            store_one(k_at, k_window[r + 3][j].to(tl.float32, bitcast=True), leads & (warp + lane * 0 == 2 + j), PTX)
        y = o * weight * silu(own_half(z_words[r], own))
        outputs = outputs + (y,)  # noqa: RUF005
        most = tl.where(lane == r, tl.max(tl.abs(y), 1)[:, None], most)
        square = tl.where(lane + warp * 0 < 8, o * o, 0.0)
        squares = tl.where(lane == r, tl.sum(square, 1)[:, None], squares)
    # One sum over warps for all rows: lane r holds what belongs to row r.
    top = tl.max(most, 0)[None, :] + most * 0.0
    total = tl.sum(squares, 0)[None, :] + squares * 0.0
    for r in tl.static_range(R):
        t = b * R + r
        unit = (t // 8) * (HV * 4) + pid
        largest = from_lane(top, r, PTX)
        inverse = tl.where(largest > 0.0, 127.0 / largest, 0.0)
        byte = round_bytes(outputs[r], inverse)
        store_byte(q_out + unit * 256 + t % 8 * 32 + warp * 8 + lane % 8, byte, lane + warp * 0 < 8, PTX)
        one = (lane == r) & (warp == 0)
        store_one(s_out + unit * 8 + t % 8 + (lane + warp) * 0, top / 127.0, one, PTX)
        store_one(ss_out + unit * 8 + t % 8 + (lane + warp) * 0, total, one, PTX)


def gated_delta(
    projected: torch.Tensor,
    ab: torch.Tensor,
    taps: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: torch.Tensor,
    state: DeltaState,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    commits: torch.Tensor,
    out: Activation,
    *,
    eps: float = 1e-6,
) -> None:
    """Mixer of one layer for B sequences of R rows (T = B * R, rows of a sequence together).

    Args:
        projected: bf16 [T, C + Hv * 128], raw q, k, v then z. ab: fp32 [T, 2 * Hv], a then b.
        taps: bf16 [4, C]. a_log, dt_bias: fp32 [Hv]. norm: bf16 [128].
        slots, lengths, commits: int32 [B]: state slot, index of the first row, rows of the window before to apply.
        out: int8 rows of norm(o) * silu(z) before the head's RMS factor; read with norm="head".
    """
    batch = slots.shape[0]
    rows = projected.shape[0] // batch
    value_heads = a_log.shape[0]
    key_heads = (taps.shape[1] // 128 - value_heads) // 2
    if 2 * rows > RING or rows + 3 > RING:
        raise ValueError(f"a window of {rows} rows does not fit the ring of {RING} tokens")
    gated_delta_kernel[(value_heads * 4, batch)](
        projected.view(torch.int32), ab, taps.view(torch.int32), a_log, dt_bias, norm.view(torch.int32), state.s,
        state.conv.view(torch.int32), state.k, state.e, state.g, slots, lengths, commits, out.q.view(torch.int8), out.s,
        out.ss, eps,
        HK=key_heads, HV=value_heads, R=rows, RINGS=RING, **_tiles.launch(projected, 4),
    )  # fmt: skip
