"""Traced operations that take a tensor out of memory and bring it back.

The token that ``write`` returns and ``read`` takes is the only link between the two, so that order
is data dependence and no ordered effect is needed. Both must be in one jitted computation: what is
written is known by the execution of the program, the device, ``slot`` and ``row``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdelta._src.errors import SpillError
from jdelta._src.spill import callbacks
from jdelta._src.spill.library import READ, WRITE
from jdelta._src.spill.store import Store


def write(
    store: Store, x: jax.Array, *, slot: int, row: Any = 0, sharding: NamedSharding | None = None
) -> jax.Array:
    """Gives ``x`` to the store; does not wait for the device that it goes to.

    Args:
        store: Where to.
        x: An array of any shape, of a dtype whose elements are whole bytes.
        slot: Number of the spilled name in the plan.
        row: Number of the iteration, traced inside loops; a write's ``(slot, row)`` is its own.
        sharding: How ``x`` lies on several devices, each of which writes its part. Not inside
            ``shard_map``, where ``x`` is a part already.

    Returns:
        The token for :func:`read`, an int32 scalar, on all devices the same.

    Raises:
        SpillError: The dtype cannot be written.
    """
    _check_dtype(x.dtype)
    others = _others(sharding)

    def call(x: jax.Array, row: jax.Array) -> jax.Array:
        if store.by_callback:
            return _like(callbacks.write(store, slot, x, row, others), x)
        write = jax.ffi.ffi_call(WRITE, _result((), jnp.int32, x))
        return write(x, _like(row, x), **_attributes(store, slot, others))

    specs = (_spec(sharding), PartitionSpec())
    return _on_each(call, sharding, specs, PartitionSpec())(x, _scalar(row))


def read(
    store: Store,
    token: jax.Array,
    aval: Any,
    *,
    slot: int,
    row: Any = 0,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """Gets back what was written with the same ``slot`` and ``row``; it can be read once.

    Args:
        store: Where from.
        token: What :func:`write` returned.
        aval: Has the shape and dtype of what was written.
        slot: As at the write.
        row: As at the write.
        sharding: As at the write.
    """
    part = aval
    if sharding is not None:
        part = jax.ShapeDtypeStruct(sharding.shard_shape(aval.shape), aval.dtype)
    others = _others(sharding)

    def call(token: jax.Array, row: jax.Array) -> jax.Array:
        if store.by_callback:
            return _like(callbacks.read(store, slot, token, row, part, others), token)
        read = jax.ffi.ffi_call(READ, _result(part.shape, part.dtype, token))
        return read(token, _like(row, token), **_attributes(store, slot, others))

    specs = (PartitionSpec(), PartitionSpec())
    return _on_each(call, sharding, specs, _spec(sharding))(token, _scalar(row))


def _on_each(
    call: Callable[..., jax.Array], sharding: NamedSharding | None, inputs: Any, output: Any
) -> Callable[..., jax.Array]:
    """``call`` on every device's part: XLA would bring the whole to each for a custom call."""
    if sharding is None:
        return call
    # What tokens hold is the same everywhere, though JAX cannot know it (check_vma).
    return jax.shard_map(
        call, mesh=sharding.mesh, in_specs=inputs, out_specs=output, check_vma=False
    )


def _spec(sharding: NamedSharding | None) -> PartitionSpec:
    return PartitionSpec() if sharding is None else sharding.spec


def _check_dtype(dtype: Any) -> None:
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    if extended or jnp.dtype(dtype).name in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn"):
        raise SpillError(f"spill: elements of {dtype} are not whole bytes; keep or recompute it")


def _scalar(row: Any) -> jax.Array:
    return jnp.asarray(row, jnp.int32)


def _result(shape: Any, dtype: Any, like: Any) -> Any:
    """A result that varies over the axes of a ``shard_map`` over which an operand varies."""
    if not _axes(like):
        return jax.ShapeDtypeStruct(shape, dtype)
    aval: Any = jax.typeof(like)
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=aval.mat)


def _like(x: jax.Array, other: Any) -> jax.Array:
    """The value, varying over the axes of another one too."""
    missing = _axes(other) - _axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def _axes(x: Any) -> frozenset[str]:
    """The axes of a ``shard_map`` over which a value varies, where it checks that."""
    return jax.typeof(x).mat.varying


def _others(sharding: NamedSharding | None) -> bool:
    """Whether devices of this process run the program together, so that none may stop alone.

    With other processes nobody could tell these of an error, and the program had better stop.
    """
    mesh = jax.sharding.get_abstract_mesh() if sharding is None else sharding.mesh
    return mesh.size > 1 and jax.process_count() == 1


def _attributes(store: Store, slot: int, others: bool) -> dict[str, Any]:
    return {"store": np.int64(store.id), "slot": np.int64(slot), "others": others}
