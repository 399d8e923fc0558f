"""A LangChain chain that streams to the terminal: prompt, model, text."""

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_ninfer import ChatNInfer

# For a server started with `ninfer serve`, add base_url="http://127.0.0.1:11434".
model = ChatNInfer(model="demo", temperature=0, reasoning=False, max_tokens=60)
prompt = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("user", "{question}")])
chain = prompt | model | StrOutputParser()

for piece in chain.stream({"question": "What is the capital of France?"}):
    print(piece, end="", flush=True)
print()
