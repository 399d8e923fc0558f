"""Errors that are both LangChain's and ninfer's, so that code which knows either catches them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as lc

from ninfer_core import errors


class ChatContextOverflowError(lc.ContextOverflowError, errors.ContextOverflowError):
    """The prompt is longer than the served context: `n_prompt_tokens` > `n_ctx`."""


class ChatModelNotFoundError(lc.ModelNotFoundError, errors.ModelNotFoundError):
    """No model of that name is served or installed."""


class ChatAuthenticationError(lc.ModelAuthenticationError, errors.AuthenticationError):
    """The server wants another API key."""


class ChatPermissionDeniedError(lc.ModelPermissionDeniedError, errors.PermissionDeniedError):
    """The server refuses this client."""


class ChatBusyError(lc.ModelRateLimitError, errors.EngineBusyError):
    """The queue is full; `retry_after` is a hint in seconds."""


class ChatTimeoutError(lc.ModelTimeoutError, errors.RequestTimeoutError):
    """The request's own deadline passed."""


class ChatConnectionError(lc.ModelConnectionError, errors.ServerUnreachableError):
    """No server answers, or the connection broke."""


class ChatUnsupportedError(lc.ModelInvalidRequestError, errors.UnsupportedError):
    """A well-formed request for something this model or build cannot do."""


class ChatMediaError(lc.ModelInvalidRequestError, errors.MediaError):
    """An image or video that cannot be used."""


class ChatSchemaError(lc.ModelInvalidRequestError, errors.SchemaError):
    """A schema that cannot be enforced; `path` points at the keyword."""


class ChatInvalidRequestError(lc.ModelInvalidRequestError, errors.InvalidRequestError):
    """The request is wrong; `param` names the field."""


class ChatEngineError(lc.ModelAPIError, errors.EngineError):
    """The engine cannot serve; `__cause__` is its own error."""


class ChatError(lc.ModelError, errors.NinferError):
    """Any other failure; `__cause__` is the engine's own error."""


_PAIRS: tuple[tuple[type[errors.NinferError], type[errors.NinferError]], ...] = (
    (errors.ContextOverflowError, ChatContextOverflowError),
    (errors.ModelNotFoundError, ChatModelNotFoundError),
    (errors.AuthenticationError, ChatAuthenticationError),
    (errors.PermissionDeniedError, ChatPermissionDeniedError),
    (errors.EngineBusyError, ChatBusyError),
    (errors.RequestTimeoutError, ChatTimeoutError),
    (errors.ServerUnreachableError, ChatConnectionError),
    (errors.UnsupportedError, ChatUnsupportedError),
    (errors.MediaError, ChatMediaError),
    (errors.SchemaError, ChatSchemaError),
    (errors.InvalidRequestError, ChatInvalidRequestError),
    (errors.EngineError, ChatEngineError),
    (errors.NinferError, ChatError),
)


def translate(error: errors.NinferError) -> errors.NinferError:
    """The error as one that LangChain's middleware understands too; attributes are kept."""
    if isinstance(error, lc.LangChainException):
        return error
    kind = next(pair for known, pair in _PAIRS if isinstance(error, known))
    # Both families' constructors are passed over: each wants other arguments. OSError alone keeps its values elsewhere.
    base = OSError if issubclass(kind, OSError) else Exception
    made: errors.NinferError = base.__new__(kind)
    made.args = error.args
    made.__dict__.update(error.__dict__)
    made.code = error.code
    made.is_retryable = error.retryable  # type: ignore[attr-defined]
    return made


@contextmanager
def translated() -> Iterator[None]:
    """Engine errors inside the block leave it as LangChain errors."""
    try:
        yield
    except errors.NinferError as error:
        made = translate(error)
        if made is error:
            raise
        raise made from error
