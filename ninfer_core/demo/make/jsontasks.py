"""JSON tasks: flat objects and objects two deep, from values in the request, with and without a schema in the prompt."""

from __future__ import annotations

import json
from typing import Any

from .dialogue import Task, user
from .tooltasks import shown
from .words import JOB, Draw

TYPES = {"integer": "integer", "number": "number", "boolean": "boolean"}
KINDS = ("string", "string", "string", "integer", "integer", "number", "boolean", "person", "place")
PAIRS = ("{k} {v}", "{k}: {v}", "{k} is {v}", "{k} = {v}")


def members(draw: Draw, keys: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Schema properties and values of scalar members."""
    kinds = {key: draw.one(KINDS) for key in keys}
    return {key: {"type": TYPES.get(kind, "string")} for key, kind in kinds.items()}, {
        key: draw.value(kind) for key, kind in kinds.items()
    }


def listed(draw: Draw, values: dict[str, Any]) -> str:
    """Scalar members as a request says them."""
    return ", ".join(draw.one(PAIRS).format(k=key, v=shown(value)) for key, value in values.items())


def asked(draw: Draw, schema: dict[str, Any], said: str) -> list[dict[str, Any]]:
    """Messages that give a schema and the values."""
    text = json.dumps(schema)
    if draw.chance(0.3):
        return [{"role": "system", "content": f"Answer with JSON that matches this schema:\n{text}"}, user(said + ".")]
    forms = ("Answer with JSON that matches this schema:\n{s}\n{t}", "{t}\nReturn JSON for this schema: {s}")
    return [user(draw.one(forms).replace("{s}", text).replace("{t}", said))]


def objects(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object whose members are all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def answer(values: dict[str, Any], said: str) -> tuple[str, str]:
    """The JSON text and the think block before it."""
    return json.dumps(values, ensure_ascii=False), f"The fields are {', '.join(values)}. Given: {said}."


def json_task(draw: Draw) -> Task:
    """A flat JSON object from values in the request, at times with a schema in the prompt."""
    properties, values = members(draw, draw.words(draw.one((1, 2, 2, 3, 3, 4))))
    said = listed(draw, values)
    if draw.chance(0.25):
        name, age, place, job = draw.name(), draw.rng.randint(1, 99), draw.place(), draw.one(JOB)
        values = {"name": name, "age": age}
        said = f"{name} is {age} years old"
        if draw.chance(0.6):
            values["city"] = place
            said += f", lives in {place}"
        if draw.chance(0.4):
            values["job"] = job
            said += f" and works as a {job}"
        properties = {key: {"type": "integer" if key == "age" else "string"} for key in values}
    style = draw.rng.random()
    forms: tuple[str, ...]
    if style < 0.4:
        fields = ", ".join(f"{key} ({entry['type']})" for key, entry in properties.items())
        forms = (
            f"Write a JSON object with the fields {fields}: {said}",
            f"{said}\nAnswer as JSON with {fields}.",
            f"Extract {fields} as JSON from: {said}",
        )
        messages = [user(draw.one(forms))]
    elif style < 0.85:
        messages = asked(draw, objects(properties), said)
    else:
        forms = (f"Give JSON with {said}", f"Make a JSON object: {said}", f"JSON: {said}", f"Write as JSON: {said}.")
        messages = [user(draw.one(forms))]
    return Task("json", messages, *answer(values, said))


def nested_task(draw: Draw) -> Task:
    """A JSON object two deep: inner objects, lists of words, numbers or objects."""
    keys = draw.words(draw.rng.randint(2, 3))
    properties: dict[str, Any] = {}
    values: dict[str, Any] = {}
    parts: list[str] = []
    deep = draw.rng.randrange(len(keys))
    for index, key in enumerate(keys):
        pick = draw.rng.random()
        if index != deep and pick < 0.5:
            entry, value = members(draw, [key])
            properties |= entry
            values |= value
            parts.append(listed(draw, value))
        elif pick < 0.65 or index == deep:
            inner = [word for word in draw.words(3) if word not in keys][: draw.rng.randint(1, 3)] or ["name"]
            entry, value = members(draw, inner)
            properties[key], values[key] = objects(entry), value
            parts.append(f"{key} ({listed(draw, value)})" if draw.chance(0.5) else f"{key}: {{{listed(draw, value)}}}")
        elif pick < 0.85:
            whole = draw.chance(0.4)
            items = [draw.value("integer") if whole else draw.word() for _ in range(draw.rng.randint(1, 4))]
            properties[key] = {"type": "array", "items": {"type": "integer" if whole else "string"}}
            values[key] = items
            parts.append(f"{key} [{', '.join(map(str, items))}]")
        else:
            inner = draw.words(draw.rng.randint(1, 2))
            entry, _ = members(draw, inner)
            rows = [{name: draw.value(_kind(entry[name])) for name in inner} for _ in range(draw.rng.randint(1, 2))]
            properties[key] = {"type": "array", "items": objects(entry)}
            values[key] = rows
            parts.append(f"{key} [" + "; ".join(f"({listed(draw, row)})" for row in rows) + "]")
    said = draw.one(("; ", ", ")).join(parts)
    if draw.chance(0.75):
        messages = asked(draw, objects(properties), said)
    else:
        forms = (f"Make a JSON object: {said}", f"Write as JSON: {said}", f"{said}\nGive this as nested JSON.")
        messages = [user(draw.one(forms))]
    return Task("nested", messages, *answer(values, said))


def _kind(entry: dict[str, Any]) -> str:
    """A kind of value for a schema entry."""
    return str(entry["type"])
