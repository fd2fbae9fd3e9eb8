"""What trainers do, one habit a step: `step(state, batch) -> (state, aux)`, marked or not.

Each is the network of residual blocks in `frameworks.py`, its layers scanned.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests.frameworks import LAYERS, RATE, NnxStack, mean_square

MICRO = 4
STEPS = 3
LOSS_SCALE = 2.0**10


def layer(x, w):
    h = jax.nn.gelu(x @ w["up"])
    return x + jnp.tanh(h @ w["down"])


def network(remat, *, cast=None):
    """The blocks under `scan`, each a unit if `remat` marks it."""
    unit = remat(layer)

    def run(ws, x):
        ws = jax.tree.map(lambda w: w.astype(cast or w.dtype), ws)
        return jax.lax.scan(lambda x, w: (unit(x, w), None), x.astype(cast or x.dtype), ws)[0]

    return run


def weights(width, seed=0):
    up, down = jax.random.split(jax.random.key(seed))
    shape = (LAYERS, width, width)
    return {
        "up": 0.1 * jax.random.normal(up, shape),
        "down": 0.1 * jax.random.normal(down, shape),
    }


def rows_of(rows, width):
    return jax.random.normal(jax.random.key(7), (rows, width))


def descend(ws, grads, rate=RATE):
    return jax.tree.map(lambda w, g: w - rate * g, ws, grads)


def mixed_precision(rows, width, remat):
    """Weights are float32 masters; the blocks compute in bfloat16."""
    run = network(remat, cast=jnp.bfloat16)

    def step(ws, x):
        loss, grads = jax.value_and_grad(lambda ws: mean_square(run(ws, x)))(ws)
        return descend(ws, grads), loss

    return step, (weights(width), rows_of(rows, width))


def loss_scaling(rows, width, remat):
    """Float16, the loss scaled up, the scale halved and the update left out on overflow."""
    run = network(remat, cast=jnp.float16)

    def step(state, x):
        ws, scale = state

        def scaled(ws):
            loss = mean_square(run(ws, x))
            return scale * loss, loss

        grads, loss = jax.grad(scaled, has_aux=True)(ws)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        ws = jax.lax.cond(finite, lambda: descend(ws, grads), lambda: ws)
        return (ws, jnp.where(finite, scale, scale / 2)), (loss, finite)

    return step, ((weights(width), jnp.float32(LOSS_SCALE)), rows_of(rows, width))


def accumulation(rows, width, remat):
    """Gradients summed over micro-batches in a loop."""
    run = network(remat)

    def step(ws, x):
        def micro(total, x):
            loss, grads = jax.value_and_grad(lambda ws: mean_square(run(ws, x)))(ws)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, ws)
        xs = x.reshape(MICRO, -1, x.shape[-1])
        grads, losses = jax.lax.scan(micro, zeros, xs)
        return descend(ws, grads, RATE / MICRO), losses

    return step, (weights(width), rows_of(rows, width))


def moving_average(rows, width, remat):
    """Adam, and a moving average of the weights beside them."""
    run = network(remat)
    tx = optax.adam(1e-2)

    def step(state, x):
        ws, average, opt = state
        loss, grads = jax.value_and_grad(lambda ws: mean_square(run(ws, x)))(ws)
        updates, opt = tx.update(grads, opt, ws)
        ws = optax.apply_updates(ws, updates)
        average = optax.incremental_update(ws, average, 0.1)
        return (ws, average, opt), loss

    ws = weights(width)
    return step, ((ws, jax.tree.map(jnp.copy, ws), tx.init(ws)), rows_of(rows, width))


class NormBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(x.shape[-1])(x))
        h = nn.Dropout(0.1, deterministic=False)(nn.gelu(h))
        return x + jnp.tanh(nn.Dense(x.shape[-1])(h)), None


class NormStack(nn.Module):
    block: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        run = nn.scan(
            self.block,
            {"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        return run()(x, None)[0]


class BatchState(TrainState):
    batch_stats: dict
    key: jax.Array


def batch_statistics(rows, width, remat):
    """Linen: a TrainState with batch statistics, a collection of RNGs, and aux outputs."""
    model = NormStack(remat(NormBlock))

    def step(state, x):
        key = jax.random.fold_in(state.key, state.step)

        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            y, new = model.apply(variables, x, mutable=["batch_stats"], rngs={"dropout": key})
            return mean_square(y), (new["batch_stats"], jnp.abs(y).max())

        grad_fn = jax.value_and_grad(loss, has_aux=True)
        (value, (stats, largest)), grads = grad_fn(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=stats)
        return state, {"loss": value, "largest": largest}

    x, key = rows_of(rows, width), jax.random.key(0)
    variables = model.init({"params": key, "dropout": key}, x[:2])
    state = BatchState.create(
        apply_fn=model.apply, tx=optax.sgd(RATE, momentum=0.9), key=key, **variables
    )
    return step, (state, x)


def two_optimisers(rows, width, remat):
    """Generator and critic, each with its own loss, gradient and optimiser."""
    make, judge = network(remat), network(remat)
    slow, fast = optax.sgd(1e-2), optax.adam(1e-2)

    def step(state, x):
        (g, g_opt), (c, c_opt) = state

        def critic(c):
            return mean_square(judge(c, x) - 1.0) + mean_square(judge(c, make(g, x)))

        c_loss, grads = jax.value_and_grad(critic)(c)
        updates, c_opt = fast.update(grads, c_opt, c)
        c = optax.apply_updates(c, updates)
        g_loss, grads = jax.value_and_grad(lambda g: mean_square(judge(c, make(g, x)) - 1.0))(g)
        updates, g_opt = slow.update(grads, g_opt, g)
        g = optax.apply_updates(g, updates)
        return ((g, g_opt), (c, c_opt)), (g_loss, c_loss)

    g, c = weights(width), weights(width, seed=1)
    return step, (((g, slow.init(g)), (c, fast.init(c))), rows_of(rows, width))


def vmapped_loss(rows, width, remat):
    """The loss of one example under `vmap`, its mean differentiated."""
    run = network(remat)

    def step(ws, xs):
        def mean(ws):
            losses = jax.vmap(lambda x: mean_square(run(ws, x)))(xs)
            return losses.mean(), losses

        (_, losses), grads = jax.value_and_grad(mean, has_aux=True)(ws)
        return descend(ws, grads), losses

    return step, (weights(width), rows_of(rows, width).reshape(MICRO, -1, width))


def vmapped_gradients(rows, width, remat):
    """A gradient for each example, clipped before the mean of them is taken."""
    run = network(remat)

    def step(ws, xs):
        one = jax.value_and_grad(lambda ws, x: mean_square(run(ws, x)))
        losses, grads = jax.vmap(one, in_axes=(None, 0))(ws, xs)
        clipped = jax.tree.map(lambda g: jnp.clip(g, -1e-3, 1e-3).mean(0), grads)
        return descend(ws, clipped), losses

    return step, (weights(width), rows_of(rows, width).reshape(MICRO, -1, width))


def many_steps(rows, width, remat):
    """Several steps of training in one `fori_loop`, a batch for each."""
    run = network(remat)

    def step(ws, xs):
        def one(i, state):
            ws, losses = state
            loss, grads = jax.value_and_grad(lambda ws: mean_square(run(ws, xs[i])))(ws)
            return descend(ws, grads), losses.at[i].set(loss)

        return jax.lax.fori_loop(0, STEPS, one, (ws, jnp.zeros(STEPS)))

    batches = jnp.stack([rows_of(rows, width) + i for i in range(STEPS)])
    return step, (weights(width), batches)


def nnx_transforms(rows, width, remat):
    """NNX: `nnx.jit` and `nnx.value_and_grad` on modules, merged and split around them."""
    model = NnxStack(width, True, nnx.Rngs(0), remat)
    optimizer = nnx.Optimizer(model, optax.sgd(RATE, momentum=0.9), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    @nnx.jit
    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: mean_square(model(x)))(model)
        optimizer.update(model, grads)
        return loss

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss = train(model, optimizer, x)
        return nnx.state((model, optimizer)), loss

    return step, (state, rows_of(rows, width))


def host_state(rows, width, remat):
    """Weights and Adam's moments live on the host: fetched, updated, put back."""
    run = network(remat)
    tx = optax.adam(1e-2)
    to_device = functools.partial(jax.device_put, device=jax.memory.Space.Device)
    to_host = functools.partial(jax.device_put, device=jax.memory.Space.Host)

    def step(state, x):
        ws, opt = to_device(state)
        loss, grads = jax.value_and_grad(lambda ws: mean_square(run(ws, x)))(ws)
        updates, opt = tx.update(grads, opt, ws)
        return to_host((optax.apply_updates(ws, updates), opt)), loss

    ws = weights(width)
    return step, (on_host((ws, tx.init(ws))), rows_of(rows, width))


