"""Triton helpers on packed weights and int8 activations: fragments, integer matrix products, group scales, waits.

Weights are in kernel order (`_order.py`): a unit is 16 rows by one scale group (32 values of K for W8, 64 for Q4, Q5,
Q6), stored as the operand registers of `mma.m16n8k32` for 32 lanes, so a warp loads a unit with coalesced words and
multiplies it by eight activation rows without moving a byte between lanes. Tensors here are [warps, 32]: one row per
warp, one element per lane; each warp takes its own units of K and the sums of the warps meet in the epilogue.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plain_product(left, right, X: tl.constexpr, K: tl.constexpr):
    """The matrix instruction in plain Triton: `left` [X, 32, 2, 2, n] and `right` [X, 32, 2, n] of 8 n = K as fp32.

    Axes of `left` behind lanes: half of K, half of the rows. Few operations: the interpreter pays for each.
    """
    rows = tl.reshape(tl.permute(left, (0, 3, 1, 2, 4)), [X, 2, 8, 1, K])
    c = tl.sum(rows * tl.reshape(right, [X, 1, 1, 8, K]), 4)
    upper, lower = tl.split(tl.permute(tl.reshape(c, [X, 2, 32, 2]), (0, 2, 3, 1)))
    return tl.split(upper) + tl.split(lower)


@triton.jit
def plain_bytes(words):
    """The signed bytes of int32 `words` along a new last axis, the highest first, as fp32."""
    return ((tl.expand_dims(words, -1) << (tl.arange(0, 4) << 3)) >> 24).to(tl.float32)


@triton.jit
def counted(c):
    """What an accumulator that began at 0x4B400000, the bits of 12,582,912 in fp32, has added up, as fp32."""
    return c.to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def multiply(a0, a1, a2, a3, b0, b1, start, X: tl.constexpr, PTX: tl.constexpr):
    """int8 product of 16 weight rows and 8 activation rows over 32 of K: four fp32 accumulator registers [X, 32].

    Lane 4 g + c holds results (row g, column 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1); exact integers. `start` is
    0x4B400000, which makes an integer's bits those of an fp32 value; see `loads_under_way`.
    """
    if PTX:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $10, $10, $10};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, start],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return counted(c0), counted(c1), counted(c2), counted(c3)
    else:
        left = plain_bytes(tl.join(tl.join(a0, a2), tl.join(a1, a3)))
        return plain_product(left, plain_bytes(tl.join(b0, b1)), X, 32)


@triton.jit
def multiply_fine(a0, a1, a2, a3, b0, b1, l0, l1, start, X: tl.constexpr, PTX: tl.constexpr):
    """`multiply` with the activations 8 b + l, which have a first and a second plane: -4 <= l <= 3, |8 b + l| <= 1016.

    The second product goes on from eight times the first: sums stay below 2^22, where an fp32 value counts in ones.
    """
    if PTX:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            "{ .reg .b32 z, p, q, r, s; mov.b32 z, 0; "
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {p, q, r, s}, {$4, $5, $6, $7}, {$8, $9}, {z, z, z, z}; "
            "mad.lo.s32 p, p, 8, $12; mad.lo.s32 q, q, 8, $12; mad.lo.s32 r, r, 8, $12; mad.lo.s32 s, s, 8, $12; "
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$10, $11}, {p, q, r, s}; }",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, l0, l1, start],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return counted(c0), counted(c1), counted(c2), counted(c3)
    else:
        left = plain_bytes(tl.join(tl.join(a0, a2), tl.join(a1, a3)))
        right = plain_bytes(tl.join(b0, b1)) * 8.0 + plain_bytes(tl.join(l0, l1))
        return plain_product(left, right, X, 32)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """With dependent launch: wait for the kernel before, and let the kernel after start loading its weights.

    PDL 1: first wait, so that what the kernel after reads early is complete if it is two launches old. PDL 2: first let
    it start; allowed where the kernel after reads nothing early but weights and what rounds before have left.
    """
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    elif PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


# Loads and stores of lane-form tensors [X, 32] go through inline PTX: what the compiler loads itself takes the layout
# that suits the load, and comes back to lane form through shared memory.
WEIGHT1 = tl.constexpr("ld.global.L1::no_allocate.b32 $0, [$1];")
WEIGHT2 = tl.constexpr("ld.global.L1::no_allocate.L2::256B.v2.b32 {$0, $1}, [$2];")
WEIGHT4 = tl.constexpr("ld.global.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];")
FRESH1 = tl.constexpr("ld.global.b32 $0, [$1];")
FRESH2 = tl.constexpr("ld.global.v2.b32 {$0, $1}, [$2];")
FRESH4 = tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
EARLY1 = tl.constexpr("ld.global.cg.b32 $0, [$1];")
EARLY2 = tl.constexpr("ld.global.cg.v2.b32 {$0, $1}, [$2];")
EARLY4 = tl.constexpr("ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];")
"""WEIGHT: what no kernel writes; not `.nc`, since the assembler moves such loads behind the wait for the kernel in
front, and they are there to come before it. FRESH: results of the kernel in front. EARLY: older results, asked for
before the wait, when the first-level cache may still hold what stood there before."""


@triton.jit
def load_one(p, OP: tl.constexpr, PTX: tl.constexpr):
    """The 4-byte value behind every pointer of `p`."""
    if PTX:
        return tl.inline_asm_elementwise(
            OP, "=f,l" if p.dtype.element_ty == tl.float32 else "=r,l", [p.to(tl.int64)], dtype=p.dtype.element_ty,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(p)


@triton.jit
def load_two(p, OP: tl.constexpr, PTX: tl.constexpr):
    """Two consecutive 4-byte values behind every pointer of `p`: one 8-byte load a lane."""
    if PTX:
        return tl.inline_asm_elementwise(
            OP, "=f,=f,l" if p.dtype.element_ty == tl.float32 else "=r,=r,l", [p.to(tl.int64)],
            dtype=(p.dtype.element_ty, p.dtype.element_ty), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(p), tl.load(p + 1)


@triton.jit
def load_four(p, OP: tl.constexpr, PTX: tl.constexpr):
    """Four consecutive 4-byte values behind every pointer of `p`: one 16-byte load a lane."""
    if PTX:
        return tl.inline_asm_elementwise(
            OP, "=f,=f,=f,=f,l" if p.dtype.element_ty == tl.float32 else "=r,=r,=r,=r,l", [p.to(tl.int64)],
            dtype=(p.dtype.element_ty, p.dtype.element_ty, p.dtype.element_ty, p.dtype.element_ty), is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        return tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)


@triton.jit
def loads_under_way(X: tl.constexpr, PTX: tl.constexpr):
    """The start [X, 32] of products that come after all loads written in front of this.

    The assembler otherwise moves loads to where their values are used, and a warp waits for one after the other. A
    barrier of the warp's own (8 and up; the compiler takes 0) holds the loads, and what it counts is known only behind.
    """
    start = tl.full([X, 32], 0x4B400000, tl.int32)
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 w; .reg .pred p; mov.u32 w, %tid.x; shr.u32 w, w, 5; and.b32 w, w, 7; add.u32 w, w, 8; "
            "setp.ne.u32 p, w, 0; bar.red.popc.u32 w, w, 32, p; sub.u32 w, w, 32; add.u32 $0, w, $1; }",
            "=r,r",
            [start],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return start


@triton.jit
def store_one(p, value, live, PTX: tl.constexpr):
    """Store fp32 `value` at every pointer of `p` where `live`."""
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r",
            [p.to(tl.int64), value, live.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(p, value, mask=live)


@triton.jit
def store_four(p, a, b, c, d, live, PTX: tl.constexpr):
    """Store four fp32 values side by side at every pointer of `p` where `live`: one 16-byte store a lane."""
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
            "=r,l,f,f,f,f,r",
            [p.to(tl.int64), a, b, c, d, live.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(p, a, mask=live)
        tl.store(p + 1, b, mask=live)
        tl.store(p + 2, c, mask=live)
        tl.store(p + 3, d, mask=live)


@triton.jit
def store_byte(p, value, live, PTX: tl.constexpr):
    """Store the low byte of int32 `value` at every int8 pointer of `p` where `live`."""
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b8 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [p.to(tl.int64), value, live.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(p, value.to(tl.int8), mask=live)


@triton.jit
def store_half(p, value, live, PTX: tl.constexpr):
    """Store fp32 `value`, exact in fp16, at every fp16 pointer of `p` where `live`."""
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $3, 0; cvt.rn.f16.f32 h, $2; @p st.global.b16 [$1], h; "
            "mov.b32 $0, 0; }",
            "=r,l,f,r",
            [p.to(tl.int64), value, live.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(p, value.to(tl.float16), mask=live)


@triton.jit
def from_partner(v, mask: tl.constexpr, PTX: tl.constexpr):
    """What the lane with number `lane ^ mask` holds of `v` [X, 32], fp32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;",
            "=f,f,r",
            [v, tl.zeros_like(v).to(tl.int32) + mask],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        X: tl.constexpr = v.shape[0]
        return tl.gather(v, tl.broadcast_to((tl.arange(0, 32) ^ mask)[None, :], [X, 32]), 1)


@triton.jit
def load_unit(w, wh, ws, index, FMT: tl.constexpr, PTX: tl.constexpr):
    """Registers of the unit `index` units behind the pointers: four words, high words (Q5 one, Q6 two), two scales.

    `w`, `wh`, `ws` are pointers [X, 32] of each lane's first unit: with constant distances a load needs no arithmetic.
    """
    words = load_four(w + index * 128, WEIGHT4, PTX)
    return words, load_high(wh, index, FMT, PTX), load_one(ws + index * 8, WEIGHT1, PTX)


@triton.jit
def load_high(wh, index, FMT: tl.constexpr, PTX: tl.constexpr):
    """The high words of `load_unit`."""
    high = ()
    if FMT == 5:
        high = (load_one(wh + index * 32, WEIGHT1, PTX),)
    if FMT == 6:
        high = load_two(wh + index * 64, WEIGHT2, PTX)
    return high


@triton.jit
def unit_pointers(w, wh, ws, unit, lane, FMT: tl.constexpr):
    """Pointers [X, 32] of words, high words and scales of units `unit` [X, 1]."""
    scales = ws + unit * 8 + lane // 4
    if FMT == 6:
        return w + unit * 128 + lane * 4, wh + unit * 64 + lane * 2, scales
    else:
        return w + unit * 128 + lane * 4, wh + unit * 32 + lane, scales


