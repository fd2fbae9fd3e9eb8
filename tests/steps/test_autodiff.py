"""Every derivative of functions with regions and of planned steps equals that of plain ones."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdelta
from jdelta import Decision, OffloadError
from jdelta._src.backends.target import resolve
from jdelta._src.passes.emit import Step
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.items import items_of
from jdelta._src.residuals.pins import Pins
from jdelta._src.residuals.residual import residuals
from jdelta._src.search.history import History
from jdelta._src.search.search import Search
from jdelta._src.solver import Knapsack
from tests.crossed import crossed
from tests.planning import decided, under
from tests.random_arrays import normal
from tests.rules import bell, soft
from tests.stacks import scanned, unrolled

WIDTH, ROWS = 4, 3
W = jnp.asarray(0.4 * normal(0, 2, WIDTH, WIDTH))
X = jnp.asarray(normal(1, ROWS, WIDTH))
V = jnp.asarray(normal(2, *W.shape))


def unit(w, x):
    h = soft(jnp.tanh(x @ w))
    return x + jax.nn.softmax(h) * jnp.sin(h @ w)


def with_custom_vjp(w, x):
    return bell(unit(w, x))


def assert_close(got, expected, rtol=1e-4):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(abs(b).max()))


def reverse_over_reverse(f, w):
    return jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), V))(w)


def vjp(f, w):
    y, pull = jax.vjp(f, w)
    return pull(2.0 * y)


FORWARD = {
    "jvp": lambda f, w: jax.jvp(f, (w,), (V,)),
    "linearize": lambda f, w: jax.linearize(f, w)[1](V),
    "jacfwd": lambda f, w: jax.jacfwd(f)(w),
    "forward over reverse": lambda f, w: jax.jvp(jax.grad(f), (w,), (V,)),
}
REVERSE = {
    "vjp": vjp,
    "jacrev": lambda f, w: jax.jacrev(f)(w),
    "reverse over reverse": reverse_over_reverse,
    "reverse over forward": lambda f, w: jax.grad(lambda w: jax.jvp(f, (w,), (V,))[1])(w),
    "hessian": lambda f, w: jax.hessian(f)(w),
    "third": lambda f, w: jax.grad(lambda w: jnp.vdot(reverse_over_reverse(f, w), V))(w),
    "vmap of grad": lambda f, w: jax.vmap(jax.grad(f))(jnp.stack([w, V])),
    "grad of vmap": lambda f, w: jax.grad(lambda w: jax.vmap(f)(jnp.stack([w, w * V])).sum())(w),
}
TRANSFORMS = {**FORWARD, **REVERSE}
TWICE_REVERSE = {"reverse over reverse", "third"}
"""JAX cannot transpose a copy to the host, so there nothing can be offloaded."""


def mixed(i, r):
    return (Decision.SAVE, Decision.RECOMPUTE, Decision.OFFLOAD if r.shape else Decision.SAVE)[
        i % 3
    ]


def keep(i, r):
    return Decision.SAVE


def drop(i, r):
    return Decision.RECOMPUTE


def on_device(i, r):
    return (Decision.SAVE, Decision.RECOMPUTE)[i % 2]


EAGER = {"jvp", "vjp", "vmap of grad"}
"""Evaluated equation by equation too, as outside of ``jax.jit``."""


def marked(stack, unit):
    return functools.partial(stack, jdelta.remat(unit), x=X)


@functools.cache
def plain(transform, stack, unit=unit):
    """What the function without marks and plans gives."""
    of = functools.partial(TRANSFORMS[transform], functools.partial(stack, unit, x=X))
    return jax.jit(of)(W)


@functools.cache
def plain_step(make):
    return jax.jit(make(unit))(W)


def planned_loss(stack, decide, unit=unit):
    """A loss under decisions for the step that takes its gradient."""
    loss = functools.partial(stack, jdelta.remat(unit), x=X)
    step_trace, _, decisions = decided(jax.grad(loss), decide, W)
    assert set(decisions.values()) - {Decision.RECOMPUTE}
    return under(step_trace, decisions, loss)


@crossed(transform=list(TRANSFORMS), stack=[unrolled, scanned])
def test_functions_with_marks(transform, stack):
    of = functools.partial(TRANSFORMS[transform], marked(stack, unit))
    run = of if transform in EAGER else jax.jit(of)
    assert_close(run(W), plain(transform, stack))


@crossed(transform=list(TRANSFORMS), stack=[scanned, unrolled])
def test_functions_under_a_plan(transform, stack):
    decide = on_device if transform in TWICE_REVERSE else mixed
    run = functools.partial(TRANSFORMS[transform], planned_loss(stack, decide))
    assert_close(jax.jit(run)(W), plain(transform, stack))


@crossed(transform=["vjp", "jacrev", "vmap of grad", "grad of vmap"], stack=[unrolled, scanned])
def test_functions_with_a_custom_vjp_under_a_plan(transform, stack):
    run = planned_loss(stack, mixed, with_custom_vjp)
    got = jax.jit(functools.partial(TRANSFORMS[transform], run))(W)
    assert_close(got, plain(transform, stack, with_custom_vjp))
    with pytest.raises(TypeError, match="forward-mode"):
        FORWARD["jvp"](run, W)


@pytest.mark.parametrize("mark", [jdelta.remat, lambda f: f], ids=["marked", "plain"])
@pytest.mark.parametrize("outside", [True, False])
def test_vmap_over_a_marked_function(mark, outside):
    rows = jax.random.normal(jax.random.key(3), (5, ROWS, WIDTH))
    run = (
        jdelta.remat(jax.vmap(mark(unit), (None, 0)))
        if outside
        else jax.vmap(jdelta.remat(unit), (None, 0))
    )

    def loss(run, w):
        return jnp.sum(run(w[0], rows) ** 2)

    step = jax.grad(functools.partial(loss, run))
    expected = jax.jit(jax.grad(functools.partial(loss, jax.vmap(unit, (None, 0)))))(W)
    assert_close(jax.jit(step)(W), expected)
    step_trace, priced, decisions = decided(step, lambda i, r: Decision.SAVE, W)
    assert len(step_trace.regions) == 1
    assert {r.shape for r in priced if r.producer == "tanh"} == {(5, ROWS, WIDTH)}
    assert_close(jax.jit(under(step_trace, decisions, step))(W), expected)


@pytest.mark.parametrize("mark", [jdelta.remat, lambda f: f], ids=["marked", "found"])
def test_residuals_of_a_vmapped_gradient_count_for_all_examples(mark):
    step = per_example_step(mark(unit))
    _, priced, _ = decided(step, keep, W)
    _, once, _ = decided(jax.grad(lambda w: unrolled(mark(unit), w, X[:1])), keep, W)
    shapes = {r.shape for r in priced if r.producer == "tanh"}
    assert shapes == {(ROWS, 1, WIDTH)}
    if mark is jdelta.remat:  # a unit that is found holds a slice of the weights too, once
        assert sum(r.bytes for r in priced) == ROWS * sum(r.bytes for r in once)


# Steps that use more than one first derivative


def hvp_step(unit):
    """A step of Newton's kind: along its gradient, as far as the curvature says."""

    def step(w):
        loss = functools.partial(unrolled, unit, x=X)
        g, hg = jax.jvp(jax.grad(loss), (w,), (V,))
        return w - 0.1 * g * jnp.vdot(g, g) / (1.0 + jnp.abs(jnp.vdot(V, hg))), hg

    return step


