"""The garbage collector is as it was before, whatever happens while a step is planned."""

import gc

import jax
import jax.numpy as jnp
import pytest

import jdelta
from jdelta._src.api.collector import SELDOM, collecting_seldom

OFTEN = (700, 10, 10)


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(*OFTEN)
    yield
    gc.set_threshold(*before)


def test_it_looks_less_often_until_the_last_planning_ends():
    with collecting_seldom():
        with collecting_seldom():
            assert gc.get_threshold() == SELDOM
        assert gc.get_threshold() == SELDOM
    assert gc.get_threshold() == OFTEN


def test_it_is_as_before_after_an_error():
    with pytest.raises(KeyError), collecting_seldom():
        raise KeyError
    assert gc.get_threshold() == OFTEN


@pytest.mark.parametrize("own", [(0, 10, 10), (10**6, 10, 10)])
def test_one_that_is_off_or_looks_less_often_stays_so(own):
    gc.set_threshold(*own)
    with collecting_seldom():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_a_step_is_planned_so():
    seen = []

    def step(w, x):
        seen.append(gc.get_threshold())
        return jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)

    jdelta.plan(step, "1MiB", jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert set(seen) == {SELDOM}
    assert gc.get_threshold() == OFTEN
