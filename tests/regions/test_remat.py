"""`jdelta.remat` changes no value, derivative, parameter name or random bit; only names appear."""

import dataclasses
import functools
import os
import subprocess
import sys

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax._src import config
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import jdelta
from jdelta import Decision, PlanMismatchError
from jdelta._src import _jax
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.region import Grouping, Session
from jdelta._src.regions.trace import trace
from tests import stacks
from tests.planning import decided, under
from tests.stacks import kept
from tests.versions import READ_OF_TANH

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
W = jnp.linspace(-0.5, 0.4, 64).reshape(8, 8)
KEY = jax.random.key(7)


def assert_close(got, expected, rtol=1e-5):
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def layer(w, x, key):
    h = jnp.tanh(x @ w)
    keep = jax.random.bernoulli(key, 0.9, h.shape)
    return jax.nn.softmax(jnp.where(keep, h, 0.0)) * jnp.exp(h)


def stack(fun, w, x, key):
    for i in range(3):
        x = fun(w, x, jax.random.fold_in(key, i))
    return (x**2).sum()


def scanned(fun, w, x, key):
    def body(x, k):
        return fun(w, x, k), None

    return (jax.lax.scan(body, x, jax.random.split(key, 3))[0] ** 2).sum()


def emitted(loss, saved=()):
    """`loss` under a policy that saves these names, traced as `Plan.jit` traces it."""

    @functools.wraps(loss)
    def run(*args):
        step_trace = trace(jax.grad(loss), *args)
        regions = tuple((region.name, region.nest.loops) for region in step_trace.regions)
        policy = Policy(frozenset(saved), frozenset(), frozenset(), regions)
        with _jax.session_context(Session(policy, step_trace.aliases)):
            return loss(*args)

    return run


def named_residuals(loss, *args):
    """Names of the residuals that are kept and are no inputs."""
    return sorted(name for _, _, name in kept(loss, *args) if name)


@pytest.mark.parametrize("loop", [stack, scanned])
def test_function_without_plan_is_unchanged(loop):
    plain = functools.partial(loop, layer)
    marked = functools.partial(loop, jdelta.remat(layer))
    assert_close(jax.value_and_grad(marked)(W, X, KEY), jax.value_and_grad(plain)(W, X, KEY))


@pytest.mark.parametrize("loop", [stack, scanned])
@pytest.mark.parametrize("keep", [(), ("tanh", "softmax"), ("exp", "exp_1", "_bernoulli/lt")])
def test_gradients_under_a_policy(loop, keep):
    plain = functools.partial(loop, layer)
    marked = functools.partial(loop, jdelta.remat(layer))
    saved = [f"layer_1/{k}" for k in keep] + [f"layer/{k}" for k in keep]
    run = emitted(marked, saved)
    assert_close(jax.jit(jax.value_and_grad(run))(W, X, KEY), jax.value_and_grad(plain)(W, X, KEY))


def test_exactly_the_named_residuals_are_saved():
    def loss(w, x):
        for _ in range(2):
            x = marked(w, x)
        return x.sum()

    @jdelta.remat
    def marked(w, x):
        return jnp.exp(jnp.tanh(x @ w)) * 2.0

    assert named_residuals(emitted(loss), W, X) == ["marked_0/mul"]  # the second one's input
    saved = ["marked_0/tanh", "marked_1/exp", "marked_1/tanh"]
    assert named_residuals(emitted(loss, saved), W, X) == ["marked_0/mul", *saved]


def test_a_saved_value_that_nothing_needs_is_not_kept():
    def loss(w, x):
        return marked(w, x).sum()

    @jdelta.remat
    def marked(w, x):
        return jnp.tanh(x @ w + 1.0)

    saved = ["marked/add", "marked/tanh"]
    names = named_residuals(emitted(loss, saved), W, X)
    assert "marked/add" not in names


def looking(w, x):
    """A layer that gives its attention weights too, as layers do for pictures and metrics."""
    h = jnp.sin(x @ w)
    return jnp.tanh(h @ w), jax.nn.softmax(h)


