"""Speed of the CPU reference path on the demo's shape with random weights: `python -m tests.bench.reference`.

Prints the best and the median of some repetitions in milliseconds: wall time, or with `--cpu` the time of the thread,
which other processes on the machine disturb less. `--threads N` sets the threads of the matrix library.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from ninfer_core.model.decoder import Decoder
from ninfer_core.model.mtp import MTP
from ninfer_core.state import State
from tests.cases import DEMO
from tests.support import random_weights


def measure(name: str, work: Callable[[], object], clock: Callable[[], float], repeat: int, tokens: int = 0) -> float:
    """Print and return the best time of `work` in milliseconds."""
    work()
    times = []
    for _ in range(repeat):
        begin = clock()
        work()
        times.append((clock() - begin) * 1e3)
    rate = f"  {tokens / min(times) * 1e3:,.0f} tok/s" if tokens else ""
    print(f"{name:<34} best {min(times):8.2f}  median {statistics.median(times):8.2f} ms{rate}", flush=True)
    return min(times)


def main() -> None:
    """Measure every call that a round of the demo makes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.cpu else time.perf_counter
    weights = random_weights(DEMO)
    decoder, mtp = Decoder(weights, DEMO), MTP(weights, DEMO)
    pages = args.context // 64 + 2
    state = State(DEMO, slots=1, pages=pages, kv_dtype=args.kv, max_draft=3)
    table, zero = torch.arange(pages), [0]
    tokens = torch.randint(0, 6000, (args.context,), generator=torch.Generator().manual_seed(0))
    hidden = decoder.prefill(state, tokens, 0, 0, table)
    n = [args.context]

    def verify(rows: int) -> torch.Tensor:
        return decoder.verify(state, tokens[None, :rows], zero, n, [rows], table[None], zero)

    print(f"weights {weights.nbytes / 1e6:.1f} MB, {args.context} tokens of context, {args.threads} thread(s)")
    measure("prefill", lambda: decoder.prefill(state, tokens, 0, 0, table), clock, 4, args.context)
    measure("draft layer, prefill", lambda: mtp.prefill(state, tokens, hidden, 0, table), clock, 4)
    single = measure("one row", lambda: verify(1), clock, 20)
    window = measure("window of 4 rows", lambda: verify(4), clock, 20)
    rows = verify(4)
    logits = measure("logits of 4 rows", lambda: decoder.logits(rows), clock, 20)
    place = (zero, n, table[None], zero)
    realign = measure("draft layer, 4 rows", lambda: mtp.rows(state, tokens[None, :4], rows, *place), clock, 20)
    only = measure(
        "draft layer, 4 rows, 1 result", lambda: mtp.rows(state, tokens[None, :4], rows, *place, [3]), clock, 20
    )
    chain = measure("draft layer, 1 row", lambda: mtp.rows(state, tokens[None, :1], rows[:, :1], *place), clock, 20)
    draft = measure("draft head", lambda: mtp.draft(rows[:, 0]), clock, 20)
    total = window + logits + min(realign, only) + 2 * chain + 3 * draft
    print(
        f"round with 3 drafts {total:.1f} ms: {2500 / total:.0f} tok/s at 2.5 tokens a round; plain {1e3 / single:.0f} tok/s"
    )


if __name__ == "__main__":
    main()
