"""Calls of a planned step: what is new in them plans again, what is known does not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdelta
from jdelta import PlanMismatchError
from jdelta._src.search import search
from tests.frameworks import NnxStack, mean_square
from tests.stand_in import compiled_when_called
from tests.trainers import network, rows_of, weights

WIDTH = 16
run = network(jdelta.remat)


def step(ws, x, rate=0.1, *, squared=True):
    def loss(ws):
        y = run(ws, x)
        return mean_square(y) if squared else jnp.abs(y).mean()

    value, grads = jax.value_and_grad(loss)(ws)
    return jax.tree.map(lambda w, g: (w - rate * g).astype(w.dtype), ws, grads), value


def arguments(rows=256):
    return weights(WIDTH), rows_of(rows, WIDTH)


@pytest.fixture
def searches(monkeypatch):
    """Counts the searches for a plan, which go by the simulation."""
    budgets = []
    compiled_when_called(monkeypatch)

    class Counted(search.Search):
        def run(self, budget, *most):
            budgets.append(budget)
            return super().run(budget, *most)

    monkeypatch.setattr("jdelta._src.search.groupings.Search", Counted)
    return budgets


def check(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_each_shape_is_planned_once(searches):
    planned = jdelta.jit(step, budget=0.7)
    for rows, count in ((256, 1), (128, 2), (256, 2), (128, 2), (64, 3), (256, 3)):
        check(planned(*arguments(rows)), jax.jit(step)(*arguments(rows)))
        assert len(searches) == len(planned.plans) == count
    assert len({plan.fingerprint for plan in planned.plans}) == 3


def test_each_dtype_and_weak_type_is_planned_once(searches):
    planned = jdelta.jit(step, budget=0.8)
    ws, x = arguments()
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (ws, x))
    weak, strong = jnp.asarray(0.1), jnp.float32(0.1)
    assert weak.weak_type
    assert not strong.weak_type
    calls = [(ws, x, weak), (ws, x, strong), (*narrow, weak), (*narrow, strong)]
    for count, args in enumerate(calls, start=1):
        check(planned(*args), jax.jit(step)(*args))
        assert len(searches) == count
    for args in calls:
        planned(*args)
    assert len(searches) == 4


def test_arrays_of_numpy_and_scalars_of_python_are_no_new_shapes(searches):
    planned = jdelta.jit(step, budget=0.7)
    ws, x = arguments()
    expected = jax.jit(step)(ws, x, 0.1)
    for args in ((ws, x, 0.1), (ws, np.asarray(x), 0.2), (jax.tree.map(np.asarray, ws), x, 0.1)):
        got = planned(*args)
    check(got, expected)
    assert len(searches) == 1


def test_the_state_that_comes_out_is_no_new_shape(searches):
    planned = jdelta.jit(step, budget=0.7, donate_argnums=0)
    ws, x = arguments()
    expected, _ = arguments()
    for _ in range(3):
        ws, _ = planned(ws, x)
        expected, _ = jax.jit(step)(expected, x)
    check(ws, expected)
    assert len(searches) == 1


def test_arguments_by_name(searches):
    planned = jdelta.jit(step, budget=0.7)
    ws, x = arguments()
    expected = jax.jit(step)(ws, x, 0.3)
    for got in (planned(ws, x, 0.3), planned(ws, x=x, rate=0.3), planned(x=x, rate=0.3, ws=ws)):
        check(got, expected)
    assert len(searches) == 1
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        planned(ws, x, speed=1)


@pytest.mark.parametrize(
    "static", [{"static_argnames": "squared"}, {"static_argnames": ["squared"]}]
)
def test_static_arguments_by_name(searches, static):
    planned = jdelta.jit(step, budget=0.8, **static)
    for squared, count in ((True, 1), (False, 2), (True, 2)):
        expected = jax.jit(step, **static)(*arguments(), squared=squared)
        check(planned(*arguments(), squared=squared), expected)
        assert len(searches) == count


def powered(power, ws, x):
    loss = lambda ws: jnp.mean(jnp.abs(run(ws, x)) ** power)  # noqa: E731
    value, grads = jax.value_and_grad(loss)(ws)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


@pytest.mark.parametrize("number", [0, -3])
def test_static_arguments_by_number(searches, number):
    planned = jdelta.jit(powered, budget=0.8, static_argnums=number, donate_argnums=1)
    for power, count in ((2, 1), (3, 2), (2, 2)):
        ws, x = arguments()
        expected = jax.jit(powered, static_argnums=0)(power, ws, x)
        check(planned(power, ws, x), expected)
        assert ws["up"].is_deleted()
        assert not x.is_deleted()
        assert len(searches) == count
    with pytest.raises(TypeError, match="static argument power is a list, which has no hash"):
        planned([2], *arguments())


def test_a_plan_is_for_its_static_arguments(tmp_path):
    plan = jdelta.plan(powered, 0.8, 2, *arguments(), static_argnums=0)
    check(plan.jit()(2, *arguments()), jax.jit(powered, static_argnums=0)(2, *arguments()))
    with pytest.raises(PlanMismatchError, match=r"other static arguments: \(\(0, 2\),\), not"):
        plan.jit()(3, *arguments())
    plan.save(tmp_path / "plan.json")
    loaded = jdelta.load(tmp_path / "plan.json")
    check(loaded.jit(powered)(2, *arguments()), plan.jit()(2, *arguments()))
    with pytest.raises(PlanMismatchError, match="made for program"):
        loaded.jit(powered)(3, *arguments())


# Plans for other programs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    jdelta.plan(step, 0.7, *arguments()).save(path)
    return jdelta.load(path)


OTHERS = [
    (lambda: arguments(64), r"x: expected float32\[256,16\], came float32\[64,16\]"),
    (
        lambda: jax.tree.map(lambda a: a.astype(jnp.bfloat16), arguments()),
        r"\['down'\]: expected float32\[6,16,16\], came bfloat16\[6,16,16\].*x: ",
    ),
    (lambda: (*arguments(), 0.2), r"rate was not there, came float32\[\]"),
    (
        lambda: ({**arguments()[0], "bias": jnp.zeros(3)}, arguments()[1]),
        r"ws\['bias'\] was not there, came float32\[3\]",
    ),
]


@pytest.mark.parametrize(("make", "says"), OTHERS)
def test_other_arguments_are_named(saved, make, says):
    with pytest.raises(PlanMismatchError, match=f"other shapes, dtypes or shardings: .*{says}"):
        saved.jit(step)(*make())


def test_a_changed_shape_after_the_first_call_is_named(saved):
    planned = saved.jit(step)
    check(planned(*arguments()), jax.jit(step)(*arguments()))
    with pytest.raises(PlanMismatchError, match=r"x: expected float32\[256,16\], came float32\[8"):
        planned(*arguments(8))


def test_another_program_is_refused_by_name(saved):
    @jdelta.remat
    def other(x, w):
        return x + jnp.tanh(x @ w["up"] @ w["down"])

    def other_step(ws, x):
        loss = lambda ws: mean_square(jax.lax.scan(lambda x, w: (other(x, w), None), x, ws)[0])  # noqa: E731
        value, grads = jax.value_and_grad(loss)(ws)
        return grads, value

    with pytest.raises(
        PlanMismatchError, match=r"equal arguments: it lacks layer and it has other"
    ):
        saved.jit(other_step)(*arguments())
    doubled = lambda ws, x: step(jax.tree.map(lambda w: 2.0 * w, ws), x)  # noqa: E731
    with pytest.raises(PlanMismatchError, match=r"its regions have the same names"):
        saved.jit(doubled)(*arguments())


# NNX objects as arguments


def objects():
    model = NnxStack(WIDTH, True, nnx.Rngs(0), jdelta.remat)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: mean_square(model(x)))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_nnx_objects_change_as_under_nnx_jit(searches, donate):
    planned = jdelta.jit(train, budget=0.8, donate_argnums=donate)
    ours, theirs = objects(), objects()
    before = jax.tree.map(jnp.copy, nnx.state(ours[0]))
    x = rows_of(256, WIDTH)
    for _ in range(3):
        check(planned(*ours, x), nnx.jit(train)(*theirs, x))
    check(nnx.state(ours), nnx.state(theirs))
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), nnx.state(ours[0]), before)
    assert min(jax.tree.leaves(moved)) > 0
    assert len(searches) == 1


def test_an_nnx_object_of_another_structure_is_planned_for_itself(searches):
    planned = jdelta.jit(train, budget=0.9)
    x = rows_of(256, WIDTH)
    first, second = objects(), objects()
    second[0].name = "another"
    for each in (first, second, first):
        planned(*each, x)
    assert len(searches) == 2