@pytest.mark.parametrize("use", [lambda _: 0.0, jax.lax.stop_gradient, lambda y: jnp.argmax(y, -1)])
def test_what_no_gradient_reaches_is_no_residual(use):
    """Kept or not, whatever the metric reads of it, and whatever else is kept."""

    def step(unit, w, x):
        def loss(w):
            total, y = 0.0, x
            for _ in range(2):
                y, weights = unit(w, y)
                total += jnp.sum(use(weights))
            return jnp.sum(y**2), total

        return jax.value_and_grad(loss, has_aux=True)(w)

    step_trace, priced, decisions = decided(
        functools.partial(step, jdelta.remat(looking)), lambda i, r: Decision.SAVE, W, X
    )
    needed = {r.name.split("/")[-1] for r in priced if r.needed}
    assert needed == {*READ_OF_TANH, "sin", "cos"}
    assert needed.isdisjoint({"exp", "div", "integer_pow", "reduce_sum", "reduce_sum_1"})
    run = under(step_trace, decisions, functools.partial(step, jdelta.remat(looking)))
    assert_close(jax.jit(run)(W, X), step(looking, W, X))


@pytest.mark.parametrize(("decision", "times"), [(Decision.SAVE, 1), (Decision.RECOMPUTE, 2)])
@pytest.mark.parametrize("call", [(jax.debug.callback, print), (jax.debug.print, "{}")])
def test_what_is_printed(call, decision, times, capsys):
    """As often as it is computed. With a ``jax.checkpoint`` alone that keeps it JAX fails."""

    def unit(w, x):
        h = jnp.tanh(x @ w)
        show, how = call
        show(how, h.sum())
        return jnp.sin(h) * h

    def step(unit, w, x):
        return jax.grad(lambda w: jnp.sum(unit(w, unit(w, x)) ** 2))(w)

    marked = functools.partial(step, jdelta.remat(unit))
    step_trace, priced, _ = decided(marked, lambda i, r: decision, W, X)
    run = under(step_trace, dict.fromkeys([r.name for r in priced], decision), marked)
    got = jax.jit(run)(W, X)
    jax.effects_barrier()
    assert len(capsys.readouterr().out.split()) == 2 * times
    assert_close(got, step(unit, W, X))


@pytest.mark.parametrize("mark", [jdelta.remat, lambda f: f], ids=["marked", "found"])
def test_a_gradient_whose_shapes_are_asked_for_first(mark):
    """Gradients are accumulated so: what is traced for its shapes alone leaves nothing."""

    def step(unit, w, xs):
        gradient = jax.grad(lambda w, x: jnp.sum(unit(w, unit(w, x)) ** 2))
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradient, w, xs[0]))
        return jax.lax.scan(lambda total, x: (total + gradient(w, x), None), zeros, xs)[0]

    xs = jnp.stack([X, 2 * X])
    marked = functools.partial(step, mark(lambda w, x: jnp.tanh(x @ w)))
    step_trace, _, decisions = decided(marked, lambda i, r: Decision.SAVE, W, xs)
    expected = step(lambda w, x: jnp.tanh(x @ w), W, xs)
    assert_close(jax.jit(under(step_trace, decisions, marked))(W, xs), expected)
    plan = jdelta.plan(marked, "1MiB", W, xs, pin={"*": "recompute"})
    assert_close(plan.jit()(W, xs), expected)


def test_a_step_that_is_not_the_same_twice_is_refused():
    calls = []

    @jdelta.remat
    def unit(w, x):
        return jnp.sin(x @ w)

    def step(w, x):
        calls.append(1)

        def loss(w):  # what JAX has to differentiate again
            y = lax.cond(x.sum() > 0, unit, lambda w, x: x @ w, w, x)
            return jnp.sum(unit(w, y) if len(calls) > 2 else y)  # it is recorded in the second call

        return jax.grad(loss)(w)

    args = jax.device_put((W, X), jax.devices()[0])  # so that no mesh is looked for in the step
    with pytest.raises(PlanMismatchError, match=r"regions that were not there .*unit#1"):
        jdelta.plan(step, "1MiB", *args, pin={"*": "recompute"})


