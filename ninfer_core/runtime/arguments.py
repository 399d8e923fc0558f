"""What the arguments of a tool can be: the ways to fill its parameters, and the types of one of them. No torch.

Arguments of a call stand apart from each other, each with a schema of its own. Unions, references and `allOf` around
them are worked out here: what a combination demands of one argument is merged, and kept whole where it is an object
or an array, which the compiler reads itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SchemaError
from .sizes import resolve

VALUE = "value"
"""The type of an enumeration of values that are no strings."""

_STEPS = 10_000
"""Parts that are looked at for the alternatives of a tool's parameters."""

_LIMIT = 64
"""Alternatives of one argument, or of all parameters together."""

_DEPTH = 16

_UNIONS = ("anyOf", "oneOf")
_COMBINING = ("$ref", "allOf", *_UNIONS)
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_TEXT = ("pattern", "format", "minLength", "maxLength")


# one argument


def leaves(schema: Any, root: Any) -> list[dict[str, Any]]:
    """The alternatives of a schema with one `type` each, references and unions followed; no type means a string.

    `patterns` and `formats` hold all that a string must match; `allOf` remains where it is an object or an array.
    """
    found = [leaf for part in _alternatives(schema, root, frozenset()) for leaf in _typed(part)]
    return found[:_LIMIT]


def _alternatives(schema: Any, root: Any, seen: frozenset[str]) -> list[dict[str, Any]]:
    """Schemas without unions and references, one of which a value must satisfy."""
    if isinstance(schema, bool) or not isinstance(schema, Mapping):
        return [] if schema is False else [{}]
    if schema.get("type") in ("object", "array") or len(seen) > _DEPTH:
        return [dict(schema)]
    rest = {key: value for key, value in schema.items() if key not in _COMBINING}
    ways = [rest]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        inner = [] if reference in seen else _alternatives(resolve(reference, root), root, seen | {reference})
        ways = _product(ways, inner)
    for member in schema.get("allOf") or ():
        ways = _product(ways, _alternatives(member, root, seen))
    for key in _UNIONS:
        if schema.get(key):
            ways = _product(ways, [way for member in schema[key] for way in _alternatives(member, root, seen)])
    return ways


