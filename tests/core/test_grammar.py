"""The parts of constrained output: schemas, the text of grammars, states and masks, closing, speculation."""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
from collections import Counter

import jsonschema
import numpy as np
import pytest
from constrained import (
    BASH,
    EDIT,
    FRONTEND,
    INTEGER,
    NOW,
    SCHEMAS,
    SIZE,
    STRING,
    TOKENIZER,
    TOOLS,
    USER,
    VOCABULARY,
    asking,
    closed,
    good_calls,
    plan_of,
    play,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_core.errors import InvalidRequestError, SchemaError
from ninfer_core.runtime.arguments import leaves, variants
from ninfer_core.runtime.closing import completes, completion
from ninfer_core.runtime.compiler import check, mismatches
from ninfer_core.runtime.grammar import Grammar, Phase, needed, plan_for
from ninfer_core.runtime.language import search
from ninfer_core.runtime.sampler import allowed_ids
from ninfer_core.runtime.schema import Enforcer, repetitions
from ninfer_core.runtime.sizes import longest_part, shortest
from ninfer_core.runtime.validation import check_request
from ninfer_core.runtime.vocabulary import PLANS
from ninfer_core.types import Request, ResponseFormat, Tool, ToolChoice

ID = TOKENIZER.id
END = ID("<|im_end|>")


def enforce(schema, strict=True):
    enforcer = Enforcer(strict=strict, param="response_format.schema", check=check)
    return enforcer(schema), enforcer.notes


def accepts(request, text, plan=None) -> bool:
    matcher = (plan or plan_of(request)).matcher.deep_copy()
    ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def allowed(grammar) -> set[int]:
    row = grammar.row()
    if row.forced is not None:
        return {row.forced}
    return set(allowed_ids(row.mask, SIZE).tolist()) if row.mask is not None else set(range(SIZE)) - set(row.banned)


# schemas

REFUSED = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "#/uniqueItems"),
    ({"type": "array", "items": STRING, "maxItems": 9, "uniqueItems": True}, "uniqueItems", "#/uniqueItems"),
    ({"not": {"pattern": "^a"}}, "not", "#/not"),
    ({"type": "integer", "not": {"multipleOf": 3}}, "not", "#/not"),
    ({"if": {"properties": {"a": {"format": "date"}}}, "then": {"required": ["b"]}}, "if", "#/if"),
    ({"type": "array", "contains": INTEGER, "minContains": 2}, "contains", "#/contains"),
    ({"type": "array", "contains": INTEGER, "maxContains": 2}, "contains", "#/contains"),
    ({"type": "object", "dependentRequired": {"a": [5]}}, "dependentRequired", "#/dependentRequired"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 2}, "maxProperties", "#/maxProperties"),
    (closed({"a": {"$ref": "#here"}}), "$anchor 'here'", "#/properties/a/$ref"),
    ({"type": "object", "dependentSchemas": {"a": {"propertyNames": {"not": {"const": "b"}}}}}, "not", "#/dependent"),
    (closed({"a/b": {"type": "string", "format": "regex"}}), "format", "#/properties/a~1b/format"),
    (closed({"a": {"items": {"pattern": "^(?!x)"}}}), "pattern", "#/properties/a/items/pattern"),
    (closed({"a": {"oneOf": [{"type": "number"}, INTEGER]}}), "oneOf", "#/properties/a/oneOf"),
    ({"patternProperties": {"^a": {}, "b$": {}}}, "patternProperties", "#/patternProperties"),
    ({"$ref": "https://example.org/x"}, "$ref", "#/$ref"),
    ({"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}, "$ref", "#/$ref"),
    ({"type": "object", "propertyNames": {"not": {"pattern": "a"}}}, "not", "#/propertyNames/not"),
    (
        {"type": "object", "unevaluatedProperties": False, "$ref": "#/$defs/a", "$defs": {"a": {}}},
        "unevaluatedProp",
        "",
    ),
    ({"type": "int"}, "type", "#/type"),
]


@pytest.mark.parametrize("schema,keyword,path", [r for r in REFUSED if r[1] != "$ref" or "https" in str(r[0])])
def test_what_cannot_be_enforced_is_refused_by_name_or_dropped_with_a_note(schema, keyword, path):
    with pytest.raises(SchemaError) as info:
        enforce(schema)
    assert keyword in str(info.value) and info.value.path.startswith(path)
    assert info.value.param == "response_format.schema"
    made, notes = enforce(schema, strict=False)
    assert len(notes) >= 1 and keyword in notes[0] and check(made) == ""


def test_one_of_keeps_its_alternatives_when_not_strict():
    made, _ = enforce({"oneOf": [{"type": "number"}, INTEGER]}, strict=False)
    assert made == {"anyOf": [{"type": "number"}, INTEGER]}


@pytest.mark.parametrize("schema", [{"enum": []}, {"type": "string", "minLength": 3, "maxLength": 1}, False])
def test_what_nothing_satisfies_is_refused_in_any_case(schema):
    for strict in (True, False):
        with pytest.raises(SchemaError, match="no value"):
            enforce(schema, strict)


@pytest.mark.parametrize("schema", ["x", 5, None, {"properties": []}, {"anyOf": {}}, {"properties": {"a": 3}}])
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(SchemaError):
        enforce(schema)


def test_other_spellings():
    cases = [
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, {"type": "number", "exclusiveMinimum": 1}),
        ({"type": "integer", "format": "int32", "description": "x", "default": 1}, {"type": "integer"}),
        ({"type": "string", "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"items": [STRING], "additionalItems": False}, {"prefixItems": [STRING], "items": False}),
        ({"type": "object", "unevaluatedProperties": False}, {"type": "object", "additionalProperties": False}),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b.c"]}, "additionalProperties": INTEGER},
            {"type": "object", "patternProperties": {"^(a|b\\.c)$": INTEGER}, "additionalProperties": False},
        ),
        ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}),
    ]
    for schema, expected in cases:
        made, notes = enforce(schema)
        assert made == expected and not notes