def test_user_names_are_kept_and_reported():
    @jdelta.remat
    def marked(w, x):
        return jnp.sin(checkpoint_name(x @ w, "projected")) * 3.0

    def loss(w, x):
        return marked(w, x).sum()

    assert named_residuals(emitted(loss, ["marked/projected"]), W, X) == ["marked/projected"]
    by_user = jax.checkpoint(
        loss, policy=jax.checkpoint_policies.save_only_these_names("projected")
    )
    assert len(named_residuals(by_user, W, X)) == 1


def test_nested_jit_is_inlined_and_gives_its_name():
    @jax.jit
    def inner(x):
        return jnp.exp(jnp.sin(x))

    @jdelta.remat
    def marked(x):
        with jax.named_scope("scope"):
            return inner(x) * 2.0

    def loss(x):
        return marked(x).sum()

    assert named_residuals(emitted(loss, ["marked/scope/inner/exp"]), X) == [
        "marked/scope/inner/exp"
    ]


def test_a_region_inside_another_is_part_of_it():
    @jdelta.remat
    def inner(x):
        return jnp.exp(x)

    @jdelta.remat
    def outer(x):
        return jnp.sin(inner(x))

    step_trace = trace(jax.grad(lambda x: outer(x).sum()), X)
    assert [region.name for region in step_trace.regions] == ["outer"]


def test_names_are_the_same_on_every_trace():
    def loss(w):
        return stack(jdelta.remat(layer), w, X, KEY)

    first, second = (trace(jax.grad(loss), W) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert first.aliases == second.aliases
    assert [r.name for r in first.regions] == ["layer_0", "layer_1", "layer_2"]


def fingerprint_of(*, unroll=1, scale=1.0, table=(1.0, 2.0), said="x {}", reverse=False):
    """Of a step with these parameters and constants; programs of the same operations."""
    table = np.asarray(table, np.float32)

    def loss(w):
        def body(x, w):
            return jax.nn.relu(x @ w) * scale, None

        x = jax.lax.scan(body, X, w, unroll=unroll, reverse=reverse)[0]
        jax.debug.print(said, x[0, 0])
        return jnp.mean(x * jnp.asarray(table)[jnp.zeros(X.shape, jnp.int32)])

    return trace(jax.grad(loss), jnp.stack([W] * 4)).fingerprint


OTHERS = [{"unroll": 2}, {"scale": 2.0}, {"table": (1.0, 3.0)}, {"said": "y {}"}, {"reverse": True}]


def test_programs_that_differ_in_a_parameter_or_a_constant_have_other_fingerprints():
    assert fingerprint_of() == fingerprint_of()
    assert len({fingerprint_of(), *(fingerprint_of(**other) for other in OTHERS)}) == 6


def test_static_closed_over_and_integer_arguments():
    scale = jnp.float32(1.5)

    @jdelta.remat
    def marked(x, index, *, power, mode="sin", flag=True):
        assert isinstance(power, int)
        assert flag is True
        fun = {"sin": jnp.sin}[mode]
        return {"y": fun(x[index]) ** power * scale, "index": index + 1}

    def loss(x, scale_by):
        nonlocal scale
        scale = scale_by
        out = marked(x, jnp.array([0, 2]), power=3)
        return (out["y"] * out["index"][:, None]).sum()

    def plain(x, scale_by):
        return (jnp.sin(x[jnp.array([0, 2])]) ** 3 * scale_by * jnp.array([[1], [3]])).sum()

    assert_close(
        jax.grad(emitted(loss), argnums=(0, 1))(X, 1.5), jax.grad(plain, argnums=(0, 1))(X, 1.5)
    )


def test_all_of_autodiff():
    def plain(x):
        return layer(W, x, KEY).sum()

    def marked(x):
        return jdelta.remat(layer)(W, x, KEY).sum()

    tangent = jnp.ones_like(X)
    for transform in (
        lambda f: jax.jvp(f, (X,), (tangent,)),
        lambda f: jax.jacfwd(f)(X),
        lambda f: jax.jvp(jax.grad(f), (X,), (tangent,)),
        lambda f: jax.vmap(jax.grad(f))(jnp.stack([X, 2 * X])),
        lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())(X),
    ):
        of = functools.partial(jax.jit, static_argnums=0)(transform)
        assert_close(of(marked), of(plain), rtol=1e-4)


