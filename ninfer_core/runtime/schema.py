"""JSON schemas for the grammar compiler: what is enforced, what is refused by name, how long a value must be. No torch.

A client's schema is rewritten into the subset that the compiler enforces: annotations go, older spellings become
current ones, `propertyNames` becomes `patternProperties`, conditions become unions (`conditions`). A keyword that
cannot be enforced is an error that names it and its path where the request is strict; elsewhere it is dropped and
reported to the caller, who logs it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import SchemaError
from .compiler import mismatches
from .conditions import Conditions, Unenforceable
from .sizes import BOUNDLESS, MANY, NAMED, Sizes, children, conjuncts

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

ANNOTATIONS = ("password", "path", "file-path", "directory-path", "binary")
"""Formats that say how a text is meant: any text has them."""

UNENFORCEABLE = ("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef")

_PLAIN = (
    *("type", "const", "enum", "required", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minLength", "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "if")
_REPAIRS = 64


BYTES = 200_000
"""Size of a schema as JSON: the time to compile grows with it."""

DEPTH = 200
"""How many steps may lead from the root of a schema to a part of it."""

CONJUNCTS = 8
"""Patterns that one string may have to match at once: whether any text does is exponential in their number."""

EFFORT = 2_000_000
"""Bytes of schemas that may be compiled to find out which keyword is at fault."""

REPETITIONS = 20_000
"""How often a pattern may repeat a part, counts of nested groups multiplied: the work grows with it."""

_COUNT = re.compile(r"\{(\d{1,18})(?:,(\d{0,18}))?\}")


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


_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _misfit(key: str, value: Any) -> str:
    """What the value of a keyword must be, if it is something else."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)
    if key in _COUNTS:
        return "" if number and value >= 0 and value == int(value) else "it must be an integer from 0 on"
    if key in _BOUNDS:
        fits = number or (key.startswith("exclusive") and isinstance(value, bool))
        return "" if fits else "it must be a finite number"
    if key in ("pattern", "$anchor"):
        return "" if isinstance(value, str) else "it must be a string"
    if key == "enum":
        return "" if isinstance(value, list | tuple) else "it must be a list"
    if key == "required" or (key == "type" and isinstance(value, list | tuple)):
        texts = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
        return "" if texts else "it must be a list of strings"
    if key in ("dependentRequired", "dependentSchemas", "dependencies"):
        return "" if isinstance(value, Mapping) else "it must be an object"
    if key in ("uniqueItems", "nullable"):
        return "" if isinstance(value, bool) else "it must be true or false"
    return ""


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
        self._compile = check
        self._effort = EFFORT
        self._root: Any = True
        self._anchors: dict[str, str] = {}
        self._origins: dict[Path, list[tuple[Path, str]]] = {}

    def _check(self, schema: Any) -> str:
        """Compile a part, for a share of the effort."""
        self._effort -= len(json.dumps(schema))
        return self._compile(schema) if self._effort > 0 else ""

    def __call__(self, schema: Any) -> Any:
        """The schema to compile.

        Raises:
            SchemaError: no schema at all, one that nothing satisfies, one that is too large or too complex, or
                (strict) one that cannot be enforced.
        """
        self._bounded(schema)
        self._root, self._anchors = schema, dict(_anchors(schema))
        made = self._walk(schema, (), {})
        try:
            together = conjuncts(made, CONJUNCTS)
        except RecursionError as error:
            raise SchemaError(f"{self._param}: the schema is too deep: {error}", param=self._param) from error
        if together > CONJUNCTS:
            raise SchemaError(
                f"{self._param}: a string must match more than {CONJUNCTS} patterns at once (allOf, $ref); write fewer",
                param=self._param,
            )
        for _ in range(_REPAIRS):
            reason = self._compile(made)
            if not reason:
                if Sizes(made).of(made) >= BOUNDLESS:
                    raise SchemaError(
                        f"{self._param}: every value of this schema has more than {BOUNDLESS} bytes, or none ends "
                        "(a minimum that is too large, or a part that requires itself); lower it",
                        param=self._param,
                    )
                return made
            if "unsatisfiable" in reason.lower():
                raise SchemaError(f"{self._param}: no value can satisfy this schema: {reason}", param=self._param)
            path, keyword = self._culprit(made, (), made)
            if self._effort <= 0:
                break
            origin = next((end for end in range(len(path) + 1) if path[:end] in self._origins), None)
            if origin is not None:  # the part stands for a condition of the client's schema, which goes as a whole
                path, keyword = path[:origin], ""
                for here, name in self._origins[path]:
                    self._drop(here, name, reason)
            else:
                self._drop((*path, keyword) if keyword else path, keyword or "this schema", reason)
            made = _without(made, path, keyword)
        raise SchemaError(f"{self._param}: the schema cannot be enforced: {reason}", param=self._param)

    def _bounded(self, schema: Any) -> None:
        try:
            size = len(json.dumps(schema, default=dict, ensure_ascii=False).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise SchemaError(f"{self._param} is not JSON that can be compiled: {error}", param=self._param) from error
        if size > BYTES:
            raise SchemaError(
                f"{self._param} has {size} bytes; the limit of a schema is {BYTES}: make it smaller", param=self._param
            )

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

    def _walk(self, schema: Any, path: Path, around: Mapping[str, Any]) -> Any:
        """The same schema in the subset that the compiler knows.

        `around`: the properties that are declared for the same value by what the schema is a part of.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError(
                f"{self._param}: {pointer(path)} must be a schema (an object or a boolean), not {schema!r:.60}",
                path=pointer(path),
                param=self._param,
            )
        if len(path) > DEPTH:
            raise SchemaError(f"{self._param}: the schema is nested deeper than {DEPTH} steps", param=self._param)
        made: dict[str, Any] = {}
        declared = schema.get("properties")
        scope = {**around, **declared} if isinstance(declared, Mapping) else around
        for key, value in schema.items():
            here = (*path, key)
            if value is not None and (misfit := _misfit(key, value)):
                self._drop(here, key, f"{misfit}, not {value!r:.60}")
                continue
            if key in UNENFORCEABLE:
                self._unenforceable(schema, key, here, made)
            elif key == "pattern" and isinstance(value, str) and repetitions(value) > REPETITIONS:
                self._drop(here, key, f"it repeats a part more than {REPETITIONS} times")
            elif key in _PLAIN:
                if value is not None or key == "const":
                    made[key] = int(value) if key in _COUNTS else value
            elif key in MANY or (key == "items" and isinstance(value, list | tuple)):
                if not isinstance(value, list | tuple):
                    raise SchemaError(
                        f"{self._param}: {pointer(here)} must be a list of schemas",
                        path=pointer(here),
                        param=self._param,
                    )
                inner = {} if key in ("prefixItems", "items") else scope
                made[key] = [self._walk(item, (*here, i), inner) for i, item in enumerate(value)]
            elif key in NAMED:
                if not isinstance(value, Mapping):
                    raise SchemaError(
                        f"{self._param}: {pointer(here)} must be an object", path=pointer(here), param=self._param
                    )
                made[key] = {name: self._walk(item, (*here, name), {}) for name, item in value.items()}
            elif key in ("items", "additionalProperties", "additionalItems"):
                made[key] = self._walk(value, here, {})
            elif key == "$ref":
                self._reference(value, here, made)
        self._spellings(schema, made, path)
        self._conditions(schema, made, path, scope)
        if schema.get("nullable") is True and made:
            rest = {key: made.pop(key) for key in list(made) if key not in ("$defs", "definitions")}
            made["anyOf"] = [rest, {"type": "null"}]
        return made

    def _conditions(
        self, schema: Mapping[str, Any], made: dict[str, Any], path: Path, scope: Mapping[str, Any]
    ) -> None:
        """Conditions as further members of `allOf`."""

        def walk(part: Any, steps: Path, same: bool) -> Any:
            return self._walk(part, (*path, *steps), scope if same else {})

        base = (*path, "anyOf", 0, "allOf") if schema.get("nullable") is True else (*path, "allOf")
        conditions = Conditions(schema, scope, self._root, walk)
        for keyword, alternatives in conditions.found():
            here = (*path, keyword)
            if keyword in ("minProperties", "maxProperties"):
                made.pop(keyword, None)
            try:
                ways = alternatives()
            except Unenforceable as error:
                self._drop(here, keyword, str(error))
                continue
            members = made.setdefault("allOf", [])
            self._origins[(*base, len(members))] = [(here, keyword)]
            members.append({"anyOf": ways} if ways else False)
        self._join(made.get("allOf", []), base, conditions)

    def _join(self, members: list[Any], base: Path, conditions: Conditions) -> None:
        """Conditions on one value as one union, also those that are alone in a member of a client's `allOf`."""
        places = []
        for i, member in enumerate(members):
            inner = member.get("allOf") if isinstance(member, Mapping) and set(member) == {"allOf"} else None
            for place in [(i, "allOf", j) for j in range(len(inner))] if inner else [(i,)]:
                part = members[i]["allOf"][place[-1]] if inner else member
                if (*base, *place) in self._origins and isinstance(part, Mapping):
                    places.append((place, part["anyOf"], inner))
        if len(places) < 2:
            return
        (first, ways, _), *others = places
        for place, more, _ in others:
            both = conditions.joined(ways, more)
            if both is None:
                continue
            ways = both
            self._origins[(*base, *first)] += self._origins.pop((*base, *place))
            _put(members, place, True)
        _put(members, first, {"anyOf": ways})

    def _unenforceable(self, schema: Mapping[str, Any], key: str, here: Path, made: dict[str, Any]) -> None:
        value = schema[key]
        if key == "unevaluatedProperties" and not any(k in schema for k in (*_COMBINED, "additionalProperties")):
            made["additionalProperties"] = self._walk(value, here, {})
        elif not _idle(schema, key):
            self._drop(here, key, "the grammar compiler does not know it")

    def _reference(self, value: Any, here: Path, made: dict[str, Any]) -> None:
        if not isinstance(value, str) or not value.startswith("#"):
            self._drop(here, "$ref", f"{value!r:.80} is not in this document, and nothing is fetched")
        elif value in ("#", *self._anchors) or value.startswith("#/"):
            made["$ref"] = self._anchors.get(value, value)
        else:
            self._drop(here, "$ref", f"no part of this document has the $anchor {value[1:]!r:.80}")

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
        self._type(made, path)
        if "format" in schema:
            self._format(schema["format"], made, path)
        if "propertyNames" in schema:
            self._names(self._walk(schema["propertyNames"], (*path, "propertyNames"), {}), made, path)

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
        elif value not in ANNOTATIONS:
            self._drop((*path, "format"), "format", f"{value!r:.40} is none of {', '.join(FORMATS)}")

    def _names(self, names: Any, made: dict[str, Any], path: Path) -> None:
        """`propertyNames` as `patternProperties`: what it demands becomes the pattern of all undeclared names."""
        if names is True or names == {} or names == {"type": "string"}:
            return
        pattern = _name_pattern(names)
        if pattern is not None and repetitions(pattern) > REPETITIONS:
            pattern = None
        declared = made.get("properties", {})
        if pattern is None or "patternProperties" in made or any(key in made for key in ("allOf", "anyOf", "$ref")):
            self._drop(
                (*path, "propertyNames"), "propertyNames", "only patterns, lengths and enumerations are enforced"
            )
            return
        wrong = mismatches(pattern, declared)
        rest = made.get("additionalProperties", True)
        if rest is not False:
            made["patternProperties"] = {pattern: rest}
        made["additionalProperties"] = False
        if wrong:
            made["properties"] = {key: value for key, value in declared.items() if key not in wrong}

    def _culprit(self, schema: Any, path: Path, root: Any) -> tuple[Path, str]:
        """The deepest part that does not compile on its own, and its keyword without which it does."""
        for step, child in children(schema):
            reason = self._check(attach(child, root)) if isinstance(child, Mapping) else ""
            if reason and "unsatisfiable" not in reason.lower():  # what nothing satisfies may well be a part
                return self._culprit(child, (*path, *step), root)
        if isinstance(schema, Mapping):
            for key in reversed([k for k in schema if k not in ("$defs", "definitions", "type")]):
                if not self._check(attach({k: v for k, v in schema.items() if k != key}, root)):
                    return path, key
        return path, ""


def _idle(schema: Mapping[str, Any], key: str) -> bool:
    """Whether an unenforceable keyword says nothing where it stands."""
    return schema[key] is True or schema[key] == {}


def _put(members: list[Any], place: Path, part: Any) -> None:
    """Replace a member, or a member of a member's `allOf`."""
    *steps, last = place
    target: Any = members
    for step in steps:
        target = target[step]
    target[last] = part


def _anchors(schema: Any, path: Path = ()) -> Iterator[tuple[str, str]]:
    """The references to the anchors of a schema, and the pointers to the same parts."""
    if len(path) > DEPTH or not isinstance(schema, Mapping):
        return
    if isinstance(schema.get("$anchor"), str):
        yield f"#{schema['$anchor']}", pointer(path)
    for step, child in children(schema):
        yield from _anchors(child, (*path, *step))


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
