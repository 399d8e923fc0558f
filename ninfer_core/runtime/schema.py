"""JSON schemas for the grammar compiler: what is enforced, what is refused by name, how long a value must be. No torch.

A client's schema is rewritten into the subset that the compiler enforces: annotations go, older spellings become
current ones, `propertyNames` becomes `patternProperties`. A keyword that cannot be enforced is an error that names it
and its path where the request is strict; elsewhere it is dropped and reported to the caller, who logs it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import SchemaError

Check = Callable[[Any], str]
"""Compile a schema: the empty string, or why it does not work."""

Path = tuple[str | int, ...]

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

ALIASES = {
    **dict.fromkeys(("int", "int32", "int64", "long"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("bool",), "boolean"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "tuple"), "array"),
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("none",), "null"),
}

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

UNENFORCEABLE = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)

_ONE = ("additionalProperties", "items", "contains", "not", "propertyNames", "additionalItems")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_PLAIN = (
    *("type", "const", "enum", "required", "minItems", "maxItems", "minProperties", "maxProperties", "$anchor"),
    *("minLength", "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "if")
_REPAIRS = 64
_UNBOUNDED = 10**6


REPETITIONS = 20_000
"""How often a pattern may repeat a part, counts of nested groups multiplied: the work grows with it."""

_COUNT = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")


def repetitions(pattern: str) -> int:
    """The largest number of times that counted repetitions in a pattern repeat one part."""
    levels, at, group = [1], 0, 1
    while at < len(pattern):
        char = pattern[at]
        count = _COUNT.match(pattern, at) if char == "{" else None
        if count is not None:
            levels[-1] = max(levels[-1], group * max(int(n) for n in count.groups() if n))
            at = count.end()
            continue
        group = 1
        if char == "(":
            levels.append(1)
        elif char == ")" and len(levels) > 1:
            group = levels.pop()
            levels[-1] = max(levels[-1], group)
        at += 2 if char == "\\" else 1
    return max(levels)


def pointer(path: Path) -> str:
    """The JSON pointer of a path, as a URI fragment."""
    return "#" + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


class Enforcer:
    """Rewrites one schema. `notes` collects what was dropped, one line each.

    Args:
        strict: raise for what cannot be enforced instead of dropping it.
        param: the request field to name in errors.
        check: the compiler.
    """

    def __init__(self, *, strict: bool, param: str, check: Check) -> None:
        self.notes: list[str] = []
        self._strict = strict
        self._param = param
        self._check = check

    def __call__(self, schema: Any) -> Any:
        """The schema to compile.

        Raises:
            SchemaError: no schema at all, one that nothing satisfies, or (strict) one that cannot be enforced.
        """
        made = self._walk(schema, ())
        for _ in range(_REPAIRS):
            reason = self._check(made)
            if not reason:
                if shortest(made, made) >= _UNBOUNDED:
                    raise SchemaError(
                        f"{self._param}: no value of finite size satisfies this schema", param=self._param
                    )
                return made
            if "unsatisfiable" in reason.lower():
                raise SchemaError(f"{self._param}: no value can satisfy this schema: {reason}", param=self._param)
            path, keyword = self._culprit(made, (), made)
            self._drop((*path, keyword) if keyword else path, keyword or "this schema", reason)
            made = _without(made, path, keyword)
        raise SchemaError(f"{self._param}: the schema cannot be enforced: {reason}", param=self._param)

    def _drop(self, path: Path, keyword: str, reason: str) -> None:
        where = pointer(path)
        reason = " ".join(reason.split())[:200].rstrip(".")
        if self._strict:
            raise SchemaError(
                f"{self._param}: the keyword {keyword!r} at {where} cannot be enforced ({reason}); leave it out, "
                "or send strict: false to have it ignored",
                path=where,
                param=self._param,
            )
        self.notes.append(f"{keyword!r} at {where} is not enforced: {reason}")

    def _walk(self, schema: Any, path: Path) -> Any:
        """The same schema in the subset that the compiler knows."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(
                f"{self._param}: {pointer(path)} must be a schema (an object or a boolean), not {schema!r:.60}",
                path=pointer(path),
                param=self._param,
            )
        made: dict[str, Any] = {}
        for key, value in schema.items():
            here = (*path, key)
            if key in UNENFORCEABLE:
                self._unenforceable(schema, key, here, made)
            elif key == "pattern" and isinstance(value, str) and repetitions(value) > REPETITIONS:
                self._drop(here, key, f"it repeats a part more than {REPETITIONS} times")
            elif key in _PLAIN:
                made[key] = value
            elif key in _MANY or (key == "items" and isinstance(value, list | tuple)):
                if not isinstance(value, list | tuple):
                    raise SchemaError(
                        f"{self._param}: {pointer(here)} must be a list of schemas",
                        path=pointer(here),
                        param=self._param,
                    )
                made[key] = [self._walk(item, (*here, i)) for i, item in enumerate(value)]
            elif key in _NAMED:
                if not isinstance(value, Mapping):
                    raise SchemaError(
                        f"{self._param}: {pointer(here)} must be an object", path=pointer(here), param=self._param
                    )
                made[key] = {name: self._walk(item, (*here, name)) for name, item in value.items()}
            elif key in ("items", "additionalProperties", "additionalItems"):
                made[key] = self._walk(value, here)
            elif key == "$ref":
                self._reference(value, here, made)
        self._spellings(schema, made, path)
        return made

    def _unenforceable(self, schema: Mapping[str, Any], key: str, here: Path, made: dict[str, Any]) -> None:
        value = schema[key]
        if key == "unevaluatedProperties" and not any(k in schema for k in (*_COMBINED, "additionalProperties")):
            made["additionalProperties"] = self._walk(value, here)
        elif not _idle(schema, key):
            self._drop(here, key, "the grammar compiler does not know it")

    def _reference(self, value: Any, here: Path, made: dict[str, Any]) -> None:
        if isinstance(value, str) and value.startswith("#"):
            made["$ref"] = value
        else:
            self._drop(here, "$ref", f"{value!r:.80} is not in this document, and nothing is fetched")

    def _spellings(self, schema: Mapping[str, Any], made: dict[str, Any], path: Path) -> None:
        """Keywords that need their neighbours: older spellings, formats, names of properties."""
        if isinstance(made.get("items"), list):
            made["prefixItems"] = made.pop("items")
            if "additionalItems" in made:
                made["items"] = made["additionalItems"]
        made.pop("additionalItems", None)
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and bound in made:
                made[exclusive] = made.pop(bound)
        if schema.get("uniqueItems") is True and not made.get("maxItems", 2) < 2:
            self._drop((*path, "uniqueItems"), "uniqueItems", "the grammar compiler does not know it")
        self._type(made, path)
        if "format" in schema:
            self._format(schema["format"], made, path)
        if "propertyNames" in schema:
            self._names(self._walk(schema["propertyNames"], (*path, "propertyNames")), made, path)
        if schema.get("nullable") is True and made:
            rest = {key: made.pop(key) for key in list(made) if key not in ("$defs", "definitions")}
            made["anyOf"] = [rest, {"type": "null"}]

    def _type(self, made: dict[str, Any], path: Path) -> None:
        declared = made.get("type")
        if declared is None:
            made.pop("type", None)
            return
        names = list(declared) if isinstance(declared, list | tuple) else [declared]
        known = []
        for name in names:
            alias = ALIASES.get(str(name).lower(), str(name).lower())
            if alias != name:
                self._drop((*path, "type"), "type", f"{name!r:.40} is none of {', '.join(TYPES)}")
            if alias in TYPES and alias not in known:
                known.append(alias)
        if known:
            made["type"] = known if len(known) > 1 else known[0]
        else:
            del made["type"]

    def _format(self, value: Any, made: dict[str, Any], path: Path) -> None:
        declared = made.get("type", "string")
        if "string" not in (declared if isinstance(declared, list) else [declared]):
            return
        if value in FORMATS:
            made["format"] = value
        else:
            self._drop((*path, "format"), "format", f"{value!r:.40} is none of {', '.join(FORMATS)}")

    def _names(self, names: Any, made: dict[str, Any], path: Path) -> None:
        """`propertyNames` as `patternProperties`: what it demands becomes the pattern of all undeclared names."""
        if names is True or names == {} or names == {"type": "string"}:
            return
        pattern = _name_pattern(names)
        declared = made.get("properties", {})
        if pattern is None or "patternProperties" in made or any(key in made for key in ("allOf", "anyOf", "$ref")):
            self._drop(
                (*path, "propertyNames"), "propertyNames", "only patterns, lengths and enumerations are enforced"
            )
            return
        try:
            wrong = [key for key in declared if not re.search(pattern, key)]
        except re.error:  # another dialect; the compiler judges the pattern itself
            wrong = []
        rest = made.get("additionalProperties", True)
        if rest is not False:
            made["patternProperties"] = {pattern: rest}
        made["additionalProperties"] = False
        if wrong:
            made["properties"] = {key: value for key, value in declared.items() if key not in wrong}

    def _culprit(self, schema: Any, path: Path, root: Any) -> tuple[Path, str]:
        """The deepest part that does not compile on its own, and its keyword without which it does."""
        for step, child in children(schema):
            if self._check(attach(child, root)):
                return self._culprit(child, (*path, *step), root)
        if isinstance(schema, Mapping):
            for key in reversed([k for k in schema if k not in ("$defs", "definitions", "type")]):
                if not self._check(attach({k: v for k, v in schema.items() if k != key}, root)):
                    return path, key
        return path, ""


