"""The model that `testing.ScriptedEngine` pretends to have: frontend files, configuration and tokenizer."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from importlib import resources
from typing import Any

from .config import ModelConfig
from .frontend.tokenizer import byte_alphabet


class ScriptedTokenizer:
    """The frontend's tokenizer, with further ids made on demand for scripted pieces."""

    def __init__(self, base: Any) -> None:
        self._base = base
        self._pieces: list[bytes] = []
        self._ids: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def piece(self, data: bytes) -> int:
        """The id of a token with exactly these bytes."""
        try:
            ids = self._base.encode(data.decode())
        except UnicodeDecodeError:
            ids = []
        if len(ids) == 1:
            return int(ids[0])
        with self._lock:
            if data not in self._ids:
                self._ids[data] = self._base.addressable + len(self._pieces)
                self._pieces.append(data)
            return self._ids[data]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token."""
        extra = token - self._base.addressable
        return self._pieces[extra] if extra >= 0 else self._base.token_bytes(token)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
_MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def scripted_resources() -> dict[str, bytes]:
    """The frontend files of a model whose tokens are single bytes plus the template's markers."""
    added = [
        {
            "id": 256 + i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text in _SPECIAL,
        }
        for i, text in enumerate((*_SPECIAL, *_MARKERS))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": byte_alphabet(),
            "merges": [],
        },
    }
    config = {
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    generation = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": [258, 256],
        "pad_token_id": 256,
    }
    template = resources.files("ninfer_core").joinpath("demo/chat_template.jinja").read_bytes()
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(generation).encode(),
        "chat_template.jinja": template,
    }


def scripted_config(context_length: int) -> ModelConfig:
    """A configuration that fits `scripted_resources`."""
    return ModelConfig(
        model_id="scripted",
        hidden_size=128,
        num_hidden_layers=4,
        layer_types=("linear_attention",) * 3 + ("full_attention",),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=384,
        max_position_embeddings=context_length,
        intermediate_size=128,
        image_token_id=262,
        video_token_id=263,
        vision_start_token_id=259,
        vision_end_token_id=260,
    )
