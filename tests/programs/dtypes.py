"""Types of numbers, and results that are no float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.flags import flags
from tests.programs.parts import (
    array,
    block,
    layer,
    mean_square,
    rows,
    scanned,
    trained,
    unrolled,
    weights,
)
from tests.programs.table import program

x64 = functools.partial(flags, jax_enable_x64=True)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def in_type(size, unit, dtype, stack=unrolled):
    loss = lambda ws, x: mean_square(stack(unit, ws, x))  # noqa: E731
    return trained(loss), (cast(weights(size), dtype), rows(size).astype(dtype))


@program(units=True, rtol=2e-2)
def bfloat16(size, remat):
    return in_type(size, remat(block), jnp.bfloat16)


@program(units=True, rtol=1e-2)
def float16_scanned(size, remat):
    return in_type(size, remat(block), jnp.float16, scanned)


@program(units=True, rtol=2e-2)
def mixed_precision(size, remat):
    """Weights are float32, blocks compute in bfloat16, norms in float32."""

    def unit(w, x):
        h = x.astype(jnp.float32)
        h = (h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
        return x + block(cast(w, jnp.bfloat16), h)

    marked = remat(unit)

    def loss(ws, x):
        return mean_square(scanned(marked, ws, x.astype(jnp.bfloat16)))

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def products_with_wider_sums(size, remat):
    """Inputs of a product are bfloat16, its sums float32."""

    def product(x, w):
        x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    unit = remat(lambda w, x: x + jnp.tanh(product(jax.nn.gelu(product(x, w["up"])), w["down"])))
    return trained(lambda ws, x: mean_square(unrolled(unit, ws, x))), (weights(size), rows(size))


@program(units=True, around=x64, rtol=1e-9, large=None)
def double(size, remat):
    return in_type(size, remat(block), np.float64)


@program(units=True, around=x64, large=None)
def single_where_double_is_on(size, remat):
    """Counters and places are int64 then."""

    def unit(w, x):
        return block(w, x[jnp.argsort(x[:, 0])])

    return in_type(size, remat(unit), np.float32, scanned)


@jax.custom_vjp
def fp8_product(x, w):
    return fp8_forward(x, w)[0]


def scaled_to(x, dtype):
    scale = jnp.max(jnp.abs(x)) / float(jnp.finfo(dtype).max) + 1e-6
    return (x / scale).astype(dtype), scale


def fp8_forward(x, w):
    (x, a), (w, b) = scaled_to(x, jnp.float8_e4m3fn), scaled_to(w, jnp.float8_e4m3fn)
    y = jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32)) * (a * b)
    return y, (x, a, w, b)


def fp8_backward(kept, g):
    x, a, w, b = kept
    g, c = scaled_to(g, jnp.float8_e5m2)
    g, x, w = (v.astype(jnp.float32) for v in (g, x, w))
    return (g @ w.T) * (b * c), (x.T @ g) * (a * c)


fp8_product.defvjp(fp8_forward, fp8_backward)


@program(units=True, rtol=1e-2)
def float8(size, remat):
    """What the backward pass reads is of eight bits."""

    def unit(w, x):
        return x + jnp.tanh(fp8_product(jax.nn.gelu(fp8_product(x, w["up"])), w["down"]))

    marked = remat(unit)
    return trained(lambda ws, x: mean_square(unrolled(marked, ws, x))), (weights(size), rows(size))


@program(units=True)
def int8_weights(size, remat):
    """QLoRA: weights of eight bits with scales, made wide in the unit; adapters are trained."""

    def unit(adapter, quantised, x):
        w = quantised["values"].astype(jnp.float32) * quantised["scale"]
        return x + jnp.tanh(x @ w + (x @ adapter["a"]) @ adapter["b"])

    marked = remat(unit)

    def loss(adapters, quantised, x):
        for i in range(size.layers):
            x = marked(layer(adapters, i), layer(quantised, i), x)
        return mean_square(x)

    square = (size.layers, size.width, size.width)
    quantised = {
        "values": array(*square, scale=40.0).astype(jnp.int8),
        "scale": jnp.full((size.layers, 1, size.width), 0.01),
    }
    adapters = {
        "a": array(size.layers, size.width, 2, scale=0.3),
        "b": array(size.layers, 2, size.width, scale=0.3),
    }
    return trained(loss), (adapters, quantised, rows(size))


@program(units=True)
def complex_values(size, remat):
    """Complex inside, real weights and loss."""

    def unit(w, x):
        h = jnp.exp(1j * (x @ w["up"])) * (x @ w["up"])
        return x + jnp.tanh((h * jnp.conj(h + 1)).real @ w["down"])

    marked = remat(unit)
    return trained(lambda ws, x: mean_square(unrolled(marked, ws, x))), (weights(size), rows(size))


@program(units=True, large=None)
def complex_weights(size, remat):
    def unit(w, x):
        return x + 0.5 * jnp.sin(x @ w)

    marked = remat(unit)

    def loss(ws, x):
        y = unrolled(marked, ws, x)
        return jnp.mean((y * jnp.conj(y)).real)

    square = (size.layers, size.width, size.width)
    ws = (array(*square, scale=0.1) + 1j * array(*square, scale=0.1, seed=1)).astype(np.complex64)
    return trained(loss), (ws, rows(size).astype(np.complex64))


@program(units=True)
def integer_results(size, remat):
    """Units give places and counts beside what has a derivative."""

    @remat
    def unit(w, x):
        y = block(w, x)
        return y, {"best": jnp.argmax(y, -1), "positive": jnp.sum(y > 0), "mask": y > 1}

    def step(ws, x):
        def loss(ws):
            sides, y = [], x
            for i in range(size.layers):
                y, side = unit(layer(ws, i), y)
                sides.append(side)
            return mean_square(y), sides

        return jax.value_and_grad(loss, has_aux=True)(ws)

    return step, (weights(size), rows(size))


@program(units=True)
def integer_weights_beside(size, remat):
    """A tree with counters in it; the gradient allows integers."""
    unit = remat(block)

    def step(state, x):
        def loss(state):
            return mean_square(unrolled(unit, state["ws"], x))

        grads = jax.grad(loss, allow_int=True)(state)
        ws = jax.tree.map(lambda w, g: w - 0.1 * g, state["ws"], grads["ws"])
        return {"ws": ws, "count": state["count"] + 1}

    return step, ({"ws": weights(size), "count": jnp.int32(3)}, rows(size))


@program(units=True)
def booleans_and_bits(size, remat):
    """Masks by integers' bits, shifts and comparisons."""

    def unit(w, x):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        keep = ((bits >> 20) & 3) != 0
        return jnp.where(keep, block(w, x), 0.5 * x)

    marked = remat(unit)
    return trained(lambda ws, x: mean_square(unrolled(marked, ws, x))), (weights(size), rows(size))


