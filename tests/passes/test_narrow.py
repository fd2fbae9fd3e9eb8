"""Numbers of eight bits that a plan keeps are those that were computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdelta
from jdelta import Decision

TYPES = "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"


def step_of(dtype, in_loop):
    """The backward pass of its units reads a narrow value."""

    @jax.custom_vjp
    def squared(x):
        return forward(x)[0]

    def forward(x):
        narrow = x.astype(dtype)
        return jnp.square(narrow.astype(jnp.float32)), narrow

    squared.defvjp(forward, lambda narrow, g: (2 * g * narrow.astype(jnp.float32),))
    largest = float(jnp.finfo(dtype).max)
    unit = jdelta.remat(lambda x: jnp.sqrt(squared(x * largest)) / largest)

    def loss(x):
        if in_loop:
            return jax.lax.scan(lambda x, _: (unit(x), None), x, None, length=2)[0].sum()
        return unit(unit(x)).sum()

    return lambda x: jax.grad(loss)(x)


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_and_the_smallest_are_kept(dtype, in_loop):
    info = jnp.finfo(dtype)
    x = jnp.array([1.0, 0.9, 0.5, 0.1, 3 * float(info.smallest_subnormal) / float(info.max)])
    step = step_of(dtype, in_loop)
    pin = {"*": "recompute", "*convert_element_type*": "save"}
    plan = jdelta.plan(step, None, x, pin=pin)
    kept = [r for r in plan.residuals if plan.decisions[r.name] is Decision.SAVE]
    assert dtype in {r.dtype for r in kept}
    np.testing.assert_allclose(plan.jit()(x), jax.jit(step)(x), rtol=1e-5)
