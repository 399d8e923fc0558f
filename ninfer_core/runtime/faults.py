"""What a fault inside the engine becomes for the request that it ended: one of the public errors, without internals."""

from __future__ import annotations

import torch

from ..errors import DeviceFaultError, EngineFailedError, NinferError

_DRIVER = ("CUDA error", "Triton Error [CUDA]")
"""How the messages of the CUDA runtime and of Triton's launcher begin."""


def of_device(error: BaseException) -> bool:
    """Whether the device itself refused: such an error says nothing about the request that met it."""
    return isinstance(error, torch.AcceleratorError) or any(mark in str(error) for mark in _DRIVER)


def public(error: BaseException) -> NinferError:
    """The error to end a request with. What is not one of ours keeps its type's name and is the cause."""
    if isinstance(error, NinferError):
        return error
    if of_device(error):
        return device_fault(error)
    made = EngineFailedError(
        f"a fault inside the engine ended this request ({type(error).__name__}); other requests go on"
    )
    made.__cause__ = error
    return made


def device_fault(error: BaseException) -> DeviceFaultError:
    """What ends the requests that run when the device fails, or the engine must be restarted."""
    made = DeviceFaultError(
        f"the device or the engine failed while this request ran ({type(error).__name__}); the engine restarts itself, "
        "and the request can be sent again"
    )
    made.__cause__ = error
    return made
