"""Conditions in JSON schemas, written as unions that the grammar compiler knows. No torch.

`if`, `not`, `dependentRequired` and the like speak of values that a schema does *not* describe. Where what remains
can be said with the other keywords (a property that is absent, an enumeration without some of its values, a string
that is none of a few), the condition becomes a list of alternatives, of which a value must satisfy one. The
alternatives are exact, but for `contains` (an item among the first few must match), `uniqueItems` over many values (in
the order of the enumeration) and `minProperties` (declared ones count): there they allow less than the schema, never
more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise, permutations
from typing import Any

from .sizes import resolve

Walk = Callable[..., Any]
"""Rewrite a part: the part, the steps to it from the schema, and whether it speaks of the same value."""

Alternatives = list[Any]

ALTERNATIVES = 64
"""Most alternatives of one condition: those of several conditions are multiplied by the compiler."""

SEQUENCES = 130
"""Most arrays that stand for `uniqueItems`: the compiler takes a second for so many."""

PLACES = 8
"""`contains` demands a matching item among so many first ones."""

SPELLED = 2000
"""Most characters of strings that a string may be told not to be."""

OTHERS = ("null", "boolean", "number", "string", "array", "object")
_LEAST = {"string": ("", "minLength"), "array": ([], "minItems"), "object": ({}, "minProperties")}
_OPPOSITE = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_SILENT = ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")


class Unenforceable(Exception):  # noqa: N818 - it never leaves this package
    """A condition that the alternatives cannot express; the text says why."""


class Conditions:
    """The conditions of one schema object.

    Args:
        schema: the object as it was given.
        scope: the properties that it and what surrounds it at the same value declare.
        root: the whole document, for references.
        walk: rewrites the parts that enter an alternative.
    """

    def __init__(self, schema: Mapping[str, Any], scope: Mapping[str, Any], root: Any, walk: Walk) -> None:
        self._schema, self._scope, self._root, self._walk = schema, scope, root, walk

    def found(self) -> Iterator[tuple[str, Callable[[], Alternatives]]]:
        """Each condition by its keyword; calling it gives its alternatives or raises `Unenforceable`."""
        schema = self._schema
        if "if" in schema and ("then" in schema or "else" in schema):
            yield "if", self._if
        if "not" in schema and schema["not"] is not False:
            yield "not", lambda: self._negated(schema["not"], schema)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, demand in _mapping(schema.get(keyword)).items():
                if demand not in (True, {}, []):
                    yield keyword, self._dependent(keyword, name, demand)
        if "contains" in schema and not (schema.get("minContains") == 0 and "maxContains" not in schema):
            yield "contains", self._contains
        if schema.get("uniqueItems") is True and not _number(schema.get("maxItems"), 2) < 2:
            yield "uniqueItems", self._unique
        if self._choosable() and "minProperties" in schema:
            yield "minProperties", self._least
        if self._choosable() and "maxProperties" in schema:
            yield "maxProperties", self._most

    # conditions

    def _if(self) -> Alternatives:
        schema = self._schema
        held = [self._walk(schema["if"], ("if",), True)]
        if "then" in schema:
            held.append(self._walk(schema["then"], ("then",), True))
        otherwise = [self._walk(schema["else"], ("else",), True)] if "else" in schema else []
        made = [_all(held)]
        made += [_all([part, *otherwise]) for part in self._negated(schema["if"], schema)]
        return made

    def _dependent(self, keyword: str, name: str, demand: Any) -> Callable[[], Alternatives]:
        def made() -> Alternatives:
            absent = {"properties": {name: False}}
            if isinstance(demand, list | tuple):
                if not all(isinstance(other, str) for other in demand):
                    raise Unenforceable("it must list names")
                return [absent, {"required": [name, *demand]}]
            return [absent, _all([{"required": [name]}, self._walk(demand, (keyword, name), True)])]

        return made

    def _contains(self) -> Alternatives:
        schema = self._schema
        if schema.get("minContains", 1) != 1 or "maxContains" in schema:
            raise Unenforceable("minContains and maxContains are not enforced")
        wanted = self._walk(schema["contains"], ("contains",), False)
        places = min(PLACES, int(_number(schema.get("maxItems"), PLACES)))
        return [{"prefixItems": [True] * i + [wanted], "minItems": i + 1} for i in range(places)]

    def _unique(self) -> Alternatives:
        schema = self._schema
        values = None if "prefixItems" in schema else self._values(schema.get("items"))
        if values is None or schema.get("type") != "array":
            raise Unenforceable("the items must be those of an enumeration")
        least, most = int(_number(schema.get("minItems"), 0)), int(_number(schema.get("maxItems"), len(values)))
        lengths = range(least, min(most, len(values)) + 1)
        for sequences in (permutations, combinations):
            made = []
            for sequence in (item for n in lengths for item in sequences(values, n)):
                made.append(list(sequence))
                if len(made) > SEQUENCES:
                    break
            else:
                return [{"enum": made}] if made else [False]
        raise Unenforceable(f"more than {SEQUENCES} arrays of different items are possible")

    def _choosable(self) -> bool:
        """Whether the object has optional properties, where the compiler does not count."""
        declared = self._schema.get("properties")
        required = self._schema.get("required")
        names = set(map(str, required)) if isinstance(required, list | tuple) else set()
        return isinstance(declared, Mapping) and not names >= set(declared)

    def _optional(self) -> tuple[int, list[str]]:
        """How many properties are required, and which ones are not."""
        required = {str(name) for name in self._schema.get("required", ())}
        return len(required), [name for name in self._schema["properties"] if name not in required]

    def _least(self) -> Alternatives:
        required, optional = self._optional()
        missing = max(0, int(_number(self._schema["minProperties"], 0)) - required)
        if missing > len(optional) and self._schema.get("additionalProperties") is not False:
            raise Unenforceable("fewer properties are declared")
        return _few({"required": list(names)} for names in combinations(optional, missing))

    def _most(self) -> Alternatives:
        required, optional = self._optional()
        if self._schema.get("additionalProperties") is not False or self._schema.get("patternProperties"):
            raise Unenforceable("beside optional properties it needs additionalProperties: false")
        room = int(_number(self._schema["maxProperties"], 0)) - required
        absent = max(0, len(optional) - room)
        if room < 0:
            return [False]
        return _few({"properties": dict.fromkeys(names, False)} for names in combinations(optional, absent))

    # what a schema leaves over

    def _negated(self, part: Any, about: Any, depth: int = 0) -> Alternatives:
        """Alternatives for the values that do not satisfy a part, exactly; `about` says which values there are."""
        if isinstance(part, bool):
            return [] if part else [True]
        if not isinstance(part, Mapping) or depth > 8:
            raise Unenforceable("it is nested too deep" if isinstance(part, Mapping) else "it holds what is no schema")
        made: Alternatives = []
        for key, value in part.items():
            if key in _SILENT or (key in ("then", "else") and "if" not in part):
                continue
            made += self._negated_keyword(key, value, part, about, depth)
            if len(made) > ALTERNATIVES:
                raise Unenforceable(f"it has more than {ALTERNATIVES} alternatives")
        return made

    def _negated_keyword(self, key: str, value: Any, part: Mapping[str, Any], about: Any, depth: int) -> Alternatives:
        if key in ("const", "enum"):
            forbidden = list(value) if key == "enum" and isinstance(value, list | tuple) else [value]
            return self._without(forbidden, about)
        if key == "type":
            return self._other_types(value, about)
        if key == "required" and isinstance(value, list | tuple):
            return [{"type": "object", "properties": {str(name): False}} for name in value]
        if key == "properties":
            return [
                {"type": "object", "required": [name], "properties": {name: other}}
                for name, inner in _mapping(value).items()
                for other in self._negated(inner, self._scope.get(name), depth + 1)
            ]
        if key == "not":
            return [self._walk(value, (), True)]
        if key in ("allOf", "anyOf") and not isinstance(value, list | tuple):
            raise Unenforceable(f"{key!r} must be a list")
        if key == "allOf":
            return [other for inner in value for other in self._negated(inner, about, depth + 1)]
        if key == "anyOf":
            ways: list[list[Any]] = [[]]
            for inner in value:
                others = self._negated(inner, about, depth + 1)
                ways = [[*way, other] for way in ways for other in others]
                if len(ways) > ALTERNATIVES:
                    raise Unenforceable(f"it has more than {ALTERNATIVES} alternatives")
            return [_all(way) for way in ways]
        if key == "$ref" and isinstance(value, str):
            return self._negated(resolve(value, self._root), about, depth + 1)
        if key in _OPPOSITE and isinstance(value, int | float) and not isinstance(value, bool):
            kind, opposite, step = _OPPOSITE[key]
            return [{"type": kind, opposite: value + step}] if value + step >= 0 or kind == "number" else []
        raise Unenforceable(f"what does not satisfy {key!r} cannot be said")

    def _without(self, forbidden: Sequence[Any], about: Any) -> Alternatives:
        """The values of a part but for these."""
        keys = {_key(value) for value in forbidden}
        known = self._values(about)
        if known is not None:
            left = [value for value in known if _key(value) not in keys]
            return [{"enum": left}] if left else []
        kinds = self._kinds(about)
        whole = [kind for kind in kinds if not any(_is(value, kind) for value in forbidden)]
        made: Alternatives = [{"type": whole}] if whole else []
        for kind in kinds:
            if kind not in whole:
                made += _others(kind, [value for value in forbidden if _is(value, kind)])
        return made

    def _other_types(self, value: Any, about: Any) -> Alternatives:
        gone = {value} if isinstance(value, str) else set(value if isinstance(value, list | tuple) else ())
        kinds = self._kinds(about)
        if "integer" in gone and "number" not in gone and "number" in kinds:
            raise Unenforceable("numbers that are no integers cannot be described")
        if "number" in gone:
            gone.add("integer")
        left = [kind for kind in kinds if kind not in gone]
        return [{"type": left}] if left else []

    def _resolved(self, about: Any) -> Any:
        for _ in range(8):
            reference = about.get("$ref") if isinstance(about, Mapping) else None
            if not isinstance(reference, str):
                break
            about = resolve(reference, self._root)
        return about

    def _values(self, about: Any) -> list[Any] | None:
        """All values of a part, if they are few and listed."""
        about = self._resolved(about)
        if not isinstance(about, Mapping):
            return None
        if "const" in about:
            return [about["const"]]
        if isinstance(about.get("enum"), list | tuple):
            unique = {_key(value): value for value in about["enum"]}
            return list(unique.values())
        return {"boolean": [False, True], "null": [None]}.get(str(about.get("type")))

    def _kinds(self, about: Any) -> list[str]:
        about = self._resolved(about)
        declared = about.get("type") if isinstance(about, Mapping) else None
        if isinstance(declared, str):
            return [declared]
        return [str(kind) for kind in declared] if isinstance(declared, list | tuple) and declared else list(OTHERS)

    def joined(self, one: Alternatives, other: Alternatives) -> Alternatives | None:
        """The alternatives of two conditions at once, without those that contradict themselves; None: too many.

        The compiler would multiply all of them; where each condition asks about the same property, few are left.
        """
        required = self._schema.get("required")
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list | tuple) else set()
        made: dict[str, Any] = {}
        for a in one:
            for b in other:
                both = _Parts(needed)
                both.add(a)
                both.add(b)
                if both.possible(lambda name: self._values(self._scope.get(name))):
                    written = both.written()
                    made[json.dumps(written, sort_keys=True, default=str)] = written
        return list(made.values()) or [False] if len(made) <= ALTERNATIVES else None


class _Parts:
    """One alternative of several conditions, by what it says of each property."""

    def __init__(self, required: set[str]) -> None:
        self._around = required
        self._required: set[str] = set()
        self._properties: dict[str, list[Any]] = {}
        self._rest: list[Any] = []

    def add(self, part: Any) -> None:
        """Also demand a part."""
        if not isinstance(part, Mapping):
            self._rest += [] if part is True or part in self._rest else [part]
            return
        rest = {}
        for key, value in part.items():
            if key == "allOf":
                for inner in value:
                    self.add(inner)
            elif key == "required":
                self._required.update(value)
            elif key == "properties":
                for name, inner in value.items():
                    known = self._properties.setdefault(name, [])
                    known += [part for part in _flat(inner) if part not in known]
            else:
                rest[key] = value
        self._rest += [rest] if rest and rest not in self._rest else []

    def possible(self, values: Callable[[str], list[Any] | None]) -> bool:
        """Whether it does not plainly contradict itself; `values`: what a property can be, if that is listed."""
        for name in self._required | self._around:
            known = values(name)
            left = None if known is None else {_key(value) for value in known}
            for part in self._properties.get(name, ()):
                if part is False:
                    return False
                listed = _listed(part)
                if listed is not None:
                    keys = {_key(value) for value in listed}
                    left = keys if left is None else left & keys
            if left is not None and not left:
                return False
        return False not in self._rest

    def written(self) -> Any:
        """It as a schema."""
        made: dict[str, Any] = {}
        if self._required:
            made["required"] = sorted(self._required)
        if self._properties:
            made["properties"] = {name: _all(_narrowed(parts)) for name, parts in self._properties.items()}
        rest = []
        for part in self._rest:
            if isinstance(part, Mapping) and not made.keys() & part.keys():
                made |= part
            else:
                rest.append(part)
        return _all([made, *rest])


def _flat(part: Any) -> list[Any]:
    """A part as what it demands together."""
    if isinstance(part, Mapping) and set(part) == {"allOf"}:
        return [inner for member in part["allOf"] for inner in _flat(member)]
    return [] if part is True or part == {} else [part]


def _narrowed(parts: Sequence[Any]) -> list[Any]:
    """Parts with one enumeration instead of several."""
    lists = [found for part in parts if part and len(part) == 1 and (found := _listed(part)) is not None]
    if len(lists) < 2:
        return list(parts)
    keys = set.intersection(*({_key(value) for value in listed} for listed in lists))
    rest = [part for part in parts if not (isinstance(part, Mapping) and len(part) == 1 and _listed(part) is not None)]
    return [{"enum": [value for value in lists[0] if _key(value) in keys]}, *rest]


def _listed(part: Any) -> list[Any] | None:
    if isinstance(part, Mapping) and "const" in part:
        return [part["const"]]
    listed = part.get("enum") if isinstance(part, Mapping) else None
    return list(listed) if isinstance(listed, list | tuple) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else default


def _all(parts: Sequence[Any]) -> Any:
    """A schema for what satisfies every part."""
    parts = [part for part in parts if part is not True and part != {}]
    return parts[0] if len(parts) == 1 else {"allOf": list(parts)} if parts else True


def _few(made: Iterator[Any]) -> Alternatives:
    alternatives: Alternatives = []
    for one in made:
        alternatives.append(one)
        if len(alternatives) > ALTERNATIVES:
            raise Unenforceable(f"it has more than {ALTERNATIVES} alternatives")
    return alternatives or [False]


def _key(value: Any) -> str:
    """Equal for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and float(value).is_integer())
    return kind == {str: "string", list: "array", tuple: "array"}.get(type(value), "object")


