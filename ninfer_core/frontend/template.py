"""Renders a checkpoint's own chat template.

Jinja2 itself renders (not a port of it), so a template gives the bytes it gives in transformers; `sandbox` bounds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from ..errors import ContentError, InvalidRequestError
from .sandbox import Sandbox, bounded, counted, measure

MAX_SOURCE = 1_000_000
"""Characters of a template."""


def _default(value: Any) -> Any:
    """What the json module cannot write itself: mappings and sequences of other types."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
        return list(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _raise_exception(message: Any) -> None:
    raise InvalidRequestError(f"the chat template refuses this conversation: {message}", param="messages")


class ChatTemplate:
    """One compiled template; `render` may be called from several threads.

    `trim_blocks`, `lstrip_blocks` and loop controls are on. `tojson` writes plain JSON: `", "` and `": "`, keys in
    insertion order, non-ASCII kept, nothing HTML-escaped.

    Args:
        source: the template; kept as an attribute.
        clean: applied to all text that `tojson` writes.

    Raises:
        ContentError: it does not compile, or uses a filter that the sandbox lacks.
    """

    def __init__(self, source: str, clean: Callable[[str], str] = str) -> None:
        if len(source) > MAX_SOURCE:
            raise ContentError(f"chat_template.jinja has {len(source):,} characters; the limit is {MAX_SOURCE:,}")
        environment = Sandbox()
        environment.filters["tojson"] = self._tojson
        environment.globals["raise_exception"] = _raise_exception
        self.source = source
        self._clean = clean
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise ContentError(f"chat_template.jinja does not compile: {error}") from error

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if indent is not None and not 0 <= indent <= 16:
            raise SecurityError(f"tojson(indent={indent!r}): 0 to 16 is allowed")
        measure(value)
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=_default,
        )
        return str(counted(self._clean(text)))

    def render(self, **context: Any) -> str:
        """The prompt text for `messages`, `tools`, `add_generation_prompt` and the template's keyword options.

        Raises:
            InvalidRequestError: the template refused the conversation, failed on it, or passed a limit.
        """
        try:
            with bounded():
                return self._template.render(**context)
        except InvalidRequestError:
            raise
        except Exception as error:  # whatever a template does is no fault of the engine
            raise InvalidRequestError(
                f"the chat template failed on this conversation: {str(error) or type(error).__name__}", param="messages"
            ) from error
