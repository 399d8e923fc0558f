"""What framework adapters share: finding an engine by name or address, submitting from coroutines, reading media.

An adapter object never holds an engine. It holds names, so that copies, pickles and reconfigured instances all reach
the one engine of this process, or the one client per server.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from . import store
from .errors import (
    EngineClosedError,
    EngineConflictError,
    InvalidRequestError,
    MediaError,
    ModelNotFoundError,
    NinferError,
)
from .runtime.interface import EngineInterface, model_profile
from .runtime.options import EngineOptions
from .runtime.registry import NamedEngine
from .types import (
    Event,
    Image,
    ReasoningDelta,
    ResponseFormat,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    ToolChoice,
    Video,
)
from .wire import check_address

if TYPE_CHECKING:
    from .client import Client

Medium = TypeVar("Medium", Image, Video)

QWEN_CONTEXT = 262144

BACKLOG = 8
"""Events of one kind that must be waiting before they are joined: a reader that keeps up sees every one of them."""

_SHARED: dict[str, EngineInterface] = {}
_CLIENTS: dict[tuple[Any, ...], Client] = {}
_LOCK = threading.Lock()


# --- finding the engine ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """Where an adapter's requests go: `base_url`'s server, else the engine called `engine` in this process.

    `options` are fields of `EngineOptions` for an engine that is made on first use; `http_client` is an
    `httpx.AsyncClient` for HTTP mode.
    """

    model: str
    engine: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)
    base_url: str | None = None
    api_key: str | None = None
    max_retries: int = 2
    http_client: Any = None

    @property
    def mode(self) -> str:
        """`http` or `in-process`."""
        return "http" if self.base_url else "in-process"


def share(engine: EngineInterface) -> str:
    """A name under which adapters find this engine: its own if it is a named one, else a new one of this process."""
    name = getattr(engine, "name", None)
    if isinstance(name, str) and name:
        return name
    with _LOCK:
        for known, other in list(_SHARED.items()):
            if other is engine:
                return known
            if not other.nonblocking and other.state == "closed":
                del _SHARED[known]
        name = f"@{id(engine):x}"
        _SHARED[name] = engine
        return name


def connect(target: Target, model: str | None = None) -> EngineInterface:
    """The engine of a target; loads nothing and opens no connection. `model` is what one call asks for instead.

    Raises:
        InvalidRequestError: the model is no string, or the address of a server is none.
        ModelNotFoundError: the engine of that name serves other models.
        EngineConflictError: the engine of that name was made with other options.
        EngineClosedError: a shared engine of another process, or of one that is gone.
    """
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError(f"model must be a string, not {type(model).__name__}", param="model")
    if target.base_url:
        return _client(target).with_model(target.model if model is None else model)
    engine = _local(target)
    return engine if model is None or model == target.model else check_served(engine, model, target.engine)


def _local(target: Target) -> EngineInterface:
    shared = _SHARED.get(target.engine)
    if shared is not None:
        return check_served(shared, target.model, target.engine)
    if target.engine.startswith("@"):
        raise EngineClosedError(
            f"engine {target.engine!r} is not in this process; use from_engine again, or name an engine and its model"
        )
    from .engine import get_engine

    wanted = EngineOptions(model=target.model, **target.options)
    try:
        return get_engine(target.engine, wanted)
    except EngineConflictError:
        known = get_engine(target.engine)
        same_options = not target.options or replace(wanted, model=known.spec.model) == known.spec
        try:
            if not same_options:
                raise
            return check_served(known, target.model, target.engine)
        except NinferError:
            # A name is taken by a model that is loaded, and not by one that was only spoken of, or mistyped.
            if known.state not in ("new", "failed"):
                raise
        known.close()
        return get_engine(target.engine, wanted)


def check_served(engine: EngineInterface, model: str, name: str = "") -> EngineInterface:
    """The engine, if it serves a model under this name.

    Raises:
        ModelNotFoundError: it does not.
    """
    names = engine.served_names
    own = getattr(getattr(engine, "spec", None), "model", names[0])
    if model in (*names, own) or store.canonical(model) in {store.canonical(known) for known in (*names, own)}:
        return engine
    which = f"engine {name!r}" if name else "this engine"
    raise ModelNotFoundError(
        f"{which} serves {', '.join(names)}, not {model!r}; name one of these, or another engine", param="model"
    )


def _client(target: Target) -> Client:
    from .client import Client

    key = (target.base_url, target.api_key, target.max_retries, id(target.http_client))
    with _LOCK:
        client = _CLIENTS.get(key)
        if client is None or client.closed:
            client = _CLIENTS[key] = Client(
                target.base_url or "",
                api_key=target.api_key,
                max_retries=target.max_retries,
                http_client=target.http_client,
            )
        return client


def offline_profile(target: Target) -> dict[str, Any]:
    """What is known of a target's model without weights, without torch and without the network."""
    if target.base_url:
        return model_profile(target.model, _known_context(target.model))
    engine = connect(target)
    if not isinstance(engine, NamedEngine) or engine.state == "ready":
        return engine.profile
    limit = _known_context(engine.spec.model)
    asked = engine.spec.context_length
    if asked != "auto":
        limit = asked if limit is None else min(asked, limit)
    return model_profile(target.model, limit, vision=engine.spec.vision)


