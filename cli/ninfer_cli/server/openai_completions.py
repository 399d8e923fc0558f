"""`POST /v1/completions`: raw text in, raw text out, no chat template."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ninfer_core.errors import InvalidRequestError, UnsupportedError
from ninfer_core.types import Completion, Event, Finish, ReasoningDelta, Request, TextDelta, TokenLogprob

from .answer import Prepared, Waiting, answer, documented
from .body import read_request
from .common import constraint_name, format_of, guided_of, limit_of, new_id, sampling_of, stop_of
from .context import Server, Target
from .errors import body_of, fault_of
from .gap import gap_ends, gap_prompt
from .generation import in_order, merged_usage
from .openai_chat import end_fields, timings_of, usage_of
from .schemas import CompletionRequest
from .wire import SSE, SSE_COMMENT, SSE_DONE, dumps, sse

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64

Prompt = str | tuple[int, ...]


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """The prompts: one text, several, one token list, or several."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt is an empty list; it must hold a text or token ids", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return [tuple(prompt)]  # type: ignore[arg-type]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt holds {len(prompt)} prompts; the limit is {MAX_PROMPTS}", param="prompt")
    return [item if isinstance(item, str) else tuple(item) for item in prompt]  # type: ignore[arg-type]


def to_requests(body: CompletionRequest, tokenizer: Any) -> list[Request]:
    """The requests of all choices, those of one prompt next to each other."""
    prompts = prompts_of(body)
    if body.suffix:
        prompts = [gap_prompt(tokenizer, prompt, body.suffix) for prompt in prompts]
    choices = body.n or 1
    if body.best_of and body.best_of != choices:
        raise UnsupportedError(f"best_of must equal n ({choices}); every choice is returned", param="best_of")
    limit = DEFAULT_MAX_TOKENS if "max_tokens" not in body.model_fields_set else limit_of(body.max_tokens, "max_tokens")
    form = guided_of(body, format_of(body.response_format))
    return [
        Request(
            prompt=prompt,
            response_format=form,
            sampling=sampling_of(body, index),
            max_tokens=limit,
            stop=stop_of(body.stop),
            stop_token_ids=(*(body.stop_token_ids or ()), *(gap_ends(tokenizer) if body.suffix else ())),
            ignore_eos=bool(body.ignore_eos),
            logprobs=_logprobs(body),
        )
        for prompt in prompts
        for index in range(choices)
    ]


def _logprobs(body: CompletionRequest) -> int | None:
    if body.logprobs is None or body.logprobs is False:
        return None
    count = 1 if body.logprobs is True else body.logprobs
    if not 0 <= count <= 20:
        raise InvalidRequestError(f"logprobs is {count}; it must be between 0 and 20", param="logprobs")
    return count


def logprobs_object(items: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The four parallel lists of this API; `offset` is where the first token starts in the choice's text."""
    offsets = []
    for item in items:
        offsets.append(offset)
        offset += len(item.token)
    return {
        "tokens": [item.token for item in items],
        "token_logprobs": [max(item.logprob, -9999.0) for item in items],
        "top_logprobs": [{other.token: max(other.logprob, -9999.0) for other in item.top} for item in items],
        "text_offset": offsets,
        "token_ids": [item.token_id for item in items],
    }


def finish_reason(reason: str) -> str:
    """The reason in this API's words."""
    return "length" if reason == "length" else "stop"


class CompletionEncoder:
    """Events to `text_completion` chunks."""

    media_type = SSE
    heartbeat = SSE_COMMENT

    def __init__(self, body: CompletionRequest, server: Server, echoes: Sequence[str], request_id: str) -> None:
        self.choices = body.n or 1
        self.include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.echoes = echoes
        self.request_id = request_id
        self._offsets = [len(text) for text in echoes]
        head = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time())}
        head |= {"model": body.model, "system_fingerprint": server.card.fingerprint}
        self._head = b"data: " + dumps(head)[:-1] + b',"choices":['
        self._tail = (b'],"usage":null}' if self.include_usage else b"]}") + b"\n\n"

    def _chunk(self, index: int, text: str, logprobs: Any = None, end: Finish | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if end is not None:
            choice |= {"finish_reason": finish_reason(end.reason), **end_fields(end)}
        return self._head + dumps(choice) + self._tail

    def start(self) -> bytes:
        """The echoed prompts, or a comment: headers alone may stay in a buffer on the way."""
        shown = b"".join(self._chunk(index, text) for index, text in enumerate(self.echoes) if text)
        return shown or self.heartbeat

    def event(self, index: int, event: Event) -> bytes:
        """One chunk."""
        if isinstance(event, (TextDelta, ReasoningDelta)):
            logprobs = logprobs_object(event.logprobs, self._offsets[index]) if event.logprobs else None
            self._offsets[index] += sum(len(item.token) for item in event.logprobs)
            return self._chunk(index, event.text, logprobs) if event.text or logprobs else b""
        return self._chunk(index, "", None, event) if isinstance(event, Finish) else b""

    def end(self, finishes: dict[int, Finish]) -> bytes:
        """The usage chunk if asked for, then the end mark."""
        if not self.include_usage:
            return SSE_DONE
        usage = merged_usage(in_order(finishes), self.choices)
        chunk = {"usage": usage_of(usage), "timings": timings_of(usage, finishes[0].timings)}
        return self._head + b"]," + dumps(chunk)[1:] + b"\n\n" + SSE_DONE

    def error(self, error: BaseException) -> bytes:
        """The error event, without an end mark."""
        return sse(body_of(fault_of(error), "openai", self.request_id))


def complete(
    body: CompletionRequest, server: Server, echoes: Sequence[str], completions: list[Completion]
) -> dict[str, Any]:
    """The `text_completion` object."""
    choices = []
    for index, item in enumerate(completions):
        wanted = _logprobs(body) is not None
        choices.append(
            {
                "index": index,
                "text": echoes[index] + (item.message.reasoning or "") + item.text,
                "logprobs": logprobs_object(item.logprobs, len(echoes[index])) if wanted else None,
                "finish_reason": finish_reason(item.finish_reason),
                **end_fields(item),
            }
        )
    usage = merged_usage(completions, body.n or 1)
    return {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": server.card.fingerprint,
        "choices": choices,
        "usage": usage_of(usage),
        "timings": timings_of(usage, completions[0].timings),
    }


def router(server: Server) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/completions", **documented(CompletionRequest))
    async def completions(http: HttpRequest) -> Response:
        """Continue a text, streamed or whole."""
        body = await read_request(http, CompletionRequest, server.settings.max_body_bytes)
        record = http.scope["state"]["record"]

        async def prepare(target: Target) -> Prepared:
            body.model = target.name
            requests = to_requests(body, server.tokenizer)
            texts = [server.text_of(prompt) if body.echo else "" for prompt in prompts_of(body)]
            echoes = [text for text in texts for _ in range(body.n or 1)]
            return Prepared(
                requests,
                CompletionEncoder(body, server, echoes, record.request_id) if body.stream else None,
                lambda done: complete(body, server, echoes, done),
                choices=body.n or 1,
                names={"response_format": constraint_name(body)},
            )

        return await answer(server, http, body.model, prepare, Waiting() if body.stream else None)

    return routes
