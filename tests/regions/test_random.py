"""Random bits written to memory: barriers where they belong, the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdelta
from jdelta._src import _jax
from jdelta._src.backends.platforms import backend_of
from jdelta._src.program.names import add_names
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.random_bits import with_written_bits
from jdelta._src.regions.region import Session

KEY = jax.random.key(3)
BARRIER = "optimization_barrier"


def equations(program):
    """All equations, those of bodies after the equation that has them."""
    for eqn in _jax.open_jaxpr(program).eqns:
        yield eqn
        for body in _jax.subjaxprs(eqn):
            yield from equations(body)


def barriers(program):
    """Dtype and shape of what each barrier hands on."""
    eqns = [e for e in equations(program) if e.primitive.name == BARRIER]
    return [(str(v.aval.dtype), v.aval.shape) for e in eqns for v in e.outvars]


def written(fun, *args):
    """The staged function, calls inlined and values named as in a region: before and after."""
    staged = jax.make_jaxpr(fun)(*args)
    program = add_names(staged, [False] * len(args), "unit", "unit")
    return program, with_written_bits(program)


def drop(x, key=KEY, rate=0.5):
    mask = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(mask, x / (1 - rate), 0.0)


def test_of_a_mask_only_the_mask_is_written():
    x = jnp.ones((4, 6))
    program, rewritten = written(drop, x)
    assert barriers(program) == []
    assert barriers(rewritten) == [("bool", (4, 6))]
    np.testing.assert_array_equal(_jax.evaluate(rewritten, x)[0], drop(x))


def test_a_rate_that_is_an_argument_changes_nothing():
    x = jnp.ones((4, 6))
    _, rewritten = written(lambda x, rate: drop(x, rate=rate), x, 0.25)
    assert barriers(rewritten) == [("bool", (4, 6))]


def test_a_mask_is_written_before_it_is_broadcast():
    def along_rows(x):
        mask = jax.random.bernoulli(KEY, 0.5, (4, 1))
        return jnp.where(jnp.broadcast_to(mask, x.shape), x, 0.0)

    _, rewritten = written(along_rows, jnp.ones((4, 6)))
    assert [dtype for dtype, _ in barriers(rewritten)] == ["bool"]
    assert np.prod(barriers(rewritten)[0][1]) == 4


def test_what_two_readers_share_is_written_once():
    def twice(x, y):
        mask = jax.random.bernoulli(KEY, 0.5, x.shape)
        return jnp.where(mask, x, 0.0), jnp.where(mask, y, 0.0)

    _, rewritten = written(twice, jnp.ones((4, 6)), jnp.ones((4, 6)))
    assert barriers(rewritten) == [("bool", (4, 6))]


@pytest.mark.parametrize("raw", [False, True])
def test_masks_are_written_and_noise_is_not(raw):
    key = jax.random.PRNGKey(0) if raw else KEY
    x = jnp.ones((4, 6))

    def noisy(x):
        noise = jax.random.uniform(key, x.shape)
        return jnp.where(noise < 0.5, x, 0.0) + noise * x

    _, rewritten = written(noisy, x)
    assert barriers(rewritten) == [("bool", (4, 6))]
    np.testing.assert_array_equal(_jax.evaluate(rewritten, x)[0], noisy(x))


def test_loops_are_rewritten_inside():
    def looped(x):
        def body(x, key):
            return drop(x, key), jnp.sum(x)

        return jax.lax.scan(body, x, jax.random.split(KEY, 3))

    x = jnp.ones((4, 6))
    program, rewritten = written(looped, x)
    assert barriers(program) == []
    assert barriers(rewritten) == [("bool", (4, 6))]
    for value, other in zip(_jax.evaluate(rewritten, x), _jax.evaluate(program, x), strict=True):
        np.testing.assert_array_equal(value, other)


def test_without_random_bits_the_program_stays_as_it_is():
    program, rewritten = written(lambda x: jnp.tanh(x) * 2, jnp.ones(3))
    assert [str(e) for e in equations(rewritten)] == [str(e) for e in equations(program)]


@pytest.mark.parametrize(("platform", "count"), [("tpu", 2), ("cuda", 0), ("cpu", 0)])
def test_plans_for_a_tpu_write_masks_forward_and_recomputed(platform, count):
    @jdelta.remat
    def unit(w, x):
        return drop(jnp.sin(x @ w))

    def step(w, x):
        return jax.grad(lambda w: jnp.sum(unit(w, x) ** 2))(w)

    policy = Policy.of({}, {"unit_0": 0}, backend_of(platform))
    session = Session(policy, {"unit#0": "unit_0"})

    def planned(w, x):
        with _jax.session_context(session):
            return step(w, x)

    args = jnp.eye(6), jnp.ones((4, 6))
    masks = [b for b in barriers(jax.make_jaxpr(planned)(*args)) if b == ("bool", (4, 6))]
    assert len(masks) == count
    np.testing.assert_allclose(jax.jit(planned)(*args), step(*args), rtol=1e-6)
