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
def room_of(ROOM: tl.constexpr, PTX: tl.constexpr, X: tl.constexpr = 4):
    """The address of a room, [X, 32] of the same number. `ROOM`: see `room`."""
    if PTX:
        # A scalar has no layout: of a tensor the compiler makes one more, and with it another room, for each layout.
        at = tl.inline_asm_elementwise(ROOM, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
        return tl.full([X, 32], at, tl.int32)
    else:
        return tl.zeros([X, 32], tl.int32)


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
def copy_four(at, p, PTX: tl.constexpr):
    """Start to copy four words behind every pointer of `p` to the address `at`, past the first-level cache.

    The interpreter loads what lies behind the pointers and returns it, [warps, 32 * 4].
    """
    if PTX:
        tl.inline_asm_elementwise(
            "cp.async.cg.shared.global [$1], [$2], 16; mov.b32 $0, 0;", "=r,r,l", [at, p.to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        return ()
    else:
        even = tl.join(tl.load(p), tl.load(p + 2))
        odd = tl.join(tl.load(p + 1), tl.load(p + 3))
        return tl.reshape(tl.join(even, odd), [p.shape[0], 128])


@triton.jit
def wait_for_copies(PTX: tl.constexpr):
    """Until what this thread copies is there; the other threads' needs a barrier behind it."""
    if PTX:
        tl.inline_asm_elementwise(
            "cp.async.wait_all; mov.b32 $0, 0;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1
        )


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


@triton.jit
def ask_words(at, p, PTX: tl.constexpr):
    """Start to bring a lane's four words behind `p` to the address `at` of its own: no register waits for them."""
    if PTX:
        copy_four(at, p, PTX)
        return ()
    else:
        return tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)


@triton.jit
def own_words(at, asked, PTX: tl.constexpr):
    """What `ask_words` asked for, behind `wait_for_copies`; no other thread reads it, so there is no barrier."""
    return take_words(at) if PTX else asked