@triton.jit
def signed_bytes(words, high, i: tl.constexpr, half: tl.constexpr, FMT: tl.constexpr):
    """Register `i` of 32 of the unit's values as signed bytes, times 1 (W8), 16 (Q4), 8 (Q5) or 4 (Q6)."""
    if FMT == 8:
        return words[i]
    elif FMT == 4:
        if half == 0:
            return (words[i] << 4) & -252645136  # f0f0f0f0
        else:
            return words[i] & -252645136
    elif FMT == 5:
        top = (high[0] << (i + 4 * half)) & -2139062144  # 80808080
        if half == 0:
            return ((words[i] << 3) & 0x78787878) | top
        else:
            return ((words[i] >> 1) & 0x78787878) | top
    else:
        top = (high[half] << (2 * i)) & -1061109568  # c0c0c0c0
        if half == 0:
            return ((words[i] << 2) & 0x3C3C3C3C) | top
        else:
            return ((words[i] >> 2) & 0x3C3C3C3C) | top


@triton.jit
def code_factor(FMT: tl.constexpr):
    """What one unit of `signed_bytes` is worth: exact powers of two."""
    return 1.0 if FMT == 8 else (0.0625 if FMT == 4 else (0.125 if FMT == 5 else 0.25))


@triton.jit
def unpack_scales(pair, FMT: tl.constexpr, FINE: tl.constexpr = False):
    """The two fp16 scales of a lane (rows g and g + 8) as fp32, with the format's factor and `multiply_fine`'s."""
    FACTOR: tl.constexpr = code_factor(FMT) * (0.125 if FINE else 1.0)
    low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    top = ((pair >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low * FACTOR, top * FACTOR


@triton.jit
def add_unit(
    acc, words, high, low_scale, top_scale, b, s, X: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr,
    R: tl.constexpr = 8, start=0x4B400000, FINE: tl.constexpr = False,
):  # fmt: skip
    """`acc` (four [X, 32]) plus one unit times its activations: `b` the fragment registers, `s` the column scales.

    W8: b = (b0, b1), s = (s0, s1). Q4, Q5, Q6: both halves one after the other, (b0, b1, b2, b3), (s0, s1, s2, s3).
    `FINE`: behind the registers of a half those of the second plane; `low_scale`, `top_scale` hold its factor.
    With one live row (`R`) a lane's second column stays as it is.
    """
    sums = ()
    for half in tl.static_range(1 if FMT == 8 else 2):
        a0, a1 = signed_bytes(words, high, 0, half, FMT), signed_bytes(words, high, 1, half, FMT)
        a2, a3 = signed_bytes(words, high, 2, half, FMT), signed_bytes(words, high, 3, half, FMT)
        if FINE:
            c = multiply_fine(
                a0, a1, a2, a3, b[4 * half], b[4 * half + 1], b[4 * half + 2], b[4 * half + 3], start, X, PTX
            )
        else:
            c = multiply(a0, a1, a2, a3, b[2 * half], b[2 * half + 1], start, X, PTX)
        low, top = s[2 * half], s[2 * half + 1]
        if half == 0:
            sums = (c[0] * low, c[1] * top, c[2] * low, c[3] * top)
        else:
            sums = (
                tl.fma(c[0], low, sums[0]), tl.fma(c[1], top, sums[1]),
                tl.fma(c[2], low, sums[2]), tl.fma(c[3], top, sums[3]),
            )  # fmt: skip
    even = (tl.fma(sums[0], low_scale, acc[0]), tl.fma(sums[2], top_scale, acc[2]))
    odd = (acc[1], acc[3])
    if R > 1:
        odd = (tl.fma(sums[1], low_scale, acc[1]), tl.fma(sums[3], top_scale, acc[3]))
    return even[0], odd[0], even[1], odd[1]


@triton.jit
def zero_registers(X: tl.constexpr):
    """A fresh accumulator of one unit: four [X, 32] of zeros."""
    z = tl.zeros([X, 32], tl.float32)
    return (z, z, z, z)


# Epilogues stay in lane form: after the one sum over warps, lane 4 g + c holds of every row tile the results (row g,
# column 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1) as vectors [32], in every warp. A column's reduction over
# rows is three shuffles; nothing is rearranged through shared memory.


@triton.jit
def add_two(a0, a1, b0, b1):
    """Elementwise sum of two values."""
    return a0 + b0, a1 + b1


@triton.jit
def add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    """Elementwise sum of four values."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add_eight(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    """Elementwise sum of eight values."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def add_sixteen(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15,
):  # fmt: skip
    """Elementwise sum of sixteen values."""
    return (
        a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7,
        a8 + b8, a9 + b9, a10 + b10, a11 + b11, a12 + b12, a13 + b13, a14 + b14, a15 + b15,
    )  # fmt: skip


@triton.jit
def sum_warps(acc, R: tl.constexpr = 8):
    """Accumulators of one, two or four row tiles summed over warps in one pass: the same tuple of four [32] each.

    With one live row (`R`) a lane's second column is 0.
    """
    N: tl.constexpr = len(acc)
    if R == 1:
        if N == 1:
            y = tl.reduce((acc[0][0], acc[0][2]), 0, add_two)
        elif N == 2:
            y = tl.reduce((acc[0][0], acc[0][2], acc[1][0], acc[1][2]), 0, add_four)
        else:
            tl.static_assert(N == 4)
            y = tl.reduce(
                (acc[0][0], acc[0][2], acc[1][0], acc[1][2], acc[2][0], acc[2][2], acc[3][0], acc[3][2]), 0, add_eight
            )
        found = ()
        for i in tl.static_range(N):
            none = tl.zeros_like(y[2 * i])
            found = found + ((y[2 * i], none, y[2 * i + 1], none),)  # noqa: RUF005
        return found
    elif N == 1:
        return (tl.reduce(acc[0], 0, add_four),)
    elif N == 2:
        y = tl.reduce(acc[0] + acc[1], 0, add_eight)
        return (y[0], y[1], y[2], y[3]), (y[4], y[5], y[6], y[7])
    else:
        tl.static_assert(N == 4)
        y = tl.reduce(acc[0] + acc[1] + acc[2] + acc[3], 0, add_sixteen)
        return (
            (y[0], y[1], y[2], y[3]),
            (y[4], y[5], y[6], y[7]),
            (y[8], y[9], y[10], y[11]),
            (y[12], y[13], y[14], y[15]),
        )


@triton.jit
def spread(column):
    """A value per column pair, [4], to the lanes that hold it, [32]."""
    return tl.reshape(tl.broadcast_to(column[None, :], [8, 4]), [32])


@triton.jit
def rows_max(v):
    """Largest over the eight rows of a lane-form vector [32], back in lane form."""
    return spread(tl.max(tl.reshape(v, [8, 4]), 0))


@triton.jit
def rows_sum(v):
    """Sum over the eight rows of a lane-form vector [32], back in lane form."""
    return spread(tl.sum(tl.reshape(v, [8, 4]), 0))


@triton.jit
def lane_squares(ss, PARTS: tl.constexpr, PTX: tl.constexpr):
    """A lane's share of the partial sums of squares `ss` [PARTS, 8] of its two columns: a pair of [32].

    To be loaded before the products: what is loaded after a sum over warps waits for memory alone.
    """
    lane = tl.arange(0, 32)
    at = (lane // 4) * 8 + (lane % 4) * 2
    even = tl.zeros([32], tl.float32)
    odd = tl.zeros([32], tl.float32)
    for i in tl.static_range((PARTS + 7) // 8):
        if i * 8 + 8 <= PARTS:
            pair = load_two(ss + i * 64 + at, FRESH2, PTX)
            even += pair[0]
            odd += pair[1]
        else:
            inside = i * 8 + lane // 4 < PARTS
            pair = load_two(ss + tl.minimum(i * 8 + lane // 4, PARTS - 1) * 8 + (lane % 4) * 2, FRESH2, PTX)
            even += tl.where(inside, pair[0], 0.0)
            odd += tl.where(inside, pair[1], 0.0)
    return even, odd


@triton.jit
def lane_factors(squares, eps, WIDTH: tl.constexpr):
    """RMS factors of a lane's two columns from `lane_squares`: a pair of [32]."""
    even = tl.rsqrt(rows_sum(squares[0]) / WIDTH + eps)
    odd = tl.rsqrt(rows_sum(squares[1]) / WIDTH + eps)
    return even, odd


@triton.jit
def round_bytes(u, inverse):
    """`u * inverse` rounded to nearest even, as the low byte of an int32; |u * inverse| <= 127."""
    # Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the sum.
    return (u * inverse + 12582912.0).to(tl.int32, bitcast=True) & 255


@triton.jit
def silu(x):
    """x times its logistic sigmoid, fp32."""
    return x / (1.0 + tl.exp(-x))
