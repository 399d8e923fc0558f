"""Triton helpers on packed weights and int8 activations: unpacking, integer dot products, group scales, waits.

Weights are in kernel order (`_order.py`): 32 rows share a tile, and word plane `j` of a tile holds elements 4j..4j+3 of
every group of 32 (Q4, Q5 and Q6 add elements 32+4j.. of the group of 64 in the high nibbles). A thread that owns a
(row, group) pair so finds all words of its group at one offset in eight planes: no shuffles before the group's scale.
Activations are int8 words with one scale per 32 values, even groups before odd ones, so that both halves of a group
of 64 are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dp4a(a, b, c, PTX: tl.constexpr):
    """`c` plus the dot product of the four signed bytes of `a` and `b` (int32 in, int32 out)."""
    if PTX:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for i in tl.static_range(4):
            c += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return c


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """With dependent launch: wait for the kernel before, then let the kernel after start loading its weights."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_words(w, offset, plane, mask):
    """The eight word planes at `offset` (elements); `plane` is the distance between planes."""
    words = ()
    for j in tl.static_range(8):
        words = words + (tl.load(w + offset + j * plane, mask=mask, eviction_policy="evict_first"),)  # noqa: RUF005
    return words


@triton.jit
def load_high(w, offset, plane, mask, FMT: tl.constexpr):
    """The high-bit planes: none for W8 and Q4, two for Q5 (low half, high half), four for Q6."""
    words = ()
    if FMT == 5:
        for j in tl.static_range(2):
            words = words + (tl.load(w + offset + j * plane, mask=mask, eviction_policy="evict_first"),)  # noqa: RUF005
    if FMT == 6:
        for j in tl.static_range(4):
            words = words + (tl.load(w + offset + j * plane, mask=mask, eviction_policy="evict_first"),)  # noqa: RUF005
    return words


@triton.jit
def signed_bytes(words, high, j: tl.constexpr, half: tl.constexpr, FMT: tl.constexpr):
    """Four codes of plane `j` as signed bytes, times 1 (W8), 16 (Q4), 8 (Q5) or 4 (Q6): `code_factor` undoes it."""
    if FMT == 8:
        return words[j]
    elif FMT == 4:
        if half == 0:
            return (words[j] << 4) & -252645136  # f0f0f0f0
        else:
            return words[j] & -252645136
    elif FMT == 5:
        top = (high[half] << j) & -2139062144  # 80808080
        if half == 0:
            return ((words[j] << 3) & 0x78787878) | top
        else:
            return ((words[j] >> 1) & 0x78787878) | top
    else:
        top = (high[2 * half + j // 4] << (2 * (j % 4))) & -1061109568  # c0c0c0c0
        if half == 0:
            return ((words[j] << 2) & 0x3C3C3C3C) | top
        else:
            return ((words[j] >> 2) & 0x3C3C3C3C) | top


@triton.jit
def code_factor(FMT: tl.constexpr):
    """What one unit of `signed_bytes` is worth: exact powers of two."""
    if FMT == 8:
        return 1.0
    elif FMT == 4:
        return 0.0625
    elif FMT == 5:
        return 0.125
    else:
        return 0.25


@triton.jit
def head_factor(ss, group, eps, WIDTH: tl.constexpr):
    """RMS factor of the head (four groups of 32) that activation group `group` belongs to."""
    h = (group // 4) * 4
    total = (tl.load(ss + h) + tl.load(ss + h + 1)) + (tl.load(ss + h + 2) + tl.load(ss + h + 3))
    return 1.0 / tl.sqrt_rn(total / WIDTH + eps)


@triton.jit
def row_factor(ss, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """RMS factor of a row from its `PARTS` partial sums of squares."""
    i = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(ss + i, mask=i < PARTS, other=0.0), 0)
    return 1.0 / tl.sqrt_rn(total / WIDTH + eps)


@triton.jit
def row_dot(words, high, xq, xs, ss, g, eps, G32: tl.constexpr, FMT: tl.constexpr, HEADS: tl.constexpr, PTX: tl.constexpr):
    """Products of one activation row with a weight tile, per (row, group), before the weight's scale.

    `xq`, `xs`, `ss` point at the row; `g` [BG] are group indices in the weight's own grouping (32 or 64 wide).
    """
    half_groups: tl.constexpr = G32 // 2
    total = tl.zeros(words[0].shape, tl.int32)
    for j in tl.static_range(8):
        x = tl.load(xq + j * G32 + g)
        total = dp4a(signed_bytes(words, high, j, 0, FMT), tl.broadcast_to(x[None, :], total.shape), total, PTX)
    scale = tl.load(xs + g)
    if HEADS:
        if FMT == 8:
            scale = scale * head_factor(ss, 2 * (g % half_groups) + g // half_groups, eps, 128)
        else:
            factor = head_factor(ss, 2 * g, eps, 128)
            scale = scale * factor
    out = total.to(tl.float32) * scale[None, :]
    if FMT != 8:
        total = tl.zeros(words[0].shape, tl.int32)
        for j in tl.static_range(8):
            x = tl.load(xq + j * G32 + half_groups + g)
            total = dp4a(signed_bytes(words, high, j, 1, FMT), tl.broadcast_to(x[None, :], total.shape), total, PTX)
        scale = tl.load(xs + half_groups + g)
        if HEADS:
            scale = scale * factor
        out += total.to(tl.float32) * scale[None, :]
    return out


@triton.jit
def round_bytes(u, inverse):
    """`u * inverse` rounded to nearest even, as the low byte of an int32; |u * inverse| <= 127."""
    # Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the sum.
    return (u * inverse + 12582912.0).to(tl.int32, bitcast=True) & 255


@triton.jit
def emit_group(u, q_out, s_out, group, G32: tl.constexpr):
    """Quantise the 32 values `u` to int8 and store them as activation group `group` of the row at `q_out`, `s_out`."""
    top = tl.max(tl.abs(u), 0)
    inverse = tl.where(top > 0.0, 127.0 / top, 0.0)
    byte = tl.reshape(round_bytes(u, inverse), [8, 4]) << (8 * tl.arange(0, 4))[None, :]
    words = tl.sum(byte, 1)
    position = (group % 2) * (G32 // 2) + group // 2
    tl.store(q_out + tl.arange(0, 8) * G32 + position, words)
    tl.store(s_out + position, top / 127.0)


@triton.jit
def silu(x):
    """x times its logistic sigmoid, fp32."""
    return x / (1.0 + tl.exp(-x))
