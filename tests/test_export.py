"""Plans in the words of other libraries, and hand policies as plans."""

import jax
import jax.numpy as jnp
import pytest
import yaml
from jax.ad_checkpoint import checkpoint_name

import jdelta
from jdelta import Decision
from jdelta._export import FORMS
from tests import small
from tests.stacks import kept
from tests.versions import fails_in_jax_0_10_with_remat3

PINS = {"*": "recompute", "*mlpwi*": "save"}
POLICIES = jax.checkpoint_policies


def planned(step=small.step, pin=None, **options):
    return jdelta.plan(step, None, *small.make_args(64), pin=pin or PINS, **options)


@fails_in_jax_0_10_with_remat3
def test_jax_gets_a_call_that_keeps_the_same():
    policy = eval(planned().export("jax").split("\n\n")[-1], {"jax": jax})
    w = (jnp.ones((8, 32)), jnp.ones((32, 8)))

    def loss(w, x):
        return jnp.sum(jax.checkpoint(small.layer, policy=policy)(w, x))

    names = [name for *_, name in kept(loss, w, jnp.ones((4, 8))) if name]
    assert names == ["mlpwi"]


def test_maxtext_gets_a_setting_for_every_name_it_knows():
    said = yaml.safe_load(planned().export("maxtext"))
    assert said["remat_policy"] == "custom"
    assert said["mlpwi"] == "device"
    assert said["mlpwo"] == said["context"] == "remat"
    assert said["decoder_layer_input"] == "device"


def test_levanter_gets_its_lists():
    (said,) = yaml.safe_load(planned().export("levanter")).values()
    assert said["save_block_internals"] == ["mlpwi"]
    assert said["offload_block_internals"] == []
    assert said["save_carries"] is True


def test_axlearn_gets_patterns():
    assert "names_which_can_be_saved='mlpwi'" in planned().export("axlearn")


def test_what_has_no_name_is_said():
    text = planned(pin={"*": "save"}).export("jax")
    assert "without a name of its own" in text
    assert "/cos" in text


def test_forms_are_checked():
    with pytest.raises(ValueError, match="form must be one of"):
        planned().export("other")


def test_maxtext_refuses_names_it_does_not_know():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(checkpoint_name(jnp.tanh(x @ w), "mine")))(w)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = jdelta.plan(step, None, shape, shape, pin={"*mine*": "save"})
    with pytest.raises(jdelta.PlanMismatchError, match="no setting for mine"):
        plan.export("maxtext")


def test_layers_decided_apart_are_refused():
    pin = {"*": "recompute", "*_0/mlpwi": "save"}
    plan = planned(small.unrolled_step, pin)
    for form in FORMS:
        with pytest.raises(jdelta.PlanMismatchError, match="decides differently"):
            plan.export(form)


@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        (POLICIES.nothing_saveable, set()),
        (POLICIES.everything_saveable, None),
        (POLICIES.dots_saveable, {"dot_general"}),
        (POLICIES.save_only_these_names("mlpwi"), {"tanh"}),
        (lambda prim, *_, **params: prim.name == "tanh", {"tanh"}),
    ],
)
def test_a_hand_policy_decides_everything(policy, saved):
    plan = planned(pin=policy)
    inside = [r for r in plan.residuals if not r.boundary]
    got = {r.name for r in inside if plan.decisions[r.name] is Decision.SAVE}
    if saved is None:
        assert got == {r.name for r in inside}
    else:
        assert {r.producer for r in inside if r.name in got} == saved


def test_a_hand_policy_that_offloads():
    policy = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["mlpwo"],
        names_which_can_be_offloaded=["mlpwi"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    with pytest.raises(jdelta.PlanMismatchError, match="cannot be offloaded"):
        planned(pin=policy)


def test_a_plan_by_hand_computes_the_same():
    shapes = small.make_args(64)
    keys = iter(jax.random.split(jax.random.key(0), 3))
    args = jax.tree.map(lambda s: 0.1 * jax.random.normal(next(keys), s.shape), shapes)
    plan = jdelta.plan(small.step, None, *args, pin=POLICIES.dots_saveable)
    for a, b in zip(*map(jax.tree.leaves, (plan.jit()(*args), small.step(*args))), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-7)
