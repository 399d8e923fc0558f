"""LlamaIndex LLM of ninfer: `NInfer`, in this process or over HTTP."""

from ninfer_core.errors import MissingDependencyError

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("llama-index-core", "llama-index", "llama_index.llms.ninfer") from error

from llama_index.llms.ninfer.base import NInfer

__all__ = ["NInfer"]