def known_context(target: Target) -> int | None:
    """The served context if the engine is loaded or the client has asked, else the model's own; None: not known yet."""
    engine = connect(target)
    if target.base_url:
        served = getattr(engine, "known_context", None)
        return _known_context(target.model) if served is None else int(served)
    if not isinstance(engine, NamedEngine) or engine.state == "ready":
        return engine.context_length
    return offline_profile(target).get("max_input_tokens")


def _known_context(model: str) -> int | None:
    """The model's own context: of the two models by name, of an artifact folder by its config.json."""
    if store.canonical(model).startswith("qwen3.6:"):
        return QWEN_CONTEXT
    try:
        return _context_of_folder(model)
    except (NinferError, OSError, ValueError, KeyError, TypeError):
        return None


@lru_cache
def _context_of_folder(model: str) -> int:
    config = store.resolve(model) / "config.json"
    return int(json.loads(config.read_bytes())["text_config"]["max_position_embeddings"])


def concurrency(engine: EngineInterface) -> int:
    """How many requests at once fill the engine."""
    spec = getattr(engine, "spec", None)
    return int(spec.max_sequences) if isinstance(spec, EngineOptions) else 64


# --- running -----------------------------------------------------------------------------------------------------


def joined(events: Sequence[Event]) -> Iterator[Event]:
    """Events that waited for a slow reader, runs of the same kind joined; a short backlog stays as it is."""
    if len(events) < BACKLOG:
        yield from events
        return
    held: Event | None = None
    for event in events:
        merged = None if held is None else _merge(held, event)
        if merged is None and held is not None:
            yield held
        held = merged or event
    if held is not None:
        yield held


def _merge(first: Event, second: Event) -> Event | None:
    if isinstance(first, TextDelta) and isinstance(second, TextDelta):
        return TextDelta(first.text + second.text, first.logprobs + second.logprobs)
    if isinstance(first, ReasoningDelta) and isinstance(second, ReasoningDelta):
        return ReasoningDelta(first.text + second.text, first.logprobs + second.logprobs)
    if isinstance(first, ToolCallDelta) and isinstance(second, ToolCallDelta) and first.index == second.index:
        return ToolCallDelta(first.index, first.arguments + second.arguments)
    return None


def answer_logprobs(events: Iterable[Event]) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of the answer's tokens, reasoning left out."""
    return tuple(item for event in events if isinstance(event, TextDelta) for item in event.logprobs)


