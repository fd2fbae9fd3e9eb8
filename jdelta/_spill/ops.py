"""Traced operations that take a tensor out of memory and bring it back.

The token that ``write`` returns and ``read`` takes is the only link between the two, so that order
is data dependence and no ordered effect is needed. Both must be in one jitted computation: what is
written is known by the execution of the program, the device, ``slot`` and ``row``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdelta._spill.store import Store


def write(store: Store, x: jax.Array, *, slot: int, row: Any = 0) -> jax.Array:
    """Gives ``x`` to the store; does not wait for the device that it goes to.

    Args:
        store: Where to.
        x: An array of any shape.
        slot: Number of the spilled name in the plan.
        row: Number of the iteration, traced inside loops; a write's ``(slot, row)`` is its own.

    Returns:
        The token for :func:`read`, an int32 scalar.
    """
    call = jax.ffi.ffi_call("jdelta_spill_write", _result((), jnp.int32, x))
    return call(x, _scalar(row, x), **_attributes(store, slot))


def read(store: Store, token: jax.Array, aval: Any, *, slot: int, row: Any = 0) -> jax.Array:
    """Gets back what was written with the same ``slot`` and ``row``; it can be read once.

    Args:
        store: Where from.
        token: What :func:`write` returned.
        aval: Has the shape and dtype of what was written.
        slot: As at the write.
        row: As at the write.
    """
    call = jax.ffi.ffi_call("jdelta_spill_read", _result(aval.shape, aval.dtype, token))
    return call(token, _scalar(row, token), **_attributes(store, slot))


def prefetch(store: Store, token: jax.Array, *, slot: int, row: Any = 0) -> jax.Array:
    """Begins to bring back what will be read, if there is memory for it; returns that token.

    The store does so by itself for what was written before what is read, so this is only of use
    where reads come in another order.
    """
    call = jax.ffi.ffi_call("jdelta_spill_prefetch", _result((), jnp.int32, token))
    return call(token, _scalar(row, token), **_attributes(store, slot))


def _result(shape: Any, dtype: Any, like: Any) -> Any:
    """A result that varies over the axes of a ``shard_map`` that an operand varies over."""
    if not _axes(like):
        return jax.ShapeDtypeStruct(shape, dtype)
    aval: Any = jax.typeof(like)
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=aval.mat)


def _scalar(row: Any, like: Any) -> jax.Array:
    row = jnp.asarray(row, jnp.int32)
    missing = _axes(like) - _axes(row)
    return jax.lax.pcast(row, tuple(sorted(missing)), to="varying") if missing else row


def _axes(x: Any) -> frozenset[str]:
    """The axes of a ``shard_map`` that checks them over which a value varies."""
    return jax.typeof(x).mat.varying


def _attributes(store: Store, slot: int) -> dict[str, Any]:
    return {"store": np.int64(store.id), "slot": np.int64(slot)}
