"""Triton helpers on a program's own room in shared memory: what warps in lane form hand to each other.

The compiler moves registers between warps by reductions and changes of layout, several barriers each. With a room whose
address is a number, one warp stores and, behind a barrier of the caller's, the others load: one barrier for any amount.
Rooms are static shared memory of their own; the compiler's begins behind them. Under the interpreter nothing is stored:
helpers return what would be loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def room_of(ROOM: tl.constexpr, PTX: tl.constexpr):
    """The address of a room, [4, 32] of the same number. `ROOM`: see `room`."""
    nothing = tl.zeros([4, 32], tl.int32)
    if PTX:
        return tl.inline_asm_elementwise(ROOM, "=r,r", [nothing], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return nothing


def room(size: int) -> tl.constexpr:
    """What `room_of` takes for a room of `size` bytes, aligned to 16. A kernel asks for a room once."""
    return tl.constexpr(f"{{ .shared .align 16 .b8 room[{size}]; mov.u32 $0, room; }}")


@triton.jit
def put_one(at, a, PTX: tl.constexpr):
    """Store a word at the address `at`, of lane form."""
    if PTX:
        tl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2; mov.b32 $0, 0;", "=r,r,r", [at, a], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def put_two(at, a, b, live, PTX: tl.constexpr):
    """Store two fp32 side by side where `live`."""
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }", "=r,r,f,f,r",
            [at, a, b, live.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def put_four(at, a, b, c, d, PTX: tl.constexpr):
    """Store four words side by side."""
    if PTX:
        tl.inline_asm_elementwise(
            "st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;", "=r,r,r,r,r,r", [at, a, b, c, d],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def take_words(at):
    """Four words side by side. On a GPU only."""
    return tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [at],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def take_floats(at):
    """Four fp32 side by side. On a GPU only."""
    return tl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [at],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip
