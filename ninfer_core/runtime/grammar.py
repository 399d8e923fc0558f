"""Constrained output: which tokens may come next, given a response format and a tool choice. No torch.

A `Grammar` belongs to one request and follows its emitted tokens. Inside the think block nothing is constrained but
that it ends with its own token; then the answer or the calls are held to a compiled grammar; with `tool_choice` auto
the text between calls is free. Tokens are judged by their ids, so a mark that is spelled out is no way around.

What may come next depends on the emitted tokens and their number alone, never on how many arrived at once: `rows`
looks ahead along drafts and takes everything back, `observe` makes tokens final.

Where the room for further tokens gets tight the value is closed: a token after which the value could no longer be
completed in time is replaced by the first of those that complete it, and the rest follow without sampling.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from ..errors import InvalidRequestError, SchemaError
from ..types import Request, ResponseFormat, Tool
from .closing import completes, completion
from .compiler import begins, check, compiled, reason
from .language import CLOSERS, MARKS, Language, Tags, Writer
from .vocabulary import Vocabulary

log = logging.getLogger("ninfer.engine")

THINK_END, CALL, CALL_END, FUNCTION = "</think>", "<tool_call>", "</tool_call>", "<function="
NEWLINES = 2
"""Newlines that may stand between the think block and the answer."""


class Phase(Enum):
    """Where in the output the next token is."""

    REASONING = "reasoning"
    LEAD = "lead"  # behind the think block: newlines, or the first token of the body
    TEXT = "text"  # free text that a call may follow
    BODY = "body"  # held to the compiled grammar
    DONE = "done"


@dataclass(frozen=True, slots=True)
class State:
    """What is known behind one token.

    `fed`: tokens the matcher has taken; `check`: the position where room is looked at next; `path`: what completed the
    value when that was last found out; `lost`: how many times in a row nothing was found that fits; `closing`: what
    remains to be emitted of a path that was entered.
    """

    phase: Phase
    position: int = 0
    tail: bytes = b""
    newlines: int = 0
    fed: int = 0
    check: int = 0
    path: tuple[int, ...] = ()
    lost: int = 0
    closing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """What may stand at one place: one `forced` token, or those of the `mask`, or all but the `banned` ones.

    `mask`: one bit per id, lowest first. `last`: the token drawn here may be replaced by one that closes the value, so
    what follows it is not known.
    """

    forced: int | None = None
    mask: bytes | None = None
    banned: np.ndarray | None = None
    last: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled constraint. Many requests may start from one plan.

    `growth`: tokens that one token can add to what must follow; `path`: tokens that complete the value from its start;
    `free_text`: the matcher sees calls only; `raw`: raw arguments are the only places for control characters, whose
    masks are worked out once and kept in `masks`.
    """

    vocabulary: Vocabulary
    matcher: Any
    growth: int
    free_text: bool
    banned_in_text: tuple[str, ...] = ()
    path: tuple[int, ...] | None = ()
    marks: tuple[str, ...] = (THINK_END,)
    raw: bool = False
    masks: dict[bytes, bytes] = field(default_factory=dict)


def needed(request: Request) -> bool:
    """Whether anything about the output is to be enforced."""
    if request.response_format is not None:
        return True
    choice = request.tool_choice
    if not request.tools:
        return False
    return choice.mode != "auto" or bool(choice.names) or any(tool.strict for tool in request.tools)


def plan_for(request: Request, vocabulary: Vocabulary) -> Plan:
    """`compile_plan`, remembered: agents send the same tools and schemas with every turn. Any thread may call it."""
    form, choice = request.response_format, request.tool_choice
    tools = [(tool.name, tool.parameters, tool.strict) for tool in request.tools]
    wanted = (form and (form.kind, form.schema, form.pattern, form.choices, form.strict), choice.mode, choice.names)
    key = json.dumps((wanted, tools, request.parallel_tool_calls), default=dict)
    plan: Plan | None = vocabulary.plans.get(key)
    if plan is None:
        plan = vocabulary.plans.put(key, compile_plan(request, vocabulary))
    return plan


