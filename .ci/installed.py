"""Run where only the wheel is installed: it imports, plans, trains, and spills if it can."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import jdelta

PACKAGE = Path(jdelta.__file__).parent
assert "site-packages" in PACKAGE.parts, f"{PACKAGE} is a checkout"
assert not list(PACKAGE.rglob("*.cc")), "the wheel has C++ sources"


def step(ws, x):
    def loss(ws):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(ws)
    return ws - 0.1 * grads, value


ws, x = jnp.ones((6, 64, 64)) / 64, jnp.ones((4096, 64))
expected = jax.jit(step)(ws, x)
plan = jdelta.plan(step, 0.6, ws, x)
print(plan)
assert plan.compiled_peak <= plan.budget
assert jnp.allclose(plan.jit()(ws, x)[1], expected[1])

with tempfile.TemporaryDirectory() as folder:
    try:
        spilling = jdelta.plan(step, None, ws, x, spill=folder, pin={"*/cos": "spill"})
    except jdelta.SpillError as error:  # built without a compiler
        print(error)
        if "C++ compiler" not in str(error):
            raise
    else:
        assert jnp.allclose(spilling.jit()(ws, x)[1], expected[1])
        print(f"{spilling.spill_bytes} bytes go to files")
