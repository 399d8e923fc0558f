"""What travels between `Client` and a server: requests as bodies, stream lines as events, errors as exceptions."""

from __future__ import annotations

import base64
import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .errors import (
    AuthenticationError,
    ContextOverflowError,
    DeviceFaultError,
    EngineBusyError,
    EngineClosedError,
    EngineError,
    EngineFailedError,
    InvalidRequestError,
    MediaError,
    ModelNotFoundError,
    NinferError,
    NotFiniteError,
    PermissionDeniedError,
    RequestCancelledError,
    RequestTimeoutError,
    SchemaError,
    ServerUnreachableError,
    UnsupportedError,
)
from .types import (
    Event,
    Finish,
    FinishReason,
    Image,
    Message,
    ReasoningDelta,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    TextDelta,
    Timings,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolChoice,
    Usage,
    Video,
)

_SAMPLING = tuple(name for name in Sampling.__dataclass_fields__ if name != "logit_bias")
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


def check_address(base_url: str) -> tuple[str, str]:
    """The address of a server without a trailing `/v1`, and the Authorization header of the user in it ("" if none).

    The address has no user any more, so that no message, log or trace shows a password.

    Raises:
        InvalidRequestError: it is no http(s) address.
    """
    try:
        parts = urlsplit(base_url)
        known = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
        user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
    except ValueError:  # a port that is no number, a bracket that does not close, text that is not Unicode
        known = False
    if not known:
        shown = re.sub(r"^(\w+://)?.*@", r"\1***@", base_url, flags=re.DOTALL)
        raise InvalidRequestError(
            f"base_url is {shown!r}; it must begin with http:// or https:// and name a host, such as "
            "http://127.0.0.1:11434",
            param="base_url",
        )
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/").removesuffix("/v1")
    return address, "Basic " + base64.b64encode(user).decode() if user != b":" else ""


# --- requests ----------------------------------------------------------------------------------------------------


def request_body(request: Request, model: str | None) -> tuple[str, dict[str, Any]]:
    """The path and the JSON body of a request, streamed.

    Raises:
        UnsupportedError: a field that the server's interface cannot carry.
    """
    if request.add_vision_id:
        raise UnsupportedError("add_vision_id does not travel over HTTP; leave it out", param="add_vision_id")
    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if model is not None:
        body["model"] = model
    body |= {name: value for name in _SAMPLING if (value := getattr(request.sampling, name)) is not None}
    if request.sampling.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in request.sampling.logit_bias.items()}
    for name in ("max_tokens", "stop", "stop_token_ids", "ignore_eos"):
        value = getattr(request, name)
        if value:
            body[name] = list(value) if isinstance(value, tuple) else value
    if request.response_format is not None:
        body |= _format_body(request.response_format)
    if request.prompt is not None:
        return "/v1/completions", body | _raw_body(request)
    return "/v1/chat/completions", body | _chat_body(request)


def _raw_body(request: Request) -> dict[str, Any]:
    if request.tools or request.thinking:
        raise UnsupportedError("a raw prompt over HTTP takes neither tools nor thinking; send messages", param="prompt")
    prompt = request.prompt
    body: dict[str, Any] = {"prompt": list(prompt) if isinstance(prompt, tuple) else prompt}
    if request.max_tokens is None:
        body["max_tokens"] = -1
    if request.logprobs is not None:
        body["logprobs"] = request.logprobs
    return body


def _chat_body(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": messages_body(request)}
    if request.tools:
        body["tools"] = [tool_body(tool) for tool in request.tools]
        body["tool_choice"] = _choice_body(request.tool_choice)
        body["parallel_tool_calls"] = request.parallel_tool_calls
    options = (
        ("enable_thinking", request.thinking),
        ("thinking_budget", request.thinking_budget),
        ("preserve_thinking", request.preserve_thinking),
    )
    body |= {name: value for name, value in options if value is not None}
    # The server takes a last message of the assistant for one to be continued unless it is told.
    body["continue_final_message"] = request.continue_final_message
    if request.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.logprobs}
    return body


def _choice_body(choice: ToolChoice) -> Any:
    if not choice.names:
        return choice.mode
    if choice.mode == "required" and len(choice.names) == 1:
        return {"type": "function", "function": {"name": choice.names[0]}}
    named = [{"type": "function", "function": {"name": name}} for name in choice.names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}


def _format_body(form: ResponseFormat) -> dict[str, Any]:
    if form.kind == "json":
        return {"response_format": {"type": "json_object"}}
    if form.kind == "json_schema":
        schema = {"name": "answer", "schema": form.schema, "strict": form.strict}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if form.kind == "choice":
        return {"guided_choice": list(form.choices)}
    return {f"guided_{form.kind}": form.pattern}


