"""Steps in the frameworks' own ways: what they jit, what they pass, what they change."""

import functools

import equinox as eqx
import equinox.internal as eqxi
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests import frameworks
from tests.programs.parts import RATE, array, block, layer, mean_square, rows, trained, weights
from tests.programs.table import program


def of_framework(make, size, remat, scan):
    return make(size.rows, size.width, scan=scan, remat=remat)


def of_linen(remat):
    """What goes around classes of modules."""
    return nn.remat if remat is jax.checkpoint else remat


@program(units=True)
def linen(size, remat):
    return of_framework(frameworks.linen, size, of_linen(remat), scan=False)


@program(units=True)
def linen_scanned(size, remat):
    return of_framework(frameworks.linen, size, of_linen(remat), scan=True)


@program()
def nnx_split(size, remat):
    return of_framework(frameworks.nnx_modules, size, frameworks.identity, scan=False)


@program()
def nnx_scanned(size, remat):
    return of_framework(frameworks.nnx_modules, size, frameworks.identity, scan=True)


@program(units=True)
def equinox(size, remat):
    return of_framework(frameworks.equinox, size, remat, scan=False)


@program(units=True)
def equinox_scanned(size, remat):
    return of_framework(frameworks.equinox, size, remat, scan=True)


@program()
def haiku(size, remat):
    return of_framework(frameworks.haiku, size, frameworks.identity, scan=False)


@program()
def haiku_layer_stack(size, remat):
    return of_framework(frameworks.haiku, size, frameworks.identity, scan=True)


@program()
def haiku_remat(size, remat):
    """Haiku's own checkpoint, which is made inside of the network."""

    def one(x):
        return x + jnp.tanh(hk.Linear(size.width)(jax.nn.gelu(hk.Linear(size.width)(x))))

    def network(x):
        for _ in range(size.layers):
            x = hk.remat(one)(x)
        return mean_square(x)

    model, x = hk.transform(network), rows(size)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    params = jax.tree.map(lambda s: array(*s.shape, scale=0.2), shapes)
    return trained(lambda params, x: model.apply(params, None, x)), (params, x)


@program(jit=nnx.jit)
def nnx_module_as_an_argument(size, remat):
    """The model and its optimiser are arguments, and are changed in place."""
    model = frameworks.NnxStack(size.width, False, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)

    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: mean_square(model(x)))(model)
        optimizer.update(model, grads)
        twice = jax.tree.map(lambda x: 2 * x, nnx.state(model))  # nnx.jit gives the state once
        return value, twice

    return step, (model, optimizer, rows(size))


class NnxDropout(nnx.Module):
    def __init__(self, width, rngs):
        self.dense = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.drop(nnx.gelu(self.norm(self.dense(x)))))


@program(jit=nnx.jit)
def nnx_state_of_random_bits(size, remat):
    """Counters of random bits and statistics of the batch are parts of the module."""
    model = nnx.List([NnxDropout(size.width, nnx.Rngs(i)) for i in range(size.layers)])

    def step(model, x):
        def loss(model):
            y = x
            for one in model:
                y = one(y)
            return mean_square(y)

        value, grads = nnx.value_and_grad(loss)(model)
        return value, grads, nnx.state(model)

    return step, (model, rows(size))


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dropout(0.2, deterministic=False)(nn.gelu(nn.Dense(x.shape[-1])(x)))
        return x + nn.BatchNorm(use_running_average=False)(h)


class State(TrainState):
    stats: dict


