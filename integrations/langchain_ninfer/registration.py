"""Opt-in registration with LangChain's model factory, and with deepagents by entry point."""

from __future__ import annotations

import importlib
from typing import Any

from ninfer_core.errors import MissingDependencyError, UnsupportedError


def register() -> None:
    """Let `init_chat_model("ninfer:NAME")`, and everything built on it, make a `ChatNInfer`.

    LangChain has no public way to add a provider, so this adds an entry to its private table. Passing an instance of
    `ChatNInfer` works everywhere and needs no registration.

    Raises:
        MissingDependencyError: the package langchain is absent.
        UnsupportedError: the table of the installed version has another shape than this code knows.
    """
    try:
        base = importlib.import_module("langchain.chat_models.base")
    except ImportError as error:
        raise MissingDependencyError("langchain", "langchain", "register()") from error
    table: Any = getattr(base, "_BUILTIN_PROVIDERS", None)
    sample = table.get("ollama") if isinstance(table, dict) else None
    if not isinstance(sample, tuple) or len(sample) < 2 or sample[:2] != ("langchain_ollama", "ChatOllama"):
        raise UnsupportedError(
            "the provider table of the installed langchain has an unknown shape; pass a ChatNInfer instance instead"
        )
    own = ("langchain_ninfer", "ChatNInfer", *sample[2:])
    table["ninfer"] = type(sample)(*own) if hasattr(sample, "_fields") else own
    importlib.invalidate_caches()


def register_deepagents() -> None:
    """Let `create_deep_agent(model="ninfer:NAME")` make a `ChatNInfer`; deepagents calls this by its entry point."""
    profiles = importlib.import_module("deepagents")
    profile = profiles.ProviderProfile(pre_init=lambda _model: register())
    profiles.register_provider_profile("ninfer", profile)