def test_second_derivative_of_a_custom_rule_uses_the_rule():
    @jax.custom_jvp
    def odd(x):
        return x**3

    odd.defjvp(lambda primals, tangents: (odd(primals[0]), 2.0 * primals[0] * tangents[0]))
    marked = jdelta.remat(lambda x: odd(jnp.sin(x)))
    assert_close(
        jax.grad(jax.grad(marked))(0.3), jax.grad(jax.grad(lambda x: odd(jnp.sin(x))))(0.3)
    )


def test_values_inside_an_inner_scan_and_cond_have_names():
    @jdelta.remat
    def marked(x):
        def body(carry, row):
            return jnp.sin(carry * row), jnp.exp(row)

        carry, rows = jax.lax.scan(body, jnp.ones(8), x)
        carry = jax.lax.cond(carry.sum() > 0, jnp.tanh, jnp.cos, carry)
        return jax.lax.fori_loop(0, 2, lambda _, c: c * 0.5, carry) * rows.sum(0)

    def loss(x):
        return marked(x).sum()

    def plain(x):
        return marked.__wrapped__(x).sum()

    run = emitted(loss, ["marked/scan/exp"])
    assert_close(jax.grad(run)(X), jax.grad(plain)(X))
    assert {"scan/exp", "cond", "scan/mul_1"} <= value_names(loss, X)


def value_names(loss, *args):
    """Names of the values of the regions of a loss, without the region's own."""
    return {
        str(op.name).split("/", 1)[1]
        for region in trace(jax.grad(loss), *args).regions
        for op in region.graph.operations
        if op.name and "/" in op.name
    }


class Block(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, train: bool = True):
        h = nn.BatchNorm(use_running_average=not train)(x)
        h = jnp.tanh(nn.Dense(self.width)(h))
        return x + nn.Dropout(0.5, deterministic=not train)(h)


class Net(nn.Module):
    block: type

    @nn.compact
    def __call__(self, x, train: bool = True):
        for i in range(2):
            x = self.block(name=f"h_{i}")(x, train)
        return self.block()(x, True)  # named by its class


@pytest.mark.parametrize(
    "mark", [jdelta.remat, jdelta.remat(prevent_cse=True), jdelta.remat(policy=None)]
)
def test_linen_class(mark):
    plain, marked = Net(Block), Net(mark(Block))
    variables = plain.init(KEY, X, train=False)
    same = marked.init(KEY, X, train=False)
    assert jax.tree.structure(variables) == jax.tree.structure(same)
    assert_close(same, variables)

    def loss(net, params):
        y, stats = net.apply(
            {**variables, "params": params}, X, rngs={"dropout": KEY}, mutable=["batch_stats"]
        )
        return (y**2).sum(), stats

    grads = [
        jax.value_and_grad(functools.partial(loss, net), has_aux=True)(variables["params"])
        for net in (marked, plain)
    ]
    assert_close(*grads)
    step = jax.grad(functools.partial(loss, marked), has_aux=True)
    assert [r.name for r in trace(step, variables["params"]).regions] == ["h_0", "h_1", "Block_0"]


class ScanBlock(Block):
    @nn.compact
    def __call__(self, x, train):
        return Block.__call__(self, x, train), None


class ScanNet(nn.Module):
    block: type

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            self.block,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
            in_axes=nn.broadcast,
        )
        return scanned(name="h")(x, True)[0]


def test_linen_class_under_scan():
    plain, marked = ScanNet(ScanBlock), ScanNet(jdelta.remat(ScanBlock))
    variables = plain.init({"params": KEY, "dropout": KEY}, X)

    def loss(net, params):
        y, _ = net.apply(
            {**variables, "params": params}, X, rngs={"dropout": KEY}, mutable=["batch_stats"]
        )
        return (y**2).sum()

    params = variables["params"]
    run = functools.partial(loss, marked)
    (region,) = trace(jax.grad(run), params).regions
    assert (region.name, region.nest.trips, region.nest.loops) == ("h", 3, 1)
    expected = jax.grad(functools.partial(loss, plain))(params)
    for saved in ((), ("h/tanh",)):
        assert_close(jax.grad(emitted(run, saved))(params), expected, rtol=1e-4)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x, scale=1.0, flag=True):
        self.calls[...] += 1
        return x + scale * self.dropout(jnp.tanh(self.dense(self.norm(x)))) if flag else x


