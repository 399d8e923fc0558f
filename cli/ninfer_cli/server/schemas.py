"""Request schemas of the three APIs. Unknown fields are ignored; a known field of the wrong type is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral)]
Object = dict[str, Any]
Stop = str | list[str] | None


class Schema(BaseModel):
    """Base: strict types (no text for numbers), unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class SamplingFields(Schema):
    """Sampling parameters that the OpenAI interfaces share."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = None
    seed: Int | None = None
    stop: Stop = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None


class GuidedFields(Schema):
    """Constraints in the spelling of other servers; each is honoured or refused, never dropped."""

    guided_json: Object | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: Object | None = None
    structured_outputs: Object | None = None


class ThinkingFields(Schema):
    """The spellings of "think or not, and how long"."""

    reasoning_effort: str | None = None
    reasoning: Object | None = None
    thinking: bool | Object | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking_budget: Int | None = None
    reasoning_budget: Int | None = None
    chat_template_kwargs: Object | None = None


class StreamOptions(Schema):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ChatMessage(Schema):
    """One message of a chat; what a role may hold is checked when it is converted."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Object] | None = None
    name: str | None = None
    tool_calls: list[Object] | None = None
    function_call: Object | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: str | None = None


class ChatRequest(SamplingFields, GuidedFields, ThinkingFields):
    """`POST /v1/chat/completions`."""

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    n: Int | None = Field(None, ge=1, le=8)
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Object] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    functions: list[Object] | None = None
    function_call: str | Object | None = None
    parallel_tool_calls: bool | None = None
    response_format: Object | None = None
    modalities: list[str] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(SamplingFields, GuidedFields):
    """`POST /v1/completions`."""

    model: str | None = None
    prompt: str | list[Int] | list[str] | list[list[Int]]
    suffix: str | None = None
    max_tokens: Int | None = None
    n: Int | None = Field(None, ge=1, le=8)
    best_of: Int | None = Field(None, ge=0, le=8)
    logprobs: Int | bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Object | None = None


class ReasoningOptions(Schema):
    """`reasoning` of the responses interface."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(SamplingFields):
    """`POST /v1/responses` and `/v1/responses/input_tokens`."""

    model: str | None = None
    input: str | list[Object] | None = None
    instructions: str | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None
    tools: list[Object] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: Object | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    truncation: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | Object | None = None
    prompt: Object | None = None
    metadata: Object | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None


class AnthropicMessage(Schema):
    """One message; newer clients send `system` ones between the turns."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Object] | None = None


class CountTokensRequest(Schema):
    """`POST /v1/messages/count_tokens`: what determines the prompt."""

    model: str | None = None
    system: str | list[Object] | None = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    tools: list[Object] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    output_format: Object | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: Int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class OllamaMessage(Schema):
    """One message of an Ollama chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Object] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(Schema):
    """`options`; what the runner of another engine needs is ignored."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    num_predict: Int | None = None
    num_ctx: Int | None = None
    stop: Stop = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaBase(Schema):
    """What chat and generate share."""

    model: str | None = None
    stream: bool | None = None
    format: str | Object | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=20)


class OllamaChatRequest(OllamaBase):
    """`POST /api/chat`."""

    messages: list[OllamaMessage] | None = None
    tools: list[Object] | None = None


class OllamaGenerateRequest(OllamaBase):
    """`POST /api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[Int] | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaNameRequest(Schema):
    """Requests that name a model (`model`, formerly `name`)."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class OllamaCopyRequest(Schema):
    """`POST /api/copy`."""

    source: str
    destination: str


class TokenizeRequest(ThinkingFields):
    """`POST /tokenize`: raw `content` (or `prompt`), or `messages` through the template."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Object] | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Schema):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Int]


class ApplyTemplateRequest(ThinkingFields):
    """`POST /apply-template`."""

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Object] | None = None
