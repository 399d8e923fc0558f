"""Decode kernels on one GPU: exactness against torch, tile sweep by role, and a whole token's launches in one graph.

    python -m tests.bench.ops [--out DIR] [--parts check,compile,chain,sweep] [--workers N]
    python -m tests.bench.ops --parts many-compile,many [--out DIR]    # the dense roles of many rows, with what else was tried for them

Weights are random in the published formats. Every time is the median of graph replays that walk through more weight
bytes than the L2 holds; `floor` is the bytes of the role over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path

import torch

from ninfer_core.kernels import _tiles
from ninfer_core.kernels import attention_decode as attention
from ninfer_core.kernels import embedding_decode as embedding
from ninfer_core.kernels import gated_delta_decode as delta
from ninfer_core.kernels import head_decode as heads
from ninfer_core.kernels import linear_decode as linear
from ninfer_core.kernels import mlp_decode as mlp
from ninfer_core.kernels import moe_decode as moe
from ninfer_core.kernels import residual_decode as residual
from ninfer_core.kernels._order import Activation, KernelMatrix
from ninfer_core.kernels._parts import PartialSums
from ninfer_core.kernels._tiles import Tile
from tests.bench.chain import CHAIN_ROWS, Chain, run_chain
from tests.bench.kernel_checks import CHECKS, faults
from tests.bench.kernel_inputs import DEVICE, graph_time, random_activation, random_matrix, read_bandwidth

# ---------------------------------------------------------------- roles


class Role:
    """One matrix role: builds weight copies, runs one call."""

    def __init__(self, name, rows, columns, fmt, kind, tiles):
        self.name, self.rows, self.columns, self.fmt, self.kind, self.tiles = name, rows, columns, fmt, kind, tiles

    def tiles_of(self, T):
        """Tiles to try with T rows: with many rows only the first, the default."""
        return self.tiles if T <= 8 else self.tiles[:1]

    def make(self):
        """One copy of the role's weights."""
        if self.kind == "experts_down":
            return random_matrix(self.rows, self.columns, self.fmt), random_matrix(2048, 512, "W8")
        if self.kind == "side":
            return random_matrix(self.rows, self.columns, self.fmt), torch.randn(
                64, self.columns, device=DEVICE
            ).bfloat16()
        if self.kind == "router":
            return random_matrix(self.rows, self.columns, self.fmt), torch.randn(
                257, self.columns, device=DEVICE
            ).bfloat16()
        return (random_matrix(self.rows, self.columns, self.fmt),)

    def bytes(self, T, copy):
        """Bytes one call must move (weights; distinct experts of the fixed routing)."""
        m = copy[0]
        if self.kind.startswith("experts"):
            return m.nbytes / 256 * min(8 * T, 256) + (copy[1].nbytes if len(copy) > 1 else 0)
        return m.nbytes + sum(t.numel() * 2 for t in copy[1:])

    def buffers(self, T):
        """Inputs and outputs shared by all copies."""
        a = random_activation(T, self.columns)
        u = torch.randn(T, self.columns, device=DEVICE)
        wide = {
            "u": u, "out": torch.empty(T, self.rows, dtype=torch.bfloat16, device=DEVICE),
            "side": torch.empty(T, 64, device=DEVICE), "logits": torch.randn(T, 257, device=DEVICE),
            "shared": torch.randn(T, 1024, device=DEVICE), "x": torch.randn(T, min(self.rows, 8192), device=DEVICE),
        }  # fmt: skip
        wide["sums"] = PartialSums.empty(T, 5120, 4, DEVICE)
        if self.kind in ("residual", "experts_down"):
            n = 2048 if self.kind == "experts_down" else self.rows
            wide |= {
                "x": torch.randn(T, n, device=DEVICE), "xo": torch.empty(T, n, device=DEVICE),
                "uo": torch.empty(T, n, device=DEVICE), "ao": Activation.empty(T, n, n // 32, DEVICE),
                "norm": torch.zeros(n, device=DEVICE).bfloat16(),
            }  # fmt: skip
        if self.kind == "head":
            wide["candidates"] = heads.Candidates.empty(T, self.rows, DEVICE)
            wide["vocabulary"] = torch.empty(T, self.rows, device=DEVICE)
        if self.kind == "mlp":
            wide["inner"] = Activation.empty(T, self.rows // 2, 1, DEVICE)
        wide["h"] = moe.ExpertRows.empty(T, 8, 512, DEVICE, experts=256, width=2048)
        wide["ids"] = torch.zeros(T, 8, dtype=torch.int32, device=DEVICE)
        wide["weights"] = torch.full((T, 8), 0.125, device=DEVICE)
        # Routings of distinct experts, another at every call: the same ones would stay in the cache.
        wide["routings"] = []
        for _ in range(32):
            ids = torch.randperm(256, device=DEVICE).repeat(-(-T // 32))[: 8 * T].view(T, 8)
            logits = torch.zeros(T, 257, device=DEVICE)
            wide["routings"].append(logits.scatter_(1, ids, torch.arange(8, 0, -1, device=DEVICE).float().repeat(T, 1)))
        return a, wide

    def call(self, copy, a, b, tile, turn=0):
        """Run once; `turn` chooses the routing."""
        m, routing = copy[0], b["routings"][turn % 32]
        if self.kind == "plain":
            linear.project(m, a, b["out"], tile=tile)
        elif self.kind == "head":
            heads.head(m, a, b["candidates"], b["vocabulary"], addressable=self.rows, tile=tile)
        elif self.kind == "mlp":
            mlp.gate_up(m, a, len(b["u"]), b["inner"], b["sums"], tile=tile)
        elif self.kind == "side":
            linear.project(m, a, b["out"], u=b["u"], side=copy[1], side_out=b["side"], tile=tile)
        elif self.kind == "residual":
            residual.project_residual(m, a, b["x"], b["norm"], b["xo"], b["uo"], b["ao"], b["sums"],
                                      norm="none" if self.columns > 8192 else "head", tile=tile)  # fmt: skip
        elif self.kind == "router":
            moe.route_and_shared(m, copy[1], a, b["u"], b["shared"], b["logits"], tile=tile)
        elif self.kind == "experts_up":
            moe.expert_gate_up(m, a, routing, b["shared"], b["h"], b["ids"], b["weights"], tile=tile)
        else:
            moe.expert_down(
                m, copy[1], b["h"], b["ids"], b["weights"], routing, b["x"], b["norm"], b["xo"], b["uo"], b["ao"],
            )  # fmt: skip


def tiles(count, steps, warps):
    return [Tile(*t) for t in itertools.product(count, steps, warps)]


ROLES = [
    Role("35B gdn in", 12288, 2048, "W8", "side",
         [Tile(*t) for t in ((2, 8, 4), (1, 8, 4), (1, 16, 4), (2, 16, 4), (2, 4, 8), (1, 8, 8), (2, 8, 8))]),
    Role("35B attention in", 9216, 2048, "W8", "plain",
         [Tile(*t) for t in ((2, 8, 4), (1, 8, 4), (1, 16, 4), (2, 8, 8), (1, 8, 8))]),
    Role("35B out", 2048, 4096, "W8", "residual", tiles((2,), (4, 8, 16), (8,)) + tiles((2,), (4, 8), (16,))),
    Role("35B router+shared", 1024, 2048, "W8", "router",
         [Tile(*t) for t in ((1, 8, 8), (1, 16, 4), (1, 8, 4), (2, 8, 8))]),
    Role("35B experts up", 262144, 2048, "Q4", "experts_up",
         [Tile(*t) for t in ((2, 4, 8), (2, 8, 4), (2, 4, 4), (2, 2, 8), (2, 2, 16))]),
    Role("35B experts down", 524288, 512, "Q5", "experts_down", [Tile(2, 8, 8)]),
    Role("35B head", 248320, 2048, "Q6", "head", [Tile(*t) for t in ((2, 8, 4), (2, 4, 4), (2, 4, 8), (2, 16, 2))]),
    Role("35B draft head", 131072, 2048, "Q4", "head",
         [Tile(*t) for t in ((2, 8, 4), (2, 4, 4), (2, 4, 8), (2, 16, 2))]),
    Role("27B value_z", 12288, 5120, "Q5", "plain",
         [Tile(*t) for t in ((2, 10, 4), (1, 10, 4), (1, 20, 4), (1, 10, 8), (2, 5, 8))]),
    Role("27B gate/up", 34816, 5120, "Q4", "mlp",
         [Tile(*t) for t in ((4, 2, 8), (4, 5, 8), (4, 5, 4), (4, 10, 8), (4, 4, 4))]),
    Role("27B down", 5120, 17408, "Q5", "residual", [Tile(*t) for t in ((2, 2, 8), (2, 4, 4), (2, 17, 8), (2, 17, 16))]),
]  # fmt: skip
SWEEP_ROWS = (1, 4)
MANY_ROWS = (1, 8, 16, 32, 64)
FEWER = {"blocks": 2, "many_steps": 4, "many_registers": 128}
MANY = {
    "35B gdn in": {
        "side 1": {"side": 1}, "two blocks": {"blocks": 2}, "two, 4 steps": FEWER, "4 steps": {"many_steps": 4},
    },
    "35B attention in": {"two blocks": {"blocks": 2}, "two, 4 steps": FEWER},
    "35B router+shared": {
        "side 1": {"side": 1}, "side 4": {"side": 4}, "two blocks": {"router_blocks": 2}, "four blocks": {"router_blocks": 4},
    },
    "35B head": {"two blocks": {"blocks": 2}},
}  # fmt: skip
"""Roles of calls of many rows, and fields of `_tiles.Family` to compare with the default there."""
FAMILIES = dict(_tiles.FAMILIES)


def select(fields):
    """Launch with these fields of `_tiles.Family` from now on."""
    _tiles.FAMILIES.update({n: family._replace(**fields) for n, family in FAMILIES.items()})


def variants_of(role, T):
    """The default, and what changes it for T rows: names to fields."""
    return {"default": {}} | (MANY[role.name] if T > 8 else {})


def many(bandwidth, role):
    """Every variant of a role of `MANY` at every number of rows."""
    found = {}
    first = role.make()
    copies = [first] + [role.make() for _ in range(max(1, min(40, int(5e8 // first[0].nbytes))) - 1)]
    calls = max(len(copies), 8)
    for T in MANY_ROWS:
        a, b = role.buffers(T)
        entry = {"floor us": role.bytes(T, first) / bandwidth / 1e6}
        for name, fields in variants_of(role, T).items():
            select(fields)

            def chain(a=a, b=b):
                for i in range(calls):
                    role.call(copies[i % len(copies)], a, b, None, i)

            entry[name] = graph_time(chain, 9) / calls
        found[T] = entry
    select({})
    torch.cuda.empty_cache()
    return found


def compile_one(job):
    """Worker: one exactness check, or one candidate once so that the compiler's disk cache holds it."""
    if job[0] in CHECKS:
        try:
            torch.cuda.set_device(0)
            torch.manual_seed(0)
            return {job[0]: CHECKS[job[0]]()}
        except Exception as error:
            return {job[0]: f"{type(error).__name__}: {str(error)[:600]}"}
    index, tile, T = job
    try:
        torch.cuda.set_device(0)
        if isinstance(tile, str):
            select(MANY[ROLES[index].name].get(tile, {}))
            tile = None
        if index == "chain":
            Chain(T, (34, 35)).step()
            torch.cuda.synchronize()
            return None
        role = ROLES[index]
        copy = role.make()
        a, b = role.buffers(T)
        role.call(copy, a, b, tile)
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[:300]}"


def precompile(jobs, workers):
    """Run checks and compile candidates in parallel processes; results and error texts."""
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        return [e for e in pool.map(compile_one, jobs, chunksize=1) if e]


def sweep(bandwidth, role):
    """Every candidate of a role at every number of rows."""
    rows = []
    first = role.make()
    size = sum(
        t.numel() * t.element_size()
        for m in first
        for t in ((m.words, m.high) if isinstance(m, KernelMatrix) else (m,))
    )
    copies = [first] + [role.make() for _ in range(max(1, min(40, int(1.2e9 // max(size, 1)))) - 1)]
    calls = max(len(copies), 32)
    for T in SWEEP_ROWS:
        a, b = role.buffers(T)
        floor = role.bytes(T, first) / bandwidth / 1e6
        for tile in role.tiles_of(T):

            def chain(a=a, b=b, tile=tile):
                for i in range(calls):
                    role.call(copies[i % len(copies)], a, b, tile, i)

            try:
                took = graph_time(chain, 9) / calls
                rows.append({"role": role.name, "T": T, "tile": list(tile), "us": took, "floor_us": floor})
            except Exception as error:
                rows.append({"role": role.name, "T": T, "tile": list(tile), "error": str(error)[:200]})
    torch.cuda.empty_cache()
    return rows


def registers():
    """Registers, spills and shared memory of every kernel compiled in this process."""
    found = []
    modules = (linear, residual, moe, mlp, delta, attention, heads, embedding)
    for kernel in {k for m in modules for k in vars(m).values() if hasattr(k, "device_caches")}:
        for key, compiled in kernel.device_caches[0][0].items():
            if hasattr(compiled, "n_regs"):
                found.append({
                    "kernel": kernel.__name__, "registers": compiled.n_regs, "spills": compiled.n_spills,
                    "shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps, "key": str(key)[-160:],
                })  # fmt: skip
    return found


def main():
    """Run the parts asked for and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--parts", default="check,compile,chain,sweep")
    parser.add_argument("--name", default="ops.json", help="file of the results in DIR")
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    out = Path(options.out)
    parts = options.parts.split(",")
    began = time.time()
    result = {"card": torch.cuda.get_device_name(0), "torch": torch.__version__}

    def save(key, value):
        result[key] = value
        (out / options.name).write_text(json.dumps(result, indent=1))
        print(f"[{time.time() - began:.0f}s] {key}", flush=True)

    bandwidth = read_bandwidth()
    save("read_TBps", bandwidth)
    print(f"read bandwidth {bandwidth:.2f} TB/s")
    for part in parts:
        if part == "check":
            checks = precompile([(name, None, 0) for name in CHECKS], options.workers)
            save("checks", checks)
            print("\n".join(json.dumps(entry) for entry in checks))
            save("faults", faults(checks))
            print("faults:", result["faults"] or "none", flush=True)
        elif part == "compile":
            jobs = [("chain", None, T) for T in CHAIN_ROWS]
            jobs += [(i, t, T) for T in SWEEP_ROWS for i, role in enumerate(ROLES) for t in role.tiles_of(T)]
            save("compile_errors", precompile(jobs, options.workers))
            print(result["compile_errors"][:3])
        elif part == "precompile":  # what the chain needs, no more
            save("compile_errors", precompile([("chain", None, T) for T in CHAIN_ROWS], options.workers))
        elif part == "chain":
            for T in CHAIN_ROWS:
                save(f"chain {T}", run_chain(bandwidth, T))
                print({k: round(v, 1) for k, v in result[f"chain {T}"].items()}, flush=True)
        elif part == "many-compile":
            roles = [(i, role) for i, role in enumerate(ROLES) if role.name in MANY]
            jobs = [(i, name, T) for T in (32, 16, 8, 1) for i, role in roles for name in variants_of(role, T)]
            save("compile_errors", precompile(jobs, options.workers))
            print(result["compile_errors"][:3])
        elif part == "many":
            for role in (role for role in ROLES if role.name in MANY):
                save(f"many {role.name}", many(bandwidth, role))
                for T, entry in result[f"many {role.name}"].items():
                    print(f"{role.name:20s} T={T:<3d}", "  ".join(f"{k} {v:.2f}" for k, v in entry.items()), flush=True)
        elif part == "sweep":
            for role in ROLES:
                save(role.name, sweep(bandwidth, role))
                best = {}
                for row in result[role.name]:
                    if "us" in row and row["us"] <= best.get(row["T"], row)["us"]:
                        best[row["T"]] = row
                for T, row in best.items():
                    share = row["floor_us"] / row["us"]
                    print(
                        f"{role.name:20s} T={T} tile={row['tile']} {row['us']:7.2f} us, floor {row['floor_us']:7.2f}, {share:.0%}"
                    )
        else:
            raise SystemExit(f"no part {part}; use check, compile, precompile, chain, many-compile, many, sweep")
    save("registers", registers())
    for entry in result["registers"]:
        if entry["spills"]:
            print(entry)


if __name__ == "__main__":
    main()
