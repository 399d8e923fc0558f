"""`NInfer`: a LlamaIndex LLM over the engine of this process, or over a ninfer server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import llama_index.core.instrumentation as instrument
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import Model, ToolSelection, default_completion_to_prompt
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.ninfer.messages import to_messages
from llama_index.llms.ninfer.options import ALIASES, CALL_ONLY, FIELDS, build_request, tool_body
from llama_index.llms.ninfer.responses import ResponseMaker, chat_response, completion_response
from pydantic import ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from ninfer_core.adapter import (
    MediaPolicy,
    Target,
    answer_logprobs,
    check_target,
    checked_fields,
    connect,
    joined,
    known_context,
    own_options,
    public_address,
    share,
    tool_choice_of,
)
from ninfer_core.types import Request

dispatcher = instrument.get_dispatcher(__name__)

DEFAULT_WINDOW = 3900
"""LlamaIndex's own figure, told where a server's model is not known yet; `load()` asks the server."""


class NInfer(FunctionCallingLLM):
    """LLM of ninfer.

    Without `base_url` it uses the engine named `engine` in this process, loaded on first use and shared by every
    instance that names it; with it, a server started by `ninfer serve`. Constructing one loads nothing, and reading
    `metadata` neither loads weights nor touches the network. Sampling fields left at None are the model's own
    defaults; each is also a keyword of a single call, as are `thinking`, `response_format`, `tools` and `tool_choice`.

    Examples:
        `pip install "ninfer[llama-index]"`

        ```python
        from llama_index.llms.ninfer import NInfer

        llm = NInfer(model="demo", temperature=0)
        print(llm.complete("What is the capital of France?"))
        ```
    """

    model: str = Field(default="qwen3.6-27b", description="A served name, a known model, or the path of an artifact.")
    engine: str = Field(default="default", description="Name of the engine in this process; unused with base_url.")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="Fields of ninfer_core.EngineOptions.")
    base_url: Annotated[str | None, PlainSerializer(public_address)] = Field(
        default_factory=lambda: os.environ.get("NINFER_BASE_URL"), repr=False, description="Address of a ninfer server."
    )
    api_key: str | None = Field(
        default_factory=lambda: os.environ.get("NINFER_API_KEY"), exclude=True, repr=False, description="Server key."
    )
    context_window: int | None = Field(
        default=None, gt=0, description="None is the engine's; a smaller one may be given."
    )
    max_tokens: int | None = Field(default=None, description="Tokens of the answer, thinking included.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    thinking: bool | None = Field(default=None, description="Think before answering; None is the model's default (on).")
    thinking_budget: int | None = Field(default=None, description="Thinking tokens after which it must answer.")
    preserve_thinking: bool | None = Field(default=None, description="Keep earlier thinking; None: with tools.")
    is_function_calling_model: bool = Field(default=True, description="Whether agents may give it tools.")
    allow_remote_media: bool = Field(default=False, description="Whether http(s) addresses of media may be fetched.")
    timeout: float | None = Field(default=None, description="Seconds for a whole request; loading is not counted.")
    max_retries: int = Field(default=2, description="HTTP mode: further attempts while nothing was generated.")
    additional_kwargs: dict[str, Any] = Field(default_factory=dict, description="Call options for every call.")
    http_client: Any = Field(default=None, exclude=True, repr=False, description="HTTP mode: an httpx.AsyncClient.")

    # Pydantic would print all that was given, the key included, for an unknown field.
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _own_names(cls, values: Any) -> Any:
        # class_name comes back in what to_dict wrote.
        given = {k: v for k, v in values.items() if k != "class_name"} if isinstance(values, Mapping) else values
        return checked_fields(given, cls.model_fields, {"model_name": "model"})

    @model_validator(mode="after")
    def _check_options(self) -> NInfer:
        check_target(self._target())
        own_options(self.additional_kwargs, (*FIELDS, *CALL_ONLY), ALIASES)
        return self

    @classmethod
    def class_name(cls) -> str:
        """The name in traces and serialized forms."""
        return "NInfer_llm"

    @classmethod
    def from_engine(cls, engine: Any, **fields: Any) -> NInfer:
        """An LLM over an engine object of yours (`Engine`, `ScriptedEngine`, `Client`, or a named one)."""
        if "model" not in fields:
            spec = getattr(engine, "spec", None)
            fields["model"] = spec.model if spec is not None else engine.served_names[0]
        return cls(engine=share(engine), base_url=None, **fields)

    @property
    def metadata(self) -> LLMMetadata:
        """Limits and abilities; costs nothing."""
        window = known_context(self._target()) or DEFAULT_WINDOW
        return LLMMetadata(
            context_window=min(window, self.context_window or window),
            num_output=self.max_tokens or -1,
            is_chat_model=True,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model,
        )

    # --- the engine ---

    def _target(self) -> Target:
        return Target(
            model=self.model,
            engine=self.engine,
            options=self.engine_options,
            base_url=self.base_url,
            api_key=self.api_key,
            max_retries=self.max_retries,
            http_client=self.http_client,
        )

    def _engine(self, model: str | None = None) -> Any:
        return connect(self._target(), model)

    def load(self) -> NInfer:
        """Load the engine now (over HTTP: ask the server for its limits). Returns itself."""
        engine = self._engine()
        if hasattr(engine, "load"):
            engine.load()
        engine.profile  # noqa: B018 - a client remembers what the server says
        return self

    async def aload(self) -> NInfer:
        """`load` without holding up the event loop."""
        return await asyncio.to_thread(self.load)

    def close(self) -> None:
        """Close the engine (or the connections), for all models that share it."""
        self._engine().close()

    @property
    def tokenizer(self) -> Callable[[str], list[int]]:
        """The model's tokenizer as a function of text: `set_global_tokenizer(llm.tokenizer)`."""
        return self._encode

    def _encode(self, text: str) -> list[int]:
        return list(self._engine().tokenizer.encode(text))

    def count_tokens(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages and tools become with the LLM's fields, as in `raw["usage"]`."""
        return int(self._engine().count_tokens(self._request(messages, None, {"tools": list(tools or ())})))

    def _request(self, messages: Sequence[ChatMessage], prompt: str | None, options: Mapping[str, Any]) -> Request:
        own: dict[str, Any] = {name: getattr(self, name) for name in FIELDS}
        for given in (self.additional_kwargs, options):
            own |= own_options(given, (*FIELDS, *CALL_ONLY), ALIASES)
        return build_request(to_messages(messages, MediaPolicy(self.allow_remote_media)), prompt, own)

    def _prepare(
        self, messages: Sequence[ChatMessage], prompt: str | None, options: Mapping[str, Any]
    ) -> tuple[Any, Request, str]:
        asked = options.get("model")
        return self._engine(asked), self._request(messages, prompt, options), str(asked or self.model)

    @property
    def _mode(self) -> str:
        return "http" if self.base_url else "in-process"

    # --- running a request: everything below is a form of these four ---

    def _run(self, messages: Sequence[ChatMessage], prompt: str | None, options: Mapping[str, Any]) -> ChatResponse:
        engine, request, name = self._prepare(messages, prompt, options)
        with engine.submit(request) as handle:
            completion = handle.result()
            logprobs = None if request.logprobs is None else answer_logprobs(list(handle))
            return chat_response(completion, logprobs, name, self._mode)

    async def _arun(
        self, messages: Sequence[ChatMessage], prompt: str | None, options: Mapping[str, Any]
    ) -> ChatResponse:
        engine, request, name = self._prepare(messages, prompt, options)
        async with await engine.asubmit(request) as handle:
            completion = await handle.aresult()
            logprobs = None if request.logprobs is None else answer_logprobs(list(handle))
            return chat_response(completion, logprobs, name, self._mode)

    def _events(
        self, messages: Sequence[ChatMessage], prompt: str | None, options: Mapping[str, Any]
    ) -> Iterator[ChatResponse]:
        engine, request, name = self._prepare(messages, prompt, options)
        maker = ResponseMaker(name, self._mode)
        with engine.submit(request) as handle:
            for batch in handle.batches():
                for event in joined(batch):
                    yield maker.feed(event)

    async def _aevents(
        self, messages: Sequence[ChatMessage], prompt: str | None, options: Mapping[str, Any]
    ) -> AsyncGenerator[ChatResponse, None]:
        engine, request, name = self._prepare(messages, prompt, options)
        maker = ResponseMaker(name, self._mode)
        async with await engine.asubmit(request) as handle:
            async for batch in handle.abatches():
                for event in joined(batch):
                    yield maker.feed(event)

    def _as_input(self, prompt: str, formatted: bool) -> tuple[list[ChatMessage], str | None]:
        """A prompt as one user turn; raw if it is formatted already or the user's own formatter makes it so."""
        if formatted:
            return [], prompt
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return [], self.completion_to_prompt(prompt)
        return [ChatMessage(role=MessageRole.USER, content=prompt)], None

    # --- the eight calls ---

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return self._run(messages, None, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation; cancelling the task cancels the request."""
        return await self._arun(messages, None, kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece."""

        def gen() -> ChatResponseGen:
            yield from self._events(messages, None, kwargs)

        return gen()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a conversation piece by piece; closing the generator cancels the request."""

        async def gen() -> ChatResponseAsyncGen:
            async with aclosing(self._aevents(messages, None, kwargs)) as responses:
                async for response in responses:
                    yield response

        return gen()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; `formatted`: continue the text as it is, without the chat template."""
        return completion_response(self._run(*self._as_input(prompt, formatted), kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete` for coroutines."""
        return completion_response(await self._arun(*self._as_input(prompt, formatted), kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """`complete` piece by piece."""

        def gen() -> CompletionResponseGen:
            for response in self._events(*self._as_input(prompt, formatted), kwargs):
                yield completion_response(response)

        return gen()

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """`complete` piece by piece, for coroutines."""

        async def gen() -> CompletionResponseAsyncGen:
            async with aclosing(self._aevents(*self._as_input(prompt, formatted), kwargs)) as responses:
                async for response in responses:
                    yield completion_response(response)

        return gen()

    # --- tools ---

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[Any],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        specs = [tool_body(tool) for tool in tools]
        names = [spec["function"]["name"] for spec in specs]
        if tool_choice is None and tool_required:
            tool_choice = "required"
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            messages.append(ChatMessage(role=MessageRole.USER, content=user_msg))
        elif user_msg is not None:
            messages.append(user_msg)
        options = {"parallel_tool_calls": allow_parallel_tool_calls} if specs else {}
        return {
            "messages": messages,
            "tools": specs,
            "tool_choice": tool_choice_of(tool_choice, names),
            **options,
            **kwargs,
        }

    def _validate_chat_with_tools_response(
        self, response: ChatResponse, tools: Sequence[Any], allow_parallel_tool_calls: bool = False, **kwargs: Any
    ) -> ChatResponse:
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not allow_parallel_tool_calls and len(calls) > 1:
            extra = {id(block) for block in calls[1:]}
            response.message.blocks = [block for block in response.message.blocks if id(block) not in extra]
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in a response, whole or still streaming; a call that the length limit cut is left out.

        Raises:
            ValueError: there is none and `error_on_no_tool_call` is True.
        """
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        cut = bool(response.additional_kwargs.get("truncated_call"))
        selections = [
            ToolSelection(
                tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=_arguments(block.tool_kwargs)
            )
            for block in (blocks[:-1] if cut else blocks)
        ]
        if not selections and error_on_no_tool_call:
            raw = response.raw if isinstance(response.raw, Mapping) else {}
            why = (
                "the only call was cut by the length limit; raise max_tokens"
                if cut
                else f"the answer was {(response.message.content or '')[:200]!r}"
                + (", cut by the length limit; raise max_tokens" if raw.get("finish_reason") == "length" else "")
            )
            raise ValueError(f"Expected at least one tool call, but got 0 tool calls: {why}")
        return selections

    # --- structured output ---

    def _own_program(self) -> bool:
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    def _structured_messages(self, prompt: Any, prompt_args: Mapping[str, Any]) -> list[ChatMessage]:
        return self._extend_messages(prompt.format_messages(llm=self, **prompt_args))

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An object of the class: the answer is constrained to its schema while it is decoded.

        Raises:
            ValueError: the answer was cut by the length limit, or does not pass the class's own validators.
        """
        if not self._own_program():
            return super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        messages = self._structured_messages(prompt, prompt_args)
        response = self.chat(messages, response_format=output_cls, **(llm_kwargs or {}))
        result = _parsed(output_cls, response)
        dispatcher.event(LLMStructuredPredictEndEvent(output=result))
        return result

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """`structured_predict` for coroutines."""
        if not self._own_program():
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        messages = self._structured_messages(prompt, prompt_args)
        response = await self.achat(messages, response_format=output_cls, **(llm_kwargs or {}))
        result = _parsed(output_cls, response)
        dispatcher.event(LLMStructuredPredictEndEvent(output=result))
        return result

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if not self._own_program():
            return super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        messages = self._structured_messages(prompt, prompt_args)

        def gen() -> Generator[Any, None, None]:
            response: Any = None
            objects: Any = None
            for response in self.stream_chat(messages, response_format=output_cls, **(llm_kwargs or {})):
                if response.message.content:
                    found = process_streaming_objects(response, output_cls, objects, flexible_mode=True, llm=self)
                    objects = [found]
                    yield found
            if response is not None:
                yield _parsed(output_cls, response)

        return gen()

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if not self._own_program():
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        messages = self._structured_messages(prompt, prompt_args)

        async def gen() -> AsyncGenerator[Any, None]:
            response: Any = None
            objects: Any = None
            stream = await self.astream_chat(messages, response_format=output_cls, **(llm_kwargs or {}))
            async for response in stream:
                if response.message.content:
                    found = process_streaming_objects(response, output_cls, objects, flexible_mode=True, llm=self)
                    objects = [found]
                    yield found
            if response is not None:
                yield _parsed(output_cls, response)

        return gen()


def _arguments(value: dict[str, Any] | str) -> dict[str, Any]:
    if not isinstance(value, str):
        return value
    try:
        found = parse_partial_json(value) if value.strip() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _parsed(output_cls: type[Model], response: ChatResponse) -> Model:
    text = response.message.content or ""
    try:
        return output_cls.model_validate_json(text)
    except ValidationError as error:
        reason = (response.raw or {}).get("finish_reason")
        raise ValueError(
            f"the answer is not a valid {output_cls.__name__} (finish_reason {reason!r}; a cut one needs more "
            f"max_tokens): {error}\nThe answer: {text[:500]!r}"
        ) from error
