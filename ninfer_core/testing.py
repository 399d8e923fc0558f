"""Engines for tests, ours and yours: `ScriptedEngine` plays what you write through the real output path, no model.

A script says what the "model" produces; everything around it is the production code: validation, prompt rendering,
the text machine for thinking, stop strings and tool calls, usage, cancellation, deadlines, queue limits.

    from ninfer_core import Tool, ToolCall
    from ninfer_core.testing import Delay, Fault, Reply, Script, ScriptedEngine, Tokens

    engine = ScriptedEngine("Hello!")                         # every request is answered "Hello!"
    engine.generate("hi").text                                # 'Hello!'

    engine = ScriptedEngine(
        Script(Reply("", tool_calls=[ToolCall("", "bash", {"command": "ls"})]), times=1),
        Script(["Thinking", Delay(0.01), "...</think>", "\\n\\n", Tokens("a", " burst"), Fault(RuntimeError("x"))]),
    )

    engine.generate("list the files", tools=[Tool("bash")]).message.tool_calls   # the call; without tools it stays text

Scripts are tried in order; the first whose `when(request)` holds and whose `times` is not used up answers. A list of
steps is raw model output: with thinking on it starts inside the think block. A plain text or a `Reply` is an answer,
put behind a closed think block where the request opened one. Text of a step is cut into one token per byte, except
for the special tokens of the template; `Tokens` makes each of its pieces one token and all of them one burst.
Where a thinking budget runs out, the rest of the scripted thoughts is skipped: the script goes on behind `</think>`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import (
    ContextOverflowError,
    EngineBusyError,
    EngineClosedError,
    EngineFailedError,
    NinferError,
)
from .frontend.prompt import Frontend
from .runtime.handle import RequestHandle
from .runtime.interface import EngineInterface, Prompt, make_request
from .runtime.session import Session
from .runtime.validation import check_request, resolve_sampling
from .scripted import ScriptedTokenizer, scripted_config, scripted_resources
from .types import (
    Event,
    FinishReason,
    ReasoningDelta,
    Request,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


class Tokens:
    """One burst (one round): each piece is one token. `drafted` defaults to the number of accepted drafts."""

    def __init__(self, *pieces: str | bytes, drafted: int | None = None) -> None:
        self.pieces = tuple(p.encode() if isinstance(p, str) else p for p in pieces)
        self.drafted = drafted


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait; cancellation and the deadline cut the wait short."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the test sets the event; cancellation and the deadline cut the wait short."""

    event: threading.Event


