"""Steps in which nothing is marked: where they are cut, and plans for them in every framework."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdelta
from jdelta import Decision
from jdelta._src import _jax
from jdelta._src.backends.target import resolve
from jdelta._src.passes.emit import Step, emit
from jdelta._src.passes.program import Context, Program
from jdelta._src.passes.recompute_after_forward import with_forward_first
from jdelta._src.passes.rounding import without_harmful_rounding
from jdelta._src.regions import cut
from jdelta._src.regions.cut import Cuts, bytes_held, cut_into_regions, loss_begins
from jdelta._src.regions.find import tracing
from jdelta._src.regions.region import Grouping, Session
from tests.compilers import TARGETS, needs_cuda
from tests.frameworks import STEPS
from tests.planning import planned, under
from tests.programs import PROGRAMS, unmarked

# Where a program is cut


def chain(widths):
    """A program of products and tanhs through these widths."""

    def run(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w) * 2.0
        return x

    ws = [jnp.zeros(pair) for pair in itertools.pairwise(widths)]
    return _jax.inline(jax.make_jaxpr(run)(jnp.zeros((4, widths[0])), ws))


def cost(program, cuts):
    """Bytes kept at the cuts, and those of the largest unit."""
    eqns = _jax.open_jaxpr(program).eqns
    return kept(eqns, cuts), max(sum(bytes_held(eqns[a:b])) for a, b in itertools.pairwise(cuts))


def kept(eqns, cuts):
    """Bytes of what is made between two cuts and read after both."""
    total = 0
    for begin, end in itertools.pairwise(cuts):
        outputs = {v for e in eqns[begin:end] for v in e.outvars}
        later = {v for e in eqns[end:] for v in e.invars if _jax.is_var(v)}
        total += sum(v.aval.size * 4 for v in outputs & later)
    return total


@pytest.mark.parametrize("widths", [[8, 64, 8, 64, 8], [8, 8, 8, 8], [64, 8, 64, 64, 4, 64]])
def test_cuts_are_near_the_best(widths):
    program = chain(widths)
    count = len(_jax.open_jaxpr(program).eqns)
    slices = cut_into_regions(_jax.open_jaxpr(program).eqns)
    cuts = [0, *(s.stop for s in slices)]
    assert cuts == sorted(set(cuts))
    assert cuts[-1] == count
    inside = range(1, count)
    choices = (
        (0, *some, count) for n in range(count) for some in itertools.combinations(inside, n)
    )
    best = min(sum(cost(program, some)) for some in choices)
    assert sum(cost(program, cuts)) <= 1.25 * best


def test_small_values_take_no_places_from_large_ones(monkeypatch):
    """As in a ResNet, whose last values are its smallest and whose first make the peak."""
    program = chain([64] * 8 + [4] * 40)
    count = len(_jax.open_jaxpr(program).eqns)
    costs = []
    for most in (count, count // 4):
        monkeypatch.setattr(cut, "MOST_CUTS", most)
        slices = cut_into_regions(_jax.open_jaxpr(program).eqns)
        costs.append(sum(cost(program, [0, *(s.stop for s in slices)])))
    assert costs[1] <= 1.25 * costs[0]


def held_sizes(run, *args):
    """Bytes held by primitive."""
    eqns = _jax.open_jaxpr(_jax.inline(jax.make_jaxpr(run)(*args))).eqns
    return [(e.primitive.name, b) for e, b in zip(eqns, bytes_held(eqns), strict=True)]


def test_what_products_read_is_held():
    x = jnp.ones((8, 8))
    product, size = ("dot_general", 256), 256
    assert held_sizes(lambda x: (x @ x) + 1, x) == [product, ("add", 0)]
    assert held_sizes(lambda x: ((x @ x) + 1) @ x, x) == [product, ("add", size), product]
    through_a_view = held_sizes(lambda x: ((x @ x) + 1).T @ x, x)
    assert through_a_view == [product, ("add", size), ("transpose", 0), product]
    assert held_sizes(lambda x: jnp.exp(x) * 2, x) == [("exp", size), ("mul", 0)]


def test_a_call_holds_its_result_once():
    x = jnp.ones((8, 8))
    (_, alone), *_ = held_sizes(jax.nn.relu, x)
    assert alone == 0
    relu, product = held_sizes(lambda x: jax.nn.relu(x) @ x, x)
    assert relu[1] == product[1] == 256


def test_what_is_made_again_where_it_is_read_is_not_held():
    x, rows = jnp.ones((8, 8)), jnp.arange(8)
    twice = held_sizes(lambda x: jnp.tanh(x @ x) * jnp.exp(x @ x), x)
    assert [size for name, size in twice if name == "dot_general"] == [256, 0]
    gathered = held_sizes(lambda x: jnp.tanh(x[rows] * x[rows + 1]), x)
    assert [size for name, size in gathered if name == "gather"] == [0, 0]
    noisy = held_sizes(lambda x: jnp.tanh(x + jax.random.gumbel(jax.random.key(0), x.shape)), x)
    assert [size for name, size in noisy if name in ("log", "random_bits")] == [0, 0, 0]


def test_coarse_cuts_are_fewer_and_not_much_worse():
    program = chain([64, 8, 64, 8, 64, 8, 64, 8, 64])
    eqns = _jax.open_jaxpr(program).eqns
    fine, coarse = cut_into_regions(eqns), cut_into_regions(eqns, best=Cuts.FEW)
    assert len(coarse) < len(fine)
    sums = [sum(cost(program, [0, *(s.stop for s in slices)])) for slices in (fine, coarse)]
    assert sums[0] <= sums[1] <= cut.COARSE * sums[0]


def test_of_cuts_that_keep_as_much_those_with_less_in_turn():
    """By the sum it is all the same whether the second and the third layer are one unit."""

    def run(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w) * jax.nn.sigmoid(x @ w)
        return x

    ws = [jnp.zeros(pair) for pair in itertools.pairwise([64, 128, 192, 64])]
    eqns = _jax.open_jaxpr(_jax.inline(jax.make_jaxpr(run)(jnp.zeros((1024, 64)), ws))).eqns
    assert cut_into_regions(eqns) == [range(5), range(5, 10), range(10, 15)]
    assert len(cut_into_regions(eqns, is_whole=False)) == 2


def dense(x, ws):
    for w in ws[:-1]:
        x = jnp.tanh(x @ w + 1.0)
    return x @ ws[-1]


def dense_arguments():
    sizes = itertools.pairwise([64, *[256] * 6, 64])
    ws = [0.1 * jax.random.normal(jax.random.key(i), pair) for i, pair in enumerate(sizes)]
    return jnp.linspace(-1.0, 1.0, 1024 * 64).reshape(1024, 64), ws


def held_in_turn(program, cuts):
    """Bytes of the largest unit and what was kept in front of it."""
    eqns = _jax.open_jaxpr(program).eqns
    cuts = [0, *(c.stop for c in cuts)]
    return max(
        sum(bytes_held(eqns[a:b])) + kept(eqns, cuts[: i + 1])
        for i, (a, b) in enumerate(itertools.pairwise(cuts))
    )


def test_cuts_by_what_is_held_in_turn():
    """Less in turn than with the least sum, whose sum is less."""
    program = _jax.inline(jax.make_jaxpr(dense)(*dense_arguments()))
    eqns = _jax.open_jaxpr(program).eqns
    at_once, in_turn = (cut_into_regions(eqns, best=best) for best in (Cuts.AT_ONCE, Cuts.IN_TURN))
    assert held_in_turn(program, in_turn) < held_in_turn(program, at_once)
    sums = [sum(cost(program, [0, *(c.stop for c in cuts)])) for cuts in (at_once, in_turn)]
    assert sums[0] < sums[1]
    inner = [cut_into_regions(eqns, is_whole=False, best=b) for b in (Cuts.AT_ONCE, Cuts.IN_TURN)]
    assert inner[0] == inner[1]


def held_apart(program, cuts):
    """Bytes of the largest unit and what enters it."""
    eqns = _jax.open_jaxpr(program).eqns
    entering = [kept(eqns, [0, c.start]) if c.start else 0 for c in cuts]
    sizes = [sum(bytes_held(eqns[c.start : c.stop])) for c in cuts]
    return max(map(sum, zip(entering, sizes, strict=True)))


def test_cuts_by_what_a_region_holds_apart_from_others():
    program = _jax.inline(jax.make_jaxpr(dense)(*dense_arguments()))
    eqns = _jax.open_jaxpr(program).eqns
    least = held_apart(program, cut_into_regions(eqns, best=Cuts.APART))
    others = (cut_into_regions(eqns, best=best) for best in (Cuts.AT_ONCE, Cuts.FEW))
    assert all(least < held_apart(program, cuts) for cuts in others)


def test_a_run_that_holds_nothing_by_itself_is_part_of_the_region_after_it():
    """What its own backward pass reads would stay, whatever is dropped."""

    def run(x, ws):
        for w in ws:
            x = jax.nn.relu(x @ w + x)
        return x

    program = _jax.inline(jax.make_jaxpr(run)(jnp.zeros((64, 8)), [jnp.zeros((8, 8))] * 4))
    eqns = _jax.open_jaxpr(program).eqns
    regions = cut_into_regions(eqns, best=Cuts.APART)
    assert len(regions) > 2
    assert [r.stop for r in regions[:-1]] == [r.start for r in regions[1:]]
    assert all(sum(bytes_held(eqns[r.start : r.stop])) for r in regions)


def test_results_are_the_same_with_all_cuts():
    def step(x, ws):
        return jax.value_and_grad(lambda ws: jnp.mean(dense(x, ws) ** 2))(ws)

    args, names = dense_arguments(), set()
    right = jax.tree.leaves(jax.jit(step)(*args))
    for cuts in Cuts:
        step_trace, decisions = planned(step, 0.3, *args, grouping=Grouping(1, cuts=cuts))
        names.add(step_trace.fingerprint)
        got = jax.tree.leaves(jax.jit(under(step_trace, decisions, step))(*args))
        for a, b in zip(got, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert len(names) == len(Cuts)


def test_a_loop_keeps_what_crosses_for_each_iteration():
    eqns = _jax.open_jaxpr(chain([64, 8, 64, 8, 64])).eqns
    assert len(cut_into_regions(eqns, trips=1)) > 1
    assert len(cut_into_regions(eqns, trips=1000)) == 1


def test_a_program_of_one_equation_is_one_unit():
    program = jax.make_jaxpr(jnp.tanh)(jnp.zeros(3))
    assert cut_into_regions(_jax.open_jaxpr(program).eqns) == [range(1)]


def deep(w, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    with jax.named_scope("layer"):
        x, _ = jax.lax.scan(layer, x, w)
    with jax.named_scope("head"):
        return jnp.exp(x @ w[0])


def test_the_last_unit_after_a_loop_is_left_alone():
    """Its backward pass is next: to compute it again would free nothing."""
    args = jnp.stack([jnp.eye(64)] * 4), jnp.ones((64, 64))
    gradient = jax.grad(lambda w, x: jnp.sum(deep(w, x)))

    def pulled(w, x):  # what else comes between the passes is not known here
        y, back = jax.vjp(deep, w, x)
        return back(y)

    some, everything = (planned(step, 0.5, *args)[1].keys() for step in (gradient, pulled))
    assert {"region/tanh", "head/exp"} < set(everything)
    assert set(some) == {name for name in everything if not name.startswith("head/")}


def branching(w, x):
    """Layers that a condition skips, and the last of which has another in its place."""
    units = layer_of, jax.checkpoint(layer_of), layer_of
    others = jnp.sin, jnp.sin, lambda x: jnp.cos(x @ w[0])
    for i, (unit, other) in enumerate(zip(units, others, strict=True)):
        x = jax.lax.cond(x[0, 0] > i - 9.0, functools.partial(unit, w[i]), other, x)
    return x.sum()


def layer_of(w, x):
    return jnp.tanh(jnp.sin(x @ w))


def test_branches_have_units_of_their_own():
    step, args = jax.value_and_grad(branching), (jnp.ones((3, 8, 8)) / 9, jnp.ones((4, 8)))
    plan = jdelta.plan(step, None, *args, pin={"*": "recompute"})
    regions = {r.region for r in plan.residuals}
    assert len(regions) == 4  # without that of jnp.sin
    for a, b in zip(*map(jax.tree.leaves, (plan.jit()(*args), step(*args))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_linearized_is_cut_like_what_is_differentiated():
    args = jnp.stack([jnp.eye(64)] * 4), jnp.ones((64, 64))

    def pulled(w, x):
        y, back = jax.vjp(deep, w, x)
        return back(y)

    def linearized(w, x):
        y, push = jax.linearize(deep, w, x)
        return jax.linear_transpose(push, w, x)(y)

    pairs = [planned(step, 0.5, *args) for step in (pulled, linearized)]
    assert pairs[0][1] == pairs[1][1]
    results = jax.jit(under(*pairs[1], linearized))(*args)
    for a, b in zip(linearized(*args), results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def blocks(loss, block=lambda x, w: x + jnp.tanh(x @ w[0]) @ w[1]):
    """A step of three layers."""

    def step(ws, x):
        def total(ws):
            y = x
            for w in ws:
                y = block(y, w)
            return loss(y)

        return jax.value_and_grad(total)(ws)

    shapes = [(jnp.ones((64, 256)), jnp.ones((256, 64)))] * 3
    return step, (shapes, jnp.ones((512, 64)))


def recomputed(step, args):
    """The step under a plan that keeps nothing, flat: its equations."""
    step_trace, decisions = planned(step, 0.0, *args)
    program = jax.make_jaxpr(under(step_trace, decisions, step))(*args)
    target = resolve("tpu:v5e:2x2")
    flat = with_forward_first(Program(program), Context(target.backend, target.rates)).flat
    return _jax.open_jaxpr(flat).eqns


def test_the_loss_is_no_part_of_the_last_unit():
    """Else its backward pass would begin with the last product of the model, computed again."""
    step, args = blocks(lambda y: jnp.mean(y**2))
    backward = [e for e in recomputed(step, args) if _jax.is_shielded(e)]
    products = [
        sum(e.primitive.name == "dot_general" for e in _jax.open_jaxpr(_jax.subjaxpr(b)).eqns)
        for b in backward
    ]
    # One product is computed again, and two have two derivatives each; the input has none.
    assert products == [5, 5, 4]


@pytest.mark.parametrize(
    "block", [lambda x, w: x + jnp.tanh(x @ w[0]) @ w[1], jnp.multiply], ids=["product", "none"]
)
def test_where_a_loss_begins(block):
    closed = jax.make_jaxpr(lambda x, w: jnp.mean(block(x, w) ** 2))(
        jnp.ones((8, 8)),
        (jnp.ones((8, 16)), jnp.ones((16, 8))) if block is not jnp.multiply else 2.0,
    )
    eqns = _jax.open_jaxpr(_jax.inline(closed)).eqns
    begin = loss_begins(eqns)
    names = [e.primitive.name for e in eqns[begin:]]
    assert names == ([] if block is jnp.multiply else ["add", "integer_pow", "reduce_sum", "div"])


def test_scores_of_rows_are_part_of_the_loss():
    """Else what they are made of is computed again, though their backward pass is next."""
    closed = jax.make_jaxpr(lambda x, w, head: jnp.mean(((x + jnp.tanh(x @ w)) @ head) ** 2))(
        jnp.ones((64, 32)), jnp.ones((32, 32)), jnp.ones((32, 2))
    )
    eqns = _jax.open_jaxpr(_jax.inline(closed)).eqns
    products = [e for e in eqns[loss_begins(eqns) :] if e.primitive.name == "dot_general"]
    assert [e.outvars[0].aval.shape for e in products] == [(64, 2)]


@pytest.mark.parametrize(("loss", "ties"), [(jnp.sum, 1), (lambda y: jnp.sum(y**2), 0)])
def test_recompute_waits_for_the_forward_pass(loss, ties):
    """The cotangent of a sum is there before what is summed up."""
    step, args = blocks(loss, jdelta.remat(lambda x, w: x + jnp.tanh(x @ w[0]) @ w[1]))
    eqns = recomputed(step, args)
    barriers = [e for e in eqns if e.primitive.name == "optimization_barrier"]
    assert len(barriers) == ties
    first = next(e for e in eqns if _jax.is_shielded(e))
    for barrier in barriers:
        assert not set(barrier.outvars).isdisjoint(v for v in first.invars if _jax.is_var(v))
        assert () in [v.aval.shape for v in barrier.outvars]
    got = jax.jit(under(*planned(step, 0.0, *args), step))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_what_enters_a_region_is_kept_as_it_is():
    """XLA for CPUs would compute it in each reader, from what all layers before have made."""
    step, args = blocks(lambda y: jnp.sum(y**2))
    step_trace, decisions = planned(step, 0.0, *args)
    entering = {f"{region.name}/input": Decision.SAVE for region in step_trace.regions}
    program = Program(jax.make_jaxpr(under(step_trace, decisions | entering, step))(*args))
    context = Context(resolve("cpu").backend, resolve("tpu:v5e:2x2").rates)
    plainer = without_harmful_rounding(program, context)
    rounded, plain = (
        [e for e in _jax.open_jaxpr(p.flat).eqns if e.primitive.name == "reduce_precision"]
        for p in (program, plainer)
    )
    assert rounded
    assert not plain
    assert without_harmful_rounding(plainer, context) is plainer
    got = _jax.evaluate(plainer.jaxpr, *jax.tree.leaves(args))
    for a, b in zip(got, jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def own(x, w):
    """What the tests below put a `jax.checkpoint` around."""
    return x + jnp.tanh(x @ w[0]) @ w[1]


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
@pytest.mark.parametrize("around", ["nothing", "a call", "a loop"])
def test_what_the_user_checkpoints_is_a_unit(policy, around):
    unit = jax.checkpoint(own, policy=policy)
    step, args = blocks(lambda y: jnp.mean(y**2), jax.jit(unit) if around == "a call" else unit)
    if around == "a loop":

        def step(ws, x):
            def loss(ws):
                return jnp.mean(jax.lax.scan(lambda x, w: (unit(x, w), None), x, ws)[0] ** 2)

            return jax.value_and_grad(loss)(ws)

        args = jax.tree.map(lambda *ws: jnp.stack(ws), *args[0]), args[1]
    step_trace, decisions = planned(step, 0.5, *args)
    names = ["own"] if around == "a loop" else ["own_0", "own_1", "own_2"]
    assert [region.name for region in step_trace.regions] == names
    got = jax.jit(under(step_trace, decisions, step))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_unit_in_a_module_has_its_name():
    def block(x, w):
        with jax.named_scope("mlp"):
            return own(x, w)

    step, args = blocks(lambda y: jnp.mean(y**2), jax.checkpoint(block))
    assert [r.name for r in planned(step, 0.5, *args)[0].regions] == ["mlp_0", "mlp_1", "mlp_2"]


def test_a_checkpoint_around_a_loop_of_others_leaves_the_units_to_these():
    def step(ws, x):
        def loss(ws):
            def stack(x):
                return jax.lax.scan(lambda x, w: (jax.checkpoint(own)(x, w), None), x, ws)[0]

            return jnp.mean(jax.checkpoint(stack)(x) ** 2)

        return jax.grad(loss)(ws)

    _, (ws, x) = blocks(jnp.sum)
    step_trace = planned(step, 0.5, jax.tree.map(lambda *ws: jnp.stack(ws), *ws), x)[0]
    assert [(region.name, region.nest.loops) for region in step_trace.regions] == [("own", 1)]


def test_the_floor_of_a_step_with_checkpoints_is_no_higher_than_its_own_peak():
    """In a loop, where XLA for CPUs honours recompute."""

    def step(ws, x):
        def loss(ws):
            body = jax.checkpoint(lambda x, w: (own(x, w), None))
            return jnp.mean(jax.lax.scan(body, x, ws)[0] ** 2)

        return jax.grad(loss)(ws)

    shapes = [jax.ShapeDtypeStruct((6, 64, 256), jnp.float32)]
    shapes.append(jax.ShapeDtypeStruct((6, 256, 64), jnp.float32))
    args = shapes, jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    plain = jdelta.plan(step, None, *args).ceiling
    with pytest.raises(jdelta.BudgetError) as caught:
        jdelta.plan(step, "1MiB", *args)
    assert caught.value.floor <= 1.02 * plain


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kind", "mark"),
    [
        pytest.param("scale", jdelta.remat, id="scale, marked"),
        # By default the dropout of ``test_the_peak_by_hand_is_reached`` stands for it.
        pytest.param("mask", lambda f: f, id="mask, found", marks=pytest.mark.full),
        pytest.param("mask", jdelta.remat, id="mask, marked", marks=pytest.mark.full),
        pytest.param("scale", lambda f: f, id="scale, found", marks=pytest.mark.full),
    ],
)
def test_the_floor_of_layers_with_random_bits_is_that_of_recompute_by_hand(kind, mark, target):
    def block(x, up, down, key):
        h = jax.nn.silu(x @ up)
        noise = jax.random.uniform(key, h.shape)
        h = jnp.where(noise < 0.8, h, 0) if kind == "mask" else h * noise
        return x + h @ down

    def step_of(block):
        def step(ws, x, key):
            def loss(ws):
                y = x
                for i, (up, down) in enumerate(ws):
                    y = block(y, up, down, jax.random.fold_in(key, i))
                return jnp.mean(y**2)

            value, grads = jax.value_and_grad(loss)(ws)
            return jax.tree.map(lambda w, g: w - g, ws, grads), value

        return step

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    weights = [(shape(512, 2048), shape(2048, 512))] * 2
    args = weights, shape(16384, 512), jax.eval_shape(lambda: jax.random.key(0))
    options = {"target": target, "host_budget": 0, "donate_argnums": 0}
    by_hand = jdelta.plan(step_of(jax.checkpoint(block)), None, *args, **options).compiled_peak
    with pytest.raises(jdelta.BudgetError) as caught:
        jdelta.plan(step_of(mark(block)), "1MiB", *args, **options)
    assert caught.value.floor <= 1.02 * by_hand


# Frameworks


def test_results_of_a_network_that_is_no_stack_equal_the_plain_step():
    """Those of every framework are in ``steps/test_matrix.py``."""
    step, args = STEPS["U-Net"](64, 32, scan=False)
    step_trace, decisions = planned(step, 0.4, *args)
    assert step_trace.automatic
    assert {Decision.SAVE, Decision.RECOMPUTE} <= set(decisions.values())
    got, expected = jax.jit(under(step_trace, decisions, step))(*args), jax.jit(step)(*args)
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in leaves:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.compiler
def test_a_plan_of_an_unrolled_step_fits():
    """For a TPU: that takes minutes, so in one framework. The others are in `test_matrix.py`."""
    step, args = STEPS["plain JAX"](32768, 512, scan=False)
    plan = jdelta.plan(step, 0.7, *args, target="tpu:v5e:2x2", donate_argnums=0)
    assert plan.compiled_peak <= plan.budget < plan.ceiling
    assert Decision.RECOMPUTE in plan.decisions.values()


def test_a_plain_step_that_fits_is_left_as_it_is():
    step, args = STEPS["plain JAX"](64, 32, scan=True)
    assert jdelta.plan(step, 1.0, *args).policy is None
    plain = emit(Step(step, args, (), resolve("cpu", args), {}, automatic=True), None)
    assert plain.lower().as_text() == jax.jit(step).lower(*args).as_text()


def test_plans_are_files_too(tmp_path):
    step, args = STEPS["plain JAX"](2048, 64, scan=True)
    plan = jdelta.plan(step, 0.8, *args)
    assert plan.policy is not None
    plan.save(str(tmp_path / "plan.json"))
    loaded = jdelta.load(str(tmp_path / "plan.json"))
    for a, b in zip(*map(jax.tree.leaves, (loaded.jit(step)(*args), step(*args))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_of_two_gradients():
    """Both are planned; what one differentiates inside of the other belongs to that one."""

    def inner(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def penalised(w, x):
        return inner(w, x) + jnp.sum(jax.grad(inner, argnums=1)(w, x) ** 2)

    def step(w, x):
        return jax.grad(penalised)(w, x), jax.grad(inner)(w, x)

    args = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), jnp.linspace(-2.0, 1.0, 64).reshape(8, 8)
    step_trace, decisions = planned(step, 0.5, *args)
    assert step_trace.automatic
    got = under(step_trace, decisions, step)(*args)
    for a, b in zip(got, step(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


# Values that leave a differentiated function by a closure


def kept_in_a_list(loss, w, n):
    kept = []

    def keeping(w):
        kept.append(jnp.exp(-n))
        return loss(w)

    return jax.grad(keeping)(w) * kept[-1]


def assigned_to_a_nonlocal_name(loss, w, n):
    scale = None

    def assigning(w):
        nonlocal scale
        scale = jnp.exp(-n)
        return loss(w * scale)

    return jax.grad(assigning)(w), scale


def read_by_a_rule_made_inside(loss, w, n):
    def with_rule(w):
        factor = jnp.exp(-n)
        return loss(jax.custom_gradient(lambda w: (w, lambda ct: ct * factor))(w))

    return jax.grad(with_rule)(w)


def a_key_that_is_split_inside(loss, w, n):
    key = jax.random.key(0)

    def noisy(w):
        nonlocal key
        key, own = jax.random.split(key)
        return loss(w * jax.random.normal(own, w.shape))

    return jax.grad(noisy)(w) + n * jax.grad(noisy)(w)


def in_a_loop_over_rows(loss, w, n):
    def one(total, row):
        return total + kept_in_a_list(loss, w, row), None

    return jax.lax.scan(one, w, n * jnp.arange(3.0))[0]


@pytest.mark.parametrize(
    "how",
    [
        kept_in_a_list,
        assigned_to_a_nonlocal_name,
        read_by_a_rule_made_inside,
        a_key_that_is_split_inside,
        in_a_loop_over_rows,
    ],
)
def test_a_value_that_leaves_by_a_closure(how):
    def loss(w):
        return jnp.mean(jnp.sin(jnp.tanh(jnp.sin(jnp.tanh(w @ w)) @ w)) ** 2)

    def step(w, n):
        return how(loss, w, n)

    args = 0.3 * jax.random.normal(jax.random.key(0), (16, 16)), jnp.float32(0.5)
    plan = jdelta.plan(step, None, *args, pin={"*": "recompute"})
    assert plan.policy is not None
    for got, expected in zip(
        *map(jax.tree.leaves, (plan.jit()(*args), jax.jit(step)(*args))), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_value_that_leaves_a_marked_unit_is_refused_by_its_line():
    def step(w):
        kept = []

        @jdelta.remat
        def unit(x):
            kept.append(2 * jnp.sum(x))
            return jnp.sin(x @ w)

        return jax.grad(lambda w: jnp.sum(unit(unit(w))))(w) * kept[-1]

    with pytest.raises(jdelta.TraceError, match=r"A value computed at .*test_automatic.py:\d+"):
        jdelta.plan(step, None, jnp.eye(8))


# Other steps


def test_reverse_mode_is_left_as_it_was():
    before = jax.vjp
    with tracing(Session(automatic=True)):
        assert jax.vjp is not before
    assert jax.vjp is before
    assert jax.grad(lambda x: x**2)(3.0) == 6.0


def test_integer_and_key_outputs_cross_units():
    def loss(w, x, key):
        rows = jnp.argsort(x[:, 0])
        key, other = jax.random.split(key)
        h = jnp.tanh(x @ w) * jax.random.normal(key, x.shape)
        return jnp.sum(jnp.tanh(h[rows] @ w) * jax.random.normal(other, x.shape)), rows

    def step(w, x, key):
        return jax.value_and_grad(loss, has_aux=True)(w, x, key)

    args = 0.1 * jnp.ones((64, 64)), jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64)
    args = *args, jax.random.key(1)
    step_trace, decisions = planned(step, 0.3, *args)
    assert step_trace.automatic
    got = jax.jit(under(step_trace, decisions, step))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # up to 20


def test_integers_beside_a_unit_are_made_of_what_leaves_it():
    """Not of the whole unit, computed for them a second time."""

    def step(ws, x):
        def loss(ws):
            best, y = [], x
            for w in ws:
                y = y + jnp.sin(jnp.tanh(y @ w))
                best.append(jnp.argmax(y, -1))
            return jnp.mean(y**2), best

        return jax.value_and_grad(loss, has_aux=True)(ws)

    args = [0.1 * jnp.ones((64, 64))] * 3, jnp.linspace(-1.0, 1.0, 512 * 64).reshape(512, 64)
    step_trace, decisions = planned(step, 1.0, *args)
    assert len(step_trace.regions) > 1
    staged = jax.make_jaxpr(under(step_trace, decisions, step))(*args)
    products = [e for e in _jax.equations(staged) if e.primitive.name == "dot_general"]
    assert len(products) == 3 + 5  # of the forward pass, and of the backward pass


def test_what_the_rule_of_a_custom_vjp_differentiates_is_part_of_its_unit():
    """Not a region in a region."""
    program = PROGRAMS["custom_rules.vjp_rule_around_the_unit"]
    step, args = program.make(program.small, unmarked)
    plan = jdelta.plan(step, None, *args)
    assert {r.region for r in plan.residuals} == {
        f"region_{i}" for i in range(program.small.layers)
    }


def attention_with_dropout(w, x, key):
    """A layer of attention and an MLP, with dropout in both."""

    def normal(x):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(var + 1e-5)

    def dropped(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    def heads(w):
        return (normal(x) @ w).reshape(8, 512, 8, -1)

    first, second = jax.random.split(key)
    scores = jnp.einsum("bthd,bshd->bhts", heads(w["q"]), heads(w["k"])) / 8.0
    mixed = jnp.einsum("bhts,bshd->bthd", dropped(first, jax.nn.softmax(scores, -1)), heads(w["v"]))
    x = x + mixed.reshape(x.shape) @ w["o"]
    return x + dropped(second, jax.nn.gelu(normal(x) @ w["up"]) @ w["down"])


@pytest.mark.compiler
@needs_cuda
def test_larger_units_where_those_that_are_found_need_more_than_the_budget():
    def step_of(block):
        def step(ws, x, key):
            def loss(ws):
                y = x
                for i, w in enumerate(ws):
                    y = block(w, y, jax.random.fold_in(key, i))
                return jnp.mean(y**2)

            return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

        return step

    wide = {"up": (512, 2048), "down": (2048, 512)} | dict.fromkeys("qkvo", (512, 512))
    w = {name: jax.ShapeDtypeStruct(sizes, jnp.float32) for name, sizes in wide.items()}
    x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    args = [w] * 5, x, jax.eval_shape(lambda: jax.random.key(0))
    options = {"target": "cuda:h100", "host_budget": 0, "donate_argnums": 0}
    by_hand = jdelta.plan(
        step_of(jax.checkpoint(attention_with_dropout)), None, *args, **options
    ).compiled_peak
    plan = jdelta.plan(step_of(attention_with_dropout), int(1.02 * by_hand), *args, **options)
    assert plan.grouping.cuts is Cuts.FEW


@pytest.mark.compiler
@needs_cuda
def test_a_chain_is_cut_otherwise_before_what_enters_regions_leaves_the_device():
    """By hand: groups of two, at the price of nearly one more forward pass."""

    def step_of(group, around):
        def run(layers, y, ends):
            for i, (w, b) in enumerate(layers):
                y = y @ w + b
                y = y if ends and i == len(layers) - 1 else jnp.tanh(y)
            return y

        def step(layers, x):
            def loss(layers):
                y = x
                for i in range(0, 7, group):
                    ends = i + group >= 7
                    y = around(functools.partial(run, ends=ends))(layers[i : i + group], y)
                return (y**2).mean()

            return jax.value_and_grad(loss)(layers)

        return step

    sizes = itertools.pairwise([256, *[1024] * 6, 256])
    layers = [
        (jax.ShapeDtypeStruct(s, "float32"), jax.ShapeDtypeStruct(s[1:], "float32")) for s in sizes
    ]
    args = layers, jax.ShapeDtypeStruct((131072, 256), jnp.float32)
    by_hand = jdelta.plan(step_of(2, jax.checkpoint), None, *args, target="cuda:h100")
    budget = int(1.02 * by_hand.compiled_peak)
    plan = jdelta.plan(step_of(7, unmarked), budget, *args, target="cuda:h100")
    assert plan.grouping.cuts is Cuts.IN_TURN
    assert plan.compiled_peak <= budget
    assert not plan.host_bytes
    assert plan.overhead < 0.35 * plan.step_seconds


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("step", "layers", "target"),
    [
        # The indices of the nearest codes stand for all that they are computed from.
        pytest.param("networks.quantised_codes", None, "cuda:h100", marks=needs_cuda),
        # A shield in the loop makes recompute wait for the cotangent.
        ("autodiff.neural_ode", None, "cpu"),
        pytest.param("layers.encoder_and_decoder", None, "tpu:v5e:2x2", marks=pytest.mark.full),
        # What the next layer reads is computed again all the same.
        ("layers.dense_net", None, "tpu:v5e:2x2"),
        # Small random bits need not be written to memory.
        ("random_bits.dropout_unrolled", 2, "tpu:v5e:2x2"),
        pytest.param("random_bits.dropout_unrolled", 3, "tpu:v5e:2x2", marks=pytest.mark.full),
    ],
)
def test_the_peak_by_hand_is_reached(step, layers, target):
    program = PROGRAMS[step]
    options = {"target": target, "host_budget": 0, **dict(program.options)}
    size = dataclasses.replace(program.large, layers=layers or program.large.layers)
    step, args = program.make(size, jax.checkpoint)
    by_hand = jdelta.plan(step, None, *args, **options).compiled_peak
    step, args = program.make(size, unmarked)
    plan = jdelta.plan(step, int(1.02 * by_hand), *args, **options)
    assert plan.host_bytes == 0
    assert plan.floor <= plan.compiled_peak <= 1.02 * by_hand
