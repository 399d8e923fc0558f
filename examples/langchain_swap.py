"""A LangChain program that was written for a model behind Ollama: one line is another, the rest stays as it was."""

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

# from langchain_ollama import ChatOllama as Chat
from langchain_ninfer import ChatNInfer as Chat

model = Chat(model="demo", temperature=0, seed=1, reasoning=False)
chain = ChatPromptTemplate.from_template("What is the capital of {country}?") | model | StrOutputParser()

print(chain.invoke({"country": "France"}))
for piece in chain.stream({"country": "Italy"}):
    print(piece, end="", flush=True)
print()
