"""Host memory for values that regions outside of loops offload: slots of a few large arrays.

On a TPU a copy to the host and back is undone or left exposed, however it is tied with barriers
(``benchmarks/compilers/transfers.py``). Loops do better, because what they offload are slices of
one host array, written and read at an index that is computed. Here values outside of loops get the
same: those of one shape share a host array, each is written to its slot, and is read from it at an
index that depends on a value of the backward pass. The read cannot come before that value, which no
pass of the compiler can take back.

A TPU's scheduler gives a copy the compute that it takes to be enough, and no more. So what can hide
at all goes to several slots: each part then has an instruction to hide behind that is often longer
than the part needs (``benchmarks/compilers/offload.py`` has what this hides). And it ends a fetch
as soon as anything can be done with it, however little: one that another waits for is exposed where
it starts (all but the last of a GPT-2's on a v5p). So they take turns only where memory counts for
more.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdelta._src import _jax
from jdelta._src._jax import Env, Eqn, Var
from jdelta._src._jax.sharding import Spec, parts_of
from jdelta._src.passes.transfer_barriers import Barriers, tie

_UNCUT: Mapping[Var, Spec] = MappingProxyType({})

_MOST_PARTS = 8
"""Slots of a value at most: each takes a few instructions."""

_TOGETHER = 2
"""Slots that are read at once: a long fetch in one go hid 75 % of BERT's queries on a v5e, in two
parts 90 %, in four 88 %; shorter ones hide best in one (a Llama's of two slots). That was while
fetches waited for each other."""

_ROW, _COLUMN = 128, 32
"""Elements in a row, and most elements in a column, of the tiles that TPUs store arrays in."""


class Slots(Barriers):
    """Host arrays, and the slots that values have in them; barriers time what has no slot.

    Args:
        regions: The values that each region fetches.
        specs: How they are cut over devices.
        slot: Bytes per device that a slot had better not exceed.
        in_turn: Whether a fetch waits for the one before it: then fewer are there at once.

    Attributes:
        slots: From each value to its array and the first of its slots there.
    """

    def __init__(
        self,
        regions: Iterable[Sequence[Var]],
        specs: Mapping[Var, Spec] = _UNCUT,
        *,
        slot: float = math.inf,
        in_turn: bool = False,
    ):
        shapes: dict[tuple[Any, ...], list[Var]] = defaultdict(list)
        for values in regions:
            seen: Counter[tuple[Any, ...]] = Counter()
            for v in values:
                kind = v.aval.shape, v.aval.dtype, specs.get(v, ())
                shapes[*kind, seen[kind]].append(v)
                seen[kind] += 1
        self.slots: dict[Var, tuple[int, int]] = {}
        self._in_turn = in_turn
        self._zero: Any = jnp.int32(0)
        self._kinds: list[_Kind] = []
        self._arrays: list[Any] = []
        for (shape, dtype, spec, _), members in shapes.items():
            size = math.prod(shape) * dtype.itemsize / parts_of(spec)
            kind = _kind(shape, spec, alone=len(members) == 1, parts=math.ceil(size / slot))
            if kind is None:
                continue
            parts = kind.parts
            self.slots.update((v, (len(self._arrays), i * parts)) for i, v in enumerate(members))
            array = jnp.zeros((len(members) * parts, *kind.slot), dtype)
            self._kinds.append(kind)
            self._arrays.append(jax.device_put(array, jax.memory.Space.Host))

    def copy(self, eqn: Eqn, env: Env) -> None:
        """Copy a value to its slot, if it has one; then nothing but a fetch reads it."""
        if eqn.outvars[0] in self.slots:
            self._write(eqn.outvars[0], *_jax.read(env, eqn.invars))
            _jax.write(env, eqn, [None])
        else:
            super().copy(eqn, env)

    def end(self, value: Var, hosts: Sequence[Var], env: Env) -> None:
        """End copies to the host by the time that a value is there."""
        stacked = [v for v in hosts if v in self.slots]
        if stacked:
            env[value] = self._tie(stacked, env[value])
        copied = [v for v in hosts if v not in self.slots]
        if copied:
            super().end(value, copied, env)

    def fetch(self, hosts: Sequence[Var], after: Sequence[Var], env: Env) -> dict[Var, Any]:
        """Fetch host values, ``after`` these values are there; those with slots in their parts."""
        if after:
            tie(after, env)
        if self.slots and hosts:
            real = (v for v in after if jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.size)
            self._wait(env[v] for v in real)
        return {
            v: self._read(v) if v in self.slots else jax.device_put(env[v], jax.memory.Space.Device)
            for v in hosts
        }

    def fetched_value(self, v: Var, fetched: Any) -> Any:
        """A fetched value, put together where it is used: there its fetches end."""
        return self._joined(v, fetched) if v in self.slots else fetched

    def _write(self, v: Var, value: Any) -> None:
        """Copy the value of ``v`` from the device to its slot."""
        index, slot = self.slots[v]
        kind = self._kinds[index]
        for part in jnp.split(value, kind.parts, kind.axis) if kind.parts > 1 else [value]:
            part = lax.reshape(part, kind.slot)
            away = jax.device_put(part, jax.memory.Space.Host)[None]
            self._arrays[index] = lax.dynamic_update_slice_in_dim(
                self._arrays[index], away, slot, axis=0
            )
            slot += 1

    def _tie(self, values: Iterable[Var], other: Any) -> Any:
        """The ``other`` value, not to be used before those have been written."""
        indices = sorted({self.slots[v][0] for v in values})
        other, arrays = lax.optimization_barrier((other, [self._arrays[i] for i in indices]))
        for i, array in zip(indices, arrays, strict=True):
            self._arrays[i] = array
        return other

    def _wait(self, values: Iterable[Any]) -> None:
        """Let no later fetch start before these values are there."""
        zeros = functools.reduce(lax.add, map(zero_of, values), self._zero)
        self._zero = lax.optimization_barrier(zeros)  # computed once, not in every reader

    def _read(self, v: Var) -> list[Any]:
        """Fetch the value of ``v``, in the parts that it is read in."""
        index, slot = self.slots[v]
        kind = self._kinds[index]
        parts: list[Any] = []
        for i in range(slot, slot + kind.parts, kind.together):
            away = lax.dynamic_slice_in_dim(self._arrays[index], self._zero + i, kind.together)
            fetched = jax.device_put(away, jax.memory.Space.Device)
            if self._in_turn:
                self._wait([fetched])
            parts.append(lax.reshape(fetched, (kind.together * kind.part[0], *kind.part[1:])))
        return [self._joined(v, parts)] if self._in_turn else parts

    def _joined(self, v: Var, parts: Sequence[Any]) -> Any:
        """The value of ``v``, of its parts."""
        kind = self._kinds[self.slots[v][0]]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, kind.axis)


@dataclass(frozen=True)
class _Kind:
    """How values are put into slots.

    Attributes:
        parts: Slots of one value.
        axis: Where it is split for them.
        together: Slots that are read at once; more than one only if ``axis`` is the first.
        part: Shape of what goes to one slot.
        slot: Shape that it has there.
    """

    parts: int
    axis: int
    together: int
    part: tuple[int, ...]
    slot: tuple[int, ...]

    @classmethod
    def of(
        cls, shape: tuple[int, ...], cut: Sequence[bool], parts: int, axis: int, together: int
    ) -> _Kind:
        """The slots of values of a ``shape`` in so many parts."""
        if parts == 1:
            return cls(1, axis, together, shape, _packed(shape, cut))
        part = (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])
        return cls(parts, axis, together, part, _packed(part, cut))


def _kind(shape: tuple[int, ...], spec: Spec, *, alone: bool, parts: int) -> _Kind | None:
    """The slots for values of a shape; None where there can be none.

    A dimension that is cut over devices is not split: that would send its parts about. An array of
    one slot, or one that is read whole, would be no array to XLA: so a value that is ``alone`` in
    its shape is split, and read slot by slot.
    """
    cut = [bool(axes) for axes in spec] or [False] * len(shape)
    if alone:
        axis = next((i for i, n in enumerate(shape) if n % 2 == 0 and not cut[i]), None)
        return None if axis is None else _Kind.of(shape, cut, 2, axis, together=1)
    count = 1
    while count < min(parts, _MOST_PARTS) and shape[0] % (2 * count) == 0 and not cut[0]:
        count *= 2
    return _Kind.of(shape, cut, count, 0, together=min(_TOGETHER, count))


def _packed(shape: tuple[int, ...], cut: Sequence[bool]) -> tuple[int, ...]:
    """The shape with its last axes merged, where they would fill a row of tiles by half or less.

    Heads of 64 would be stored, and cross the link, as rows of 128. Of merged axes only the first
    may be cut over devices: the others could not stay so.
    """
    row, axis = 1, len(shape)
    while axis and 2 * row <= _ROW and not any(cut[axis:]):
        axis -= 1
        row *= shape[axis]
    may_merge = axis and shape[axis - 1] % _COLUMN == 0  # else tiles cannot be cut into slots
    return (*shape[:axis], row) if may_merge else shape


def zero_of(value: Any) -> Any:
    """Zero, though the compiler cannot know: whether an element is greater than infinity."""
    if _jax.has_explicit_axes(jax.typeof(value)):  # no slice of what is cut
        return (jnp.max(value) > jnp.inf).astype(jnp.int32)
    corner = lax.slice(value, (0,) * value.ndim, (1,) * value.ndim)
    return (lax.reshape(corner, ()) > jnp.inf).astype(jnp.int32)
