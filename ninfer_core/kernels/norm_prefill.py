"""Triton prefill kernels of the residual stream: embedding rows, residual sum with the next norm, SwiGLU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._dequant import silu
from ._dequant_prefill import slot_of
from ._order import KernelMatrix


@triton.jit
def embed_kernel(w, wh, ws, tokens, x, U: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, FMT: tl.constexpr):
    """Programs (block of K, row): x [T, K] fp32 = a row of the table in kernel order."""
    UNIT: tl.constexpr = 32 if FMT == 8 else 64
    t = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = k < K
    row = tl.load(tokens + t).to(tl.int64)
    unit = (row // 16) * U + k // UNIT
    lane = (row % 8) * 4 + (k % 16) // 4
    register = ((k % 32) // 16) * 2 + (row % 16) // 8
    byte = (8 * (k % 4)).to(tl.int32)
    word = tl.load(w + unit * 128 + lane * 4 + register, mask=live, other=0) >> byte
    if FMT == 8:
        code = (word << 24) >> 24
    else:
        half = (k % 64) // 32
        high = tl.load(wh + unit * 64 + lane * 2 + half, mask=live, other=0) >> byte
        top = (high >> (6 - 2 * register).to(tl.int32)) & 3
        code = ((word >> (4 * half).to(tl.int32)) & 15) | (top << 4)
        code = (code << 26) >> 26
    pair = tl.load(ws + unit * 8 + row % 8, mask=live, other=0) >> (16 * ((row % 16) // 8)).to(tl.int32)
    scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    tl.store(x + t * K + k, code.to(tl.float32) * scale, mask=live)


def embed_rows(table: KernelMatrix, tokens: torch.Tensor, x: torch.Tensor) -> None:
    """`x` [T, K] fp32 := rows `tokens` [T] int32 of a W8 or Q6 table."""
    if table.format not in ("W8", "Q6"):
        raise ValueError(f"the table is {table.format}; use W8 or Q6")
    embed_kernel[(triton.cdiv(table.columns, 1024), tokens.shape[0])](
        table.words, table.high, table.scales, tokens, x,
        U=table.groups, K=table.columns, BLOCK=1024, FMT=table.code, num_warps=4,
    )  # fmt: skip


@triton.jit
def add_norm_kernel(
    x, y, norm, u, stride, eps,
    E: tl.constexpr, BE: tl.constexpr, ADD: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Programs (row): x += y (with ADD), u = x / rms(x) * (1 + norm), its columns in operand order with SLOTS."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    inside = e < E
    row = tl.load(x + t * E + e, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        row += tl.load(y + t * E + e, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + t * E + e, row, mask=inside)
    factor = 1.0 / tl.sqrt_rn(tl.sum(row * row, 0) / E + eps)
    normed = row * factor * (1.0 + tl.load(norm + e, mask=inside, other=0.0).to(tl.float32))
    if SLOTS:
        tl.store(u + t * stride + slot_of(e), normed.to(u.dtype.element_ty), mask=inside)
    else:
        tl.store(u + t * stride + e, normed.to(u.dtype.element_ty), mask=inside)


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, norm: torch.Tensor, u: torch.Tensor, eps: float, slots: bool = False
) -> None:
    """x [T, E] += y bf16 (if any); u [T, E] (bf16 or fp32, rows may be strided) := norm of x times 1 + `norm`."""
    rows, width = x.shape
    add_norm_kernel[(rows,)](
        x, x if y is None else y, norm, u, u.stride(0), eps,
        E=width, BE=triton.next_power_of_2(width), ADD=y is not None, SLOTS=slots, num_warps=4,
    )  # fmt: skip


@triton.jit
def swiglu_kernel(x, out, inner, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (block of columns, row): out [T, I] = silu(gate) * up; x [T, 2I] alternates RUN of gate, RUN of up."""
    t = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < inner
    at = x + t * 2 * inner + (i // RUN) * (2 * RUN) + i % RUN
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + RUN, mask=live, other=0.0).to(tl.float32)
    tl.store(out + t * inner + i, (silu(gate) * up).to(tl.bfloat16), mask=live)


def swiglu(x: torch.Tensor, out: torch.Tensor, run: int) -> None:
    """`out` [T, I] := silu(gate) * up of `x` [T, 2I], both bf16, which alternates `run` of gate and `run` of up."""
    rows, inner = out.shape
    swiglu_kernel[(triton.cdiv(inner, 1024), rows)](x, out, inner, RUN=run, BLOCK=1024, num_warps=4)