def _others(kind: str, forbidden: Sequence[Any]) -> Alternatives:
    """The values of one type but for these."""
    if kind == "null":
        return []
    if kind == "boolean":
        left = [value for value in (False, True) if value not in forbidden]
        return [{"enum": left}] if left else []
    if kind in ("integer", "number"):
        return _between(kind, sorted(set(forbidden)))
    empty, keyword = _LEAST[kind]
    if all(value == empty for value in forbidden):
        return [{"type": kind, keyword: 1}]
    if kind == "string" and sum(map(len, forbidden)) <= SPELLED:
        return [{"type": "string", "pattern": f"^{_none_of(set(forbidden))}$"}]
    raise Unenforceable(f"a value of type {kind} cannot be kept from being one of these")


def _between(kind: str, numbers: Sequence[float]) -> Alternatives:
    bounds = [None, *numbers, None]
    made: Alternatives = []
    for low, high in pairwise(bounds):
        span: dict[str, Any] = {"type": kind}
        if low is not None:
            span["exclusiveMinimum"] = low
        if high is not None:
            span["exclusiveMaximum"] = high
        if not (kind == "integer" and low is not None and high is not None and high - low <= 1):
            made.append(span)
    return made


def _none_of(words: set[str]) -> str:
    """A regular expression for every string but these: at each letter it leaves their tree or goes on in it."""
    ways = [] if "" in words else [""]
    letters = sorted({word[0] for word in words if word})
    if not letters:
        return "(?s:.)+" if "" in words else "(?s:.)*"
    ways.append(f"[^{''.join(_in_class(letter) for letter in letters)}](?s:.)*")
    for letter in letters:
        ways.append(re.escape(letter) + _none_of({word[1:] for word in words if word[:1] == letter}))
    return f"({'|'.join(ways)})"


def _in_class(letter: str) -> str:
    return f"\\{letter}" if letter in "\\]^-[" else letter
