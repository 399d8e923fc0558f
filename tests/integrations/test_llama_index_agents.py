"""LlamaIndex agents over `NInfer`: FunctionAgent, AgentWorkflow, ReActAgent, structured agents."""

from __future__ import annotations

from typing import Any

from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.ninfer import NInfer
from pydantic import BaseModel, Field

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


async def test_a_function_agent_on_the_demo_model() -> None:
    """Real generation with two tools: the first call is forced, it runs, and the model answers."""
    ran: list[str] = []

    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        ran.append(city)
        return f"It is sunny in {city}."

    llm = NInfer(model="demo", temperature=0, thinking=False, max_tokens=60)
    agent = FunctionAgent(tools=[get_weather, add], llm=llm, initial_tool_choice="get_weather")
    run = agent.run("What is the weather in Oslo?", max_iterations=3, early_stopping_method="generate")
    assert str(await run).strip() and ran and all(isinstance(city, str) and city for city in ran)


def test_a_structured_llm_on_the_demo_model() -> None:
    class City(BaseModel):
        name: str = Field(max_length=20)
        capital: bool

    llm = NInfer(model="demo", temperature=0, thinking=False, max_tokens=60).as_structured_llm(City)
    made = llm.chat([ChatMessage(role="user", content="Is Paris a capital?")])
    assert isinstance(made.raw, City) and City.model_validate_json(made.message.content or "") == made.raw