def _idle(schema: Mapping[str, Any], key: str) -> bool:
    """Whether an unenforceable keyword says nothing where it stands."""
    value = schema[key]
    if key == "not":
        return value is False
    if key == "contains":
        return schema.get("minContains") == 0 and "maxContains" not in schema
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key in ("then", "else"):
        return "if" not in schema
    return value is True or value == {}


def children(schema: Any) -> Iterator[tuple[Path, Any]]:
    """The schemas directly inside a schema, with the steps that lead to them."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from (((key, name), item) for name, item in value.items())
        elif key in _MANY and isinstance(value, list):
            yield from (((key, i), item) for i, item in enumerate(value))
        elif key in _ONE:
            yield (key,), value


def attach(schema: Any, root: Any) -> Any:
    """A part of `root` that compiles on its own: the definitions it may refer to come with it."""
    if not isinstance(schema, Mapping) or not isinstance(root, Mapping):
        return schema
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def _without(schema: Any, path: Path, keyword: str) -> Any:
    """A copy of `schema` where the part at `path` has lost `keyword`, or allows anything if that is empty.

    `oneOf` becomes `anyOf`, which still keeps the value one of the alternatives.
    """
    if path:
        step, rest = path[0], path[1:]
        if isinstance(schema, list):
            return [_without(item, rest, keyword) if i == step else item for i, item in enumerate(schema)]
        return {key: _without(item, rest, keyword) if key == step else item for key, item in schema.items()}
    if keyword == "oneOf" and "anyOf" not in schema:
        return {"anyOf" if key == keyword else key: value for key, value in schema.items()}
    return {key: value for key, value in schema.items() if key != keyword} if keyword else True


def _name_pattern(names: Any) -> str | None:
    """A regular expression for the names that a `propertyNames` schema allows; None if there is no simple one."""
    if not isinstance(names, Mapping):
        return None
    keys = set(names) - {"type"}
    if keys == {"pattern"}:
        return str(names["pattern"])
    if keys and keys <= {"minLength", "maxLength"}:
        return f"^(?s:.{{{int(names.get('minLength', 0))},{names.get('maxLength', '')}}})$"
    if keys in ({"enum"}, {"const"}):
        values = names["enum"] if "enum" in names else [names["const"]]
        texts = [re.escape(value).replace("/", "\\/") for value in values if isinstance(value, str)]
        return f"^({'|'.join(texts)})$" if texts else None
    return None


def resolve(reference: str, root: Any) -> Any:
    """The target of a local reference such as `#/$defs/Point`; None if there is none."""
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and step in target:
            target = target[step]
        elif isinstance(target, list) and step.isdigit() and int(step) < len(target):
            target = target[int(step)]
        else:
            return None
    return target if reference.startswith("#") else None


def longest_part(schema: Any) -> int:
    """Bytes that the costliest part of a schema needs at least: how much one token can add to what must follow."""
    worst, stack = 1, [schema]
    while stack:
        part = stack.pop()
        size = shortest(part, schema)
        worst = max(worst, size if size < _UNBOUNDED else 1)
        stack += [child for _, child in children(part)]
    return worst


def shortest(schema: Any, root: Any, seen: frozenset[str] = frozenset()) -> int:
    """About how many bytes the shortest value of a schema has; at least `_UNBOUNDED` if it has no finite one."""
    if not isinstance(schema, Mapping):
        return 1
    if "const" in schema:
        return len(json.dumps(schema["const"]))
    if schema.get("enum"):
        return min(len(json.dumps(value)) for value in schema["enum"])
    sizes = [_shortest_of_type(schema, root, seen)]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        inside = reference not in seen
        sizes.append(shortest(resolve(reference, root), root, seen | {reference}) if inside else _UNBOUNDED)
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            sizes.append(min(shortest(item, root, seen) for item in schema[key]))
    if schema.get("allOf"):
        sizes.append(sum(shortest(item, root, seen) for item in schema["allOf"]))
    return min(max(sizes), _UNBOUNDED)


def _shortest_of_type(schema: Mapping[str, Any], root: Any, seen: frozenset[str]) -> int:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not kinds:
        kinds = ["object"] if "required" in schema else ["array"] if "minItems" in schema else ["number"]
    sizes = []
    for kind in kinds:
        if kind == "object":
            declared = schema.get("properties", {})
            names = [str(name) for name in schema.get("required", ())]
            sizes.append(2 + sum(len(name) + 4 + shortest(declared.get(name, {}), root, seen) for name in names))
        elif kind == "array":
            first = schema.get("prefixItems", [])
            count = schema.get("minItems", 0)
            items = [*first, *[schema.get("items", {})] * max(0, min(count, 1) - len(first))][:count]
            size = sum(1 + shortest(item, root, seen) for item in items)
            sizes.append(2 + size + max(0, count - len(items)) * (1 + shortest(schema.get("items", {}), root, seen)))
        elif kind == "string":
            pattern = len(schema.get("pattern", "")) + (32 if "format" in schema else 0)
            sizes.append(2 + max(int(schema.get("minLength", 0)), pattern))
        elif kind in ("integer", "number"):
            bound = max(abs(schema.get(key) or 0) for key in ("minimum", "exclusiveMinimum", "maximum"))
            sizes.append(2 + int(math.log10(bound + 1)) if math.isfinite(bound) else 20)
        else:
            sizes.append(5 if kind == "boolean" else 4)
    return min(sizes)
