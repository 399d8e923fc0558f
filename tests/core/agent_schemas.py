"""Schemas of the kinds that agents send: tool arguments, plans, extractions, filters, events, with conditions."""

from __future__ import annotations

from constrained import BOOLEAN, INTEGER, NUMBER, SCHEMAS, STRING, closed

SHORT = {"type": "string", "maxLength": 24}
DATE = {"type": "string", "format": "date"}


def listed(items, **more) -> dict:
    return {"type": "array", "items": items, "maxItems": 4, **more}


AGENTS = {
    "todo": closed(
        {
            "todos": listed(
                closed(
                    {
                        "id": {"type": "string", "pattern": "^t[0-9]{1,3}$"},
                        "content": SHORT,
                        "status": {"enum": ["pending", "in_progress", "completed"]},
                        "priority": {"type": "string", "enum": ["high", "low"]},
                    }
                ),
                minItems=1,
            )
        }
    ),
    "search": closed(
        {
            "query": {"type": "string", "minLength": 1, "maxLength": 40},
            "filters": closed({"since": DATE, "site": {"type": "string", "format": "hostname"}}, []),
            "limit": {"type": "integer", "minimum": 1, "maximum": 50},
            "sort": {"anyOf": [{"enum": ["date", "score"]}, {"type": "null"}]},
        },
        ["query", "limit", "sort"],
    ),
    "event": closed(
        {
            "title": SHORT,
            "start": {"type": "string", "format": "date-time"},
            "attendees": listed({"type": "string", "format": "email"}),
            "place": {"anyOf": [closed({"room": SHORT}), closed({"url": {"type": "string", "format": "uri"}})]},
        }
    ),
    "invoice": {
        "$defs": {
            "money": closed(
                {"amount": {"type": "number", "minimum": 0}, "currency": {"type": "string", "pattern": "^[A-Z]{3}$"}}
            ),
            "line": closed(
                {"sku": SHORT, "count": {"type": "integer", "minimum": 1}, "price": {"$ref": "#/$defs/money"}}
            ),
        },
        **closed({"lines": listed({"$ref": "#/$defs/line"}, minItems=1), "total": {"$ref": "#/$defs/money"}}),
    },
    "filter": {
        "$defs": {
            "test": closed(
                {"field": SHORT, "op": {"enum": ["=", "<", ">", "in"]}, "value": {"type": ["string", "number"]}}
            ),
            "all": closed({"and": listed({"$ref": "#/$defs/node"})}),
            "node": {"anyOf": [{"$ref": "#/$defs/test"}, {"$ref": "#/$defs/all"}]},
        },
        **closed({"where": {"$ref": "#/$defs/node"}}),
    },
    "patch": listed(
        {
            "oneOf": [
                closed({"op": {"const": "remove"}, "path": {"type": "string", "pattern": "^(/[a-z]+)+$"}}),
                closed({"op": {"const": "add"}, "path": {"type": "string", "pattern": "^(/[a-z]+)+$"}, "value": SHORT}),
            ]
        },
        minItems=1,
    ),
    "environment": closed({}, propertyNames={"pattern": "^[A-Z_]{1,12}$"})
    | {"additionalProperties": SHORT, "minProperties": 1, "maxProperties": 4},
    "labels": closed({"labels": listed({"enum": ["bug", "docs", "perf", "test"]}, uniqueItems=True, minItems=1)}),
    "payment": closed(
        {
            "method": {"enum": ["card", "transfer"]},
            "iban": SHORT,
            "number": {"type": "string", "pattern": "^[0-9]{4}$"},
        },
        ["method"],
    )
    | {
        "if": {"properties": {"method": {"const": "card"}}, "required": ["method"]},
        "then": {"required": ["number"]},
        "else": {"required": ["iban"]},
    },
    "range": closed({"from": DATE, "to": DATE, "zone": SHORT}, [])
    | {"dependentRequired": {"from": ["to"], "to": ["zone"]}},
    "exclusive": closed({"file": SHORT, "text": SHORT}, []) | {"not": {"required": ["file", "text"]}},
    "crew": closed({"people": listed({"enum": ["lead", "dev", "ops"]}, contains={"const": "lead"})}),
    "classification": closed(
        {
            "label": {"type": "string", "enum": ["positive", "neutral", "negative"]},
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
            "reason": {"type": ["string", "null"], "maxLength": 40},
            "evidence": listed(closed({"quote": SHORT, "at": {"type": "integer", "minimum": 0}})),
        }
    ),
    "entities": closed(
        {
            "people": listed(closed({"name": SHORT, "born": {"anyOf": [DATE, {"type": "null"}]}, "alive": BOOLEAN})),
            "places": listed(
                closed(
                    {
                        "name": SHORT,
                        "at": {"type": "array", "prefixItems": [NUMBER, NUMBER], "items": False, "minItems": 2},
                    }
                )
            ),
        }
    ),
    "handoff": closed(
        {"to_agent": {"enum": ["writer", "critic"]}, "reason": SHORT, "budget": INTEGER}, ["to_agent", "reason"]
    ),
}

MATRIX = {**{name: schema for name, schema in SCHEMAS.items() if name != "anything"}, **AGENTS}
"""What the matrix of structured output runs over."""

__all__ = ["AGENTS", "MATRIX", "STRING"]
