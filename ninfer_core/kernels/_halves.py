"""Triton helpers for `mma.m16n8k16` on fp16 in lane form: signed bytes to halves, products, powers, columns."""

from __future__ import annotations

import triton
import triton.language as tl

from ._dequant import from_partner, plain_product


@triton.jit
def plain_halves(words):
    """The two fp16 of each of `words` along a new last axis as fp32, in plain Triton."""
    bits = (tl.expand_dims(words, -1) >> (tl.arange(0, 2) << 4)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pack_halves(low, high, PTX: tl.constexpr):
    """Two fp32 rounded to fp16 in one word."""
    if PTX:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        first = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return first | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def plain_bits(word, X: tl.constexpr):
    """Bytes 0..3 of `word` [X, 32] as the bits of fp16: [X, 32, 4], in plain Triton."""
    signed = (word[:, :, None] << (24 - (tl.arange(0, 4) << 3))) >> 24
    return signed.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def bytes_to_halves(word, PTX: tl.constexpr):
    """Four signed bytes as two words of fp16 pairs, exact."""
    if PTX:
        # A byte x + 128 under the exponent of 1024 is the half 1152 + x.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, k; mov.b32 k, 0x64806480; xor.b32 t, $2, 0x80808080; "
            "prmt.b32 $0, t, 0x64646464, 0x4140; prmt.b32 $1, t, 0x64646464, 0x4342; "
            "sub.rn.f16x2 $0, $0, k; sub.rn.f16x2 $1, $1, k; }",
            "=&r,=&r,r",
            [word],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        X: tl.constexpr = word.shape[0]
        low, high = tl.split(tl.reshape(plain_bits(word, X), [X, 32, 2, 2]))
        return tl.split(low | (high << 16))


@triton.jit
def pairs_to_halves(first, second, PTX: tl.constexpr):
    """Bytes 0..3 of two words: four words, each the pair (byte i of `first`, byte i of `second`) in fp16."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, u, p, q, k; mov.b32 k, 0x64806480; xor.b32 t, $4, 0x80808080; xor.b32 u, $5, 0x80808080; "
            "prmt.b32 p, t, u, 0x5140; prmt.b32 q, t, u, 0x7362; "
            "prmt.b32 $0, p, 0x64646464, 0x4140; prmt.b32 $1, p, 0x64646464, 0x4342; "
            "prmt.b32 $2, q, 0x64646464, 0x4140; prmt.b32 $3, q, 0x64646464, 0x4342; "
            "sub.rn.f16x2 $0, $0, k; sub.rn.f16x2 $1, $1, k; sub.rn.f16x2 $2, $2, k; sub.rn.f16x2 $3, $3, k; }",
            "=&r,=&r,=&r,=&r,r,r",
            [first, second],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        X: tl.constexpr = first.shape[0]
        both = plain_bits(first, X) | (plain_bits(second, X) << 16)
        even, odd = tl.split(tl.reshape(both, [X, 32, 2, 2]))
        zero, two = tl.split(even)
        one, three = tl.split(odd)
        return zero, one, two, three


@triton.jit
def half_product(acc, a0, a1, a2, a3, b0, b1, X: tl.constexpr, PTX: tl.constexpr):
    """acc + fp16 product of 16 rows and 8 columns over 16: four fp32 registers [X, 32], as `_dequant.multiply`."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
            "{$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, acc[0], acc[1], acc[2], acc[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        left = plain_halves(tl.join(tl.join(a0, a2), tl.join(a1, a3)))
        c = plain_product(left, plain_halves(tl.join(b0, b1)), X, 16)
        return acc[0] + c[0], acc[1] + c[1], acc[2] + c[2], acc[3] + c[3]


@triton.jit
def power(x, PTX: tl.constexpr):
    """2 to the power of `x`, one instruction; results below 2^-126 are 0."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def column_max(v, PTX: tl.constexpr):
    """Largest of the eight lanes that hold the same column of a product, in all of them."""
    v = tl.maximum(v, from_partner(v, 4, PTX))
    v = tl.maximum(v, from_partner(v, 8, PTX))
    return tl.maximum(v, from_partner(v, 16, PTX))


@triton.jit
def column_sum(v, PTX: tl.constexpr):
    """Sum over the eight lanes that hold the same column of a product, in all of them."""
    v += from_partner(v, 4, PTX)
    v += from_partner(v, 8, PTX)
    return v + from_partner(v, 16, PTX)
