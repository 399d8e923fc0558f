"""How long the values of a JSON schema are at least, and how much one of them must satisfy at once. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

ONE = ("additionalProperties", "items", "contains", "not", "propertyNames", "additionalItems")
MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold a schema, a list of schemas, schemas by name."""

BOUNDLESS = 10**6
"""A size that stands for no finite one."""

CHAIN = 300
"""How many steps from part to part, references followed, a schema may take."""

_ROUNDS = 64
"""Passes over all references; each one settles at least those that only settled ones are inside of."""


def children(schema: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The schemas directly inside a schema, with the steps that lead to them."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            yield from (((key, name), item) for name, item in value.items())
        elif key in MANY and isinstance(value, list):
            yield from (((key, i), item) for i, item in enumerate(value))
        elif key in ONE:
            yield (key,), value


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


def references(root: Any) -> list[str]:
    """The local references in a schema, each once."""
    found: dict[str, None] = {}
    stack = [root]
    while stack:
        part = stack.pop()
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(reference, str):
            found[reference] = None
        stack += [child for _, child in children(part)]
    return list(found)


class Sizes:
    """The least sizes in bytes of the values of one schema and of its parts.

    The size of each reference is worked out once, by passes over all of them until nothing changes.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, tuple[Any, int]] = {}
        self._sizes = dict.fromkeys(references(root), BOUNDLESS)
        targets = [(reference, resolve(reference, root)) for reference in self._sizes]
        for _ in range(_ROUNDS):
            changed = False
            targets.reverse()
            for reference, target in targets:
                self._known.clear()
                size = self.of(target)
                changed |= size != self._sizes[reference]
                self._sizes[reference] = size
            if not changed:
                break
        self._known.clear()

    def of(self, schema: Any) -> int:
        """About how many bytes the shortest value of a part has; `BOUNDLESS` if it has no finite one."""
        if not isinstance(schema, Mapping):
            return 1
        if id(schema) not in self._known:
            self._known[id(schema)] = (schema, self._measure(schema))
        return self._known[id(schema)][1]

    def longest(self) -> int:
        """Bytes that the costliest part needs at least: how much one token can add to what must follow."""
        worst, stack = 1, [self._root]
        while stack:
            part = stack.pop()
            size = self.of(part)
            if isinstance(part, Mapping) and "allOf" in part:  # a choice may come to require what is optional
                declared = part.get("properties", {})
                size += sum(len(name) + 4 + self.of(inner) for name, inner in declared.items())
            worst = max(worst, size if size < BOUNDLESS else 1)
            stack += [child for _, child in children(part)]
        return worst

    def _measure(self, schema: Mapping[str, Any]) -> int:
        if "const" in schema:
            return min(len(json.dumps(schema["const"])), BOUNDLESS)
        if schema.get("enum"):
            return min(len(json.dumps(value)) for value in schema["enum"])
        sizes = [self._of_type(schema)]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            sizes.append(self._sizes.get(reference, BOUNDLESS))
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                sizes.append(min(self.of(item) for item in schema[key]))
        if schema.get("allOf"):
            sizes.append(sum(self.of(item) for item in schema["allOf"]))
        return min(max(sizes), BOUNDLESS)

    def _of_type(self, schema: Mapping[str, Any]) -> int:
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not kinds:
            kinds = ["object"] if "required" in schema else ["array"] if "minItems" in schema else ["number"]
        sizes = []
        for kind in kinds:
            if kind == "object":
                declared = schema.get("properties", {})
                names = [str(name) for name in schema.get("required", ())]
                sizes.append(2 + sum(len(name) + 4 + self.of(declared.get(name, True)) for name in names))
            elif kind == "array":
                first = schema.get("prefixItems", [])
                count = schema.get("minItems", 0)
                size = sum(1 + self.of(item) for item in first[:count])
                sizes.append(2 + size + max(0, count - len(first)) * (1 + self.of(schema.get("items", True))))
            elif kind == "string":
                pattern = len(schema.get("pattern", "")) + (32 if "format" in schema else 0)
                sizes.append(2 + max(int(schema.get("minLength", 0)), pattern))
            elif kind in ("integer", "number"):
                bound = max(abs(schema.get(key) or 0) for key in ("minimum", "exclusiveMinimum", "maximum"))
                sizes.append(2 + int(math.log10(bound + 1)) if math.isfinite(bound) else 20)
            else:
                sizes.append(5 if kind == "boolean" else 4)
        return min(sizes)


def longest_part(schema: Any) -> int:
    """See `Sizes.longest`."""
    return Sizes(schema).longest()


def shortest(schema: Any, root: Any) -> int:
    """See `Sizes.of`: for one part, where not many are asked for."""
    return Sizes(root).of(schema)


def conjuncts(root: Any, most: int) -> int:
    """About how many patterns one string of a schema must match at once; counts up to `most` + 1.

    Raises:
        RecursionError: references and parts lead into each other too deep.
    """
    known: dict[int, int] = {}

    def of(schema: Any, depth: int = 0) -> int:
        if depth > CHAIN:
            raise RecursionError(f"references and parts lead more than {CHAIN} steps deep")
        if not isinstance(schema, Mapping):
            return 0
        inside = [0, int(isinstance(schema.get("pattern"), str))]
        together = choice = 0
        for (key, *_), child in children(schema):
            if key in ("$defs", "definitions"):
                continue
            count = of(child, depth + 1)
            if key == "allOf":
                together += count
            elif key in ("anyOf", "oneOf"):
                choice = max(choice, count)
            else:
                inside.append(count)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = resolve(reference, root)
            if id(target) not in known:
                known[id(target)] = 0  # a cycle adds nothing
                known[id(target)] = of(target, depth + 1)
            together += known[id(target)]
        return min(max(inside) + together + choice, most + 1)

    return of(root)