def reverse_hvp_step(unit):
    def step(w):
        loss = functools.partial(unrolled, unit, x=X)
        return reverse_over_reverse(loss, w), jax.grad(loss)(w)

    return step


def per_example_step(unit):
    """Gradients clipped for each example."""

    def step(w):
        def loss(w, x):
            return unrolled(unit, w, x[None])

        grads = jax.vmap(jax.grad(loss), (None, 0))(w, X)
        norms = jnp.sqrt(jnp.sum(grads**2, (1, 2, 3), keepdims=True))
        return w - 0.1 * jnp.mean(grads / jnp.maximum(1.0, norms), 0)

    return step


def penalty_step(unit):
    """The gradient's norm is part of the loss."""

    def step(w):
        def loss(w):
            plain = functools.partial(scanned, unit, x=X)
            return plain(w) + 0.1 * jnp.sum(jax.grad(plain)(w) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value

    return step


def jacobian_step(unit):
    def step(w):
        jacobian = jax.jacrev(lambda w: unit(w, X).sum(0))(w[0])
        return jnp.einsum("iab,icd->abcd", jacobian, jacobian)

    return step


MAKERS = [hvp_step, reverse_hvp_step, per_example_step, penalty_step, jacobian_step]


@crossed(
    make=MAKERS,
    mark={"marked": jdelta.remat, "found": lambda f: f},
    decide=[keep, drop, on_device],
)
def test_steps(make, mark, decide):
    step = make(mark(unit))
    step_trace, _, decisions = decided(step, decide, W)
    assert step_trace.automatic is (mark is not jdelta.remat)
    assert_close(jax.jit(under(step_trace, decisions, step))(W), plain_step(make))


@pytest.mark.parametrize("make", [hvp_step, per_example_step, jacobian_step])
def test_steps_with_offload(make):
    step = make(jdelta.remat(unit))
    step_trace, _, decisions = decided(step, mixed, W)
    assert Decision.OFFLOAD in decisions.values()
    assert_close(jax.jit(under(step_trace, decisions, step))(W), plain_step(make))


@pytest.mark.parametrize("make", MAKERS)
def test_plans_of_steps(make):
    """From end to end, where anything but the plain step comes out."""
    step = make(jdelta.remat(unit))
    plan = jdelta.plan(step, "1MiB", W, pin={"*": "recompute"})
    assert Decision.RECOMPUTE in plan.decisions.values()
    assert_close(plan.jit()(W), plain_step(make))


def searched(step, pin):
    """The search for a plan of a step on a TPU, before it has compiled anything."""
    w = jax.ShapeDtypeStruct((2, 512, 512), jnp.float32)
    target = resolve("tpu:v5e:2x2")
    args = target.abstract((w,))
    step_trace = trace(step, *args)
    priced = [r for region in step_trace.regions for r in residuals(region, target)]
    items = items_of(priced, target, math.inf, Pins(pin))
    planned_step = Step(step, args, (), target, step_trace.aliases)
    return Search(planned_step, items, step_trace, Knapsack(), History())


def large_penalty(w):
    x = jnp.zeros((2048, 512))
    loss = functools.partial(unrolled, jdelta.remat(unit), x=x)
    return jax.grad(lambda w: jnp.sum(jax.grad(loss)(w) ** 2))(w), jax.grad(loss)(w)


def test_nothing_is_offloaded_where_reverse_goes_over_reverse():
    offered = searched(large_penalty, {})
    assert any(item.moves for item in offered.items.problem.items)
    decisions = offered.proposals.keeping(0.0).decisions
    assert Decision.OFFLOAD not in decisions.values()
    with pytest.raises(OffloadError, match="JAX cannot transpose a copy to the host"):
        searched(large_penalty, {"*/sin": "offload"}).proposals.keeping(0.0)


def vmapped_cond(w):
    def loss(w, x):
        y = jax.lax.cond(x.sum() > 1, lambda x: x, functools.partial(jdelta.remat(unit), w), x)
        return jnp.sum(jdelta.remat(unit)(w, y) ** 2)

    return jax.vmap(jax.grad(loss), (None, 0))(w[0], jnp.zeros((4, 2048, 512)))


def test_nothing_is_offloaded_where_vmap_chooses_between_branches():
    decisions = searched(vmapped_cond, {}).proposals.keeping(0.0).decisions
    assert Decision.OFFLOAD not in decisions.values()
    with pytest.raises(OffloadError, match="makes a cond with a marked region in it a choice"):
        searched(vmapped_cond, {"*/cos": "offload"}).proposals.keeping(0.0)
