"""Compiles every decode kernel at the shapes of the published models for named targets, without a GPU.

Run as a program (`compile_cases.py CAPABILITY...`), not under the interpreter: prints one JSON line per build with the
shared memory of a block. A separate process because the interpreter replaces the compiler for a whole process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ninfer_core.kernels import (
    attention_decode,
    embedding_decode,
    gated_delta_decode,
    gated_delta_row_decode,
    head_decode,
    lanes_decode,
    linear_decode,
    mlp_decode,
    moe_decode,
    moe_listed_decode,
    residual_decode,
    rows_decode,
)

TYPES = {
    "*i32": "next_w next_wh next_ws arrived w wh ws sw sws xq ids slots lengths commits tables best_row token_of token tokens side_w items used "
    "lanes deltas table_rows scratch bad sampled results follow pick chain pattern drafts ahead "
    "sent orders masks tape",
    "*fp16": "scales",
    "*i8": "codes q_out",
    "*fp32": "xs ss sums u side_out x x_out u_out s_out ss_out logits shared_gate_up hs weights y "
    "ab a_log dt_bias s_ptr k_ptr e_ptr g_ptr cos sin best part_out part_max part_sum "
    "cos_out sin_out h_out hidden scratch_z",
    "*bf16": "out norm projected taps conv_ptr q_gain k_gain ring",
    "*fp64": "turns",
    "i32": "rows side_rows pages table_stride splits addressable count table_width pages_used batch length",
    "fp32": "eps",
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}


def build(
    kernel,
    capability: int,
    warps: int,
    types: dict[str, str] | None = None,
    registers: int | None = None,
    **constants,
):
    """Compile `kernel` with these constexpr values; all pointers aligned to 16 bytes."""
    dependent = capability >= 90
    constants = {"PTX": True, "PDL": dependent} | constants
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else (types or {}).get(name) or TYPE_OF[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if registers is not None:
        options["maxnreg"] = registers
    if dependent:
        options["launch_pdl"] = True
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def lane_layouts(built) -> list[str]:
    """Layouts of the operands of the matrix instructions, which take one element per lane in lane order."""
    text = built.asm["ttgir"]
    names = set(re.findall(r"mma\.sync.*?tensor<\d+x32xi32, (#\w+)>", text))
    return sorted(re.search(rf"^{name} = (.*)$", text, re.MULTILINE).group(1) for name in names)


def loads_before_the_wait(built) -> int:
    """Global loads that the assembler left in front of the first wait for the kernel before."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    assert "ACQBULK" in text, "no wait in the kernel"
    return text.split("ACQBULK")[0].count("LDG")


def linear(
    fmt: int, n: int, k: int, tiles: int, steps: int, warps: int, side: bool = False, blocks: int = 1, rows: int = 4
):  # fmt: skip
    """Constants of `linear_kernel`."""
    return {
        "N": n, "U": k // (32 if fmt == 8 else 64), "K": k, "PARTS": k // 32, "HEADS": False, "ROWNORM": True,
        "SIDE": side and (2 if blocks > 1 else 1), "FMT": fmt, "TILES": tiles, "S": steps, "X": warps, "NB": blocks, "R": rows if blocks == 1 else 8,
        "FINE": True,
    }  # fmt: skip


def residual(fmt: int, n: int, k: int, steps: int, warps: int, heads: bool = False, rows: int = 4, parts: int = 1):
    """Constants of `linear_residual_kernel`."""
    return {
        "N": n, "U": k // (32 if fmt == 8 else 64), "K": k, "SQUARES": k // 32, "HEADS": heads, "FMT": fmt, "S": steps,
        "X": warps, "PARTS": parts, "NB": 1, "R": rows, "FINE": heads,
    }  # fmt: skip


PAIRS = dict.fromkeys(("projected", "taps", "conv_ptr", "norm"), "*i32")
"""bf16 read two at a time."""
ATTENTION = dict.fromkeys(("projected", "q_gain", "k_gain", "codes", "scales"), "*i32") | {
    "code_bytes": "*i8", "scale_halves": "*fp16",
}  # fmt: skip
BF16_PAGES = ATTENTION | {"code_bytes": "*fp32", "scale_halves": "*i32"}
ASK_EARLY = (
    "gdn in", "gdn in R=1", "gdn out", "gdn out R=1", "down", "down R=1", "head", "dense gate/up", "experts down 5 R=1",
    "gdn R=2", "gdn row",
)  # fmt: skip
"""Kernels whose weights or state are asked for before the kernel in front is done."""
ASKS = {"AHEAD": 256 * 1024, "AFMT": 5, "APART": 128}
"""For the next launch's weights: 1,024 units of each of 256 experts."""
WORDS = {"hq": "*i32"}
BYTES = {"hq": "*i8"}
"""Expert rows are read as words and written as bytes."""


