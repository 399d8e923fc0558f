"""Whole engines with random weights of full size on one GPU: `python -m tests.bench.whole --model 35b PART,...`.

The parts of `ninfer bench --random-weights`, whose figures go to a result file (`--results DIR`), and what it has no
part for. Parts: `decode` (drafts 0 and 3, forced acceptance named as such), `depth` (64,512 to 260,096 tokens, copied
pages), `batch` (8, 32 and 64 sequences at 1,024 and 7,680 tokens), `gap` (the longest wait of a running answer while
130,048 tokens are read), `adaptive` (drafts none of which is right, against none: rate and loss).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ninfer_core.benchmarks import results, suite
from ninfer_core.benchmarks.harness import Method, one_run
from ninfer_core.benchmarks.subject import RandomSubject, Target
from tests.bench.common import MODELS, Record, device_of, parser_of, shape_of

FORCED = 2.19
"""Accepted drafts of three: 73 %."""
SHORT: dict[str, Any] = {"tokens": 8, "seeds": 1}
"""What a run that compiles, or one on the CPU, asks for."""


class Bench:
    """What all parts share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tiny, self.model = options.tiny, options.model
        self.short = SHORT if options.tiny or options.prepare else {}
        self.shape, self.device = shape_of(options.model, options.tiny), device_of(options)
        self.record = Record(options.json, self.device)
        self._results, self._command = options.results, "python -m tests.bench.whole --model " + options.model

    def target(self, **options: Any) -> Target:
        """The model with engine options."""
        return Target(random=self.shape, device=self.device, options=options)

    def suite(self, part: str, **plan: Any) -> None:
        """Run parts of `ninfer bench`, keep their figures, and write the result file."""
        made = suite.Plan(self.target(), say=lambda text: print(text, flush=True), **{**plan, **self.short})
        device, figures = suite.run(made)
        for figure in figures:
            found = {"value": figure.value, "unit": figure.unit, "share of floor": figure.share}
            about = ("forced", "tokens_per_round", "median_before_ms", "median_during_ms", "waits", "prefill_seconds",
                     "prefill_tokens_per_second", "first_alone_seconds")  # fmt: skip
            self.record.add(figure.name, found | {key: figure.details[key] for key in about if key in figure.details})
        if self._results is not None and not self.short:
            self._results.mkdir(parents=True, exist_ok=True)
            command = f"{self._command} {part}"
            results.save(self._results, device, figures, command=command, commit=results.commit_of())

    def scaled(self, *contexts: int) -> tuple[int, ...]:
        """Prompt lengths, cut to what a small model holds."""
        return tuple(sorted({min(context, 512) for context in contexts})) if self.tiny else contexts

    def decode(self) -> None:
        """Drafts 0 and 3 at 7,680 tokens, the prompt read in full."""
        self.suite("decode", parts=("decode",), contexts=self.scaled(7_680), forced=FORCED, fill="read", seeds=5)

    def depth(self) -> None:
        """Without drafts at the longer contexts."""
        contexts = self.scaled(64_512, 130_048, 260_096)
        self.suite("depth", parts=("decode",), contexts=contexts, drafts=(0,), fill="copy", tokens=256, seeds=3)

    def batch(self) -> None:
        """Many sequences at once."""
        sizes = (2,) if self.tiny else (8, 32, 64)
        for context in self.scaled(1_024, 7_680):
            self.suite("batch", parts=("batch",), batches=sizes, batch_context=context, tokens=64, seeds=2)

    def gap(self) -> None:
        """A running answer beside a long prompt."""
        self.suite("gap", parts=("gap",), gap_context=self.scaled(130_048)[0])

    def adaptive(self) -> None:
        """Random weights accept nothing: what adaptive drafts cost against none, and that the output is the same."""
        context, rates, outputs = self.scaled(7_680)[0], {}, {}
        method = Method(tokens=16 if self.short else 600)
        for drafts in (0, 3):
            subject = RandomSubject(
                self.target(adaptive_drafts=True), draft_tokens=drafts, max_sequences=1, context=context + 1024
            )
            try:
                one_run(subject, context, Method(tokens=8), 1000, copy=False)
                seeds = (1,) if self.short else (1, 2, 3)
                runs = [one_run(subject, context, method, seed, copy=False) for seed in seeds]
            finally:
                subject.release()
            rates[drafts] = statistics.fmean(run.decode_rate for run in runs)
            outputs[drafts] = [run.tokens for run in runs]
            usage = runs[-1].done.usage
            found = {"tok/s": rates[drafts], "drafted": usage.drafted_tokens, "accepted": usage.accepted_tokens}
            self.record.add(f"adaptive, {drafts} drafts at {context} tokens", found)
        self.record.add("loss by adaptive drafts at 0 % acceptance", 1 - rates[3] / rates[0])
        self.record.add("adaptive drafts leave the output as it is", outputs[0] == outputs[3])


PARTS: dict[str, Callable[[Bench], None]] = {
    "decode": Bench.decode, "depth": Bench.depth, "batch": Bench.batch, "gap": Bench.gap, "adaptive": Bench.adaptive,
}  # fmt: skip


def main() -> int:
    """Run the parts asked for; a part that fails is noted, and the next one runs."""
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="?", default=",".join(PARTS))
    parser.add_argument("--model", choices=MODELS, default="35b")
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder of result files")
    parser.add_argument("--prepare", action="store_true", help="few tokens: compiles what the parts launch")
    options = parser.parse_args()
    wanted = options.parts.split(",")
    unknown = [part for part in wanted if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    bench, failed = Bench(options), 0
    for part in wanted:
        try:
            PARTS[part](bench)
        except Exception as error:
            failed += 1
            bench.record.add(f"{part}: failed", f"{type(error).__name__}: {error}"[:500])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