@pytest.mark.parametrize("name", SCHEMAS)
def test_shortest_is_close_to_what_closing_needs(name):
    plan = plan_of(asking(SCHEMAS[name]))
    made, _ = enforce(SCHEMAS[name])
    text = TOKENIZER.decode(plan.path)
    jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert shortest(made, made) / 4 <= len(plan.path) <= 4 * shortest(made, made) + 8
    assert plan.growth >= longest_part(made)


# closing


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(SCHEMAS)), seed=st.integers(0, 10**6), length=st.integers(0, 60))
def test_from_any_place_the_value_can_be_closed(name, seed, length):
    schema = SCHEMAS[name]
    matcher = plan_of(asking(schema)).matcher.deep_copy()
    rng, out = np.random.default_rng(seed), []
    while len(out) < length and not matcher.is_stopped():
        ids = [t for t in allowed_ids(matcher.compute_bitmask(), SIZE).tolist() if t not in (END, ID("<|endoftext|>"))]
        if not ids:
            break
        out.append(int(rng.choice(ids)))
        assert matcher.consume_token(out[-1])
    path = completion(matcher, VOCABULARY, 1000)
    assert path is not None and completes(matcher, path)
    text = TOKENIZER.decode([*out, *path])
    jsonschema.validate(json.loads(text), schema)


def test_closing_gets_out_of_loops_and_gives_up_on_endless_ones():
    def path(pattern):
        plan = plan_of(Request(USER, response_format=ResponseFormat("regex", pattern=pattern)))
        return completion(plan.matcher, VOCABULARY, 300)

    for pattern in ("a*b", "(ab|c)*!d", "[,a]*;", "[0-9]*\\.[a-z]*Q"):
        found = path(pattern)
        assert found is not None and len(found) < 300
    assert path("[a-z]{400}x") is None


class Counted:
    """A matcher whose questions are counted, those of its copies too."""

    def __init__(self, matcher, asked):
        self._matcher, self._asked = matcher, asked

    def __getattr__(self, name):
        self._asked[name] += 1
        if name == "deep_copy":
            return lambda: Counted(self._matcher.deep_copy(), self._asked)
        return getattr(self._matcher, name)


def test_a_known_way_to_the_end_is_joined_where_it_fits():
    schema = {"type": "array", "items": SCHEMAS["person"], "minItems": 40}
    matcher = plan_of(asking(schema)).matcher.deep_copy()
    known = completion(matcher, VOCABULARY, 4096)
    begun = TOKENIZER.encode('[{"name": "Ada", "age": 36}, {"name": "B')
    assert matcher.consume_tokens(begun)

    def found(most, known):
        asked = Counter()
        return completion(Counted(matcher, asked), VOCABULARY, most, known), sum(asked.values())

    fresh, many = found(4096, ())
    joined, few = found(4096, known)
    for path in (fresh, joined):
        assert completes(matcher, path)
        jsonschema.validate(json.loads(TOKENIZER.decode([*begun, *path])), schema)
    assert few < many / 5 and len(joined) < len(known) + 50
    assert len(fresh) < len(joined), "38 persons are fewer than 39"
    tight, asked = found(len(fresh), known)
    assert tight == fresh and asked >= many, "with less room the shorter way is looked for"
    for other in (known[:4], [*known[:30], known[0], *known[30:]], known[::-1]):
        assert found(4096, other)[0] is not None and completes(matcher, found(4096, other)[0])


