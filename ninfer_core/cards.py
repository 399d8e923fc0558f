"""What the graphics driver says about the cards of this machine: name and memory. No torch, no context on the card."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """One card; `total` and `free` in bytes."""

    name: str
    total: int
    free: int


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def cards() -> list[Card]:
    """The NVIDIA cards the driver shows; none where there is no driver."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return [card for card in (_card(nvml, index) for index in range(count.value)) if card is not None]
    finally:
        nvml.nvmlShutdown()


def _card(nvml: ctypes.CDLL, index: int) -> Card | None:
    handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    failed = failed or nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    return None if failed else Card(name.value.decode(errors="replace"), memory.total, memory.free)