def nnx_net(block):
    rngs = nnx.Rngs(0)

    class Model(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([block(rngs) for _ in range(2)])

        def __call__(self, x):
            for b in self.blocks:
                x = b(x, scale=0.5, flag=True)
            return x

    return Model()


@pytest.mark.parametrize("mark", [jdelta.remat, jdelta.remat(name="unit")])
def test_nnx_class(mark):
    def train(net):
        graded = nnx.value_and_grad(lambda net: (net(X) ** 2).sum())
        outputs = [graded(net) for _ in range(2)]
        state = nnx.state(net, nnx.Not(nnx.RngState))
        return jax.tree.leaves((outputs, state))

    plain, marked = nnx_net(NnxBlock), nnx_net(mark(NnxBlock))
    assert_close(train(marked), train(plain))
    assert marked.blocks[0].calls[...] == 2
    assert isinstance(marked.blocks[0], NnxBlock)


def test_function_of_an_nnx_module_keeps_its_state():
    def apply(block, x):
        return block(x)

    outputs = []
    for fun in (apply, jdelta.remat(apply)):
        block = NnxBlock(nnx.Rngs(0))
        outputs.append((fun(block, X), fun(block, X), block.norm.mean[...]))
    assert_close(*outputs)


@pytest.mark.parametrize("what", [3, int, "f"])
def test_what_cannot_be_marked(what):
    with pytest.raises(TypeError, match=r"marks a function or a Flax module class"):
        jdelta.remat(what)


HAND = Policy(
    saved=frozenset({"h_0/tanh", "h_1/tanh", "Block_0/tanh"}),
    offloaded=frozenset(),
    recomputed=frozenset(),
    regions=(("Block_0", 0), ("h_0", 0), ("h_1", 0)),
)


def linen_loss(block, variables, params):
    y, _ = Net(block).apply(
        {**variables, "params": params}, X, rngs={"dropout": KEY}, mutable=["batch_stats"]
    )
    return (y**2).sum()


def test_policy_argument_of_jdelta_remat_and_nn_remat():
    variables = Net(Block).init(KEY, X, train=False)
    params = variables["params"]
    expected = jax.grad(functools.partial(linen_loss, Block, variables))(params)
    by_flax = nn.remat(jdelta.remat(Block), policy=HAND, static_argnums=(2,))
    by_flax.__name__ = "Block"  # Flax names the parameters of an unnamed module by its class
    for unit in (jdelta.remat(Block, policy=HAND), by_flax):
        run = functools.partial(linen_loss, unit, variables)
        assert_close(jax.grad(run)(params), expected)
        tanhs = [name for name in named_residuals(run, params) if name.endswith("tanh")]
        assert tanhs == ["Block_0/tanh", "h_0/tanh", "h_1/tanh"]


@pytest.mark.parametrize("wrap", [jax.checkpoint, nnx.remat])
def test_policy_argument_of_jax_checkpoint_and_nnx_remat(wrap):
    policy = Policy(frozenset({"unit/exp"}), frozenset(), frozenset(), (("unit", 0),))

    @jdelta.remat
    def unit(x):
        return jnp.exp(jnp.sin(x)) * 2.0

    def loss(x):
        return wrap(unit, policy=policy)(x).sum()

    assert_close(jax.grad(loss)(X), jax.grad(lambda x: (jnp.exp(jnp.sin(x)) * 2.0).sum())(X))
    assert named_residuals(loss, X) == ["unit/exp"]


def calls_policy(saved):
    return Policy(frozenset(saved), frozenset(), frozenset(), (("unit_0", 0), ("unit_1", 0)))


@jdelta.remat
def unit(x):
    return jnp.exp(jnp.sin(x))


def test_a_policy_alone_cannot_tell_calls_apart():
    def loss(policy, x):
        for _ in range(2):
            x = jax.checkpoint(unit, policy=policy)(x)
        return x.sum()

    alike = functools.partial(loss, calls_policy({"unit_0/exp", "unit_1/exp"}))
    assert len(named_residuals(alike, X)) == 2
    with pytest.raises(PlanMismatchError, match=r"decides differently for .*'unit_0/exp'"):
        jax.grad(functools.partial(loss, calls_policy({"unit_0/exp"})))(X)


def test_what_enters_only_some_of_the_calls_is_decided_alike():
    """What enters the first call is an argument of the step, and no residual."""

    def loss(wrap, x):
        for _ in range(3):
            x = wrap(unit)(x)
        return x.sum()

    step = jax.grad(functools.partial(loss, lambda unit: unit))
    plan = jdelta.plan(step, None, X, pin={"*": "recompute", "*exp": "save"})
    policed = jax.grad(functools.partial(loss, functools.partial(jax.checkpoint, policy=plan)))
    np.testing.assert_allclose(policed(X), step(X), rtol=1e-6)
    assert plan.result.endswith("taken by hand (pin=).")


def test_a_policy_for_another_model_is_refused():
    with pytest.raises(PlanMismatchError, match="knows no region 'h_0'"):
        jax.grad(
            lambda x: jax.checkpoint(jdelta.remat(jnp.sin, name="h_0"), policy=calls_policy(()))(
                x
            ).sum()
        )(X)


NAMES = frozenset(
    "prim policy name jaxpr length like template differentiated prevent_cse args"
    " params avals fun context shield rule trace in_shardings out_shardings".split()
)
"""What arguments are called where equations are handled, here and in JAX's own policies."""


def named_anyhow():
    """A primitive whose parameters have all those names."""
    primitive = Primitive("anyhow")
    primitive.def_impl(lambda x, **_: x * 2)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x, **_: x * 2, multiple_results=False))
    ad.primitive_jvps[primitive] = lambda xs, ts, **params: (
        primitive.bind(*xs, **params),
        ts[0] * 2,
    )
    return lambda x: primitive.bind(x, **dict.fromkeys(NAMES, "anything"))


