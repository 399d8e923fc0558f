"""Text that fills the gap between a prompt and a suffix, with the marks that a model has for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ninfer_core.errors import UnsupportedError

_MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def fills_gaps(tokenizer: Any) -> bool:
    """Whether a model has the marks."""
    return all(mark in tokenizer.special for mark in _MARKS)


def gap_prompt(tokenizer: Any, prompt: str | Sequence[int], suffix: str) -> tuple[int, ...]:
    """The tokens after which the model writes what belongs between `prompt` and `suffix`.

    Raises:
        UnsupportedError: the model has no marks for it.
    """
    if not fills_gaps(tokenizer):
        raise UnsupportedError(
            f"suffix is not supported by this model: its vocabulary lacks {', '.join(_MARKS)}", param="suffix"
        )
    before, after, middle = (tokenizer.special[mark] for mark in _MARKS)
    start = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    # The suffix is somebody's text: a mark in it is text, too.
    return (before, *start, after, *tokenizer.encode(suffix, allow_special=False), middle)


def gap_ends(tokenizer: Any) -> tuple[int, ...]:
    """Tokens that mean that the gap is full and the next file begins."""
    return tuple(tokenizer.special[mark] for mark in _ENDS if mark in tokenizer.special)
