"""Host memory for values that units outside of loops offload: slots of a few large arrays.

On a TPU a copy to the host and back is undone or left exposed, however it is tied with barriers
(``benchmarks/xla/transfers.py``). Loops do better, because what they offload are slices of one host
array, written and read at an index that is computed. Here values outside of loops get the same:
those of one shape share a host array, each is written to its slot, and is read from it at an index
that depends on a value of the backward pass. The read cannot come before that value, which no pass
of the compiler can take back.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdelta._jax import Var

_PARTS = 2
"""Slots of a value that is alone in its shape: an array of one slot would be no array to XLA."""


_ROW, _COLUMN = 128, 32
"""Elements in a row, and most elements in a column, of the tiles that TPUs store arrays in."""


class Stacks:
    """Host arrays, and the slots that values have in them.

    Attributes:
        slots: From each value to its array and the first of its slots there.
    """

    def __init__(self, units: Iterable[Sequence[Var]]):
        shapes: dict[tuple[Any, ...], list[Var]] = defaultdict(list)
        for values in units:
            seen: Counter[tuple[Any, ...]] = Counter()
            for v in values:
                kind = v.aval.shape, v.aval.dtype
                shapes[*kind, seen[kind]].append(v)
                seen[kind] += 1
        self.slots: dict[Var, tuple[int, int]] = {}
        self._zero: Any = jnp.int32(0)
        self._parts: list[int] = []
        self._arrays: list[Any] = []
        for (shape, dtype, _), members in shapes.items():
            parts = 1 if len(members) > 1 else _PARTS
            if parts > 1 and (not shape or shape[0] % parts):
                continue
            self.slots.update((v, (len(self._arrays), i * parts)) for i, v in enumerate(members))
            slot = (shape[0] // parts, *shape[1:]) if parts > 1 else shape
            array = jnp.zeros((len(members) * parts, *_packed(slot)), dtype)
            self._parts.append(parts)
            self._arrays.append(jax.device_put(array, jax.memory.Space.Host))

    def write(self, v: Var, value: Any) -> None:
        """Copy the value of ``v`` from the device to its slot."""
        index, slot = self.slots[v]
        for part in jnp.split(value, self._parts[index]) if self._parts[index] > 1 else [value]:
            part = lax.reshape(part, _packed(part.shape))
            away = jax.device_put(part, jax.memory.Space.Host)[None]
            self._arrays[index] = lax.dynamic_update_slice_in_dim(
                self._arrays[index], away, slot, axis=0
            )
            slot += 1

    def tie(self, values: Iterable[Var], other: Any) -> Any:
        """The ``other`` value, not to be used before those have been written."""
        indices = sorted({self.slots[v][0] for v in values})
        other, arrays = lax.optimization_barrier((other, [self._arrays[i] for i in indices]))
        for i, array in zip(indices, arrays, strict=True):
            self._arrays[i] = array
        return other

    def wait(self, values: Iterable[Any]) -> None:
        """Let no later fetch start before these values are there."""
        zeros = functools.reduce(lax.add, map(_zero, values), self._zero)
        self._zero = lax.optimization_barrier(zeros)  # computed once, not in every reader

    def read(self, v: Var) -> Any:
        """Fetch the value of ``v``, after what was fetched before it."""
        index, slot = self.slots[v]
        parts: list[Any] = []
        for i in range(slot, slot + self._parts[index]):
            away = lax.dynamic_index_in_dim(self._arrays[index], self._zero + i, keepdims=False)
            parts.append(jax.device_put(away, jax.memory.Space.Device))
            self.wait(parts[-1:])
        whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return lax.reshape(whole, v.aval.shape)


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its last axes merged, where they would fill a row of tiles by half or less.

    Heads of 64 would be stored, and cross the link, as rows of 128.
    """
    row, axis = 1, len(shape)
    while axis and 2 * row <= _ROW:
        axis -= 1
        row *= shape[axis]
    whole = axis and shape[axis - 1] % _COLUMN == 0  # else tiles cannot be cut into slots
    return (*shape[:axis], row) if whole else shape


def _zero(value: Any) -> Any:
    """Zero, though the compiler cannot know: whether an element is greater than infinity."""
    corner = lax.slice(value, (0,) * value.ndim, (1,) * value.ndim)
    return (lax.reshape(corner, ()) > jnp.inf).astype(jnp.int32)
