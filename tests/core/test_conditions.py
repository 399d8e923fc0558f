"""Conditions of JSON schemas as unions: what the grammar takes is valid, and what is valid it takes, as far as stated."""

from __future__ import annotations

import itertools
import json
import time

import jsonschema
import numpy as np
import pytest
from agent_schemas import AGENTS, MATRIX
from constrained import INTEGER, STRING, TOKENIZER, USER, asking, closed, good, good_calls, plan_of, play
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_core.errors import SchemaError
from ninfer_core.runtime import language
from ninfer_core.runtime.arguments import leaves, variants
from ninfer_core.runtime.compiler import check
from ninfer_core.runtime.schema import Enforcer
from ninfer_core.types import Request, Tool, ToolChoice


def accepts(plan, value) -> bool:
    matcher = plan.matcher.deep_copy()
    ids = TOKENIZER.encode(json.dumps(value, ensure_ascii=False), allow_special=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def objects(**values):
    """Every object over these properties, each absent or with one of its values, in the declared order."""
    ways = [[(name, value) for value in options] + [None] for name, options in values.items()]
    return [dict(filter(None, chosen)) for chosen in itertools.product(*ways)]


ABC = closed({"a": STRING, "b": STRING, "c": STRING}, [])
ALL = objects(a=["x"], b=["x"], c=["x"])
KINDS = closed({"kind": {"enum": ["x", "y", "z"]}, "p": INTEGER, "q": STRING}, ["kind"])
KIND = objects(kind=["x", "y", "z"], p=[1], q=["", "t"])
ANYTHING = [None, True, False, 0, 1, 1.5, -3, "", "a", "ab", "abc", "b", 'q\\"x', [], [1], ["a"], {}, {"a": 1}]
WORDS = [list(p) for n in range(4) for p in itertools.product(["a", "b", "c"], repeat=n)]

EXACT = {
    "dependent required": ({**ABC, "dependentRequired": {"a": ["b"], "b": ["c"]}}, ALL),
    "dependent schemas": ({**ABC, "dependentSchemas": {"a": {"properties": {"b": {"maxLength": 0}}}}}, ALL),
    "dependencies": ({**ABC, "dependencies": {"a": ["b"], "c": {"required": ["a"]}}}, ALL),
    "dependency on an absence": ({**ABC, "dependentSchemas": {"a": {"not": {"required": ["b"]}}}}, ALL),
    "if then": ({**KINDS, "if": {"properties": {"kind": {"const": "x"}}}, "then": {"required": ["p"]}}, KIND),
    "if else": ({**KINDS, "if": {"properties": {"kind": {"enum": ["x", "y"]}}}, "else": {"required": ["p"]}}, KIND),
    "if required": (
        {**KINDS, "if": {"required": ["p"]}, "then": {"required": ["q"]}, "else": {"not": {"required": ["q"]}}},
        KIND,
    ),
    "nested": (
        {
            **KINDS,
            "if": {"properties": {"kind": {"const": "x"}}},
            "then": {"required": ["p"]},
            "else": {"if": {"properties": {"kind": {"const": "y"}}}, "then": {"required": ["q"]}, "else": False},
        },
        KIND,
    ),
    "one for each kind": (
        {
            **KINDS,
            "allOf": [
                {"if": {"properties": {"kind": {"const": k}}, "required": ["kind"]}, "then": {"required": needs}}
                for k, needs in (("x", ["p"]), ("y", ["q"]), ("z", ["p", "q"]))
            ],
        },
        KIND,
    ),
    "if of several": (
        {
            **KINDS,
            "if": {"properties": {"kind": {"const": "x"}, "p": {"minimum": 1}}, "required": ["p"]},
            "then": {"required": ["q"]},
        },
        KIND,
    ),
    "not both": ({**ABC, "not": {"required": ["a", "b"]}}, ALL),
    "not any": ({**ABC, "not": {"anyOf": [{"required": ["a"]}, {"required": ["b", "c"]}]}}, ALL),
    "not all": ({**ABC, "not": {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}}, ALL),
    "not of an enumeration": (
        {**KINDS, "properties": {**KINDS["properties"], "kind": {"enum": ["x", "y"], "not": {"const": "x"}}}},
        KIND,
    ),
    "no null": ({"not": {"type": "null"}}, ANYTHING),
    "neither text nor list": ({"not": {"type": ["string", "array"]}}, ANYTHING),
    "not these": ({"not": {"enum": ["a", "abc", 1, None, True, []]}}, ANYTHING),
    "some text": ({"type": "string", "not": {"const": ""}}, ANYTHING),
    "other numbers": ({"type": "integer", "not": {"enum": [0, 1, -3]}}, [*range(-5, 5)]),
    "out of range": ({"type": "number", "not": {"minimum": 0, "maximum": 1}}, [-1, 0, 0.5, 1, 2]),
    "not not": ({"not": {"not": {"type": "integer"}}}, ANYTHING),
    "text too long": ({"type": "string", "not": {"maxLength": 2}}, ANYTHING),
    "contains": ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "contains": {"const": "b"}}, WORDS),
    "unique": ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1}, WORDS),
    "unique booleans": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        [[], [True], [True, False], [True, True]],
    ),
    "unique by reference": (
        {
            "$defs": {"w": {"enum": ["a", "b", "c"]}},
            "type": "array",
            "items": {"$ref": "#/$defs/w"},
            "uniqueItems": True,
        },
        WORDS,
    ),
    "at least one": ({**ABC, "minProperties": 1}, ALL),
    "one or two": ({**ABC, "minProperties": 1, "maxProperties": 2}, ALL),
    "nullable": ({**ABC, "nullable": True, "dependentRequired": {"a": ["b"]}}, [*ALL, None]),
    "in a definition": (
        {
            "$defs": {"abc": {**ABC, "dependentRequired": {"a": ["b"]}}},
            "type": "array",
            "items": {"$ref": "#/$defs/abc"},
            "maxItems": 1,
        },
        [[], *([value] for value in ALL)],
    ),
    "with an anchor": (
        {"$defs": {"x": {"$anchor": "word", **STRING}}, **closed({"a": {"$ref": "#word"}})},
        [{"a": "x"}, {"a": 1}],
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_condition_is_enforced_exactly(name):
    schema, values = EXACT[name]
    plan = plan_of(asking(schema))
    plain = {key: value for key, value in schema.items() if key != "nullable"}
    valid = jsonschema.Draft202012Validator(plain)
    wanted = [value for value in values if valid.is_valid(value) or (value is None and "nullable" in schema)]
    if name == "dependencies":  # of an older draft
        wanted = [v for v in values if jsonschema.Draft7Validator(schema).is_valid(v)]
    assert [value for value in values if accepts(plan, value)] == wanted
    assert 0 < len(wanted) < len(values)


NARROWER = {
    "contains, far behind": (
        {"type": "array", "items": INTEGER, "contains": {"const": 1}},
        [[1], [0] * 7 + [1], [0] * 8 + [1], [0, 0]],
    ),
    "unique of many": (
        {"type": "array", "items": {"enum": list("abcdefg")}, "uniqueItems": True},
        [[], ["a", "c"], ["c", "a"], ["a", "a"], list("abcdefg")],
    ),
    "declared ones count": ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, [{}, {"a": 1}, {"b": 1}]),
}


