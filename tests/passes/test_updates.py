"""Weight updates inside the backward loops: the same numbers, and no stack of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdelta
from jdelta._src import _jax
from jdelta._src.backends.target import published
from jdelta._src.passes.program import Context, Program
from jdelta._src.passes.weight_updates import with_updates_in_loops

LAYERS, WIDTH = 8, 64

GAINS = jax.__version_info__ >= (0, 12)
"""XLA:CPU of jax 0.10 copies stacks that a loop carries: there the peak rises, and a plan must not
use it. XLA for TPUs and GPUs does not (``benchmarks/order/updates.py``)."""

gains = pytest.mark.skipif(not GAINS, reason="XLA:CPU of jax 0.10 copies carried stacks")

OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sgd": optax.sgd(0.1),
    "schedule": optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    "clipped by value": optax.chain(optax.clip(1e-3), optax.adam(1e-2)),
}


def make(optimizer, width=WIDTH, batch=16):
    """A step over a scanned stack, its state, and a batch."""

    def layer(x, p):
        return x + jnp.tanh(x @ p["in"] + p["bias"]) @ p["out"], None

    def loss(params, data):
        x, _ = jax.lax.scan(layer, data @ params["first"], params["layers"])
        return jnp.mean(jnp.square(x))

    def step(state, data):
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params, data)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "first": jax.random.normal(keys[0], (width, width)) / 8,
        "layers": {
            "in": jax.random.normal(keys[1], (LAYERS, width, 2 * width)) / 8,
            "bias": jnp.zeros((LAYERS, 2 * width)),
            "out": jax.random.normal(keys[2], (LAYERS, 2 * width, width)) / 8,
        },
    }
    return step, (params, optimizer.init(params)), jax.random.normal(keys[3], (batch, width))


def moved(step, *args, donate=True):
    """The step with its updates in its loops; None if there are none to move."""
    traced = jax.jit(step).trace(*args)
    donated = tuple(range(len(jax.tree.leaves(args[0])) if donate else 0))
    target = published("tpu:v5e:2x2")
    context = Context(target.backend, target.rates, donated=donated)
    program = Program(traced.jaxpr)
    other = with_updates_in_loops(program, context)
    if other is program:
        return None
    tree = jax.tree.structure(traced.out_info)
    run = functools.partial(_jax.evaluate, other.jaxpr)
    return lambda *args: jax.tree.unflatten(tree, run(*jax.tree.leaves(args)))


def assert_same(actual, expected):
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(close, actual, expected)


def stacked_gradients(fun, *args):
    """Bytes that backward loops stack, in the jaxpr."""
    total = 0
    for eqn in _jax.equations(jax.make_jaxpr(fun)(*args)):
        if eqn.primitive.name == "scan" and eqn.params["reverse"]:
            carried = _jax.scan_counts(eqn.params)[1]
            total += sum(_jax.bytes_of(v) for v in eqn.outvars[carried:])
    return total


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_results_are_those_of_the_plain_step(name):
    step, state, data = make(OPTIMIZERS[name])
    other = moved(step, state, data)
    assert stacked_gradients(step, state, data) > 0
    assert stacked_gradients(other, state, data) == 0
    expected, actual = state, state
    for _ in range(3):
        expected, loss = jax.jit(step)(expected, data)
        actual, actual_loss = jax.jit(other)(actual, data)
        assert_same((actual, actual_loss), (expected, loss))


def test_without_donation_results_are_stacked_instead_of_gradients():
    step, state, data = make(optax.sgd(0.1))
    other = moved(step, state, data, donate=False)
    assert_same(jax.jit(other)(state, data), jax.jit(step)(state, data))
    assert stacked_gradients(other, state, data) == stacked_gradients(step, state, data)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        optax.adafactor(1e-2, min_dim_size_to_factor=8),
        optax.lamb(1e-2),
    ],
    ids=["global norm", "factored", "trust ratio"],
)
def test_updates_that_need_more_than_a_row_stay(optimizer):
    step, state, data = make(optimizer)
    assert moved(step, state, data) is None


def test_results_may_be_read_after_the_loop():
    """The size of each change: of stacks that the loop has updated already."""
    step, state, data = make(optax.sgd(0.1))

    def with_norm(state, data):
        new, loss = step(state, data)
        return new, (loss, jax.tree.map(lambda p: jnp.sum(p**2), new[0]))

    assert moved(with_norm, state, data) is None


def test_what_else_reads_a_stack_reads_it_as_it_was():
    step, state, data = make(optax.sgd(0.1))

    def with_norm(state, data):
        new, loss = step(state, data)
        return new, (loss, jax.tree.map(lambda p: jnp.sum(p**2), state[0]))

    other = moved(with_norm, state, data)
    assert_same(other(state, data), with_norm(state, data))


def test_one_gradient_is_handed_out_and_stays():
    _, state, data = make(optax.sgd(0.1))

    def shown(state, data):
        params, opt = state

        def loss(params):
            layer = lambda x, p: (x + jnp.tanh(x @ p["in"]) @ p["out"], None)  # noqa: E731
            return jnp.mean(jax.lax.scan(layer, data, params["layers"])[0] ** 2)

        grads = jax.grad(loss)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (new, opt), grads["layers"]["in"]

    other = moved(shown, state, data)
    assert_same(jax.jit(other)(state, data), jax.jit(shown)(state, data))
    assert stacked_gradients(other, state, data) == state[0]["layers"]["in"].nbytes
    assert stacked_gradients(shown, state, data) > state[0]["layers"]["in"].nbytes


def test_effects_keep_the_program_as_it_is():
    step, state, data = make(optax.sgd(0.1))

    def shown(state, data):
        jax.debug.print("{}", data[0, 0])
        return step(state, data)

    assert moved(shown, state, data) is None


# --- As a plan --------------------------------------------------------------------------------


def test_plan_uses_it_where_the_compiled_peak_falls():
    step, state, data = make(optax.adam(1e-2))
    plain = jdelta.plan(step, None, state, data, donate_argnums=0)
    plan = jdelta.plan(step, None, state, data, donate_argnums=0, reorder=True)
    assert plan.updates_moved == plain.compiled_peak - plan.compiled_peak
    assert plain.updates_moved == 0
    assert (plan.updates_moved > 0) == ("inside the backward loops" in str(plan)) == GAINS
    copies = jax.tree.map(jnp.copy, state)
    assert_same(plan.jit()(copies, data), jax.jit(step)(state, data))


@gains
def test_plan_reaches_budgets_below_the_floor_without_it(tmp_path):
    step, state, data = make(optax.adam(1e-2))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, data))
    arguments = sum(x.nbytes for x in jax.tree.leaves((state, data)))
    budget = int(1.25 * arguments)
    with pytest.raises(jdelta.BudgetError):
        jdelta.plan(step, budget, *shapes, donate_argnums=0)
    plan = jdelta.plan(step, budget, *shapes, donate_argnums=0, reorder=True)
    assert plan.compiled_peak <= budget
    plan.save(str(tmp_path / "plan.json"))
    loaded = jdelta.load(str(tmp_path / "plan.json"))
    assert loaded == plan
    copies = jax.tree.map(jnp.copy, state)
    assert_same(loaded.jit(step)(copies, data), jax.jit(step)(state, data))


def test_plan_leaves_updates_where_nothing_is_gained():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    step, state, data = make(optimizer)
    plan = jdelta.plan(step, None, state, data, donate_argnums=0, reorder=True)
    same = jdelta.plan(step, None, state, data, donate_argnums=0)
    assert plan.updates_moved == 0
    assert plan.decisions == same.decisions


@gains
def test_reorder_reports_the_floor_of_the_better_way():
    step, state, data = make(optax.adam(1e-2))
    with pytest.raises(jdelta.BudgetError) as plain:
        jdelta.plan(step, 0.1, state, data, donate_argnums=0)
    with pytest.raises(jdelta.BudgetError) as moved_:
        jdelta.plan(step, 0.1, state, data, donate_argnums=0, reorder=True)
    assert moved_.value.floor < plain.value.floor
