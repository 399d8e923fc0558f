"""Retrieval with LlamaIndex: notes in a vector index, found by hashed words, given to the model with the question."""

import hashlib

from llama_index.core import VectorStoreIndex, set_global_tokenizer
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.llms.ninfer import NInfer

NOTES = ["The office closes at six on Fridays.", "The coffee machine is on the second floor.", "Ada leads the team."]


class HashedWords(BaseEmbedding):
    """Bag-of-words vectors: each word counts in a place given by its hash. For real data use an embedding model."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * 256
        for word in text.lower().replace("?", " ").replace(".", " ").split():
            vector[int.from_bytes(hashlib.sha256(word.encode()).digest()[:2]) % 256] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


llm = NInfer(model="demo", temperature=0, thinking=False, max_tokens=60)
set_global_tokenizer(llm.tokenizer)  # count with the model's own tokenizer
index = VectorStoreIndex([TextNode(text=note) for note in NOTES], embed_model=HashedWords())
prompt = PromptTemplate("Context:\n{context_str}\n\nQuestion: {query_str}")
engine = index.as_query_engine(llm=llm, similarity_top_k=1, response_mode="compact", text_qa_template=prompt)
answer = engine.query("Where is the coffee machine?")
print("found:", answer.source_nodes[0].text)
print(answer)