def tool_body(tool: Tool) -> dict[str, Any]:
    """A tool in the OpenAI form."""
    if tool.raw is not None:
        return dict(tool.raw)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def messages_body(request: Request) -> list[dict[str, Any]]:
    """The messages in the OpenAI form; media are encoded inline."""
    return [_message_body(message) for message in request.messages]


def _message_body(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role}
    content = message.content
    body["content"] = content if isinstance(content, str) else [_part_body(part) for part in content]
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.name:
        body["name"] = message.name
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        body["tool_calls"] = [_call_body(call) for call in message.tool_calls]
    return body


def _call_body(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _part_body(part: Text | Image | Video) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    kind = "image" if isinstance(part, Image) else "video"
    rates: dict[str, Any] = {}
    if isinstance(part, Video):
        rates = {name: value for name in ("fps", "frames") if (value := getattr(part, name)) is not None}
    url = part.url
    if url is None:
        data = part.data if part.data is not None else Path(part.path or "").read_bytes()
        url = f"data:{kind}/*;base64," + base64.b64encode(data).decode()
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}, **rates}


# --- answers -----------------------------------------------------------------------------------------------------


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object that a server sent.

    Raises:
        EngineError: it sent something else.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        text = data[:80].decode(errors="replace")
        raise EngineError(f"{what} is no JSON object but {text!r}; is this the address of a ninfer server?")
    return found


class ChatReader:
    """Lines of a chat stream to events. `done` after the end mark; then the last event was `Finish`."""

    def __init__(self, request: Request, started: float) -> None:
        self.done = False
        self._request = request
        self._started = started
        self._first = 0.0
        self._reason: FinishReason = "stop"
        self._stop: str | None = None
        self._seed = request.sampling.seed
        self._usage = Usage()
        self._timings: Mapping[str, Any] = {}
        self._call: tuple[int, str, str] | None = None
        self._place: Any = None
        self._calls = 0
        self._arguments: list[str] = []

    def feed(self, line: bytes) -> list[Event]:
        """The events of one line, often none.

        Raises:
            NinferError: the server ended the request with an error.
        """
        if not line.startswith(b"data:"):
            return []
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return [*self._end_call(self._reason != "length"), self._finish()]
        chunk = json_object(data, "a line of the stream")
        if chunk.get("error"):
            raise error_of(0, chunk["error"], {})
        events: list[Event] = []
        try:
            self._totals(chunk)
            for choice in chunk.get("choices") or ():
                events += self._choice(choice)
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            text = data[:200].decode(errors="replace")
            raise EngineError(f"a line of the stream has another form than a chat stream's: {text!r}") from error
        if events and not self._first:
            self._first = time.monotonic() - self._started
        return events

    def _totals(self, chunk: Mapping[str, Any]) -> None:
        if chunk.get("usage"):
            self._usage = _usage_of(chunk["usage"])
        timings = chunk.get("timings")
        self._timings = timings if isinstance(timings, dict) else self._timings

    def _choice(self, choice: Mapping[str, Any]) -> list[Event]:
        delta = choice.get("delta") or {}
        events: list[Event] = []
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            events.append(ReasoningDelta(_string(reasoning)))
        logprobs = tuple(_logprob(item) for item in (choice.get("logprobs") or {}).get("content") or ())
        if delta.get("content") or logprobs:
            events += self._end_call(True)
            events.append(TextDelta(_string(delta.get("content") or ""), logprobs))
        for part in delta.get("tool_calls") or ():
            events += self._call_part(part)
        self._end(choice)
        return events

    def _end(self, choice: Mapping[str, Any]) -> None:
        if choice.get("finish_reason"):
            self._reason = _REASONS.get(choice["finish_reason"], "stop")
            stop, seed = choice.get("stop_reason"), choice.get("seed")
            self._stop = stop if isinstance(stop, str) else None
            self._seed = seed if isinstance(seed, int) else self._seed

    def _call_part(self, part: Mapping[str, Any]) -> list[Event]:
        place, function = part.get("index"), part.get("function") or {}
        identity, name, arguments = (
            str(part.get("id") or ""),
            str(function.get("name") or ""),
            function.get("arguments"),
        )
        events: list[Event] = []
        # Some servers number no calls, or all of them 0: a name with another id begins a call too.
        fresh = bool(name and identity) and self._call is not None and self._call[1] != identity
        if self._call is None or self._place != place or fresh:
            events += self._end_call(True)
            self._place = place
            self._call = (self._calls, identity, name)
            self._calls += 1
            events.append(ToolCallStart(*self._call))
        if arguments:
            text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else _string(arguments)
            self._arguments.append(text)
            events.append(ToolCallDelta(self._call[0], text))
        return events

    def _end_call(self, complete: bool) -> list[Event]:
        if self._call is None:
            return []
        index, identity, name = self._call
        text = "".join(self._arguments)
        self._call, self._arguments = None, []
        try:
            parsed = json.loads(text or "{}")
        except ValueError:
            parsed = text
        arguments = parsed if isinstance(parsed, dict) else text
        return [ToolCallEnd(index, ToolCall(identity, name, arguments), complete)]

    def _finish(self) -> Finish:
        timings = Timings(
            prefill=float(self._timings.get("prompt_ms") or 0.0) / 1e3,
            decode=float(self._timings.get("predicted_ms") or 0.0) / 1e3,
            first_token=self._first,
        )
        return Finish(self._reason, self._usage, timings, self._stop, self._seed)


