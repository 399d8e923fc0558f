"""Triton helpers on KV pages for decode attention: new keys and values into pages, pages into operand registers.

INT8 pages: codes in groups of 64 dims with fp16 scales. bf16 pages: the values. Both come out as fp16 operands of
`mma.m16n8k16`: a code is exact there; so is a bf16 value up to 65,504 in magnitude, but for what lies below 2^-14. They
go from memory into operand registers without changing lanes: the order of the dims in a product over dims, and of
output rows, is free, so a lane takes dims that lie side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._dequant import (
    EARLY2,
    EARLY4,
    FRESH4,
    WEIGHT4,
    from_partner,
    load_four,
    load_two,
    round_bytes,
    store_byte,
    store_four,
    store_half,
)
from ._halves import bytes_to_halves, pack_halves, pairs_to_halves

PAGE = 64
"""Tokens in a page."""
PAGE_TOKENS = tl.constexpr(PAGE)


@triton.jit
def pair_values(words):
    """Four words of bf16 pairs as eight fp32."""
    found = ()
    for i in tl.static_range(4):
        low = (words[i] << 16).to(tl.float32, bitcast=True)
        found = found + (low, (words[i] & -65536).to(tl.float32, bitcast=True))  # noqa: RUF005
    return found


@triton.jit
def half_values(word):
    """The two fp16 of a word as fp32."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def rounded_half(x):
    """The bits of fp32 `x` rounded to bf16, half to even, in the low half of a word."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def bf16_pair(low, high, PTX: tl.constexpr):
    """Two fp32 rounded to bf16 in one word, as the fp32 with these bits."""
    if PTX:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
        return pair.to(tl.float32, bitcast=True)
    else:
        return (rounded_half(low) | (rounded_half(high) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def halves_of(word, PTX: tl.constexpr):
    """A word of two bf16 as a word of two fp16."""
    return pack_halves((word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True), PTX)


@triton.jit
def append_rows(
    projected, k_gain, cos, sin, codes, scales, table, n, low_page, stop_page, b, head, eps, plane,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, INT8: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store keys and values of the new tokens in these pages: a warp takes a key or a value.

    A lane holds eight dims side by side; eight lanes are a scale group. INT8 groups of 64: scale = fp16(absmax / 127),
    codes = round half even of x / scale. `codes`: bytes, or with bf16 pages words as fp32.
    """
    WIDTH: tl.constexpr = (H + KH) * 256  # words of a row
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    gain = pair_values(load_four(k_gain + lane * 4 + warp * 0, WEIGHT4, PTX))
    value = warp % 2
    for i in tl.static_range((R + 1) // 2):
        r = tl.minimum(i * 2 + warp // 2, R - 1)
        token = n + r
        live = (i * 2 + warp // 2 < R) & (token // 64 >= low_page) & (token // 64 < stop_page)
        row = b * R + r
        start = tl.where(value == 1, (2 * H + KH) * 128, H * 128) + head * 128
        x = pair_values(load_four(projected + row * WIDTH + start + lane * 4, FRESH4, PTX))
        square = x[0] * x[0]
        for j in tl.static_range(1, 8):
            square = tl.fma(x[j], x[j], square)
        factor = (1.0 / tl.sqrt_rn(tl.sum(square, 1) / 256 + eps))[:, None]
        at = row * 64 + tl.minimum(lane, 7) * 8
        cosines = load_four(cos + at, FRESH4, PTX) + load_four(cos + at + 4, FRESH4, PTX)
        sines = load_four(sin + at, FRESH4, PTX) + load_four(sin + at + 4, FRESH4, PTX)
        normed = ()
        top = tl.zeros([4, 32], tl.float32)
        for j in tl.static_range(8):
            y = x[j] * factor * (1.0 + gain[j])
            turned = y * cosines[j] + from_partner(y, 4, PTX) * sines[j]
            y = tl.where(value == 1, x[j], tl.where(lane < 8, turned, y))
            normed = normed + (y,)  # noqa: RUF005
            top = tl.maximum(top, tl.abs(y))
        page = tl.load(table + tl.minimum(n + i * 2, n + R - 1) // PAGE_TOKENS)
        later = tl.load(table + tl.minimum(n + i * 2 + 1, n + R - 1) // PAGE_TOKENS)
        place = tl.where(warp // 2 == 0, page, later).to(tl.int64) * 64 + token % 64 + value * plane
        if INT8:
            top = tl.maximum(top, from_partner(top, 1, PTX))
            top = tl.maximum(top, from_partner(top, 2, PTX))
            top = tl.maximum(top, from_partner(top, 4, PTX))
            step = tl.div_rn(top, 127.0).to(tl.float16).to(tl.float32)
            for j in tl.static_range(8):
                ratio = tl.div_rn(normed[j], tl.where(step > 0.0, step, 1.0))
                ratio = tl.where(step > 0.0, tl.minimum(tl.maximum(ratio, -127.0), 127.0), 0.0)
                store_byte(codes + place * 256 + lane * 8 + j, round_bytes(ratio, 1.0), live & (lane >= 0), PTX)
            store_half(scales + place * 4 + lane // 8, step, live & (lane % 8 == 0), PTX)
        else:
            store_four(
                codes + place * 128 + lane * 4,
                bf16_pair(normed[0], normed[1], PTX), bf16_pair(normed[2], normed[3], PTX),
                bf16_pair(normed[4], normed[5], PTX), bf16_pair(normed[6], normed[7], PTX),
                live & (lane >= 0), PTX,
            )  # fmt: skip


@triton.jit
def load_keys(codes, scales, place, INT8: tl.constexpr, PTX: tl.constexpr):
    """The warp's tokens g and g + 8 of a page whose first token is at `place`: codes, and scales (bf16: none).

    For each group of 64 dims a lane's 16 of both tokens, four words each (bf16: eight). Scales of a token are two words
    of two. What stands behind the last token may be anything, NaN too.
    """
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    token = place + warp * 16 + lane // 4
    keys = ()
    steps = ()
    if INT8:
        at = codes + token * 64 + lane % 4 * 4
        for j in tl.static_range(4):
            upper = load_four(at + j * 16, EARLY4, PTX)
            keys = keys + ((upper, load_four(at + (8 * 64 + j * 16), EARLY4, PTX)),)  # noqa: RUF005
        steps = load_two(scales + token * 2, EARLY2, PTX) + load_two(scales + token * 2 + 16, EARLY2, PTX)
    else:
        at = codes + token * 128 + lane % 4 * 8
        for j in tl.static_range(4):
            upper = load_four(at + j * 32, EARLY4, PTX) + load_four(at + (j * 32 + 4), EARLY4, PTX)
            lower = load_four(at + (8 * 128 + j * 32), EARLY4, PTX)
            keys = keys + ((upper, lower + load_four(at + (8 * 128 + j * 32 + 4), EARLY4, PTX)),)  # noqa: RUF005
    return keys, steps


@triton.jit
def key_halves(words, m: tl.constexpr, INT8: tl.constexpr, PTX: tl.constexpr):
    """Dims 4 m .. 4 m + 3 of a lane's 16: two words of fp16."""
    if INT8:
        return bytes_to_halves(words[m], PTX)
    else:
        return halves_of(words[2 * m], PTX), halves_of(words[2 * m + 1], PTX)


@triton.jit
def load_values(codes, scales, place, last, INT8: tl.constexpr, PTX: tl.constexpr):
    """Codes of the warp's group of dims, for each 16 tokens those of tokens c, c + 8, c + 4 and c + 12; and scales.

    A lane has eight dims of each, two words (bf16: four). The scales (bf16: none) are all four of the warp's tokens g
    and g + 8, as the probabilities lie: four words for `page_steps`.
    """
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    values = ()
    steps = ()
    if INT8:
        at = codes + (place + lane % 4) * 64 + warp * 16 + lane // 4 * 2
        for s in tl.static_range(4):
            values = values + ((  # noqa: RUF005
                load_two(at + s * 1024, EARLY2, PTX), load_two(at + (s * 1024 + 8 * 64), EARLY2, PTX),
                load_two(at + (s * 1024 + 4 * 64), EARLY2, PTX), load_two(at + (s * 1024 + 12 * 64), EARLY2, PTX),
            ),)  # fmt: skip
        own = scales + (place + warp * 16 + lane // 4) * 2
        steps = load_two(own, EARLY2, PTX) + load_two(own + 16, EARLY2, PTX)
    else:
        for s in tl.static_range(4):
            # Behind the last token the last one again: its weight is zero, and nothing there may be NaN.
            four = ()
            for i in tl.static_range(4):
                token = tl.minimum(s * 16 + lane % 4 + i % 2 * 8 + i // 2 * 4, last - 1)
                at = codes + (place + token) * 128 + warp * 32 + lane // 4 * 4
                four = four + (load_four(at, EARLY4, PTX),)  # noqa: RUF005
            values = values + (four,)  # noqa: RUF005
    return values, steps


@triton.jit
def no_page():
    """Zeros in place of what `load_keys` and `load_values` give of an INT8 page."""
    z = tl.zeros([4, 32], tl.int32)
    two = (z, z)
    four = (z, z, z, z)
    key = (four, four)
    value = (two, two, two, two)
    return (key, key, key, key), four, (value, value, value, value), four


@triton.jit
def page_steps(words, last):
    """Value scales of the warp's token g, four, and of its token g + 8; zero from token `last` of the page on."""
    token = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 32)[None, :] // 4
    near = token < last
    far = token < last - 8
    upper = half_values(tl.where(near, words[0], 0)) + half_values(tl.where(near, words[1], 0))
    return upper + half_values(tl.where(far, words[2], 0)) + half_values(tl.where(far, words[3], 0))


@triton.jit
def value_halves(four, i: tl.constexpr, INT8: tl.constexpr, PTX: tl.constexpr):
    """Two of the lane's dims 4 i .. 4 i + 3 at a time: for both (first, second) of tokens c and c + 8, then of tokens
    c + 4 and c + 12. Eight words of fp16, the left operands of output tiles 2 i and 2 i + 1.
    """
    if INT8:
        near = pairs_to_halves(four[0][i], four[1][i], PTX)
        far = pairs_to_halves(four[2][i], four[3][i], PTX)
        return near[0], near[1], far[0], far[1], near[2], near[3], far[2], far[3]
    else:
        found = ()
        for j in tl.static_range(2):
            for side in tl.static_range(2):
                a = four[2 * side][2 * i + j]
                b = four[2 * side + 1][2 * i + j]
                low = pack_halves((a << 16).to(tl.float32, bitcast=True), (b << 16).to(tl.float32, bitcast=True), PTX)
                top_a = (a & -65536).to(tl.float32, bitcast=True)
                found = found + (low, pack_halves(top_a, (b & -65536).to(tl.float32, bitcast=True), PTX))  # noqa: RUF005
        return found