def streamed_weights(rows, width, remat):
    """Weights live on the host, and each layer fetches its own in the loop."""
    to_device = functools.partial(jax.device_put, device=jax.memory.Space.Device)

    def fetching(x, w):
        return layer(x, to_device(w))

    unit = remat(fetching)

    def step(ws, x):
        def loss(ws):
            return mean_square(jax.lax.scan(lambda x, w: (unit(x, w), None), x, ws)[0])

        value, grads = jax.value_and_grad(loss)(ws)
        new = descend(to_device(ws), to_device(grads))
        return jax.device_put(new, jax.memory.Space.Host), value

    return step, (on_host(weights(width)), rows_of(rows, width))


def on_host(tree):
    """The arrays in pinned host memory."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.device_put(tree, here.with_memory_kind("pinned_host"))


TRAINERS = {
    "mixed precision": mixed_precision,
    "loss scaling": loss_scaling,
    "accumulation": accumulation,
    "moving average": moving_average,
    "batch statistics": batch_statistics,
    "two optimisers": two_optimisers,
    "vmapped loss": vmapped_loss,
    "vmapped gradients": vmapped_gradients,
    "many steps": many_steps,
    "nnx transforms": nnx_transforms,
    "host state": host_state,
    "streamed weights": streamed_weights,
}
"""From a habit to what makes its step and `(state, batch)`, given rows, width and the mark."""
