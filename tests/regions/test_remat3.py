"""With ``jax_remat3`` on a plan keeps what it keeps with it off, in each of the ways to use one."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config
from jax.ad_checkpoint import checkpoint_name

import jdelta
from jdelta import Decision, PlanMismatchError
from jdelta._src.regions.find import with_regions
from jdelta._src.regions.policy import Policy
from tests.planning import decided, under
from tests.random_arrays import normal
from tests.stacks import STACKS, kept, scanned, unrolled

W = jnp.asarray(0.4 * normal(0, 3, 8, 8))
X = jnp.asarray(normal(1, 4, 8))


def unit(w, x):
    h = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return x + jax.checkpoint(lambda h: jnp.exp(jnp.sin(h)))(h) @ w


@pytest.fixture
def arrays():
    """The weights and the input in 64 bits, in which it does not matter what XLA does first."""
    with jax.enable_x64(True):
        yield jnp.asarray(W, jnp.float64), jnp.asarray(X, jnp.float64)


MARKS = pytest.mark.parametrize("mark", [jdelta.remat, lambda f: f], ids=["marked", "found"])


def mixed(i, r):
    return (Decision.SAVE, Decision.OFFLOAD if r.shape else Decision.SAVE, Decision.RECOMPUTE)[
        i % 3
    ]


@MARKS
@STACKS
def test_plans_keep_the_same(stack, mark, arrays):
    def planned(on):
        with config.remat3(on):
            loss = functools.partial(stack, mark(unit))
            step_trace, _, decisions = decided(jax.grad(loss), mixed, *arrays)
            assert Decision.OFFLOAD in decisions.values()
            run = under(step_trace, decisions, lambda *args: with_regions(loss)(*args))
            grads = jax.jit(under(step_trace, decisions, jax.grad(loss)))(*arrays)
            return decisions, kept(run, *arrays), grads

    (decisions, residuals, grads), off = planned(True), planned(False)
    assert decisions == off[0]
    assert residuals == off[1]
    assert any("Host" in place for _, place, _ in residuals)
    np.testing.assert_allclose(grads, off[2], rtol=1e-12)
    np.testing.assert_allclose(grads, jax.grad(functools.partial(stack, unit))(*arrays), rtol=1e-12)


@MARKS
@STACKS
def test_plans_from_end_to_end(stack, mark, arrays):
    with config.remat3(True):
        loss = functools.partial(stack, mark(unit))
        plan = jdelta.plan(jax.value_and_grad(loss), "1MiB", *arrays, pin={"*sin*": "recompute"})
        assert Decision.RECOMPUTE in plan.decisions.values()
        value, grads = plan.jit()(*arrays)
    expected = jax.value_and_grad(functools.partial(stack, unit))(*arrays)
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    np.testing.assert_allclose(grads, expected[1], rtol=1e-12)


def wave(w, x):
    return jnp.exp(jnp.sin(x @ w)) * 2.0


POLICY = Policy(
    saved=frozenset({"wave/sin"}),
    offloaded=frozenset({"wave/cos"}),
    recomputed=frozenset({"wave/exp"}),
    regions=(("wave", 0),),
)


def loss_of_checkpoints(stack, policy, w, x):
    marked = jdelta.remat(wave)

    def rest(w, x):  # more than the unit alone is in the checkpoint
        return jnp.tanh(marked(w, x)) * 0.1 + x

    return stack(jax.checkpoint(rest, policy=policy), w, x)


@STACKS
@pytest.mark.parametrize(
    "policy", [POLICY, None, jax.checkpoint_policies.save_only_these_names("wave/sin")]
)
def test_a_checkpoint_of_the_users_own_follows_the_policy(stack, policy):
    def own(on):
        with config.remat3(on):
            loss = functools.partial(loss_of_checkpoints, stack, policy)
            kept_values = kept(loss, W, X)
            return jax.jit(jax.grad(loss))(W, X), kept_values

    (grads, residuals), off = own(True), own(False)
    np.testing.assert_allclose(grads, off[0], rtol=1e-5, atol=1e-5 * float(abs(grads).max()))
    per_unit = [r for r in residuals if r[2].startswith("wave/") or "Host" in r[1]]
    assert per_unit == [r for r in off[1] if r[2].startswith("wave/") or "Host" in r[1]]
    if stack is unrolled:
        assert len(per_unit) == (0 if policy is None else 6 if policy is POLICY else 3)


def test_second_derivatives_of_a_checkpoint():
    """In 64 bits: what second derivatives lose in 32 depends on the order of operations."""

    def plain(w, x):
        return jnp.tanh(wave(w, x)) * 0.1 + x

    def product(loss, w):
        return jax.jvp(jax.grad(loss), (w,), (jnp.cos(w),))[1]

    with config.remat3(True), jax.enable_x64(True):
        w, x = jnp.asarray(W, jnp.float64), jnp.asarray(X, jnp.float64)
        expected = product(lambda w: unrolled(plain, w, x), w)
        for stack in (unrolled, scanned):
            actual = product(functools.partial(loss_of_checkpoints, stack, POLICY, x=x), w)
            np.testing.assert_allclose(actual, expected, rtol=1e-10)


def test_a_policy_is_refused_where_its_names_might_be_others():
    """The step differentiates no data, `jax.checkpoint` with `jax_remat3` on cannot know that."""

    def loss(unit, w):
        return jnp.mean(unit(w, X) ** 2)

    marked = jdelta.remat(wave)
    plan = jdelta.plan(
        jax.grad(functools.partial(loss, marked)), "1MiB", W[0], pin={"*": "recompute"}
    )
    expected = jax.grad(functools.partial(loss, wave))(W[0])
    with config.remat3(True):
        by_hand = jax.grad(functools.partial(loss, jax.checkpoint(marked, policy=plan)))
        with pytest.raises(PlanMismatchError, match="asks its policy before that is known"):
            by_hand(W[0])
        followed = jax.grad(functools.partial(loss, jdelta.remat(wave, policy=plan)))
        np.testing.assert_allclose(followed(W[0]), expected, rtol=1e-5)
        np.testing.assert_allclose(plan.jit()(W[0]), expected, rtol=1e-5)


def test_the_flag_of_the_environment():
    """Other tests with the flag on from the start."""
    which = "policy_argument or exactly_the_named or user_names or linen_class_under_scan"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-o",
            "addopts=",
            "tests/regions/test_remat.py",
            "-k",
            which,
        ],
        env={**os.environ, "JAX_REMAT3": "1"},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "6 passed" in done.stdout
