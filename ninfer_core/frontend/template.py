"""Renders a checkpoint's own chat template in a bounded Jinja sandbox."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ContentError, InvalidRequestError


def tojson(value: Any) -> str:
    """Plain JSON with `", "` and `": "`, keys in insertion order, non-ASCII kept, nothing HTML-escaped."""
    return json.dumps(value, ensure_ascii=False)


def _raise_exception(message: str) -> None:
    raise InvalidRequestError(str(message), param="messages")


class ChatTemplate:
    """One compiled template; `render` may be called from several threads."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ContentError(f"chat_template.jinja does not compile: {error}") from error

    def render(self, **context: Any) -> str:
        """The prompt text for `messages`, `tools`, `add_generation_prompt` and the template's keyword options.

        Raises:
            InvalidRequestError: the template refused the conversation, or failed on it.
        """
        try:
            return self._template.render(**context)
        except TemplateError as error:
            raise InvalidRequestError(f"the chat template failed: {error}", param="messages") from error
