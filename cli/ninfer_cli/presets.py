"""Presets: a system message and parameters under a name of their own, read from a TOML file, asked for like models."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ninfer_core import store
from ninfer_core.errors import InvalidRequestError
from ninfer_core.types import Message, Request

from .chat import PARAMETERS, Settings, parse_parameter

logger = logging.getLogger("ninfer.server")
_KEYS = ("model", "system", "think")


@dataclass(frozen=True, slots=True)
class Preset:
    """What a name stands for. `model` is the name of a model; `thinking` None is the model's default."""

    name: str
    model: str
    system: str | None = None
    thinking: bool | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, given: Settings) -> Settings:
        """The settings of a conversation: what was given, and the preset's for the rest."""
        return replace(
            given,
            system=given.system if given.system is not None else self.system,
            thinking=given.thinking if given.thinking is not None else self.thinking,
            parameters={**self.parameters, **given.parameters},
        )

    def fill(self, request: Request, index: int = 0) -> Request:
        """A request with the preset's values where it states none of its own; `index` is its choice's.

        Its own system message replaces the preset's. A prompt without turns gets the parameters alone.
        """
        values = dict(self.parameters)
        stop, limit = values.pop("stop", ()), values.pop("max_tokens", None)
        budget, seed = values.pop("thinking_budget", None), values.pop("seed", None)
        if seed is not None:
            values["seed"] = seed + index
        unset = {name: value for name, value in values.items() if getattr(request.sampling, name) is None}
        changed: dict[str, Any] = {
            "sampling": replace(request.sampling, **unset),
            "max_tokens": limit if request.max_tokens is None else request.max_tokens,
            "stop": request.stop or stop,
        }
        if request.messages:
            thinking = self.thinking if request.thinking is None else request.thinking
            changed["thinking"] = thinking
            if request.thinking_budget is None and thinking is not False:
                changed["thinking_budget"] = budget
            if self.system and request.messages[0].role not in ("system", "developer"):
                changed["messages"] = (Message("system", self.system), *request.messages)
        return replace(request, **changed)


def preset_json(preset: Preset) -> dict[str, Any]:
    """A preset as `list --json` and `show --json` give it."""
    return {
        "name": preset.name,
        "model": preset.model,
        "system": preset.system,
        "think": preset.thinking,
        "parameters": {key: list(value) if isinstance(value, tuple) else value
                       for key, value in preset.parameters.items()},
    }  # fmt: skip


def presets_path(environ: Mapping[str, str]) -> Path:
    """The file: `NINFER_PRESETS`, else `ninfer/presets.toml` in the user's configuration folder."""
    named = environ.get("NINFER_PRESETS", "")
    if named:
        return Path(named).expanduser()
    base = environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path.home() / ".config") / "ninfer" / "presets.toml"


def read_presets(path: Path) -> dict[str, Preset]:
    """All presets of a file by name; none where there is no file.

    Raises:
        InvalidRequestError: the file is not such a file; the message names the table and the key.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    import tomllib

    try:
        tables = tomllib.loads(data.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} is not a TOML file: {error}", param="presets") from None
    found = (_preset(name, table, f"{path}: [{name}]") for name, table in tables.items())
    return {preset.name: preset for preset in found}


def find_preset(name: str, environ: Mapping[str, str]) -> Preset | None:
    """The preset of a name, if there is one. Raises as `read_presets`."""
    return read_presets(presets_path(environ)).get(plain(name))


def plain(name: str) -> str:
    """A preset's name without case and `:latest`."""
    return name.strip().casefold().removesuffix(":latest")


def _preset(name: str, table: Any, where: str) -> Preset:
    own = plain(name)
    if not isinstance(table, dict):
        raise InvalidRequestError(f"{where} must be a table with a model, not {type(table).__name__}", param="presets")
    if not own or "/" in own or store.canonical(own) in {known.name for known in store.KNOWN}:
        raise InvalidRequestError(f"{where}: the name is a model's, empty, or holds a slash; choose another",
                                  param="presets")  # fmt: skip
    unknown = sorted(set(table) - {*_KEYS, *PARAMETERS})
    if unknown:
        raise InvalidRequestError(
            f"{where} has an unknown key {unknown[0]!r}; known: {', '.join((*_KEYS, *PARAMETERS))}", param="presets"
        )
    for key, kind in (("model", str), ("system", str), ("think", bool)):
        if key in table and not isinstance(table[key], kind):
            raise InvalidRequestError(f"{where}: {key} must be {'a text' if kind is str else 'true or false'}",
                                      param="presets")  # fmt: skip
    if not table.get("model"):
        raise InvalidRequestError(f'{where} names no model; add model = "qwen3.6:27b"', param="presets")
    parameters = {key: _value(key, table[key], where) for key in PARAMETERS if key in table}
    return Preset(own, table["model"], table.get("system"), table.get("think"), parameters)


def _value(key: str, value: Any, where: str) -> Any:
    try:
        if key == "stop":
            listed = value if isinstance(value, list) else [value]
            if all(isinstance(item, str) for item in listed):
                return tuple(parse_parameter(key, item) for item in listed)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            return parse_parameter(key, str(value))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error.message}", param="presets") from None
    kind = "a text or a list of texts" if key == "stop" else "a number"
    raise InvalidRequestError(f"{where}: {key} must be {kind}, not {value!r}", param="presets")


class PresetFile:
    """The presets of a file that may change while a server runs; None is no file."""

    def __init__(self, path: Path | str | None) -> None:
        self.path = None if path is None else Path(path)
        self._stamp: tuple[int, int] | None = None
        self._presets: dict[str, Preset] = {}

    def all(self) -> Mapping[str, Preset]:
        """What the file holds now; while it is broken, what it held before."""
        stamp = self._stamp_now()
        if stamp != self._stamp and self.path is not None:
            self._stamp = stamp
            try:
                self._presets = read_presets(self.path)
            except (InvalidRequestError, OSError) as error:
                logger.warning("the presets stay as they were: %s", error)
        return self._presets

    def get(self, name: str | None) -> Preset | None:
        """The preset of a name."""
        return self.all().get(plain(name)) if name and self.path is not None else None

    def _stamp_now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path) if self.path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size)
