"""The output machine on single cases: channels, tool calls, stop strings, broken text, log-probabilities."""

from __future__ import annotations

import json
import time

import pytest

from ninfer_core.frontend.output import OutputMachine, StopFilter, new_call_id, parse_text
from ninfer_core.types import ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta, ToolCallEnd, ToolCallStart

from .streams import EOS, TOOLS, Pieces, calls_of, merged, run, text_of, tool


def call(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def one(text: str, **options: object) -> tuple[str, dict[str, object]]:
    """The only call in an output that must be nothing but the call."""
    parsed = parse_text(text, **{"tools": TOOLS, **options})  # type: ignore[arg-type]
    assert parsed.message.text == ""
    assert parsed.finish_reason == "tool_calls"
    (found,) = parsed.message.tool_calls
    assert isinstance(found.arguments, dict)
    return found.name, found.arguments


# values


def test_value_keeps_all_whitespace_but_one_newline_at_each_end():
    raw = call("write_file", path="a.py", content="    if x:\n        return 1\n")
    assert one(raw) == ("write_file", {"path": "a.py", "content": "    if x:\n        return 1\n"})
    assert one(call("bash", command="\n\nls\n\n")) == ("bash", {"command": "\n\nls\n\n"})
    assert one("<tool_call><function=bash><parameter=command>ls </parameter></function></tool_call>")[1] == {
        "command": "ls "
    }
    assert one(call("bash", command=""))[1] == {"command": ""}
    assert one("<tool_call>\n<function=bash>\n<parameter=command>\n</parameter>\n</function>\n</tool_call>")[1] == {
        "command": ""
    }


def test_closing_tags_inside_an_argument_are_text():
    content = 'close = "</parameter>"\nend = "</tool_call>"'
    assert one(call("write_file", path="notes.xml", content=content))[1] == {"path": "notes.xml", "content": content}


@pytest.mark.parametrize(
    "content",
    [
        "</parameter> and more",
        "a </function> b\nc",
        "</tool_call>\nnext line",
        '"<parameter=content>"',
        "<parameter=path>\nalready given",
        "<parameter=unknown>\nnot in the schema",
        'see "<tool_call>\n<function=bash>"',
        "<function=bash> in a line",
        "<function=nope>\nnot a tool",
        "<tool_call>\nwithout a function",
        "</parameter",
        "<",
        "a < b && c > d",
        "<!-- </parameter> -->",
    ],
)
def test_markup_inside_an_argument_is_text(content):
    assert one(call("write_file", path="p", content=content))[1] == {"path": "p", "content": content}


def test_types_come_from_the_schema():
    tools = [
        tool(
            "f",
            flag={"type": ["boolean", "null"]},
            n={"anyOf": [{"type": "integer"}, {"type": "null"}]},
            loc={"type": "object"},
            tags={"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            day="integer",
            code="string",
        )
    ]
    raw = call("f", flag="True", n="5", loc='{"city": "Paris"}', tags='["a","b"]', day="2026-09-01", code="007")
    assert one(raw, tools=tools)[1] == {
        "flag": True,
        "n": 5,
        "loc": {"city": "Paris"},
        "tags": ["a", "b"],
        "day": "2026-09-01",
        "code": "007",
    }
    assert one(call("f", flag="null", n="None"), tools=tools)[1] == {"flag": None, "n": None}


def test_a_repeated_key_keeps_its_first_place_and_its_last_value():
    raw = "<tool_call>\n<function=t>\n"
    raw += "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in (("a", "1"), ("b", "2"), ("a", "3")))
    raw += "</function>\n</tool_call>"
    _, arguments = one(raw, tools=[tool("t", a="integer", b="string")])
    assert list(arguments.items()) == [("a", 3), ("b", "2")]


def test_arguments_written_as_a_json_object_are_read():
    assert one('<tool_call>\n<function=bash>\n{"command": "ls"}\n</function>\n</tool_call>')[1] == {"command": "ls"}


def test_value_that_is_nested_too_deeply_stays_text():
    deep = "[" * 50_000 + "]" * 50_000
    assert one(call("t", a=deep), tools=[tool("t", a="array")])[1] == {"a": deep}


def test_lone_surrogates_in_json_become_replacement_characters():
    _, arguments = one(call("t", a='{"k": "\\ud800x"}'), tools=[tool("t", a="object")])
    assert arguments == {"a": {"k": "\ufffdx"}}
    json.dumps(arguments, ensure_ascii=False).encode()


# repair


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("<tool_call>\n<function=write_file>\n<parameter=path>\na\n<parameter=content>\nb\n</parameter>\n</function>\n</tool_call>", {"path": "a", "content": "b"}),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</function>\n</tool_call>", {"command": "ls"}),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</tool_call>", {"command": "ls"}),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</tool_call>", {"command": "ls"}),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>", {"command": "ls"}),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>", {"command": "ls"}),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</para", {"command": "ls"}),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls", {"command": "ls"}),
        ("<tool_call>\n<function=bash>\n", {}),
        ("<tool_call>\n<function= bash >\n</function>\n</tool_call>", {}),
        ("<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>", {"command": "ls"}),
        ("<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>", {"command": "ls"}),
    ],
)  # fmt: skip
def test_missing_tags_are_repaired(raw, expected):
    assert one(raw)[1] == expected


