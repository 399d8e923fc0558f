"""Triton decode mixer of Gated DeltaNet for one row of each sequence; windows of several rows: `gated_delta_decode`.

The same sums in the same order, so a row's bits do not depend on which kernel mixed it. A program owns the same 32
value columns with two warps in place of eight: what it does beside the state (addresses, convolutions, gates) is most
of its instructions, and so costs a quarter. All that is read is asked for in one go, in front of the commit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._dequant import (
    EARLY1,
    FRESH1,
    WEIGHT1,
    from_partner,
    load_one,
    store_byte,
    store_four,
    store_one,
    wait_for_inputs,
)
from ._planes import activation_byte, fine_bytes, fine_steps
from ._room import put_one, put_two, room, room_of, take_floats
from .gated_delta_decode import (
    convolve,
    convolve_pair,
    exchange,
    exponential,
    from_quad,
    grow,
    load_quarters,
    log_decay,
    over_quads,
    own_half,
    own_halves,
    ring_words,
    sigmoid,
    sum_three,
    take_eight,
    tap_words,
    window_words,
)

# Lane form [2 warps, 32 lanes]. A warp owns sixteen value columns in four sets of four: lane 4 p + c has of column c
# of every set the keys 4 p + 32 j + 0..3, 64 registers. What belongs to a column is in lanes 4 s + c and 16 + 4 s + c.

WARPS = tl.constexpr(2)
ROOM = room(1024 + 32 + 64)
"""Query and key; their sums, four words for each half; maximum and sum of squares of every set."""
NORMS = tl.constexpr(1024)
SUMS = tl.constexpr(1024 + 32)


@triton.jit
def lanes():
    """Warp and lane numbers, [2, 32]."""
    warp = tl.broadcast_to(tl.arange(0, 2)[:, None], [2, 32])
    return warp, tl.broadcast_to(tl.arange(0, 32)[None, :], [2, 32])


@triton.jit
def dots(state, vector):
    """A lane's share of all four sets' products with a 128-vector."""
    found = ()
    for s in tl.static_range(4):
        parts = ()
        for j in tl.static_range(4):
            a, x = state[s][j], vector[j]
            part = tl.fma(a[3], x[3], tl.fma(a[2], x[2], tl.fma(a[1], x[1], a[0] * x[0])))
            parts = parts + (part,)  # noqa: RUF005
        found = found + ((parts[0] + parts[1]) + (parts[2] + parts[3]),)  # noqa: RUF005
    return found


@triton.jit
def sum_sets(a, b, PTX: tl.constexpr):
    """Sums over the lanes of a column of two `dots`, each where the column's own values are: seven exchanges for 24."""
    a = exchange(exchange(a[0], a[1], 4, PTX), exchange(a[2], a[3], 4, PTX), 8, PTX)
    b = exchange(exchange(b[0], b[1], 4, PTX), exchange(b[2], b[3], 4, PTX), 8, PTX)
    own = exchange(a, b, 16, PTX)
    other = from_partner(own, 16, PTX)
    _, lane = lanes()
    return tl.where(lane < 16, own, other), tl.where(lane < 16, other, own)


