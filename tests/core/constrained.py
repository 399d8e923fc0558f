"""Requests with a form, played through the real sampler, session and output machine with random logits for a model."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import torch

from ninfer_core.runtime.grammar import Grammar, compile_plan, needed
from ninfer_core.runtime.handle import RequestHandle
from ninfer_core.runtime.sampler import Sampler
from ninfer_core.runtime.session import Session
from ninfer_core.runtime.validation import SamplingParams
from ninfer_core.runtime.vocabulary import Vocabulary
from ninfer_core.testing import ScriptedEngine
from ninfer_core.types import Message, Request, ResponseFormat, Tool

FRONTEND = ScriptedEngine("").frontend
TOKENIZER = FRONTEND.tokenizer._base  # the fixed tokens: single bytes and the template's marks
SIZE = TOKENIZER.addressable
VOCABULARY = Vocabulary.of(TOKENIZER, FRONTEND.eos_ids)
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
USER = (Message("user", "x"),)


def plan_of(request):
    return compile_plan(request, VOCABULARY)


def model(seed: int):
    """Random logits that depend on the tokens so far: (emitted tokens, drafts) -> [1 + drafts, V] fp32."""

    def rows(tokens, drafts, bias):
        made = []
        for i in range(len(drafts) + 1):
            history = [*tokens, *drafts[:i]]
            state = np.random.Philox(key=[seed, hash(tuple(history)) & (2**63 - 1)])
            made.append(np.random.Generator(state).standard_normal(384, dtype=np.float32) * 3 + bias)
        return torch.from_numpy(np.stack(made))

    return rows


def play(request, *, k=0, seed=0, budget=512, temperature=1.0, plan=None, bias=None, propose=None, logprobs=None):
    """Run a request as the runner does, k drafts a round; returns (completion, emitted ids, logprobs).

    Drafts are mostly what the model itself would draw, so that bursts of all lengths occur; `propose` replaces them.
    `bias` [V] is added to all logits.
    """
    prompt = FRONTEND.prepare(request)
    grammar = None
    if needed(request):
        grammar = Grammar(plan or plan_of(request), thinking=prompt.thinking, limit=budget)
    handle = RequestHandle(request)
    session = Session(
        handle,
        prompt,
        FRONTEND.machine(request, prompt),
        limit=budget,
        seed=seed,
        reserve=grammar.reserve if grammar else 0,
    )
    params = SamplingParams(temperature=temperature, top_k=20, top_p=0.95, seed=seed)
    sampler = Sampler(params, addressable=SIZE, grammar=grammar, logprobs=logprobs)
    logits, tokens, records = model(seed), [], []
    bias = np.zeros(384, np.float32) if bias is None else bias
    rng = np.random.default_rng(seed)

    def take(ids):
        tokens.extend(ids)
        sampler.observe(ids)

    while not session.ended:
        drafts = propose(tokens) if propose else [int(t) for t in rng.integers(32, 127, k)]
        drafts = drafts[:k]
        sampler.look_ahead(drafts)
        ids, raw = sampler.sample(logits(tokens, drafts, bias), drafts, len(tokens))
        kept = session.deliver(ids, drafted=len(drafts))
        records += (raw or [])[:kept]
        take(ids[:kept])
        while not session.ended and (forced := session.forced or sampler.forced()):
            count = session.deliver(forced)
            records += [(t, 0.0, [(t, 0.0)]) for t in forced[:count]]
            take(forced[:count])
    return handle.result(0), tokens, records


def good(completion, schema) -> bool:
    """Whether an answer parses and is valid."""
    value = json.loads(completion.text)
    jsonschema.validate(value, schema, format_checker=FORMATS)
    return True


def asking(schema, **fields) -> Request:
    return Request(USER, response_format=ResponseFormat("json_schema", schema), **fields)


def closed(properties, required=None, **more) -> dict:
    """An object schema with these properties and no others, all required unless said."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": t} for t in ("string", "integer", "number", "boolean"))