@program()
def linen_statistics(size, remat):
    """A state with statistics of the batch, which the step gives anew."""
    model = nn.Sequential([Norm() for _ in range(size.layers)])
    x, key = rows(size), jax.random.key(0)
    shapes = jax.eval_shape(model.init, {"params": key, "dropout": key}, x)
    variables = jax.tree.map(lambda s: array(*s.shape, scale=0.2), shapes)
    params, stats = variables["params"], jax.tree.map(jnp.abs, variables["batch_stats"])

    def step(state, x, key):
        def loss(params):
            return_value, new = model.apply(
                {"params": params, "batch_stats": state.stats},
                x,
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
            return mean_square(return_value), new["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, stats=stats), value

    tx = optax.adam(1e-3)
    state = State.create(apply_fn=model.apply, params=params, tx=tx, stats=stats)
    return step, (state, x, key)


@program(jit=eqx.filter_jit)
def equinox_module_whole(size, remat):
    """The module is an argument as `eqx.filter_jit` takes it: functions and sizes in it, too."""
    keys = jax.random.split(jax.random.key(0), size.layers)
    model = [frameworks.EquinoxBlock(size.width, key) for key in keys]

    @eqx.filter_value_and_grad
    def loss(model, x):
        for one in model:
            x = one(x)
        return mean_square(x)

    def step(model, x):
        value, grads = loss(model, x)
        updates = jax.tree.map(lambda g: -RATE * g, grads)
        return eqx.filter(eqx.apply_updates(model, updates), eqx.is_array), value

    return step, (model, rows(size))


@program(units=True)
def equinox_partitioned(size, remat):
    """Some leaves are trained, others are not."""
    model = eqx.nn.MLP(size.width, size.width, 2 * size.width, 2, key=jax.random.key(0))
    wanted = jax.tree.map(eqx.is_array, model)
    wanted = eqx.tree_at(lambda m: m.layers[0].weight, wanted, False)
    trainable, fixed = eqx.partition(model, wanted)
    arrays, static = eqx.partition(fixed, eqx.is_array)
    unit = remat(lambda a, b, x: jax.vmap(eqx.combine(a, b, static))(x))

    def step(trainable, arrays, x):
        def loss(trainable):
            return mean_square(unit(trainable, arrays, x))

        value, grads = jax.value_and_grad(loss)(trainable)
        return eqx.apply_updates(trainable, jax.tree.map(lambda g: -RATE * g, grads)), value

    return step, (trainable, arrays, rows(size))


def equinox_loop(kind, **options):
    """A loop of Equinox, around blocks of which each takes its weights by its number."""

    def make(size, remat):
        def loss(ws, x):
            def body(state):
                i, x = state
                return i + 1, block(jax.tree.map(lambda w: w[i], ws), x)

            loop = functools.partial(eqxi.while_loop, kind=kind, **options)
            return mean_square(loop(lambda s: s[0] < size.layers, body, (0, x))[1])

        return trained(loss), (weights(size), rows(size))

    return make


@program(large=None)
def equinox_checkpointed_while_loop(size, remat):
    """Its number of iterations is found while it runs; it stores a few states on the way."""
    return equinox_loop("checkpointed", max_steps=4, checkpoints=2)(size, remat)


@program(large=None)
def equinox_bounded_while_loop(size, remat):
    return equinox_loop("bounded", max_steps=4)(size, remat)


@program(large=None)
def equinox_checkpointed_scan(size, remat):
    def loss(ws, x):
        body = lambda x, w: (block(w, x), None)  # noqa: E731
        return mean_square(eqxi.scan(body, x, ws, kind="checkpointed", checkpoints=2)[0])

    return trained(loss), (weights(size), rows(size))


@program()
def equinox_checkpoint(size, remat):
    """`eqx.filter_checkpoint` around what has functions among its arguments."""
    unit = eqx.filter_checkpoint(lambda act, w, x: x + act(x @ w["up"]) @ w["down"])

    def loss(ws, x):
        for i in range(size.layers):
            x = unit(jnp.tanh, layer(ws, i), x)
        return mean_square(x)

    return trained(loss), (weights(size), rows(size))


@program(
    options=(("static_argnums", (2, 3)),), jit=functools.partial(jax.jit, static_argnums=(2, 3))
)
def static_arguments(size, remat):
    """A function and a string among the arguments of the step."""

    def step(ws, x, activation, kind):
        def loss(ws, x):
            for i in range(size.layers):
                w = layer(ws, i)
                x = x + activation(x @ w["up"]) @ w["down"]
            return mean_square(x) if kind == "square" else jnp.abs(x).mean()

        return jax.value_and_grad(loss)(ws, x)

    return step, (weights(size), rows(size), jnp.tanh, "square")


class Trainer:
    """A class whose method is the step."""

    def __init__(self, rate):
        self.rate = rate

    def loss(self, ws, x):
        return mean_square(functools.reduce(lambda x, i: block(layer(ws, i), x), range(2), x))

    def step(self, ws, x):
        value, grads = jax.value_and_grad(self.loss)(ws, x)
        return jax.tree.map(lambda w, g: w - self.rate * g, ws, grads), value


@program()
def method_as_a_step(size, remat):
    return Trainer(0.1).step, (weights(size), rows(size))


@program()
def partial_as_a_step(size, remat):
    def step(rate, ws, x):
        grads = jax.grad(Trainer(rate).loss)(ws, x)
        return jax.tree.map(lambda w, g: w - rate * g, ws, grads)

    return functools.partial(step, 0.1), (weights(size), rows(size))


@program()
def jitted_step(size, remat):
    """People plan what they have jitted already."""
    return jax.jit(Trainer(0.1).step), (weights(size), rows(size))
