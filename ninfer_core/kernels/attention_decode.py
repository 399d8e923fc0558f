"""Triton decode attention on INT8 pages of 64 tokens: norm, rotation, append and split-KV softmax; then the combine.

The splits of a sequence have a fixed length in tokens and start at multiples of it, and a program always takes 16
query rows (two tokens of one KV head), so a row's sums do not depend on the window, the batch or the reserved length.
Scales stay out of the products: codes are exact in fp16, key scales multiply the fp32 scores of their group of 64,
value scales the probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import round_bytes, store_groups, wait_for_inputs
from ._order import Activation

PAGE = 64
"""Tokens in a page."""


@triton.jit
def normed_group(line, gain, d, swap, cos, sin, factor, ROTATE: tl.constexpr):
    """A normed group of 64 dims (fp32); the first group of a head is rotated (`sin` carries the sign)."""
    x = tl.load(line + d).to(tl.float32) * factor * (1.0 + tl.load(gain + d).to(tl.float32))
    if ROTATE:
        other = tl.load(line + swap).to(tl.float32) * factor * (1.0 + tl.load(gain + swap).to(tl.float32))
        x = x * tl.load(cos + d) + other * tl.load(sin + d)
    return x


@triton.jit
def head_rms(line, d, eps):
    """RMS factor over a head of 256 dims at `line`; `d` are 64 lanes."""
    total = 0.0
    for g in tl.static_range(4):
        x = tl.load(line + g * 64 + d).to(tl.float32)
        total += tl.sum(x * x, 0)
    return 1.0 / tl.sqrt_rn(total / 256 + eps)


@triton.jit
def store_group(x, codes, scales, d, g: tl.constexpr):
    """One group of 64 as INT8: scale = fp16(absmax / 127), codes = round half even of x / scale."""
    scale = tl.div_rn(tl.max(tl.abs(x), 0), 127.0).to(tl.float16)
    step = scale.to(tl.float32)
    ratio = tl.div_rn(x, tl.where(step > 0.0, step, 1.0))
    ratio = tl.where(step > 0.0, tl.minimum(tl.maximum(ratio, -127.0), 127.0), 0.0)
    tl.store(codes + g * 64 + d, round_bytes(ratio, 1.0).to(tl.int8))
    tl.store(scales + g, scale)


@triton.jit
def append_token(
    line, head, k_gain, cos, sin, codes, scales, page, place, eps,
    plane, H: tl.constexpr, KH: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store key and value of one token of KV head `head`; `plane` = tokens in a key plane."""
    d = tl.arange(0, 64)
    swap = d ^ 32
    key = line + H * 256 + head * 256
    value = line + (2 * H + KH) * 256 + head * 256
    at = page.to(tl.int64) * 64 + place
    factor = head_rms(key, d, eps)
    for g in tl.static_range(4):
        k = normed_group(key + g * 64, k_gain + g * 64, d, swap, cos, sin, factor, g == 0)
        store_group(k, codes + at * 256, scales + at * 4, d, g)
        v = tl.load(value + g * 64 + d).to(tl.float32)
        store_group(v, codes + (plane + at) * 256, scales + (plane + at) * 4, d, g)


