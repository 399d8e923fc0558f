"""Compiles every decode kernel at the shapes of the published models for named targets, without a GPU.

Run as a program (`compile_cases.py CAPABILITY...`), not under the interpreter: prints one JSON line per build with the
shared memory of a block. A separate process because the interpreter replaces the compiler for a whole process.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ninfer_core.kernels import gated_delta_decode, linear_decode, moe_decode

TYPES = {
    "*i32": "w wh sw xq hq ids ids_out q_out slots lengths commits page_table",
    "*fp16": "ws sws",
    "*fp32": "xs ss u side_out x x_out u_out s_out ss_out logits shared_gate_up hs weights weights_out "
    "ab a_log dt_bias s_ptr k_ptr e_ptr g_ptr",
    "*bf16": "out side_w norm projected taps conv_ptr",
    "i32": "rows side_rows",
    "fp32": "eps",
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}


def build(kernel, capability: int, warps: int, **constants):
    """Compile `kernel` with these constexpr values; all pointers aligned to 16 bytes."""
    dependent = capability >= 90
    constants = {"PTX": True, "PDL": dependent} | constants
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPE_OF[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    options = {"num_warps": warps, "enable_fp_fusion": True}
    if dependent:
        options["launch_pdl"] = True
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def linear(fmt: int, n: int, k: int, t: int, bn: int, bg: int, side: bool = False, heads: bool = False):
    parts = k // 32
    return {
        "N": n, "G": k // (32 if fmt == 8 else 64), "K": k, "PARTS": parts, "PARTS_BLOCK": triton.next_power_of_2(parts),
        "HEADS": heads, "ROWNORM": not heads, "SIDE": side, "SIDE_BN": 4, "FMT": fmt, "T": t, "BN": bn, "BG": bg,
    }  # fmt: skip


def residual(fmt: int, n: int, k: int, t: int, bg: int, heads: bool = False):
    return {
        "N": n, "G": k // (32 if fmt == 8 else 64), "K": k, "PARTS": k // 32, "HEADS": heads, "FMT": fmt, "T": t,
        "BG": bg,
    }  # fmt: skip


def cases():
    """(label, kernel, warps, constants) at the shapes of 35B-A3B and 27B."""
    for t in (1, 4):
        yield f"gdn in 35B T={t}", linear_decode.linear_kernel, 4, linear(8, 12288, 2048, t, 16, 64, side=True)
        yield f"gdn out 35B T={t}", linear_decode.linear_residual_kernel, 8, residual(8, 2048, 4096, t, 64, True)
        yield f"head T={t}", linear_decode.linear_kernel, 4, linear(6, 248320, 2048, t, 32, 32)
        yield f"gdn in 27B T={t}", linear_decode.linear_kernel, 4, linear(5, 12288, 5120, t, 32, 16)
        yield f"down 27B T={t}", linear_decode.linear_residual_kernel, 8, residual(5, 5120, 17408, t, 16)
        yield f"experts up T={t}", moe_decode.expert_gate_up_kernel, 8, {
            "E": 256, "TOPK": 8, "INTER": 512, "K": 2048, "G": 32, "PARTS": 64, "PARTS_BLOCK": 64, "SHARED": 512,
            "FMT": 4, "T": t, "TP": t, "BG": 32,
        }  # fmt: skip
        yield f"gdn T={t}", gated_delta_decode.gated_delta_kernel, 4, {"HK": 16, "HV": 32, "R": t, "RINGS": 16}
    for fmt in (5, 6, 8):
        yield f"experts down {fmt}", moe_decode.expert_down_kernel, 8, {
            "E": 256, "TOPK": 8, "INTER": 512, "N": 2048, "G": 16 if fmt == 8 else 8, "FMT": fmt,
        }  # fmt: skip


def main(capabilities: list[int]) -> None:
    """Build every case for every capability."""
    for capability in capabilities:
        for label, kernel, warps, constants in cases():
            built = build(kernel, capability, warps, **constants)
            print(json.dumps({"case": label, "capability": capability, "shared": built.metadata.shared}), flush=True)


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]])