@stacks.STACKS
@pytest.mark.parametrize("mark", [jdelta.remat, lambda f: f], ids=["marked", "found"])
def test_parameters_of_primitives_may_be_called_anything(stack, mark):
    bind = named_anyhow()
    unit = mark(lambda w, x: jnp.tanh(jnp.sin(bind(x @ w)) * x))
    step = jax.grad(lambda w, x: jnp.sum(stack(unit, w, x)))
    args = jnp.ones((4, 8, 8)) / 8, jnp.ones((16, 8))
    for pin in (
        {"*": "recompute"},
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        lambda prim, *_, **params: prim.name == "anyhow" and params["name"] == "anything",
    ):
        plan = jdelta.plan(step, None, *args, pin=pin)
        assert_close(plan.jit()(*args), step(*args))


REACHED = Policy(
    saved=frozenset({"unit/exp"}),
    offloaded=frozenset(),
    recomputed=frozenset({"unit/sin"}),
    regions=(("unit", 0),),
)
DROPPING = dataclasses.replace(REACHED, saved=frozenset())


def wave(x):
    return jnp.exp(jnp.sin(x)) * 2.0


class Wave(nn.Module):
    @nn.compact
    def __call__(self, x):
        return wave(nn.Dense(8)(x))


def by_linen(policy):
    net = nn.remat(Wave, policy=policy)(name="block_7")
    params = net.init(KEY, X)
    return lambda x: net.apply(params, x)


def by_scan(policy):
    body = jax.checkpoint(lambda x, _: (wave(x), None), policy=policy)
    return lambda x: jax.lax.scan(body, x, length=2)[0]


UNMARKED = {
    "jax": lambda policy: jax.checkpoint(jax.jit(wave), policy=policy),
    "scan": by_scan,
    "linen": by_linen,
    "nnx": lambda policy: nnx.remat(wave, policy=policy),
    "equinox": lambda policy: eqx.filter_checkpoint(wave, policy=policy),
}


def sum_of(fun):
    return jax.grad(lambda x: fun(x).sum())


