"""How fast a directory takes tensors and gives them back."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jdelta._src.spill.library import Key
from jdelta._src.spill.options import Spill
from jdelta._src.spill.store import Store

TENSOR = 8 << 20
"""Bytes of one tensor of the measurement."""

ALIGNMENT = 64
"""The addresses of XLA's tensors on a CPU are multiples of this."""

SECONDS = 0.2
"""About how long each direction is measured."""

MOST = 32
"""Most tensors that are written."""


@dataclass(frozen=True)
class SpillRates:
    """Measured rates of a directory.

    Attributes:
        write: Bytes a second from memory to the device.
        read: Bytes a second from the device to memory.
    """

    write: float
    read: float


_known: dict[Spill, SpillRates] = {}
"""What was measured last."""


def rates_of(spill: Spill, *, remeasure: bool = False) -> SpillRates:
    """The rates of a directory, from tensors written and read as a step does.

    Takes less than a second, once per process.

    Args:
        spill: The directory.
        remeasure: Whether to measure although it is known, for all who ask later.

    Raises:
        SpillError: The directory cannot be used, or fails.
    """
    if remeasure or spill not in _known:
        _known[spill] = _measure(spill)
    return _known[spill]


def _measure(spill: Spill) -> SpillRates:
    """Measures them, with a store of its own."""
    limit = MOST * TENSOR if spill.limit_bytes is None else spill.limit_bytes
    data = _tensor()
    store = Store(replace(spill, pool=4 * TENSOR))
    try:
        # A step writes where it has written before. The first round finds pages and parts of a file
        # that the system has still to find memory for, which may take longer than to write them.
        _, many = _round(store, data, max(1, min(MOST, limit // TENSOR)))
        rates, _ = _round(store, data, many)
        return rates
    finally:
        store.close()


def _tensor() -> np.ndarray[Any, Any]:
    """A tensor that begins where XLA's do: how fast one is copied depends on its address."""
    room = np.arange(TENSOR + ALIGNMENT, dtype=np.uint8)
    return room[-room.ctypes.data % ALIGNMENT :][:TENSOR]


def _round(store: Store, data: np.ndarray[Any, Any], most: int) -> tuple[SpillRates, int]:
    """Rates of writing and of reading at most so many tensors, and how many were written."""
    start, many = time.perf_counter(), 0
    while many < most and time.perf_counter() - start < SECONDS:
        store.put(Key(0, 0, 0, many), data)
        many += 1
    store.settle()  # and nothing of it is left in memory
    written = time.perf_counter()
    back = 0
    while back < many and time.perf_counter() - written < SECONDS:
        back += 1
        store.get(Key(0, 0, 0, many - back), data)
    end = time.perf_counter()
    rates = SpillRates(many * TENSOR / (written - start), back * TENSOR / (end - written))
    for row in range(many - back):
        store.get(Key(0, 0, 0, row), data)
    return rates, many
