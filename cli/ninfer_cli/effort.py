"""Named levels of thinking, as clients and `/set think` give them, in tokens."""

from __future__ import annotations

# Reasoning tokens allowed at each named effort; None is no limit. Unknown names count as the nearest known one.
EFFORT_BUDGETS: dict[str, int | None] = {
    "none": 0,
    "off": 0,
    "minimal": 1024,
    "low": 4096,
    "medium": 16384,
    "high": None,
    "xhigh": None,
    "max": None,
}


def effort_budget(effort: str) -> int | None:
    """The thinking budget of an effort level; 0 is thinking off, None unlimited."""
    return EFFORT_BUDGETS.get(effort.strip().lower())
