"""Errors on the wire: one mapping from exceptions to a status and a code, and one shape per API."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ninfer_core.errors import (
    ContextOverflowError,
    DeviceFaultError,
    EngineBusyError,
    EngineClosedError,
    EngineFailedError,
    InvalidRequestError,
    ModelNotFoundError,
    NinferError,
    NotFiniteError,
    RequestCancelledError,
    RequestTimeoutError,
)

Dialect = Literal["openai", "anthropic", "ollama"]

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
INTERNAL = "the server failed to process this request; its log has the details"


class HttpError(Exception):
    """An error whose status the server chose itself (authentication, routing, size limits)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Fault:
    """An error ready for any of the three shapes; `detail` is for the server's own log only."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    overflow: tuple[int, int] | None = None
    detail: str | None = None


def fault_of(error: BaseException) -> Fault:
    """The status, code and text of an exception; nothing internal leaves through an unexpected one."""
    if isinstance(error, HttpError):
        return Fault(error.status, error.message, error.code, error.param, error.headers)
    if isinstance(error, ContextOverflowError):
        counts = (error.n_prompt_tokens, error.n_ctx)
        extra = {"n_prompt_tokens": counts[0], "n_ctx": counts[1]}
        return Fault(400, error.message, error.code, error.param, extra=extra, overflow=counts)
    if isinstance(error, EngineBusyError):
        headers = _retry_after(error.retry_after)
        return Fault(503, error.message, "service_unavailable", headers=headers)
    if isinstance(error, (RequestTimeoutError, RequestCancelledError)):
        return Fault(503, error.message, error.code, headers=_retry_after(1.0))
    if isinstance(error, DeviceFaultError):
        return Fault(503, error.message, error.code, headers=_retry_after(2.0))
    if isinstance(error, NotFiniteError):
        return Fault(500, error.message, error.code, headers={"x-should-retry": "false"})
    if isinstance(error, EngineClosedError):
        return Fault(503, error.message, "service_unavailable", headers={"x-should-retry": "false"})
    if isinstance(error, ModelNotFoundError):
        return Fault(404, error.message, error.code, error.param or "model")
    if isinstance(error, InvalidRequestError):
        return Fault(400, error.message, error.code, error.param)
    if isinstance(error, NinferError) and not isinstance(error, EngineFailedError):
        return Fault(500, error.message, "server_error", headers={"x-should-retry": "false"})
    return Fault(500, INTERNAL, "server_error", detail=f"{type(error).__name__}: {error}")


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, round(seconds * 1000)))}


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Which API a request speaks: by path, and for the shared model list by the Anthropic version header."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path == "/api" or path.startswith("/api/"):
        return "ollama"
    if path.startswith("/v1/models") and "anthropic-version" in headers:
        return "anthropic"
    return "openai"


def status_of(fault: Fault, dialect: Dialect) -> int:
    """The HTTP status; Anthropic's API says "overloaded" with 529."""
    return 529 if dialect == "anthropic" and fault.status == 503 else fault.status


def body_of(fault: Fault, dialect: Dialect, request_id: str) -> dict[str, Any]:
    """The error object in the shape of an API."""
    if dialect == "ollama":
        text = fault.message
        if fault.overflow:
            text = f"the input length exceeds the context length: {fault.overflow[0]} tokens > {fault.overflow[1]}"
        elif fault.code == "service_unavailable" and "Retry-After" in fault.headers:
            text = f"server busy, please try again: {fault.message}"
        return {"error": text}
    if dialect == "anthropic":
        text = fault.message
        if fault.overflow:
            text = f"prompt is too long: {fault.overflow[0]} tokens > {fault.overflow[1]} maximum"
        elif fault.param and not text.startswith(fault.param):
            text = f"{fault.param}: {text}"
        kind = _ANTHROPIC_TYPES.get(status_of(fault, dialect), "api_error")
        return {"type": "error", "error": {"type": kind, "message": text, **fault.extra}, "request_id": request_id}
    kind = _OPENAI_TYPES.get(fault.status, "server_error")
    error = {"message": fault.message, "type": kind, "param": fault.param, "code": fault.code, **fault.extra}
    return {"error": error}
