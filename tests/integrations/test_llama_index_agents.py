"""LlamaIndex agents over `NInfer`: FunctionAgent, AgentWorkflow, ReActAgent, structured agents."""

from __future__ import annotations

from typing import Any

from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.llms.ninfer import NInfer
from pydantic import BaseModel

from ninfer_core.testing import Reply, Script, ScriptedEngine
from ninfer_core.types import Request, ToolCall

RAN: list[tuple[int, int]] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    RAN.append((a, b))
    return a + b


def answered(request: Request) -> bool:
    return any(message.role == "tool" for message in request.messages)


def calls(*names: str, reasoning: str | None = None, **arguments: Any) -> Reply:
    return Reply("", reasoning, [ToolCall("", name, arguments) for name in names])


async def test_function_agent_runs_equal_calls_and_streams_thinking() -> None:
    RAN.clear()
    engine = ScriptedEngine(
        Script(Reply("It is 3."), when=answered), Script(calls("add", "add", reasoning="I must add.", a=1, b=2))
    )
    agent = FunctionAgent(tools=[add], llm=NInfer.from_engine(engine), initial_tool_choice="add", system_prompt="Add.")
    run = agent.run("What is 1 + 2?")
    thoughts = [event.thinking_delta or "" async for event in run.stream_events() if isinstance(event, AgentStream)]
    assert "It is 3." in str(await run)
    assert RAN == [(1, 2), (1, 2)] and "".join(thoughts) == "I must add."
    assert engine.requests[0].tool_choice.names == ("add",)
    past = next(message for message in engine.requests[1].messages if message.role == "assistant")
    assert past.reasoning == "I must add." and len(past.tool_calls) == 2


async def test_agent_workflow_hands_off() -> None:
    first = Script(calls("handoff", to_agent="two", reason="it knows"), times=1)
    engine = ScriptedEngine(first, "I am the second.")
    llm = NInfer.from_engine(engine)
    one = FunctionAgent(name="one", description="first", tools=[add], llm=llm, can_handoff_to=["two"])
    two = FunctionAgent(name="two", description="second", tools=[add], llm=llm)
    result = await AgentWorkflow(agents=[one, two], root_agent="one").run(user_msg="Hello")
    assert "second" in str(result)
    assert [tool.name for tool in engine.requests[0].tools] == ["add", "handoff"]


async def test_structured_agent() -> None:
    class Sum(BaseModel):
        total: int

    engine = ScriptedEngine(
        Script('{"total": 3}', when=lambda request: request.response_format is not None),
        Script(Reply("It is 3."), when=answered),
        Script(calls("add", a=1, b=2)),
    )
    agent = FunctionAgent(tools=[add], llm=NInfer.from_engine(engine), output_cls=Sum)
    result = await agent.run("What is 1 + 2?")
    assert result.get_pydantic_model(Sum) == Sum(total=3)


async def test_react_agent_thinks_without_leaking() -> None:
    RAN.clear()
    step = 'Thought: I need a tool.\nAction: add\nAction Input: {"a": 1, "b": 2}'
    engine = ScriptedEngine(
        Script(Reply(step, "Action: nonsense"), times=1),
        Reply("Thought: I can answer without using any more tools.\nAnswer: 3", "Answer: 4"),
    )
    result = await ReActAgent(tools=[add], llm=NInfer.from_engine(engine)).run("What is 1 + 2?")
    assert str(result).strip() == "3" and RAN == [(1, 2)]
