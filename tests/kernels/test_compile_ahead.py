"""Kernels compiled ahead: what a round launches is found without a launch, and other processes fill Triton's cache."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from tests.kernels.programs import printed

PROGRAM = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from ninfer_core.inventory import RECIPE_DEMO
from ninfer_core.kernels import _tiles, compile_ahead
from ninfer_core.model.fused import FusedDecoder, FusedMTP
from ninfer_core.packed import random_packed
from ninfer_core.runtime.graphs import DeviceRounds
from ninfer_core.state import FusedState
from tests.kernels.fused_case import config_of

class Driver:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

triton.runtime.driver.set_active(Driver())

def launch(tensor, warps, registers=None, *, leads=False):
    options = {"PTX": True, "PDL": 1, "num_warps": warps, "enable_fp_fusion": False, "launch_pdl": True}
    return options | ({} if registers is None else {"maxnreg": registers})

_tiles.launch = launch
config = config_of("moe")
weights = random_packed(config, seed=1, device="cpu", recipe=RECIPE_DEMO)
decoder = FusedDecoder(weights, config, context=256)
state = FusedState(config, slots=9, pages=3, device="cpu")
rounds = DeviceRounds(decoder, FusedMTP(decoder), state, slots=9, pages=3, addressable=384)
builds = compile_ahead.noted(lambda: [rounds._round(1, 4, 3, 16), rounds._round(1, 1, 3, 16), rounds._round(1, 1, 0, 16)])
again = compile_ahead.noted(lambda: rounds._round(1, 1, 0, 16))
names = sorted({b.name for b in builds})
small = [b for b in builds if b.name in ("open_kernel", "keep_kernel")]
cached = [compile_ahead.is_cached(b) for b in small]
compile_ahead.compile_all(small, workers=2)
cached += [compile_ahead.is_cached(b) for b in small]
broken = compile_ahead.Build(**{f: getattr(small[0], f) for f in small[0].__slots__} | {"options": {"num_warps": 3}})
try:
    compile_ahead.compile_all([broken], workers=1)
    fault = ""
except RuntimeError as error:
    fault = str(error)
if "all" in sys.argv:
    import time
    began = time.monotonic()
    compile_ahead.compile_all(builds)
    print(f"{len(builds)} kernels in {time.monotonic() - began:.0f} s", file=sys.stderr)
print(json.dumps({
    "names": names, "count": len(builds), "again": len(again), "small": len(small), "cached": cached, "fault": fault,
    "held": bool((rounds.lanes == 0).all()),
}))
"""


pytestmark = pytest.mark.timeout(1500)  # seconds on a quiet machine


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cache = tmp_path_factory.mktemp("triton")
    return json.loads(printed("-c", PROGRAM, interpret=False, TRITON_CACHE_DIR=str(cache)))


def test_a_round_is_noted_and_nothing_is_launched(found):
    wanted = {
        "open_kernel", "rope_kernel", "embedding_kernel", "linear_kernel", "gated_delta_kernel", "expert_down_kernel",
        "gated_delta_row_kernel",
        "linear_residual_kernel", "pair_gate_up_kernel", "attention_split_kernel", "attention_combine_kernel",
        "finish_kernel", "head_kernel", "sample_kernel", "accept_kernel", "draft_input_kernel", "greedy_kernel",
        "keep_kernel",
    }  # fmt: skip
    assert set(found["names"]) == wanted
    assert len(wanted) < found["count"] < 60
    assert 0 < found["again"] < found["count"]
    assert found["held"]


def test_processes_fill_the_cache(found):
    assert found["small"] >= 2
    assert found["cached"] == [False] * found["small"] + [True] * found["small"]


def test_what_does_not_compile_is_named(found):
    assert "open_kernel" in found["fault"] or "keep_kernel" in found["fault"]