@pytest.mark.parametrize("name", NARROWER)
def test_where_less_than_the_schema_is_allowed_nothing_invalid_is(name):
    schema, values = NARROWER[name]
    plan = plan_of(asking(schema))
    taken = [value for value in values if accepts(plan, value)]
    assert taken and all(jsonschema.Draft202012Validator(schema).is_valid(value) for value in taken)


LEAF = st.sampled_from(
    [{"const": "x"}, {"enum": ["x", 1, None]}, {"type": "string"}, {"type": ["integer", "null"]}, {"minimum": 2}, True]
)
PART = st.recursive(
    st.one_of(
        st.fixed_dictionaries({"required": st.lists(st.sampled_from("ab"), min_size=1, max_size=2, unique=True)}),
        st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("ab"), LEAF, min_size=1)}),
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"not": inner}),
        st.fixed_dictionaries({"if": inner, "then": inner}),
        st.fixed_dictionaries({"if": inner, "then": inner, "else": inner}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"dependentSchemas": st.fixed_dictionaries({"a": inner})}),
    ),
    max_leaves=4,
)
SOME = objects(a=["x", "y", 1, 3, None], b=["x", 2, None])


@settings(max_examples=150, deadline=None)
@given(part=PART)
def test_any_condition_is_enforced_or_refused(part):
    """Random conditions: what the grammar takes is valid; and, as none of them is of the narrower kind, the reverse."""
    schema = {"type": "object", "properties": {"a": {"type": ["string", "integer", "null"]}, "b": {}}, **part}
    if "properties" in part:
        schema = {"type": "object", "allOf": [part]}
    try:
        plan = plan_of(asking(schema))
    except SchemaError:
        return
    valid = jsonschema.Draft202012Validator(schema)
    for value in SOME:
        assert accepts(plan, value) <= valid.is_valid(value), (schema, value)