def test_a_second_call_closes_an_open_one():
    raw = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n" + call("glob", pattern="*")
    parsed = parse_text(raw, TOOLS)
    assert [(c.name, c.arguments) for c in parsed.message.tool_calls] == [
        ("bash", {"command": "ls"}),
        ("glob", {"pattern": "*"}),
    ]
    raw = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n<function=glob>\n</function>\n</tool_call>"
    assert [c.name for c in parse_text(raw, TOOLS).message.tool_calls] == ["bash", "glob"]


def test_a_call_cut_by_the_length_limit_is_incomplete():
    raw = "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=content>\nprint("
    events, machine = run(raw, range(len(raw)), reason="length", tools=TOOLS)
    assert calls_of(events) == [("write_file", {"path": "a.py", "content": "print("}, False)]
    assert machine.finish_reason("length") == "length"
    arguments = text_of(events, "arguments")
    assert json.loads(arguments) == {"path": "a.py", "content": "print("}
    raw = "<tool_call>\n<function=t>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2"
    events, _ = run(raw, reason="length", tools=[tool("t", a="integer", b="integer")])
    assert calls_of(events) == [("t", {"a": 1}, False)]


def test_a_call_whose_name_is_cut_stays_text():
    events, machine = run("<tool_call>\n<function=wri", reason="length", tools=TOOLS)
    assert events == [("text", "<tool_call>\n<function=wri")]
    assert machine.finish_reason("length") == "length"


# tags as text


def test_tags_in_prose_are_text_with_and_without_tools():
    sentence = 'The literal token "<tool_call>" opens a call.'
    for tools in ((), TOOLS):
        events, machine = run(sentence, range(len(sentence)), tools=tools)
        assert events == [("text", sentence)]
        assert machine.finish_reason("stop") == "stop"


def test_without_tools_calls_are_not_read():
    raw = call("bash", command="ls")
    assert run(raw, range(len(raw)))[0] == [("text", raw)]
    assert run("r " + raw, thinking=True)[0] == [("reasoning", "r " + raw)]


def test_unknown_function_without_wrapper_is_text():
    assert run("<function=nope>\n</function>", tools=TOOLS)[0] == [("text", "<function=nope>\n</function>")]


def test_a_function_tag_in_prose_is_text():
    for raw in ("Write <function=bash> to run it.", "It is <function=bash>", "<function=bash>\nruns it"):
        assert run(raw, range(len(raw)), tools=TOOLS)[0] == [("text", raw)]


