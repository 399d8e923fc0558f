"""A LlamaIndex program that was written for a model behind Ollama: one line is another, the rest stays as it was."""

from llama_index.core.llms import ChatMessage

# from llama_index.llms.ollama import Ollama as Model
from llama_index.llms.ninfer import NInfer as Model

llm = Model(model="demo", temperature=0, thinking=False, context_window=2048)

print(llm.complete("What is the capital of France?"))
for part in llm.stream_chat([ChatMessage(role="user", content="What is the capital of Italy?")]):
    print(part.delta, end="", flush=True)
print()