# calls


def test_leaves_and_variants():
    root = {"$defs": {"a": {"anyOf": [STRING, {"type": "null"}]}}}
    assert [leaf["type"] for leaf in leaves({"$ref": "#/$defs/a"}, root)] == ["string", "null"]
    assert leaves({}, root) == [{"type": "string"}] and leaves(True, root) == [{"type": "string"}]
    assert [leaf["type"] for leaf in leaves({"enum": ["x", 1, None]}, root)] == ["string", "value"]
    both = {"allOf": [{"properties": {"a": STRING}, "required": ["a"]}, {"properties": {"b": STRING}}]}
    assert [(list(v.declared), v.required) for v in variants(both, both)] == [(["a", "b"], {"a"})]
    either = {"properties": {"c": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert [sorted(v.declared) for v in variants(either, either)] == [["a", "c"], ["b", "c"]]


def call(body, name="bash"):
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parameter(key, value):
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def test_calls_that_the_grammar_takes_and_refuses():
    request = Request(USER, tools=TOOLS, tool_choice=ToolChoice("required"))
    plan = plan_of(request)
    good = [
        call(parameter("command", "ls")),
        call(parameter("command", "")),
        call(parameter("command", '\n  <b> "x" </b>\n</param>\n') + parameter("timeout", "0")),
        call(parameter("command", "x") + parameter("env", '{"A": "1"}')),
        call("", "now"),
        call("", "now") + "\n" + call(parameter("command", "é😀")),
    ]
    bad = [
        "",
        "Sure!" + call("", "now"),
        call(parameter("command", "a</parameter>b")),
        call(parameter("timeout", "1") + parameter("command", "ls")),
        call(parameter("command", "ls") + parameter("timeout", "-1")),
        call(parameter("command", "ls") + parameter("timeout", '"1"')),
        call(parameter("command", "ls") + parameter("other", "1")),
        call(parameter("x", "y"), "now") + "x",
        call("", "later"),
        call(parameter("command", "a\n</function>\n</tool_call>")),
    ]
    assert [text for text in good if not accepts(request, text, plan)] == []
    assert [text for text in bad if accepts(request, text, plan)] == []
    one = Request(USER, tools=TOOLS, tool_choice=ToolChoice("required"), parallel_tool_calls=False)
    assert accepts(one, good[4]) and not accepts(one, good[5])


VALUES = [
    ({"type": "string", "enum": ["a b", "é\n"]}, ["a b", "é\n"], ["a", '"a b"']),
    ({"const": "x"}, ["x"], ["y"]),
    ({"type": "string", "pattern": "^[a-z]+$"}, ["abc"], ["", "aB"]),
    ({"type": "string", "pattern": "b+"}, ["abc", "b"], ["ac"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
    ({"type": "string", "format": "date"}, ["2026-01-31", "2024-02-28"], ["2026-13-01", "2026-02-30", "x"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ({"type": "integer"}, ["0", "-12"], ["01", "1.5", "x", '"1"']),
    ({"type": "number"}, ["1", "1.5", "-2e10"], ["one", "1e400"]),
    ({"type": "boolean"}, ["true"], ["True", "1"]),
    ({"type": ["string", "null"]}, ["null", "x", "{a"], []),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["3", "null"], ["x"]),
    ({"anyOf": [STRING, {"type": "array", "items": INTEGER}]}, ["x", "[1, 2]"], ['["a"]', "[1"]),
    (
        {"type": "object", "additionalProperties": BASH.parameters["properties"]["timeout"]},
        ['{"a": 1}'],
        ['{"a": "b"}'],
    ),
    ({}, ["anything", "5"], []),
    ({"$ref": "#/$defs/n"}, ["7"], ["x"]),
    ({"enum": [1, "one", None]}, ["1", "one", "null"], ["2", "two"]),
]


@pytest.mark.parametrize("schema,good,bad", VALUES)
def test_a_value_is_held_to_its_schema(schema, good, bad):
    root = {**closed({"v": schema}), "$defs": {"n": INTEGER}}
    request = Request(USER, tools=(Tool("f", parameters=root),), tool_choice=ToolChoice("required"))
    plan = plan_of(request)
    for value in good:
        assert accepts(request, call(parameter("v", value), "f"), plan), value
    for value in bad:
        assert not accepts(request, call(parameter("v", value), "f"), plan), value


def test_a_tool_with_free_parameters():
    free = Tool("f", parameters={"type": "object", "additionalProperties": INTEGER})
    request = Request(USER, tools=(free,), tool_choice=ToolChoice("required"))
    assert accepts(request, call(parameter("any key", "5") + parameter("b", "6"), "f"))
    assert accepts(request, call("", "f")) and not accepts(request, call(parameter("a", "x"), "f"))


def test_odd_names_of_tools_and_parameters():
    odd = Tool('ns.f"/\\ü', parameters=closed({'a"b\\c/d': STRING}))
    request = Request(USER, tools=(odd,), tool_choice=ToolChoice("required"))
    assert accepts(request, call(parameter('a"b\\c/d', "x"), 'ns.f"/\\ü'))


def test_tool_schemas_degrade_unless_strict(caplog):
    loose = {"type": "object", "properties": {"a": {"type": "array", "items": STRING, "uniqueItems": True}}}
    request = Request(USER, tools=(Tool("f", parameters=loose),), tool_choice=ToolChoice("required"))
    with caplog.at_level(logging.WARNING, "ninfer.engine"):
        assert accepts(request, call(parameter("a", '["x", "x"]'), "f"))
    assert "uniqueItems" in caplog.text and "tools[0].parameters" in caplog.text
    strict = Request(USER, tools=(NOW, Tool("f", parameters=loose, strict=True)))
    with pytest.raises(SchemaError, match="uniqueItems") as info:
        plan_of(strict)
    assert info.value.param == "tools[1].parameters" and info.value.path == "#/properties/a/uniqueItems"


# requests


def test_only_what_constrains_is_compiled():
    assert not needed(Request(USER)) and not needed(Request(USER, tools=TOOLS))
    assert not needed(Request(USER, tool_choice=ToolChoice("none")))
    for request in (
        Request(USER, tools=TOOLS, tool_choice=ToolChoice("none")),
        Request(USER, tools=TOOLS, tool_choice=ToolChoice("auto", ("now",))),
        Request(USER, tools=(Tool("f", strict=True),)),
        asking(True),
    ):
        assert needed(request)


def test_the_same_demand_is_compiled_once():
    first = plan_for(asking(SCHEMAS["person"]), VOCABULARY)
    assert plan_for(asking(dict(SCHEMAS["person"]), thinking=False, max_tokens=3), VOCABULARY) is first
    others = [
        asking(SCHEMAS["edit"]),
        asking(SCHEMAS["person"], tools=TOOLS),
        asking(SCHEMAS["person"], tools=TOOLS, parallel_tool_calls=False),
        Request(USER, response_format=ResponseFormat("json_schema", SCHEMAS["person"], strict=False)),
    ]
    plans = [plan_for(request, VOCABULARY) for request in others]
    assert len({id(plan) for plan in (first, *plans)}) == 5
    for i in range(PLANS):
        plan_for(Request(USER, response_format=ResponseFormat("choice", choices=(str(i),))), VOCABULARY)
    assert plan_for(asking(SCHEMAS["person"]), VOCABULARY) is not first  # only the last ones used are kept


BAD = [
    (ResponseFormat("yaml"), "response_format"),
    (ResponseFormat("json_schema", [1]), "response_format.schema"),
    (ResponseFormat("json_schema", {"x": float("nan")}), "response_format.schema"),
    (ResponseFormat("regex"), "response_format.pattern"),
    (ResponseFormat("grammar", pattern=""), "response_format.pattern"),
    (ResponseFormat("choice"), "response_format.choices"),
    (ResponseFormat("choice", choices=("a", "")), "response_format.choices"),
    (ResponseFormat("choice", choices=("a", 5)), "response_format.choices[1]"),
    ({"type": "json_object"}, "response_format"),
]


@pytest.mark.parametrize("form,param", BAD)
def test_a_malformed_format_is_refused(form, param):
    with pytest.raises(InvalidRequestError) as info:
        check_request(Request(USER, response_format=form), addressable=SIZE, vision=False, grammars=True)
    assert info.value.param == param


@pytest.mark.parametrize(
    "kind,pattern", [("regex", "(a"), ("regex", "a(?=b)"), ("grammar", "start: nope"), ("grammar", "]")]
)
def test_a_pattern_that_does_not_compile_is_refused(kind, pattern):
    with pytest.raises(SchemaError):
        plan_of(Request(USER, response_format=ResponseFormat(kind, pattern=pattern)))


def test_deep_and_hostile_schemas_are_bounded():
    deep: dict = {"type": "string"}
    for _ in range(60):
        deep = closed({"a": deep})
    assert plan_of(asking(deep)).path is not None
    nested = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    with pytest.raises(SchemaError):
        plan_of(asking(nested))
    endless = {"$ref": "#/$defs/a", "$defs": {"a": closed({"a": {"$ref": "#/$defs/a"}})}}
    with pytest.raises(SchemaError, match="or none ends"):
        plan_of(asking(endless))
    for pattern in ("((a{100}){100}){100}", "(a{1000}b{2}){1000,}"):
        with pytest.raises(SchemaError, match="repeats"):
            plan_of(Request(USER, response_format=ResponseFormat("regex", pattern=pattern)))
        with pytest.raises(SchemaError, match="pattern"):
            plan_of(asking(closed({"a": {"type": "string", "pattern": pattern}})))
    with pytest.raises(SchemaError, match="no text"):
        plan_of(Request(USER, response_format=ResponseFormat("grammar", pattern='start: a\na: a "x"')))


def binary(depth):
    """Each definition needs the next one twice."""
    made = {f"a{i}": closed({key: {"$ref": f"#/$defs/a{i + 1}"} for key in "lr"}) for i in range(depth)}
    return {"$defs": {**made, f"a{depth}": STRING}, "$ref": "#/$defs/a0"}


LETTERS = "abcdefghij"
EXPENSIVE = {
    "binary": (binary(26), "or none ends"),
    "mutual": (
        {
            "$defs": {k: closed({x: {"$ref": f"#/$defs/{x}"} for x in LETTERS}) for k in LETTERS},
            "$ref": "#/$defs/a",
        },
        "or none ends",
    ),
    "patterns": ({"allOf": [{"type": "string", "pattern": f"a{{{i}}}.*"} for i in range(40)]}, "more than 8 patterns"),
    "chain": (
        {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2000)} | {"a2000": {}}, "$ref": "#/$defs/a0"},
        "300 steps",
    ),
    "values": ({"enum": [f"value{i}" for i in range(100_000)]}, "limit of a schema is 200000"),
    "length": ({"type": "object", "propertyNames": {"maxLength": 10**9}}, "propertyNames"),
    "fields": (closed({f"p{i}": {"type": "string", "maxLength": 100} for i in range(5000)}), "limit of a schema"),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_is_expensive_to_compile_is_refused_soon(name):
    schema, message = EXPENSIVE[name]
    start = time.process_time()
    with pytest.raises(SchemaError, match=message):
        plan_of(asking(schema))
    assert time.process_time() - start < 60


def test_sizes_of_shared_definitions_are_exact():
    assert shortest(binary(3), binary(3)) == longest_part(binary(3)) == 12 * 7 + 2 * 8
    with pytest.raises(SchemaError, match="combine more than"):
        ways = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 12} for i in range(9)}
        root = {"$defs": {**ways, "a9": {"type": "object"}}, "$ref": "#/$defs/a0"}
        variants(root, root)


def test_too_many_choices_and_too_long_patterns_are_refused():
    for form, message in (
        (ResponseFormat("choice", choices=tuple(f"c{i}" for i in range(10_001))), "10001 entries; the limit is 10000"),
        (ResponseFormat("choice", choices=("x" * 100_000, "y" * 100_001)), "200001 bytes; the limit is 200000"),
        (ResponseFormat("regex", pattern="x" * 200_001), "pattern has 200001 bytes"),
        (ResponseFormat("regex", pattern="(a{1000}){1000}"), "more than 20000 times"),
    ):
        with pytest.raises(SchemaError, match=message):
            plan_of(Request(USER, response_format=form))
    wide = closed({f"p{i}": STRING for i in range(3000)})
    tools = tuple(Tool(f"f{i}", parameters=wide) for i in range(8))
    with pytest.raises(SchemaError, match="more than 400000 bytes"):
        plan_of(Request(USER, tools=tools, tool_choice=ToolChoice("required")))


def test_patterns_of_names_meet_the_linear_matcher_only():
    names = {"a" * 40 + "!": {}, "a" * 40: {}, "\u00fc": {}}
    start = time.process_time()
    made, _ = enforce({"type": "object", "properties": names, "propertyNames": {"pattern": "^(a+)+$"}})
    assert time.process_time() - start < 60 and list(made["properties"]) == ["a" * 40]
    assert mismatches("^a(?=b)", ["x"]) == [] and mismatches("b", ["abc", "ac"]) == ["ac"]


WRONG = (5, -1, 1.5, "x", True, None, [], {}, [[1]], [{}], {"a": 3}, {"minLength": "x"}, 10**400, "\ud800")
KEYWORDS = (
    *("type", "const", "enum", "required", "minItems", "maxItems", "minProperties", "maxProperties", "$anchor"),
    *("minLength", "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "additionalProperties", "properties"),
    *("patternProperties", "propertyNames", "$defs", "definitions", "$ref", "format", "uniqueItems", "nullable"),
    *("unevaluatedProperties", "not", "if", "contains", "dependentRequired"),
)
MISFITS = {
    **dict.fromkeys(("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"), "x"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "x"),
    **dict.fromkeys(("pattern", "$ref", "$anchor", "format", "type", "enum", "required", "uniqueItems", "nullable"), 5),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties", "properties"), 5),
    **dict.fromkeys(("patternProperties", "propertyNames", "$defs", "definitions", "additionalItems"), 5),
}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_keywords_of_the_wrong_type_are_refused_by_name(keyword):
    nests = (
        ("", lambda s: s),
        ("/properties/a", lambda s: closed({"a": s})),
        ("/propertyNames", lambda s: {"type": "object", "properties": {"b": {}}, "propertyNames": s}),
        ("/items", lambda s: {"type": "array", "minItems": 1, "items": s}),
        ("/anyOf/0", lambda s: {"anyOf": [s, INTEGER]}),
    )
    for path, nest in nests:
        for value in WRONG:
            for strict in (True, False):
                for others in ({}, {"type": "string"}, {"type": "object"}):
                    try:
                        enforce(nest({**others, keyword: value}), strict)
                    except (SchemaError, InvalidRequestError):
                        continue
        if keyword in MISFITS:
            with pytest.raises(SchemaError) as info:
                enforce(nest({keyword: MISFITS[keyword]}))
            assert info.value.path == f"#{path}/{keyword}"


@pytest.mark.parametrize("name", ["<x>", "a>b", "a\nb", " a", "a ", "a\x00b"])
def test_names_that_cannot_be_read_back_are_not_enforced(name):
    for choice in (ToolChoice("required"), ToolChoice("required", (name,))):
        with pytest.raises(InvalidRequestError, match=r"tools\[0\].name") as info:
            plan_of(Request(USER, tools=(Tool(name),), tool_choice=choice))
        assert info.value.param == "tools"


def test_repetitions_are_counted():
    cases = {"a{3}": 3, "(a{3}b){4}": 12, "a{2}b{3}": 3, "((a{2}){3,5}c)": 10, "\\{9}": 1, "x{": 1, "a{2,}": 2}
    assert {pattern: repetitions(pattern) for pattern in cases} == cases


# states


def test_ends_are_allowed_only_where_the_value_is_whole():
    grammar = Grammar(plan_of(asking(closed({"a": INTEGER}))), thinking=False, limit=100)
    for token in TOKENIZER.encode('{"a":1'):
        assert END not in allowed(grammar) and token in allowed(grammar)
        grammar.observe([token])
    assert END not in allowed(grammar)
    grammar.observe(TOKENIZER.encode("}"))
    assert allowed(grammar) == {END, ID("<|endoftext|>")}
    grammar.observe([END])
    assert grammar.state.phase is Phase.DONE and allowed(grammar) == {END, ID("<|endoftext|>")}


def test_ids_without_text_and_foreign_special_tokens_are_never_allowed():
    for request in (asking(SCHEMAS["anything"]), Request(USER, tools=TOOLS, tool_choice=ToolChoice("required"))):
        grammar = Grammar(plan_of(request), thinking=False, limit=100)
        ids = allowed(grammar)
        assert max(ids) < SIZE
        assert not ids & {ID("<|im_start|>"), ID("<think>"), ID("</think>"), ID("<|image_pad|>"), ID("</tool_call>")}


def test_the_grammar_starts_behind_the_think_block():
    grammar = Grammar(plan_of(asking(SCHEMAS["person"])), thinking=True, limit=400)
    for token in TOKENIZER.encode('Hm { "x": </thin'):
        assert END not in allowed(grammar) and token in allowed(grammar) and ord("{") in allowed(grammar)
        grammar.observe([token])
    grammar.observe(TOKENIZER.encode("k"))
    assert ord(">") not in allowed(grammar) and ID("</think>") in allowed(grammar)
    grammar.observe([ID("</think>")])
    assert allowed(grammar) == {ord("\n"), ord("{")}
    grammar.observe([ord("\n")])
    assert allowed(grammar) == {ord("\n"), ord("{")}
    grammar.observe([ord("\n")])
    assert allowed(grammar) == {ord("{")}


def test_calls_between_free_text():
    plan = plan_of(Request(USER, tools=TOOLS, tool_choice=ToolChoice("auto", ("now",))))
    grammar = Grammar(plan, thinking=False, limit=400)
    for token in TOKENIZER.encode("Text <function"):
        assert {END, ID("<tool_call>")} <= allowed(grammar)
        grammar.observe([token])
    assert ord("=") not in allowed(grammar)
    grammar.observe([ID("<tool_call>")])
    for token in TOKENIZER.encode("\n<function=now>\n</function>\n"):
        assert allowed(grammar) == {token}
        grammar.observe([token])
    grammar.observe([ID("</tool_call>")])
    assert grammar.state.phase is Phase.TEXT and END in allowed(grammar) and ord("x") in allowed(grammar)


def test_a_continued_message_goes_on_with_the_value():
    plan = plan_of(asking(closed({"a": INTEGER})))
    grammar = Grammar(plan, thinking=False, limit=100, prefix='{"a": 12')
    assert {ord("3"), ord("}")} <= allowed(grammar) and ord("{") not in allowed(grammar)
    with pytest.raises(InvalidRequestError, match="does not fit"):
        Grammar(plan, thinking=False, limit=100, prefix='{"b')


def test_further_stop_ids_end_a_finished_value_only():
    plan = plan_of(asking(closed({"a": INTEGER})))
    grammar = Grammar(plan, thinking=False, limit=100, stop_ids=[ID("<|im_start|>")])
    grammar.observe(TOKENIZER.encode('{"a":1'))
    assert ID("<|im_start|>") not in allowed(grammar)
    grammar.observe(TOKENIZER.encode("}"))
    assert ID("<|im_start|>") in allowed(grammar)


# speculation


def test_rows_look_ahead_and_leave_no_trace():
    grammar = Grammar(plan_of(asking(closed({"city": STRING}))), thinking=True, limit=400)
    before = grammar.state
    drafts = [ID("</think>"), ord("{"), ord('"'), ord("l"), ord("o")]
    rows = grammar.rows(drafts)
    assert len(rows) == 4  # the fourth draft cannot stand, so nothing is asked behind it
    assert rows[3].forced == ord("c") and grammar.state == before
    other = Grammar(grammar._plan, thinking=True, limit=400)
    other.observe(drafts[:2])
    grammar.observe(drafts[:2])
    assert allowed(grammar) == allowed(other) and grammar.state.fed == other.state.fed


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(["person", "edit", "union", "calls", "free"]),
    thinking=st.booleans(),
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30),
)
def test_a_grammar_that_was_rolled_back_equals_one_that_was_not(name, thinking, seed, cuts):
    """Any mixture of looking ahead, taking and giving back leaves the state of the emitted tokens alone."""
    tools = {
        "calls": ToolChoice("required"),
        "free": ToolChoice("auto", ("now", "bash")),
    }
    request = Request(USER, tools=TOOLS, tool_choice=tools[name]) if name in tools else asking(SCHEMAS[name])
    plan = plan_of(request)
    a = Grammar(plan, thinking=thinking, limit=300)
    b = Grammar(plan, thinking=thinking, limit=300)
    rng = np.random.default_rng(seed)

    def some(grammar):
        return int(rng.choice(sorted(allowed(grammar))))

    for taken, kept in cuts:
        a.rows([int(t) for t in rng.integers(0, SIZE, 3)])
        emitted = []
        for _ in range(taken):
            token = some(a)
            if a.row().forced is not None:
                a.take(token)
                emitted.append(token)
            else:
                emitted.append(a.admit(token))
        a.observe(emitted[:kept])
        for token in emitted[:kept]:
            if b.row().forced is not None:
                b.take(token)
            else:
                assert b.admit(token) == token
            b.observe([token])
        assert a.state == b.state
    assert allowed(a) == allowed(b)


def test_masks_of_raw_arguments_that_are_kept_are_right():
    """The remembered masks inside raw text are those that the compiler gives."""
    request = Request(USER, tools=(BASH, NOW), tool_choice=ToolChoice("required"))
    plan = plan_of(request)
    assert plan.raw
    text = call(parameter("command", "a\n\nb <x> </par </f \n<par y>\nz") + parameter("timeout", "1"))
    for _ in range(2):
        grammar = Grammar(plan, thinking=False, limit=10**6)
        matcher = plan.matcher.deep_copy()
        for token in TOKENIZER.encode(text):
            row = grammar.row()
            if row.mask is not None:
                ours, theirs = (allowed_ids(m, SIZE).tolist() for m in (row.mask, matcher.compute_bitmask()))
                assert ours == theirs
            assert matcher.consume_token(token)
            grammar.observe([token])
    assert set(plan.masks) == {b"", b"\n"}
    assert not plan_of(Request(USER, tools=(EDIT,), tool_choice=ToolChoice("required"))).raw


def test_search_patterns():
    assert search("^a$") == "(a)" and search("a") == "(?s:.*)(a)(?s:.*)" and search("a\\$").endswith("(?s:.*)")


@pytest.mark.parametrize(
    "pattern",
    [
        "^$|^[a-z]+$",
        "^a|b$",
        "ab|^c$",
        "(^a$)|(^b$)",
        "((^a$)|b)",
        "^(a|b)$",
        "(a)(b)|^c",
        "[$^|]+",
        "\\||^a",
        "(?:^a|b$)",
        "a$|\\$",
    ],
)
def test_anchors_are_those_of_their_alternative(pattern):
    texts = ["".join(letters) for count in range(4) for letters in itertools.product("abc$|", repeat=count)]
    for text in texts:
        assert (re.fullmatch(search(pattern), text) is None) is (re.search(pattern, text) is None), text


def test_groups_and_alternatives_of_hostile_patterns_are_left_alone():
    for pattern in ("(" * 20_000 + "^a" + ")" * 20_000, "|".join(["^a"] * 20_000), "(|" * 20_000):
        assert len(search(pattern)) < 3 * len(pattern)
    assert "^b" in search("(?i)a|^b"), "the flag is one of both"


# the real vocabulary


@pytest.fixture(scope="module")
def real():
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "frontend"))
    import real_vocabulary

    from ninfer_core.frontend.tokenizer import Tokenizer
    from ninfer_core.runtime.vocabulary import Vocabulary

    files = real_vocabulary.files()
    tokenizer = Tokenizer(files["tokenizer.json"], files["tokenizer_config.json"])
    return tokenizer, Vocabulary.of(tokenizer, [tokenizer.id("<|im_end|>"), tokenizer.id("<|endoftext|>")])


