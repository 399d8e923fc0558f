"""The neutral types that every surface shares: messages, tools, sampling, requests, events, usage.

HTTP servers, framework adapters, the command line and the engine all speak these and nothing else, so each
foreign wire form is converted exactly once. Everything here is an immutable value; nothing imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Role = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text inside a message."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image: exactly one of `data` (encoded file bytes), `path` or `url` is set."""

    data: bytes | None = None
    path: str | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Video:
    """A video: exactly one of `data`, `path` or `url`; sampled at `fps` or to `frames` frames."""

    data: bytes | None = None
    path: str | None = None
    url: str | None = None
    fps: float | None = None
    frames: int | None = None


class Pixels(Protocol):
    """The pixels of a prepared image or video, and their normalisation per channel."""

    @property
    def frames(self) -> Any:
        """A numpy array `[F, H, W, 3]` uint8, resized; one frame for an image."""

    @property
    def mean(self) -> Sequence[float]:
        """Normalisation: subtracted, as a share of 255."""

    @property
    def std(self) -> Sequence[float]:
        """Normalisation: divided by, as a share of 255."""


class PreparedMedium(Pixels, Protocol):
    """A prepared image or video: what the vision tower and the prefix cache know it by."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Slices, patch rows, patch columns."""

    @property
    def digest(self) -> bytes:
        """Names its pixels and its grid."""


Part = Text | Image | Video


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model made. `arguments` is a mapping; a string only for unparsable JSON of an earlier turn."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `content` is text or an ordered tuple of parts; `reasoning` is the think block without its tags."""

    role: Role
    content: str | tuple[Part, ...] = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The text of all text parts, joined without a separator."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters` is a JSON Schema object.

    `raw`, if given, is the client's own JSON object, rendered into the prompt exactly as received.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False
    raw: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode` as in the OpenAI API; `names` restricts `required` (and `auto`) to these tools."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the answer must be: JSON (`schema` None), JSON of a schema, or text of a regex / Lark grammar / choice."""

    kind: Literal["json", "json_schema", "regex", "grammar", "choice"]
    schema: Mapping[str, Any] | bool | None = None
    pattern: str | None = None
    choices: tuple[str, ...] = ()
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; None means the model's own default for the mode (thinking or not).

    `temperature` 0 is greedy (argmax, lowest id on ties). `seed` None draws a fresh seed, reported back.
    Penalties follow `ninfer_core.runtime.sampler`, which states the order of processing.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. Give `messages` (rendered by the model's template) or `prompt` (raw text or token ids).

    `max_tokens` None means up to the context window; a larger value than the room left is clamped to it.
    `thinking` None means the model's default (on). `thinking_budget` caps reasoning tokens; 0 equals thinking off.
    `preserve_thinking` None means: keep past reasoning when tools are given, else as the template does.
    `stop` strings end the answer and are not part of it; they never match in reasoning or in a tool call.
    `logprobs` None: none; 0..20: that many alternatives beside each token's own log-probability.
    `priority`: lower runs earlier. `timeout`: seconds from submission, queue time included.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    thinking: bool | None = None
    thinking_budget: int | None = None
    preserve_thinking: bool | None = None
    continue_final_message: bool = False
    add_vision_id: bool = False
    logprobs: int | None = None
    priority: int = 0
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its natural-log probability, its raw bytes, and the top alternatives.

    The probability is the model's own: before logit bias, penalties, temperature and cuts. Forced tokens have 0.0.
    """

    token_id: int
    token: str
    logprob: float
    bytes: bytes
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` <= `prompt_tokens`; `reasoning_tokens` <= `completion_tokens`.

    `drafted_tokens` were proposed by the draft head, `accepted_tokens` of them were emitted;
    `accepted_by_position[i]` counts rounds in which draft i (0-based) was accepted. `media_tokens` of the prompt stand
    for images and videos. The first `known_tokens` (>= `cached_tokens`) are as in what the prefix cache keeps of
    earlier prompts: behind them this one differs, or no more is kept.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    accepted_by_position: tuple[int, ...] = ()
    media_tokens: int = 0
    known_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt plus completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds: waiting in the queue, reading the prompt, from first to last token; and time to the first token."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    first_token: float = 0.0


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the think block."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins: its place in the answer, a unique id and the tool's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A fragment of the call's arguments; all fragments of one index joined are one JSON object."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete (or was cut by the length limit: `complete` False, arguments closed so far)."""

    index: int
    call: ToolCall
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of every request that did not fail. `stop_sequence` names the stop string that matched."""

    reason: FinishReason
    usage: Usage
    timings: Timings = Timings()
    stop_sequence: str | None = None
    seed: int | None = None


Event = ReasoningDelta | TextDelta | ToolCallStart | ToolCallDelta | ToolCallEnd | Finish


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole result of one request: the assistant message and what the last event said."""

    message: Message
    finish_reason: FinishReason
    usage: Usage
    timings: Timings = Timings()
    stop_sequence: str | None = None
    seed: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    truncated_call: bool = False

    @property
    def text(self) -> str:
        """The answer without reasoning and tool calls."""
        return self.message.text


def completion_from_events(events: Sequence[Event]) -> Completion:
    """Fold a full event stream into a `Completion`.

    Raises:
        ValueError: the stream does not end with `Finish`.
    """
    if not events or not isinstance(events[-1], Finish):
        raise ValueError("an event stream must end with Finish; the last event was " + repr(events[-1:]))
    reasoning: list[str] = []
    text: list[str] = []
    calls: list[ToolCall] = []
    logprobs: list[TokenLogprob] = []
    truncated = False
    for event in events:
        if isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
            logprobs.extend(event.logprobs)
        elif isinstance(event, TextDelta):
            text.append(event.text)
            logprobs.extend(event.logprobs)
        elif isinstance(event, ToolCallEnd):
            calls.append(event.call)
            truncated = truncated or not event.complete
    last = events[-1]
    message = Message(
        "assistant", "".join(text), reasoning="".join(reasoning) if reasoning else None, tool_calls=tuple(calls)
    )
    return Completion(
        message, last.reason, last.usage, last.timings, last.stop_sequence, last.seed, tuple(logprobs), truncated
    )