SCHEMAS = {
    "title": closed({"title": {"type": "string", "maxLength": 80}}),
    "person": closed({"name": STRING, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    "optional": closed({"name": STRING, "nick": STRING, "age": INTEGER}, ["name"]),
    "nested": closed({"user": closed({"name": STRING, "address": closed({"city": STRING, "zip": STRING})})}),
    "enum": closed({"mood": {"enum": ["happy", "sad", "über"]}, "level": {"type": "integer", "enum": [1, 2, 3]}}),
    "const": closed({"kind": {"const": "report"}, "version": {"const": 2}, "done": BOOLEAN}),
    "mixed enum": closed({"value": {"enum": ["a", 1, None, True, {"x": [1]}]}}),
    "nullable": closed({"a": {"type": ["string", "null"]}, "b": {"anyOf": [INTEGER, {"type": "null"}]}}),
    "array": closed({"tags": {"type": "array", "items": STRING, "minItems": 1, "maxItems": 5}}),
    "array of objects": closed({"steps": {"type": "array", "items": closed({"n": INTEGER, "do": STRING})}}),
    "tuple": {"type": "array", "prefixItems": [NUMBER, NUMBER, STRING], "items": False, "minItems": 3},
    "matrix": {"type": "array", "items": {"type": "array", "items": NUMBER, "maxItems": 3}, "minItems": 2},
    "pattern": closed({"id": {"type": "string", "pattern": "^[A-Z]{3}-\\d{4}$"}, "hex": {"pattern": "^[0-9a-f]+$"}}),
    "formats": closed({f: {"type": "string", "format": f} for f in ("date", "time", "uuid", "email", "ipv4")}),
    "timestamp": closed({"at": {"type": "string", "format": "date-time"}, "url": {"type": "string", "format": "uri"}}),
    "union": {"anyOf": [closed({"ok": BOOLEAN}), closed({"error": STRING, "code": INTEGER})]},
    "tagged union": {
        "oneOf": [closed({"type": {"const": "a"}, "x": NUMBER}), closed({"type": {"const": "b"}, "y": STRING})]
    },
    "defs": {
        "$defs": {"point": closed({"x": NUMBER, "y": NUMBER})},
        **closed({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "recursive": {
        "$ref": "#/$defs/node",
        "$defs": {"node": closed({"name": STRING, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}})},
    },
    "definitions": {
        "definitions": {"Item": closed({"sku": STRING, "count": {"type": "integer", "minimum": 1}})},
        **closed({"items": {"type": "array", "items": {"$ref": "#/definitions/Item"}, "minItems": 1}}),
    },
    "map": {"type": "object", "additionalProperties": INTEGER},
    "property names": closed({}, propertyNames={"pattern": "^[a-z]{1,8}$"}) | {"additionalProperties": NUMBER},
    "pattern properties": {"type": "object", "patternProperties": {"^x-": STRING}, "additionalProperties": False},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": STRING}, "required": ["a"]},
            {"properties": {"b": INTEGER}, "required": ["b"]},
        ]
    },
    "numbers": closed({"p": {"type": "number", "minimum": 0, "maximum": 1}, "m": {"type": "integer", "multipleOf": 5}}),
    "bounds": closed({"s": {"type": "string", "minLength": 3, "maxLength": 6}, "n": {"exclusiveMinimum": 2} | NUMBER}),
    "edit": closed(
        {
            "path": STRING,
            "edits": {"type": "array", "items": closed({"old": STRING, "new": STRING, "all": BOOLEAN}, ["old", "new"])},
        }
    ),
    "pydantic": {
        "title": "Plan",
        "description": "A plan.",
        "type": "object",
        "$defs": {"Level": {"title": "Level", "enum": ["low", "high"], "type": "string"}},
        "properties": {
            "level": {"allOf": [{"$ref": "#/$defs/Level"}], "default": "low", "description": "how much"},
            "due": {"anyOf": [{"format": "date", "type": "string"}, {"type": "null"}], "default": None, "title": "Due"},
        },
        "required": ["level"],
    },
    "scalar": {"type": "integer", "minimum": -5, "maximum": 5},
    "anything": True,
}

BASH = Tool(
    "bash",
    parameters={
        "type": "object",
        "properties": {
            "command": STRING,
            "timeout": {"type": "integer", "minimum": 0},
            "env": {"type": "object", "additionalProperties": STRING},
        },
        "required": ["command"],
    },
)
EDIT = Tool(
    "edit.file",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string", "pattern": "^/[a-z/]*$"},
            "mode": {"type": "string", "enum": ["append", "replace all", "ü"]},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "at": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "force": BOOLEAN,
        },
        "required": ["path", "mode", "lines", "at", "force"],
        "additionalProperties": False,
    },
)
NOW = Tool("now")
TOOLS = (BASH, EDIT, NOW)


def good_calls(completion, tools=TOOLS) -> bool:
    """Whether every call names a tool and its arguments are valid."""
    schemas = {tool.name: tool.parameters for tool in tools}
    for call in completion.message.tool_calls:
        jsonschema.validate(call.arguments, schemas[call.name], format_checker=FORMATS)
    return bool(completion.message.tool_calls)
