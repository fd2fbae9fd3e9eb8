"""Devices written in Python, and how native code calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

TRANSFER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
)
"""``(offset, data, bytes, message, size) -> 0, an error number, or -1 and a message``."""


@runtime_checkable
class Adapter(Protocol):
    """What tensors can be written to. Several threads call it at once."""

    def write(self, offset: int, data: memoryview) -> None:
        """Keeps ``data``, whose memory is only valid during the call, for ``offset``."""
        ...

    def read(self, offset: int, data: memoryview) -> None:
        """Fills ``data`` with what was written to ``offset``."""
        ...


def transfer(method: Callable[[int, memoryview], None]) -> Any:
    """A C function that calls ``method``; what it raises becomes the step's error."""

    def call(offset: int, data: int, size: int, message: int, room: int) -> int:
        try:
            memory = (ctypes.c_char * size).from_address(data)
            method(offset, memoryview(memory).cast("B"))
        except OSError as error:
            if error.errno:
                return error.errno
            return _say(error, message, room)
        except Exception as error:
            return _say(error, message, room)
        return 0

    return TRANSFER(call)


def _say(error: Exception, message: int, room: int) -> int:
    text = f"{type(error).__name__}: {error}".encode()[: room - 1] + b"\0"
    ctypes.memmove(message, text, len(text))
    return -1
