"""LangChain chat model of ninfer: `ChatNInfer`, in this process or over HTTP."""

from ninfer_core.errors import MissingDependencyError

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("langchain-core", "langchain", "langchain_ninfer") from error

from ninfer_core import __version__

from .chat_models import ChatNInfer
from .registration import register

__all__ = ["ChatNInfer", "__version__", "register"]