def cases(full: bool = False):
    """(label, kernel, warps, types, constants). `full`: the shapes of 35B-A3B and 27B, minutes to build; else a short K.

    K only sets how often the same code repeats: epilogue tiles, and so shared memory, do not depend on it.
    """
    if full:
        yield "gdn in", linear_decode.linear_kernel, 4, {}, linear(8, 12288, 2048, 2, 8, 4, side=True)
        yield "gdn in R=1", linear_decode.linear_kernel, 4, {}, linear(8, 12288, 2048, 2, 8, 4, side=True, rows=1)
        yield "gdn in 64", linear_decode.linear_kernel, 4, {}, linear(8, 12288, 2048, 2, 8, 4, side=True, blocks=4)
        yield "gdn out", residual_decode.linear_residual_kernel, 8, {}, residual(8, 2048, 4096, 8, 8, heads=True)
        yield (
            "gdn out R=1",
            residual_decode.linear_residual_kernel,
            8,
            {},
            residual(8, 2048, 4096, 16, 8, heads=True, rows=1),
        )
        for rows in (1, 4):
            label = f"down{' R=1' if rows == 1 else ''}"
            constants = residual(5, 5120, 17408, 2, 4, rows=rows, parts=4)
            yield label, residual_decode.linear_residual_kernel, 4, {}, constants
    else:
        yield "gdn in", linear_decode.linear_kernel, 4, {}, linear(8, 12288, 256, 2, 2, 4, side=True)
        yield "gdn in R=1", linear_decode.linear_kernel, 4, {}, linear(8, 12288, 256, 2, 2, 4, side=True, rows=1)
        yield "gdn in 64", linear_decode.linear_kernel, 4, {}, linear(8, 12288, 256, 2, 1, 4, blocks=4)
        yield "gdn out", residual_decode.linear_residual_kernel, 2, {}, residual(8, 2048, 256, 4, 2, heads=True)
        yield "gdn out R=1", residual_decode.linear_residual_kernel, 2, {}, residual(8, 2048, 256, 4, 2, True, rows=1)
        for rows in (1, 4):
            label = f"down{' R=1' if rows == 1 else ''}"
            constants = residual(5, 5120, 3584, 2, 4, rows=rows, parts=2)
            yield label, residual_decode.linear_residual_kernel, 4, {}, constants
    for label, fmt, rows in (("head", 6, 248320), ("draft head", 4, 131072)) if full else (("head", 6, 248320),):
        k, steps = (2048, 8) if full else (768, 1)  # three stages: the loop
        constants = linear(fmt, rows, k, 2, steps, 4)
        for name in ("HEADS", "ROWNORM", "SIDE", "TILES", "FINE"):
            del constants[name]
        yield label, head_decode.head_kernel, 4, {}, constants | {"LOGITS": True}
    yield "greedy", head_decode.greedy_kernel, 8, {}, {"MAPPED": True, "BLOCK": 4096}
    yield "embed", embedding_decode.embedding_kernel, 4, {"q_out": "*i32"}, {"U": 32, "K": 2048, "GROUPS": 8, "FMT": 6}
    k = 5120 if full else 512
    yield "dense gate/up", mlp_decode.gate_up_kernel, 8, {}, {
        "INTER": 17408, "U": k // 64, "K": k, "SQUARES": k // 32, "FMT": 4, "S": 5 if full else 1, "X": 8, "WHOLE": 528,
        "PARTS": 5 if full else 1, "NB": 1, "R": 4, "ROLLING": True,
    }  # fmt: skip
    yield from expert_cases(full)
    yield from round_cases(full)
    for rows in (2, 4) if full else (2,):
        yield f"gdn R={rows}", gated_delta_decode.gated_delta_kernel, 8, PAIRS, {
            "HK": 16, "HV": 32, "R": rows, "RINGS": 16,
        }  # fmt: skip
    yield "gdn row", gated_delta_row_decode.gated_delta_row_kernel, 2, PAIRS, {"HK": 16, "HV": 32, "RINGS": 16}
    heads = {"H": 16, "KH": 2, "MOST": 128}
    for rows, block, int8 in (
        ((1, 1, True), (2, 2, True), (4, 4, True), (4, 1, False)) if full else ((1, 1, True), (1, 1, False))
    ):
        yield (
            f"attention {'INT8' if int8 else 'bf16'} R={rows}",
            attention_decode.attention_split_kernel,
            4,
            ATTENTION if int8 else BF16_PAGES,
            heads | {"R": rows, "ROWS": block, "INT8": int8, "DEPTH": 2 if block == 1 and int8 else 1},
        )
    yield "attention combine", attention_decode.attention_combine_kernel, 4, {"q_out": "*i32"}, heads | {
        "R": 1, "BLOCK": 128,
    }  # fmt: skip


