"""A task as a conversation with its answer, and how both are rendered by the project's own template."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ...frontend.template import ChatTemplate
from .images import Scene

Turn = dict[str, Any]
END = "<|im_end|>"


@dataclass
class Task:
    """A conversation and its answer. `fixed` means that the answer follows from the prompt alone."""

    kind: str
    messages: list[Turn]
    answer: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    preserve: bool = False
    images: list[Scene] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of the slices, if the images are those of a video
    fixed: bool = True
    detail: str = ""  # what a question about an image asks for


def call_text(name: str, values: dict[str, Any]) -> str:
    """One call as the template writes it."""
    body = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n</parameter>\n"
        for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def answer_text(task: Task) -> str:
    """What the model has to write after the generation prompt, end mark included."""
    text = task.answer
    if task.calls:
        text += ("\n\n" if text else "") + "\n".join(call_text(*call) for call in task.calls)
    return (f"{task.reasoning}\n</think>\n\n" if task.thinking else "") + text + END


def prompt_text(task: Task, template: ChatTemplate) -> str:
    """The rendered prompt, generation prompt included."""
    return template.render(
        messages=task.messages,
        tools=task.tools,
        add_generation_prompt=True,
        enable_thinking=task.thinking,
        preserve_thinking=task.preserve,
    )


def user(text: str) -> Turn:
    """A user turn."""
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "", calls: list[tuple[str, dict[str, Any]]] | None = None) -> Turn:
    """An assistant turn of the history."""
    turn: Turn = {"role": "assistant", "content": text}
    if reasoning:
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = [{"type": "function", "function": {"name": n, "arguments": v}} for n, v in calls]
    return turn
