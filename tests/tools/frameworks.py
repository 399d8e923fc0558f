"""Runs client frameworks against the scripted server: litellm, openai-agents and the LangChain chat models.

    pip install litellm openai-agents langchain-openai langchain-anthropic langchain-ollama
    python -m tests.tools.frameworks

They pin each other's versions too tightly for the test environment, so they run by hand, in an environment of their
own. Known gap: litellm has no error class for an overflow that an Ollama server reports.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ninfer_core.testing import Reply, Script, ScriptedEngine
from ninfer_core.types import Request, ToolCall
from tests.server.conftest import Running, running

MESSAGES = [{"role": "user", "content": "2+3?"}]
LONG = [{"role": "user", "content": "a" * 9000}]
NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
ARGUMENTS = {"a": 2, "b": 3}
ANSWER = "The answer is 5."
Checks = Iterator[tuple[str, Callable[[], bool]]]


def answer(request: Request) -> Reply:
    """A call where there are tools and no result yet, else the answer."""
    if request.tools and not any(message.role == "tool" for message in request.messages):
        return Reply("", reasoning="hm", tool_calls=[ToolCall("", request.tools[0].name, ARGUMENTS)])
    return Reply(ANSWER, reasoning="hm")


def raises(call: Callable[[], Any], kind: type[BaseException]) -> bool:
    """Whether a call fails in this way."""
    try:
        call()
    except kind:
        return True
    return False


def litellm_checks(server: Running) -> Checks:
    """Answers, streams, tools and error classes through litellm's three adapters."""
    import litellm

    litellm.suppress_debug_info = True
    for provider, base in (("openai", "/v1"), ("ollama_chat", ""), ("anthropic", "")):
        fixed: dict[str, Any] = {
            "model": f"{provider}/scripted",
            "api_base": server.url + base,
            "api_key": "none",
            "max_retries": 0,
        }

        def whole(fixed: dict[str, Any] = fixed) -> bool:
            made = litellm.completion(messages=MESSAGES, **fixed)
            return bool(made.choices[0].message.content == ANSWER and made.usage.prompt_tokens > 5)

        def streamed(fixed: dict[str, Any] = fixed) -> bool:
            chunks = list(litellm.completion(messages=MESSAGES, stream=True, **fixed))
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER and len(chunks) > 2

        def tools(stream: bool, fixed: dict[str, Any] = fixed) -> bool:
            made = litellm.completion(messages=MESSAGES, tools=TOOLS, stream=stream, **fixed)
            made = litellm.stream_chunk_builder(list(made)) if stream else made
            return bool(json.loads(made.choices[0].message.tool_calls[0].function.arguments) == ARGUMENTS)

        def overflow(fixed: dict[str, Any] = fixed) -> bool:
            return raises(lambda: litellm.completion(messages=LONG, **fixed), litellm.ContextWindowExceededError)

        def unknown(fixed: dict[str, Any] = fixed, name: str = f"{provider}/absent") -> bool:
            body = {**fixed, "model": name}
            return raises(lambda: litellm.completion(messages=MESSAGES, **body), litellm.NotFoundError)

        yield f"litellm {provider} whole", whole
        yield f"litellm {provider} streamed", streamed
        yield f"litellm {provider} tools", lambda tools=tools: tools(False)
        yield f"litellm {provider} tools streamed", lambda tools=tools: tools(True)
        yield f"litellm {provider} unknown model", unknown
        if provider != "ollama_chat":
            yield f"litellm {provider} overflow", overflow


def agents_checks(server: Running) -> Checks:
    """A tool loop, whole and streamed, over both OpenAI interfaces."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):

        def loop(kind: Any = kind) -> bool:
            async def go() -> bool:
                client = AsyncOpenAI(base_url=server.url + "/v1", api_key="none")
                model = kind(model="scripted", openai_client=client)
                agent = agents.Agent(name="x", instructions="Be brief.", model=model, tools=[agents.function_tool(add)])
                whole = await agents.Runner.run(agent, "2+3?")
                streamed = agents.Runner.run_streamed(agent, "2+3?")
                events = [event async for event in streamed.stream_events()]
                return bool(whole.final_output == streamed.final_output == ANSWER and len(events) > 5)

            return asyncio.run(go())

        yield f"openai-agents {kind.__name__}", loop


def langchain_checks(server: Running) -> Checks:
    """Answers, streams and tools through LangChain's own chat models."""
    from langchain_anthropic import ChatAnthropic
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI

    keyed: dict[str, Any] = {"model": "scripted", "api_key": "none"}
    models: dict[str, Any] = {
        "ChatOpenAI": ChatOpenAI(base_url=server.url + "/v1", stream_usage=True, **keyed),
        "ChatOpenAI responses": ChatOpenAI(base_url=server.url + "/v1", use_responses_api=True, **keyed),
        "ChatAnthropic": ChatAnthropic(base_url=server.url, max_tokens=100, **keyed),
        "ChatOllama": ChatOllama(base_url=server.url, model="scripted", validate_model_on_init=True),
    }
    for name, model in models.items():

        def summed(model: Any) -> Any:
            total, *rest = model.stream("2+3?")
            for chunk in rest:
                total = total + chunk
            return total

        def whole(model: Any = model) -> bool:
            made = model.invoke("2+3?")
            return bool(made.text == ANSWER and made.usage_metadata["input_tokens"] > 5)

        def streamed(model: Any = model, summed: Any = summed) -> bool:
            made = summed(model)
            return bool(made.text == ANSWER and made.usage_metadata["output_tokens"] > 2)

        def tools(model: Any = model, summed: Any = summed) -> bool:
            bound = model.bind_tools(TOOLS)
            calls = [*bound.invoke("2+3?").tool_calls, *summed(bound).tool_calls]
            return [call["args"] for call in calls] == [ARGUMENTS, ARGUMENTS]

        yield f"langchain {name} whole", whole
        yield f"langchain {name} streamed", streamed
        yield f"langchain {name} tools", tools


def main() -> int:
    """Run everything; 1 if anything failed."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    failed = 0
    with running(ScriptedEngine(Script(answer, burst=4), context_length=8192)) as server:
        for checks in (litellm_checks, agents_checks, langchain_checks):
            for name, check in checks(server):
                try:
                    told = "ok  " if check() else "FAIL"
                except Exception as error:
                    told = f"FAIL {type(error).__name__}: {str(error)[:300]}"
                failed += not told.startswith("ok")
                print(told, name, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
