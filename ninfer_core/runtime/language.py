"""The text of a grammar: what an answer may be, and tool calls in the model's XML form with typed arguments. No torch.

A string argument is raw text between its tags, an argument of another type is JSON, as the output parser reads them.
Grammars are written in the compiler's Lark dialect, where `<[id]>` is one token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from ..errors import InvalidRequestError, SchemaError
from ..types import ResponseFormat, Tool
from .arguments import VALUE, Variant, constraints, leaves, variants
from .compiler import mismatches, with_options
from .schema import REPETITIONS, Check, Enforcer, attach, repetitions
from .sizes import Sizes

CLOSERS = ("\n</parameter>\n", "</function>\n", "/function>\n")
"""Texts that end a part of a call, in the order in which they are to be tried."""

CHOICES = 10_000
"""Choices that an answer may have."""

LENGTH = 200_000
"""Bytes of a pattern, of a grammar, or of all choices together."""

SCHEMAS = 400_000
"""Bytes of the schemas of all tools together."""

COUNTED = 4_000
"""Characters up to which the length of one raw argument is held to its bounds, and twice that for all of them."""

EXACT = 100
"""Bounds up to which such an argument may hold `<`: keeping marks apart while counting takes too many states."""

FUEL = 5_000
"""What the compiler may spend on each character that is counted."""

_MOST = 10_000
"""Bytes of a value beyond which its size does not count."""

MARKS = (
    *("</parameter>", "</function>", "<tool_call>", "</tool_call>", "\n<parameter=", "\n<function="),
    *("<parameter=", "<function="),
)
"""What cannot stand in a raw argument, the last two only at its start: the parser could take it for an end."""

_INTEGER = r"/-?(0|[1-9][0-9]{0,17})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"
_BOUNDS = ("enum", "const", "pattern", "patterns", "format", "formats", "minLength", "maxLength")
_NO_TAGS = (
    r"/(?s:.*)/ & ~/(?s:.*)(<\/parameter>|<\/function>|<tool_call>|<\/tool_call>|\n<parameter=|\n<function=)(?s:.*)/"
    r" & ~/(<parameter=|<function=)(?s:.*)/"
)
_NO_BEGINNINGS = r"~/(?s:.*)(<\/pa|<\/fu|<\/to|<too|\n<pa|\n<fu)(?s:.*)/ & ~/(<pa|<fu)(?s:.*)/"
"""No mark of a call, as its first letters: a count of characters multiplies the states that whole marks would take."""
_NO_JSON = r" & ~/[ \t\r\n]*[\[\{\(](?s:.*)/"
_END = json.dumps(CLOSERS[0])
_CONTROL = json.dumps("\x02")[1:-1]
"""The control character that tells raw text from all else, as a name or an enumeration would have it."""
_FORMATS = {
    "date": r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "email": r"[a-zA-Z0-9_+-]{1,32}(\.[a-zA-Z0-9_+-]{1,32}){0,3}@[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
    r"(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?){1,4}",
    "hostname": r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?){0,5}",
    "ipv4": r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])){3}",
    "ipv6": r"([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|::1|::",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]{0,15}:\/\/[a-zA-Z0-9._~:\/?#@!$&'()*+,;=%-]{1,2000}",
    "duration": r"P([0-9]{1,6}D(T[0-9]{1,6}[HMS])?|T[0-9]{1,6}[HMS]|[0-9]{1,6}[YMW])",
}
_FORMATS["date-time"] = _FORMATS["date"] + "T" + _FORMATS["time"]


@dataclass(frozen=True, slots=True)
class Language:
    """A grammar's text, and how many tokens the costliest single step can add to what must follow.

    `raw`: it has raw arguments of any text, and nothing else that takes control characters. `fuel`: what compiling it
    may cost beyond the usual.
    """

    text: str
    growth: int
    raw: bool
    fuel: int


@dataclass(frozen=True, slots=True)
class Tags:
    """The ids of the single tokens around a call."""

    start: int
    end: int


class Writer:
    """Writes the grammar of one request. `notes`: what is not enforced, for the log."""

    def __init__(self, check: Check) -> None:
        self.notes: list[str] = []
        self._check = check
        self._rules: list[str] = []
        self._extra: list[dict[str, str]] = []
        self._growth = 16
        self._bytes = 0
        self._sizes = Sizes(True)
        self._names: dict[str, str] = {}
        self._lists: dict[str, str] = {}
        self._characters = 0
        self._tool = ("", False)

    def language(
        self, answer: ResponseFormat | None, tools: Sequence[Tool], tags: Tags | None, repeat: str
    ) -> Language:
        """An answer, calls of `tools`, or either of them.

        Args:
            answer: the form of an answer in text; None: there is none.
            tools: the tools that may be called.
            tags: the tokens around a call; needed with tools.
            repeat: "one" call, "many" (one or more, a newline between two), or "free" (any number, where what lies
                between is not shown to the grammar).
        """
        ways = []
        if answer is not None:
            ways.append(self._answer(answer))
        if tools:
            assert tags is not None
            calls = [self._call(i, tool, tags) for i, tool in enumerate(tools)]
            self._rules.append(f"call: {' | '.join(calls)}")
            ways.append({"one": "call", "many": 'call ("\\n" call)*', "free": "call*"}[repeat])
        text = "\n".join([f"start: {' | '.join(ways)}", *self._rules]) + "\n"
        if self._extra:
            text = json.dumps({"grammars": [{"name": "all", "lark_grammar": text}, *self._extra]})
        raw = set(self._names) == {_NO_TAGS} and (answer is None or _is_json(answer)) and _CONTROL not in text
        return Language(text, self._growth, raw, FUEL * self._characters)

    # answers

    def _answer(self, form: ResponseFormat) -> str:
        if form.kind in ("json", "json_schema"):
            schema = {"type": "object"} if form.kind == "json" else form.schema
            schema = True if schema is None else schema
            return self._rule("answer", self._json(schema, form.strict, "response_format.schema"))
        size = len((form.pattern or "".join(form.choices)).encode())
        field = "response_format.choices" if form.kind == "choice" else "response_format.pattern"
        if size > LENGTH:
            raise SchemaError(f"{field} has {size} bytes; the limit is {LENGTH}: make it shorter", param=field)
        if len(form.choices) > CHOICES:
            raise SchemaError(f"{field} has {len(form.choices)} entries; the limit is {CHOICES}", param=field)
        if repetitions(form.pattern or "") > REPETITIONS:
            raise SchemaError(
                f"response_format.pattern repeats a part more than {REPETITIONS} times; use smaller counts",
                param="response_format.pattern",
            )
        if form.kind == "choice":
            return self._rule("answer", self._listed("CHOICE", form.choices))
        if form.kind == "regex":
            return self._rule("answer", f"/{regex_to_lark(form.pattern or '', '')}/")
        self._extra.append({"name": "answer", "lark_grammar": _lark(form.pattern or "")})
        return "@answer"

    def _json(self, schema: Any, strict: bool, param: str) -> str:
        """JSON of a schema, as an expression of the grammar."""
        enforce = Enforcer(strict=strict, param=param, check=self._check)
        made = enforce(schema)
        self.notes += [f"{param}: {note}" for note in enforce.notes]
        return self._compiled(made)

    def _compiled(self, schema: Any) -> str:
        """JSON of a schema that is known to compile."""
        self._growth = max(self._growth, Sizes(schema).longest())
        return "%json " + json.dumps(with_options(schema), ensure_ascii=False)

    def _rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    # calls

    def _call(self, index: int, tool: Tool, tags: Tags) -> str:
        if tool.name != tool.name.strip() or any(char in "<>" or not char.isprintable() for char in tool.name):
            raise InvalidRequestError(
                f"tools[{index}].name: calls of {tool.name!r:.80} cannot be enforced, since its name could not be read "
                "back; names have no '<', '>', line breaks or control characters, and no blanks at their ends",
                param="tools",
            )
        param = f"tools[{index}].parameters"
        enforce = Enforcer(strict=tool.strict, param=param, check=self._check)
        root = enforce(tool.parameters if isinstance(tool.parameters, Mapping) else {})
        self._bytes += len(json.dumps(root))
        if self._bytes > SCHEMAS:
            raise SchemaError(
                f"tools: the schemas of all tools together have more than {SCHEMAS} bytes; send fewer tools",
                param="tools",
            )
        self._sizes = Sizes(root)
        self._tool = (param, tool.strict)
        self.notes += [f"{param}: {note}" for note in enforce.notes]
        ways = [variant for variant in variants(root, root) if variant.possible]
        if not ways:
            raise SchemaError(f"{param}: no arguments can satisfy this schema together", param=param)
        self._counted(ways)
        head = _quoted(f"\n<function={tool.name}>\n")
        bodies = [self._body(f"{index}_{v}", variant, root, len(tool.name)) for v, variant in enumerate(ways)]
        body = f"({' | '.join(bodies)})" if len(bodies) > 1 else bodies[0]
        return self._rule(f"call_{index}", f'<[{tags.start}]> {head} {body} "</function>\\n" <[{tags.end}]>')

    def _drop(self, keyword: str, what: str) -> None:
        """Leave a keyword of the present tool out, or refuse it if the tool is strict."""
        param, strict = self._tool
        note = f"{param}: the keyword {keyword!r} cannot be enforced for {what}"
        if strict:
            raise SchemaError(f"{note}; leave it out, or send strict: false to have it ignored", param=param)
        self.notes.append(f"{note}; it is ignored")

    def _counted(self, ways: Sequence[Variant]) -> None:
        """Arguments of any names may repeat each other, so more than one of them cannot be demanded."""
        if any(variant.least > 1 and variant.free for variant in ways):
            self._drop("minProperties", "more than one argument of any names: they may be repeated")

    def _body(self, place: str, variant: Variant, root: Any, name: int) -> str:
        """The arguments of a call, one way; `name`: characters of the tool's name."""
        declared, required = variant.parameters, variant.required
        size = sum(len(key) + 32 + self._sizes.of(declared[key]) for key in required)
        self._growth = max(self._growth, min(size, _MOST) + name + 48)
        parts = []
        for p, (key, schema) in enumerate(declared.items()):
            made = self._parameter(f"p_{place}_{p}", _quoted(key)[1:-1], schema, root)
            parts.append(made if key in required else f"{made}?")
        if variant.free:
            key = f"K_{place}"
            named = f" & /{search(variant.names)}/" if variant.names is not None else ""
            self._rules.append(f"{key}: /[^\\x00-\\x1f\\x7f<>]{{1,64}}/{named}")
            rule = self._rule(f"q_{place}", f'"<parameter=" {key} ">\\n" {self._value(variant.rest, root)}')
            least = min(variant.least, 1)
            many = f"{{{least},{variant.most}}}" if variant.most is not None else "+" if least else "*"
            parts.append(rule + many)
        return " ".join(parts)

    def _parameter(self, name: str, key: str, schema: Any, root: Any) -> str:
        return self._rule(name, f'"<parameter={key}>\\n" {self._value(schema, root)}')

    def _value(self, schema: Any, root: Any) -> str:
        """A value and the tag behind it. The growth of a value counts its tags."""
        self._growth = max(self._growth, min(self._sizes.of(schema), _MOST) + 64)
        texts, structures = [], []
        for leaf in leaves(schema, root):
            kind = leaf.get("type", "string")
            if kind == "string":
                texts.append(leaf)
            else:
                structures.append(leaf)
        kinds = {str(leaf["type"]) for leaf in structures}
        free = any(not _bounded(leaf) for leaf in texts)
        if free:
            return self._free(kinds, structures, root)
        ways = [way for leaf in texts for way in self._texts(leaf)]
        if not ways and not structures:
            raise SchemaError("a tool's parameters demand an argument that no value satisfies", param="tools")
        if structures:
            ways.append(self._structure(structures, root) + " " + _END)
        return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"

    def _free(self, kinds: set[str], structures: Sequence[Mapping[str, Any]], root: Any) -> str:
        """Any text. Where objects or arrays are allowed too, text that looks like one must be one."""
        nested = [leaf for leaf in structures if leaf["type"] in ("object", "array")]
        text = self._terminal("TEXT_ONLY" if nested else "TEXT", _NO_TAGS + (_NO_JSON if nested else ""))
        return f"({text} | {self._structure(nested, root)} {_END})" if nested else text

    def _texts(self, leaf: Mapping[str, Any]) -> list[str]:
        """The raw texts of a constrained string."""
        values = leaf["enum"] if "enum" in leaf else [leaf["const"]] if "const" in leaf else None
        if values is not None:
            texts = [value for value in values if isinstance(value, str)]
            for pattern in constraints(leaf, "pattern"):
                wrong = mismatches(pattern, texts)
                texts = [text for text in texts if text not in wrong]
            least, most = leaf.get("minLength", 0), leaf.get("maxLength")
            texts = [text for text in texts if least <= len(text) <= (len(text) if most is None else most)]
            return [self._listed("ENUM", [text + CLOSERS[0] for text in texts])] if texts else []
        bounds = self._bounds(leaf)
        parts = [_NO_TAGS]
        if bounds:
            short = max(int(leaf.get(key, 0)) for key in ("minLength", "maxLength")) <= EXACT
            parts = [f"/(?s:.{{{bounds}}})/ & {_NO_BEGINNINGS}" if short else f"/[^<]{{{bounds}}}/"]
        parts += [f"/{search(pattern)}/" for pattern in constraints(leaf, "pattern")]
        parts += [f"/({_FORMATS[name]})/" for name in constraints(leaf, "format")]
        return [self._terminal("", " & ".join(parts))]

    def _bounds(self, leaf: Mapping[str, Any]) -> str:
        """The counts of a repetition for the length of a string; empty if there are none to enforce."""
        bounds = {key: int(leaf[key]) for key in ("minLength", "maxLength") if key in leaf}
        for key, count in list(bounds.items()):
            if count > COUNTED or self._characters + count > 2 * COUNTED:
                self._drop(
                    key,
                    f"a string argument of {count} characters: {COUNTED} are counted in one, and {2 * COUNTED} in all",
                )
                del bounds[key]
        if not any(bounds.get(key) for key in bounds) and "maxLength" not in bounds:
            return ""
        self._characters += max(bounds.values())
        return f"{bounds.get('minLength', 0)},{bounds.get('maxLength', '')}"

    def _structure(self, leaves_: Sequence[Mapping[str, Any]], root: Any) -> str:
        plain = {key for leaf in leaves_ for key in leaf} <= {"type"}
        kinds = {leaf["type"] for leaf in leaves_}
        if plain and kinds == {"integer"}:
            return _INTEGER
        if plain and kinds <= {"integer", "number"}:
            return _NUMBER
        parts = [{k: v for k, v in leaf.items() if (k, v) != ("type", VALUE)} for leaf in leaves_]
        return self._compiled(attach(parts[0] if len(parts) == 1 else {"anyOf": parts}, root))

    def _listed(self, name: str, texts: Sequence[str]) -> str:
        """One of these texts, as a terminal: thousands of alternatives of a rule are more than the parser follows."""
        body = " | ".join(map(_quoted, texts))
        if len(texts) == 1:
            return body
        if body not in self._lists:
            self._lists[body] = f"{name}_{len(self._lists)}"
            self._rules.append(f"{self._lists[body]}: {body}")
        return self._lists[body]

    def _terminal(self, name: str, body: str) -> str:
        """A lazy terminal of a text and the tag that ends it; each text is written once."""
        if body not in self._names:
            name = name or f"TEXT_{len(self._names)}"
            self._names[body] = name.lower()
            self._rules.append(f"{name.lower()}[lazy]: {name}\n{name}: ({body}) {_END}")
        return self._names[body]