def logprob_entries(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Log-probabilities in the OpenAI form: token, logprob, bytes, top_logprobs."""
    return [{**_entry(item), "top_logprobs": [_entry(other) for other in item.top]} for item in logprobs]


def _entry(item: TokenLogprob) -> dict[str, Any]:
    return {"token": item.token, "logprob": item.logprob, "bytes": list(item.bytes)}


def timings_of(timings: Timings) -> dict[str, float]:
    """Timings as a plain mapping, in seconds."""
    return {
        "queue": timings.queue,
        "prefill": timings.prefill,
        "decode": timings.decode,
        "first_token": timings.first_token,
    }


# --- call options and tool choice ----------------------------------------------------------------------------------


def own_options(options: Mapping[str, Any], known: Iterable[str], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Call options by an adapter's own names.

    Raises:
        TypeError: an unknown one, with the nearest known.
    """
    names = set(known)
    made: dict[str, Any] = {}
    for name, value in options.items():
        own = aliases.get(name, name)
        if own not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise TypeError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        made[own] = value
    return made


def stop_strings(value: Any) -> Any:
    """One stop string or several as a tuple; what is neither stays as it is, for the engine's check to name."""
    if value is None or isinstance(value, str):
        return (value,) if value else ()
    return tuple(value) if isinstance(value, Iterable) else value


def copied_mapping(value: Any) -> Any:
    """A mapping as a dict of its own; anything else stays as it is, for the engine's check to name."""
    return dict(value) if isinstance(value, Mapping) else value


def tool_list(value: Any) -> Sequence[Any]:
    """The tools of a call.

    Raises:
        InvalidRequestError: no list of them.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value or (), Iterable):
        raise InvalidRequestError(f"tools must be a list, not {type(value).__name__}", param="tools")
    return list(value or ())


def checked_fields(values: Any, known: Iterable[str], aliases: Mapping[str, str]) -> Any:
    """Constructor arguments of an adapter with aliases replaced.

    Raises:
        ValueError: an unknown field, with the nearest known; or a field and its alias together.
    """
    if not isinstance(values, Mapping):
        return values
    made = dict(values)
    for alias, name in aliases.items():
        if alias in made and name in made:
            raise ValueError(f"{alias} and {name} are the same field; give one")
        if alias in made:
            made[name] = made.pop(alias)
    try:
        return own_options(made, known, {})
    except TypeError as error:
        raise ValueError(str(error).replace("option", "field")) from None


def check_target(target: Target) -> None:
    """Refuse what no engine and no server can be found by.

    Raises:
        ValueError: an unknown or impossible engine option, an address without a scheme, or a client of another kind.
    """
    if not target.model.strip():
        raise InvalidRequestError("model is empty; give a name or the path of an artifact", param="model")
    try:
        EngineOptions(model=target.model, **target.options)
    except TypeError as error:
        raise ValueError(f"engine_options: {error}") from None
    if target.base_url:
        check_address(target.base_url)
    if target.http_client is not None:
        from .client import check_http_client

        check_http_client(target.http_client)


def public_address(base_url: str | None) -> str | None:
    """The address of a target as it may be shown, stored and traced: without a user and password."""
    return check_address(base_url)[0] if base_url else base_url


def format_of_envelope(value: Mapping[str, Any]) -> ResponseFormat:
    """The form that OpenAI's `{"type": "json_schema", "json_schema": {...}}` asks for.

    Raises:
        InvalidRequestError: there is no schema in it.
    """
    inner = value.get("json_schema", value)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError(
            f"response_format.json_schema.schema must be a JSON schema, not {type(schema).__name__}",
            param="response_format",
        )
    return ResponseFormat("json_schema", closed(schema), strict=inner.get("strict") is not False)


def closed(schema: Any) -> Any:
    """A schema whose objects take no properties but those it lists, unless it says otherwise.

    Frameworks leave `additionalProperties` out and mean false: a class would drop or refuse others, and a model may go
    on writing them. Where schemas are combined by `allOf` a part must let those of the others pass, so such a schema
    stays as it is.
    """
    return schema if _combines(schema) else _closed(schema)


def _combines(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return len(schema.get("allOf") or ()) > 1 or any(map(_combines, schema.values()))
    return isinstance(schema, list) and any(map(_combines, schema))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _closed(part) for key, part in schema.items()}
    if made.get("type") == "object" and "properties" in made and "patternProperties" not in made:
        made.setdefault("additionalProperties", False)
    return made


def tool_choice_of(choice: Any, names: Sequence[str]) -> ToolChoice:
    """A tool choice in any of its common forms.

    None, False and "auto": the model decides. "none": no call. "any", "required" and True: at least one call. A tool's
    name, or a mapping that names one (`{"type": "function", "function": {"name": ...}}`, `{"type": "tool", "name":
    ...}`): that tool. `{"type": "auto" | "any" | "none"}` as the words. A ready `ToolChoice` is taken as it is.

    Raises:
        InvalidRequestError: another form, or a name that is not among the tools.
    """
    if isinstance(choice, ToolChoice):
        return choice
    if choice is None or choice is False:
        return ToolChoice()
    if choice is True:
        choice = "required"
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        kind = choice.get("type")
        if name is None and kind in ("auto", "any", "none", "required"):
            choice = kind
        elif isinstance(name, str):
            return ToolChoice("required", (_known(name, names),))
    if isinstance(choice, str):
        if choice in ("auto", "none", "required") and choice not in names:
            return ToolChoice(choice)  # type: ignore[arg-type]
        if choice == "any" and choice not in names:
            return ToolChoice("required")
        return ToolChoice("required", (_known(choice, names),))
    raise InvalidRequestError(
        f"tool_choice is {choice!r}; it must be none, auto, any, required, True, a tool's name or a mapping with one",
        param="tool_choice",
    )


def _known(name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise InvalidRequestError(
            f"tool_choice names {name!r}, which is not among the tools {sorted(names)}", param="tool_choice"
        )
    return name


# --- media -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Where images and videos may come from: always inline data; remote addresses and local files only if allowed."""

    allow_remote: bool = False
    root: str | None = None

    def from_url(self, kind: Callable[..., Medium], url: str, where: str) -> Medium:
        """An image or video from a data URL, a file address or path, or a remote address.

        Raises:
            MediaError: a place that may not be read, or data that is not base64.
        """
        scheme = url[:12].partition(":")[0].lower()
        if scheme == "data":
            head, comma, body = url.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise MediaError(f"{where} must be a data URL with base64 content", param=where)
            return kind(data=from_base64(body, where))
        if scheme in ("http", "https"):
            if not self.allow_remote:
                raise MediaError(
                    f"{where} is a remote address, which is not fetched unless allow_remote_media=True; "
                    "send the file's bytes as base64 instead",
                    param=where,
                )
            return kind(url=url)
        return kind(path=str(self._local(url, where)))

    def _local(self, url: str, where: str) -> Path:
        if self.root is None:
            raise MediaError(
                f"{where} names a local file; set media_root to the folder that may be read, or send base64",
                param=where,
            )
        name = unquote(urlsplit(url).path) if url.lower().startswith("file:") else url
        root = Path(self.root).resolve()
        path = (root / name).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            raise MediaError(f"{where}: {name!r} is not a file below media_root {str(root)!r}", param=where)
        return path


def from_base64(text: str, where: str) -> bytes:
    """The bytes of base64 text; line breaks are tolerated.

    Raises:
        MediaError: the text is not base64, or empty.
    """
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{where} is not valid base64: {error}", param=where) from error
    if not data:
        raise MediaError(f"{where} is empty", param=where)
    return data