def round_cases(full: bool):
    """The kernels of a round around the layers."""
    yield "open", lanes_decode.open_kernel, 1, {}, {"R": 4, "BLOCK": 256}
    yield "sample", lanes_decode.sample_kernel, 16, {}, {
        "V": 248320 if full else 8192, "R": 4, "BLOCK": 8192 if full else 256,
    }  # fmt: skip
    yield "mask", lanes_decode.mask_kernel, 4, {}, {"V": 248320, "R": 4, "BLOCK": 64}
    for label, held in (("", False), (", held", True)):
        yield f"accept{label}", lanes_decode.accept_kernel, 1, {}, {"R": 4, "FORCED": False, "HELD": held}
        yield f"keep{label}", lanes_decode.keep_kernel, 1, {}, {"K": 3, "HELD": held, "TAPE": held}
    yield "rope", rows_decode.rope_kernel, 1, {}, {"R": 4}
    yield "finish", rows_decode.finish_kernel, 4, {"q_out": "*i32"}, {
        "R": 4, "K": 2048, "BLOCK": 64, "GROUPS": 8, "KEPT": 576, "NORM": True, "PICK": True, "RINGS": True,
    }  # fmt: skip
    yield "draft input", rows_decode.draft_input_kernel, 4, {"q_out": "*i32"}, {
        "K": 5120, "BLOCK": 256, "WIDE": 8192, "GROUPS": 8,
    }  # fmt: skip


def expert_cases(full: bool):
    """The kernels of the sparse MLP, for a row, a window, and many rows."""
    k, warps, top_k = (2048, 8, 8) if full else (256, 2, 2)
    up = {
        "TOPK": top_k, "INTER": 512, "K": k, "U": k // 64, "PARTS": 64, "FMT": 4, "S": 4 if full else 2,
        "X": warps,
    }  # fmt: skip
    yield "experts up, a row", moe_decode.pair_gate_up_kernel, warps, BYTES, up | ASKS | {"E": 256, "LOADED": True}
    yield "experts up, pairs", moe_decode.pair_gate_up_kernel, warps, BYTES, up | ASKS | {"E": 256, "LOADED": False}
    yield "experts up, items", moe_listed_decode.item_gate_up_kernel, warps, BYTES, up | {"S": 2}
    yield "choose", moe_listed_decode.choose_kernel, 1, {}, {"E": 256, "TOPK": top_k}
    yield "list", moe_listed_decode.list_kernel, 8, {}, {
        "TOPK": top_k, "BLOCK": 256, "OWN": 8, "MOST": 64,
    }  # fmt: skip
    yield "experts join", moe_listed_decode.join_kernel, 1, {}, {"E": 256, "TOPK": top_k, "N": 2048}
    inner = 512 if full else 128
    for fmt in (5, 6, 8) if full else (5,):
        units = inner // (32 if fmt == 8 else 64)
        down = {
            "TOPK": top_k, "INTER": inner, "N": 2048, "U": units, "FMT": fmt, "S": min(2, units), "X": warps,
        }  # fmt: skip
        yield f"experts rows {fmt}", moe_listed_decode.expert_rows_kernel, warps, WORDS, down
        held = min(4, units // 2)
        for rows in (1, 2, 8) if full else (1, 8):
            yield f"experts down {fmt} R={rows}", moe_decode.expert_down_kernel, warps, WORDS, down | {
                "E": 256, "HELD": held, "S": units - held if rows <= 2 else min(2, units),
                "CHOOSES": rows <= 2,
            }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Build every case for every capability named; `full` first for the published shapes."""
    full = arguments[:1] == ["full"]
    for capability in arguments[full:]:
        for label, kernel, warps, types, constants in cases(full):
            built = build(kernel, int(capability), warps, types, **constants)
            found = {"case": label, "warps": warps, "shared": built.metadata.shared, "lanes": lane_layouts(built)}
            if label in ASK_EARLY and capability == "90":
                found["early"] = loads_before_the_wait(built)
            print(json.dumps(found | {"capability": int(capability)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
