"""Types of tool parameters and the conversion of the model's text."""

from __future__ import annotations

import pytest

from ninfer_core.frontend.tools import ToolSet, convert, types
from ninfer_core.types import Tool


def value(text: str, schema: object, root: dict | None = None) -> object:
    schemas = [schema] if isinstance(schema, dict) else []
    return convert(text, schemas, root if root is not None else {})


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({}, {"string"}),
        ({"enum": [1, "a", None]}, {"integer", "string", "null"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "array"}, {"allOf": [{"type": "object"}]}]}]}, {"integer", "array", "object"}),
        ({"type": "int64"}, {"integer"}),
        ({"type": "float"}, {"number"}),
        ({"type": "dict"}, {"object"}),
        ({"type": "str"}, {"string"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"nullable": True}, {"string", "null"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"type": "nonsense"}, {"string"}),
        ({"type": 5, "enum": 3, "anyOf": 1}, {"string"}),
        ({"$ref": "#/$defs/P"}, {"object"}),
        ({"$ref": "#/$defs/Loop"}, {"string"}),
        ({"$ref": "#/$defs/a~1b/0"}, {"number"}),
        ({"$ref": "https://example.org/x"}, {"string"}),
    ],
)  # fmt: skip
def test_types_of_a_schema(schema, expected):
    root = {"$defs": {"P": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}, "a/b": [{"type": "number"}]}}
    assert types([schema], root) == expected


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": "integer"}, 5),
        (" -12\n", {"type": "integer"}, -12),
        ("1_000", {"type": "integer"}, "1_000"),
        ("3.0", {"type": "number"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("3.5", {"type": "integer"}, "3.5"),
        ("1e400", {"type": "number"}, "1e400"),
        ("NaN", {"type": "number"}, "NaN"),
        ("inf", {"type": "number"}, "inf"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("TRUE", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("0", {"type": "boolean"}, False),
        ("1", {"type": ["boolean", "integer"]}, 1),
        ("yes", {"type": "boolean"}, "yes"),
        ("Null", {"type": ["string", "null"]}, None),
        ("None", {"type": ["integer", "null"]}, None),
        ("none at all", {"type": ["string", "null"]}, "none at all"),
        ("null", {"type": "string"}, "null"),
        ("123", {"type": "string"}, "123"),
        (' {"a": 1} ', {"type": "string"}, ' {"a": 1} '),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("[1, 2]", {"type": "object"}, "[1, 2]"),
        ("{'a': True, 'b': None}", {"type": "object"}, {"a": True, "b": None}),
        ("(1, 'x')", {"type": "array"}, [1, "x"]),
        ("{1, 2}", {"type": "array"}, "{1, 2}"),
        ("[NaN]", {"type": "array"}, "[NaN]"),
        ("__import__('os')", {"type": "object"}, "__import__('os')"),
        ("[__import__('os')]", {"type": "array"}, "[__import__('os')]"),
        ("", {"type": "integer"}, ""),
        ('["5", "x"]', {"type": "array", "items": {"type": "integer"}}, [5, "x"]),
        ('{"n": "5", "s": "5", "u": "5"}', {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}, {"n": 5, "s": "5", "u": "5"}),
        ('{"k": {"n": "true"}}', {"type": "object", "additionalProperties": {"properties": {"n": {"type": "boolean"}}}}, {"k": {"n": True}}),
        ('{"lat": "1.5"}', {"anyOf": [{"properties": {"city": {"type": "string"}}}, {"properties": {"lat": {"type": "number"}}}]}, {"lat": 1.5}),
    ],
)  # fmt: skip
def test_conversion(text, schema, expected):
    found = value(text, schema)
    assert found == expected
    assert type(found) is type(expected)


def test_unknown_tools_and_parameters_are_strings():
    tools = ToolSet([Tool("f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})])
    assert "f" in tools and "g" not in tools
    assert tools.parameters("f") == {"a"}
    assert tools.parameters("g") == frozenset()
    assert tools.value("f", "b", "5") == "5"
    assert tools.value("g", "a", "5") == "5"
    assert tools.value("f", "a", "5") == 5


def test_parameters_behind_references_are_found():
    root = {
        "$ref": "#/$defs/Args",
        "$defs": {"Args": {"properties": {"p": {"$ref": "#/$defs/N"}}}, "N": {"type": "integer"}},
    }
    tools = ToolSet([Tool("f", parameters=root)])
    assert tools.parameters("f") == {"p"}
    assert tools.value("f", "p", "7") == 7


def test_a_schema_nested_deeply_does_no_harm():
    schema: dict = {"type": "integer"}
    for _ in range(2000):
        schema = {"anyOf": [schema]}
    tools = ToolSet([Tool("f", parameters={"properties": {"p": schema}})])
    assert tools.value("f", "p", "7") == "7"  # beyond the limit: text


def test_references_that_branch_forever_do_no_harm():
    branch = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}, {"type": "integer"}]}
    root = {"properties": {"p": {"$ref": "#/$defs/A"}}, "$defs": {"A": branch}}
    assert ToolSet([Tool("f", parameters=root)]).value("f", "p", "7") == 7