@pytest.mark.parametrize("remat3", [False, True])
@pytest.mark.parametrize("wrap", UNMARKED)
def test_a_plan_that_reaches_nothing_says_so(wrap, remat3):
    with config.remat3(remat3):
        unmarked = UNMARKED[wrap](REACHED)
        assert unmarked(X).shape == X.shape  # nothing to keep there
        with pytest.raises(PlanMismatchError, match="nothing in it is marked") as error:
            sum_of(unmarked)(X)
        assert "test_remat.py:" in str(error.value)
        assert ("block_7" in str(error.value)) == (wrap == "linen")
        for harmless in (DROPPING, jdelta.plan(sum_of(wave), "1GiB", X)):
            sum_of(UNMARKED[wrap](harmless))(X)


CALLING = {
    "partial": functools.partial(REACHED),
    "method": REACHED.__call__,
    "function": lambda *args, **params: REACHED(*args, **params),
    "either policy": jax.checkpoint_policies.save_from_both_policies(
        REACHED, jax.checkpoint_policies.dots_saveable
    ),
}


@pytest.mark.parametrize("how", CALLING)
def test_a_plan_that_a_policy_calls_reaches_nothing_either(how):
    with pytest.raises(PlanMismatchError, match="nothing in it is marked"):
        sum_of(UNMARKED["jax"](CALLING[how]))(X)


@pytest.mark.parametrize("remat3", [False, True])
def test_a_plan_that_reaches_something_is_not_refused(remat3):
    marked = jdelta.remat(wave, name="unit")

    def frozen(w, x):  # nothing in the region is differentiated
        return jnp.sum(w * marked(jax.lax.stop_gradient(x)))

    def around(x):
        return jnp.cos(marked(jnp.tanh(x)))

    with config.remat3(remat3):
        jax.grad(jax.checkpoint(frozen, policy=REACHED))(X, X)
        sum_of(jax.checkpoint(lambda x: x, policy=REACHED))(X)
        by_plan = jax.checkpoint(around, policy=REACHED)
        assert_close(sum_of(by_plan)(X), sum_of(around)(X))
        assert_close(
            jax.jvp(sum_of(by_plan), (X,), (X,)), jax.jvp(sum_of(around), (X,), (X,)), rtol=1e-4
        )


def test_a_plan_as_a_hand_policy_is_refused():
    step = sum_of(lambda x: jdelta.remat(wave, name="unit")(x))
    plan = jdelta.plan(step, "1GiB", X, pin={"*": "recompute", "unit/exp": "save"})
    for pin in (plan, functools.partial(plan), lambda *avals, **params: plan(*avals, **params)):
        with pytest.raises(PlanMismatchError, match=r"pin=plan\.decisions"):
            jdelta.plan(step, "1GiB", X, pin=pin)
    second = jdelta.plan(step, "1GiB", X, pin=plan.decisions)
    assert second.decisions == plan.decisions


def test_a_plan_with_one_more_checkpoint_is_no_policy():
    plan = jdelta.plan(sum_of(wave), "1GiB", X, pin={"*": "recompute"})
    answer = dataclasses.replace(plan.answer, grouping=Grouping(2, nested=True))
    nested = dataclasses.replace(plan, answer=answer)
    with pytest.raises(PlanMismatchError, match="under one more checkpoint"):
        sum_of(jax.checkpoint(wave, policy=nested))(X)


PROGRAM = """
import jax, jdelta, sys
from benchmarks.models import build
from jdelta._src.residuals.residual import residuals
from jdelta._src.backends.target import resolve
from jdelta._src.regions.trace import trace
case = build("gpt2", small=True, scan=True, remat=jdelta.remat)
found = trace(case.step, case.state, case.batch)
names = [r.name for region in found.regions for r in residuals(region, resolve("tpu:v5e"))]
def other(w):
    jax.debug.callback(lambda x: None, w)
    key = jax.random.fold_in(jax.random.key(0), 1)
    return jax.nn.gelu(w) * jax.random.bernoulli(key, 0.5, w.shape) + jax.nn.relu(w)
other = trace(jax.grad(lambda w: other(w).sum()), jax.numpy.ones(4))
print(found.fingerprint, other.fingerprint, *names)
"""


def test_names_are_the_same_in_every_process():
    said = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    (names,) = said
    assert "h/attn/exp" in names