def test_with_the_published_vocabulary(real):
    """Tokens that span several parts of the value, forced runs in the model's own tokens, marks in single ids."""
    from ninfer_core.runtime.grammar import compile_plan

    tokenizer, vocabulary = real
    assert vocabulary.size == 248077 and vocabulary.newlines == {198: 1, 271: 2}
    request = Request(USER, tools=(BASH, NOW), tool_choice=ToolChoice("required"))
    grammar = Grammar(compile_plan(request, vocabulary), thinking=True, limit=1000)
    grammar.observe(tokenizer.encode("Thinking {</think>"))
    mask = set(allowed_ids(grammar.row().mask, vocabulary.size).tolist())
    assert mask == {198, 271, tokenizer.id("<tool_call>")}
    grammar.observe([271, tokenizer.id("<tool_call>")])
    forced = grammar.forced()
    assert tokenizer.decode(forced).startswith("\n<function") and len(forced) <= 4
    grammar.observe(forced)
    rest = call(parameter("command", 'echo "héllo" > x.py\n\n')).removeprefix("<tool_call>" + tokenizer.decode(forced))
    for token in tokenizer.encode(rest):
        row = grammar.row()
        assert row.forced is not None or token in allowed_ids(row.mask, vocabulary.size)
        grammar.observe([token])
    answer = '{"name": "Zoë", "age": 42}'
    grammar = Grammar(compile_plan(asking(SCHEMAS["person"]), vocabulary), thinking=False, limit=1000)
    for token in tokenizer.encode(answer):
        row = grammar.row()
        assert row.forced == token or token in allowed_ids(row.mask, vocabulary.size)
        grammar.observe([token])
    assert tokenizer.id("<|im_end|>") in allowed_ids(grammar.row().mask, vocabulary.size)


def test_scripted_engine_takes_the_same_requests():
    assert good_calls(play(Request(USER, tools=(NOW,), tool_choice=ToolChoice("required"), thinking=False))[0], (NOW,))
    assert FRONTEND.tokenizer.addressable == SIZE
