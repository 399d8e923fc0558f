"""LlamaIndex: a streamed answer with its thinking apart, and a structured one."""

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.ninfer import NInfer
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person in a text."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


llm = NInfer(model="demo", temperature=0, max_tokens=120, thinking_budget=60)
for part in llm.stream_chat([ChatMessage(role="user", content="What is the capital of France?")]):
    print(part.additional_kwargs.get("thinking_delta", ""), part.delta, sep="", end="", flush=True)
print()
llm = NInfer(model="demo", temperature=0, thinking=False)
print(repr(llm.structured_predict(Person, PromptTemplate("Extract the person: {text}"), text="Ada is 36 years old.")))
