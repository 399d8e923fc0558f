"""How much memory an engine takes, decided before anything is allocated: slots, pages and the context they allow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import ModelConfig
from ..errors import InvalidRequestError, MemoryPlanError
from ..state import state_bytes
from .options import PAGE, EngineOptions

SHARE = 0.8
"""Part of the free memory that `memory="auto"` may take."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be allocated. Bytes: of all weights, of one KV page (64 tokens, all layers), of one state slot."""

    context_length: int
    slots: int
    pages: int
    weight_bytes: int
    page_bytes: int
    slot_bytes: int
    budget: int
    checkpoints: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of slots, checkpoints and pages together."""
        return (self.slots + self.checkpoints) * self.slot_bytes + self.pages * self.page_bytes

    def table(self) -> str:
        """What needs how much, one line each."""
        per_sequence = pages_for(self.context_length, 0) * self.page_bytes
        lines = [
            ("weights (loaded)", self.weight_bytes),
            (f"state of {self.slots} sequences", self.slots * self.slot_bytes),
            (f"state of {self.checkpoints} checkpoints of the prefix cache", self.checkpoints * self.slot_bytes),
            (f"KV cache, {self.pages} pages of {PAGE} tokens", self.pages * self.page_bytes),
            (f"KV cache of one sequence of {self.context_length} tokens", per_sequence),
            ("allowed for state and KV cache", self.budget),
        ]
        return "\n".join(f"  {what:<50} {size / 2**20:>12,.1f} MiB" for what, size in lines)


def pages_for(context_length: int, draft_tokens: int) -> int:
    """Pages of one sequence that fills the context, with room for the drafts beyond its last token."""
    return -(-(context_length + draft_tokens) // PAGE)


def plan(config: ModelConfig, options: EngineOptions, *, weight_bytes: int, free_bytes: int) -> Plan:
    """Fit slots and pages into memory.

    Every sequence gets a slot. Pages are shared: at least one sequence of full context fits, and as many as
    `max_sequences` where memory allows, then the room of the prefix cache.

    Raises:
        InvalidRequestError: the context asked for is longer than the model's.
        MemoryPlanError: one sequence of that context does not fit; the message holds the table.
    """
    limit = config.max_position_embeddings
    wanted = limit if options.context_length == "auto" else options.context_length
    if wanted > limit:
        raise InvalidRequestError(
            f"context_length is {wanted}; this model was trained for at most {limit} tokens", param="context_length"
        )
    page_bytes, slot_bytes = state_bytes(config, options.kv_cache, options.draft_tokens)
    budget = int(free_bytes * SHARE) if options.memory == "auto" else options.memory
    slots = options.max_sequences
    checkpoints = _checkpoints(options, slots, budget // slot_bytes)
    affordable = max(0, budget - (slots + checkpoints) * slot_bytes) // page_bytes
    if options.context_length == "auto":
        wanted = min(wanted, affordable * PAGE - options.draft_tokens)
    need = pages_for(max(wanted, 1), options.draft_tokens)
    kept = need if options.prefix_cache is True else pages_for(int(options.prefix_cache), 0)
    pages = min(need * slots + (kept if checkpoints else 0), affordable)
    made = Plan(wanted, slots, pages, weight_bytes, page_bytes, slot_bytes, budget, checkpoints)
    if wanted < 1 or pages < need:
        raise MemoryPlanError(
            f"one sequence of {max(wanted, 1)} tokens needs {need} KV pages, and {affordable} fit beside "
            f"{slots} state slots and {checkpoints} checkpoints; lower context_length, max_sequences or checkpoints, "
            f"or raise memory:\n{made.table()}"
        )
    return made


def _checkpoints(options: EngineOptions, slots: int, affordable: int) -> int:
    """How many states the prefix cache keeps: as asked for, or four per sequence in a quarter of the memory."""
    if not options.prefix_cache:
        return 0
    if options.checkpoints != "auto":
        return options.checkpoints
    return min(max(16, 4 * slots), max(0, affordable - slots) // 4)


def free_memory(device: torch.device) -> int:
    """Bytes free on the device; on the CPU within the limit of the control group this process runs in."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # what is free is not told: half of all
    else:
        free = 4 << 30  # a size that any machine of today has; `memory` says more
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free
