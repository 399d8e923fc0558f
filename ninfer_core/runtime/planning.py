"""How much memory an engine takes, decided before anything is loaded: slots, pages and the context they allow."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import ModelConfig
from ..errors import InvalidRequestError, MemoryPlanError
from ..footprint import RESERVE, Footprint, chunk_for
from .options import PAGE, EngineOptions

SHARE = 0.8
"""Part of the free host memory that `memory="auto"` may take on the CPU."""

KEPT = 4
"""Checkpoints that a context of "auto" leaves room for, where a quarter of the memory holds as many."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be allocated. `budget`: bytes the engine may take in all; `workspaces`: buffers by name, bytes.

    `host_blocks`: blocks of host memory for the prefix cache, each as large as a page. They are not of the budget.
    """

    context_length: int
    slots: int
    pages: int
    checkpoints: int
    footprint: Footprint
    workspaces: Mapping[str, int]
    budget: int
    host_blocks: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of everything: weights, workspaces, slots, checkpoints and pages."""
        return sum(size for _, size, _ in self._rows())

    def table(self) -> str:
        """What needs how much, and which setting changes it, one line each."""
        per_sequence = self.footprint.pages(self.context_length) * self.footprint.page
        rows = [
            *self._rows(),
            ("all of this", self.nbytes, ""),
            ("the engine may take", self.budget, "memory"),
            (f"KV cache of one sequence of {self.context_length:,} tokens", per_sequence, "context_length"),
        ]
        if self.host_blocks:
            size = self.host_blocks * self.footprint.page
            rows.append(("prefix cache in host memory, beside this", size, "host_cache_gb"))
        return "\n".join(f"  {what:<52} {size / 2**20:>12,.1f} MiB  {setting}".rstrip() for what, size, setting in rows)

    def _rows(self) -> list[tuple[str, int, str]]:
        foot = self.footprint
        per_chunk = f" of {foot.chunk:,} tokens"
        return [
            ("weights", foot.weights, "model, draft_tokens, vision"),
            *(
                (name + per_chunk * (name == CHUNK_WORKSPACE), size, _SETTINGS.get(name, "context_length"))
                for name, size in self.workspaces.items()
                if size
            ),
            (f"state of {self.slots} sequences", self.slots * foot.slot, "max_sequences"),
            (
                f"state of {self.checkpoints} checkpoints of the prefix cache",
                self.checkpoints * foot.slot,
                "checkpoints, prefix_cache",
            ),
            (
                f"KV cache, {self.pages:,} pages of {PAGE} tokens",
                self.pages * foot.page,
                "context_length, max_sequences, prefix_cache",
            ),
        ]


VISION_WORKSPACE = "workspace of the vision tower"
CHUNK_WORKSPACE = "workspace of a prompt chunk"
_SETTINGS = {VISION_WORKSPACE: "vision", CHUNK_WORKSPACE: "prefill_chunk"}


def choose_chunk(
    config: ModelConfig,
    options: EngineOptions,
    of: Callable[[int], Footprint],
    *,
    budget: int,
    vision_bytes: int = 0,
) -> Footprint:
    """The footprint on a GPU with the prompt chunk asked for; "auto": the longest that costs no context, nor the
    checkpoints that the plan would keep beside it. `of` gives the footprint with a chunk length.
    """
    if options.prefill_chunk != "auto":
        return of(options.prefill_chunk)
    limit = config.max_position_embeddings
    if options.context_length != "auto":
        limit = min(limit, options.context_length)
    kept = KEPT if options.checkpoints == "auto" else options.checkpoints
    slots = options.max_sequences + (kept if options.prefix_cache else 0)
    return of(chunk_for(config, of, budget - vision_bytes, limit, slots))


