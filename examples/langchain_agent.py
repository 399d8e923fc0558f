"""A LangChain agent with a tool."""

from langchain.agents import create_agent
from langchain_ninfer import ChatNInfer


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"It is sunny in {city}."


model = ChatNInfer(model="demo", temperature=0, reasoning=False, max_tokens=100)
agent = create_agent(model, tools=[get_weather])
# The limit ends an agent that goes on calling tools, which a small model may do.
for step in agent.stream(
    {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}]},
    config={"recursion_limit": 4},
    stream_mode="values",
):
    step["messages"][-1].pretty_print()
    if len(step["messages"]) >= 4:
        break
