"""Compiles every prefill kernel at the shapes of the published models for named targets, without a GPU.

Run as a program (`compile_prefill.py CAPABILITY...`), not under the interpreter: prints one JSON line per build with the
shared memory of a block, the layout changes inside its loops, and how often a loop writes registers that a product
which runs on may still read.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ninfer_core.kernels import (
    _tiles_prefill,
    attention_prefill,
    gated_delta_prefill,
    linear_prefill,
    moe_prefill,
    norm_prefill,
    vision_prefill,
)

TYPES = {
    "*i32": "w wh ws ids rank counts row_of place tile_e tile_first tile_end tokens table",
    "*bf16": "projected taps ring norm out x16 h y u shared q_gain k_gain",
    "*fp16": "qkv u_out w_out u_ptr w_ptr e_ptr states q q_out kv scales part first",
    "*i8": "codes",
    "*fp32": "logits weights ab a_log dt_bias sums part_sums first_sums acc beta s_ptr x cos sin",
    "i32": "units stride rows pairs tiles slot start chunks length room pages inner first_head part_rows head_stride row_stride",
    "fp32": "eps",
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}
Case = tuple[str, Any, int, int, dict[str, Any], dict[str, str]]


def build(
    kernel: Any, capability: int, warps: int, stages: int, constants: dict[str, Any], types: dict[str, str]
) -> Any:
    """Compile `kernel` with these constexpr values; all pointers aligned to 16 bytes."""
    if "PTX" in kernel.arg_names:
        constants = constants | {"PTX": True}
    kinds = TYPE_OF | types
    signature = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def cases(capability: int) -> Iterator[Case]:
    """(label, kernel, warps, stages, constants, other argument types). K only sets how often a loop runs."""
    up, down = _tiles_prefill.expert_tiles_of(capability, 8 * 4096, 256)
    bf16 = {"x": "*bf16"}
    for fmt in (4, 5, 6, 8):
        constants = {
            "K": 2048,
            "INTER": 512,
            "BF": up.outputs,
            "BT": up.tokens,
            "WIDTHS": up.widths,
            "FMT": fmt,
        }
        if fmt == 4:
            yield "experts up", moe_prefill.expert_gate_up_kernel, up.warps, up.stages, constants, bf16
        constants = {"N": 2048, "INTER": 512, "BN": down.outputs, "BT": down.tokens, "WIDTHS": down.widths, "FMT": fmt}
        constants |= {"PARTS": up.tokens // down.tokens}
        yield f"experts down {fmt}", moe_prefill.expert_down_kernel, down.warps, down.stages, constants, {}
    constants = {"B": 4, "S": 4, "FMT": 6, "SLOTS": False}
    yield "dequantise", linear_prefill.dequantize_kernel, 4, 3, constants, {}
    choice = {"X": 256, "BX": 256, "A": 8}
    yield "choose", moe_prefill.choose_kernel, 4, 3, choice | {"R": 8}, {}
    yield "place", moe_prefill.place_kernel, 4, 3, choice | {"BT": 128, "BLOCK": 256, "PROGRAMS": 240}, {}
    heads = {"HK": 16, "HV": 48}
    yield "gdn input", gated_delta_prefill.mixer_input_kernel, 8, 3, heads | {"BV": 64, "RINGS": 16}, {}
    yield "gdn solve", gated_delta_prefill.solve_kernel, 8, 3, heads, {}
    block, warps, stages = _tiles_prefill.scan_tile_of(capability)
    constants = heads | {"BLOCK": block, "RINGS": 16, "LOOPS": 0}
    yield "gdn scan", gated_delta_prefill.scan_kernel, warps, stages, constants, {}
    yield "gdn output", gated_delta_prefill.mixer_output_kernel, 4, 3, heads, {}
    shape = {"H": 24, "KH": 4}
    for int8 in (True, False):
        pages = {} if int8 else {"codes": "*bf16", "scales": "*bf16"}
        yield "append", attention_prefill.append_kernel, 4, 3, shape | {"R": 16, "INT8": int8}, pages
        pages, most = pages | {"out": "*fp16"}, attention_prefill.LARGEST
        yield "open pages", attention_prefill.open_pages_kernel, 8, 3, {"R": 64, "INT8": int8, "MOST": most}, pages
    rows, keys, warps, stages = _tiles_prefill.flash_tile_of(capability)
    yield "flash", attention_prefill.flash_kernel, warps, stages, shape | {"BM": rows, "BN": keys}, {}
    for before in (0, 1, 2):
        joined = shape | {"R": 16, "BEFORE": before, "LAST": before != 1}
        yield "join", attention_prefill.join_kernel, 4, 3, joined, {}
    wide = {"E": 5120, "BE": 8192}
    yield "norm", norm_prefill.add_norm_kernel, 4, 3, wide | {"ADD": True, "SLOTS": True}, {}
    yield "embed", norm_prefill.embed_kernel, 4, 3, {"U": 32, "K": 2048, "BLOCK": 1024, "FMT": 6}, {}
    yield from vision_cases(capability)
    yield "combine", moe_prefill.combine_kernel, 4, 3, {"E": 2048, "BE": 2048, "A": 8, "X": 256}, {}


def vision_cases(capability: int) -> Iterator[Case]:
    """The vision tower, whose heads have 72 columns."""
    heads, x = {"H": 16, "D": 72}, {"x": "*fp32", "y": "*bf16", "weight": "*fp32", "bias": "*fp32"}
    yield "tower norm", vision_prefill.sum_norm_kernel, 4, 3, {"M": 1152, "BM": 2048, "ADD": True}, x | {"u": "*bf16"}
    planes = {"qkv": "*bf16", "scale": "fp32", "first": "i32", "length": "i32"}
    yield "tower turn", vision_prefill.turn_kernel, 4, 3, heads | {"DP": 80, "BD": 128, "R": 8}, planes
    rows, keys, warps, stages, _ = _tiles_prefill.segment_tile_of(capability)
    constants = heads | {"DM": 64, "DT": 16, "BM": rows, "BN": keys}
    yield "tower attention", vision_prefill.attend_kernel, warps, stages, constants, planes


def overwritten(ptx: str) -> int:
    """Writes in loops to registers that products which still run read: two turns of every loop with `wgmma` in it."""
    found = 0
    for _, body in re.findall(r"^(\$L__BB\w+):(.*?)bra\S*\s+\1;", ptx, re.DOTALL | re.MULTILINE):
        groups: list[set[str]] = []  # registers of the products committed together, and of those not yet committed
        issued: set[str] = set()
        for statement in re.findall(r"[a-z][\w.]*(?:\s[^;]*)?;", re.sub(r"//.*", "", body)) * 2:
            operation, _, operands = statement.rstrip(";").partition(" ")
            if operation.startswith("wgmma.mma_async"):
                issued |= set(re.findall(r"%r\d+", operands.split("}")[1]))
            elif operation.startswith("wgmma.commit_group"):
                groups.append(issued)
                issued = set()
            elif operation.startswith("wgmma.wait_group"):
                groups = groups[max(0, len(groups) - int(operands)) :]
            elif not operation.startswith(("wgmma", "st.", "cp.", "bar.")):
                target = re.match(r"\s*(\{.*?\}|%r\d+)", operands)
                written = set(re.findall(r"%r\d+", target[0])) if target else set()
                found += bool(written & issued.union(*groups))
    return found


def main(arguments: list[str]) -> None:
    """Build every case for every capability named."""
    for capability in map(int, arguments):
        for label, kernel, warps, stages, constants, types in cases(capability):
            built = build(kernel, capability, warps, stages, constants, types)
            loops = re.findall(r"scf\.for .*?scf\.yield", built.asm["ttgir"], re.DOTALL)
            moved = sum(loop.count("convert_layout") for loop in loops)
            line = {"case": label, "capability": capability, "shared": built.metadata.shared, "moved": moved}
            line["overwritten"] = overwritten(built.asm["ptx"])
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