@program(units=True)
def scalars(size, remat):
    """Units of numbers without dimensions beside wide ones; Python's numbers as arguments."""

    @remat
    def unit(w, x, scale):
        scale = jnp.tanh(scale * jnp.mean(x @ w["up"]))
        return x + scale * jnp.tanh(x @ w["up"] @ w["down"]), scale + 0.5

    def loss(ws, x, scale):
        for i in range(size.layers):
            x, scale = unit(layer(ws, i), x, scale)
        return mean_square(x) * scale

    return trained(loss), (weights(size), rows(size), 0.7)


@program(units=True)
def empty_arrays(size, remat):
    """Arrays without an element, in the weights and inside."""

    def unit(w, x):
        nothing = x[:0] @ w["up"]
        return block(w, jnp.concatenate([x, jnp.sin(nothing) @ w["down"]]))

    marked = remat(unit)

    def loss(ws, x):
        return mean_square(unrolled(marked, ws["body"], x)) + jnp.sum(ws["none"] ** 2)

    return trained(loss), ({"body": weights(size), "none": jnp.zeros((0, 3))}, rows(size))


@program(units=True, rtol=1e-3)
def linear_algebra(size, remat):
    """Factorisations inside the unit, each with a derivative of its own."""

    @remat
    def unit(w, x):
        gram = jnp.eye(size.width) + x.T @ x / len(x)
        factor = jnp.linalg.cholesky(gram)
        y = jax.scipy.linalg.solve_triangular(factor, x.T, lower=True).T
        return x + jnp.tanh(y @ w["up"] @ w["down"]), jnp.linalg.slogdet(gram)[1]

    def loss(ws, x):
        total = 0.0
        for i in range(size.layers):
            x, added = unit(layer(ws, i), x)
            total += 0.01 * added
        return mean_square(x) + total

    return trained(loss), (weights(size), rows(size))