def compile_plan(request: Request, vocabulary: Vocabulary) -> Plan:
    """Compile what a request demands.

    Raises:
        SchemaError: a schema, regular expression or grammar that cannot be enforced.
        InvalidRequestError: the tokenizer has no tokens for calls.
    """
    choice, form = request.tool_choice, request.response_format
    tools: Sequence[Tool] = () if choice.mode == "none" else request.tools
    if choice.names:
        tools = [tool for tool in tools if tool.name in choice.names]
    if choice.mode == "required":
        form = None
    free = form is None and choice.mode != "required"
    if free and not tools:
        return Plan(vocabulary, None, 0, True, banned_in_text=(CALL, FUNCTION), marks=(THINK_END, CALL))
    language, notes = _written(form, tools, free, request.parallel_tool_calls, vocabulary)
    for note in notes:
        log.warning("%s", note)
    param = "tool_choice" if form is None else "response_format"
    matcher = compiled(
        language.text,
        vocabulary,
        language.fuel,
        what=param if form is None else f"{param} of kind {form.kind!r}",
        param=param,
    )
    marks: tuple[str, ...] = (THINK_END, CALL) if request.tools else (THINK_END,)
    path = completion(matcher, vocabulary, _MOST)
    if path is None and not begins(matcher, vocabulary):
        what = "tools" if form is None else "response_format"
        raise SchemaError(f"{what}: no text satisfies this grammar", param=what)
    return Plan(
        vocabulary,
        matcher,
        language.growth,
        free,
        banned_in_text=(FUNCTION, CALL) if free else (),
        path=None if path is None else tuple(path),
        marks=marks,
        raw=language.raw and not any(found.size for found in vocabulary.completing(_TERMINATOR)[:2]),
    )


_TERMINATOR = CLOSERS[0]
_RAW_MARKS = tuple(mark.encode() for mark in (*MARKS, _TERMINATOR))
_MOST = 4096
"""Tokens that the search for a completion may take."""
_OFTEN = 256
"""Tokens of a path for each token between two looks at it."""
_PATIENCE = 8
"""Doublings of the wait between searches in vain."""
_UNKNOWN = 5
"""Where they begin if nothing was found when the grammar was compiled."""


def _written(
    form: ResponseFormat | None, tools: Sequence[Tool], free: bool, parallel: bool, vocabulary: Vocabulary
) -> tuple[Language, list[str]]:
    start, end = vocabulary.id(CALL), vocabulary.id(CALL_END)
    if tools and (start is None or end is None):
        raise InvalidRequestError(
            f"tool_choice: the tokenizer has no tokens {CALL} and {CALL_END}, so calls cannot be enforced",
            param="tool_choice",
        )
    writer = Writer(check)
    tags = Tags(start, end) if start is not None and end is not None else None
    repeat = "free" if free else "many" if parallel else "one"
    return writer.language(form, tools, tags, repeat), writer.notes


