"""The grammar compiler (llguidance) with bounds on its work: does a schema compile, which texts match a pattern.

It decides in linear time; a client's pattern never meets a matcher that tries alternatives in turn. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

import llguidance
import numpy as np

from ..errors import SchemaError
from .vocabulary import Vocabulary

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Blanks between two parts of JSON: bounded, so that a model cannot write blanks until its budget is used up."""

_FUEL, _STEP_FUEL = 1_000_000, 200_000


class _Bytes:
    """A tokenizer of single bytes, for the compiler's own matching of texts."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def _bytes() -> Any:
    wrapper: Any = _Bytes()
    return llguidance.LLTokenizer(wrapper, slices=[])


def _limits(more: int = 0) -> Any:
    """Bounds on the work of a compilation: about two seconds, in which other threads run."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=_FUEL + more, step_lexer_fuel=_STEP_FUEL + more, max_grammar_size=200_000
    )


def with_options(schema: Any) -> Any:
    """A schema with the compiler's options for blanks."""
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema} if isinstance(schema, Mapping) else schema


@lru_cache(maxsize=256)
def _check(text: str) -> str:
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, limits=_limits())
    return messages[0] if failed else ""


def check(schema: Any) -> str:
    """Why a JSON schema does not compile; empty if it does."""
    if isinstance(schema, bool):
        return "" if schema else "Unsatisfiable schema: false"
    return _check(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(with_options(schema))))


def compiled(text: str, vocabulary: Vocabulary, fuel: int, *, what: str, param: str) -> Any:
    """A matcher at the start of a grammar in the compiler's Lark dialect, or in its JSON form of several grammars.

    Args:
        fuel: what compiling may cost beyond the usual.
        what: names the grammar in errors. param: the field of the request that it came with.

    Raises:
        SchemaError: it cannot be compiled.
    """
    if not text.startswith("{"):
        text = llguidance.LLMatcher.grammar_from_lark(text)
    matcher = llguidance.LLMatcher(vocabulary.library, text, log_level=0, limits=_limits(fuel))
    if matcher.is_error():
        raise SchemaError(f"{what} cannot be compiled: {reason(matcher)}", param=param)
    return matcher


def reason(matcher: Any) -> str:
    """What the compiler says of a matcher in error, in one line."""
    return " ".join(matcher.get_error().split())[:300]


def begins(matcher: Any, vocabulary: Vocabulary) -> bool:
    """Whether any token can start a text of the grammar."""
    mask = matcher.compute_bitmask()
    why = reason(matcher)
    if "too many" in why or "fuel" in why:
        raise SchemaError(f"the grammar is too complex to compile ({why}); ask for less at once")
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=vocabulary.size)
    bits[vocabulary.eos] = 0
    return bool(bits.any())


def mismatches(pattern: str, names: Iterable[str]) -> list[str]:
    """The names without a match of a pattern; none where the pattern does not compile."""
    text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    start = llguidance.LLMatcher(_bytes(), text, log_level=0)
    wrong = []
    for name in () if start.is_error() else names:
        matcher = start.deep_copy()
        spelled = list(json.dumps(name, ensure_ascii=False).encode())
        if matcher.try_consume_tokens(spelled) < len(spelled) or not matcher.is_accepting():
            wrong.append(name)
    return wrong
