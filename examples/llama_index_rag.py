"""Retrieval with LlamaIndex: notes found by keyword, given to the model with the question. Needs no embedding model."""

from llama_index.core import SimpleKeywordTableIndex, set_global_tokenizer
from llama_index.core.schema import TextNode
from llama_index.llms.ninfer import NInfer

NOTES = ["The office closes at six on Fridays.", "The coffee machine is on the second floor.", "Ada leads the team."]

llm = NInfer(model="demo", temperature=0, thinking=False, max_tokens=60)
set_global_tokenizer(llm.tokenizer)  # count with the model's own tokenizer
index = SimpleKeywordTableIndex([TextNode(text=note) for note in NOTES], llm=llm)
answer = index.as_query_engine(llm=llm, response_mode="compact").query("Where is the coffee machine?")
print("found:", answer.source_nodes[0].text)
print(answer)
