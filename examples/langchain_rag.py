"""Retrieval with LangChain: notes in a vector store, found by hashed words, given to the model with the question."""

import hashlib
import math

from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ninfer import ChatNInfer

NOTES = ["The office closes at six on Fridays.", "The coffee machine is on the second floor.", "Ada leads the team."]


class HashedWords(Embeddings):
    """Bag-of-words vectors: each word counts in a place given by its hash. For real data use an embedding model."""

    def embed_query(self, text: str) -> list[float]:
        vector = [0.0] * 256
        for word in text.lower().replace("?", " ").replace(".", " ").split():
            vector[int.from_bytes(hashlib.sha256(word.encode()).digest()[:2]) % 256] += 1.0
        length = math.sqrt(sum(value * value for value in vector)) or 1.0
        return [value / length for value in vector]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


store = InMemoryVectorStore.from_texts(NOTES, HashedWords())
model = ChatNInfer(model="demo", temperature=0, reasoning=False, max_tokens=60)
prompt = ChatPromptTemplate.from_template("Context:\n{notes}\n\nQuestion: {question}")

question = "Where is the coffee machine?"
found = store.similarity_search(question, k=1)
print("found:", found[0].page_content)
print((prompt | model).invoke({"notes": found[0].page_content, "question": question}).text)
