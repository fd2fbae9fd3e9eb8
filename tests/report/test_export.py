"""Plans in the words of other libraries, and hand policies as plans."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.ad_checkpoint import checkpoint_name

import jdelta
from jdelta import Decision
from jdelta._src.report.export import FORMS
from tests import small
from tests.crossed import crossed
from tests.stacks import kept
from tests.stand_in import compiled_when_called
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
    with pytest.raises(jdelta.ArgumentError, match="form must be one of"):
        planned().export("other")


def test_maxtext_refuses_names_it_does_not_know():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(checkpoint_name(jnp.tanh(x @ w), "mine")))(w)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = jdelta.plan(step, None, shape, shape, pin={"*mine*": "save"})
    with pytest.raises(jdelta.PlanMismatchError, match="no setting for mine"):
        plan.export("maxtext")


def test_maxtext_gets_no_setting_that_it_would_refuse():
    """Its configuration forbids other keys, and its layers' input cannot be recomputed."""
    names = ("decoder_layer_input", "mine", "kv_proj", "mlpwi")

    def layer(w, x):
        for name in names:
            x = checkpoint_name(jnp.tanh(x @ w), name)
        return x

    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jdelta.remat(layer)(w, x)))(w)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    pin = {"*": "recompute", "*kv_proj*": "save"}
    said = yaml.safe_load(jdelta.plan(step, None, shape, shape, pin=pin).export("maxtext"))
    assert "mine" not in said
    assert said["kv_proj"] == said["decoder_layer_input"] == "device"
    assert said["mlpwi"] == "remat"
    assert "mla_q" not in said


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
    inside = [r for r in plan.residuals if not r.region_input]
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


# Every residual of every region is put to the policy as JAX would.


class Dropping(nn.Module):
    """Layers that draw their masks inside."""

    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dropout(0.1, deterministic=False)(jnp.tanh(nn.Dense(16)(x))), None


class Layers(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, x):
        if not self.scan:
            return Dropping()(Dropping()(x)[0])[0]
        rngs = {"params": True, "dropout": True}
        return nn.scan(Dropping, {"params": 0}, split_rngs=rngs, length=2)()(x, None)[0]


def of_layers(scan):
    net, x, key = Layers(scan), jnp.ones((8, 16)), jax.random.key(0)
    params = net.init({"params": key, "dropout": key}, x)

    def loss(params, x, key):
        return jnp.mean(net.apply(params, x, rngs={"dropout": key}) ** 2)

    return jax.grad(loss), (params, x, key)


def of_experts():
    """A primitive that JAX does not export, complex numbers, a rule of one's own, a loop."""

    @jax.custom_vjp
    def twice(x):
        return 2 * jnp.sin(x)

    twice.defvjp(lambda x: (twice(x), jnp.cos(x)), lambda cos, ct: (2 * ct * cos,))

    def loss(w, x):
        y = jnp.tanh(jax.lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([3, 5], jnp.int32)))
        y = jnp.real(jnp.fft.ifft(jnp.fft.fft(y) * jnp.exp(1j * y)))
        y = jax.lax.fori_loop(0, 2, lambda _, y: twice(y @ w), y)
        return jnp.sum(jax.lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, y) ** 2)

    return jax.grad(loss), (jnp.eye(16) + 0.1, jnp.ones((8, 16)) / 7)


STEPS = {
    "loop": lambda: of_layers(False),
    "nn.scan": lambda: of_layers(True),
    "experts": of_experts,
}
EVERY_POLICY = {
    "everything": POLICIES.everything_saveable,
    "nothing": POLICIES.nothing_saveable,
    "dots": POLICIES.dots_saveable,
    "no batch": POLICIES.checkpoint_dots_with_no_batch_dims,
    "anything but": POLICIES.save_anything_except_these_names("x"),
    "names but": POLICIES.save_any_names_but_these("x"),
    "only": POLICIES.save_only_these_names("x"),
    "both": POLICIES.save_from_both_policies(
        POLICIES.dots_saveable, POLICIES.save_only_these_names("x")
    ),
    "own": lambda prim, *avals, **_: prim.name != "tanh" and all(a.size < 999 for a in avals),
}


@crossed(name=list(STEPS), policy=list(EVERY_POLICY))
def test_every_policy_is_planned(name, policy, monkeypatch):
    compiled_when_called(monkeypatch)
    step, args = STEPS[name]()
    plan = jdelta.plan(step, None, *args, pin=EVERY_POLICY[policy])
    kept = {r.name for r in plan.residuals if not r.region_input} & {
        name for name, d in plan.decisions.items() if d is Decision.SAVE
    }
    assert bool(kept) == (policy not in ("nothing", "names but", "only"))
    for a, b in zip(*map(jax.tree.leaves, (plan.jit()(*args), jax.jit(step)(*args))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_policies_are_asked_with_jaxs_own_objects():
    step, args = of_experts()
    asked = {}

    def policy(prim, *avals, **params):
        asked[prim.name] = prim, avals, params
        return False

    jdelta.plan(step, None, *args, pin=policy)
    prim, avals, params = asked["ragged_dot_general"]
    closed = jax.make_jaxpr(jax.lax.ragged_dot)(
        jnp.ones((8, 16)), jnp.ones((2, 16, 16)), jnp.array([3, 5])
    )
    (eqn,) = (e for e in closed.eqns if e.primitive.name == "ragged_dot_general")
    assert prim is eqn.primitive
    assert params.keys() == eqn.params.keys()
    assert [aval.shape for aval in avals] == [v.aval.shape for v in eqn.invars]
    drawn = {}

    def of_keys(prim, *avals, **_):
        drawn[prim.name] = avals
        return True

    step, args = of_layers(True)
    jdelta.plan(step, None, *args, pin=of_keys)
    assert any(jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in drawn["random_bits"])


@pytest.mark.compiler
def test_a_policy_that_offloads_what_the_loop_carries():
    def loss(w, x):
        def layer(x, w):
            x = checkpoint_name(x, "layer_in")
            return x + jnp.tanh(jnp.sin(x @ w)), None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 1024, 1024), (1024, 1024)))
    policy = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_in"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    plan = jdelta.plan(jax.grad(loss), None, *shapes, pin=policy, target="tpu:v5e:2x2")
    away = [name for name, d in plan.decisions.items() if d is Decision.OFFLOAD]
    assert [name.rpartition("/")[2] for name in away] == ["layer_in"]
    assert plan.host_bytes >= 3 * 1024 * 1024 * 4


def failing(prim, *_, **__):
    raise KeyError(prim.name)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (failing, "policy failing fails for .* 'region.*KeyError"),
        (lambda *_, **__: "save", "this one returned 'save'"),
        (lambda prim: True, "takes 1 positional argument|policy\\(primitive"),
    ],
)
def test_a_policy_that_fails_is_named(policy, says):
    step, args = of_experts()
    with pytest.raises(jdelta.PlanMismatchError, match=says) as error:
        jdelta.plan(step, None, *args, pin=policy)
    assert error.value.__cause__ is not None
