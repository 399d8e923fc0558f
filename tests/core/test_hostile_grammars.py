"""Hostile schemas and patterns, faults and cancellation under a grammar: each costs its own request alone.

Work is counted, not timed.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from constrained import INTEGER, SIZE, STRING, USER, asking, closed, good, plan_of
from tiny import tiny_engine

from ninfer_core.errors import InvalidRequestError, RequestCancelledError, SchemaError
from ninfer_core.runtime import grammar as grammars
from ninfer_core.runtime.grammar import Grammar, Phase
from ninfer_core.runtime.sampler import allowed_ids
from ninfer_core.types import Request, ResponseFormat, Sampling, Tool, ToolChoice


def nested(count, wrap, inner):
    for _ in range(count):
        inner = wrap(inner)
    return inner


POSSIBLE = {
    "many values": {"enum": [f"v{i}" for i in range(9000)]},
    "long values": {"enum": ["x" * 6000, "y" * 6000]},
    "odd values": {"enum": ["é", "e\u0301", "\0", "😀", "\u2028", "\x7f", "\\", '"', "", "</think>", "<tool_call>"]},
    "one and one point oh": {"enum": [1.0, 1, 1e100, 0.1, -0.0]},
    "odd names": closed(dict.fromkeys(("é", "日本語", "a\nb", '"', "", "a/b~c", "$ref", "😀", "\x7f"), INTEGER)),
    "deep not": nested(60, lambda inner: {"not": inner}, STRING),
    "many alternatives": {"pattern": f"^({'|'.join(f'word{i}' for i in range(3000))})$", **STRING},
    "nested repetitions": {"pattern": "^((((a*)*)*)*)*$", **STRING},
    "ambiguous": {"pattern": "^(a+)+$", **STRING},
    "counted": {"pattern": "^(.{0,500}x){0,40}$", **STRING},
    "states": {"pattern": "^(a|b)*a(a|b){12}$", **STRING},
    "empty alternative": {"pattern": "^(|a)$", **STRING},
    "nothing but the end": {"pattern": "^$", **STRING},
    "letters of all scripts": {"pattern": "^\\p{L}+$", **STRING},
    "itself in a list": {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    "itself or text": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, STRING]}}, "$ref": "#/$defs/a"},
    "the root again": {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    "wide": closed({f"p{i}": STRING for i in range(1000)}),
    "wide and optional": closed({f"p{i}": STRING for i in range(300)}, []),
    "required, not declared": {"type": "object", "required": [f"r{i}" for i in range(300)]},
    "many items": {"type": "array", "items": STRING, "minItems": 3000},
    "a long constant": {"const": {"a": [1] * 1200}},
    "a long text": {"type": "string", "minLength": 6000},
    "the compiler's own options": {"x-guidance": {"whitespace_pattern": "[a-z]+"}, **closed({"a": INTEGER})},
}
IMPOSSIBLE = {
    "two types": {"allOf": [STRING, INTEGER]},
    "two values": {"allOf": [{"enum": ["a"]}, {"enum": ["b"]}]},
    "value and pattern": {"allOf": [{"const": "a"}, {"pattern": "^b$"}]},
    "value and type": {"const": "a", "type": "integer"},
    "required and false": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "no range": {"type": "integer", "minimum": 5, "maximum": 4},
    "no multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6},
    "no item": {"type": "array", "items": False, "minItems": 1},
    "then nothing": {"if": True, "then": False},
    "no alternative": {"anyOf": []},
    "itself": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "its opposite": {"$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
}
UNENFORCEABLE = {
    "look ahead": ({"pattern": "^(?!foo).*$", **STRING}, "pattern"),
    "look behind": ({"pattern": "(?<=a)b", **STRING}, "pattern"),
    "word border": ({"pattern": "\\bfoo\\b", **STRING}, "pattern"),
    "back reference": ({"pattern": "(a)\\1", **STRING}, "pattern"),
    "start inside": ({"pattern": "a^b", **STRING}, "pattern"),
    "no pattern": ({"pattern": "[", **STRING}, "pattern"),
    "too deep a union": (nested(90, lambda inner: {"anyOf": [inner, {"type": "null"}]}, STRING), "anyOf"),
    "unions multiplied": (
        {"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(6)]} for i in range(10)]},
        "allOf",
    ),
    "numbers that are no integers": (nested(3, lambda inner: {"not": inner}, INTEGER), "not"),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, "$ref"),
    "a digit too many": ({"type": "number", "multipleOf": 1e300}, "multipleOf"),
    "too many combinations": (
        closed({f"p{i}": STRING for i in range(30)}, []) | {"minProperties": 2},
        "minProperties",
    ),
}


def requests_of(schema, strict):
    """The schema as an answer and as an argument."""
    yield Request(USER, response_format=ResponseFormat("json_schema", schema, strict=strict))
    rooted = "$ref" in str(schema)
    tool = Tool("f", parameters=schema if rooted else closed({"v": schema}), strict=strict)
    yield Request(USER, tools=(tool,), tool_choice=ToolChoice("required"))


@pytest.fixture
def searches(monkeypatch):
    """Counts how often a way to the end of a value is looked for, and tried."""
    counted = {"searched": 0, "tried": 0}

    def counting(name, function):
        def call(*arguments):
            counted[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(grammars, "completion", counting("searched", grammars.completion))
    monkeypatch.setattr(grammars, "completes", counting("tried", grammars.completes))
    return counted


@pytest.mark.parametrize("name", POSSIBLE)
def test_whatever_compiles_can_be_followed_at_bounded_cost(name, searches):
    """However long the value, and whether it fits: a few searches for its end, not one for every token."""
    answer, call = requests_of(POSSIBLE[name], strict=False)
    for request in (answer,) if name == "counted" else (answer, call):
        plan = plan_of(request)
        for limit in (60, 100_000):
            searches |= {"searched": 0, "tried": 0}
            grammar = Grammar(plan, thinking=False, limit=limit)
            rng, count = np.random.default_rng(0), 0
            while count < 60 and grammar.state.phase is not Phase.DONE:
                row = grammar.row()
                if row.forced is not None:
                    grammar.take(row.forced)
                    grammar.observe([row.forced])
                else:
                    ids = allowed_ids(row.mask, SIZE)
                    assert len(ids), "nothing is allowed"
                    grammar.observe([grammar.admit(int(rng.choice(ids)))])
                count += 1
            if plan.path is None or len(plan.path) > limit:
                assert searches["searched"] <= 10 and searches["tried"] <= 20, searches


def test_a_value_that_cannot_be_whole_is_reported_as_cut_and_a_search_is_given_up(searches):
    """Between searches in vain the wait doubles."""
    grammar = Grammar(plan_of(asking({"type": "array", "items": STRING, "minItems": 3000})), thinking=False, limit=9000)
    before = searches["searched"]
    for token in itertools.chain([ord("[")], itertools.cycle(b'"a",')):
        grammar.observe([grammar.admit(token)])
        if grammar.state.position == 2000:
            break
    assert searches["searched"] - before <= 12 and grammar.state.lost > 0 and not grammar.state.closing


def test_a_pattern_that_outgrows_its_budget_ends_with_an_error():
    """As an argument its counts are multiplied by the states that keep marks out of raw text."""
    _, call = requests_of(POSSIBLE["counted"], strict=False)
    grammar = Grammar(plan_of(call), thinking=False, limit=1000)
    grammar.observe(grammar.forced())
    with pytest.raises(SchemaError, match=r"cannot be followed any further: .*too many"):
        for token in b"yx" * 400:
            grammar.row()
            grammar.observe([token])


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_nothing_satisfies_is_refused(name):
    for strict in (True, False):
        for request in requests_of(IMPOSSIBLE[name], strict):
            with pytest.raises(SchemaError, match=r"satisf|or none ends"):
                plan_of(request)


@pytest.mark.parametrize("name", UNENFORCEABLE)
def test_what_cannot_be_enforced_is_named_with_its_path_or_dropped(name):
    schema, keyword = UNENFORCEABLE[name]
    for place, request in zip(("#", "#/"), requests_of(schema, strict=True), strict=True):
        with pytest.raises(SchemaError, match=f"the keyword '{keyword.replace('$', '[$]')}'") as info:
            plan_of(request)
        assert info.value.path.startswith(place) and info.value.path.endswith(keyword)
        assert "strict: false" in str(info.value)
    for request in requests_of(schema, strict=False):
        assert plan_of(request).matcher is not None


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, ["a\ud800"]])
def test_text_that_is_no_unicode_is_refused(value):
    for request in requests_of({"enum": [value]}, strict=False):
        with pytest.raises(SchemaError, match="not JSON"):
            plan_of(request)


# the engine


class Failing:
    """A matcher that runs out of its budget after a few tokens."""

    def __init__(self, matcher):
        self._matcher, self._left = matcher, 6

    def __getattr__(self, name):
        return getattr(self._matcher, name)

    def consume_token(self, token):
        self._left -= 1
        return self._matcher.consume_token(token)

    def is_error(self):
        return self._left < 0

    def get_error(self):
        return "too many states"


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_hostile_request_costs_its_own_answer_alone(drafts, monkeypatch):
    """A value that never fits, a fault of the grammar, a cancellation: the others end as if they were alone."""
    schema = closed({"name": {"type": "string", "maxLength": 8}, "tags": {"type": "array", "items": INTEGER}})
    wanted = [
        asking(schema, thinking=False, sampling=Sampling(seed=1), max_tokens=60),
        asking(schema, thinking=True, thinking_budget=8, sampling=Sampling(seed=2), max_tokens=60),
        Request(USER, thinking=False, sampling=Sampling(seed=9), max_tokens=30),
    ]
    endless = asking({"type": "array", "items": STRING, "minItems": 3000}, thinking=False, max_tokens=70)
    words = ResponseFormat("regex", pattern="[a-z ]{50,}")
    cancelled, failing = (Request(USER, response_format=words, thinking=False, max_tokens=n) for n in (800, 801))
    with tiny_engine(draft_tokens=drafts, max_sequences=6) as engine:
        make = engine._grammar

        def grammar(request, prompt, limit):
            made = make(request, prompt, limit)
            if request is failing:
                made._matcher = Failing(made._matcher)
            return made

        monkeypatch.setattr(engine, "_grammar", grammar)
        alone = [engine.submit(request).result(300) for request in wanted]
        before = engine.stats()
        others = [engine.submit(request) for request in (endless, cancelled, failing)]
        handles = [engine.submit(request) for request in wanted]
        next(iter(others[1]))
        others[1].cancel()
        together = [handle.result(300) for handle in handles]
        assert [(c.text, c.message.reasoning) for c in together] == [(c.text, c.message.reasoning) for c in alone]
        assert all(good(c, schema) for c in together[:2])
        assert others[0].result(300).finish_reason == "length"
        with pytest.raises(RequestCancelledError):
            others[1].result(300)
        with pytest.raises(SchemaError, match="cannot be followed any further: too many states"):
            others[2].result(300)
        after = engine.stats()
        assert all(after[name] == before[name] for name in ("slots_free", "running", "waiting"))


def test_the_compiler_refuses_before_the_engine_is_asked():
    with tiny_engine(max_sequences=1) as engine:
        for schema in (IMPOSSIBLE["two types"], UNENFORCEABLE["look ahead"][0]):
            with pytest.raises(InvalidRequestError) as info:
                engine.submit(asking(schema))
            assert info.value.param == "response_format.schema"
        asked = Request(USER, thinking=False, max_tokens=3, ignore_eos=True)
        assert engine.submit(asked).result(60).usage.completion_tokens == 3
