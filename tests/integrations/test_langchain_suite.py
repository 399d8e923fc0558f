"""The LangChain standard integration suite on the demo model with real generation, thinking off and on."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.messages import AIMessage
from langchain_ninfer import ChatNInfer
from langchain_tests.integration_tests import ChatModelIntegrationTests


class Suite(ChatModelIntegrationTests):
    """What both modes share."""

    @property
    def chat_model_class(self) -> type[ChatNInfer]:
        return ChatNInfer

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "demo", "temperature": 0, "max_tokens": 256, "reasoning": False}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "ninfer-demo"

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        return {"invoke": ["reasoning_output", "cache_read_input"], "stream": ["reasoning_output", "cache_read_input"]}

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**{**self.chat_model_params, "reasoning": True})
        return _run(model, "What is the capital of France?", stream)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        _run(model, "What is the capital of France?", stream)
        return _run(model, "What is the capital of France?", stream)


def _run(model: ChatNInfer, text: str, stream: bool) -> AIMessage:
    if not stream:
        return model.invoke(text)
    full: Any = None
    for chunk in model.stream(text):
        full = chunk if full is None else full + chunk
    return full


class TestThinkingOff(Suite):
    """Plain answers."""


class TestThinkingOn(Suite):
    """Every answer after a think block."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "demo", "temperature": 0, "max_tokens": 512, "reasoning": True}