def test_text_after_a_call_is_kept_and_the_call_too():
    parsed = parse_text(call("bash", command="ls") + "\nDone.", TOOLS)
    assert parsed.message.text == "Done."
    assert [c.arguments for c in parsed.message.tool_calls] == [{"command": "ls"}]
    parsed = parse_text("First.\n\n" + call("bash", command="ls") + "\nDone.\n", TOOLS)
    assert parsed.message.text == "First.\nDone.\n"


def test_reasoning_may_speak_of_calls():
    raw = (
        "I write <tool_call> first, or <tool_call>\n<function=name>\n<parameter=x>, then <tool_call>\n<function=bash>. "
    )
    raw += "Fine.\n</think>\n\nHi"
    events, _ = run(raw, range(len(raw)), thinking=True, tools=TOOLS)
    assert events == [("reasoning", raw.split("\n</think>")[0]), ("text", "Hi")]


# think block


def test_think_block_is_split_off():
    assert run("Plan.\n</think>\n\nHi", thinking=True)[0] == [("reasoning", "Plan."), ("text", "Hi")]
    assert run("<think>\nPlan.\n</think>\n\nHi", thinking=True)[0] == [("reasoning", "Plan."), ("text", "Hi")]
    assert run("\nPlan.\n\n</think>Hi", thinking=True)[0] == [("reasoning", "Plan."), ("text", "Hi")]
    assert run("</think>\n\n", thinking=True)[0] == []


def test_unclosed_think_block_is_all_reasoning():
    for reason in ("stop", "length"):
        events, machine = run("Let me think. 1 < 2", thinking=True, reason=reason)
        assert events == [("reasoning", "Let me think. 1 < 2")]
        assert machine.finish_reason(reason) == reason


def test_output_without_thinking_is_never_reasoning():
    assert run("Plain answer.\n\nMore.")[0] == [("text", "Plain answer.\n\nMore.")]
    assert run("a </think>b")[0] == [("text", "a b")]
    assert run("write <think> to open")[0] == [("text", "write <think> to open")]


def test_a_think_block_opened_against_the_request_does_not_leak():
    assert run("<think>\nhm\n</think>\n\nHi")[0] == [("reasoning", "hm"), ("text", "Hi")]
    assert run("<think> is the opening tag")[0] == [("text", "<think> is the opening tag")]


def test_call_inside_an_unclosed_think_block_is_made():
    raw = "Need the file list.\n" + call("bash", command="ls")
    events, machine = run(raw, range(len(raw)), thinking=True, tools=TOOLS)
    assert text_of(events, "reasoning") == "Need the file list."
    assert text_of(events, "text") == ""
    assert calls_of(events) == [("bash", {"command": "ls"}, True)]
    assert machine.finish_reason("stop") == "tool_calls"


def test_blanks_between_thinking_and_a_call_are_not_an_answer():
    parsed = parse_text(
        "r\n</think>\n\n \n" + call("bash", command="ls") + "\n" + call("glob", pattern="*") + "\n", TOOLS, True
    )
    assert parsed.message.text == ""
    assert len(parsed.message.tool_calls) == 2


def test_raw_output_is_verbatim():
    raw = "<think>x</think>\n" + call("bash", command="ls") + "</think>"
    assert run(raw, range(len(raw)), raw=True, tools=TOOLS)[0] == [("text", raw)]


def test_reasoning_tokens_leave_out_tags_and_forced_tokens():
    pieces = Pieces()
    thinking = pieces.ids("a", "b", "c", "d")
    rest = pieces.ids("\n", "</think>", "\n\n", "Answer")
    machine = pieces.machine(thinking=True, close_ids=rest[:3])
    events = machine.feed(thinking)
    assert machine.in_reasoning
    assert machine.reasoning_tokens == 4
    assert machine.forced_close() == rest[:3]
    events = [*events, *machine.feed(rest[:3])]
    assert not machine.in_reasoning
    assert machine.reasoning_tokens == 4
    events = [*events, *machine.feed(rest[3:]), *machine.finish("stop")]
    assert merged(events) == [("reasoning", "abcd"), ("text", "Answer")]


