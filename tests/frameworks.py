"""One residual network as a training step of each framework, with nothing marked in it."""

import functools
import importlib
import os

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from benchmarks.models import identity

LAYERS = 6
RATE = 0.1


def block(w, x, key):
    """The unit, in plain JAX: two products, dropout between them."""
    h = jax.nn.gelu(x @ w[0])
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0.0)
    return x + jnp.tanh(h @ w[1])


def mean_square(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def plain(rows, width, *, scan, remat=identity):
    unit = remat(block)

    def loss(ws, x, key):
        keys = jax.random.split(key, LAYERS)
        if scan:
            run = lambda x, wk: (unit(wk[0], x, wk[1]), None)  # noqa: E731
            return mean_square(jax.lax.scan(run, x, (ws, keys))[0])
        for i in range(LAYERS):
            x = unit(jax.tree.map(lambda w, i=i: w[i], ws), x, keys[i])
        return mean_square(x)

    def step(ws, x, key):
        value, grads = jax.value_and_grad(loss)(ws, x, key)
        return jax.tree.map(lambda w, g: w - RATE * g, ws, grads), value

    key = jax.random.key(0)
    ws = [0.1 * jax.random.normal(k, (LAYERS, width, width)) for k in jax.random.split(key)]
    return step, (ws, jax.random.normal(key, (rows, width)), key)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.gelu(nn.Dense(x.shape[-1])(x))
        h = nn.Dropout(0.1, deterministic=False)(h)
        return x + jnp.tanh(nn.Dense(x.shape[-1])(h)), None


class LinenStack(nn.Module):
    scan: bool
    block: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        if self.scan:
            rngs = {"params": True, "dropout": True}
            return nn.scan(self.block, {"params": 0}, split_rngs=rngs, length=LAYERS)()(x, None)[0]
        for _ in range(LAYERS):
            x, _ = self.block()(x)
        return x


def linen(rows, width, *, scan, remat=identity):
    model = LinenStack(scan, remat(LinenBlock))

    def step(state, x, key):
        def loss(params):
            return mean_square(state.apply_fn({"params": params}, x, rngs={"dropout": key}))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    key = jax.random.key(0)
    x = jax.random.normal(key, (rows, width))
    params = model.init({"params": key, "dropout": key}, x[:1])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(RATE))
    return step, (state, x, key)


class NnxBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(width, width, rngs=rngs)
        self.down = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.down(nnx.gelu(self.up(x))))


class NnxStack(nnx.Module):
    def __init__(self, width, scan, rngs, remat=identity):
        self.scan, block = scan, remat(NnxBlock)
        if scan:
            make = nnx.vmap(lambda rngs: block(width, rngs), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        else:
            self.blocks = nnx.List([block(width, rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        if self.scan:
            run = nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(x, self.blocks)
        for b in self.blocks:
            x = b(x)
        return x


def nnx_modules(rows, width, *, scan, remat=identity):
    model = NnxStack(width, scan, nnx.Rngs(0), remat)
    graph, state = nnx.split(model)

    def step(state, x):
        model = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda model: mean_square(model(x)))(model)
        state = nnx.state(model)
        return jax.tree.map(lambda w, g: w - RATE * g, state, grads), value

    return step, (state, jax.random.normal(jax.random.key(0), (rows, width)))


class EquinoxBlock(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, key):
        self.up = eqx.nn.Linear(width, width, key=key)
        self.down = eqx.nn.Linear(width, width, key=jax.random.fold_in(key, 1))

    def __call__(self, x):
        return x + jnp.tanh(jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x))))


def equinox(rows, width, *, scan, remat=identity):
    class Block(EquinoxBlock):
        __call__ = remat(EquinoxBlock.__call__)

    keys = jax.random.split(jax.random.key(0), LAYERS)
    make = functools.partial(Block, width)
    blocks = eqx.filter_vmap(make)(keys) if scan else [make(k) for k in keys]
    arrays, static = eqx.partition(blocks, eqx.is_array)

    @eqx.filter_value_and_grad
    def loss(blocks, x):
        if scan:
            arrays, static = eqx.partition(blocks, eqx.is_array)
            run = lambda x, a: (eqx.combine(a, static)(x), None)  # noqa: E731
            return mean_square(jax.lax.scan(run, x, arrays)[0])
        for b in blocks:
            x = b(x)
        return mean_square(x)

    def step(arrays, x):
        value, grads = loss(eqx.combine(arrays, static), x)
        return eqx.apply_updates(arrays, jax.tree.map(lambda g: -RATE * g, grads)), value

    return step, (arrays, jax.random.normal(keys[0], (rows, width)))