def _product(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = [both for a in some for b in others if (both := _both(a, b)) is not None]
    return made[:_LIMIT]


def _both(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any] | None:
    """What satisfies both; None if nothing does."""
    kinds = _kinds(a, b)
    if kinds == []:
        return None
    values = _values(a, b)
    if values == []:
        return None
    together = list(a.get("allOf", ())) + list(b.get("allOf", ()))
    made = {key: value for key, value in {**b, **a}.items() if key not in ("type", "const", "enum", "allOf")}
    for key in a.keys() & b.keys() - {"type", "const", "enum", "allOf"}:
        if a[key] == b[key]:
            continue
        if key in _MOST or key in _LEAST:
            made[key] = (min if key in _MOST else max)(a[key], b[key])
        elif key in ("patterns", "formats"):
            made[key] = (*a[key], *b[key])
        elif key in ("pattern", "format"):
            made.pop(key)
            made[f"{key}s"] = (*made.get(f"{key}s", ()), a[key], b[key])
        else:
            together += [{key: made.pop(key)}, {key: b[key]}]
    if values is not None:
        made["enum"] = values
    if kinds is not None:
        made["type"] = kinds[0] if len(kinds) == 1 else kinds
    return {**made, "allOf": together} if together else made


def _kinds(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str] | None:
    """The common types; None if neither says one."""
    one, two = _declared(a), _declared(b)
    if not one or not two:
        return one or two or None
    common = [kind for kind in one if kind in two]
    if "integer" not in common and (("integer" in one and "number" in two) or ("number" in one and "integer" in two)):
        common.append("integer")
    return common


def _declared(part: Mapping[str, Any]) -> list[str]:
    declared = part.get("type")
    return [declared] if isinstance(declared, str) else list(declared or ())


def _listed(part: Mapping[str, Any]) -> list[Any] | None:
    return list(part["enum"]) if "enum" in part else [part["const"]] if "const" in part else None


def _values(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Any] | None:
    one, two = _listed(a), _listed(b)
    if one is None or two is None:
        return one if two is None else two
    known = {json.dumps(value, sort_keys=True) for value in two}
    return [value for value in one if json.dumps(value, sort_keys=True) in known]


def _typed(part: dict[str, Any]) -> list[dict[str, Any]]:
    """One schema object, once for each of its types."""
    values, kinds = _listed(part), _declared(part)
    if values is not None:
        texts = [v for v in values if isinstance(v, str) and (not kinds or "string" in kinds)]
        others = [v for v in values if not isinstance(v, str)]
        rest = {key: value for key, value in part.items() if key not in ("enum", "const", "type")}
        made = [{**rest, "type": "string", "enum": texts}] if texts else []
        return made + ([{**_without_text(rest), "type": VALUE, "enum": others}] if others else [])
    if not kinds:
        kinds = ["object"] if "properties" in part or "additionalProperties" in part else []
        kinds = kinds or (["array"] if "items" in part or "prefixItems" in part else ["string"])
    return [{**(part if kind == "string" else _without_text(part)), "type": kind} for kind in kinds]


def _without_text(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in (*_TEXT, "patterns", "formats")}


def constraints(leaf: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The patterns or formats (`key` "pattern", "format") of a string."""
    return (*leaf.get(f"{key}s", ()), *((leaf[key],) if key in leaf else ()))


# all parameters


@dataclass(slots=True)
class Variant:
    """One way to fill an object: declared parameters in order (False: absent), those that are required, the rest.

    `names` is a pattern of undeclared names; `least` and `most` bound the number of parameters. `listed`: parameters
    are declared and nothing is said of others, which a schema allows and a model need not make up.
    """

    declared: dict[str, Any] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    rest: Any = True
    names: str | None = None
    least: int = 0
    most: int | None = None
    listed: bool = False

    def joined(self, other: Variant) -> Variant | None:
        """What satisfies both; None if nothing does."""
        names = {**self.declared, **other.declared}
        declared, required = {}, self.required | other.required
        for name in names:
            parts = [_of(variant, name) for variant in (self, other)]
            if False in parts:
                if name in required:
                    return None
                declared[name] = False
                continue
            parts = [part for part in parts if part is not True and part != {}]
            declared[name] = parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True
        rests = [rest for rest in (self.rest, other.rest) if rest is not True]
        most = [most for most in (self.most, other.most) if most is not None]
        return Variant(
            declared,
            required,
            False if False in rests else {"allOf": rests} if len(rests) > 1 else rests[0] if rests else True,
            self.names or other.names,
            max(self.least, other.least),
            min(most) if most else None,
            self.listed or other.listed,
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """The declared parameters that may be there."""
        return {name: part for name, part in self.declared.items() if part is not False}

    @property
    def free(self) -> bool:
        """Whether any names may be given."""
        return not self.parameters and self.rest is not False and not self.listed

    @property
    def possible(self) -> bool:
        """Whether the number of its parameters can be right."""
        most = len(self.parameters) if self.most is None else min(self.most, len(self.parameters))
        return self.free or (self.least <= most and len(self.required) <= most)


def _of(variant: Variant, name: str) -> Any:
    return variant.declared.get(name, variant.rest)


def variants(schema: Any, root: Any, depth: int = 0, steps: list[int] | None = None) -> list[Variant]:
    """The ways to fill an object: references and `allOf` merged, one for each alternative of a union.

    Raises:
        SchemaError: too many of them.
    """
    steps = [_STEPS] if steps is None else steps
    steps[0] -= 1
    if steps[0] < 0:
        raise SchemaError(f"a tool's parameters combine more than {_STEPS} parts (allOf, $ref); write fewer")
    if schema is False:
        return []
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return [Variant()]
    made = [_own(schema)]
    parts = [[resolve(schema["$ref"], root)]] if isinstance(schema.get("$ref"), str) else []
    parts += [[member] for member in schema.get("allOf", ())]
    parts += [list(schema[key]) for key in _UNIONS if schema.get(key)]
    for options in parts:
        ways = [way for option in options for way in variants(option, root, depth + 1, steps)]
        made = list(_all(made, ways))
        if len(made) > _LIMIT:
            raise SchemaError(f"a tool's parameters have more than {_LIMIT} alternatives; write fewer")
    return made


def _all(some: Iterable[Variant], others: list[Variant]) -> Iterable[Variant]:
    return (both for a in some for b in others if (both := a.joined(b)) is not None)


def _own(schema: Mapping[str, Any]) -> Variant:
    patterns = schema.get("patternProperties") or {}
    rest, names = schema.get("additionalProperties", True), None
    if len(patterns) == 1 and rest is False:
        ((names, rest),) = patterns.items()
    declared, required = dict(schema.get("properties", {})), [str(name) for name in schema.get("required", ())]
    for name in required:
        declared.setdefault(name, rest)
    listed = "properties" in schema and "additionalProperties" not in schema and not patterns
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    return Variant(declared, set(required), rest, names, int(least), None if most is None else int(most), listed)
