"""Steps are called, and told of donation, statics and shardings, as under ``jax.jit``."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdelta


def step(state, x, *, scale=1.0):
    """A step that decides about residuals; ``scale`` may come by name."""

    def loss(w):
        return scale * jnp.mean(jnp.tanh(jnp.sin(x @ w) @ w) ** 2)

    value, grad = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.1 * grad}, value


def start():
    return {"w": jnp.linspace(-0.5, 0.5, 64).reshape(8, 8)}


X = jnp.ones((16, 8)) / 8


def same(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, expected)


def test_donation_by_name_takes_the_buffer():
    state = start()
    same(jdelta.jit(step, budget="1GiB", donate_argnames="state")(state, X), step(start(), X))
    assert state["w"].is_deleted()


def test_a_call_by_name_donates_what_is_named_by_number():
    state = start()
    jdelta.jit(step, budget="1GiB", donate_argnums=0)(x=X, state=state)
    assert state["w"].is_deleted()


def test_keyword_only_arguments_are_donated_by_name():
    def keyword(x, *, state):
        return step(state, x)

    state = start()
    plan = jdelta.plan(keyword, "1GiB", X, state=state, donate_argnames="state")
    plan.jit()(X, state=state)
    assert plan.donate_argnums == ("state",)
    assert state["w"].is_deleted()


@pytest.mark.parametrize("option", ["donate_argnums", "static_argnums"])
def test_arguments_that_the_step_lacks_are_refused(option):
    with pytest.raises(jdelta.ArgumentError, match=r"step has no argument 5; it takes state, x"):
        jdelta.jit(step, budget="1GiB", **{option: 5})


def test_negative_numbers_count_from_the_end():
    plan = jdelta.plan(lambda state, x: step(state, x), "1GiB", start(), X, donate_argnums=-2)
    assert plan.donate_argnums == (0,)


def test_a_decorator_with_arguments_keeps_the_name():
    @jdelta.jit(budget="1GiB")
    def named(state, x):
        """What it does."""
        return step(state, x)

    same(named(start(), X), step(start(), X))
    assert (named.__name__, named.__doc__) == ("named", "What it does.")
    with pytest.raises(AttributeError, match="planned when it is called"):
        _ = named.lower


def test_the_budget_may_come_by_position():
    run = jdelta.jit(step, "1GiB", donate_argnums=0)
    same(run(start(), X), step(start(), X))
    assert run.plans[0].budget == 2**30


def test_several_threads_make_one_plan():
    planned = jdelta.jit(step, budget="1GiB")
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: planned(start(), X), range(3)))
    same(results, [step(start(), X)] * 3)
    assert len(planned.plans) == 1


def test_methods_are_steps():
    class Trainer:
        @functools.partial(jdelta.jit, budget="1GiB", static_argnums=0)
        def train(self, state, x):
            return step(state, x)

        @jdelta.jit(budget="1GiB")
        @staticmethod
        def alone(state, x):
            return step(state, x)

    same(Trainer().train(start(), X), step(start(), X))
    same(Trainer().alone(start(), X), step(start(), X))


def test_plan_takes_arguments_by_name():
    plan = jdelta.plan(step, "1GiB", start(), x=X, scale=2.0)
    same(plan.jit()(start(), X, scale=2.0), step(start(), X, scale=2.0))
    assert any(line.startswith("state['w']: float32[8,8]") for line in plan.arguments)


def test_what_is_neither_option_nor_argument_is_refused():
    with pytest.raises(jdelta.ArgumentError, match="did you mean donate_argnums"):
        jdelta.plan(lambda state, x: step(state, x), "1GiB", start(), X, donate_argnum=0)
    with pytest.raises(jdelta.ArgumentError, match="did you mean host_budget"):
        jdelta.jit(step, budget="1GiB", host_buget=0)
    with pytest.raises(jdelta.ArgumentError, match=r"jax.jit's backend: name the target"):
        jdelta.jit(step, budget="1GiB", backend="cpu")


def test_all_arguments_at_once_are_to_be_given_one_by_one():
    expected = r"follow the budget, each by itself: jdelta.plan\(step, budget, state, x\)"
    with pytest.raises(jdelta.ArgumentError, match=expected):
        jdelta.plan(step, "1GiB", args=(start(), X))
    with pytest.raises(jdelta.ArgumentError, match=r"itself: .*\(<lambda>, budget, \*args\)"):
        jdelta.plan(lambda *args: step(*args), "1GiB", args=(start(), X))
    with pytest.raises(jdelta.ArgumentError, match=r"step takes state, x, scale, .* a tuple of 2"):
        jdelta.plan(step, "1GiB", (start(), X))
    with pytest.raises(jdelta.ArgumentError, match=r"a list of 2, for state\..*each by itself"):
        jdelta.jit(step, "1GiB")([start(), X])


def test_a_tuple_that_is_an_argument_is_taken():
    run = jdelta.jit(lambda pair, scale=1.0: step(*pair, scale=scale), "1GiB")
    same(run((start(), X)), step(start(), X))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        jdelta.plan(lambda state, x: x, "1GiB", (X, X, X))


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ((X, X), "got tuple. Give the function itself, not what a call of it returns"),
        (X, "not what a call of it returns"),
        ("1GiB", r"got str. Give the budget after it, or by name \(budget=\)"),
    ],
)
def test_a_step_that_is_no_function_is_refused(first, says):
    with pytest.raises(jdelta.ArgumentError, match=says):
        jdelta.plan(first, "1GiB", X)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"donate": 0}, "did you mean donate_argnums"),
        ({"s": 0}, "is no option of jdelta nor an argument of step: there are donate_argnums"),
        ({"arg": 0}, "there are donate_argnums"),
        ({"budgett": 1}, "did you mean budget"),
        ({"target": 5}, "target: expected a name such as 'cuda:h100', got int"),
        ({"pin": None}, "pin: expected a mapping from names to decisions, or a policy"),
        ({"pin": {1: "save"}}, "pin: expected names of residuals or patterns, got 1"),
        ({"pin": {"": "save"}}, "pin: expected names of residuals or patterns, got ''"),
        ({"history": jdelta.History}, "expected a jdelta.History, got the class History"),
        ({"per_layer": "yes"}, "per_layer: expected True or False, got str"),
        ({"donate_argnums": 0.5}, "donate_argnums: expected the number of an argument of step"),
        ({"donate_argnames": "q"}, "donate_argnames: step has no argument 'q'"),
        ({"static_argnums": 9}, "static_argnums: step has no argument 9"),
    ],
)
def test_what_an_option_does_not_take_is_refused_by_name(option, says):
    with pytest.raises(jdelta.ArgumentError, match=says):
        jdelta.plan(step, "1GiB", start(), X, **option)


def test_an_argument_may_be_called_self():
    def run(self, x):
        return step(self, x)

    expected = step(start(), X)
    same(jdelta.jit(run, budget="1GiB")(self=start(), x=X), expected)
    same(jdelta.plan(run, "1GiB", self=start(), x=X).jit()(self=start(), x=X), expected)


def test_an_argument_called_as_an_option_is_told_apart():
    def labelled(state, target):
        return step(state, target)

    def continued(state, history):
        return step(state, history)

    with pytest.raises(jdelta.ArgumentError, match=r"target= is an option.*by position"):
        jdelta.plan(labelled, "1GiB", start(), target=X)
    with pytest.raises(jdelta.ArgumentError, match=r"history= is an option.*by position"):
        jdelta.plan(continued, "1GiB", start(), history=X)


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_what_a_jitted_step_was_told_is_taken_over(jit):
    def configured(state, x, mode):
        assert mode == "train"
        return step(state, x)

    state = start()
    jitted = jit(configured, donate_argnums=0, static_argnums=2)
    same(jdelta.jit(jitted, budget="1GiB")(state, X, "train"), step(start(), X))
    assert state["w"].is_deleted()
    kept = start()
    jdelta.jit(jitted, budget="1GiB", donate_argnums=())(kept, X, "train")
    assert not kept["w"].is_deleted()


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit, eqx.filter_jit])
def test_a_function_around_a_jitted_step_is_no_jitted_step(jit):
    """``functools.wraps`` gives it all attributes of the jitted one."""
    jitted = jit(step)

    @functools.wraps(jitted)
    def doubled(state, x):
        state, value = jitted(state, x)
        return state, 2 * value

    same(jdelta.jit(doubled, budget="1GiB")(start(), X), doubled(start(), X))


def test_shardings_of_arguments_and_results():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    told = {"in_shardings": (everywhere, rows), "out_shardings": (rows, everywhere)}
    plan = jdelta.plan(lambda state, x: step(state, x), "1GiB", start(), X, **told)
    assert any("P(data) over data=4" in line for line in plan.arguments)
    state, loss = plan.jit()(start(), X)
    assert state["w"].sharding.spec == P("data")
    same((state, loss), step(start(), X))
    jitted = jax.jit(lambda state, x: step(state, x), **told)
    assert jdelta.jit(jitted, budget="1GiB")(start(), X)[0]["w"].sharding.spec == P("data")


def test_shardings_that_do_not_fit_are_refused():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(jdelta.ArgumentError, match="in_shardings has 3 parts"):
        jdelta.plan(lambda a, b: step(a, b), "1GiB", start(), X, in_shardings=(place,) * 3)
    with pytest.raises(jdelta.ArgumentError, match="expected a sharding"):
        jdelta.plan(lambda a, b: step(a, b), "1GiB", start(), X, out_shardings=(P("data"), None))


def test_forgotten_static_arguments_are_named():
    def configured(state, x, config):
        return step(state, x)

    with pytest.raises(jdelta.ArgumentError, match=r"config\['mode'\] is a str.*static_argnames"):
        jdelta.jit(configured, budget="1GiB")(start(), X, {"mode": "train"})
    with pytest.raises(jdelta.ArgumentError, match="static argument config is a dict"):
        jdelta.jit(configured, budget="1GiB", static_argnames="config")(start(), X, {})


def test_forgotten_static_arguments_are_named_under_a_mesh_too():
    with (
        jax.set_mesh(jax.make_mesh((2,), ("d",))),
        pytest.raises(jdelta.ArgumentError, match="argument mode is a str"),
    ):
        jdelta.plan(lambda state, x, mode: step(state, x), "1GiB", start(), X, "train")


def test_other_shapes_and_deleted_arrays_are_named_as_the_user_does():
    planned = jdelta.plan(step, "1GiB", start(), X).jit()
    with pytest.raises(jdelta.PlanMismatchError, match=r"x: expected float32\[16,8\], came"):
        planned(start(), X[:4])
    state = start()
    state["w"].delete()
    with pytest.raises(jdelta.ArgumentError, match=r"state\['w'\] is there no more"):
        planned(state, X)


@dataclasses.dataclass
class Config:
    width: int


class Model(nnx.Module):
    def __init__(self, config, rngs):
        self.config = config
        self.linear = nnx.Linear(config.width, config.width, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(jnp.sin(self.linear(x)))

    def train(self, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(self)
        nnx.update(self, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(self), grads))
        return loss


def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def to_train():
    model = Model(Config(8), nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)


def losses_of(run, *args):
    return [float(run(*args, X)) for _ in range(3)]


def test_an_nnx_module_with_an_attribute_that_has_no_hash():
    planned = jdelta.jit(train, budget="1GiB")
    same(losses_of(planned, *to_train()), losses_of(nnx.jit(train), *to_train()))
    assert len(planned.plans) == 1


under = functools.partial(jdelta.jit, budget="1GiB")
BOUND = {
    "partial": lambda *args: under(functools.partial(train, *args)),
    "partial of a jitted step": lambda *args: under(functools.partial(nnx.jit(train), *args)),
    "jitted partial": lambda *args: under(nnx.jit(functools.partial(train, *args))),
    "cached partial of a planned step": lambda *args: nnx.cached_partial(under(train), *args),
    "cached partial": lambda *args: under(nnx.cached_partial(nnx.jit(train), *args)),
}


@pytest.mark.parametrize("way", BOUND)
def test_nnx_modules_that_a_step_is_bound_to_are_changed(way):
    same(losses_of(BOUND[way](*to_train())), losses_of(nnx.jit(train), *to_train()))


def test_nnx_modules_bound_by_name_are_refused():
    model, optimizer = to_train()
    with pytest.raises(jdelta.ArgumentError, match="binds model, which holds NNX objects, by name"):
        under(functools.partial(train, model=model, optimizer=optimizer))


def test_an_nnx_object_that_is_returned_is_the_one_that_went_in():
    def returning(model, optimizer, x):
        loss = train(model, optimizer, x)
        new = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        return {"parts": (model.linear, model.linear.kernel), "new": new}, loss

    model, optimizer = to_train()
    run = jdelta.jit(returning, budget="1GiB")
    for _ in range(2):
        result, loss = run(model, optimizer, X)
    linear, kernel = result["parts"]
    assert linear is model.linear
    assert kernel is model.linear.kernel
    assert isinstance(result["new"], nnx.Linear)
    same([loss], losses_of(nnx.jit(train), *to_train())[1:2])


def test_a_method_of_an_nnx_module_changes_the_module():
    one, two = Model(Config(8), nnx.Rngs(0)), Model(Config(8), nnx.Rngs(0))
    run = jdelta.jit(one.train, budget="1GiB")
    same([run(X), run(X)], [two.train(X), two.train(X)])
    same(nnx.state(one.linear), nnx.state(two.linear))


class Net(eqx.Module):
    layers: list
    activation: object
    name: str = "net"

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(jax.vmap(layer)(x))
        return x

    def loss(self, x):
        return jnp.mean(self(x) ** 2)


def net():
    keys = jax.random.split(jax.random.key(0), 3)
    return Net([eqx.nn.Linear(8, 8, key=key) for key in keys], jnp.tanh)


def train_net(model, x):
    loss, grads = eqx.filter_value_and_grad(lambda m: m.loss(x))(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("jit", [lambda f: f, functools.partial(eqx.filter_jit, donate="all")])
def test_equinox_modules_are_passed_whole(jit):
    run = jdelta.jit(jit(train_net), budget="1GiB")
    (model, _), (expected, _) = run(net(), X), train_net(net(), X)
    (model, loss), (_, wanted) = run(model, X), train_net(expected, X)
    same(loss, wanted)
    assert model.activation is jnp.tanh
    assert len(run.plans) == 1


def test_the_arrays_of_an_equinox_module_that_is_the_step_are_arguments():
    plan = jdelta.plan(net().loss, "1GiB", X)
    assert sum("float32[8,8]" in line for line in plan.arguments) == 3
    same(plan.jit()(X), net().loss(X))