def plan(
    config: ModelConfig, options: EngineOptions, footprint: Footprint, *, budget: int, vision_bytes: int = 0
) -> Plan:
    """Fit slots and pages into `budget` bytes, weights and workspaces included.

    Every sequence gets a slot. Pages are shared: at least one sequence of full context fits, and as many as
    `max_sequences` where memory allows, then the room of the prefix cache. A context of "auto" is the longest that fits
    beside a few checkpoints. `vision_bytes` stay free for the tower.

    Raises:
        InvalidRequestError: the context asked for is longer than the model's.
        MemoryPlanError: one sequence of that context does not fit; the message holds the table.
    """
    limit = config.max_position_embeddings
    if options.context_length != "auto" and options.context_length > limit:
        raise InvalidRequestError(
            f"context_length is {options.context_length}; this model was trained for at most {limit} tokens",
            param="context_length",
        )
    slots, room = options.max_sequences, budget - vision_bytes
    kept = _reserved(options, footprint, room - footprint.total(1, slots))
    fits = footprint.longest(room, limit, slots + kept)
    context = fits if options.context_length == "auto" else options.context_length
    context = max(context, 1)
    need = footprint.pages(context)
    left = room - footprint.total(context, slots + kept)
    if options.prefix_cache and options.checkpoints == "auto" and left > 0:
        more = max(0, min(max(16, 4 * slots) - kept, left // 2 // footprint.slot))
        kept, left = kept + more, left - more * footprint.slot
    cached = need if options.prefix_cache is True else -(-int(options.prefix_cache) // PAGE)
    wanted = need * (slots - 1) + (cached if kept else 0)
    pages = need + min(wanted, max(0, left) // footprint.page)
    workspaces = {**footprint.workspaces(context), VISION_WORKSPACE: vision_bytes}
    made = Plan(context, slots, pages, kept, footprint, workspaces, budget, _host_blocks(options, footprint, kept))
    if left < 0:
        raise MemoryPlanError(_refusal(made, fits))
    return made


def _host_blocks(options: EngineOptions, footprint: Footprint, kept: int) -> int:
    """Blocks of the host tier.

    Raises:
        MemoryPlanError: they would hold no checkpoint, or none comes to be on the device that could move there.
    """
    blocks = int(options.host_cache_gb * 1e9) // footprint.page
    smallest = footprint.kept(1)
    if options.host_cache_gb and blocks * footprint.page < smallest:
        raise MemoryPlanError(
            f"host_cache_gb is {options.host_cache_gb:g}, and the state of one short prompt takes {smallest / 1e9:.3g} "
            "GB; raise it, or set it to 0"
        )
    if blocks and not kept:
        raise MemoryPlanError(
            f"host_cache_gb is {options.host_cache_gb:g}, but memory leaves no room for a checkpoint on the device; "
            "set checkpoints, raise memory, or lower context_length"
        )
    return blocks


def check_host(made: Plan, device: torch.device) -> None:
    """See that the host has the memory of a plan free.

    Raises:
        MemoryPlanError: it has not.
    """
    host = torch.device("cpu")
    need = made.host_blocks * made.footprint.page + (made.nbytes if device.type == "cpu" else 0)
    if made.host_blocks and need > free_memory(host):
        raise MemoryPlanError(
            f"the prefix cache in host memory and what else lies there need {need / 2**20:,.1f} MiB, and "
            f"{free_memory(host) / 2**20:,.1f} MiB are free; lower host_cache_gb\n{made.table()}"
        )


def _reserved(options: EngineOptions, footprint: Footprint, left: int) -> int:
    """Checkpoints that come before the context: those asked for, or a few where memory is plenty."""
    if not options.prefix_cache:
        return 0
    if options.checkpoints != "auto":
        return options.checkpoints
    if options.context_length != "auto":
        return 0
    return min(KEPT, max(0, left) // 4 // footprint.slot)


def _refusal(made: Plan, fits: int) -> str:
    longest = f"the longest context that fits is {fits:,} tokens" if fits else "no context fits"
    return (
        f"one sequence of {made.context_length:,} tokens with {made.slots} state slots and {made.checkpoints} "
        f"checkpoints needs {made.nbytes / 2**20:,.1f} MiB, and the engine may take {made.budget / 2**20:,.1f} MiB; "
        f"{longest}. What needs how much, and the setting that changes it:\n{made.table()}"
    )


def budget_of(options: EngineOptions, device: torch.device) -> int:
    """Bytes the engine may take on the device in all.

    Raises:
        MemoryPlanError: more was asked for than is free.
    """
    free = free_memory(device)
    if options.memory == "auto":
        return max(0, free - RESERVE) if device.type == "cuda" else int(free * SHARE)
    if options.memory > free:
        raise MemoryPlanError(
            f"memory is {options.memory / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free on {device}; lower "
            "memory, or end other programs there"
        )
    return options.memory


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