def test_conditions_in_strings_keep_what_they_must_not_be():
    forbidden = ["", "a", "ab", "b]c", "^", "ä", "x\ny"]
    plan = plan_of(asking({"type": "string", "not": {"enum": forbidden}}))
    others = ["b", "abc", "b]", "b]cd", "^^", "ö", "x\n", "x\nyz", "-", "]"]
    assert [text for text in [*forbidden, *others] if accepts(plan, text)] == others


def test_many_kinds_do_not_multiply():
    count = 30
    kinds = [f"k{i}" for i in range(count)]
    schema = closed({"kind": {"enum": kinds}, **{f"p{i}": STRING for i in range(count)}}, ["kind"])
    schema["allOf"] = [
        {"if": {"properties": {"kind": {"const": kind}}}, "then": {"required": [f"p{i}"]}}
        for i, kind in enumerate(kinds)
    ]
    start = time.process_time()
    plan = plan_of(asking(schema))
    assert time.process_time() - start < 60
    assert accepts(plan, {"kind": "k7", "p7": ""}) and not accepts(plan, {"kind": "k7", "p8": ""})


def test_what_cannot_be_compiled_is_named_by_the_condition():
    """The rewritten parts do not show in errors: the client's own keyword and path do."""
    schema = closed({"a": STRING, "b": STRING}, []) | {
        "dependentSchemas": {"a": {"oneOf": [{"maxProperties": 1}, {"minProperties": 1}]}}
    }
    with pytest.raises(SchemaError) as info:
        Enforcer(strict=True, param="x", check=check)(schema)
    assert info.value.path.startswith("#/dependentSchemas")
    loose = Enforcer(strict=False, param="x", check=check)
    assert check(loose(schema)) == "" and "dependentSchemas" in loose.notes[0]


def test_anchors_lead_to_their_parts_and_unknown_ones_are_named():
    for strict in (True, False):
        enforcer = Enforcer(strict=strict, param="x", check=check)
        if strict:
            with pytest.raises(SchemaError, match=r"no part of this document has the \$anchor 'none'"):
                enforcer({"$ref": "#none"})
        else:
            assert enforcer({"$ref": "#none"}) == {} and "$anchor" in enforcer.notes[0]


@pytest.mark.parametrize("keyword", ["minLength", "minItems"])
def test_a_value_that_would_be_too_large_is_explained(keyword):
    kind = {"minLength": STRING, "minItems": {"type": "array", "items": STRING}}[keyword]
    with pytest.raises(SchemaError, match=r"more than 1000000 bytes.*a minimum that is too large"):
        plan_of(asking({**kind, keyword: 10**8}))
    assert accepts(plan_of(asking({"type": "string", "maxLength": 10**8})), "any length up to that")


# arguments of calls


def call(name, **arguments):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def takes(parameters, **arguments) -> bool:
    request = Request(USER, tools=(Tool("f", parameters=parameters, strict=True),), tool_choice=ToolChoice("required"))
    matcher = plan_of(request).matcher.deep_copy()
    ids = TOKENIZER.encode(call("f", **arguments))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_conditions_on_arguments():
    both = {**ABC, "dependentRequired": {"a": ["b"]}, "not": {"required": ["b", "c"]}}
    taken = [value for value in ALL if takes(both, **value)]
    assert taken == [value for value in ALL if jsonschema.Draft202012Validator(both).is_valid(value)]
    pay = AGENTS["payment"]
    assert takes(pay, method="card", number="1234") and takes(pay, method="transfer", iban="x")
    assert not takes(pay, method="card", iban="x") and not takes(pay, method="card", number="123")
    assert takes(AGENTS["environment"], PATH="x") and not takes(AGENTS["environment"], path="x")
    assert not takes(AGENTS["environment"]) and not takes(AGENTS["environment"], **dict.fromkeys("ABCDE", "x"))
    assert not takes({**ABC, "minProperties": 1}) and takes({**ABC, "minProperties": 1}, b="x")


def test_what_members_of_all_of_demand_is_demanded_together():
    short = {
        "allOf": [{"properties": {"a": {"type": "string", "maxLength": 3}}}, {"properties": {"a": {"pattern": "^x"}}}]
    }
    parameters = {"type": "object", "required": ["a"], **short}
    assert takes(parameters, a="xyz") and not takes(parameters, a="xyzw") and not takes(parameters, a="abc")
    shut = closed({"a": STRING}, []) | {"anyOf": [{"required": ["b"]}, {"required": ["a"]}]}
    assert takes(shut, a="") and not takes(shut, b="") and not takes(shut)
    words = {"allOf": [{"enum": ["x", "y", "zz"]}, {"enum": ["y", "zz", "w"]}], "maxLength": 1}
    assert [leaf["enum"] for leaf in leaves(words, words)] == [["y", "zz"]]
    assert takes(closed({"a": words}), a="y") and not takes(closed({"a": words}), a="zz")
    number = {"allOf": [{"type": "number"}, {"type": ["integer", "string"]}], "minimum": 3}
    assert takes(closed({"a": number}), a="5") and not takes(closed({"a": number}), a="2")
    unions = {
        "type": "object",
        "properties": {"x": INTEGER},
        "allOf": [{"anyOf": [{"required": ["x"]}, {"required": ["y"]}]}] * 2,
    }
    assert takes(closed({"a": unions}), a='{"x": 1}') and not takes(closed({"a": unions}), a="{}")
    assert [variant.parameters for variant in variants({"properties": {"a": False, "b": True}}, {})] == [{"b": True}]