def test_forced_close_in_the_middle_of_a_character_or_tag():
    pieces = Pieces()
    forced = pieces.ids("\n", "</think>", "\n\n")
    for cut in (b"a\xf0\x9f", b"a</thi", b"a<tool_call>\n<func"):
        machine = pieces.machine(thinking=True, tools=TOOLS, close_ids=forced)
        ids = pieces.ids(cut, "Hi")
        events = [*machine.feed(ids[:1]), *machine.feed(machine.forced_close()), *machine.feed(ids[1:])]
        events += machine.finish("stop")
        assert merged(events) == [("reasoning", cut.decode("utf-8", "replace")), ("text", "Hi")]


# bytes


def test_a_character_split_over_tokens_is_shown_whole():
    pieces = Pieces()
    machine = pieces.machine()
    first, second = pieces.ids(bytes.fromhex("6f6b20f09f"), bytes.fromhex("988021"))
    assert [e.text for e in machine.feed([first])] == ["ok "]
    assert [e.text for e in machine.feed([second])] == ["😀!"]


def test_a_character_split_at_the_end_of_reasoning():
    data = "é😀\n</think>\n\n😀".encode()
    for cut in range(1, len(data)):
        assert run(data, [cut], thinking=True)[0] == [("reasoning", "é😀"), ("text", "😀")]


def test_malformed_bytes_become_one_replacement_each():
    events, machine = run(b"A\xf0\x9fB\xc3", [3, 4])
    assert events == [("text", "A\ufffdB\ufffd")]
    assert machine.finish_reason("stop") == "stop"


# stop strings


def test_stop_string_spanning_tokens():
    pieces = Pieces()
    machine = pieces.machine(stops=("beta gamma",))
    shown = ""
    for i, token in enumerate(pieces.ids("alpha", " beta", " gam", "ma", " delta")):
        for event in machine.feed([token]):
            assert isinstance(event, TextDelta)
            shown += event.text
        assert "beta" not in shown
        if machine.stopped:
            break
    assert i == 3
    assert machine.kept == 1
    assert machine.finish("stop") == []
    assert shown == "alpha "
    assert machine.stop_sequence == "beta gamma"


def test_stop_string_inside_a_burst_says_how_many_tokens_were_kept():
    pieces = Pieces()
    machine = pieces.machine(stops=("STOP",))
    events = machine.feed(pieces.ids("a", " ST", "OP b", " c", " d"))
    assert machine.kept == 3
    assert merged(events) == [("text", "a ")]
    assert machine.feed(pieces.ids("more")) == []
    assert machine.kept == 0


def test_end_token_inside_a_burst():
    pieces = Pieces()
    a, b = pieces.ids("a", "b")
    machine = pieces.machine()
    assert merged(machine.feed([a, EOS, b])) == [("text", "a")]
    assert (machine.kept, machine.stopped) == (2, True)
    machine = pieces.machine(ignore_eos=True)
    assert merged(machine.feed([a, EOS, b])) == [("text", "ab")]
    assert (machine.kept, machine.stopped) == (3, False)
    machine = pieces.machine(ignore_eos=True, stop_ids=(b,))
    assert merged(machine.feed([a, b, a])) == [("text", "a")]
    assert machine.kept == 2


def test_stop_strings_match_in_the_answer_only():
    raw = "STOP\n</think>\n\nSee.\n\n" + call("bash", command="STOP") + "\nthen STOP here"
    events, machine = run(raw, range(len(raw)), thinking=True, tools=TOOLS, stops=("STOP",))
    assert text_of(events, "reasoning") == "STOP"
    assert calls_of(events) == [("bash", {"command": "STOP"}, True)]
    assert text_of(events, "text") == "See.\nthen "
    assert machine.stop_sequence == "STOP"


def test_of_two_stop_strings_the_first_complete_one_wins():
    assert run("xabcd", range(5), stops=("abcd", "bc"))[0] == [("text", "xa")]
    assert run("xabcd", (), stops=("bc", "abc"))[0] == [("text", "x")]


def test_a_partial_stop_string_at_the_end_is_shown():
    assert run("alpha bet", range(9), stops=("beta",))[0] == [("text", "alpha bet")]


