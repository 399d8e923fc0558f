"""Tool schemas: which JSON types a parameter may have, and how the model's text becomes a value of one of them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..types import Tool
from .tokenizer import replace_surrogates

Schema = Mapping[str, Any]

DEPTH = 64
"""How deep string leaves of a structure are converted."""

MEMBERS = 1000
"""How many schema objects one parameter's references and combinations may lead to."""

_ALIASES = {
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("bool",), "boolean"),
    **dict.fromkeys(("dict", "map", "mapping"), "object"),
    **dict.fromkeys(("list", "tuple"), "array"),
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("none",), "null"),
}
_NAMES = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}\Z")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
_EXACT = 2**53
_LITERAL_CHARACTERS = 1_000_000
STRING = frozenset({"string"})


class ToolSet:
    """The tools of one request, by name, with what the parser asks about them."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._roots: dict[str, Schema] = {}
        for tool in tools:
            self._roots[tool.name] = tool.parameters if isinstance(tool.parameters, Mapping) else {}

    def __bool__(self) -> bool:
        return bool(self._roots)

    def __contains__(self, name: str) -> bool:
        return name in self._roots

    def parameters(self, name: str) -> frozenset[str]:
        """The declared parameter names of a tool (none if it is unknown)."""
        root = self._roots.get(name, {})
        return frozenset(key for schema in _expand(root, root) for key in _properties(schema))

    def schemas(self, name: str, key: str) -> list[Schema]:
        """Every schema that applies to a parameter; empty if it is not declared."""
        root = self._roots.get(name, {})
        return _child(list(_expand(root, root)), key)

    def types(self, name: str, key: str) -> frozenset[str]:
        """The JSON types a parameter may have; `{string}` when the schema does not say."""
        return types(self.schemas(name, key), self._roots.get(name, {}))

    def value(self, name: str, key: str, text: str) -> Any:
        """The value of a parameter from the model's text; the text itself if no declared type fits."""
        return convert(text, self.schemas(name, key), self._roots.get(name, {}))


def types(schemas: Sequence[Schema], root: Schema) -> frozenset[str]:
    """The union of the JSON types that `schemas` allow, references into `root` followed; empty means `{string}`."""
    found: set[str] = set()
    for schema in schemas:
        for member in _expand(schema, root):
            found |= _own_types(member)
    return frozenset(found) or STRING


def _own_types(schema: Schema) -> set[str]:
    """The types one schema object names itself."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list | tuple) else []
    found = {_ALIASES.get(str(name).lower(), str(name).lower()) for name in names} & _NAMES
    values = schema.get("enum")
    for value in [
        *(values if isinstance(values, list | tuple) else []),
        *([schema["const"]] if "const" in schema else []),
    ]:
        found.add(_type_of(value))
    if not found and {"properties", "additionalProperties", "patternProperties"} & schema.keys():
        found.add("object")
    if not found and {"items", "prefixItems"} & schema.keys():
        found.add("array")
    if schema.get("nullable") is True:
        found |= {"null"} | (set() if found else STRING)
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _expand(schema: Any, root: Schema) -> Iterator[Schema]:
    """The schema object, what it refers to, and the members of its combinations: each once, `MEMBERS` at most."""
    stack, seen = [schema], set[int]()
    while stack and len(seen) < MEMBERS:
        member = stack.pop()
        if not isinstance(member, Mapping) or id(member) in seen:
            continue
        seen.add(id(member))
        yield member
        for keyword in ("allOf", "oneOf", "anyOf"):
            parts = member.get(keyword)
            if isinstance(parts, list | tuple):
                stack += reversed(parts)
        if isinstance(member.get("$ref"), str):
            stack.append(_resolve(member["$ref"], root))


def _resolve(reference: str, root: Schema) -> Any:
    """The target of a local reference such as `#/$defs/Point`; None if there is none."""
    if not reference.startswith("#"):
        return None
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(step)
        elif isinstance(target, list | tuple) and step.isdigit() and int(step) < len(target):
            target = target[int(step)]
        else:
            return None
    return target


def _properties(schema: Schema) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _child(members: Sequence[Schema], key: str) -> list[Schema]:
    """The schemas of one property over all expanded members."""
    found = [_properties(member)[key] for member in members if key in _properties(member)]
    if not found:
        found = [extra for member in members if isinstance(extra := member.get("additionalProperties"), Mapping)]
    return [schema for schema in found if isinstance(schema, Mapping)]


def convert(text: str, schemas: Sequence[Schema], root: Schema) -> Any:
    """The value of `text` under `schemas`: the first fitting type of null, integer, number, boolean, object, array.

    Surrounding blanks do not count for these. Text that fits none is returned as it is, also where the schema does
    not allow a string: a call with an odd value is more use than no call.
    """
    wanted = types(schemas, root)
    if wanted == STRING:
        return text
    bare = text.strip()
    if "null" in wanted and (bare.lower() == "null" or bare == "None"):
        return None
    if wanted & {"integer", "number"}:
        number = _number(bare, "number" in wanted)
        if number is not None:
            return number
    if "boolean" in wanted and bare.lower() in ("true", "false", "1", "0"):
        return bare.lower() in ("true", "1")
    if wanted & {"object", "array"}:
        value = _structure(bare, wanted)
        if value is not None:
            return _leaves(value, schemas, root, DEPTH)
    return text


def _number(text: str, fraction: bool) -> int | float | None:
    """An integer, or with `fraction` any finite number; whole floats become integers."""
    if _INTEGER.match(text):
        return int(text)
    if not _FLOAT.match(text):
        return None
    value = float(text)
    if value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    return value if fraction and abs(value) != float("inf") else None


def _structure(text: str, wanted: frozenset[str]) -> Any:
    """A JSON object or array of a wanted kind, else the same as a Python literal, else None."""
    if not text or text[0] not in "{[(":
        return None
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        if len(text) > _LITERAL_CHARACTERS:
            return None
        try:
            value = json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return None
    kind = _type_of(value)
    return value if kind in wanted and kind in ("object", "array") else None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _leaves(value: Any, schemas: Sequence[Schema], root: Schema, depth: int) -> Any:
    """The same structure with string leaves converted where their own schema wants another type."""
    if depth == 0:
        return value
    members = [member for schema in schemas for member in _expand(schema, root)]
    if isinstance(value, dict):
        return {key: _leaf(item, _child(members, key), root, depth) for key, item in value.items()}
    if isinstance(value, list):
        items = [m["items"] for m in members if isinstance(m.get("items"), Mapping)]
        return [_leaf(item, items, root, depth) for item in value]
    return value


def _leaf(value: Any, schemas: Sequence[Schema], root: Schema, depth: int) -> Any:
    if not schemas:
        return value
    if isinstance(value, str):
        return value if "string" in types(schemas, root) else convert(value, schemas, root)
    return _leaves(value, schemas, root, depth - 1)


def dumps(value: Any) -> str:
    """JSON as argument text: `", "` and `": "`, non-ASCII kept, no lone surrogates.

    Raises:
        ValueError: the value is nested too deeply to be written.
    """
    try:
        return replace_surrogates(json.dumps(value, ensure_ascii=False))
    except RecursionError as error:
        raise ValueError("value is nested too deeply") from error
