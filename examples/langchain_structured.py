"""Structured extraction with LangChain: the answer is constrained to the schema while it is decoded."""

from langchain_ninfer import ChatNInfer
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person in a text."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


model = ChatNInfer(model="demo", temperature=0, reasoning=False, max_tokens=100)
person = model.with_structured_output(Person).invoke("Extract the person: Ada is 36 years old.")
print(repr(person))