def test_stop_filter_ignores_empty_strings():
    assert StopFilter(("", "x", "x")).stops == ("x",)


# stream form


@pytest.mark.parametrize("cut", [None, 47])
def test_arguments_survive_several_tokens_per_step(cut):
    tools = [tool("mv", src="string", dst="string")]
    raw = call("mv", src="a.txt", dst="b.txt")
    pieces = Pieces()
    machine = pieces.machine(tools=tools)
    parts = [raw] if cut is None else [raw[:cut], raw[cut:]]
    events = []
    for token in pieces.ids(*parts):
        events += machine.feed([token])
    events += machine.finish("stop")
    fragments = [e.arguments for e in events if isinstance(e, ToolCallDelta)]
    assert json.loads("".join(fragments)) == {"src": "a.txt", "dst": "b.txt"}


def test_header_comes_first_and_string_arguments_stream():
    pieces = Pieces()
    machine = pieces.machine(tools=TOOLS)
    seen = []
    for token in pieces.ids(
        "<tool_call>", "\n<function=", "bash", ">", "\n<parameter=command>\n", "ls", " -l", "\n", "x"
    ):
        seen.append(machine.feed([token]))
    assert [len(events) for events in seen[:3]] == [0, 0, 0]
    assert [type(e) for e in seen[3]] == [ToolCallStart]
    assert [e.arguments for e in seen[4]] == ['{"command": "']
    assert [e.arguments for e in seen[5]] == ["ls"]
    assert [e.arguments for e in seen[6]] == [" -l"]
    assert seen[7] == []  # the newline may belong to the closing tag
    assert [e.arguments for e in seen[8]] == ["\\nx"]


def test_an_empty_call_streams_an_empty_object():
    events, _ = run("<tool_call>\n<function=bash>\n</function>\n</tool_call>", tools=TOOLS)
    assert [e[0] for e in events] == ["start", "arguments", "end"]
    assert text_of(events, "arguments") == "{}"


def test_newlines_before_a_possible_call_are_held_back():
    pieces = Pieces()
    machine = pieces.machine(tools=TOOLS)
    assert merged(machine.feed(pieces.ids("Look.", "\n\n"))) == [("text", "Look.")]
    assert machine.feed(pieces.ids("<tool_call>", "\n")) == []
    assert merged(machine.feed(pieces.ids("x"))) == [("text", "\n\n<tool_call>\nx")]


def test_call_ids_are_unique():
    assert len({new_call_id() for _ in range(1000)}) == 1000
    parsed = parse_text(call("bash", command="ls") * 3, TOOLS)
    assert len({c.id for c in parsed.message.tool_calls}) == 3
    assert [c.arguments for c in parsed.message.tool_calls] == [{"command": "ls"}] * 3


def test_without_parallel_calls_the_output_ends_after_the_first():
    raw = call("bash", command="ls") + "\n" + call("glob", pattern="*")
    events, machine = run(raw, range(len(raw)), tools=TOOLS, parallel=False)
    assert calls_of(events) == [("bash", {"command": "ls"}, True)]
    assert machine.finish_reason("stop") == "tool_calls"
    parts = [call("bash", command="ls"), "\n", "<tool_call>", "\n"]
    pieces = Pieces()
    machine = pieces.machine(tools=TOOLS, parallel=False)
    machine.feed(pieces.ids(*parts))
    assert (machine.stopped, machine.kept) == (True, 1)


def test_events_carry_the_call():
    pieces = Pieces()
    machine = pieces.machine(tools=TOOLS)
    events = [*machine.feed(pieces.ids(call("bash", command="ls"))), *machine.finish("stop")]
    start, end = events[0], events[-1]
    assert isinstance(start, ToolCallStart) and isinstance(end, ToolCallEnd)
    assert (start.index, start.id, start.name) == (end.index, end.call.id, end.call.name) == (0, "call_0", "bash")
    assert end.call.arguments == {"command": "ls"}


# log-probabilities


