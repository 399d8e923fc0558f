"""The host side of a request: any cutting of the output into bursts gives the same events, counts and end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_core.runtime.handle import RequestHandle
from ninfer_core.runtime.session import Session
from ninfer_core.testing import ScriptedEngine
from ninfer_core.types import Completion, Finish, Message, Request, Tool

FRONTEND = ScriptedEngine("").frontend
CLOSE = FRONTEND.tokenizer.id("</think>")
TOOL = Tool("bash", "", {"type": "object", "properties": {"command": {"type": "string"}}})
CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls é\n</parameter>\n</function>\n</tool_call>"
OUTPUTS = [
    "Thoughts, some. 😀\n</think>\n\nAn answer with STOP inside.<|im_end|>",
    f"Hm.\n</think>\n\nFirst:\n\n{CALL}\n{CALL}<|im_end|>",
    f"No closing tag {CALL}<|im_end|>",
    "Thinking without an end",
    "</think>\n\n<|im_end|>",
]


def play(ids, sizes, limit, **fields) -> tuple[Completion, int]:
    """Deliver the ids in bursts, as the engine does: what was not kept comes again, or is skipped behind a forced end."""
    request = Request((Message("user", "x"),), **fields)
    prompt = FRONTEND.prepare(request)
    handle = RequestHandle(request)
    session = Session(handle, prompt, FRONTEND.machine(request, prompt), limit=limit, seed=0)
    at, turn, kept_in_all = 0, 0, 0
    while not session.ended and at < len(ids):
        size = sizes[turn % len(sizes)]
        turn += 1
        burst = ids[at : at + size]
        kept = session.deliver(burst, drafted=len(burst) - 1)
        assert 0 <= kept <= len(burst)
        at += kept
        kept_in_all += kept
        while session.forced and not session.ended:
            kept_in_all += session.deliver(session.forced)
            at = ids.index(CLOSE) + 1 if CLOSE in ids else len(ids)
    session.finish("stop")
    return handle.result(0), kept_in_all


@settings(max_examples=200, deadline=None)
@given(
    output=st.sampled_from(OUTPUTS),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    limit=st.sampled_from([1, 3, 10, 20, 40, 1000]),
    budget=st.sampled_from([None, 1, 3, 8, 100]),
    stop=st.sampled_from([(), ("STOP",), ("answer with", "with")]),
    parallel=st.booleans(),
)
def test_bursts_change_nothing(output, sizes, limit, budget, stop, parallel):
    ids = FRONTEND.tokenizer.encode(output)
    fields = {"tools": (TOOL,), "stop": stop, "thinking_budget": budget, "parallel_tool_calls": parallel}
    (one, kept_one), (many, kept_many) = play(ids, [1], limit, **fields), play(ids, sizes, limit, **fields)
    strip = [(c.name, c.arguments) for c in one.message.tool_calls]
    assert [(c.name, c.arguments) for c in many.message.tool_calls] == strip
    assert (many.message.text, many.message.reasoning) == (one.message.text, one.message.reasoning)
    assert (many.finish_reason, many.stop_sequence, many.truncated_call) == (
        one.finish_reason,
        one.stop_sequence,
        one.truncated_call,
    )
    assert many.usage.completion_tokens == one.usage.completion_tokens == kept_one == kept_many <= limit
    assert many.usage.reasoning_tokens == one.usage.reasoning_tokens
    assert budget is None or many.usage.reasoning_tokens <= budget
    usage = many.usage
    assert usage.accepted_tokens == sum(usage.accepted_by_position) <= usage.drafted_tokens
    assert one.usage.drafted_tokens == 0


def test_an_end_is_reported_once():
    request = Request((Message("user", "x"),), thinking=False)
    prompt = FRONTEND.prepare(request)
    handle = RequestHandle(request)
    session = Session(handle, prompt, FRONTEND.machine(request, prompt), limit=2, seed=0)
    session.deliver(FRONTEND.tokenizer.encode("ab"))
    session.finish("stop")
    session.fail(RuntimeError("late"))
    events = list(handle)
    assert [e.reason for e in events if isinstance(e, Finish)] == ["length"] and handle.error is None
