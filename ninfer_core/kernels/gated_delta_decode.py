"""Triton decode mixer of Gated DeltaNet: convolution, gates, deferred commit, recurrence and output norm in one launch.

For windows of several rows; a row alone takes the kernel of `gated_delta_row_decode`, made of the same parts.

The state is `state.DeltaState`. A call first applies the `commit` accepted rows of the window
before (S <- exp(g) S + k e^T), stores S once, then runs its own rows from registers and leaves k, e, g in the ring:
one read and one write of S whatever the number of drafts, and no copy when a draft is rejected.
A program owns 32 of a head's 128 value columns, which is also one int8 group of the output row. What the rounds before
left is asked for before the wait for the kernel in front, and the commit done by then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..state import RING, DeltaState
from . import _tiles
from ._dequant import (
    EARLY1,
    EARLY4,
    FRESH1,
    WEIGHT1,
    from_partner,
    load_four,
    load_one,
    store_byte,
    store_four,
    store_one,
    wait_for_inputs,
)
from ._halves import power
from ._order import Activation
from ._planes import activation_byte, fine_bytes, fine_steps
from ._room import copy_four, put_one, put_two, room, room_of, take_floats, wait_for_copies

# Everything is in lane form, [8 warps, 32 lanes]. A warp owns four of the program's 32 value columns (rows of the
# stored state): lane 4 p + c has of column c the keys 4 p + 32 j + 0..3, j = 0..3, so the state is 16 registers, a dot
# product over k 16 products and three shuffles, and an update needs none. What belongs to a value column is in all
# lanes with its c; before and behind the recurrence in lanes 4 r + c for row r.
#
# Queries and keys are convolved once: of every row, two warps take 64 channels each of both, and hand them to the
# others through the program's room in shared memory with their shares of q q, k k and k q.

ROOM = room(8 * 1024 + 256 + 512 + 8 * 512)
"""Query and key of every row; their sums, four words for each half; maximum and sum of squares of every row and warp;
keys of the rows to commit."""
NORMS = tl.constexpr(8 * 1024)
SUMS = tl.constexpr(8 * 1024 + 256)
KEYS = tl.constexpr(8 * 1024 + 256 + 512)


@triton.jit
def low_half(word):
    """The first bf16 of a pair, as fp32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(word):
    """The second bf16 of a pair, as fp32."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def own_half(word, index):
    """The bf16 with number `index` out of the pair that holds it, as fp32."""
    return tl.where(index % 2 == 0, low_half(word), high_half(word))


@triton.jit
def own_halves(words, index):
    """`own_half` of four words."""
    return own_half(words[0], index), own_half(words[1], index), own_half(words[2], index), own_half(words[3], index)


@triton.jit
def exponential(x, PTX: tl.constexpr):
    """e to the power of `x`, two instructions: the same bits wherever a decay is needed."""
    return power(x * 1.4426950408889634, PTX)


@triton.jit
def sigmoid(x, PTX: tl.constexpr):
    """The logistic sigmoid, four instructions; off by a few units in the last place."""
    below = 1.0 + exponential(-x, PTX)
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / below


@triton.jit
def convolve(rows, taps, PTX: tl.constexpr):
    """silu of the causal convolution of one channel, rounded to bf16 as the next step reads it; oldest row first."""
    y = tl.fma(rows[3], taps[3], tl.fma(rows[2], taps[2], tl.fma(rows[1], taps[1], rows[0] * taps[0])))
    return (y * sigmoid(y, PTX)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def convolve_pair(window, taps, PTX: tl.constexpr):
    """Two channels; `window`, `taps`: four words each, the oldest row first."""
    low = (low_half(window[0]), low_half(window[1]), low_half(window[2]), low_half(window[3]))
    high = (high_half(window[0]), high_half(window[1]), high_half(window[2]), high_half(window[3]))
    low_taps = (low_half(taps[0]), low_half(taps[1]), low_half(taps[2]), low_half(taps[3]))
    high_taps = (high_half(taps[0]), high_half(taps[1]), high_half(taps[2]), high_half(taps[3]))
    return convolve(low, low_taps, PTX), convolve(high, high_taps, PTX)


@triton.jit
def tap_words(taps, channel, C: tl.constexpr, PTX: tl.constexpr):
    """The four taps at `channel`: pairs for two channels each."""
    found = ()
    for d in tl.static_range(4):
        found = found + (load_one(taps + d * (C // 2) + channel // 2, WEIGHT1, PTX),)  # noqa: RUF005
    return found


@triton.jit
def ring_words(ring, channel, row, n, C: tl.constexpr, RINGS: tl.constexpr, PTX: tl.constexpr):
    """Words of the three raw rows before `row` at `channel`, oldest first; right where they come from the ring."""
    found = ()
    for d in tl.static_range(3):
        token = n + row + (d - 3)
        word = load_one(ring + ((token + RINGS) % RINGS) * (C // 2) + channel // 2, EARLY1, PTX)
        found = found + (tl.where(token >= 0, word, 0),)  # noqa: RUF005
    return found


@triton.jit
def window_words(old, lines, channel, row, R: tl.constexpr, STRIDE: tl.constexpr, PTX: tl.constexpr):
    """Words of raw rows row - 3 .. row at `channel`: from `lines`, in front of them from `old`, see `ring_words`."""
    found = ()
    for d in tl.static_range(3):
        word = old[d]
        if R > 1:
            at = row + (d - 3)
            new = load_one(lines + tl.maximum(at, 0) * STRIDE + channel // 2, FRESH1, PTX)
            word = tl.where(at < 0, word, new)
        found = found + (word,)  # noqa: RUF005
    return found + (load_one(lines + row * STRIDE + channel // 2, FRESH1, PTX),)  # noqa: RUF005


@triton.jit
def from_quad(v, r, PTX: tl.constexpr):
    """What lanes 4 r .. 4 r + 3 hold of `v`, in every four lanes."""
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], v.shape)
    if PTX:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [v, lane % 4 + 4 * r], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.gather(v, lane % 4 + 4 * r, 1)


@triton.jit
def take_quarters(at, lines, line, PTX: tl.constexpr):
    """A lane's four quadruples of the 128-vector in the room at `at`, or with number `line` of `lines` [n, 128]."""
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [8, 32])
    found = ()
    if PTX:
        for j in tl.static_range(4):
            found = found + (take_floats(at + lane // 4 * 16 + j * 128),)  # noqa: RUF005
    else:
        own = tl.arange(0, lines.shape[0])[:, None] == line
        vector = tl.broadcast_to(tl.sum(tl.where(own, lines, 0.0), 0)[None, :], [8, 128])
        for j in tl.static_range(4):
            near = lane // 4 * 4 + j * 32
            found = found + ((  # noqa: RUF005
                tl.gather(vector, near, 1), tl.gather(vector, near + 1, 1), tl.gather(vector, near + 2, 1),
                tl.gather(vector, near + 3, 1),
            ),)  # fmt: skip
    return found


@triton.jit
def sum_column(v, PTX: tl.constexpr):
    """Sum over the lanes of a value column, in all of them."""
    v += from_partner(v, 4, PTX)
    v += from_partner(v, 8, PTX)
    return v + from_partner(v, 16, PTX)


@triton.jit
def exchange(a, b, MASK: tl.constexpr, PTX: tl.constexpr):
    """`a` plus the partner's where the lane's bit `MASK` is 0, else the same of `b`."""
    upper = (tl.broadcast_to(tl.arange(0, 32)[None, :], a.shape) & MASK) != 0
    return tl.where(upper, b, a) + from_partner(tl.where(upper, a, b), MASK, PTX)


@triton.jit
def sum_three(a, b, c, PTX: tl.constexpr):
    """Sums over lanes: lane i holds that of `a`, `b`, `c`, `c` by i % 4. Six exchanges instead of fifteen."""
    return sum_column(exchange(exchange(a, c, 2, PTX), exchange(b, c, 2, PTX), 1, PTX), PTX)


@triton.jit
def read(state, vector, PTX: tl.constexpr):
    """state times a 128-vector, of each lane's column."""
    parts = ()
    for j in tl.static_range(4):
        s, x = state[j], vector[j]
        part = tl.fma(s[3], x[3], tl.fma(s[2], x[2], tl.fma(s[1], x[1], s[0] * x[0])))
        parts = parts + (part,)  # noqa: RUF005
    return sum_column((parts[0] + parts[1]) + (parts[2] + parts[3]), PTX)


@triton.jit
def grow(state, decay, key, update):
    """decay state + update key^T."""
    grown = ()
    for j in tl.static_range(4):
        s, x = state[j], key[j]
        grown = grown + ((  # noqa: RUF005
            tl.fma(update, x[0], s[0] * decay), tl.fma(update, x[1], s[1] * decay),
            tl.fma(update, x[2], s[2] * decay), tl.fma(update, x[3], s[3] * decay),
        ),)  # fmt: skip
    return grown


@triton.jit
def load_quarters(at, PTX: tl.constexpr):
    """A lane's four quadruples of a 128-vector."""
    return (
        load_four(at, EARLY4, PTX), load_four(at + 32, EARLY4, PTX), load_four(at + 64, EARLY4, PTX),
        load_four(at + 96, EARLY4, PTX),
    )  # fmt: skip


@triton.jit
def load_pending(at, ring_k, ring_e, ring_g, n, commit, HK: tl.constexpr, HV: tl.constexpr, RINGS: tl.constexpr,
                 PTX: tl.constexpr):  # fmt: skip
    """Ask for what `commit_rows` applies, all tokens at once: keys are copied into the room, in front of a barrier.

    Warp w takes the key of the token with number w; lane 4 i + c loads what belongs to token i. `ring_k`, `ring_e`,
    `ring_g`: of the program's heads and each lane's column.
    """
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [8, 32])
    warp = tl.broadcast_to(tl.arange(0, 8)[:, None], [8, 32])
    token = (n - commit + tl.minimum(lane // 4, tl.maximum(commit - 1, 0)) + RINGS) % RINGS
    of_warp = (n - commit + tl.minimum(warp, tl.maximum(commit - 1, 0)) + RINGS) % RINGS
    copied = copy_four(at + KEYS + warp * 512 + lane * 16, ring_k + of_warp * (HK * 128) + lane * 4, PTX)
    e = load_one(ring_e + token * (HV * 128), EARLY1, PTX)
    return copied, e, load_one(ring_g + token * HV, EARLY1, PTX)


@triton.jit
def commit_rows(state, at, s_at, pending, commit, PTX: tl.constexpr):
    """Apply the `commit` tokens of `load_pending`, and store the state."""
    copied, e, decay = pending
    fade = exponential(decay, PTX)
    i = 0
    while i < commit:
        key = take_quarters(at + KEYS + i * 512, copied, i, PTX)
        state = grow(state, from_quad(fade, i, PTX), key, from_quad(e, i, PTX))
        i += 1
    if commit > 0:
        for j in tl.static_range(4):
            row = state[j]
            store_four(s_at + j * 32, row[0], row[1], row[2], row[3], row[0] == row[0], PTX)
    return state


@triton.jit
def put_item(at, index, q, k, PTX: tl.constexpr):
    """Half `index` % 2 of the query and the key of row `index` // 2 into the room, two channels a lane; their sums.

    Returns what the interpreter takes them from.
    """
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [8, 32])
    live = lane >= 0
    to = at + index // 2 * 1024 + index % 2 * 256 + lane * 8
    put_two(to, q[0], q[1], live, PTX)
    put_two(to + 512, k[0], k[1], live, PTX)
    square = tl.fma(q[1], q[1], q[0] * q[0])
    sums = sum_three(square, tl.fma(k[1], k[1], k[0] * k[0]), tl.fma(k[1], q[1], k[0] * q[0]), PTX)
    put_one(at + NORMS + index * 16 + lane % 4 * 4, sums.to(tl.int32, bitcast=True), PTX)
    return q, k, sums


@triton.jit
def take_vector(at, items, r: tl.constexpr, which: tl.constexpr, PTX: tl.constexpr):
    """A lane's four quadruples of the query (`which` 0) or key (1) of row `r`; `items`: what `put_item` returned."""
    if PTX:
        return take_quarters(at + (r * 1024 + which * 512), items, r, PTX)
    else:
        pair = items[r // 4][which]
        return take_quarters(at, tl.reshape(tl.join(pair[0], pair[1]), [4, 128]), r % 4, PTX)


@triton.jit
def take_sums(at, items, row, PTX: tl.constexpr):
    """q q, k k and k q of row `row` of each lane."""
    if PTX:
        one = take_floats(at + NORMS + row * 32)
        other = take_floats(at + NORMS + row * 32 + 16)
        return one[0] + other[0], one[1] + other[1], one[2] + other[2]
    else:
        found = ()
        for m in tl.static_range(3):
            total = tl.zeros([8, 32], tl.float32)
            for i in tl.static_range(len(items)):
                line = tl.reshape(tl.sum(tl.reshape(items[i][2], [4, 2, 32]), 1), [1, 128])
                one = tl.gather(tl.broadcast_to(line, [8, 128]), row % 4 * 32 + m, 1)
                total = tl.where(row // 4 == i, one, total)
            found = found + (total,)  # noqa: RUF005
        return found


@triton.jit
def log_decay(rate, x, PTX: tl.constexpr):
    """The logarithm of a row's decay: minus e to the power of `rate` times softplus of `x`."""
    return -exponential(rate, PTX) * (tl.maximum(x, 0.0) + tl.log(1.0 + exponential(-tl.abs(x), PTX)))


@triton.jit
def over_quads(o, y, PTX: tl.constexpr):
    """Largest magnitude of `y` and sum of the squares of `o` over every four lanes, in all of them."""
    square = o * o
    square += from_partner(square, 1, PTX)
    square += from_partner(square, 2, PTX)
    top = tl.abs(y)
    top = tl.maximum(top, from_partner(top, 1, PTX))
    return tl.maximum(top, from_partner(top, 2, PTX)), square


@triton.jit
def take_eight(near):
    """Maximum of the first and sum of the second of eight pairs of fp32 in the room. On a GPU only."""
    two = take_floats(near)
    most = tl.maximum(two[0], two[2])
    total = two[1] + two[3]
    for i in tl.static_range(1, 4):
        two = take_floats(near + 16 * i)
        most = tl.maximum(most, tl.maximum(two[0], two[2]))
        total += two[1] + two[3]
    return most, total


@triton.jit
def over_warps(at, top, square, PTX: tl.constexpr):
    """Maximum and sum over warps of what lanes 4 r .. 4 r + 3 hold for row r: through the room, behind a barrier."""
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [8, 32])
    warp = tl.broadcast_to(tl.arange(0, 8)[:, None], [8, 32])
    near = at + SUMS + lane // 4 * 64
    put_two(near + warp * 8, top, square, lane % 4 == 0, PTX)
    tl.debug_barrier()
    if PTX:
        return take_eight(near)
    else:
        return tl.max(top, 0)[None, :] + top * 0.0, tl.sum(square, 0)[None, :] + top * 0.0


@triton.jit
def recur(state, at, items, row, v, beta, fade, R: tl.constexpr, PTX: tl.constexpr):
    """Outputs before the norm and updates of all rows, in lanes 4 r + c, as are `v`, `beta`, `fade`."""
    quad = tl.broadcast_to(tl.arange(0, 32)[None, :], [8, 32]) // 4
    qq, kk, kq = take_sums(at, items, row, PTX)
    # Queries and keys stay as they are; their inverse norms go into what they are multiplied with.
    q_norm = tl.rsqrt(qq + 1e-6) * 0.08838834764831845
    k_norm = tl.rsqrt(kk + 1e-6)
    gain = beta * k_norm
    wanted = gain * v
    had = gain * k_norm * fade
    kept = q_norm * fade
    added = q_norm * kq
    o_all = tl.zeros([8, 32], tl.float32)
    e_all = tl.zeros([8, 32], tl.float32)
    for r in tl.static_range(R):
        seen = read(state, take_vector(at, items, r, 0, PTX), PTX)
        k = take_vector(at, items, r, 1, PTX)
        # The decay comes in behind the sums: nothing is scaled for the last row.
        if r + 1 < R:
            update = tl.fma(-read(state, k, PTX), from_quad(had, r, PTX), from_quad(wanted, r, PTX))
            state = grow(state, from_quad(fade, r, PTX), k, update)
        else:  # needed where it is stored, no more
            update = tl.fma(-read(state, k, PTX), had, wanted)
        o = tl.fma(update, added, seen * kept)
        o_all = tl.where(quad == r, o, o_all)
        e_all = tl.where(quad == r, update, e_all)
    return o_all, e_all


@triton.jit
def store_window(
    conv, ring_k, ring_g, n, v_word, decay, windows, items, HK: tl.constexpr, HV: tl.constexpr, R: tl.constexpr,
    RINGS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Into the rings what the next call reads, but for updates: before the recurrence, which needs the registers."""
    RATIO: tl.constexpr = HV // HK
    C: tl.constexpr = (2 * HK + HV) * 128
    head = tl.program_id(0) // 4
    part = tl.program_id(0) % 4
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [8, 32])
    warp = tl.broadcast_to(tl.arange(0, 8)[:, None], [8, 32])
    place = (n + tl.minimum(lane // 4, R - 1)) % RINGS
    inside = lane < 4 * R
    ring = conv.to(tl.pointer_type(tl.float32), bitcast=True)
    v_channel = (2 * HK + head) * 128 + part * 32 + warp * 4 + lane % 4
    v_at = ring + place * (C // 2) + v_channel // 2
    store_one(v_at, v_word.to(tl.float32, bitcast=True), inside & (lane % 2 == 0), PTX)
    if part == 0:
        store_one(ring_g + place * HV, decay, inside & (lane % 4 == 0) & (warp == 0), PTX)
        if head % RATIO == 0:
            channel = warp % 2 * 64 + lane * 2
            for i in tl.static_range(len(items)):
                live = warp + 8 * i < 2 * R
                item_place = (n + (warp + 8 * i) // 2) % RINGS
                key_at = ring_k + item_place * (HK * 128) + channel
                store_one(key_at, items[i][1][0], live, PTX)
                store_one(key_at + 1, items[i][1][1], live, PTX)
                q_at = ring + item_place * (C // 2) + (head // RATIO * 128 + channel) // 2
                store_one(q_at, windows[i][0][3].to(tl.float32, bitcast=True), live, PTX)
                store_one(q_at + HK * 64, windows[i][1][3].to(tl.float32, bitcast=True), live, PTX)


@triton.jit
def store_rows(at, o, y, q_out, s_out, ss_out, HV: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr):
    """The group of 32 of all rows, in lanes 4 r + c: bytes and scale of `y`, the sum of squares of `o`."""
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [8, 32])
    warp = tl.broadcast_to(tl.arange(0, 8)[:, None], [8, 32])
    top, square = over_quads(o, y, PTX)
    top, square = over_warps(at, top, square, PTX)
    inside = lane < 4 * R
    t = tl.program_id(1) * R + tl.minimum(lane // 4, R - 1)
    unit = (t // 8) * (HV * 4) + tl.program_id(0)
    first, second = fine_bytes(y, fine_steps(top))
    to = q_out + activation_byte(unit, t % 8, warp * 4 + lane % 4)
    store_byte(to, first, inside, PTX)
    store_byte(to + 8, second, inside, PTX)
    one = inside & (lane % 4 == 0) & (warp == 0)
    store_one(s_out + unit * 8 + t % 8, top / 127.0, one, PTX)
    store_one(ss_out + unit * 8 + t % 8, square, one, PTX)


@triton.jit
def load_early(taps, a_log, dt_bias, norm, conv, n, HK: tl.constexpr, HV: tl.constexpr, R: tl.constexpr,
               RINGS: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """What `mix_rows` needs and the kernel in front does not write: taps, raw rows before the window, gates, gain."""
    C: tl.constexpr = (2 * HK + HV) * 128
    head = tl.program_id(0) // 4
    part = tl.program_id(0) % 4
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [8, 32])
    warp = tl.broadcast_to(tl.arange(0, 8)[:, None], [8, 32])
    own = head * 128 + part * 32 + warp * 4 + lane % 4
    v_channel = 2 * HK * 128 + own
    q_channel = head // (HV // HK) * 128 + warp % 2 * 64 + lane * 2
    k_channel = HK * 128 + q_channel
    v_old = ring_words(conv, v_channel, tl.minimum(lane // 4, R - 1), n, C, RINGS, PTX)
    old = ()
    for i in tl.static_range((2 * R + 7) // 8):
        row = tl.minimum((warp + 8 * i) // 2, R - 1)
        q_old = ring_words(conv, q_channel, row, n, C, RINGS, PTX)
        old = old + ((q_old, ring_words(conv, k_channel, row, n, C, RINGS, PTX)),)  # noqa: RUF005
    q_taps = tap_words(taps, q_channel, C, PTX)
    k_taps = tap_words(taps, k_channel, C, PTX)
    v_taps = tap_words(taps, v_channel, C, PTX)
    rate = load_one(a_log + head + lane * 0, WEIGHT1, PTX)
    bias = load_one(dt_bias + head + lane * 0, WEIGHT1, PTX)
    gain = load_one(norm + (part * 32 + warp * 4 + lane % 4) // 2, WEIGHT1, PTX)
    return old, v_old, q_taps, k_taps, v_taps, rate, bias, gain


@triton.jit
def mix_rows(
    state, at, early, projected, ab, conv, ring_k, ring_e, ring_g, n, q_out, s_out, ss_out,
    HK: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, RINGS: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The rows of a window from the committed state on: outputs, and what the next call finds in the rings."""
    C: tl.constexpr = (2 * HK + HV) * 128
    STRIDE: tl.constexpr = (C + HV * 128) // 2
    ITEMS: tl.constexpr = (2 * R + 7) // 8
    b = tl.program_id(1)
    head = tl.program_id(0) // 4
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [8, 32])
    warp = tl.broadcast_to(tl.arange(0, 8)[:, None], [8, 32])
    row = tl.minimum(lane // 4, R - 1)
    own = head * 128 + tl.program_id(0) % 4 * 32 + warp * 4 + lane % 4
    q_channel = head // (HV // HK) * 128 + warp % 2 * 64 + lane * 2
    old, v_old, q_taps, k_taps, v_taps, rate, bias, gain = early
    wait_for_inputs(PDL)
    # All inputs first: no load then stands behind a store.
    lines = projected + b * (R * STRIDE)
    windows = ()
    for i in tl.static_range(ITEMS):
        item_row = tl.minimum((warp + 8 * i) // 2, R - 1)
        q_words = window_words(old[i][0], lines, q_channel, item_row, R, STRIDE, PTX)
        k_words = window_words(old[i][1], lines, HK * 128 + q_channel, item_row, R, STRIDE, PTX)
        windows = windows + ((q_words, k_words),)  # noqa: RUF005
    v_words = window_words(v_old, lines, 2 * HK * 128 + own, row, R, STRIDE, PTX)
    z = own_half(load_one(lines + row * STRIDE + (C + own) // 2, FRESH1, PTX), own)
    gate_at = ab + (b * R + row) * (2 * HV) + head
    x = load_one(gate_at, FRESH1, PTX) + bias
    rise = load_one(gate_at + HV, FRESH1, PTX)
    items = ()
    for i in tl.static_range(ITEMS):
        q = convolve_pair(windows[i][0], q_taps, PTX)
        k = convolve_pair(windows[i][1], k_taps, PTX)
        items = items + (put_item(at, warp + 8 * i, q, k, PTX),)  # noqa: RUF005
    v = convolve(own_halves(v_words, own), own_halves(v_taps, own), PTX)
    decay = log_decay(rate, x, PTX)
    weight = own_half(gain, own) * (z * sigmoid(z, PTX))
    store_window(conv, ring_k, ring_g, n, v_words[3], decay, windows, items, HK, HV, R, RINGS, PTX)
    tl.debug_barrier()
    o, e = recur(state, at, items, row, v, sigmoid(rise, PTX), exponential(decay, PTX), R, PTX)
    store_one(ring_e + (n + row) % RINGS * (HV * 128) + own, e, lane < 4 * R, PTX)
    store_rows(at, o, o * weight, q_out, s_out, ss_out, HV, R, PTX)


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
    head = tl.program_id(0) // 4
    slot = tl.load(slots + tl.program_id(1)).to(tl.int64)
    n = tl.load(lengths + tl.program_id(1))
    commit = tl.load(commits + tl.program_id(1))
    lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [8, 32])
    warp = tl.broadcast_to(tl.arange(0, 8)[:, None], [8, 32])
    own = head * 128 + tl.program_id(0) % 4 * 32 + warp * 4 + lane % 4
    s_at = s_ptr + slot * (HV * 128 * 128) + own * 128 + lane // 4 * 4
    ring_k = k_ptr + slot * (RINGS * HK * 128)
    ring_e = e_ptr + slot * (RINGS * HV * 128)
    ring_g = g_ptr + slot * (RINGS * HV) + head
    conv = conv_ptr + slot * (RINGS * (C // 2))
    at = room_of(ROOM, PTX, 8)
    state = load_quarters(s_at, PTX)
    ring_k += head // RATIO * 128
    pending = load_pending(at, ring_k, ring_e + own, ring_g + lane * 0, n, commit, HK, HV, RINGS, PTX)
    if R > 0:
        early = load_early(taps, a_log, dt_bias, norm, conv, n, HK, HV, R, RINGS, PTX)
    wait_for_copies(PTX)
    tl.debug_barrier()
    state = commit_rows(state, at, s_at, pending, commit, PTX)
    if R > 0:
        mix_rows(
            state, at, early, projected, ab, conv, ring_k, ring_e, ring_g, n, q_out, s_out, ss_out,
            HK, HV, R, RINGS, PDL, PTX,
        )  # fmt: skip
    else:
        wait_for_inputs(PDL)


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
    grid = (value_heads * 4, batch)
    arguments = (
        projected.view(torch.int32), ab, taps.view(torch.int32), a_log, dt_bias, norm.view(torch.int32), state.s,
        state.conv.view(torch.int32), state.k, state.e, state.g, slots, lengths, commits, out.q.view(torch.int8), out.s,
        out.ss, eps,
    )  # fmt: skip
    if rows == 1:
        from .gated_delta_row_decode import WARPS, gated_delta_row_kernel  # it is made of what stands above

        options = _tiles.launch(projected, WARPS.value, 128)
        gated_delta_row_kernel[grid](*arguments, HK=key_heads, HV=value_heads, RINGS=RING, **options)
        return
    gated_delta_kernel[grid](
        *arguments, HK=key_heads, HV=value_heads, R=rows, RINGS=RING, **_tiles.launch(projected, 8)
    )