def feed_with_logprobs(machine: OutputMachine, pieces: Pieces, parts: list[str | bytes], burst: int) -> list:
    ids = pieces.ids(*parts)
    entries = [TokenLogprob(i, "", -1.0, pieces.table[i]) for i in ids]
    events = []
    for at in range(0, len(ids), burst):
        events += machine.feed(ids[at : at + burst], entries[at : at + burst])
    return [*events, *machine.finish("stop")]


@pytest.mark.parametrize("burst", [1, 2, 3, 5, 50])
def test_logprobs_travel_with_the_text_of_their_tokens(burst):
    pieces = Pieces()
    machine = pieces.machine(thinking=True, tools=TOOLS, stops=("beta gamma",))
    parts: list[str | bytes] = [
        "hm",
        " so",
        "\n",
        "</think>",
        "\n\n",
        "A",
        b"\xf0\x9f",
        b"\x98\x80",
        " beta",
        " x",
        " <",
        "b",
        "\n\n",
    ]
    parts += ["<tool_call>", "\n<function=bash>\n", "</function>", "\n", "</tool_call>"]
    events = feed_with_logprobs(machine, pieces, parts, burst)
    reasoning = [e.bytes for event in events if isinstance(event, ReasoningDelta) for e in event.logprobs]
    answer = [e.bytes for event in events if isinstance(event, TextDelta) for e in event.logprobs]
    assert reasoning == [b"hm", b" so"]
    assert answer == [b"A", b"\xf0\x9f", b"\x98\x80", b" beta", b" x", b" <", b"b"]
    assert merged(events)[:2] == [("reasoning", "hm so"), ("text", "A😀 beta x <b")]


def test_logprobs_of_a_stop_string_are_left_out():
    pieces = Pieces()
    events = feed_with_logprobs(pieces.machine(stops=("beta gamma",)), pieces, ["a ", "beta", " gamma"], 1)
    assert [e.bytes for event in events for e in event.logprobs] == [b"a "]


# speed


def test_a_token_costs_less_than_twenty_microseconds():
    prose = [f"word{i} " if i % 9 else "x < y.\n" for i in range(6000)]
    body = [f"line {i}\n" for i in range(3000)]
    parts = ["think "] * 3000 + ["\n", "</think>", "\n\n", *prose, "<tool_call>", "\n<function=write_file>\n"]
    parts += ["<parameter=path>\n", "a", "\n</parameter>\n<parameter=content>\n", *body, "</parameter>\n</function>\n"]
    parts += ["</tool_call>"]
    pieces = Pieces()
    ids = pieces.ids(*parts)
    best = 1.0
    for _ in range(3):
        machine = pieces.machine(thinking=True, tools=TOOLS, stops=("\n\nHuman:", "</answer>", "User:"))
        begin = time.thread_time()
        for token in ids:
            machine.feed((token,))
        machine.finish("stop")
        best = min(best, (time.thread_time() - begin) / len(ids))
    print(f"{best * 1e6:.1f} µs per token")
    assert best < 60e-6  # 20 on an idle core; three times that is a fault even on a busy one


def test_endless_blanks_stay_cheap():
    """A model that loops on newlines, wherever it is, must not slow down with every one of them."""
    heads = ["", "a", "<tool_call>", "<tool_call>\n<function=bash>"]
    opened = "<tool_call>\n<function=bash>\n<parameter=command>"
    heads += [opened, opened + "x</parameter>", opened + "x\n</parameter>\n</function>"]
    heads += [opened + "x\n</parameter>\n</function>\n</tool_call>"]
    for thinking in (True, False):
        for head in heads:
            pieces = Pieces()
            first, newline, last = pieces.ids(head, "\n", "end")
            machine = pieces.machine(thinking=thinking, tools=TOOLS, stops=("\n\nUser:",))
            machine.feed((first,))
            begin = time.thread_time()
            for _ in range(4000):
                machine.feed((newline,))
            machine.feed((last,))
            machine.finish("stop")
            assert time.thread_time() - begin < 1.0, head
