"""A LlamaIndex agent with a tool."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.llms.ninfer import NInfer


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"It is sunny in {city}."


async def main() -> None:
    llm = NInfer(model="demo", temperature=0, thinking=False, max_tokens=100)
    agent = FunctionAgent(tools=[get_weather], llm=llm, initial_tool_choice="get_weather")
    run = agent.run("What is the weather in Oslo?", max_iterations=4, early_stopping_method="generate")
    async for event in run.stream_events():
        if isinstance(event, ToolCallResult):
            print("tool:", event.tool_name, event.tool_kwargs, "->", event.tool_output.content)
    print("answer:", await run)


asyncio.run(main())
