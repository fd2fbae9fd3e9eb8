"""Layers that networks are made of, and stacks of them."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.parts import (
    array,
    block,
    integers,
    layer,
    mean_square,
    rows,
    scanned,
    stack_step,
    trained,
    unrolled,
    weights,
)
from tests.programs.table import DEEP, Size, program


@program(units=True, small=DEEP)
def mlp(size, remat):
    return stack_step(remat(block), size)


@program(units=True)
def scanned_mlp(size, remat):
    return stack_step(remat(block), size, scanned)


@program(units=True)
def dict_of_layers(size, remat):
    """Weights by the name of the layer, as in Linen."""
    unit, ws = remat(block), weights(size)
    named = {f"layer_{i}": layer(ws, i) for i in range(size.layers)}

    def loss(ws, x):
        for w in ws.values():
            x = unit(w, x)
        return mean_square(x)

    return trained(loss), (named, rows(size))


@program(units=True, small=DEEP)
def unlike_layers(size, remat):
    """Widths that differ, so that no two units are alike."""
    unit = remat(lambda w, x: jnp.tanh(x @ w) * jax.nn.sigmoid(x @ w))
    widths = [size.width * k for k in (1, 2, 3, 1)]
    ws = [array(a, b, scale=0.2, seed=a) for a, b in itertools.pairwise(widths)]

    def loss(ws, x):
        for w in ws:
            x = unit(w, x)
        return mean_square(x)

    return trained(loss), (ws, rows(size))


@program(units=True, large=Size(32768, 128, 7))
def dense_chain(size, remat):
    """Dense layers alone: what enters one is all that the one before keeps. Units are pairs."""

    def run(layers, x, last=False):
        for i, (w, b) in enumerate(layers):
            x = x @ w + b
            x = x if last and i == len(layers) - 1 else jnp.tanh(x)
        return x

    unit, end = remat(run), remat(functools.partial(run, last=True))
    widths = [size.width, *[4 * size.width] * (size.layers - 1), size.width]
    layers = [
        (array(*pair, scale=0.2, seed=i), array(pair[1], seed=i))
        for i, pair in enumerate(itertools.pairwise(widths))
    ]

    def loss(layers, x):
        *pairs, rest = (layers[i : i + 2] for i in range(0, len(layers), 2))
        for pair in pairs:
            x = unit(pair, x)
        return mean_square(end(rest, x))

    return trained(loss), (layers, rows(size))


@program(units=True)
def tied_layers(size, remat):
    """One block used three times."""
    unit = remat(block)

    def loss(w, x):
        for _ in range(3):
            x = unit(w, x)
        return mean_square(x)

    return trained(loss), (layer(weights(size), 0), rows(size))


def normalized(x):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5)


@program(units=True)
def layer_norm(size, remat):
    return stack_step(remat(lambda w, x: x + block(w, normalized(x))), size)


@program(units=True)
def rms_norm_and_gate(size, remat):
    def unit(w, x):
        h = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        up = h @ w["up"]
        return x + (jax.nn.silu(up) * up) @ w["down"]

    return stack_step(remat(unit), size, scanned)


@program(units=True)
def batch_norm(size, remat):
    """Statistics over the batch come out beside the loss."""

    @remat
    def unit(w, x):
        h = x @ w["up"]
        mean, var = h.mean(0), h.var(0)
        return x + jax.nn.relu((h - mean) * lax.rsqrt(var + 1e-5)) @ w["down"], (mean, var)

    def step(ws, x):
        def loss(ws):
            y, stats = lax.scan(lambda x, w: unit(w, x), x, ws)
            return mean_square(y), stats

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(ws)
        return grads, value, stats

    return step, (weights(size), rows(size))


def heads_of(x, heads):
    return x.reshape(*x.shape[:-1], heads, -1)


def attention(w, x, mask=None):
    """Two heads over sequences of sixteen."""
    x = x.reshape(-1, 16, x.shape[-1])
    q, k, v = (heads_of(x @ w[name], 2) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return (x + y.reshape(x.shape) @ w["o"]).reshape(-1, x.shape[-1])


def attention_step(size, unit, stack=unrolled):
    shape = (size.layers, size.width, size.width)
    ws = {name: array(*shape, scale=0.2, seed=i) for i, name in enumerate("qkvo")}
    return trained(lambda ws, x: mean_square(stack(unit, ws, x))), (ws, rows(size))


@program(units=True)
def self_attention(size, remat):
    return attention_step(size, remat(attention))


@program(units=True)
def causal_attention(size, remat):
    mask = jnp.tril(jnp.ones((16, 16), bool))
    return attention_step(size, remat(functools.partial(attention, mask=mask)), scanned)


@program(units=True)
def dot_product_attention(size, remat):
    """JAX's own function for it."""

    def unit(w, x):
        x = x.reshape(-1, 16, x.shape[-1])
        q, k, v = (heads_of(x @ w[name], 2) for name in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return (x + y.reshape(x.shape) @ w["o"]).reshape(-1, x.shape[-1])

    return attention_step(size, remat(unit))


@program(units=True, large=Size(4096, 64))
def convolutions(size, remat):
    dims = ("NHWC", "HWIO", "NHWC")
    conv = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=dims
    )
    unit = remat(lambda w, x: x + jax.nn.relu(conv(x, w)))
    ws = array(size.layers, 3, 3, size.width, size.width, scale=0.1)
    x = array(size.rows // 16, 4, 4, size.width)
    return trained(lambda ws, x: mean_square(unrolled(unit, ws, x))), (ws, x)


@program(units=True, large=Size(4096, 64))
def pooled_convolutions(size, remat):
    """Strides, maxima of windows, and a mean over what is left."""
    dims = ("NHWC", "HWIO", "NHWC")

    @remat
    def unit(w, x):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        window = (1, 2, 2, 1)
        return lax.reduce_window(jax.nn.relu(y), -jnp.inf, lax.max, window, window, "SAME")

    ws = array(2, 3, 3, size.width, size.width, scale=0.1)
    x = array(size.rows // 16, 8, 8, size.width)
    return trained(lambda ws, x: mean_square(unrolled(unit, ws, x).mean((1, 2)))), (ws, x)


@program(units=True)
def embedding_and_head(size, remat):
    """A language model with one table for tokens in and out."""
    unit, tokens = remat(block), 32
    ws = {"table": array(tokens, size.width, scale=0.3), "blocks": weights(size)}

    def loss(ws, ids):
        x = scanned(unit, ws["blocks"], ws["table"][ids])
        scores = jax.nn.log_softmax(x @ ws["table"].T)
        return -jnp.mean(jnp.take_along_axis(scores, ids[:, None], -1))

    return trained(loss), (ws, integers(tokens, size.rows))


@program(units=True)
def loss_in_chunks(size, remat):
    """Scores of a few rows at a time, so that there are never those of all."""
    unit, classes = remat(block), 64
    ws = {"blocks": weights(size), "head": array(size.width, classes, scale=0.3)}

    def loss(ws, x, labels):
        x = unrolled(unit, ws["blocks"], x)

        @jax.checkpoint
        def chunk(head, x, labels):
            return -jax.nn.log_softmax(x @ head)[jnp.arange(len(x)), labels].sum()

        parts = x.reshape(4, -1, size.width), labels.reshape(4, -1)
        losses = lax.scan(lambda total, p: (total + chunk(ws["head"], *p), None), 0.0, parts)
        return losses[0] / size.rows

    return trained(loss), (ws, rows(size), integers(classes, size.rows))


@program(units=True, small=DEEP)
def skips_like_a_unet(size, remat):
    """What goes down is read on the way up."""
    unit = remat(block)

    def loss(ws, x):
        skips = []
        for i in range(2):
            x = unit(layer(ws, i), x)
            skips.append(x)
        for i in (2, 3):
            x = unit(layer(ws, i), x + skips.pop())
        return mean_square(x)

    size = Size(size.rows, size.width, 4)
    return trained(loss), (weights(size), rows(size))


@program(units=True)
def dense_net(size, remat):
    """Each layer reads what all before it gave."""
    unit = remat(lambda w, xs: jnp.tanh(jnp.concatenate(xs, -1) @ w))
    ws = [array(size.width * (i + 1), size.width, scale=0.2, seed=i) for i in range(4)]

    def loss(ws, x):
        xs = [x]
        for w in ws:
            xs.append(unit(w, xs))
        return mean_square(jnp.concatenate(xs, -1))

    return trained(loss), (ws, rows(size))


@program(units=True)
def mixer(size, remat):
    """Products over rows and over columns in turn."""

    def unit(w, x):
        x = x.reshape(-1, 16, x.shape[-1])
        x = x + jnp.swapaxes(jnp.tanh(jnp.swapaxes(x, 1, 2) @ w["rows"]), 1, 2)
        return (x + jnp.tanh(x @ w["columns"])).reshape(-1, x.shape[-1])

    ws = {
        "rows": array(size.layers, 16, 16, scale=0.2),
        "columns": array(size.layers, size.width, size.width, scale=0.2),
    }
    marked = remat(unit)
    return trained(lambda ws, x: mean_square(unrolled(marked, ws, x))), (ws, rows(size))


@program(units=True)
def encoder_and_decoder(size, remat):
    """What the encoder gives is read by every layer of the decoder."""
    unit = remat(block)
    reading = remat(lambda w, x, memory: x + jnp.tanh(memory @ w["up"]) @ w["down"])

    def loss(ws, x, y):
        memory = scanned(unit, ws["encoder"], x)
        y, _ = lax.scan(lambda y, w: (reading(w, y, memory), None), y, ws["decoder"])
        return mean_square(y)

    ws = {"encoder": weights(size), "decoder": weights(size)}
    return trained(loss), (ws, rows(size), rows(size, seed=3))