def test_arguments_that_nothing_satisfies_are_refused():
    impossible = closed({"a": STRING}, []) | {"required": ["b"]}
    with pytest.raises(SchemaError):
        takes(impossible)
    with pytest.raises(SchemaError, match="minProperties"):
        takes({"type": "object", "minProperties": 2, "additionalProperties": STRING})


@pytest.mark.parametrize("count", [80, 500, 4000])
def test_long_strings_are_counted(count):
    bounded = closed({"a": {"type": "string", "minLength": 3, "maxLength": count}})
    text = ("Words, <b> x </b> & </p>\n" * 400)[:count]
    text = text if count <= language.EXACT else text.replace("<", "(")
    assert takes(bounded, a=text) and not takes(bounded, a=text + "x") and not takes(bounded, a="xy")
    assert takes(bounded, a="é" * count)


def test_lengths_that_are_not_counted_are_named():
    long = {"type": "string", "maxLength": 10**8}
    with pytest.raises(SchemaError, match=r"'maxLength' cannot be enforced for a string argument of 100000000") as info:
        takes(closed({"a": long}), a="x")
    assert info.value.param == "tools[0].parameters"
    many = closed({name: {"type": "string", "maxLength": 3500 + i} for i, name in enumerate("abc")})
    with pytest.raises(SchemaError, match="8000 in all"):
        takes(many, a="", b="", c="")
    request = Request(USER, tools=(Tool("f", parameters=closed({"a": long})),), tool_choice=ToolChoice("required"))
    assert accepts(plan_of(asking(long)), "x") and plan_of(request).path


PIECES = ("</p", "</f", "\n<f", "<to", "</to", "</", "<", "x", "\n", "é", "words ", "\n</", "*")


@pytest.mark.parametrize("count", [80, 100, 600])
def test_a_counted_string_can_be_followed_to_its_end(count):
    """Whatever is written, the matcher stays within its limits for each step."""
    tool = Tool("f", parameters=closed({"a": {"type": "string", "maxLength": count}}))
    start = plan_of(Request(USER, tools=(tool,), tool_choice=ToolChoice("required"))).matcher
    rng = np.random.default_rng(count)
    pieces = [piece for piece in PIECES if count <= language.EXACT or "<" not in piece]
    for _ in range(3):
        matcher = start.deep_copy()
        assert matcher.consume_tokens(TOKENIZER.encode("<tool_call>\n<function=f>\n<parameter=a>\n"))
        taken = 0
        for _ in range(4 * count):
            for token in TOKENIZER.encode(pieces[rng.integers(len(pieces))], allow_special=False):
                matcher.compute_bitmask()
                assert not matcher.is_error(), matcher.get_error()
                if matcher.validate_tokens([token]) and taken < count:
                    assert matcher.consume_token(token), matcher.get_error()
                    taken += 1
            if taken >= count:
                break
        assert taken > count // 2


# the kinds of the matrix


def test_the_matrix_has_enough_kinds():
    text = json.dumps(MATRIX)
    assert len(MATRIX) >= 25
    for keyword in (
        "$defs",
        "enum",
        "oneOf",
        "anyOf",
        "pattern",
        "format",
        "propertyNames",
        "null",
        "items",
        "allOf",
        "if",
    ):
        assert f'"{keyword}"' in text


@pytest.mark.parametrize("name", AGENTS)
def test_schemas_of_agents_as_answers_and_arguments(name):
    schema = AGENTS[name]
    completion, _, _ = play(asking(schema, thinking=False), seed=len(name), k=3, budget=400)
    assert completion.finish_reason == "stop" and good(completion, schema)
    if schema.get("type") == "object":
        tool = Tool("submit", parameters=schema, strict=True)
        request = Request(
            USER, tools=(tool,), tool_choice=ToolChoice("required"), thinking=False, parallel_tool_calls=False
        )
        completion, _, _ = play(request, seed=len(name), budget=400)
        assert completion.finish_reason == "tool_calls" and good_calls(completion, (tool,)), completion
