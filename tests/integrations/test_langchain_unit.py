"""The LangChain standard unit suite, as shipped."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from langchain_ninfer import ChatNInfer
from langchain_tests.unit_tests import ChatModelUnitTests

LOADER = importlib.import_module("langchain_core.load.load")


class TestUnit(ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _loadable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Core loads classes of its own table only; the suite cannot name others as a user would."""
        path = ("langchain_ninfer", "chat_models", "ChatNInfer")
        monkeypatch.setitem(LOADER.ALL_SERIALIZABLE_MAPPINGS, path, path)

    @property
    def chat_model_class(self) -> type[ChatNInfer]:
        return ChatNInfer

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "demo"}

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "ninfer-demo"

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        env = {"NINFER_API_KEY": "secret", "NINFER_BASE_URL": "http://127.0.0.1:9"}
        return env, {"model": "demo"}, {"api_key": "secret", "base_url": "http://127.0.0.1:9"}
