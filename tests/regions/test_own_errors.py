"""Errors of the user's own step, as `jax.jit` raises them."""

import traceback

import jax
import jax.numpy as jnp
import pytest

import jdelta

WAYS = {
    "plan": lambda step, *args: jdelta.plan(step, "1GiB", *args),
    "jit": lambda step, *args: jdelta.jit(step, budget="1GiB")(*args),
    "explain_oom": jdelta.explain_oom,
}


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_the_step_is_told_once(way):
    def step(w, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        raise RuntimeError("a fault of the step's own")
        return grads

    with pytest.raises(RuntimeError, match="a fault of the step's own") as raised:
        WAYS[way](step, jnp.ones((4, 4)), jnp.ones((2, 4)))
    told = "".join(traceback.format_exception(raised.value))
    assert told.count("RuntimeError: a fault") == 1
    assert "During handling" not in told
