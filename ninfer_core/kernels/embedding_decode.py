"""Triton decode kernel that opens a step: a token's embedding row as residual, and its int8 groups for layer 0."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import wait_for_inputs
from ._order import Activation, KernelMatrix
from ._planes import store_groups


@triton.jit
def embedding_kernel(
    w, wh, ws, tokens, norm, x_out, u_out, q_out, s_out, ss_out,
    U: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (chunk of groups of 32, row): the row of the table, gathered from matrix order."""
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    G32: tl.constexpr = K // 32
    first = tl.program_id(0) * GROUPS
    t = tl.program_id(1)
    wait_for_inputs(PDL)
    token = tl.load(tokens + t).to(tl.int64)
    group = first + tl.arange(0, GROUPS)
    k = tl.arange(0, 32)
    register = (k // 16) * 2 + (token % 16) // 8
    lane = (token % 8) * 4 + (k % 16) // 4
    unit = (token // 16) * U + group // HALVES
    half = (group % HALVES)[:, None]
    word = tl.load(w + unit[:, None] * 128 + (lane * 4 + register)[None, :])
    byte = word >> (8 * (k % 4))[None, :].to(tl.int32)
    if FMT == 8:
        code = (byte << 24) >> 24
    else:
        high = tl.load(wh + unit[:, None] * 64 + lane[None, :] * 2 + half)
        top = (high >> (8 * (k % 4))[None, :].to(tl.int32)) >> (6 - 2 * register)[None, :].to(tl.int32)
        code = ((byte >> (4 * half)) & 15) | ((top & 3) << 4)
        code = (code << 26) >> 26
    pair = tl.load(ws + unit * 8 + token % 8)
    scale = (pair >> (16 * ((token % 16) // 8)).to(tl.int32)) & 0xFFFF
    x = code.to(tl.float32) * scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]
    at = group[:, None] * 32 + k[None, :]
    u = x * (1.0 + tl.load(norm + at).to(tl.float32))
    tl.store(x_out + t * K + at, x)
    tl.store(u_out + t * K + at, u)
    store_groups(u, q_out, s_out, t, first, G32, GROUPS)
    tl.store(ss_out + ((t // 8) * G32 + group) * 8 + t % 8, tl.sum(x * x, 1))


def embed(
    table: KernelMatrix,
    tokens: torch.Tensor,
    next_norm: torch.Tensor,
    x_out: torch.Tensor,
    u_out: torch.Tensor,
    a_out: Activation,
) -> None:
    """x_out [T, K] = rows `tokens` [T] int32 of a W8 or Q6 table; u_out = x_out * (1 + next_norm), int8 in `a_out`.

    Raises:
        ValueError: another format, or a width that is not a multiple of 256.
    """
    if table.format not in ("W8", "Q6") or table.columns % 256:
        raise ValueError(f"the table is {table.format} of width {table.columns}; use W8 or Q6, a multiple of 256 wide")
    embedding_kernel[(table.columns // 256, tokens.shape[0])](
        table.words, table.high, table.scales, tokens, next_norm, x_out, u_out, a_out.q, a_out.s, a_out.ss,
        U=table.groups, K=table.columns, GROUPS=8, FMT=table.code, **_tiles.launch(x_out, 4),
    )  # fmt: skip
