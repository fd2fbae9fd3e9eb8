"""The run-time store of one planned step."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jdelta._src.errors import SpillError
from jdelta._src.spill.adapter import Adapter, transfer
from jdelta._src.spill.directory import Directory
from jdelta._src.spill.kvikio import KvikIOAdapter
from jdelta._src.spill.library import Key, OpenOptions, library
from jdelta._src.spill.options import BLOCK, Spill

_MESSAGE = 2000
_held_for_ever: list[object] = []
"""What native threads that do not end may still call."""


@dataclass(frozen=True)
class Counters:
    """What a store has done, in bytes where nothing else is said; fields as in store.h.

    When nothing goes on and no step has failed, ``planned == written + forwarded``.

    Attributes:
        planned: Given to the store.
        written: Written to the device.
        forwarded: Given back from memory and never written: the queued write was cancelled.
        held: Given back from memory although it was written, too.
        read: Read from the device.
        ahead: Of ``read``, before the step asked for it.
        dropped: Of failed or abandoned steps.
        waits: Number of writes that had to wait for memory of the pool.
        late: Number of reads that had to wait for the device.
        failures: Number of failed steps.
        stored: On the device now, or reserved there.
        most_stored: Most that ever was.
        writing: Nanoseconds in which the device was writing.
        reading: Nanoseconds in which the device was reading.
        pool: Memory of the pool now; it does not shrink before the store is closed.
        entries: Number of tensors in the store now.
    """

    planned: int
    written: int
    forwarded: int
    held: int
    read: int
    ahead: int
    dropped: int
    waits: int
    late: int
    failures: int
    stored: int
    most_stored: int
    writing: int
    reading: int
    pool: int
    entries: int


class Store:
    """Holds what one planned step spills, from the forward pass to the backward pass.

    Attributes:
        spill: How it was asked for.
        id: Number by which compiled programs of this process know it.
        by_callback: Whether programs call the host to reach it, for want of handlers.
        executions: Number of executions so far that took turns.
    """

    def __init__(self, spill: Spill, *, by_callback: bool = False):
        """Opens a store, and removes what killed processes have left in its directory.

        Args:
            spill: How it is asked for.
            by_callback: Whether programs call the host to reach it.

        Raises:
            SpillError: The directory cannot be used, or the native part is missing.
        """
        native = library()
        self.spill = spill
        self.by_callback = by_callback
        self.executions = 0
        self._turn = threading.Lock()
        options = OpenOptions(
            os.fsencode(spill.path),
            -1 if spill.limit_bytes is None else spill.limit_bytes,
            max(1, spill.pool_bytes // BLOCK),
            spill.checksum,
            spill.timeout,
            spill.write_rate or 0.0,
            spill.read_rate or 0.0,
            -1,
        )
        release = _connect(spill, options)
        self.id: int = native.jdelta_spill_open(options)
        self._finalizer = weakref.finalize(self, _close, native, self.id, os.getpid(), release)

    def close(self) -> None:
        """Ends it and removes its files; programs that use it fail from now on."""
        self._finalizer()

    @contextlib.contextmanager
    def execution(self) -> Generator[None]:
        """Goes around an execution till its results are there; those with callbacks take turns.

        Raises:
            SpillError: It failed on one of several devices, so its results are worth nothing. Of
                executions at the same time it cannot be known which one failed: all raise.
        """
        with self._turn if self.by_callback else contextlib.nullcontext():
            self.executions += self.by_callback
            before, _ = self._deferred()
            yield
            after, cause = self._deferred()
        if after < 0 or after != before:
            raise SpillError(cause)

    def defer(self, run: int, error: SpillError) -> None:
        """Fails an execution that goes on all the same; ``execution`` raises it at the end."""
        library().jdelta_spill_defer(self.id, run, str(error).encode())

    def _deferred(self) -> tuple[int, str]:
        """How often an error was put off, and the last one; negative if the store is closed."""
        cause = ctypes.create_string_buffer(_MESSAGE)
        number = library().jdelta_spill_deferred(self.id, cause, _MESSAGE)
        return number, cause.value.decode(errors="replace")

    def counters(self) -> Counters:
        """What it has done up to now."""
        values = np.zeros(len(Counters.__dataclass_fields__), np.int64)
        library().jdelta_spill_counters(self.id, values.ctypes.data)
        return Counters(*values.tolist())

    def settle(self) -> None:
        """Returns when all is written, and then forgets what memory still has of it."""
        library().jdelta_spill_settle(self.id)

    def put(self, key: Key, data: np.ndarray[Any, Any]) -> None:
        """Writes an array from outside of a computation.

        Raises:
            SpillError: It failed.
        """
        _move(library().jdelta_spill_put, self.id, key, data)

    def get(self, key: Key, data: np.ndarray[Any, Any]) -> None:
        """Reads into an array what :meth:`put` wrote with the same key.

        Raises:
            SpillError: It failed.
        """
        _move(library().jdelta_spill_get, self.id, key, data)


def _connect(spill: Spill, options: OpenOptions) -> Callable[[bool], None]:
    """Sets the device of ``options``; returns what to do once native code has ended, or not."""
    if spill.adapter == "memory":
        return lambda ended: None
    if isinstance(spill.adapter, Adapter):
        return _connect_foreign(spill.adapter, options)
    directory = Directory(spill.path)
    if spill.adapter == "disk":
        options.file = os.dup(directory.descriptor)
        return lambda ended: directory.remove()
    try:
        adapter = KvikIOAdapter(directory.file)
    except BaseException:
        directory.remove()
        raise
    release = _connect_foreign(adapter, options)

    def remove(ended: bool) -> None:
        release(ended)
        if ended:
            adapter.close()
        directory.remove()

    return remove


def _connect_foreign(adapter: Adapter, options: OpenOptions) -> Callable[[bool], None]:
    calls = [transfer(adapter.write), transfer(adapter.read)]
    options.write, options.read = calls

    def release(ended: bool) -> None:
        if not ended:
            _held_for_ever.append(calls)

    return release


def _close(native: ctypes.CDLL, store: int, process: int, release: Callable[[bool], None]) -> None:
    """Does nothing in a process that was forked: threads and files are the other's."""
    if os.getpid() == process:
        release(bool(native.jdelta_spill_close(store)))


def _move(call: Any, store: int, key: Key, data: np.ndarray[Any, Any]) -> None:
    message = ctypes.create_string_buffer(_MESSAGE)
    if call(store, ctypes.byref(key), data.ctypes.data, data.nbytes, message, _MESSAGE):
        raise SpillError(message.value.decode(errors="replace"))
