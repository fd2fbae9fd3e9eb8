"""A trial of the handlers on a GPU: a step that spills, beside the same step that does not.

No GPU was at hand when its handlers were written. What they do there is compared once in each
process, before a step of the user's relies on it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdelta._src.errors import SpillError
from jdelta._src.spill.errors import named_errors
from jdelta._src.spill.ops import read, write
from jdelta._src.spill.options import Spill
from jdelta._src.spill.store import Store

ROWS = 5
SHAPE = (2304, 1024)
"""Nine MiB, of which the pool holds less than one row."""


@functools.cache
def try_out(device: Any) -> None:
    """Run a loop that spills on a ``jax.Device``, and compare.

    Raises:
        SpillError: The result is not the same, or the handlers fail.
    """
    store = Store(Spill("/", pool="8MiB", adapter="memory"))
    x = jax.device_put(np.linspace(-1, 1, np.prod(SHAPE), dtype=np.float32).reshape(SHAPE), device)
    step = jax.jit(_step, static_argnums=0)
    try:
        with named_errors():
            got = [jax.block_until_ready(step(store, x)) for _ in range(2)]
    finally:
        store.close()
    if not np.array_equal(got, [step(None, x)] * 2):
        raise SpillError(
            f"values that are spilled on {device} do not come back as they were: please report "
            "this, with the versions of JAX and of the driver, and plan without spill="
        )


def _step(store: Store | None, x: jax.Array) -> jax.Array:
    """Scales by what it has computed on the way, the last first."""

    def forward(x: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = jnp.sin(x * (row + 1))
        return kept + x, write(store, kept, slot=0, row=row) if store else kept

    def backward(y: jax.Array, row_kept: Any) -> tuple[jax.Array, None]:
        row, kept = row_kept
        values = read(store, kept, jax.typeof(y), slot=0, row=row) if store else kept
        return y * 0.5 + values, None

    rows = jnp.arange(ROWS)
    y, kept = jax.lax.scan(forward, x, rows)
    return jax.lax.scan(backward, y, (rows, kept), reverse=True)[0]
