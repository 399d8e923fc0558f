"""Host memory that holds copies of recurrent states and KV pages, in blocks of the size of a page; pinned on CUDA.

On CUDA all copies run on a stream of their own. Each way begins behind what the current stream was given before it,
and the current stream goes on behind it, so neither what is read nor what is written needs any other guard. On the CPU
the same calls copy at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from .errors import MemoryPlanError
from .state import DeviceState

GROUP = 16
"""Pages that go through one temporary buffer on the device."""


class Ticket(Protocol):
    """What was started and ends by itself: a CUDA event."""

    def query(self) -> bool:
        """Whether it has ended."""


class Ended:
    """The ticket of what ended before its call returned."""

    def query(self) -> bool:
        """True."""
        return True


class HostState:
    """`blocks` blocks of host memory beside a device state.

    A page takes one block, the state of a slot `state_blocks` of them, anywhere. Which block holds what is the
    caller's knowledge. One thread calls.

    Raises:
        MemoryPlanError: the driver does not pin so much memory.
    """

    def __init__(self, state: DeviceState, blocks: int) -> None:
        self.blocks = blocks
        self.state_blocks = -(-state.bytes_per_slot // state.kv_bytes_per_page)
        self._state = state
        self._memory = torch.empty(blocks, state.kv_bytes_per_page, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(state.device) if state.device.type == "cuda" else None
        self._pinned = False
        if self._stream is not None:
            self._pin()

    def _pin(self) -> None:
        """Let the device read and write the memory by itself. By hand: torch would round it up to a power of two."""
        with torch.cuda.device(self._state.device):
            code = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self.nbytes, 0))
        if code:
            raise MemoryPlanError(
                f"the driver refused to pin {self.nbytes / 1e9:.1f} GB of host memory for the prefix cache (error "
                f"{code}): lower host_cache_gb, raise the limit of locked memory (ulimit -l), or free host memory"
            )
        self._pinned = True

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self._memory.numel()

    def free(self) -> None:
        """Give the memory back. Nothing may be copying."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False
        self._memory = torch.empty(0, self._memory.shape[1], dtype=torch.uint8)

    # both ways

    def store(
        self, slot: int, slot_blocks: Sequence[int], pages: Sequence[int], page_blocks: Sequence[int], carry: Tensor
    ) -> tuple[Tensor, Ticket]:
        """Copy a slot's state, pages and a hidden row to the host.

        Args:
            slot, slot_blocks: from where, to `state_blocks` blocks.
            pages, page_blocks: from where, to as many blocks.
            carry: a tensor on the device.

        Returns:
            The row on the host, and what tells when all of it is there.
        """
        with self._beside():
            for piece, block, start in self._pieces(slot, slot_blocks):
                self._memory[block, start : start + piece.numel()].copy_(piece, non_blocking=True)
            for i in range(0, len(pages), GROUP):
                buffer = self._gather(pages[i : i + GROUP])
                for at, first, count in _runs(page_blocks[i : i + GROUP]):
                    self._memory[first : first + count].copy_(buffer[at : at + count], non_blocking=True)
            kept = torch.empty(carry.shape, dtype=carry.dtype, pin_memory=self._stream is not None)
            kept.copy_(carry, non_blocking=True)
            ticket = self._ticket()
        return kept, ticket

    def restore(
        self, slot_blocks: Sequence[int], slot: int, page_blocks: Sequence[int], pages: Sequence[int], carry: Tensor
    ) -> Tensor:
        """The way back, into any slot and pages; returns the row on the device."""
        with self._beside():
            for piece, block, start in self._pieces(slot, slot_blocks):
                piece.copy_(self._memory[block, start : start + piece.numel()], non_blocking=True)
            for i in range(0, len(pages), GROUP):
                buffer = self._buffer(len(pages[i : i + GROUP]))
                for at, first, count in _runs(page_blocks[i : i + GROUP]):
                    buffer[at : at + count].copy_(self._memory[first : first + count], non_blocking=True)
                self._scatter(buffer, pages[i : i + GROUP])
        return carry.to(self._state.device, non_blocking=True)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """The side stream: behind what was launched so far, and before what is launched later."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._state.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def _ticket(self) -> Ticket:
        if self._stream is None:
            return Ended()
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _pieces(self, slot: int, blocks: Sequence[int]) -> Iterator[tuple[Tensor, int, int]]:
        """The bytes of a slot on the device, piece by piece, with the block and the offset in it where each goes."""
        size, at = self._memory.shape[1], 0
        for part in self._state.slot_parts(slot):
            data, done = part.reshape(-1).view(torch.uint8), 0
            while done < data.numel():
                start = at % size
                count = min(data.numel() - done, size - start)
                yield data[done : done + count], blocks[at // size], start
                done, at = done + count, at + count

    def _buffer(self, pages: int) -> Tensor:
        return torch.empty(pages, self._memory.shape[1], dtype=torch.uint8, device=self._state.device)

    def _index(self, pages: Sequence[int]) -> Tensor:
        index = torch.tensor(pages, dtype=torch.int64)
        return index if self._stream is None else index.pin_memory().to(self._state.device, non_blocking=True)

    def _gather(self, pages: Sequence[int]) -> Tensor:
        """The bytes of pages `[n, block]` in one buffer: codes of all layers, then scales."""
        buffer, index, at = self._buffer(len(pages)), self._index(pages), 0
        for tensor in self._state.page_tensors:
            data = tensor[:, :, :, index].movedim(3, 0).reshape(len(pages), -1).view(torch.uint8)
            buffer[:, at : at + data.shape[1]] = data
            at += data.shape[1]
        return buffer

    def _scatter(self, buffer: Tensor, pages: Sequence[int]) -> None:
        """The inverse of `_gather`."""
        index, at = self._index(pages), 0
        for tensor in self._state.page_tensors:
            shape = (*tensor.shape[:3], *tensor.shape[4:])
            count = math.prod(shape) * tensor.itemsize
            data = buffer[:, at : at + count].contiguous().view(tensor.dtype).view(len(pages), *shape)
            tensor[:, :, :, index] = data.movedim(0, 3)
            at += count


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches of neighbouring blocks: where each begins in the list, its first block, how many."""
    at = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield at, blocks[at], i - at
            at = i
