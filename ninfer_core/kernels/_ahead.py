"""What a decode kernel brings into the second-level cache for the next one, while memory has nothing else to do.

A kernel that ends in work on what it has read asks for the weights of the kernel behind it once its own have come. An
ask holds no register and nobody waits for it; no value depends on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._order import KernelMatrix


@triton.jit
def ask_plane(p, place, THREADS: tl.constexpr, WORDS: tl.constexpr, APART: tl.constexpr, PTX: tl.constexpr):
    """Ask for `WORDS` 4-byte words from `p` on, one ask for each `APART` bytes, evenly by `THREADS` lanes.

    `place` [X, 32] is a lane's number among them, `p` a pointer or pointers [X, 32]. Nothing in the interpreter.
    """
    if PTX:
        ASKS: tl.constexpr = (WORDS * 4 + APART - 1) // APART
        first = (p + place * (APART // 4)).to(tl.int64)  # distances from it are constants
        for i in tl.static_range((ASKS + THREADS - 1) // THREADS):
            at = first + i * (THREADS * APART)
            if i * THREADS + THREADS <= ASKS:
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
                )
            else:
                tl.inline_asm_elementwise(
                    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
                    "=r,l,r",
                    [at, (place < ASKS - i * THREADS).to(tl.int32)],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )


@triton.jit
def ask_matrix(
    w, wh, ws, place, THREADS: tl.constexpr, UNITS: tl.constexpr, FMT: tl.constexpr, APART: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """`ask_plane` of all planes of `UNITS` units (16 rows by a scale group) of a matrix in kernel order."""
    ask_plane(w, place, THREADS, UNITS * 128, APART, PTX)
    if FMT == 5:
        ask_plane(wh, place, THREADS, UNITS * 32, APART, PTX)
    if FMT == 6:
        ask_plane(wh, place, THREADS, UNITS * 64, APART, PTX)
    ask_plane(ws, place, THREADS, UNITS * 8, APART, PTX)


def asks(matrix: KernelMatrix | None, none: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """What a kernel needs to ask for `matrix`: its planes, and the constants AHEAD (units; 0: nothing), AFMT, APART.

    `none`: some int32 tensor of the call's device, in place of planes that are not asked for.
    """
    apart = _tiles.family(none).ahead
    if matrix is None or not apart:
        return (none, none, none), {"AHEAD": 0, "AFMT": 0, "APART": 128}
    units = matrix.rows // 16 * matrix.groups
    return (matrix.words, matrix.high, matrix.scales), {"AHEAD": units, "AFMT": matrix.code, "APART": apart}