def haiku(rows, width, *, scan, remat=identity):
    @remat
    def one(x):
        h = hk.dropout(hk.next_rng_key(), 0.1, jax.nn.gelu(hk.Linear(width)(x)))
        return x + jnp.tanh(hk.Linear(width)(h))

    def stack(x):
        if scan:
            return hk.experimental.layer_stack(LAYERS)(one)(x)
        for _ in range(LAYERS):
            x = one(x)
        return x

    model = hk.transform(lambda x: mean_square(stack(x)))

    def step(params, x, key):
        value, grads = jax.value_and_grad(model.apply)(params, key, x)
        return jax.tree.map(lambda w, g: w - RATE * g, params, grads), value

    key = jax.random.key(0)
    x = jax.random.normal(key, (rows, width))
    return step, (model.init(key, x[:1]), x, key)


def keras(rows, width, *, scan=False, remat=identity):
    """A functional model, called without state. Imported here: Keras takes seconds."""
    assert not scan
    assert remat is identity
    os.environ["KERAS_BACKEND"] = "jax"
    keras = importlib.import_module("keras")
    x = inputs = keras.Input((width,))
    for _ in range(LAYERS):
        h = keras.layers.Dense(width, activation="gelu")(x)
        x = keras.layers.Add()([x, keras.layers.Dense(width, activation="tanh")(h)])
    model = keras.Model(inputs, x)
    fixed = [v.value for v in model.non_trainable_variables]

    def step(ws, x):
        def loss(ws):
            return mean_square(model.stateless_call(ws, fixed, x)[0])

        value, grads = jax.value_and_grad(loss)(ws)
        return [w - RATE * g for w, g in zip(ws, grads, strict=True)], value

    ws = [v.value for v in model.trainable_variables]
    return step, (ws, jax.random.normal(jax.random.key(0), (rows, width)))


def penzai(rows, width, *, scan=False, remat=identity):
    """Blocks of penzai's layers, their parameters put into them in the step."""
    assert not scan
    assert remat is identity
    pz = importlib.import_module("penzai.pz")
    names = {"input_axes": {"features": width}, "output_axes": {"features": width}}
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)

    def block(i):
        up, down = (
            pz.nn.Affine.from_config(f"block_{i}/{part}", keys[2 * i + j], **names)
            for j, part in enumerate(("up", "down"))
        )
        inside = [up, pz.nn.Elementwise(jax.nn.gelu), down, pz.nn.Elementwise(jnp.tanh)]
        return pz.nn.Residual(pz.nn.Sequential(inside))

    network = pz.nn.Sequential([block(i) for i in range(LAYERS)])
    model, frozen = pz.unbind_params(network, freeze=True)

    def step(ws, x):
        def loss(ws):
            y = pz.bind_variables(model, ws)(pz.nx.wrap(x).tag("batch", "features"))
            return mean_square(y.unwrap("batch", "features"))

        value, grads = jax.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - RATE * g, ws, grads), value

    return step, (frozen, jax.random.normal(keys[0], (rows, width)))


def unet(rows, width, *, scan, remat=identity):
    """Images through two scales and back, with skips: no stack of equal layers."""
    assert not scan
    side, features = 64, width // 16

    @remat
    def conv(w, x, stride=1):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.nn.gelu(
            jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=dims)
        )

    def loss(ws, x):
        ws, skips = iter(ws), []
        for _ in range(2):
            x = conv(next(ws), x)
            skips.append(x)
            x = conv(next(ws), x, 2)
        for skip in reversed(skips):
            n, h, w, c = x.shape
            big = jnp.broadcast_to(x[:, :, None, :, None], (n, h, 2, w, 2, c))
            big = big.reshape(n, 2 * h, 2 * w, c)
            x = conv(next(ws), jnp.concatenate([conv(next(ws), big), skip], -1))
        return mean_square(x)

    def step(ws, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        return [w - RATE * g for w, g in zip(ws, grads, strict=True)], value

    key, ws = jax.random.key(0), []

    def weight(i, o):
        ws.append(0.1 * jax.random.normal(jax.random.fold_in(key, len(ws)), (3, 3, i, o)))

    for scale in range(2):
        wide = features << scale
        weight(wide, wide)
        weight(wide, 2 * wide)
    for scale in reversed(range(2)):
        wide = features << scale
        weight(2 * wide, wide)
        weight(2 * wide, wide)
    return step, (ws, jax.random.normal(key, (max(1, rows // 2048), side, side, features)))


STEPS = {
    "plain JAX": plain,
    "Flax Linen": linen,
    "Flax NNX": nnx_modules,
    "Equinox": equinox,
    "Haiku": haiku,
    "U-Net": unet,
}
"""From a framework to what makes its step and the step's arguments, given rows and width."""

FORMS = [(name, scan) for name in STEPS for scan in (False, True) if not (scan and name == "U-Net")]