@triton.jit
def commit_rows(state, s_at, ring_k, ring_e, ring_g, n, commit, first, HK: tl.constexpr, HV: tl.constexpr,
                RINGS: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Apply `commit` tokens, of which `first` are the key, update and decay of the oldest, and store the state."""
    key, e, decay = first
    i = 0
    while i < commit:
        fade = exponential(decay, PTX)
        grown = ()
        for s in tl.static_range(4):
            grown = grown + (grow(state[s], fade, key, from_quad(e, s, PTX)),)  # noqa: RUF005
        state = grown
        i += 1
        if i < commit:
            place = (n - commit + i + RINGS) % RINGS
            key = load_quarters(ring_k + place * (HK * 128), PTX)
            e = load_one(ring_e + place * (HV * 128), EARLY1, PTX)
            decay = load_one(ring_g + place * HV, EARLY1, PTX)
    if commit > 0:
        for s in tl.static_range(4):
            for j in tl.static_range(4):
                row = state[s][j]
                store_four(s_at + (s * 512 + j * 32), row[0], row[1], row[2], row[3], row[0] == row[0], PTX)
    return state


@triton.jit
def put_row(at, q, k, PTX: tl.constexpr):
    """The warp's half of query and key into the room, two channels a lane, and their sums, which are returned."""
    warp, lane = lanes()
    live = lane >= 0
    to = at + warp * 256 + lane * 8
    put_two(to, q[0], q[1], live, PTX)
    put_two(to + 512, k[0], k[1], live, PTX)
    square = tl.fma(q[1], q[1], q[0] * q[0])
    sums = sum_three(square, tl.fma(k[1], k[1], k[0] * k[0]), tl.fma(k[1], q[1], k[0] * q[0]), PTX)
    put_one(at + NORMS + warp * 16 + lane % 4 * 4, sums.to(tl.int32, bitcast=True), PTX)
    return sums


@triton.jit
def take_vector(at, pair, which: tl.constexpr, PTX: tl.constexpr):
    """A lane's four quadruples of the query (`which` 0) or key (1), which are `pair` under the interpreter."""
    _, lane = lanes()
    found = ()
    if PTX:
        for j in tl.static_range(4):
            found = found + (take_floats(at + lane // 4 * 16 + (which * 512 + j * 128)),)  # noqa: RUF005
    else:
        vector = tl.broadcast_to(tl.reshape(tl.join(pair[0], pair[1]), [1, 128]), [2, 128])
        for j in tl.static_range(4):
            near = lane // 4 * 4 + j * 32
            found = found + ((  # noqa: RUF005
                tl.gather(vector, near, 1), tl.gather(vector, near + 1, 1), tl.gather(vector, near + 2, 1),
                tl.gather(vector, near + 3, 1),
            ),)  # fmt: skip
    return found


@triton.jit
def take_sums(at, sums, PTX: tl.constexpr):
    """q q, k k and k q."""
    if PTX:
        one = take_floats(at + NORMS)
        other = take_floats(at + NORMS + 16)
        return one[0] + other[0], one[1] + other[1], one[2] + other[2]
    else:
        _, lane = lanes()
        both = tl.broadcast_to(tl.sum(sums, 0)[None, :], [2, 32])
        return tl.gather(both, lane * 0, 1), tl.gather(both, lane * 0 + 1, 1), tl.gather(both, lane * 0 + 2, 1)


@triton.jit
def over_sets(at, top, square, PTX: tl.constexpr):
    """Maximum and sum over all eight sets of the program: through the room, behind a barrier."""
    warp, lane = lanes()
    near = at + SUMS
    put_two(near + warp * 32 + lane // 4 * 8, top, square, (lane % 4 == 0) & (lane < 16), PTX)
    tl.debug_barrier()
    if PTX:
        return take_eight(near)
    else:
        index = tl.arange(0, 256) // 32  # a row of eight for every set, as the other kernel adds up its warps
        sets = tl.reshape(tl.gather(tl.reshape(square, [64]), index // 4 * 32 + index % 4 * 4, 0), [8, 32])
        return tl.zeros([2, 32], tl.float32) + tl.max(tl.reshape(top, [64]), 0), tl.sum(sets, 0)[None, :] + top * 0.0


@triton.jit
def store_row(at, o, y, q_out, s_out, ss_out, HV: tl.constexpr, PTX: tl.constexpr):
    """The group of 32 of the row: bytes and scale of `y`, the sum of squares of `o`."""
    warp, lane = lanes()
    top, square = over_quads(o, y, PTX)
    top, square = over_sets(at, top, square, PTX)
    t = tl.program_id(1)
    unit = (t // 8) * (HV * 4) + tl.program_id(0)
    first, second = fine_bytes(y, fine_steps(top))
    to = q_out + activation_byte(unit, t % 8, warp * 16 + lane % 16)
    store_byte(to, first, lane < 16, PTX)
    store_byte(to + 8, second, lane < 16, PTX)
    one = (lane == 0) & (warp == 0)
    store_one(s_out + unit * 8 + t % 8 + lane * 0, top / 127.0, one, PTX)
    store_one(ss_out + unit * 8 + t % 8 + lane * 0, square, one, PTX)


@triton.jit
def store_window(conv, ring_k, ring_g, n, v_word, decay, q_word, k_word, k, HK: tl.constexpr, HV: tl.constexpr,
                 RINGS: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Into the rings what the next call reads, but for the update."""
    RATIO: tl.constexpr = HV // HK
    C: tl.constexpr = (2 * HK + HV) * 128
    head = tl.program_id(0) // 4
    part = tl.program_id(0) % 4
    warp, lane = lanes()
    place = n % RINGS
    ring = conv.to(tl.pointer_type(tl.float32), bitcast=True) + place * (C // 2)
    v_at = ring + ((2 * HK + head) * 128 + part * 32 + warp * 16 + lane % 16) // 2
    store_one(v_at, v_word.to(tl.float32, bitcast=True), (lane < 16) & (lane % 2 == 0), PTX)
    if part == 0:
        store_one(ring_g + place * HV + lane * 0, decay, (lane == 0) & (warp == 0), PTX)
        if head % RATIO == 0:
            channel = warp * 64 + lane * 2
            key_at = ring_k + place * (HK * 128) + channel
            store_one(key_at, k[0], lane >= 0, PTX)
            store_one(key_at + 1, k[1], lane >= 0, PTX)
            q_at = ring + (head // RATIO * 128 + channel) // 2
            store_one(q_at, q_word.to(tl.float32, bitcast=True), lane >= 0, PTX)
            store_one(q_at + HK * 64, k_word.to(tl.float32, bitcast=True), lane >= 0, PTX)


@triton.jit
def gated_delta_row_kernel(
    projected, ab, taps, a_log, dt_bias, norm, s_ptr, conv_ptr, k_ptr, e_ptr, g_ptr, slots, lengths, commits,
    q_out, s_out, ss_out, eps,
    HK: tl.constexpr, HV: tl.constexpr, RINGS: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`gated_delta_kernel` with one row of every sequence: programs (head * 4 + slice, sequence)."""
    RATIO: tl.constexpr = HV // HK
    C: tl.constexpr = (2 * HK + HV) * 128
    STRIDE: tl.constexpr = (C + HV * 128) // 2
    head = tl.program_id(0) // 4
    b = tl.program_id(1)
    slot = tl.load(slots + b).to(tl.int64)
    n = tl.load(lengths + b)
    commit = tl.load(commits + b)
    warp, lane = lanes()
    base = head * 128 + tl.program_id(0) % 4 * 32 + warp * 16  # of the warp's columns
    own = base + lane % 16
    v_channel = 2 * HK * 128 + own
    q_channel = head // RATIO * 128 + warp * 64 + lane * 2
    k_channel = HK * 128 + q_channel
    s_at = s_ptr + slot * (HV * 128 * 128) + (base + lane % 4) * 128 + lane // 4 * 4
    ring_k = k_ptr + slot * (RINGS * HK * 128) + head // RATIO * 128
    ring_e = e_ptr + slot * (RINGS * HV * 128) + own
    ring_g = g_ptr + slot * (RINGS * HV) + head
    conv = conv_ptr + slot * (RINGS * (C // 2))
    state = ()
    for s in tl.static_range(4):
        state = state + (load_quarters(s_at + s * 512, PTX),)  # noqa: RUF005
    place = (n - commit + RINGS) % RINGS
    key = load_quarters(ring_k + place * (HK * 128) + lane // 4 * 4, PTX)
    e = load_one(ring_e + place * (HV * 128), EARLY1, PTX)
    decay = load_one(ring_g + place * HV + lane * 0, EARLY1, PTX)
    v_old = ring_words(conv, v_channel, 0, n, C, RINGS, PTX)
    q_old = ring_words(conv, q_channel, 0, n, C, RINGS, PTX)
    k_old = ring_words(conv, k_channel, 0, n, C, RINGS, PTX)
    q_taps = tap_words(taps, q_channel, C, PTX)
    k_taps = tap_words(taps, k_channel, C, PTX)
    v_taps = tap_words(taps, v_channel, C, PTX)
    rate = load_one(a_log + head + lane * 0, WEIGHT1, PTX)
    bias = load_one(dt_bias + head + lane * 0, WEIGHT1, PTX)
    gain = load_one(norm + (own % 128) // 2, WEIGHT1, PTX)
    wait_for_inputs(PDL)
    lines = projected + b * STRIDE
    q_words = window_words(q_old, lines, q_channel, 0, 1, STRIDE, PTX)
    k_words = window_words(k_old, lines, k_channel, 0, 1, STRIDE, PTX)
    v_words = window_words(v_old, lines, v_channel, 0, 1, STRIDE, PTX)
    z = own_half(load_one(lines + (C + own) // 2, FRESH1, PTX), own)
    gate_at = ab + b * (2 * HV) + head + lane * 0
    x = load_one(gate_at, FRESH1, PTX) + bias
    rise = load_one(gate_at + HV, FRESH1, PTX)
    at = room_of(ROOM, PTX, WARPS)
    q = convolve_pair(q_words, q_taps, PTX)
    k = convolve_pair(k_words, k_taps, PTX)
    sums = put_row(at, q, k, PTX)
    v = convolve(own_halves(v_words, own), own_halves(v_taps, own), PTX)
    state = commit_rows(
        state, s_at, ring_k + lane // 4 * 4, ring_e, ring_g + lane * 0, n, commit, (key, e, decay), HK, HV, RINGS, PTX
    )
    decay = log_decay(rate, x, PTX)
    weight = own_half(gain, own) * (z * sigmoid(z, PTX))
    store_window(conv, ring_k, ring_g, n, v_words[3], decay, q_words[3], k_words[3], k, HK, HV, RINGS, PTX)
    beta, fade = sigmoid(rise, PTX), exponential(decay, PTX)
    tl.debug_barrier()
    qq, kk, kq = take_sums(at, sums, PTX)
    # As in `recur`: queries and keys stay as they are, their inverse norms go into what they are multiplied with.
    q_norm = tl.rsqrt(qq + 1e-6) * 0.08838834764831845
    k_norm = tl.rsqrt(kk + 1e-6)
    step = beta * k_norm
    seen, held = sum_sets(dots(state, take_vector(at, q, 0, PTX)), dots(state, take_vector(at, k, 1, PTX)), PTX)
    update = tl.fma(-held, step * k_norm * fade, step * v)
    o = tl.fma(update, q_norm * kq, seen * (q_norm * fade))
    store_one(ring_e + n % RINGS * (HV * 128), update, lane < 16, PTX)
    store_row(at, o, o * weight, q_out, s_out, ss_out, HV, PTX)
