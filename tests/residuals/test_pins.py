"""What a name or a pattern of `pin=` means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jdelta
from jdelta import Decision, PlanMismatchError
from tests.crossed import crossed
from tests.stacks import scanned, unrolled

WEIGHTS = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def planned(step, pin, *args, **options):
    return jdelta.plan(step, None, *(args or (WEIGHTS, X)), pin=pin, **options)


def decided(plan, decision=Decision.SAVE):
    return {name for name, d in plan.decisions.items() if d is decision}


def bracketed(w, x):
    """Layers in scopes whose names are patterns that fit others."""

    def layer(i, w, x):
        with jax.named_scope(f"layers[{i}]"), jax.named_scope("what?*"):
            return jnp.tanh(jnp.sin(x @ w))

    layer = jdelta.remat(layer, name="block")
    return jax.grad(lambda w: jnp.sum(layer(1, w[1], layer(0, w[0], x)) ** 2))(w)


def test_the_printed_name_is_taken_as_it_is():
    names = [r.name for r in planned(bracketed, {"*": "recompute"}).residuals]
    name = next(name for name in names if "layers[0]" in name and name.endswith("tanh"))
    plan = planned(bracketed, {"*": "recompute", name: "save"})
    assert name in decided(plan)
    assert not any("layers[1]" in other and "tanh" in other for other in decided(plan))
    assert [e.name for e in plan.explain(name)] == [name]


def test_brackets_in_a_pattern_stand_for_themselves_first():
    plan = planned(bracketed, {"*": "recompute", "block_*/layers[1]/*/sin": "save"})
    kept = [name for name in decided(plan) if name.endswith("sin")]
    assert [name.split("/")[1] for name in kept] == ["layers[1]"]
    both = planned(bracketed, {"*": "recompute", "block_[01]/*/sin": "save"})
    assert sum(name.endswith("sin") for name in decided(both)) == 2


def layer(w, x):
    x = checkpoint_name(x, "layer_in")
    h = jnp.tanh(jnp.sin(x @ w))
    return checkpoint_name(x + h, "layer_out")


def step_of(stack, unit):
    def loss(w, x):
        return jnp.mean(stack(unit, w, checkpoint_name(jnp.exp(x @ w[0]), "embedding")) ** 2)

    return jax.grad(loss)


LARGE = jax.ShapeDtypeStruct((3, 1024, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 1024), "f4")


@pytest.mark.compiler
@crossed(mark={"marked": jdelta.remat, "found": lambda f: f}, name=["layer_in", "layer_out"])
def test_what_a_loop_carries_goes_by_either_of_its_names(mark, name):
    step = step_of(scanned, mark(layer))
    plan = planned(step, {"*": "recompute", name: "offload"}, *LARGE, target="tpu:v5e:2x2")
    (away,) = decided(plan, Decision.OFFLOAD)
    assert away.endswith("/layer_in")
    assert plan.host_bytes >= 3 * 1024 * 1024 * 4
    assert f"'{away.rpartition('/')[2]}'" in plan.export("jax")


@pytest.mark.parametrize("name", ["layer_in", "layer_out"])
def test_what_enters_a_layer_goes_by_either_of_its_names(name):
    plan = planned(step_of(unrolled, jdelta.remat(layer)), {"*": "recompute", name: "save"})
    entering = {r.name for r in plan.residuals if r.region_input}
    assert {"layer_0/layer_in", "layer_1/layer_in", "layer_2/layer_in"} == entering <= decided(plan)


def test_a_name_given_outside_of_the_region_is_printed():
    def end(w, x):
        return checkpoint_name(x + jnp.tanh(jnp.sin(x @ w)), "layer_out")

    plan = planned(step_of(scanned, jdelta.remat(end)), {"layer_out": "save"})
    assert plan.decisions["end/input_1"] is Decision.SAVE
    assert "end/input_1 (layer_out)" in str(plan)
    assert planned(step_of(scanned, jdelta.remat(end)), {"end/input_1 (layer_out)": "save"})
    assert plan.explain("layer_out") == plan.explain("end/input_1 (layer_out)")


def inside_of_loop(w, x):
    def loss(w):
        def body(carry):
            i, y = carry
            return i + 1, checkpoint_name(jnp.sin(y), "in_while")

        y = jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]
        scaled = checkpoint_name(jdelta.remat(_cheap, name="unit")(w, y) * 2.0, "outside")
        return jnp.sum(scaled)

    return jax.value_and_grad(loss)(w)


def _cheap(w, x):
    w = checkpoint_name(w, "weight")
    y = jnp.tanh(x @ w[0])
    ones = checkpoint_name(jnp.ones(y.shape), "ones")
    return checkpoint_name(y + x, "sum") + ones


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("weight", "argument of the step"),
        ("sum", r"cheap to compute \(add\)"),
        ("ones", "compilers make it where it is read"),
        ("outside", "outside of all regions"),
        ("in_while", "outside of all regions, or in a loop"),
        ("unit/none*", "no residual is called"),
    ],
)
def test_what_cannot_be_pinned_says_why(name, says):
    with pytest.raises(PlanMismatchError, match=says):
        planned(inside_of_loop, {name: "save"})


def test_a_name_that_a_later_pattern_overrides_is_not_ignored():
    step = step_of(unrolled, jdelta.remat(layer))
    with pytest.raises(PlanMismatchError, match="decides nothing, since '\\*' after it"):
        planned(step, {"layer_1/tanh": "save", "*": "recompute"})
    assert planned(step, {"layer_1/tanh": "recompute", "*": "recompute"})


def test_numbers_under_pins_by_the_users_names():
    step = step_of(scanned, layer)
    w = 0.1 * jax.random.normal(jax.random.key(0), WEIGHTS.shape)
    x = jnp.ones(X.shape)
    plan = planned(step, {"*": "recompute", "embedding": "save"}, w, x)
    np.testing.assert_allclose(plan.jit()(w, x), step(w, x), rtol=1e-5, atol=1e-6)
