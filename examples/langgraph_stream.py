"""A langgraph of one node, streamed token by token."""

from langchain_ninfer import ChatNInfer
from langgraph.graph import END, START, MessagesState, StateGraph

model = ChatNInfer(model="demo", temperature=0, reasoning=False, max_tokens=60)


def answer(state: MessagesState) -> dict[str, list]:
    """Add the model's answer to the conversation."""
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("answer", answer)
graph.add_edge(START, "answer")
graph.add_edge("answer", END)

for chunk, _ in graph.compile().stream({"messages": [("user", "What is 2 + 2?")]}, stream_mode="messages"):
    print(chunk.text, end="", flush=True)
print()
