"""`ChatNInfer`: a LangChain chat model over the engine of this process, or over a ninfer server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.utils import from_env, secret_from_env
from pydantic import ConfigDict, Field, PlainSerializer, SecretStr, model_validator

from ninfer_core.adapter import (
    MediaPolicy,
    Target,
    answer_logprobs,
    check_target,
    checked_fields,
    connect,
    joined,
    offline_profile,
    public_address,
    share,
    tool_choice_of,
)
from ninfer_core.types import Request, TokenLogprob

from .batching import ManyAtOnce, gate, take_ready
from .errors import translated
from .messages import to_messages
from .options import FIELDS, build_request, check_options, to_tool
from .output import BlockEvents, ChunkMaker, to_result
from .structured import structured

_ALIASES = {"model_name": "model", "stop_sequences": "stop", "http_async_client": "http_client"}


class ChatNInfer(ManyAtOnce):
    """Chat model of ninfer.

    Without `base_url` it uses the engine named `engine` in this process, which is loaded on first use and shared by
    every instance that names it; with it, a server started by `ninfer serve`. Constructing one loads nothing.
    Sampling fields left at None are the model's own defaults; each is also a keyword of a single call, as are
    `reasoning`, `response_format`, `tools` and `tool_choice`.

    Example:
        model = ChatNInfer(model="demo", temperature=0)
        model.invoke("What is the capital of France?").text
    """

    model: str = "qwen3.6-27b"
    """A served name, a model known to the store, or the path of an artifact (alias: `model_name`)."""
    engine: str = "default"
    """Name of the engine in this process; not used with `base_url`."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of `ninfer_core.EngineOptions` for an engine made on first use."""
    base_url: Annotated[str | None, PlainSerializer(public_address)] = Field(
        default_factory=from_env("NINFER_BASE_URL", default=None), repr=False
    )
    """Address of a ninfer server; given, nothing is loaded here. A user and password in it stay out of traces."""
    api_key: SecretStr | None = Field(default_factory=secret_from_env("NINFER_API_KEY", default=None))
    """Key of the server; not needed in-process."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    """Tokens of the answer, reasoning included; None is up to the end of the context."""
    stop: list[str] | str | None = None
    """Strings that end the answer (alias: `stop_sequences`); a call's own `stop` replaces them."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning: bool | None = None
    """Think before answering; None is the model's default (on)."""
    reasoning_budget: int | None = None
    """Reasoning tokens after which the model is made to answer."""
    preserve_reasoning: bool | None = None
    """Keep the reasoning of earlier turns in the prompt; None: when tools are bound."""
    parallel_tool_calls: bool = True
    allow_remote_media: bool = False
    """Whether http(s) addresses of images and videos may be fetched."""
    media_root: str | None = None
    """The folder below which images and videos may be read by path; None: no paths."""
    timeout: float | None = None
    """Seconds for a whole request, queue time included; None is no limit. Loading is not counted."""
    max_retries: int = 2
    """HTTP mode: further attempts while nothing was generated and the error is one that passes."""
    http_client: Any = Field(default=None, exclude=True, repr=False)
    """HTTP mode: your own `httpx.AsyncClient`, which synchronous calls use too (alias: `http_async_client`)."""

    # Pydantic would print all that was given, the key included, for an unknown field.
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _own_names(cls, values: Any) -> Any:
        return checked_fields(values, cls.model_fields, _ALIASES)

    @model_validator(mode="after")
    def _check_target(self) -> ChatNInfer:
        check_target(self._target())
        return self

    # --- what it is ---

    @classmethod
    def from_engine(cls, engine: Any, **fields: Any) -> ChatNInfer:
        """A chat model over an engine object of yours (`Engine`, `ScriptedEngine`, `Client`, or a named one)."""
        if "model" not in fields and "model_name" not in fields:
            spec = getattr(engine, "spec", None)
            fields["model"] = spec.model if spec is not None else engine.served_names[0]
        return cls(engine=share(engine), base_url=None, **fields)

    @property
    def model_name(self) -> str:
        """The name of the model."""
        return self.model

    @property
    def _llm_type(self) -> str:
        return "chat-ninfer"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        places = ("model", "engine", "engine_options", "allow_remote_media", "media_root")
        own = {name: getattr(self, name) for name in (*places, *FIELDS) if name != "timeout"}
        return {**own, "base_url": public_address(self.base_url)}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """It is."""
        return True

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The API key stays out of serialized models."""
        return {"api_key": "NINFER_API_KEY"}

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """The address is serialized even if it is None: loading must not take one from the environment."""
        return {"base_url": public_address(self.base_url)}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        own = [self.stop] if isinstance(self.stop, str) else self.stop
        params = super()._get_ls_params(stop=stop or own, **kwargs)
        params["ls_provider"] = "ninfer"
        return params

    def _resolve_model_profile(self) -> Any:
        return self._own_profile(offline_profile(self._target()))

    def _own_profile(self, profile: Mapping[str, Any]) -> Any:
        """The profile with what this instance allows, without keys that this version of core would warn about."""
        urls = bool(profile.get("image_inputs")) and self.allow_remote_media
        known = ModelProfile.__annotations__
        return {key: value for key, value in {**profile, "image_url_inputs": urls}.items() if key in known}

    def _combine_llm_outputs(self, outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        total: dict[str, int] = {}
        for output in outputs:
            for name, count in (output or {}).get("token_usage", {}).items():
                total[name] = total.get(name, 0) + count
        return {"token_usage": total, "model_name": self.model}

    # --- the engine ---

    def _target(self) -> Target:
        return Target(
            model=self.model,
            engine=self.engine,
            options=self.engine_options,
            base_url=self.base_url,
            api_key=self.api_key.get_secret_value() if self.api_key else None,
            max_retries=self.max_retries,
            http_client=self.http_client,
        )

    def _engine(self, model: str | None = None) -> Any:
        return connect(self._target(), model)

    def load(self) -> ChatNInfer:
        """Load the engine now instead of at the first request; nothing to do over HTTP. Returns itself."""
        with translated():
            engine = self._engine()
            if hasattr(engine, "load"):
                engine.load()
            self.profile = self._own_profile(engine.profile)
        return self

    async def aload(self) -> ChatNInfer:
        """`load` without holding up the event loop."""
        return await asyncio.to_thread(self.load)

    def close(self) -> None:
        """Close the engine (or the connections), for all models that share it."""
        with translated():
            self._engine().close()

    def _request(self, messages: Sequence[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]) -> Request:
        own: dict[str, Any] = {name: getattr(self, name) for name in FIELDS}
        own |= check_options(options)
        if stop is not None:
            own["stop"] = stop
        media = MediaPolicy(self.allow_remote_media, self.media_root)
        return build_request(to_messages(messages, media), own)

    def _prepare(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> tuple[Any, Request, str]:
        """Engine, request and the name to report."""
        asked = options.get("model") or options.get("model_name")
        return self._engine(asked), self._request(messages, stop, options), str(asked or self.model)

    @property
    def _mode(self) -> str:
        return "http" if self.base_url else "in-process"

    # --- generating ---

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with translated():
            engine, request, name = self._prepare(messages, stop, kwargs)
            with take_ready(request) or engine.submit(request) as handle:
                completion = handle.result()
                return to_result(completion, _logprobs(request, handle), name, self._mode)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with translated():
            engine, request, name = self._prepare(messages, stop, kwargs)
            async with gate(), await engine.asubmit(request) as handle:
                completion = await handle.aresult()
                return to_result(completion, _logprobs(request, handle), name, self._mode)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with translated():
            engine, request, name = self._prepare(messages, stop, kwargs)
            maker = ChunkMaker(name, self._mode)
            with engine.submit(request) as handle:
                for batch in handle.batches():
                    for event in joined(batch):
                        chunk = maker.chunk(event)
                        if chunk is not None:
                            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with translated():
            engine, request, name = self._prepare(messages, stop, kwargs)
            maker = ChunkMaker(name, self._mode)
            async with gate(), await engine.asubmit(request) as handle:
                async for batch in handle.abatches():
                    for event in joined(batch):
                        chunk = maker.chunk(event)
                        if chunk is not None:
                            yield chunk

    def _stream_chat_model_events(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[dict[str, Any]]:
        """The typed block protocol, natively: core looks this method up by name."""
        with translated():
            engine, request, name = self._prepare(messages, stop, kwargs)
            blocks = BlockEvents(_message_id(run_manager), name, self._mode)
            with engine.submit(request) as handle:
                yield blocks.start()
                for batch in handle.batches():
                    for event in joined(batch):
                        yield from blocks.feed(event)

    async def _astream_chat_model_events(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """The typed block protocol for coroutines."""
        with translated():
            engine, request, name = self._prepare(messages, stop, kwargs)
            blocks = BlockEvents(_message_id(run_manager), name, self._mode)
            async with gate(), await engine.asubmit(request) as handle:
                yield blocks.start()
                async for batch in handle.abatches():
                    for event in joined(batch):
                        for item in blocks.feed(event):
                            yield item

    # --- tools and structure ---

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools.

        Args:
            tools: functions, tool objects, classes or schemas.
            tool_choice: None or "auto": the model decides; "none"; "any", "required" or True: at least one call;
                a tool's name, or a mapping that names one: that tool. The choice is enforced while decoding.
            strict: arguments follow the schema exactly.
            parallel_tool_calls: several calls in one answer; None is the model's own setting.
            response_format: the form of an answer that is not a call.
            kwargs: further call options.
        """
        with translated():
            formatted = [to_tool(tool, strict) for tool in tools]
            choice = tool_choice_of(tool_choice, [tool["function"]["name"] for tool in formatted])
        bound: dict[str, Any] = {"tools": formatted, **kwargs}
        if choice.names:
            bound["tool_choice"] = {"type": "function", "function": {"name": choice.names[0]}}
        elif choice.mode != "auto":
            bound["tool_choice"] = choice.mode
        if parallel_tool_calls is not None:
            bound["parallel_tool_calls"] = parallel_tool_calls
        if response_format is not None:
            bound["response_format"] = response_format
        return self.bind(**bound)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers as objects of a schema.

        Args:
            schema: a Pydantic class, a TypedDict, a JSON schema or an OpenAI function.
            include_raw: return `{"raw", "parsed", "parsing_error"}` and raise no parsing errors.
            method: "json_schema" and "json_mode" constrain the answer's text to the schema; "function_calling" forces
                a call of a tool with that schema.
            strict: follow the schema exactly (the default).
            kwargs: further call options.
        """
        return structured(self, schema, method, include_raw, strict, kwargs)

    # --- counting ---

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the model's own tokenizer (no weights)."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        with translated():
            return list(self._engine().tokenizer.encode(text))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages and tools become with the fields of the model, as `input_tokens`."""
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens_from_messages(messages, tools)
        with translated():
            options = {"tools": [to_tool(tool) for tool in tools]} if tools else {}
            return int(self._engine().count_tokens(self._request(messages, None, options)))


def _logprobs(request: Request, handle: Any) -> tuple[TokenLogprob, ...] | None:
    return None if request.logprobs is None else answer_logprobs(list(handle))


def _message_id(run_manager: Any) -> str:
    run = getattr(run_manager, "run_id", None) or uuid.uuid4()
    return f"lc_run--{run}"
