"""The way to a store where there are no handlers: a TPU calls its host from inside the step.

The device waits while the host takes or gives a value, though not for the files. A callback is told
neither its execution nor its device: executions take turns (``Store.execution``), and the device's
number is computed by the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jdelta._src.errors import SpillError
from jdelta._src.spill.library import READ, WRITE, Key

if TYPE_CHECKING:
    from jdelta._src.spill.store import Store


SPOILED = 0xFF
"""Byte of what could not be read, as in registry.h."""


def write(store: Store, slot: int, x: jax.Array, row: jax.Array, others: bool) -> jax.Array:
    """As a handler does: gives the token for ``x``."""

    def put(x: Any, row: Any, device: Any) -> Any:
        with _errors_put_off(store, others):
            store.put(_key(store, slot, row, device), np.ascontiguousarray(x))
        return np.int32(row)

    with jax.named_scope(scope(WRITE, slot)):
        return io_callback(put, jax.ShapeDtypeStruct((), jnp.int32), x, row, _device())


def read(
    store: Store, slot: int, token: jax.Array, row: jax.Array, result: Any, others: bool
) -> jax.Array:
    """As a handler does: gives the value back, in the shape and dtype of ``result``."""

    def get(token: Any, row: Any, device: Any) -> Any:
        data = np.empty(result.shape, result.dtype)
        with _errors_put_off(store, others):
            store.get(_key(store, slot, row, device), data)
            return data
        return np.full(data.nbytes, SPOILED, np.uint8).view(data.dtype).reshape(data.shape)

    with jax.named_scope(scope(READ, slot)):
        return io_callback(get, result, token, row, _device())


@contextlib.contextmanager
def _errors_put_off(store: Store, others: bool) -> Generator[None]:
    """Leaves an error to the end of the execution where ``others`` may wait for this device."""
    try:
        yield
    except SpillError as error:
        if not others:
            raise
        store.defer(store.executions, error)


def scope(call: str, slot: int | str) -> str:
    """What compiled programs call the operations of a callback; ``slot`` may be a pattern."""
    return f"{call}_{slot}"


def _key(store: Store, slot: int, row: Any, device: Any) -> Key:
    return Key(store.executions, int(device), slot, int(row))


def _device() -> Any:
    """The number of the device in the mesh of the ``shard_map`` around, else zero."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.axis_index(tuple(axes)) if axes else np.int32(0)
