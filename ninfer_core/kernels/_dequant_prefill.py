"""Triton helpers that turn packed words into bf16 operands of matrix units, for the prefill kernels.

A unit of kernel order (`_order.py`) holds 16 rows by 32 (W8) or 64 (Q4, Q5, Q6) values of K in four words a lane. The
helpers return the values of two words, registers `i` and `i + 2` of a lane, as pairs: the same byte of both words in
one int32. That is the operand order of `wgmma` and `mma.m16n8k16` when the K axis of the other operand is permuted
alike (`slot_of`): words then go from memory to the matrix unit without a byte changing lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def code_of(word, high0, high1, v: tl.constexpr, i: tl.constexpr, FMT: tl.constexpr):
    """Signed code `v` (byte v % 4, half v // 4) of register `i`, fp32."""
    byte: tl.constexpr = 8 * (v % 4)
    half: tl.constexpr = v // 4
    if FMT == 8:
        code = (word << (24 - byte)) >> 24
    else:
        code = (word >> (byte + 4 * half)) & 15
        if FMT == 4:
            code = (code ^ 8) - 8
        elif FMT == 5:
            code = code | (((high0 >> (byte + 7 - i - 4 * half)) & 1) << 4)
            code = (code ^ 16) - 16
        else:
            if half == 0:
                code = code | (((high0 >> (byte + 6 - 2 * i)) & 3) << 4)
            else:
                code = code | (((high1 >> (byte + 6 - 2 * i)) & 3) << 4)
            code = (code ^ 32) - 32
    return code.to(tl.float32)


@triton.jit
def pack_pair(a, b):
    """Two fp32 tensors as bf16 halves of one int32: `a` low."""
    low = a.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (b.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def bf16_pair(scale):
    """An fp16 scale rounded to bf16, twice in one int32."""
    bits = scale.to(tl.float32).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def bf16_rest(scale):
    """What `bf16_pair` leaves of an fp16 scale, which bf16 holds exactly, twice in one int32."""
    return bf16_pair(scale.to(tl.float32) - scale.to(tl.float32).to(tl.bfloat16).to(tl.float32))


@triton.jit
def scaled_pairs(
    low, top, high0, high1, scale, rest, rh: tl.constexpr, FMT: tl.constexpr, WHOLE: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """The values of two words times their scale: a tuple of 8 (W8: 4) int32 tensors, each a bf16 pair (low, top).

    `scale` is `bf16_pair`; code times scale is rounded to bf16 once more. With `WHOLE` only then: `rest` is
    `bf16_rest`, and a pair takes one operation more. Element v is byte v % 4 of half v // 4.
    """
    if PTX:
        return ptx_pairs(low, top, high0, high1, scale, rest, rh, FMT, WHOLE)
    else:
        s = ((scale & 0xFFFF) << 16).to(tl.float32, bitcast=True)
        if WHOLE:
            s += ((rest & 0xFFFF) << 16).to(tl.float32, bitcast=True)
        found = ()
        for v in tl.static_range(4 if FMT == 8 else 8):
            a = code_of(low, high0, high1, v, rh, FMT) * s
            b = code_of(top, high0, high1, v, rh + 2, FMT) * s
            found = found + (pack_pair(a, b),)  # noqa: RUF005
        return found


# The codes become bf16 without a conversion: 0x4300 is 128.0, whose low seven bits count in ones. An unsigned code with
# its sign bit flipped, or-ed into it and less 128 + 2^(bits - 1), is the signed code. W8 has one bit too many: its sign
# bit makes 0x4380, 256.0, of which the difference is taken. Only `fma` has a bf16 form on every card; times 1 and plus
# -0 are exact.


def _pairs(bits: int, whole: bool = False) -> str:
    """PTX of `scaled_pairs`: outputs $0.., low, top, (5, 6 bits) four words of high bits, scale, (`whole`) its rest."""
    count = 4 if bits == 8 else 8
    low, top = f"${count}", f"${count + 1}"
    place = count + (6 if bits in (5, 6) else 2)
    scale, rest = f"${place}", f"${place + 1}"
    base = 0x43004300 + 0x00010001 * (1 << (bits - 1)) if bits < 8 else 0x43004300
    lines = [
        ".reg .b32 p, q, a, b, c, d, one, zero;",
        f"mov.b32 c, {base:#x}; mov.b32 d, {base | 0x80008000:#x};",
        f"mov.b32 one, {0xBF80BF80 if bits == 8 else 0x3F803F80:#x}; mov.b32 zero, 0x80008000;",
    ]
    if bits < 8:
        lines.append(f"shr.u32 a, {low}, 4; shr.u32 b, {top}, 4;")
    for v in range(count):
        byte, half = v % 4, v // 4
        pick = 0x4400 + 0x1111 * byte
        lines.append(f"prmt.b32 p, {'a' if half else low}, {'b' if half else top}, {pick:#x};")
        if bits == 8:
            lines.append("lop3.b32 q, p, 0x00800080, c, 0xea; lop3.b32 p, p, 0x007f007f, c, 0xea;")
            lines.append("fma.rn.bf16x2 p, q, one, p;")
        else:
            if bits == 4:
                lines.append("lop3.b32 p, p, 0x000f000f, c, 0x6a;")
            else:
                mask = 0x00100010 if bits == 5 else 0x00300030
                lines.append(f"prmt.b32 q, ${count + 2 + 2 * half}, ${count + 3 + 2 * half}, {pick:#x};")
                lines.append(f"lop3.b32 q, q, {mask:#010x}, c, 0x6a; lop3.b32 p, p, 0x000f000f, q, 0xea;")
            lines.append("fma.rn.bf16x2 p, p, one, d;")
        if whole:
            lines.append(f"fma.rn.bf16x2 q, p, {rest}, zero; fma.rn.bf16x2 ${v}, p, {scale}, q;")
        else:
            lines.append(f"fma.rn.bf16x2 ${v}, p, {scale}, zero;")
    return "{ " + " ".join(lines) + " }"


PAIRS_8, WHOLE_8 = tl.constexpr(_pairs(8)), tl.constexpr(_pairs(8, True))
PAIRS_4, WHOLE_4 = tl.constexpr(_pairs(4)), tl.constexpr(_pairs(4, True))
PAIRS_5, WHOLE_5 = tl.constexpr(_pairs(5)), tl.constexpr(_pairs(5, True))
PAIRS_6, WHOLE_6 = tl.constexpr(_pairs(6)), tl.constexpr(_pairs(6, True))
FOUR_OUT = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")
EIGHT_OUT = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r")
EIGHT_OUT_HIGH = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r")
ONE_MORE = tl.constexpr(",r")
FOUR_WORDS = tl.constexpr((tl.int32,) * 4)
EIGHT_WORDS = tl.constexpr((tl.int32,) * 8)


@triton.jit
def ptx_pairs(low, top, high0, high1, scale, rest, rh: tl.constexpr, FMT: tl.constexpr, WHOLE: tl.constexpr):
    """`scaled_pairs` in PTX: a pair takes a permutation, a logic operation or two, a difference, a product or two."""
    if FMT == 8:
        if WHOLE:
            return tl.inline_asm_elementwise(WHOLE_8, FOUR_OUT + ONE_MORE, [low, top, scale, rest], FOUR_WORDS, True, 1)
        else:
            return tl.inline_asm_elementwise(PAIRS_8, FOUR_OUT, [low, top, scale], FOUR_WORDS, True, 1)
    elif FMT == 4:
        if WHOLE:
            return tl.inline_asm_elementwise(
                WHOLE_4, EIGHT_OUT + ONE_MORE, [low, top, scale, rest], EIGHT_WORDS, True, 1
            )
        else:
            return tl.inline_asm_elementwise(PAIRS_4, EIGHT_OUT, [low, top, scale], EIGHT_WORDS, True, 1)
    elif FMT == 5:
        # Bit 4 of every byte: the high bit for low and top, in the first and in the second half.
        args = [low, top, high0 >> (3 - rh), high0 >> (1 - rh), high0 << (1 + rh), high0 << (3 + rh), scale]
        if WHOLE:
            args = args + [rest]  # noqa: RUF005
            return tl.inline_asm_elementwise(WHOLE_5, EIGHT_OUT_HIGH + ONE_MORE, args, EIGHT_WORDS, True, 1)
        else:
            return tl.inline_asm_elementwise(PAIRS_5, EIGHT_OUT_HIGH, args, EIGHT_WORDS, True, 1)
    else:
        # Bits 4 and 5 likewise; each half has a word of its own.
        if rh == 0:
            args = [low, top, high0 >> 2, high0 << 2, high1 >> 2, high1 << 2, scale]
        else:
            args = [low, top, high0, high0 << 4, high1, high1 << 4, scale]
        if WHOLE:
            args = args + [rest]  # noqa: RUF005
            return tl.inline_asm_elementwise(WHOLE_6, EIGHT_OUT_HIGH + ONE_MORE, args, EIGHT_WORDS, True, 1)
        else:
            return tl.inline_asm_elementwise(PAIRS_6, EIGHT_OUT_HIGH, args, EIGHT_WORDS, True, 1)


@triton.jit
def pair_half(pair, TOP: tl.constexpr):
    """The low or the high bf16 of a pair."""
    if TOP:
        return (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return pair.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def both_halves(pair):
    """A pair as a new last axis [.., 2]."""
    return tl.join(pair_half(pair, False), pair_half(pair, True))


@triton.jit
def stack_values(p, FMT: tl.constexpr):
    """Pairs [R, 4] of `scaled_pairs` as one tensor [R, 4, h, v2, v1, (v0)], with v = v0 v1 v2 in binary.

    The order of the new axes is that of `tl.join`: the last joined comes last.
    """
    a = tl.join(both_halves(p[0]), both_halves(p[1]))
    b = tl.join(both_halves(p[2]), both_halves(p[3]))
    first = tl.join(a, b)
    if FMT == 8:
        return first
    else:
        c = tl.join(both_halves(p[4]), both_halves(p[5]))
        d = tl.join(both_halves(p[6]), both_halves(p[7]))
        return tl.join(first, tl.join(c, d))


@triton.jit
def operand(upper, lower, B: tl.constexpr, FMT: tl.constexpr):
    """Values of register pairs (0, 2) `upper` and (1, 3) `lower`, tuples of pairs [B * 8, 4], as one matrix operand.

    Returns bf16 [B * 16, 64] (W8: 32): row b * 16 + 8 rh + g, column v * 8 + 2 c + h.
    """
    x = tl.join(stack_values(upper, FMT), stack_values(lower, FMT))
    if FMT == 8:  # [b g, c, h, v2, v1, rh]
        x = tl.reshape(x, [B, 8, 4, 2, 2, 2, 2])
        return tl.reshape(tl.permute(x, [0, 6, 1, 5, 4, 2, 3]), [B * 16, 32])
    else:  # [b g, c, h, v2, v1, v0, rh]
        x = tl.reshape(x, [B, 8, 4, 2, 2, 2, 2, 2])
        return tl.reshape(tl.permute(x, [0, 7, 1, 6, 5, 4, 2, 3]), [B * 16, 64])


@triton.jit
def natural(upper, lower, B: tl.constexpr, FMT: tl.constexpr):
    """Like `operand`, with the columns in the order of the matrix: half * 32 + h * 16 + 4 c + byte."""
    x = tl.join(stack_values(upper, FMT), stack_values(lower, FMT))
    if FMT == 8:
        x = tl.reshape(x, [B, 8, 4, 2, 2, 2, 2])
        return tl.reshape(tl.permute(x, [0, 6, 1, 3, 2, 5, 4]), [B * 16, 32])
    else:
        x = tl.reshape(x, [B, 8, 4, 2, 2, 2, 2, 2])
        return tl.reshape(tl.permute(x, [0, 7, 1, 6, 3, 2, 5, 4]), [B * 16, 64])


@triton.jit
def split_words(words, R: tl.constexpr):
    """The four registers of lanes [R, 4 c, 4]: the operand's (0, 2) and (1, 3)."""
    even, odd = tl.split(tl.reshape(words, [R, 4, 2, 2]))
    r0, r2 = tl.split(even)
    r1, r3 = tl.split(odd)
    return r0, r1, r2, r3


@triton.jit
def unit_operand(
    w, wh, ws, u, B: tl.constexpr, FMT: tl.constexpr, SLOTS: tl.constexpr, PTX: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Unit `u` of B * 16 rows in bf16, from the pointers of `tile_lanes`; `WHOLE`: see `scaled_pairs`."""
    R: tl.constexpr = B * 8
    high0 = 0
    high1 = 0
    if FMT == 5:
        high0 = tl.load(wh + u * 32)
    if FMT == 6:
        high0, high1 = tl.split(tl.load(wh + u * 64))
    scales = tl.load(ws + u * 8)
    r0, r1, r2, r3 = split_words(tl.load(w + u * 128), R)
    first, second = fp16_half(scales, False), fp16_half(scales, True)
    upper = scaled_pairs(r0, r2, high0, high1, bf16_pair(first), bf16_rest(first), 0, FMT, WHOLE, PTX)
    lower = scaled_pairs(r1, r3, high0, high1, bf16_pair(second), bf16_rest(second), 1, FMT, WHOLE, PTX)
    if SLOTS:
        return operand(upper, lower, B, FMT)
    else:
        return natural(upper, lower, B, FMT)


@triton.jit
def tile_lanes(w, wh, ws, tile, units, FMT: tl.constexpr, R: tl.constexpr):
    """Pointers of unit 0 for R = 8 B lines; line r holds rows r % 8 and r % 8 + 8 of row tile `tile` [R].

    Words [R, 4 lanes, 4 registers], high words [R, 4] (Q6: [R, 4, 2]), scale pairs [R, 1].
    """
    g = tl.arange(0, R) % 8
    lane = (g * 4)[:, None] + tl.arange(0, 4)[None, :]
    unit = (tile.to(tl.int64) * units)[:, None]
    word = w + (unit * 128 + lane * 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
    if FMT == 6:
        high = wh + (unit * 64 + lane * 2)[:, :, None] + tl.arange(0, 2)[None, None, :]
    else:
        high = wh + unit * 32 + lane
    return word, high, ws + unit * 8 + g[:, None]


@triton.jit
def multiply_add(a, b, acc, PTX: tl.constexpr):
    """acc + a b of bf16 tiles with fp32 sums; the interpreter multiplies bf16 only as fp32.

    Complete on return: on Hopper a product runs on and reads its left operand from registers, in a loop still when the
    next turn writes them, and results were wrong where unpacking is short (`tests/kernels/compile_prefill.py` looks).
    """
    if PTX:
        acc = tl.dot(a, b, acc)
        return tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, True, 1)  # reading the sum waits
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


@triton.jit
def fp16_half(pair, TOP: tl.constexpr):
    """The low or the high half of int32 words as fp16."""
    if TOP:
        return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return pair.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def slot_of(k):
    """Column of `operand` that holds K index `k`; the order repeats every 64 values."""
    r = k % 64
    v = (r // 32) * 4 + r % 4
    return k - r + v * 8 + ((r % 16) // 4) * 2 + (r % 32) // 16