@dataclass(frozen=True, slots=True)
class Fault:
    """Fail here. A `NinferError` reaches the caller as it is, anything else as `EngineFailedError`."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Refuse:
    """As the only step: `submit` itself raises this (say `EngineBusyError`, `EngineFailedError`)."""

    error: NinferError


@dataclass(frozen=True, slots=True)
class End:
    """End here for this reason. A script that runs out ends with "stop", as by the end-of-turn token."""

    reason: FinishReason = "stop"


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer in the model's own text form, fitting the request's thinking mode."""

    text: str = ""
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()

    def raw(self, thinking: bool) -> str:
        """What the model would write after a generation prompt that opened the think block or did not."""
        parts = []
        if thinking:
            parts = [f"{self.reasoning}\n</think>\n\n" if self.reasoning else "</think>\n\n"]
        parts.append(self.text)
        for call in self.tool_calls:
            arguments = call.arguments if isinstance(call.arguments, Mapping) else json.loads(call.arguments)
            values = "".join(
                f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            gap = "\n\n" if parts[-1] and not parts[-1].endswith("\n") else ""
            parts.append(f"{gap}<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>\n")
        return "".join(parts)


Step = str | bytes | Tokens | Delay | Wait | Fault | Refuse | End | Event
Steps = str | Reply | Refuse | Fault | Iterable[Step]


@dataclass(slots=True)
class Script:
    """What to produce, for which requests (`when`), and how often (`times`; None: always).

    `steps` may be a function of the request. `burst` is the number of tokens per round for text and bytes, `rate` the
    rounds per second (None: as fast as possible).
    """

    steps: Steps | Callable[[Request], Steps]
    when: Callable[[Request], bool] | None = None
    times: int | None = None
    burst: int = 1
    rate: float | None = None

    def matches(self, request: Request) -> bool:
        """Whether this script answers the request."""
        return self.times != 0 and (self.when is None or self.when(request))


class ScriptedEngine(EngineInterface):
    """An engine that plays scripts; the same interface, errors, usage and cancellation as the real one.

    Observe it: `requests` (every accepted request, in order), `handles`, `cancelled` (handles whose owner left).
    `state` may be set ("loading", "failed", ...) to test how a caller treats an engine that cannot serve.
    """

    def __init__(
        self,
        *scripts: Script | Steps | Callable[[Request], Steps],
        name: str = "scripted",
        aliases: Sequence[str] = (),
        context_length: int = 32768,
        max_sequences: int = 16,
        max_queue: int = 256,
        burst: int = 1,
        rate: float | None = None,
    ) -> None:
        self._scripts = [s if isinstance(s, Script) else Script(s, burst=burst, rate=rate) for s in scripts]
        self._names = (name, *aliases)
        self._context_length = context_length
        self._max_sequences = max_sequences
        self._max_queue = max_queue
        self.frontend = Frontend(scripted_resources(), scripted_config(context_length))
        self._tokenizer = ScriptedTokenizer(self.frontend.tokenizer)
        self.frontend.tokenizer = self._tokenizer  # type: ignore[assignment]
        self._close = self._tokenizer.id("</think>")
        self._skipping: set[int] = set()
        self._state = "ready"
        self._lock = threading.Condition()
        self._waiting: list[tuple[Session, Script, Steps]] = []
        self._running: list[Session] = []
        self.requests: list[Request] = []
        self.handles: list[RequestHandle] = []

    # the interface

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names this engine answers to."""
        return self._names

    @property
    def context_length(self) -> int:
        """The served context."""
        return self._context_length

    @property
    def profile(self) -> dict[str, Any]:
        """Capabilities of the scripted model."""
        return {
            "name": self._names[0],
            "max_input_tokens": self._context_length,
            "max_output_tokens": self._context_length,
            "text_inputs": True,
            "image_inputs": False,
            "video_inputs": False,
            "audio_inputs": False,
            "text_outputs": True,
            "reasoning_output": True,
            "tool_calling": True,
            "tool_choice": True,
            "structured_output": True,
            "temperature": True,
        }

    @property
    def state(self) -> str:
        """`ready` unless a test set something else, or the engine was closed."""
        return self._state

    @state.setter
    def state(self, value: str) -> None:
        self._state = value

    @property
    def tokenizer(self) -> ScriptedTokenizer:
        """The scripted model's tokenizer."""
        return self._tokenizer

    def render(self, messages: Prompt, tools: Sequence[Tool] | None = None, *, thinking: bool | None = None) -> str:
        """The prompt text."""
        made = messages if isinstance(messages, Request) else None
        request = made or make_request(messages, tools=tuple(tools or ()), thinking=thinking)
        self._check(request)
        return self.frontend.render(request)

    @property
    def cancelled(self) -> list[RequestHandle]:
        """Handles that were cancelled, in order of submission."""
        return [handle for handle in self.handles if handle.cancelled]

    def count_tokens(
        self, messages: Prompt, tools: Sequence[Tool] | None = None, *, thinking: bool | None = None
    ) -> int:
        """Tokens of the rendered prompt."""
        request = (
            messages
            if isinstance(messages, Request)
            else make_request(messages, tools=tuple(tools or ()), thinking=thinking)
        )
        self._check(request)
        return len(self.frontend.prepare(request).token_ids)

    def health(self) -> dict[str, Any]:
        """`ok` while the state is `ready`."""
        return {"status": "ok" if self._state == "ready" else self._state}

    def stats(self) -> dict[str, Any]:
        """Gauges of the queue."""
        with self._lock:
            return {"running": len(self._running), "waiting": len(self._waiting), "requests": len(self.requests)}

    def close(self) -> None:
        """Fail everything that still runs with `EngineClosedError`."""
        with self._lock:
            self._state = "closed"
            ending = [*self._running, *(entry[0] for entry in self._waiting)]
            self._waiting.clear()
            self._lock.notify_all()
        for session in ending:
            session.fail(EngineClosedError("the engine was closed while the request ran"))

    def wait_idle(self, timeout: float = 5.0) -> bool:
        """Wait until no request runs or waits; False if `timeout` seconds passed first."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._running and not self._waiting, timeout)

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request; errors as the real engine's."""
        if self._state == "closed":
            raise EngineClosedError("the engine is closed; make a new one")
        if self._state == "loading":
            raise EngineBusyError("the model is still loading; try again shortly")
        if self._state == "failed":
            raise EngineFailedError("the engine has failed; load it again")
        self._check(request)
        prompt = self.frontend.prepare(request)
        if len(prompt.token_ids) > self._context_length:
            raise ContextOverflowError(len(prompt.token_ids), self._context_length)
        script = self._claim(request)
        steps = script.steps(request) if callable(script.steps) else script.steps
        if isinstance(steps, Refuse):
            raise steps.error
        room = max(1, self._context_length - len(prompt.token_ids))
        params = resolve_sampling(request.sampling, self.frontend.generation_defaults(prompt.thinking))
        handle = RequestHandle(request, on_cancel=self._wake, position=self._queue_position)
        session = Session(
            handle,
            prompt,
            self.frontend.machine(request, prompt),
            limit=min(request.max_tokens or room, room),
            seed=params.seed,
        )
        with self._lock:
            if len(self._running) >= self._max_sequences and len(self._waiting) >= self._max_queue:
                raise EngineBusyError(
                    f"{len(self._waiting)} requests are waiting; the queue limit is {self._max_queue}"
                )
            self.requests.append(request)
            self.handles.append(handle)
            self._waiting.append((session, script, steps))
            self._waiting.sort(key=lambda entry: entry[0].request.priority)
        self._start_next()
        return handle

    # playing

    def _check(self, request: Request) -> None:
        check_request(request, addressable=self._tokenizer.addressable, vision=False, grammars=True)

    def _claim(self, request: Request) -> Script:
        with self._lock:
            for script in self._scripts:
                if script.matches(request):
                    if script.times is not None:
                        script.times -= 1
                    return script
        raise EngineFailedError("no script of this ScriptedEngine matches the request; add one without `when`")

    def _queue_position(self, handle: RequestHandle) -> int | None:
        with self._lock:
            places = (i for i, entry in enumerate(self._waiting) if entry[0].handle is handle)
            return next(places, None)

    def _wake(self, handle: RequestHandle) -> None:
        with self._lock:
            gone = [entry for entry in self._waiting if entry[0].handle is handle]
            self._waiting = [entry for entry in self._waiting if entry[0].handle is not handle]
            self._lock.notify_all()
        for session, _, _ in gone:
            session.finish("cancelled")

    def _start_next(self) -> None:
        with self._lock:
            while self._waiting and len(self._running) < self._max_sequences:
                session, script, steps = self._waiting.pop(0)
                self._running.append(session)
                name = f"scripted-{session.handle.id}"
                threading.Thread(target=self._play, args=(session, script, steps), name=name, daemon=True).start()

    def _play(self, session: Session, script: Script, steps: Steps) -> None:
        try:
            session.start()
            if isinstance(steps, (str, Reply)):
                reply = Reply(steps) if isinstance(steps, str) else steps
                steps = [reply.raw(session.prompt.thinking)]
            elif isinstance(steps, (Fault, Refuse)):
                steps = [steps]
            for step in steps:
                self._step(session, script, step)
                if session.ended:
                    break
            session.finish("stop")
        except NinferError as error:
            session.fail(error)
        except Exception as error:
            failed = EngineFailedError(f"a scripted fault ended the request: {error!r}")
            failed.__cause__ = error
            session.fail(failed)
        finally:
            with self._lock:
                self._skipping.discard(id(session))
                self._running.remove(session)
                self._lock.notify_all()
            self._start_next()

    def _step(self, session: Session, script: Script, step: Step) -> None:
        if not self._alive(session):
            return
        if isinstance(step, str):
            self._bursts(session, script, self._tokenizer.encode(step))
        elif isinstance(step, bytes):
            self._bursts(session, script, [self._tokenizer.piece(bytes([byte])) for byte in step])
        elif isinstance(step, Tokens):
            self._burst(session, [self._tokenizer.piece(piece) for piece in step.pieces], step.drafted)
        elif isinstance(step, Delay):
            self._sleep(session, step.seconds)
            self._alive(session)
        elif isinstance(step, Wait):
            while self._alive(session) and not step.event.wait(0.005):
                pass
        elif isinstance(step, (Fault, Refuse)):
            raise step.error
        elif isinstance(step, End):
            session.finish(step.reason)
        elif isinstance(step, (TextDelta, ReasoningDelta, ToolCallStart, ToolCallDelta, ToolCallEnd)):
            session.handle.push([step])
        else:
            raise TypeError(f"a script step cannot be {step!r}")

    def _bursts(self, session: Session, script: Script, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), script.burst):
            if script.rate is not None:
                self._sleep(session, 1.0 / script.rate)
            if not self._alive(session):
                return
            self._burst(session, ids[start : start + script.burst], None)

    def _burst(self, session: Session, ids: Sequence[int], drafted: int | None) -> None:
        if id(session) in self._skipping:
            if self._close not in ids:
                return
            self._skipping.discard(id(session))
            ids = ids[ids.index(self._close) + 1 :]
            if not ids:
                return
        session.deliver(ids, self._logprobs(session, ids), drafted=len(ids) - 1 if drafted is None else drafted)
        while session.forced and not session.ended:
            self._skipping.add(id(session))
            session.deliver(session.forced)

    def _logprobs(self, session: Session, ids: Sequence[int]) -> list[TokenLogprob] | None:
        """Scripted tokens are certain: log-probability 0; the alternatives are other bytes at -10, -11, ..."""
        count = session.request.logprobs
        if count is None:
            return None
        made = []
        for token in ids:
            others = [other for other in range(count + 1) if other != token][: max(0, count - 1)]
            top = [(token, 0.0), *((other, -10.0 - i) for i, other in enumerate(others))][:count]
            entries = tuple(self._logprob(t, value) for t, value in top)
            made.append(self._logprob(token, 0.0, entries))
        return made

    def _logprob(self, token: int, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = self._tokenizer.token_bytes(token)
        return TokenLogprob(token, data.decode(errors="replace"), value, data, top)

    def _sleep(self, session: Session, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._lock:
            while not session.handle.cancelled and not session.ended:
                now = time.monotonic()
                if now >= end or session.expired(now):
                    break
                self._lock.wait(min(end - now, 0.05))

    def _alive(self, session: Session) -> bool:
        """Whether to go on; ends a cancelled or overdue session."""
        if session.handle.cancelled:
            session.finish("cancelled")
        elif session.expired(time.monotonic()):
            session.expire()
        return not session.ended
