"""Plans below the floor: what enters regions is computed again, too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdelta
from jdelta import Decision
from jdelta._src.regions.cut import Cuts
from tests.compilers import TARGETS, cpus_keep_recompute
from tests.sines import unrolled
from tests.stand_in import as_on_an_idle_machine, in_place_of_the_compiler

LAYERS, ROWS, WIDTH = 10, 16384, 128
VALUE = ROWS * WIDTH * 4


@jdelta.remat
def layer(w, x):
    return 0.9 * jnp.sin(jnp.tanh(x @ w) @ w.T)


step = unrolled(layer)


def shapes(layers=LAYERS):
    ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    return ws, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


@pytest.fixture
def by_stand_in(monkeypatch):
    in_place_of_the_compiler(monkeypatch)


plans_of = functools.partial(jdelta.plan, step, target="cpu", host_budget=0)


def floor_of(**options):
    with pytest.raises(jdelta.BudgetError, match="with every residual recomputed") as error:
        plans_of(1024, *shapes(), **options)
    assert (" of regions too" in str(error.value)) == options.get("per_layer", True)
    return error.value.floor


def dropped(plan):
    return [name for name, _ in plan.policy.levels]


@pytest.mark.usefixtures("by_stand_in")
def test_the_less_memory_there_is_the_more_is_dropped():
    least = floor_of()
    kept = 1024 + (LAYERS - 1) * VALUE
    budgets = range(least, least + kept, 2 * VALUE)
    plans = [plans_of(budget, *shapes()) for budget in budgets]
    assert all(plan.compiled_peak <= plan.budget for plan in plans)
    assert all(not plan.host_bytes for plan in plans)
    overheads = [plan.overhead for plan in plans]
    assert overheads == sorted(overheads, reverse=True)
    assert len(dropped(plans[0])) >= LAYERS - 3
    assert 0 < len(dropped(plans[2])) < len(dropped(plans[0]))
    for plan in plans:
        decided = {plan.decisions[name] for name in dropped(plan)}
        assert decided <= {Decision.RECOMPUTE}


@pytest.mark.usefixtures("by_stand_in")
def test_each_value_costs_a_forward_pass_of_a_layer(monkeypatch):
    as_on_an_idle_machine(monkeypatch)
    floor = floor_of(per_layer=False)
    plans = [plans_of(floor - count * VALUE, *shapes()) for count in range(4)]
    counts = [len(dropped(plan)) for plan in plans]
    assert counts[0] == 0
    assert all(least <= count <= least + 1 for least, count in enumerate(counts))  # by the rates
    one = plans[0].overhead / LAYERS
    for plan, count in zip(plans, counts, strict=True):
        assert plan.overhead - plans[0].overhead == pytest.approx(one * count, rel=0.1)


@pytest.mark.usefixtures("by_stand_in")
def test_a_floor_far_above_the_budget_is_not_compiled():
    floor = floor_of(per_layer=False)
    assert plans_of(int(0.95 * floor), *shapes()).compiles == 2
    assert plans_of(int(0.7 * floor), *shapes()).compiles == 1


@pytest.mark.usefixtures("by_stand_in")
def test_an_unmarked_step_is_cut_small_where_the_floor_does_not_fit():
    unmarked = functools.partial(
        jdelta.plan, unrolled(layer.__wrapped__), target="cpu", host_budget=0
    )
    with pytest.raises(jdelta.BudgetError) as error:
        unmarked(1024, *shapes())
    plan = unmarked(error.value.floor, *shapes())
    assert plan.grouping.cuts is Cuts.APART
    assert plan.policy.levels
    assert error.value.floor <= floor_of()  # of whole layers


@pytest.mark.usefixtures("by_stand_in")
def test_what_is_pinned_is_not_dropped():
    pin = {"layer_4/*": "save"}
    budget = floor_of(pin=pin)
    plan = plans_of(budget, *shapes(), pin=pin)
    assert dropped(plan)
    assert not any(name.startswith("layer_4/input") for name in dropped(plan))
    assert all(d is Decision.SAVE for n, d in plan.decisions.items() if n.startswith("layer_4/"))


@pytest.mark.usefixtures("by_stand_in")
def test_a_plan_that_drops_inputs_says_so_and_is_no_policy(tmp_path):
    plan = plans_of(floor_of(), *shapes())
    assert "from earlier regions" in str(plan)
    (explained,) = plan.explain(dropped(plan)[0])
    assert "recompute: by earlier regions" in str(explained)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert jdelta.load(path).policy == plan.policy
    with pytest.raises(jdelta.PlanMismatchError, match="again from earlier regions"):
        jax.grad(lambda w, x: jax.checkpoint(layer, policy=plan)(w, x).sum())(
            jnp.ones((8, 8)), jnp.ones((8, 8))
        )
    with pytest.raises(jdelta.PlanMismatchError, match="again from earlier regions"):
        plan.export("jax")


@pytest.mark.usefixtures("by_stand_in")
def test_a_plan_that_is_to_be_a_policy_drops_none():
    with pytest.raises(jdelta.BudgetError):
        plans_of(floor_of(), *shapes(), per_layer=False)


@cpus_keep_recompute
@pytest.mark.parametrize("layer", [layer, layer.__wrapped__], ids=["marked", "found"])
def test_numbers_are_those_of_the_plain_step(layer):
    step, (ws, x) = unrolled(layer), shapes(6)
    plain = jdelta.plan(step, None, ws, x)
    plan = jdelta.plan(step, 0.35, ws, x, host_budget=0)
    assert plan.policy.levels
    assert plan.compiled_peak <= plan.budget < 0.36 * plain.compiled_peak
    keys = jax.random.split(jax.random.key(0), 7)
    args = (
        [0.3 * jax.random.normal(k, w.shape) for k, w in zip(keys, ws, strict=False)],
        jax.random.normal(keys[-1], x.shape),
    )
    expected, got = jax.jit(step)(*args), plan.jit()(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
def test_compilers_need_as_little_as_is_planned(target):
    options = {"target": target, "host_budget": 0}
    by_hand = jdelta.plan(unrolled(jax.checkpoint(layer.__wrapped__)), None, *shapes(6), **options)
    plan = jdelta.plan(step, int(0.8 * by_hand.compiled_peak), *shapes(6), **options)
    assert plan.policy.levels
    assert plan.compiled_peak <= plan.budget
    assert not plan.undone
