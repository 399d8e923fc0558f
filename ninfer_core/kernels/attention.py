"""Gated attention on paged KV: q/k norm, rotation, append, causal softmax, output gate."""

from __future__ import annotations

import torch
from torch import Tensor

from ..state import KV_GROUP, KVLayer
from ._op import RowCall
from .norm import rms_norm
from .rope import rope_

_TILE = 256
"""Query rows of a chunk that share one pass over the keys; tiles start at multiples of it from the chunk's start."""


def attention_rows(
    proj: Tensor, qk_gain: Tensor, kv: KVLayer, call: RowCall, heads: int, kv_heads: int, eps: float
) -> Tensor:
    """Gated attention of the rows of running sequences.

    Math: `q, k` = rotated norms of the projected heads; `k, v` of row r are stored at token `start + r`; then
    `o_h = softmax(q_h . K / sqrt(D)) V` over the tokens `0 .. start + r` and `y_h = o_h sigma(gate_h)`; query head h
    reads KV head `h div (H / K)`.
    Shapes: `proj [B * R, >= 2 (H + K) D]`: query, key, gate, value; `qk_gain [H + K, D]`; result `[B * R, H D]`, or
    `[B, H D]` of the rows `call.only`.
    Domain: tokens `0 .. start - 1` are stored; the page table covers `start + R`.
    Numeric: fp32 softmax and sums; keys and values as stored (INT8: group 64, fp16 scale, round half even), so that
    a row sees the same values whenever it is computed. A row's bits depend on its sequence up to that row only.
    Effects: writes tokens `start .. start + R - 1` of the pages, of pages in the table only.
    """
    q, k, v, gate = _split(proj, qk_gain, call.cos, call.sin, heads, kv_heads, eps)
    wanted = range(proj.shape[0]) if call.only is None else call.wanted.tolist()
    out = q.new_empty(len(wanted), *q.shape[1:])
    store = iter(out)
    for number, (_, start, _) in enumerate(call.host):
        first, last = number * call.rows, (number + 1) * call.rows
        table = call.page_tables[number]
        kv_append(kv, k[first:last], v[first:last], table, start)
        keys, values = kv_read(kv, table, start + call.rows)
        for row in range(first, last) if call.only is None else wanted[number : number + 1]:
            seen = start + row - first + 1
            score = torch.bmm(q[row], keys[:, :seen].transpose(1, 2))
            torch.bmm(torch.softmax(score, -1), values[:, :seen], out=next(store))
    if call.only is not None:
        gate = gate.index_select(0, call.wanted)
    return out.flatten(1).mul_(torch.sigmoid(gate))


def attention_chunk(
    proj: Tensor,
    qk_gain: Tensor,
    kv: KVLayer,
    tables: tuple[Tensor, Tensor],
    place: tuple[Tensor, int, int],
    heads: int,
    kv_heads: int,
    eps: float,
) -> Tensor:
    """Gated attention of a prefill chunk of one sequence; math, numeric and effects as `attention_rows`.

    Shapes: `proj [T padded, ..]`; `tables` = cosine and sine `[T padded, 1, rotary]`; `place` = (page table `[P]`,
    token index of row 0, number of real rows); result `[T padded, H D]`. Rows beyond the real ones are finite and
    meaningless.
    """
    table, start, real = place
    q, k, v, gate = _split(proj, qk_gain, *tables, heads, kv_heads, eps)
    kv_append(kv, k[:real], v[:real], table, start)
    keys, values = kv_read(kv, table, start + real)
    rows, dim = proj.shape[0], k.shape[-1]
    out = proj.new_zeros(rows, heads, dim)
    q = q.view(rows, heads, dim).transpose(0, 1)
    ratio = heads // kv_heads
    for first in range(0, real, _TILE):
        last = min(first + _TILE, rows)
        end = min(start + last, start + real)
        seen = torch.arange(end, device=proj.device)
        query = torch.arange(start + first, start + last, device=proj.device)
        mask = seen > query.unsqueeze(1)
        tile = q[:, first:last].reshape(kv_heads, ratio * (last - first), dim)
        score = torch.bmm(tile, keys[:, :end].transpose(1, 2)).view(kv_heads, ratio, last - first, end)
        weight = torch.softmax(score.masked_fill_(mask, float("-inf")), -1).view(kv_heads, -1, end)
        out[first:last] = torch.bmm(weight, values[:, :end]).view(heads, last - first, dim).transpose(0, 1)
    return out.view(rows, heads * dim) * torch.sigmoid(gate)


def kv_fill(proj: Tensor, qk_gain: Tensor, kv: KVLayer, tables: tuple[Tensor, Tensor], place: tuple[Tensor, int, int],
            heads: int, kv_heads: int, eps: float) -> None:  # fmt: skip
    """Store the keys and values of a chunk without attending (MTP rows whose output nobody reads).

    Arguments, shapes and effects as `attention_chunk`.
    """
    table, start, real = place
    _, k, v, _ = _split(proj, qk_gain, *tables, heads, kv_heads, eps)
    kv_append(kv, k[:real], v[:real], table, start)


def _split(
    proj: Tensor, qk_gain: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normed, rotated and scaled queries `[T, K, H / K, D]`, keys and values `[T, K, D]`, raw gate `[T, H D]`."""
    rows, dim = proj.shape[0], qk_gain.shape[-1]
    width = (heads + kv_heads) * dim
    qk = rope_(rms_norm(proj[:, :width].unflatten(1, (-1, dim)), qk_gain, eps), cos, sin)
    q = (qk[:, :heads] * dim**-0.5).view(rows, kv_heads, heads // kv_heads, dim)
    gate = proj[:, width : width + heads * dim]
    v = proj[:, width + heads * dim : 2 * width].unflatten(1, (-1, dim))
    return q, qk[:, heads:], v, gate


def kv_append(kv: KVLayer, k: Tensor, v: Tensor, table: Tensor, start: int) -> None:
    """Store keys and values `[T, K, D]` at tokens `start ..` of the sequence with page table `table [P]`."""
    token = torch.arange(start, start + k.shape[0], device=k.device)
    page, offset = table[token // kv.page_size], token % kv.page_size
    rows = torch.stack((k, v)).transpose(1, 2)
    if kv.scales is None:
        kv.codes[:, :, page, offset] = rows.to(kv.codes.dtype)
    else:
        codes, scales = kv_encode(rows)
        kv.codes[:, :, page, offset] = codes
        kv.scales[:, :, page, offset] = scales


def kv_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 codes like `x [.., D]` and fp16 scales `[.., D / 64]`: scale = absmax / 127, code = round half even."""
    groups = x.unflatten(-1, (-1, KV_GROUP))
    scales = (groups.abs().amax(-1) / 127).half()
    step = scales.float()
    step = step.masked_fill_(step == 0, float("inf")).unsqueeze(-1)  # a scale that is 0 gives codes 0
    return (groups / step).round_().clamp_(-127, 127).to(torch.int8).flatten(-2), scales


def kv_read(kv: KVLayer, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[K, whole pages, D]` in fp32 of the pages that hold tokens `0 .. length - 1`."""
    pages = table[: -(-length // kv.page_size)]
    rows = kv.codes.index_select(2, pages).float()
    if kv.scales is not None:
        scale = kv.scales.index_select(2, pages).float().unsqueeze(-1)
        rows = rows.unflatten(-1, (-1, KV_GROUP)).mul_(scale).flatten(-2)
    keys, values = rows.flatten(2, 3)
    return keys, values