@triton.jit
def query_group(
    projected, gain, cos, sin, token, head, live, factor, g: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr
):
    """Group `g` of 16 query rows, normed, rotated, scaled for exp2: fp16 [16, 64]."""
    d = tl.arange(0, 64)
    line = projected + token[:, None] * WIDTH + head[:, None] * 256 + g * 64
    weight = 1.0 + tl.load(gain + g * 64 + d).to(tl.float32)
    x = tl.load(line + d[None, :], mask=live[:, None], other=0.0).to(tl.float32) * factor[:, None] * weight[None, :]
    if ROTATE:
        swap = d ^ 32
        turn = 1.0 + tl.load(gain + g * 64 + swap).to(tl.float32)
        other = tl.load(line + swap[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        other = other * factor[:, None] * turn[None, :]
        at = token[:, None] * 64 + d[None, :]
        x = x * tl.load(cos + at, mask=live[:, None], other=0.0)
        x = x + other * tl.load(sin + at, mask=live[:, None], other=0.0)
    return (x * 0.09016844005556021).to(tl.float16)  # log2(e) / 16


@triton.jit(do_not_specialize=["pages", "table_stride", "splits"])
def attention_split_kernel(
    projected, q_gain, k_gain, cos, sin, codes, scales, tables, lengths, part_out, part_max, part_sum,
    pages, table_stride, splits, eps,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (split, KV head, sequence * token pairs): unnormalised output, maximum and sum of 16 query rows."""
    RATIO: tl.constexpr = H // KH
    WIDTH: tl.constexpr = 2 * (H + KH) * 256
    BLOCKS: tl.constexpr = (R + 1) // 2
    plane = pages.to(tl.int64) * (KH * 64)
    split = tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2) // BLOCKS
    block = tl.program_id(2) % BLOCKS
    wait_for_inputs(PDL)
    n = tl.load(lengths + b)
    first = split * SPLIT
    if first < n + R:
        table = tables + b * table_stride
        key_codes = codes + head.to(tl.int64) * pages * (64 * 256)
        key_scales = scales + head.to(tl.int64) * pages * (64 * 4)
        for r in tl.static_range(R):
            token = n + r
            if (token >= first) & (token < first + SPLIT):
                row = b * R + r
                append_token(
                    projected + row * WIDTH, head, k_gain, cos + row * 64, sin + row * 64, key_codes, key_scales,
                    tl.load(table + token // 64), token % 64, eps, plane, H, KH,
                )  # fmt: skip
        tl.debug_barrier()
        m = tl.arange(0, 16)
        r = block * 2 + m // RATIO
        live = (m < 2 * RATIO) & (r < R)
        token = b * R + r
        query_head = head * RATIO + m % RATIO
        attend(
            projected, q_gain, cos, sin, key_codes, key_scales, table, part_out, part_max, part_sum, n, first, split,
            splits, token, query_head, live, n + r, eps, n + R, plane, H, WIDTH, SPLIT,
        )  # fmt: skip


@triton.jit
def attend(
    projected, q_gain, cos, sin, codes, scales, table, part_out, part_max, part_sum, n, first, split, splits, token,
    query_head, live, position, eps, end, plane, H: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Online softmax over the pages of one split for 16 query rows at `position`."""
    d = tl.arange(0, 64)
    total = tl.zeros([16], tl.float32)
    for g in tl.static_range(4):
        x = tl.load(
            projected + token[:, None] * WIDTH + query_head[:, None] * 256 + g * 64 + d[None, :], mask=live[:, None],
            other=0.0,
        ).to(tl.float32)  # fmt: skip
        total += tl.sum(x * x, 1)
    factor = 1.0 / tl.sqrt_rn(total / 256 + eps)
    q = ()
    acc = ()
    for g in tl.static_range(4):
        group = query_group(projected, q_gain, cos, sin, token, query_head, live, factor, g, WIDTH, g == 0)
        q = q + (group,)  # noqa: RUF005
        acc = acc + (tl.zeros([16, 64], tl.float32),)  # noqa: RUF005
    best = tl.full([16], -1.0e30, tl.float32)
    mass = tl.zeros([16], tl.float32)
    last = tl.minimum(first + SPLIT, end)
    page_first = first
    while page_first < last:
        page = tl.load(table + page_first // 64).to(tl.int64) * 64
        seen = page_first + d
        exists = seen < last
        score = tl.zeros([16, 64], tl.float32)
        for g in tl.static_range(4):
            key = tl.load(codes + (page + d)[None, :] * 256 + (g * 64 + d)[:, None])
            scale = tl.load(scales + (page + d) * 4 + g, mask=exists, other=0.0).to(tl.float32)
            score += tl.dot(q[g], key.to(tl.float16)) * scale[None, :]
        allowed = (seen[None, :] <= position[:, None]) & exists[None, :]
        score = tl.where(allowed, score, -1.0e30)
        top = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp2(best - top)
        p = tl.where(allowed, tl.exp2(score - top[:, None]), 0.0)
        mass = mass * shrink + tl.sum(p, 1)
        grown = ()
        for g in tl.static_range(4):
            value = tl.load(codes + (plane + page + d)[:, None] * 256 + (g * 64 + d)[None, :])
            scale = tl.load(scales + (plane + page + d) * 4 + g, mask=exists, other=0.0).to(tl.float32)
            weighted = (p * scale[None, :]).to(tl.float16)
            grown = grown + (acc[g] * shrink[:, None] + tl.dot(weighted, value.to(tl.float16)),)  # noqa: RUF005
        acc = grown
        best = top
        page_first += 64
    line = (token * splits + split) * H + query_head
    for g in tl.static_range(4):
        tl.store(part_out + line[:, None] * 256 + g * 64 + d[None, :], acc[g], mask=live[:, None])
    tl.store(part_max + line, best, mask=live)
    tl.store(part_sum + line, mass, mask=live)


@triton.jit(do_not_specialize=["splits"])
def attention_combine_kernel(
    part_out, part_max, part_sum, projected, lengths, q_out, s_out, splits,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (head, row): join the splits in order, apply the sigmoid gate, store eight int8 groups of 32."""
    WIDTH: tl.constexpr = 2 * (H + KH) * 256
    head = tl.program_id(0)
    t = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    d = tl.arange(0, 256)
    wait_for_inputs(PDL)
    # Splits this row sees: all later ones would add exact zeros.
    used = (tl.load(lengths + t // R) + t % R) // SPLIT + 1
    best = tl.full([BLOCK], -1.0e30, tl.float32)
    i = 0
    while i < used:
        at = (t * splits + i + lane) * H + head
        best = tl.maximum(best, tl.load(part_max + at, mask=i + lane < used, other=-1.0e30))
        i += BLOCK
    top = tl.max(best, 0)
    total = tl.zeros([256], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    i = 0
    while i < used:
        at = (t * splits + i + lane) * H + head
        inside = i + lane < used
        weight = tl.exp2(tl.load(part_max + at, mask=inside, other=-1.0e30) - top)
        weight = tl.where(inside, weight, 0.0)
        mass += weight * tl.load(part_sum + at, mask=inside, other=0.0)
        part = tl.load(part_out + at[:, None] * 256 + d[None, :], mask=inside[:, None], other=0.0)
        total += tl.sum(part * weight[:, None], 0)
        i += BLOCK
    gate = tl.load(projected + t * WIDTH + (H + KH) * 256 + head * 256 + d).to(tl.float32)
    y = total / tl.sum(mass, 0) / (1.0 + tl.exp(-gate))
    store_groups(tl.reshape(y, [8, 32]), q_out, s_out, t, head * 8, H * 8, 8)


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Partial results of the splits: `out` [T, splits, H, 256], `top` and `mass` [T, splits, H], fp32."""

    out: torch.Tensor
    top: torch.Tensor
    mass: torch.Tensor
    split: int

    @staticmethod
    def empty(rows: int, context: int, heads: int, device: torch.device | str, split: int = 128) -> AttentionWorkspace:
        """Workspace for `rows` rows of up to `context` tokens; `split` tokens a program, a multiple of 64.

        `split` fixes the order of the sums: keep it constant for the life of an engine.
        """
        if split % PAGE:
            raise ValueError(f"split is {split}; it must be a multiple of the page size {PAGE}")
        splits = -(-context // split)
        shape = (rows, splits, heads)
        return AttentionWorkspace(
            torch.empty(*shape, 256, device=device), torch.empty(shape, device=device),
            torch.empty(shape, device=device), split,
        )  # fmt: skip


def attention(
    projected: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    workspace: AttentionWorkspace,
    out: Activation,
    *,
    heads: int,
    warps: int = 4,
    eps: float = 1e-6,
) -> None:
    """Append the rows' keys and values and attend; `out` are int8 rows of the gated output (read with norm="none").

    Args:
        projected: bf16 [T, 2 (H + K) 256], query, key, gate, value; rows of a sequence together.
        q_gain, k_gain: bf16 [256]. cos, sin: fp32 [T, 64] (the sine carries the sign of its half).
        codes: int8 [2, K, pages, 64, 256], scales: fp16 [2, K, pages, 64, 4].
        tables: int32 [B, P] page numbers. lengths: int32 [B], index of a sequence's first row.
    """
    batch = tables.shape[0]
    total = projected.shape[0]
    rows = total // batch
    kv_heads, pages = codes.shape[1], codes.shape[2]
    splits = workspace.out.shape[1]
    if heads // kv_heads > 8:
        raise ValueError(f"{heads // kv_heads} query heads share a KV head; a program takes two tokens of at most 8")
    attention_split_kernel[(splits, kv_heads, batch * ((rows + 1) // 2))](
        projected, q_gain, k_gain, cos, sin, codes, scales, tables, lengths, workspace.out, workspace.top,
        workspace.mass, pages, tables.stride(0), splits, eps,
        H=heads, KH=kv_heads, R=rows, SPLIT=workspace.split, **_tiles.launch(projected, warps),
    )  # fmt: skip
    attention_combine_kernel[(heads, total)](
        workspace.out, workspace.top, workspace.mass, projected, lengths, out.q, out.s, splits,
        H=heads, KH=kv_heads, R=rows, SPLIT=workspace.split, BLOCK=16, **_tiles.launch(projected, 4),
    )  # fmt: skip
