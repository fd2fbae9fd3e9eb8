"""Layers of a scan that are decided differently."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdelta
from benchmarks.models import build
from jdelta import BudgetError, Decision, PlanMismatchError
from jdelta._src import _jax
from jdelta._src.backends.target import resolve
from jdelta._src.backends.tpu import TPU
from jdelta._src.hlo.measure import measure
from jdelta._src.passes.emit import Step, emit
from jdelta._src.passes.program import Context, Program
from jdelta._src.passes.stacked_weights import with_rows_read_in_turn
from jdelta._src.program.loop_nest import Nest
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.region import Grouping
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.residual import residuals
from tests.compilers import TARGETS, cpus_keep_recompute, needs_cuda
from tests.frameworks import LAYERS, STEPS, block, mean_square, plain
from tests.planning import planned, under

FLAX_AND_HAIKU = ["Flax Linen", "Flax NNX", "Haiku"]


def loops(program):
    """The loops of a program, calls inlined."""
    return [e for e in _jax.inline(program).eqns if e.primitive.name == "scan"]


def read_in_turn(program):
    """The program with the rows of its loops read one layer after the other."""
    target = resolve("tpu:v5e:2x2")
    context = Context(target.backend, target.rates)
    return with_rows_read_in_turn(Program(program), context).jaxpr


def halves(step_trace):
    """Decisions that keep all of the first layer of an iteration, and nothing of the others."""
    target = resolve("tpu:v5e:2x2")
    regions = [r for r in step_trace.regions if r.nest.loops]
    first = {r.name for r in regions if r.name.endswith("_0")}
    assert 0 < len(first) < len(regions)
    return {
        value.name: Decision.SAVE if region.name in first else Decision.RECOMPUTE
        for region in step_trace.regions
        for value in residuals(region, target)
    }


def assert_equal(got, expected):
    expected = jax.tree.leaves(expected)
    largest = max(1.0, *(float(np.abs(b).max()) for b in expected))
    for a, b in zip(jax.tree.leaves(got), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize(
    ("framework", "group"),
    [
        ("plain JAX", 2),
        ("plain JAX", 3),
        ("Equinox", 2),
        pytest.param("Equinox", 3, marks=pytest.mark.full),
        *((framework, 3) for framework in FLAX_AND_HAIKU),
        *(pytest.param(framework, 2, marks=pytest.mark.full) for framework in FLAX_AND_HAIKU),
    ],
)
def test_results_equal_the_plain_step(framework, group):
    step, args = STEPS[framework](64, 32, scan=True)
    step_trace = trace(step, *args, grouping=Grouping(group))
    run = jax.jit(under(step_trace, halves(step_trace), step))
    assert {e.params["length"] for e in loops(run.trace(*args).jaxpr)} == {LAYERS // group}
    assert_equal(run(*args), jax.jit(step)(*args))


def stack(layer, **options):
    """A step over a marked layer that hands on a carry and gives a row of results."""

    def loss(ws, x):
        x, ys = jax.lax.scan(jdelta.remat(layer), x, ws, **options)
        return mean_square(x) + mean_square(ys * jnp.arange(len(ys))[:, None])

    return jax.value_and_grad(loss, argnums=(0, 1))


def layer(x, w):
    h = jnp.tanh(x @ w)
    return x + jnp.sin(h @ w), jnp.cos(h).sum(0)


ARGS = (
    jnp.linspace(-1.0, 1.0, 6 * 8 * 8).reshape(6, 8, 8),
    jnp.linspace(-2.0, 1.0, 64).reshape(8, 8),
)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_order_and_results_of_every_layer(group, reverse):
    step = stack(layer, reverse=reverse)
    step_trace = trace(step, *ARGS, grouping=Grouping(group))
    assert len(step_trace.regions) == group
    decisions = halves(step_trace) if group > 1 else planned(step, 0.5, *ARGS)[1]
    assert_equal(jax.jit(under(step_trace, decisions, step))(*ARGS), jax.jit(step)(*ARGS))


def test_a_loop_without_rows():
    def step(w, x):
        def loss(w):
            run = jdelta.remat(lambda x, _: (jnp.tanh(x @ w), None))
            return mean_square(jax.lax.scan(run, x, length=4)[0])

        return jax.value_and_grad(loss)(w)

    args = ARGS[0][0], ARGS[1]
    step_trace = trace(step, *args, grouping=Grouping(2))
    assert [r.nest.trips for r in step_trace.regions] == [2, 2]
    assert_equal(jax.jit(under(step_trace, halves(step_trace), step))(*args), step(*args))


@pytest.mark.parametrize(("layers", "options"), [(5, {}), (2, {}), (6, {"unroll": 2})])
def test_what_cannot_be_grouped_stays(layers, options):
    step = stack(layer, **options)
    step_trace = trace(step, ARGS[0][:layers], ARGS[1], grouping=Grouping(2))
    assert [region.nest.trips for region in step_trace.regions] == [layers]


def test_a_loop_over_micro_batches_stays():
    """Its gradients are taken inside: it keeps nothing from one iteration to the next."""
    grad = stack(layer)

    def step(ws, xs):
        add = functools.partial(jax.tree.map, jnp.add)
        return jax.lax.scan(lambda g, x: (add(g, grad(ws, x)[1][0]), None), 0 * ws, xs)[0]

    args = ARGS[0], jnp.stack([ARGS[1]] * 4)
    step_trace = trace(step, *args, grouping=Grouping(2))
    # Three pairs in a loop, four times.
    assert [r.nest for r in step_trace.regions] == [Nest(kept=3, loops=1, repeats=4)] * 2
    got = jax.jit(under(step_trace, halves(step_trace), step))(*args)
    np.testing.assert_allclose(got, step(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("marked", [True, False])
def test_weights_are_not_stacked_again(marked):
    """The parts of rows that both layers of an iteration take are no values to keep."""
    step, args = plain(64, 512, scan=True)
    if marked:

        def step(ws, x, key):
            def loss(ws):
                keys = jax.random.split(key, LAYERS)
                run = jdelta.remat(lambda x, wk: (block(wk[0], x, wk[1]), None))
                return mean_square(jax.lax.scan(run, x, (ws, keys))[0])

            return jax.grad(loss)(ws)

    step_trace = trace(step, *args, grouping=Grouping(2))
    weights = sum(w.nbytes for w in args[0])
    traced = jax.make_jaxpr(under(step_trace, halves(step_trace), step))(*args)
    in_turn = read_in_turn(traced)
    kept, left = (sum(map(_jax.bytes_of, loops(p)[0].outvars)) for p in (traced, in_turn))
    assert left <= kept - weights


def test_a_layer_of_a_backward_loop_begins_when_those_after_it_are_through():
    """Between two layers there are gradients and the carry, nothing from inside of one."""
    step, args = plain(64, 32, scan=True)
    step_trace = trace(step, *args, grouping=Grouping(2))
    values = [v.name for g in step_trace.regions for v in residuals(g, resolve("tpu:v5e:2x2"))]
    # Gradients alone read these.
    kept = {f"{g.name}/mul": Decision.SAVE for g in step_trace.regions}
    assert kept.keys() <= set(values)
    decisions = dict.fromkeys(values, Decision.RECOMPUTE) | kept
    traced = jax.make_jaxpr(under(step_trace, decisions, step))(*args)
    _, backward = loops(read_in_turn(traced))
    eqns = _jax.open_jaxpr(backward.params["jaxpr"]).eqns
    barriers = [e.invars for e in eqns if e.primitive.name == "optimization_barrier"]
    begun = [shapes for vs in barriers if () in (shapes := [v.aval.shape for v in vs])]
    index, carry, gradients = (), (64, 32), (2, 32, 32)
    assert begun == [[index], [carry, gradients, gradients, index]]


# Plans


def test_layers_apart_are_too_much_for_a_policy_alone():
    step = stack(layer)
    step_trace = trace(step, *ARGS, grouping=Grouping(2))
    policy = Policy.of(halves(step_trace), step_trace.loops, TPU)
    run = jdelta.remat(layer, policy=policy)
    with pytest.raises(PlanMismatchError, match="per_layer=False"):
        jax.grad(lambda ws: mean_square(jax.lax.scan(run, ARGS[1], ws)[0]))(ARGS[0])


@pytest.mark.compiler
def test_what_half_of_the_layers_keep_takes_half_the_memory():
    step, args = plain(32768, 512, scan=True)
    target = resolve("tpu:v5e:2x2")
    step_trace = trace(step, *args, grouping=Grouping(2))
    half = halves(step_trace)
    all_alike = [dict.fromkeys(half, d) for d in (Decision.RECOMPUTE, Decision.SAVE)]
    peaks: list[int] = []
    for decisions in (all_alike[0], half, all_alike[1]):
        placed, policy = target.abstract(args), Policy.of(decisions, step_trace.loops, TPU)
        planned_step = Step(
            step, placed, (), target, step_trace.aliases, step_trace.automatic, step_trace.grouping
        )
        peaks.append(measure(emit(planned_step, policy).lower(), target)[1].peak)
    nothing, some, everything = peaks
    assert (some - nothing) / (everything - nothing) == pytest.approx(0.5, abs=0.1)


@pytest.mark.compiler
@pytest.mark.parametrize("share", [0.55, pytest.param(0.4, marks=pytest.mark.full)])
def test_layers_apart_are_never_slower(share):
    step, args = plain(32768, 512, scan=True)
    apart, alike = (
        jdelta.plan(step, share, *args, target="tpu:v5e:2x2", per_layer=per_layer)
        for per_layer in (True, False)
    )
    assert apart.compiled_peak <= apart.budget
    assert apart.overhead <= alike.overhead
    assert apart.compiles <= 5  # with a floor that is not foretold


@needs_cuda
@pytest.mark.compiler
def test_layers_apart_are_not_used_where_they_take_longer_by_their_instructions():
    """Four an iteration would use 97 % of this budget, and were predicted to be quicker."""
    case = build("mlp", batch=32768, scan=True, remat=jdelta.remat)
    args = case.step, "8116MiB", case.state, case.batch
    options = {"donate_argnums": 0, "target": "cuda:h100"}
    alike = jdelta.plan(*args, per_layer=False, **options)
    free = jdelta.plan(*args, **options)
    assert free.compiles > alike.compiles, "they were tried"
    assert 0 < free.overlap.seconds <= alike.overlap.seconds
    assert free.policy == alike.policy


# Nested


@pytest.mark.parametrize(
    "framework",
    [
        "plain JAX",
        "Equinox",
        *(pytest.param(framework, marks=pytest.mark.full) for framework in FLAX_AND_HAIKU),
    ],
)
def test_nested_results_equal_the_plain_step(framework):
    step, args = STEPS[framework](64, 32, scan=True)
    step_trace = trace(step, *args, grouping=Grouping(3, nested=True))
    in_loops = [r for r in step_trace.regions if r.nest.loops]
    assert {(r.nest.trips, r.nest.loops) for r in in_loops} == {(LAYERS, 2)}
    values = [v.name for r in step_trace.regions for v in residuals(r, resolve("tpu:v5e:2x2"))]
    run = jax.jit(under(step_trace, dict.fromkeys(values, Decision.RECOMPUTE), step))
    assert {e.params["length"] for e in loops(run.trace(*args).jaxpr)} == {LAYERS // 3}
    assert_equal(run(*args), jax.jit(step)(*args))


def test_nested_layers_whose_shapes_are_asked_for_first():
    """As in ``test_remat.py``: what is traced for its shapes alone leaves nothing."""

    def step(ws, xs):
        def loss(ws, x):
            return mean_square(jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0])

        gradient = functools.partial(jax.grad(loss), ws)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradient, xs[0]))
        return jax.lax.scan(lambda total, x: (total + gradient(x), None), zeros, xs)[0]

    layer = jdelta.remat(lambda w, x: jnp.tanh(x @ w))
    args = jnp.ones((4, 8, 8)), jnp.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)
    step_trace = trace(step, *args, grouping=Grouping(2, nested=True))
    values = [v.name for r in step_trace.regions for v in residuals(r, resolve("tpu:v5e:2x2"))]
    run = jax.jit(under(step_trace, dict.fromkeys(values, Decision.RECOMPUTE), step))
    assert_equal(run(*args), jax.jit(step)(*args))


@pytest.mark.parametrize(
    "target", ["cpu", pytest.param("tpu:v5e:2x2", marks=[pytest.mark.compiler, pytest.mark.full])]
)
def test_nested_checkpoints_reach_below_the_floor(target, tmp_path):
    """With nothing on the host, recompute cannot do without what enters each layer."""
    step = stack(layer)
    rows, width = (512, 64) if target == "cpu" else (65536, 256)
    args = jax.ShapeDtypeStruct((36, width, width), "f4"), jax.ShapeDtypeStruct((rows, width), "f4")
    plan = functools.partial(jdelta.plan, step, target=target, host_budget=0)
    with pytest.raises(BudgetError) as floor:
        plan("1MiB", *args, per_layer=False)
    with pytest.raises(BudgetError) as nested:
        plan("1MiB", *args)
    assert nested.value.floor < 0.8 * floor.value.floor
    least, more = (plan(error.value.floor, *args) for error in (nested, floor))
    least.save(str(tmp_path / "plan.json"))
    assert jdelta.load(str(tmp_path / "plan.json")) == least
    assert least.grouping == Grouping(6, nested=True)
    assert least.compiled_peak <= nested.value.floor
    assert not more.grouping.nested
    assert more.overhead < 0.6 * least.overhead


# Layers that are in no loop when they are compiled

UNROLLED = 5


def unrolled(unroll, *, reverse=False, marked=True):
    """A step whose layers draw random numbers, and stack what they measure."""

    def layer(x, row):
        w, key = row
        y = x + jnp.tanh(x @ w) * jax.random.normal(key, x.shape)
        return y, jnp.mean(y)

    def step(w, keys, x):
        def loss(w):
            body = jdelta.remat(layer) if marked else layer
            y, means = jax.lax.scan(body, x, (w, keys), reverse=reverse, unroll=unroll)
            return jnp.mean(y**2) + jnp.sum(means**2), means

        return jax.value_and_grad(loss, has_aux=True)(w)

    w = 0.1 * jax.random.normal(jax.random.key(0), (UNROLLED, 64, 64))
    return step, (w, jax.random.split(jax.random.key(1), UNROLLED), jnp.ones((8, 64)))


@pytest.mark.parametrize(
    ("reverse", "marked"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.full),
        pytest.param(True, True, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("unroll", "looped", "count"), [(1, 1, 1), (2, 1, 2), (3, 0, 5), (UNROLLED, 0, 5), (True, 0, 5)]
)
def test_layers_in_no_loop_are_regions_of_their_own(unroll, looped, count, reverse, marked):
    """Two in an iteration leave a fifth; a loop of one iteration is none to the compiler."""
    step, args = unrolled(unroll, reverse=reverse, marked=marked)
    step_trace, decisions = planned(step, 0.3, *args)
    assert sum(region.nest.loops for region in step_trace.regions) == looped
    assert len(step_trace.regions) == count
    assert Decision.RECOMPUTE in decisions.values()
    got = jax.jit(under(step_trace, decisions, step))(*args)
    assert_equal(got, jax.jit(step)(*args))


def test_a_loop_of_one_layer_is_none():
    step, (w, keys, x) = unrolled(1)
    step_trace = trace(step, w[:1], keys[:1], x)
    assert [region.nest.loops for region in step_trace.regions] == [0]


def test_a_carry_keeps_the_type_that_the_loop_gives_it():
    def step(w, x):
        def layer(carry, w):
            x, total = carry
            y = jdelta.remat(jnp.tanh)(x @ w)
            return (y, total + jnp.sum(y)), None

        def loss(w):
            (_, total), _ = jax.lax.scan(layer, (x, 0.0), w, unroll=True)
            return total

        return jax.value_and_grad(loss)(w)

    args = jnp.ones((3, 8, 8), jnp.bfloat16), jnp.ones((4, 8), jnp.bfloat16)
    step_trace, decisions = planned(step, 0.0, *args)
    got, expected = (jax.eval_shape(f, *args) for f in (under(step_trace, decisions, step), step))
    assert got == expected


@cpus_keep_recompute
def test_a_loop_that_is_unrolled_is_planned_on_cpus():
    step, (w, keys, _) = unrolled(True)
    plan = jdelta.plan(step, 0.7, w, keys, jax.ShapeDtypeStruct((4096, 64), jnp.float32))
    assert plan.compiled_peak <= plan.budget < plan.ceiling
    assert not plan.undone


def blocks(body, unroll):
    """A training step over a loop of residual blocks of two products."""

    def step(ws, x):
        def loss(ws):
            return mean_square(jax.lax.scan(body, x, ws, unroll=unroll)[0])

        value, grads = jax.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    return step


def two_products(x, ws):
    return x + jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]), None


@pytest.mark.compiler
@pytest.mark.parametrize("target", ["cpu", *TARGETS])
@pytest.mark.parametrize("unroll", [1, 2, 4, True])
def test_a_loop_that_is_unrolled_takes_no_more_than_by_hand(unroll, target):
    """Where one iteration runs several layers, recompute of each waits for its cotangent."""
    target, rows = resolve(target), 1024 if target == "cpu" else 16384
    shapes = (4, 256, 512), (4, 512, 256), (rows, 256)
    *ws, x = (jax.ShapeDtypeStruct(shape, "f4") for shape in shapes)
    args = target.abstract((ws, x))
    by_hand = blocks(jax.checkpoint(two_products), unroll)
    lowered = jax.jit(by_hand, donate_argnums=0).trace(*args)
    lowered = lowered.lower(lowering_platforms=(target.platform,))
    step = blocks(two_products, unroll)
    step_trace = trace(step, *args)
    names = [v.name for region in step_trace.regions for v in residuals(region, target)]
    policy = Policy.of(
        dict.fromkeys(names, Decision.RECOMPUTE),
        step_trace.loops,
        target.backend,
        together=step_trace.together,
    )
    planned_step = Step(step, args, (0,), target, step_trace.aliases, step_trace.automatic)
    floor = measure(emit(planned_step, policy).lower(), target)[1].peak
    assert floor <= 1.02 * measure(lowered, target)[1].peak


def test_layers_that_an_iteration_runs_together_are_shielded():
    step, args = unrolled(2)
    step_trace = trace(step, *args)
    looped, apart = step_trace.regions
    policy = Policy.of({}, step_trace.loops, TPU, together=step_trace.together)
    assert step_trace.together == {looped.name}
    assert all(policy.prevents_cse(region.name) for region in (looped, apart))
    assert not trace(*unrolled(1)[:1], *args).together
