"""The one text state machine: token ids in, reasoning, answer text and tool calls out.

It decodes bytes to characters, splits the think block from the answer, finds stop strings and reads tool calls. All
decisions are made on the text, never on where a token or a burst of tokens happens to end, so a stream and a whole
output give the same result. What could still become part of a marker or of a stop string is held back.
"""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..types import (
    Event,
    FinishReason,
    Message,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from .calls import CALL, CALL_END, FUNCTION, MORE, NO, OpenCall, header, is_partial, skip_blanks, surely
from .tools import ToolSet

THINK, THINK_END = "<think>", "</think>"


def new_call_id() -> str:
    """A fresh id for a tool call, unique over all requests."""
    return "call_" + secrets.token_hex(12)


class StopFilter:
    """Finds the first stop string in a text that arrives in pieces, and holds back what may become one.

    The first to be complete wins; of several complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self.held = ""
        self._starts = frozenset(stop[0] for stop in self.stops)
        self._reach = max(map(len, self.stops), default=1) - 1

    def push(self, text: str) -> tuple[str, str | None]:
        """Add `text`: (what is safe to show, the stop string that is now complete or None)."""
        text = self.held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self.held = ""
            return text[:at], stop
        keep = len(text)
        for i in range(max(0, len(text) - self._reach), len(text)):
            if text[i] in self._starts and any(stop.startswith(text[i:]) for stop in self.stops):
                keep = i
                break
        self.held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What is held back, given up."""
        text, self.held = self.held, ""
        return text


class OutputMachine:
    """Turns the tokens of one generation into events. Feed, then read `kept` and `stopped`; at the end, `finish`.

    Args:
        token_bytes: the bytes of a token id.
        eos_ids: ids that end the output; they are not text.
        ignore_eos: let `eos_ids` pass (still not as text).
        stop_ids: further ids that end the output whatever `ignore_eos` says.
        stops: stop strings; they match in the answer only, never in reasoning or in a tool call.
        thinking: the output starts inside a think block.
        tools: tools whose calls are read; without any, tool markup is ordinary text.
        parallel: read several calls; otherwise the output ends after the first.
        close_ids: token ids that close a think block.
        continued: the output continues an answer that already has text.
        raw: the output is plain text: no think block, no calls, no markers.
        new_id: makes call ids.

    Attributes:
        stopped: the output has ended by an eos id, a stop string or the single allowed call.
        kept: how many ids of the last `feed` belong to the output, the one that ended it included.
        stop_sequence: the stop string that matched.
        reasoning_tokens: tokens of the think block so far, its closing tag and forced tokens not counted.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        eos_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        stop_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        thinking: bool = False,
        tools: Sequence[Tool] = (),
        parallel: bool = True,
        close_ids: Sequence[int] = (),
        continued: bool = False,
        raw: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.stopped = False
        self.kept = 0
        self.stop_sequence: str | None = None
        self.reasoning_tokens = 0
        self._token_bytes = token_bytes
        self._silent = frozenset(eos_ids)
        self.ends = frozenset(stop_ids) | (frozenset() if ignore_eos else self._silent)
        self._close_ids = tuple(close_ids)
        self._tools = ToolSet(() if raw else tools)
        self._parallel = parallel
        self._raw = raw
        self._new_id = new_id
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._buffer = ""
        self._base = 0  # characters before the buffer
        self._events: list[Event] = []
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # (first character, entry), not yet given out
        self._uncounted = 0
        self._reasoning = thinking and not raw
        self._leading = True  # no reasoning text yet: one newline is dropped
        self._held = ""  # blanks whose fate depends on what follows
        self._stop = StopFilter(stops)
        self._pristine = not (thinking or continued or raw)  # nothing but blanks so far
        self._skip_newlines = False  # right after the think block
        self._visible = continued  # answer text since the think block or the last call
        self._answered = continued  # any answer text
        self._gap: str | None = None  # blanks right after a call
        self._call: OpenCall | None = None
        self._call_id = ""
        self._after_function = False
        self._calls: list[ToolCallEnd] = []
        self._cut = False  # the rest of the text does not belong to the output

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token continues the think block."""
        return self._reasoning and not self.stopped

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> list[Event]:
        """Take a burst of tokens. Events of one kind are joined; `kept` says how many ids were taken."""
        self._events = []
        self.kept = 0
        for i, token in enumerate(ids):
            if self.stopped:
                break
            self.kept += 1
            if token in self.ends:
                self.stopped = True
                break
            if token in self._silent:
                continue
            reasoning = self._reasoning
            text = self._decode(self._token_bytes(token))
            if logprobs is not None:
                self._logprobs.append((self._base + len(self._buffer), logprobs[i]))
            if text:
                self._buffer += text
                self._advance()
            if self._uncounted:
                self._uncounted -= 1
            elif reasoning and self._reasoning:
                self.reasoning_tokens += 1
        return self._events

    def feed_text(self, text: str) -> list[Event]:
        """Take text that is already decoded."""
        self._events = []
        if text and not self.stopped:
            self._buffer += text
            self._advance()
        return self._events

    def forced_close(self) -> list[int]:
        """Ids that close the think block. Feed them next: they are no reasoning tokens, and no text of theirs shows."""
        self._uncounted = len(self._close_ids)
        return list(self._close_ids)

    def finish(self, reason: FinishReason) -> list[Event]:
        """Give out what is held back and end an open call; incomplete if `reason` is not `stop`."""
        self._events = []
        if not self._cut:
            self._buffer += self._decode(b"", True)
            self._advance(eof=True)
        if self._call is not None:
            self._end_call(complete=self._call.done or reason == "stop")
        if not self._cut:
            self._flush()
        self.stopped = self._cut = True
        return self._events

    def finish_reason(self, default: FinishReason) -> FinishReason:
        """The finish reason, given that the engine stopped for `default` (`stop` for an eos id or stop string)."""
        if default == "length" and self.stop_sequence is not None:
            default = "stop"
        return "tool_calls" if default == "stop" and self._calls else default

    # characters to channels

    def _advance(self, eof: bool = False) -> None:
        """Work off the buffer as far as it is decided."""
        progress = True
        while progress and self._buffer and not self._cut:
            if self._call is not None:
                progress = self._read_call(eof)
            elif self._after_function:
                progress = self._read_call_end(eof)
            else:
                progress = self._read_prose(eof)

    def _consume(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._base += count

    def _read_prose(self, eof: bool) -> bool:
        """Reasoning or answer text up to the next marker."""
        text, scan = self._buffer, 0
        while not self._raw and (i := text.find("<", scan)) >= 0:
            end, name = self._marker(text, i, eof)
            if end == MORE and not eof:
                self._prose(text[:i])
                self._consume(i)
                return False
            if end < 0:
                scan = i + 1
                continue
            self._prose(text[:i])
            if self._cut:
                return False
            self._consume(i)
            self._forget(self._base if name == THINK_END and not self._reasoning else 0, self._base + end - i)
            self._enter(name)
            self._consume(end - i)
            return True
        self._prose(text)
        self._consume(len(text))
        return False

    def _marker(self, text: str, i: int, eof: bool) -> tuple[int, str]:
        """The marker at `i`: (its end, `</think>`, `<think>` or a function name); end < 0: MORE, or none."""
        if text.startswith(THINK_END, i):
            return i + len(THINK_END), THINK_END
        if text.startswith(THINK, i):
            end = i + len(THINK)
            if self._reasoning:
                return end, THINK
            if self._pristine and not text[:i].strip():
                return (MORE, "") if end == len(text) else (end, THINK) if text[end] == "\n" else (NO, "")
            return NO, ""
        if self._tools:
            if text.startswith(CALL, i):
                return surely(text, i, self._tools) if self._reasoning else header(text, i)
            if text.startswith(FUNCTION, i) and not self._reasoning:
                return surely(text, i, self._tools)
            if is_partial(text, i, (CALL, FUNCTION)):
                return MORE, ""
        return (MORE, "") if is_partial(text, i, (THINK, THINK_END)) else (NO, "")

    def _enter(self, marker: str) -> None:
        """Switch channels at a marker."""
        if marker == THINK_END:
            if self._reasoning:
                self._held = ""
                self._reasoning = False
                self._skip_newlines = True
        elif marker == THINK:
            if not self._reasoning:
                self._stop.flush()
                self._held = ""
                self._reasoning, self._pristine = True, False
        else:
            self._begin_call(marker)

    def _prose(self, text: str) -> None:
        """Text at the start of the buffer goes to the channel that is open."""
        if not text or self._cut:
            return
        end = self._base + len(text)
        if not self._reasoning:
            self._answer(text, end)
            return
        if self._leading:
            self._leading = False
            text = text.removeprefix("\n")
            self._forget(0, end - len(text))
        text = self._held + text
        body = text.rstrip("\n")
        self._held = text[len(body) :]
        self._emit(ReasoningDelta, body, end - len(self._held))

    def _answer(self, text: str, end: int) -> None:
        """Answer text: blanks around calls and after the think block, then stop strings."""
        if self._skip_newlines:
            text = text.lstrip("\n")
            self._forget(0, end - len(text))
            if not text:
                return
            self._skip_newlines = False
        if self._gap is not None:
            text = self._gap + text
            if not text.strip():
                self._gap = text
                return
            self._gap = None
            text = text if self._answered else text.lstrip("\n")
            self._forget(0, end - len(text))
        if self._pristine and text.strip():
            self._pristine = False
        if not self._stop.stops:
            self._show(text, end)
            return
        text, stop = self._stop.push(text)
        self._show(text, end - len(self._stop.held))
        if stop is not None:
            self.stop_sequence = stop
            self._emit_held()
            self.stopped = self._cut = True

    def _show(self, text: str, end: int) -> None:
        """Answer text that is no stop string; blanks that a call would swallow are held back."""
        if not text:
            return
        if self._tools:
            text = self._held + text
            if not self._visible and not text.strip():
                self._held = text
                return
            body = text.rstrip("\n")
            self._held = text[len(body) :]
            end -= len(self._held)
            text = body
        self._visible = self._answered = True
        self._emit(TextDelta, text, end)

    def _emit_held(self) -> None:
        held, self._held = self._held, ""
        self._emit(ReasoningDelta if self._reasoning else TextDelta, held, self._base)

    def _flush(self) -> None:
        """At the end of the output nothing is held back any more; blanks after a call are dropped."""
        self._show(self._stop.flush(), self._base)
        self._emit_held()

    # events

    def _emit(self, kind: type[ReasoningDelta] | type[TextDelta], text: str, end: int) -> None:
        if not text:
            return
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._logprobs:
            logprobs = tuple(entry for start, entry in self._logprobs if start < end)
            self._forget(0, end)
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            text, logprobs = last.text + text, last.logprobs + logprobs
            self._events.pop()
        self._events.append(kind(text, logprobs))

    def _forget(self, start: int, end: int) -> None:
        """Log-probabilities of characters `start` to `end`, which have been given out or dropped."""
        if self._logprobs:
            self._logprobs = [item for item in self._logprobs if not start <= item[0] < end]

    # tool calls

    def _begin_call(self, name: str) -> None:
        if not self._reasoning:
            self._show(self._stop.flush(), self._base)
        self._held = ""  # newlines before a call, or an answer of blanks only
        self._gap = None
        self._reasoning = self._pristine = self._skip_newlines = False
        self._call = OpenCall(name, self._tools)
        self._call_id = self._new_id()
        self._events.append(ToolCallStart(len(self._calls), self._call_id, name))

    def _read_call(self, eof: bool) -> bool:
        """The inside of a call."""
        assert self._call is not None
        used, fragment = self._call.step(self._buffer, eof)
        self._consume(used)
        self._forget(0, self._base)
        self._arguments(fragment)
        if not self._call.done:
            return False
        self._end_call(complete=True)
        self._after_function = True
        return True

    def _read_call_end(self, eof: bool) -> bool:
        """After the function block: its wrapper's closing tag, which a model may forget."""
        at = skip_blanks(self._buffer, 0)
        if not eof and (at == len(self._buffer) or is_partial(self._buffer, at, (CALL_END,))):
            return False
        if self._buffer.startswith(CALL_END, at):
            self._consume(at + len(CALL_END))
        self._forget(0, self._base)
        self._after_function = False
        self._gap = ""
        self._visible = False
        if not self._parallel:
            self.stopped = self._cut = True
            return False
        return True

    def _arguments(self, fragment: str) -> None:
        if not fragment:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, ToolCallDelta):
            fragment = last.arguments + fragment
            self._events.pop()
        self._events.append(ToolCallDelta(len(self._calls), fragment))

    def _end_call(self, complete: bool) -> None:
        call, self._call = self._call, None
        assert call is not None
        self._arguments(call.end(complete))
        end = ToolCallEnd(len(self._calls), ToolCall(self._call_id, call.name, call.values), complete)
        self._calls.append(end)
        self._events.append(end)


class Parsed(NamedTuple):
    """A whole output: the message, why it ended, and the stop string that cut it."""

    message: Message
    finish_reason: FinishReason
    stop_sequence: str | None


def parse_text(
    text: str,
    tools: Sequence[Tool] = (),
    thinking: bool = False,
    *,
    stops: Sequence[str] = (),
    reason: FinishReason = "stop",
    parallel: bool = True,
) -> Parsed:
    """Parse a whole output text as the model wrote it after the generation prompt.

    Args:
        text: the output, without the token that ended it.
        tools: the tools of the request; without any, tool markup stays text.
        thinking: the output starts inside the think block.
        stops: stop strings.
        reason: why the generation ended.
        parallel: read several calls.
    """
    machine = OutputMachine(lambda token: b"", thinking=thinking, tools=tools, stops=stops, parallel=parallel)
    events = machine.feed_text(text)
    events = [*events, *machine.finish(reason)]
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    answer = "".join(event.text for event in events if isinstance(event, TextDelta))
    calls = tuple(event.call for event in events if isinstance(event, ToolCallEnd))
    message = Message("assistant", answer, reasoning=reasoning or None, tool_calls=calls)
    return Parsed(message, machine.finish_reason(reason), machine.stop_sequence)
