"""What differs between versions of JAX, for tests that name values or compare with JAX's own."""

import jax
import jax.numpy as jnp
import pytest

READ_OF_TANH = (
    ("one_minus_square",)
    if "one_minus_square" in str(jax.make_jaxpr(jax.grad(jnp.tanh))(0.0))
    else ("tanh", "sub")
)
"""What the derivative of `tanh` reads, by the last parts of the names."""

fails_in_jax_0_10_with_remat3 = pytest.mark.xfail(
    jax.config.jax_remat3 and jax.__version_info__ < (0, 11),
    reason="with jax_remat3 on, jax.checkpoint of jax 0.10 drops policies that offload, needs more "
    "memory, and cannot differentiate a step with a scan",
    strict=True,
)
