"""LangChain agents, graphs and factories over `ChatNInfer`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain.chat_models import base, init_chat_model
from langchain_ninfer import ChatNInfer, register
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel

from ninfer_core.errors import UnsupportedError
from ninfer_core.testing import Delay, Reply, Script, ScriptedEngine, Tokens
from ninfer_core.types import Request, ToolCall


class Sum(BaseModel):
    """A sum."""

    total: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def answered(request: Request) -> bool:
    return any(message.role == "tool" for message in request.messages)


CALL = Script(Reply("", "I must add.", [ToolCall("", "add", {"a": 1, "b": 2})]))
USER = {"messages": [("user", "1+2?")]}


def test_an_agent_runs_its_tool_and_keeps_the_reasoning() -> None:
    engine = ScriptedEngine(Script("It is 3.", when=answered), CALL)
    agent = create_agent(ChatNInfer.from_engine(engine), tools=[add], system_prompt="Add.")
    messages = agent.invoke(USER)["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[2].content == "3" and messages[3].text == "It is 3."
    past = engine.requests[1].messages[2]
    assert past.reasoning == "I must add." and past.tool_calls[0].arguments == {"a": 1, "b": 2}
    assert engine.requests[0].messages[0].role == "system"


@pytest.mark.parametrize("tools", [[add], []], ids=["tools", "no-tools"])
def test_the_profile_makes_agents_send_the_schema_with_the_tools(tools: list[Any]) -> None:
    def final(request: Request) -> bool:
        return answered(request) or not request.tools

    engine = ScriptedEngine(Script('{"total": 3}', when=final), CALL)
    agent = create_agent(ChatNInfer.from_engine(engine), tools=tools, response_format=Sum)
    assert agent.invoke(USER)["structured_response"] == Sum(total=3)
    assert all(request.response_format.kind == "json_schema" for request in engine.requests)
    assert all(request.tool_choice.mode == "auto" for request in engine.requests)


def test_a_tool_strategy_forces_a_call() -> None:
    engine = ScriptedEngine(Reply("", tool_calls=[ToolCall("", "Sum", {"total": 3})]))
    agent = create_agent(ChatNInfer.from_engine(engine), tools=[], response_format=ToolStrategy(Sum))
    assert agent.invoke(USER)["structured_response"] == Sum(total=3)
    assert engine.requests[0].tool_choice.mode == "required"


async def test_a_graph_streams_tokens() -> None:
    engine = ScriptedEngine([Tokens("why"), "</think>", Tokens("A"), Delay(0.02), Tokens("B")])
    model = ChatNInfer.from_engine(engine)

    async def answer(state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    chunks = [chunk async for chunk, _ in graph.compile().astream(USER, stream_mode="messages")]
    assert [chunk.text for chunk in chunks if chunk.text] == ["A", "B"]
    assert any(block["type"] == "reasoning" for chunk in chunks for block in chunk.content_blocks)
    kinds = [event["event"] async for event in graph.compile().astream_events(USER, version="v2")]
    assert "on_chat_model_stream" in kinds and "on_chat_model_end" in kinds


def test_model_strings_after_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dict(base._BUILTIN_PROVIDERS)
    monkeypatch.setattr(base, "_BUILTIN_PROVIDERS", table)
    with pytest.raises(ValueError, match="ninfer"):
        init_chat_model("ninfer:demo")
    register()
    model = init_chat_model("ninfer:demo", temperature=0.5)
    assert isinstance(model, ChatNInfer) and (model.model, model.temperature) == ("demo", 0.5)
    table["ollama"] = "another shape"
    with pytest.raises(UnsupportedError, match="instance"):
        register()


def test_model_strings_in_agents_and_configurable_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from ninfer_core import adapter

    monkeypatch.setattr(base, "_BUILTIN_PROVIDERS", dict(base._BUILTIN_PROVIDERS))
    register()
    engine = ScriptedEngine(Script("It is 3.", when=answered), CALL, name="one", aliases=["two"])
    monkeypatch.setitem(adapter._SHARED, "default", engine)
    assert create_agent("ninfer:one", tools=[add]).invoke(USER)["messages"][-1].text == "It is 3."
    model = init_chat_model(configurable_fields=("model", "model_provider", "temperature"))
    chosen = {"configurable": {"model": "ninfer:two", "temperature": 0.25}}
    made = model.bind_tools([add]).invoke("hi", chosen)
    assert made.response_metadata["model_name"] == "two" and engine.requests[-1].sampling.temperature == 0.25


def test_settings_of_middleware_reach_the_engine_and_old_results_are_cleared_by_count() -> None:
    from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware, ModelRequest, wrap_model_call

    @wrap_model_call
    def colder(request: ModelRequest, handler: Any) -> Any:
        return handler(request.override(model_settings={"temperature": 0.25, "reasoning": False}))

    engine = ScriptedEngine(Script("It is 3.", when=answered), CALL)
    editing = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=0)], token_count_method="model")
    agent = create_agent(ChatNInfer.from_engine(engine), tools=[add], middleware=[colder, editing])
    assert agent.invoke(USER)["messages"][-1].text == "It is 3."
    assert [(r.sampling.temperature, r.thinking) for r in engine.requests] == [(0.25, False)] * 2
    assert engine.requests[1].messages[-1].text == "[cleared]", "the model's own count passed the trigger"


def test_retries_of_middleware_follow_errors_that_pass() -> None:
    from langchain.agents.middleware import ModelRetryMiddleware
    from langchain_core.exceptions import ModelRateLimitError

    from ninfer_core.errors import EngineBusyError
    from ninfer_core.testing import Refuse

    engine = ScriptedEngine(Script(Refuse(EngineBusyError("full", retry_after=0.01)), times=1), "Hello!")
    retry = ModelRetryMiddleware(max_retries=1, retry_on=(ModelRateLimitError,), initial_delay=0.001, jitter=False)
    agent = create_agent(ChatNInfer.from_engine(engine), tools=[], middleware=[retry])
    assert agent.invoke(USER)["messages"][-1].text == "Hello!"


DEEP = {"context_length": 200_000, "name": "scripted"}


def test_a_deep_agent_by_instance() -> None:
    from deepagents import create_deep_agent

    engine = ScriptedEngine(Script("It is 3.", when=answered), CALL, **DEEP)
    messages = create_deep_agent(model=ChatNInfer.from_engine(engine), tools=[add]).invoke(USER)["messages"]
    assert messages[-1].text == "It is 3." and [m.content for m in messages if m.type == "tool"] == ["3"]
    first = engine.requests[0]
    assert {"add", "read_file", "write_file"} <= {tool.name for tool in first.tools}
    assert len(engine.render(first)) > 10_000, "the default prompt and tools reach the model whole"
    assert engine.requests[1].messages[: len(first.messages)] == first.messages, "the prefix stays for the cache"


async def test_a_deep_agent_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours is imported or registered by the user; the string names the provider."""
    from deepagents import create_deep_agent

    from ninfer_core import adapter

    (point,) = entry_points(group="deepagents.provider_profiles", name="ninfer")
    assert point.value == "langchain_ninfer.registration:register_deepagents"
    monkeypatch.setattr(base, "_BUILTIN_PROVIDERS", dict(base._BUILTIN_PROVIDERS))
    engine = ScriptedEngine(Script("It is 3.", when=answered), CALL, **DEEP)
    monkeypatch.setitem(adapter._SHARED, "default", engine)
    agent = create_deep_agent(model="ninfer:scripted", tools=[add])
    messages = (await agent.ainvoke(USER))["messages"]
    assert messages[-1].text == "It is 3." and len(engine.requests) == 2


def test_a_deep_agent_is_told_of_an_overflow() -> None:
    from deepagents import create_deep_agent
    from langchain_core.exceptions import ContextOverflowError

    engine = ScriptedEngine("It is 3.", context_length=2000)
    with pytest.raises(ContextOverflowError):
        create_deep_agent(model=ChatNInfer.from_engine(engine), tools=[add]).invoke(USER)


def test_an_agent_on_the_demo_model() -> None:
    """Real generation: the call is forced once, the tool runs, and the model answers."""
    from langchain.agents.middleware import ModelRequest, wrap_model_call

    seen: list[str] = []

    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        seen.append(city)
        return f"It is sunny in {city}."

    @wrap_model_call
    def first_call_then_answer(request: ModelRequest, handler: Any) -> Any:
        return handler(request.override(tool_choice="none" if seen else "get_weather"))

    model = ChatNInfer(model="demo", temperature=0, reasoning=False, max_tokens=80)
    agent = create_agent(model, tools=[get_weather], middleware=[first_call_then_answer])
    messages = agent.invoke({"messages": [("user", "What is the weather in Oslo?")]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert len(seen) == 1 and messages[-1].text