class TextReader(ChatReader):
    """Lines of a raw completion's stream to events."""

    def _choice(self, choice: Mapping[str, Any]) -> list[Event]:
        self._end(choice)
        text, found = _string(choice.get("text") or ""), choice.get("logprobs") or {}
        logprobs = []
        tokens = found.get("tokens") or ()
        columns = (found.get("token_logprobs") or (), found.get("top_logprobs") or ())
        ids = found.get("token_ids") or [-1] * len(tokens)
        for token, value, top, number in zip(tokens, *columns, ids, strict=False):
            others = tuple(TokenLogprob(-1, t, v, t.encode()) for t, v in (top or {}).items())
            logprobs.append(TokenLogprob(number, token, value, token.encode(), others))
        return [TextDelta(text, tuple(logprobs))] if text or logprobs else []


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a string was expected, not {type(value).__name__}")
    return value


def _logprob(item: Mapping[str, Any]) -> TokenLogprob:
    """An entry of the wire. A server of another kind names tokens by text alone: the id is -1 then."""
    top = tuple(_logprob(other) for other in item.get("top_logprobs") or ())
    return TokenLogprob(int(item.get("id", -1)), item["token"], item["logprob"], bytes(item.get("bytes") or ()), top)


def _usage_of(usage: Mapping[str, Any]) -> Usage:
    prompt, made = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    accepted = int(made.get("accepted_prediction_tokens") or 0)
    return Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(prompt.get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        reasoning_tokens=int(made.get("reasoning_tokens") or 0),
        drafted_tokens=accepted + int(made.get("rejected_prediction_tokens") or 0),
        accepted_tokens=accepted,
        media_tokens=int(prompt.get("image_tokens") or 0),
        known_tokens=int(prompt.get("known_tokens") or 0),
    )


# --- errors ------------------------------------------------------------------------------------------------------

_BY_CODE: dict[str, type[NinferError]] = {
    "unsupported_parameter": UnsupportedError,
    "invalid_image": MediaError,
    "invalid_schema": SchemaError,
    "model_not_found": ModelNotFoundError,
    "timeout": RequestTimeoutError,
    "cancelled": RequestCancelledError,
    "engine_closed": EngineClosedError,
    "device_fault": DeviceFaultError,
    "not_finite": NotFiniteError,
}
_BY_STATUS: dict[int, type[NinferError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    400: InvalidRequestError,
    413: InvalidRequestError,
    415: InvalidRequestError,
}


def decode_error(status: int, body: bytes, headers: Mapping[str, str]) -> NinferError:
    """The exception of an answer that is not 200."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        where = f", which points to {headers['location']!r}" if "location" in headers else ""
        error = {"message": f"the server answered {status}{where}: {body[:200].decode(errors='replace')!r}"}
    return error_of(status, error, headers)


def error_of(status: int, found: Any, headers: Mapping[str, str]) -> NinferError:
    """The exception of an error object, or of what a server of another kind has there; `status` 0: in a stream."""
    error: Mapping[str, Any] = found if isinstance(found, dict) else {"message": str(found)}
    message, code, param = str(error.get("message") or "unknown error"), error.get("code"), error.get("param")
    needed, context = error.get("n_prompt_tokens"), error.get("n_ctx")
    if code == "context_length_exceeded" and isinstance(needed, int) and isinstance(context, int):
        return ContextOverflowError(needed, context)
    if isinstance(code, str) and code in _BY_CODE:
        return _BY_CODE[code](message, param=param)
    if status in (429, 503, 529) or code == "service_unavailable":
        if headers.get("x-should-retry") == "false":
            return EngineClosedError(message)
        return EngineBusyError(message, retry_after=_seconds(headers))
    if status in (502, 504):
        # A gateway's own answer: the server behind it is away for now, or was too slow.
        return ServerUnreachableError(message, param=param)
    if status in _BY_STATUS:
        return _BY_STATUS[status](message, param=param)
    if status == 404:
        return EngineError(f"{message}; is this the address of a ninfer server?")
    kind = InvalidRequestError if error.get("type") == "invalid_request_error" else EngineFailedError
    return kind(message, param=param)


def _seconds(headers: Mapping[str, str]) -> float:
    """Seconds to wait before another attempt, as the server says."""
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1e3
        else:
            seconds = float(headers.get("retry-after", "1"))
    except ValueError:
        return 1.0
    return max(0.0, seconds) if math.isfinite(seconds) else 1.0
