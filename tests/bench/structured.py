"""What a grammar costs per token with the published vocabulary: `python -m tests.bench.structured [--repeat 20]`.

Plays written answers and calls, in the model's own tokens, through the grammar as the sampler does, with 0 and 3
drafts in a round, and prints microseconds of processor time per emitted token: the median, the 99th percentile and the worst. `ahead`
is what runs while the device works (the masks of all rows), `then` what remains behind it (the ids of a mask, and
taking the tokens). Forced tokens are emitted without a row of their own and counted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("core", "frontend")]

import real_vocabulary  # noqa: E402
from agent_schemas import AGENTS  # noqa: E402
from constrained import BASH, EDIT, NOW, SCHEMAS, USER, asking  # noqa: E402

from ninfer_core.frontend.tokenizer import Tokenizer  # noqa: E402
from ninfer_core.runtime.grammar import Grammar, compile_plan  # noqa: E402
from ninfer_core.runtime.sampler import allowed_ids  # noqa: E402
from ninfer_core.runtime.vocabulary import Vocabulary  # noqa: E402
from ninfer_core.types import Request, Tool, ToolChoice  # noqa: E402
from tests.bench.common import Record, parser_of  # noqa: E402

TEXT = "The quick brown fox, 2026-11-30: naïve café — «quotes», tabs\tand code `if x < 3: return {}`. " * 3
LINES = "".join(f"    for item_{i} in rows[{i}:]:\n        print(f'{{item_{i}}}', end=' ')\n" for i in range(12))

ANSWERS: dict[str, tuple[Any, Any]] = {
    "person": (SCHEMAS["person"], {"name": "Zoë Grünwald-Østergård", "age": 42}),
    "edit": (SCHEMAS["edit"], {"path": "src/a.py", "edits": [{"old": TEXT, "new": LINES, "all": True}] * 2}),
    "formats": (
        SCHEMAS["timestamp"],
        {"at": "2026-11-30T10:20:30Z", "url": "https://example.org/a/b?c=d&e=f#g-h-i"},
    ),
    "anything": (True, {"list": [1, 2.5e3, None, True, {"nested": [TEXT]}], "text": LINES}),
    "todo": (
        AGENTS["todo"],
        {
            "todos": [
                {"id": f"t{i}", "content": "Write the tests", "status": "pending", "priority": "high"} for i in range(4)
            ]
        },
    ),
    "payment (conditions)": (AGENTS["payment"], {"method": "card", "number": "1234"}),
}

CALLS: dict[str, tuple[tuple[Tool, ...], str, dict[str, str]]] = {
    "bash": ((BASH, EDIT, NOW), "bash", {"command": LINES, "timeout": "30"}),
    "edit.file": (
        (BASH, EDIT, NOW),
        "edit.file",
        {"path": "/a/b", "mode": "append", "lines": json.dumps(list(range(40))), "at": "null", "force": "true"},
    ),
    "20 tools": (
        (*tuple(Tool(f"f{i}", parameters=AGENTS["search"]) for i in range(19)), BASH),
        "bash",
        {"command": TEXT},
    ),
}


def cases() -> dict[str, tuple[Request, str]]:
    """Requests and the text of what is answered."""
    made = {}
    for name, (schema, value) in ANSWERS.items():
        made[name] = (asking(schema), json.dumps(value, ensure_ascii=False))
    for name, (tools, called, arguments) in CALLS.items():
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        text = f"<tool_call>\n<function={called}>\n{body}</function>\n</tool_call>"
        made[f"call of {name}"] = (Request(USER, tools=tools, tool_choice=ToolChoice("required")), text)
    return made


class Times:
    """Seconds per drawn token, ahead and behind, and the number of tokens that were forced."""

    def __init__(self) -> None:
        self.ahead: list[float] = []
        self.then: list[float] = []
        self.forced = 0


def play(grammar: Grammar, tokenizer: Tokenizer, text: str, drafts: int, times: Times) -> None:
    """Emit a text in the model's own tokens, except where the grammar forces others for the same text."""
    size = tokenizer.addressable
    rest, ids = text.encode(), tokenizer.encode(text)
    while ids:
        began = time.thread_time()
        rows = grammar.rows(ids[:drafts])
        middle = time.thread_time()
        emitted: list[int] = []
        for row, token in zip(rows, ids, strict=False):
            if row.forced is not None:
                grammar.take(row.forced)
                emitted.append(row.forced)
            else:
                assert row.mask is not None
                allowed = allowed_ids(row.mask, size)
                assert bool((allowed == token).any()), f"the grammar does not allow {tokenizer.decode([token])!r}"
                emitted.append(grammar.admit(token))
            if emitted[-1] != token:
                break
        count = len(emitted)
        grammar.observe(emitted)
        while more := grammar.forced():
            emitted += more
            grammar.observe(more)
        end = time.thread_time()
        times.ahead += [(middle - began) / count] * count
        times.then += [(end - middle) / count] * count
        times.forced += len(emitted) - count
        spelled = b"".join(map(tokenizer.token_bytes, emitted))
        assert rest.startswith(spelled), (spelled, rest[:80])
        rest = rest[len(spelled) :]
        ids = ids[len(emitted) :] if emitted == ids[: len(emitted)] else tokenizer.encode(rest.decode())


def spread(seconds: list[float]) -> dict[str, float]:
    micros = np.array(seconds) * 1e6
    return {"p50": float(np.median(micros)), "p99": float(np.percentile(micros, 99)), "max": float(micros.max())}


def told(seconds: list[float]) -> str:
    found = spread(seconds)
    return f"{found['p50']:7.0f} {found['p99']:8.0f} {found['max']:8.0f}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    repeat, record = 1 if options.tiny else options.repeat, Record(options.json, "cpu")
    files = real_vocabulary.files()
    tokenizer = Tokenizer(files["tokenizer.json"], files["tokenizer_config.json"])
    began = time.thread_time()
    vocabulary = Vocabulary.of(tokenizer, [tokenizer.id("<|im_end|>"), tokenizer.id("<|endoftext|>")])
    record.add(f"seconds to prepare {vocabulary.size:,} entries", time.thread_time() - began)
    print("microseconds per token     k  tokens forced | ahead p50      p99      max |  then p50      p99      max")
    every = {0: Times(), 3: Times()}
    for name, (request, text) in cases().items():
        began = time.thread_time()
        plan = compile_plan(request, vocabulary)
        compiled = time.thread_time() - began
        for drafts in (0, 3):
            times = Times()
            for _ in range(repeat):
                play(Grammar(plan, thinking=False, limit=100_000), tokenizer, text, drafts, times)
            every[drafts].ahead += times.ahead
            every[drafts].then += times.then
            count = len(times.ahead) // repeat
            print(
                f"{name:26s} {drafts} {count:7d} {times.forced // repeat:6d} | {told(times.ahead)} | {told(times.then)}"
                + (f" | compiled in {compiled * 1e3:.0f} ms" if not drafts else ""),
                flush=True,
            )
    for drafts, times in every.items():
        print(
            f"{'all':26s} {drafts} {len(times.ahead) // repeat:7d} {'':6s} | {told(times.ahead)} | {told(times.then)}"
        )
        for part, seconds in (("ahead", times.ahead), ("then", times.then)):
            record.add(f"us a token, {drafts} drafts, {part}", spread(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