class Grammar:
    """The constraint of one running request.

    Args:
        plan: the compiled constraint.
        thinking: the output starts inside a think block.
        limit: how many tokens may be emitted.
        stop_ids: further ids that may end a finished answer.
        prefix: text of the answer that is already there.

    Raises:
        InvalidRequestError: `prefix` does not fit the grammar.
    """

    def __init__(
        self, plan: Plan, *, thinking: bool, limit: int, stop_ids: Sequence[int] = (), prefix: str = ""
    ) -> None:
        self._plan = plan
        self._vocabulary = plan.vocabulary
        self._matcher: Any = plan.matcher.deep_copy() if plan.matcher is not None else None
        self._limit = limit
        self._ends = np.union1d(self._vocabulary.eos, np.array(sorted(stop_ids), dtype=np.int64))
        self._think_end = self._vocabulary.id(THINK_END)
        self._call, self._call_end = self._vocabulary.id(CALL), self._vocabulary.id(CALL_END)
        behind = Phase.TEXT if plan.free_text else Phase.BODY
        self._control = self._vocabulary.spell("\x02")
        start = State(Phase.REASONING if thinking else behind)
        self._states = [self._opened(start)]
        self._pending: list[int] = []
        if prefix and self._matcher is not None and not plan.free_text and not thinking:
            self._skip(prefix)

    def _skip(self, prefix: str) -> None:
        ids = self._vocabulary.library.tokenize_bytes(prefix.encode())
        if self._matcher.try_consume_tokens(ids) < len(ids):
            raise InvalidRequestError(
                "the message to continue does not fit the response format; leave it out or change it", param="messages"
            )

    @property
    def reserve(self) -> int:
        """Tokens that the answer needs behind a think block, with some for the model to choose."""
        if self._plan.matcher is None or self._plan.free_text:
            return 0
        return 2 * len(self._plan.path or ()) + 32

    @property
    def state(self) -> State:
        """Where the output stands."""
        return self._states[-1]

    def _opened(self, state: State) -> State:
        """A state where the value begins; a call amid free text is looked at at once."""
        path = self._plan.path
        if path is None:
            return replace(state, path=(), lost=_UNKNOWN, check=state.position + 2**_UNKNOWN)
        if self._plan.free_text:
            return replace(state, path=(), lost=0, check=state.position + 1)
        return replace(state, path=path, lost=0, check=self._next_check(state, path))

    # what may come next

    def row(self) -> Row:
        """What may stand at the next place."""
        state = self.state
        if state.closing:
            return Row(forced=state.closing[0])
        if state.phase is Phase.DONE:
            return Row(mask=self._with(b"", self._ends))
        if state.phase in (Phase.REASONING, Phase.TEXT):
            return Row(banned=self._banned(state))
        if state.phase is Phase.BODY:
            forced = self._matcher.compute_ff_tokens()
            if forced:
                return Row(forced=forced[0])
        return Row(mask=self._mask(state), last=state.position + 1 >= state.check)

    def _mask(self, state: State) -> bytes:
        key = self._raw_key(state) if self._plan.raw else None
        if key is not None and key in self._plan.masks:
            return self._plan.masks[key]
        mask: bytes = self._matcher.compute_bitmask()
        self._alive()
        if key is not None:
            self._plan.masks[key] = mask
        if state.phase is Phase.LEAD:
            room = NEWLINES - state.newlines
            mask = self._with(mask, [token for token, count in self._vocabulary.newlines.items() if count <= room])
        if self._ends.size > self._vocabulary.eos.size and self._matcher.is_accepting():
            mask = self._with(mask, self._ends)
        return mask

    def _with(self, mask: bytes, ids: Iterable[int]) -> bytes:
        made = bytearray(mask or bytes(-(-self._vocabulary.size // 8)))
        for token in ids:
            made[token >> 3] |= 1 << (token & 7)
        return bytes(made)

    def _raw_key(self, state: State) -> bytes | None:
        """Inside a raw argument, what of the text so far decides about the next token; None elsewhere.

        That is the beginning of a mark at its end. With at most a newline no token reaches beyond the argument, so
        the mask is the same in every argument.
        """
        tail = state.tail
        if tail.endswith(b">\n") or self._matcher.validate_tokens(self._control) == 0:
            return None
        for mark in _RAW_MARKS:
            if any(tail.endswith(mark[:n]) for n in range(2, len(mark))) or (mark[:1] == b"<" and tail.endswith(b"<")):
                return None
        return b"\n" if tail.endswith(b"\n") else b""

    def _alive(self) -> None:
        if self._matcher.is_error():
            why = reason(self._matcher)
            raise SchemaError(f"the grammar cannot be followed any further: {why}", param="response_format")

    def _banned(self, state: State) -> np.ndarray:
        plan, vocabulary = self._plan, self._vocabulary
        reasoning = state.phase is Phase.REASONING
        parts = [vocabulary.eos] if reasoning else []
        if (reasoning and CALL in plan.marks) or (not reasoning and plan.matcher is None):
            parts += [np.array([self._call])] if self._call is not None else []
        for mark in plan.marks if reasoning else plan.banned_in_text:
            found = vocabulary.completing(mark)
            parts.append(found[0])
            spelled = mark.encode()
            parts += [found[n] for n in range(1, len(spelled)) if state.tail.endswith(spelled[:n])]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def rows(self, drafts: Sequence[int]) -> list[Row]:
        """`row` behind the emitted tokens and behind each draft, up to the first draft that may not stand there."""
        self._restore(0)
        made = [self.row()]
        for draft in drafts:
            if not _may(made[-1], draft):
                break
            self._push(draft)
            made.append(self.row())
        self._restore(0)
        return made

    # tokens

    def admit(self, token: int) -> int:
        """Take a token that `row` allows, for now; returns the one that stands.

        That is another one, which closes the value, where room is short.
        """
        state = self.state
        self._push(token)
        after = self.state
        if state.closing or after.phase is not Phase.BODY or after.position < after.check:
            return token
        path = self._path()
        if path is not None and len(path) < self._room(after):
            self._states[-1] = replace(after, path=path, lost=0, check=self._next_check(after, path))
            return token
        # A token makes the rest shorter by one at most: what had no room before it has none now.
        closing = self._closing() if not after.lost else None
        if closing is not None:
            self._states[-1] = replace(self.state, closing=closing)
            self._push(closing[0])
            return closing[0]
        self._states[-1] = replace(after, lost=after.lost + 1, check=after.position + 2 ** min(after.lost, _PATIENCE))
        return token

    def stand(self, tokens: Sequence[int], rows: Sequence[Row]) -> list[int]:
        """Take tokens that were drawn by these `rows`, for now; returns those that stand: the last may be another.

        Raises:
            RuntimeError: one that its row does not allow, or one behind a token that was replaced.
        """
        made: list[int] = []
        for token, row in zip(tokens, rows, strict=False):
            if not _may(row, token):
                raise RuntimeError(f"token {token} was drawn where the grammar does not allow it")
            if row.forced is not None:
                self.take(token)
            made.append(token if row.forced is not None else self.admit(token))
            if made[-1] != token:
                break
        if len(made) < len(tokens):
            raise RuntimeError(f"{len(tokens)} tokens were drawn, but {len(made)} could be")
        return made

    def _closing(self) -> tuple[int, ...] | None:
        """What closes the value if the last token is given back, as it then is; None, and it stays, if nothing can."""
        token = self._pending[-1]
        self._restore(len(self._pending) - 1)
        state = self.state
        path = self._path() if state.phase in (Phase.BODY, Phase.LEAD) else None
        if path is not None and not self._plan.free_text:
            path = (*path, self._vocabulary.end)
        if path and len(path) <= self._room(state):
            return path
        self._push(token)
        return None

    def take(self, token: int) -> None:
        """Take the token that `row` forces, for now."""
        self._push(token)

    def forced(self) -> list[int]:
        """The tokens that must follow, taken for now like those of `admit`; behind them there is a choice."""
        made = []
        while (token := self.row_if_forced()) is not None:
            self._push(token)
            made.append(token)
        return made

    def row_if_forced(self) -> int | None:
        """The one token that must come next, or None, without the cost of a mask."""
        state = self.state
        if state.closing:
            return state.closing[0]
        if state.phase is not Phase.BODY:
            return None
        forced = self._matcher.compute_ff_tokens()
        return forced[0] if forced else None

    def observe(self, tokens: Sequence[int]) -> None:
        """These tokens were emitted. What was taken beyond them is given back."""
        shared = 0
        while shared < min(len(tokens), len(self._pending)) and tokens[shared] == self._pending[shared]:
            shared += 1
        self._restore(shared)
        for token in tokens[shared:]:
            self._push(token)
        self._states = self._states[-1:]
        self._pending = []

    def _restore(self, count: int) -> None:
        """Give back all but `count` of the tokens taken since the last `observe`."""
        if count == len(self._pending):
            return
        fed = self.state.fed
        del self._states[count + 1 :]
        del self._pending[count:]
        if self._matcher is not None and fed > self.state.fed:
            self._matcher.rollback(fed - self.state.fed)

    def _push(self, token: int) -> None:
        state = self.state
        after = self._next(state, token)
        if after.fed > state.fed and not self._matcher.consume_token(token):
            self._alive()
        if after.phase is Phase.BODY and self._plan.free_text and token == self._call_end:
            after = replace(after, phase=Phase.TEXT, tail=b"")
        self._states.append(after)
        self._pending.append(token)

    def _next(self, state: State, token: int) -> State:
        """The state behind a token, short of what the matcher does."""
        state = replace(state, position=state.position + 1, closing=state.closing[1:])
        phase = state.phase
        if phase is Phase.REASONING:
            if token == self._think_end:
                behind = Phase.TEXT if self._plan.free_text else Phase.LEAD
                return self._opened(replace(state, phase=behind, tail=b""))
            return replace(state, tail=(state.tail + self._vocabulary.token_bytes(token))[-16:])
        if phase is Phase.DONE or (token in self._ends and (phase is Phase.TEXT or self._accepting())):
            return replace(state, phase=Phase.DONE)
        if phase is Phase.TEXT:
            if token == self._call and self._matcher is not None:
                return self._opened(replace(state, phase=Phase.BODY, fed=state.fed + 1, tail=b""))
            return replace(state, tail=(state.tail + self._vocabulary.token_bytes(token))[-16:])
        if phase is Phase.LEAD:
            count = self._vocabulary.newlines.get(token, NEWLINES + 1)
            if state.newlines + count <= NEWLINES:
                newlines = state.newlines + count
                return replace(state, newlines=newlines, phase=Phase.LEAD if newlines < NEWLINES else Phase.BODY)
        tail = (state.tail + self._vocabulary.token_bytes(token))[-16:]
        return replace(state, phase=Phase.BODY, fed=state.fed + 1, tail=tail)

    def _accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    # room

    def _room(self, state: State) -> int:
        return self._limit - state.position

    def _path(self) -> tuple[int, ...] | None:
        """Tokens that complete the value from here, those that did before first."""
        state = self.state
        for known in (state.path, state.path[1:]):
            if known and completes(self._matcher, known):
                return known
        found = completion(self._matcher, self._vocabulary, min(_MOST, self._room(state)), state.path)
        return None if found is None else tuple(found)

    def _next_check(self, state: State, path: Sequence[int]) -> int:
        """Where room could have become short, if `path` completes the value here: a token adds at most `growth` to it.

        A long path is looked at less often: trying it takes longer than all else.
        """
        spare = self._room(state) - len(path) - 1
        return state.position + max(1, spare // self._plan.growth, len(path) // _OFTEN)


def _may(row: Row, token: int) -> bool:
    if row.forced is not None:
        return token == row.forced
    if row.mask is not None:
        return token >> 3 < len(row.mask) and bool(row.mask[token >> 3] >> (token & 7) & 1)
    return row.banned is None or token not in row.banned
