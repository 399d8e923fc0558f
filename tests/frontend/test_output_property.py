"""The same bytes give the same result however they are cut into tokens and bursts."""

from __future__ import annotations

import json
import random

import pytest

from ninfer_core.frontend.output import parse_text

from .streams import TOOLS, run, text_of, tool

TYPED = (*TOOLS, tool("t", n="integer", s="string", o="object", b={"type": ["boolean", "null"]}))

FRAGMENTS = [
    *["<think>", "</think>", "<tool_call>", "</tool_call>", "</function>", "</parameter>", "<function=bash>", "<function=t>", "<function=no>"],
    *["<parameter=command>", "<parameter=n>", "<parameter=s>", "<parameter=o>", "<parameter=zz>", "<", "</", "</par", "<tool_c", "<function=b"],
    *("<function=", "<parameter=", "<|im_start|>", "x < y", '"q"', "\\", "\t", "\r\n", "\n", "\n\n", " ", "  \n"),
    *("a", "beta gam", "beta gamma", "STOP", "5", '{"a": 1}', "true", "é", "😀"),
]  # fmt: skip
BROKEN = [b"\xf0\x9f", b"\xc3", b"\xff", b"\xe2\x82"]
STOPS = [(), (), ("beta gamma",), ("STOP", "\n\n"), ("<",), ("\n",), ("a", "beta gamma")]


def random_call(rng: random.Random) -> str:
    values = ["".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(4))) for _ in range(rng.randrange(4))]
    keys = [rng.choice(["command", "n", "s", "o", "b", "path", "content"]) for _ in values]
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in zip(keys, values, strict=True))
    return f"<tool_call>\n<function={rng.choice(['bash', 't', 'write_file', 'no'])}>\n{body}</function>\n</tool_call>"


def random_output(rng: random.Random) -> bytes:
    out = b""
    for _ in range(rng.randrange(1, 9)):
        kind = rng.random()
        if kind < 0.25:
            out += random_call(rng).encode()
        elif kind < 0.3:
            out += rng.choice(BROKEN)
        else:
            out += rng.choice(FRAGMENTS).encode()
    return out


@pytest.mark.parametrize("seed", range(4))
def test_any_split_gives_the_same_events(seed):
    rng = random.Random(seed)
    calls = 0
    for _ in range(220):
        data = random_output(rng)
        options = {
            "thinking": rng.random() < 0.5,
            "tools": rng.choice([(), TYPED, TYPED]),
            "stops": rng.choice(STOPS),
            "parallel": rng.random() < 0.85,
        }
        reason = rng.choice(["stop", "length"])
        expected, reference = run(data, range(1, len(data)), 1, reason, **options)
        for _ in range(4):
            cuts = [rng.randrange(len(data) + 1) for _ in range(rng.randrange(12))]
            events, machine = run(data, cuts, rng, reason, **options)
            assert events == expected, (data, cuts, options, reason)
            assert machine.stop_sequence == reference.stop_sequence
            assert machine.finish_reason(reason) == reference.finish_reason(reason)
        calls += check_whole(data, expected, reference.finish_reason(reason), reason, options)
    assert calls > 50


def check_whole(data: bytes, events: list, final: str, reason: str, options: dict) -> int:
    """A stream equals the parse of the whole text, its fragments are the arguments, no stop string shows."""
    parsed = parse_text(data.decode("utf-8", "replace"), reason=reason, **options)
    assert parsed.message.text == text_of(events, "text")
    assert (parsed.message.reasoning or "") == text_of(events, "reasoning")
    assert parsed.finish_reason == final
    ends = [event for event in events if event[0] == "end"]
    assert [event[1] for event in ends] == list(range(len(ends)))
    assert [event[1:4] for event in events if event[0] == "start"] == [event[1:4] for event in ends]
    for event, call in zip(ends, parsed.message.tool_calls, strict=True):
        written = "".join(e[2] for e in events if e[0] == "arguments" and e[1] == event[1])
        assert list(json.loads(written).items()) == list(json.loads(event[4]).items())
        assert json.loads(written) == call.arguments
    if not ends:
        assert not any(stop in text_of(events, "text") for stop in options["stops"])
    return len(ends)


@pytest.mark.parametrize("seed", range(2))
def test_a_call_written_by_the_template_reads_back_the_same(seed):
    """Values without the format's own tags, whatever their whitespace, survive rendering and parsing."""
    rng = random.Random(seed)
    letters = ["\n", " ", "\t", "a", "<", ">", "</", "é", "😀", '"', "\\", "{", "parameter", "\r", "&lt;", "<b>"]
    for _ in range(400):
        values = {key: "".join(rng.choice(letters) for _ in range(rng.randrange(9))) for key in ("path", "content")}
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        raw = f"<tool_call>\n<function=write_file>\n{body}</function>\n</tool_call>"
        (call,) = parse_text(raw, TOOLS).message.tool_calls
        assert call.arguments == values