def _quoted(text: str) -> str:
    """A text as a string of the grammar, which takes the escapes of JSON and no DEL as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_json(form: ResponseFormat) -> bool:
    return form.kind in ("json", "json_schema")


def _lark(text: str) -> str:
    """A client's grammar, given in Lark or in GBNF, as Lark."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises bare exceptions
        raise SchemaError(
            f"response_format: the grammar is neither Lark nor GBNF that can be read: {error}", param="response_format"
        ) from error


def search(pattern: str) -> str:
    """A pattern that must match somewhere, as one that matches the whole text; anchors are those of an alternative."""
    parts = _alternatives(pattern)
    if len(parts) <= _ALTERNATIVES and any(part.startswith("^") or part.endswith("$") for part in parts):
        return "|".join(map(_search, parts))
    return _search(pattern)


def _search(pattern: str) -> str:
    pattern = regex_to_lark(pattern, "dw")
    start = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    bare = pattern[0 if start else 1 : len(pattern) if end else -1]
    return f"{start}({bare}){end}"


def _alternatives(pattern: str, groups: int = 8) -> list[str]:
    """What the outermost `|` separate; up to so many groups that are all of one are opened."""
    parts, depth, listed, first, closed = [], 0, False, 0, 0
    for found in re.finditer(r"\\.|[][()|]", pattern, re.S):
        mark = found[0]
        if listed or mark == "[":
            listed = mark != "]"
        elif mark in "()":
            depth += 1 if mark == "(" else -1
            closed = closed or (found.end() if not depth else 0)
        elif mark == "|" and not depth:
            parts.append(pattern[first : found.start()])
            first = found.end()
    parts.append(pattern[first:])
    if re.search(r"\(\?[a-z-]+\)", pattern):  # a flag in front is one of all alternatives
        return [pattern]
    if len(parts) > 1:
        return [part for whole in parts for part in _alternatives(whole, groups - 1)] if groups else [pattern]
    opened = re.match(r"\((?!\?)|\(\?:", pattern)
    if opened and closed == len(pattern) and groups:
        return _alternatives(pattern[opened.end() : -1], groups - 1)
    return parts


_ALTERNATIVES = 32
"""How many alternatives are anchored one by one: what surrounds them is written for each."""


def _bounded(leaf: Mapping[str, Any]) -> bool:
    """Whether a string schema says more than that it is a string."""
    return any(key in leaf for key in _BOUNDS)
