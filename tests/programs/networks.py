"""Networks with a structure of their own: experts, graphs, state spaces, sets, fields."""

import functools

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
    trained,
    unrolled,
    weights,
)
from tests.programs.table import FEW, Size, program

EXPERTS = 4


def routed(w, x):
    """Each row to the best expert, rows sorted by it, one ragged product for all."""
    gates = jax.nn.softmax(x @ w["gate"])
    chosen = jnp.argmax(gates, -1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
    h = jax.nn.gelu(lax.ragged_dot(x[order], w["up"], sizes))
    y = lax.ragged_dot(h, w["down"], sizes)
    back = jnp.zeros_like(x).at[order].set(y)
    return x + back * jnp.take_along_axis(gates, chosen[:, None], -1)


def expert_weights(size):
    up = (size.layers, EXPERTS, size.width, 2 * size.width)
    down = (size.layers, EXPERTS, 2 * size.width, size.width)
    gate = array(size.layers, size.width, EXPERTS)
    return {"gate": gate, "up": array(*up, scale=0.2), "down": array(*down, scale=0.2)}


@program(units=True)
def experts_by_ragged_dot(size, remat):
    unit = remat(routed)
    return trained(lambda ws, x: mean_square(unrolled(unit, ws, x))), (
        expert_weights(size),
        rows(size),
    )


@program(units=True)
def experts_by_ragged_dot_scanned(size, remat):
    unit = remat(routed)
    return trained(lambda ws, x: mean_square(scanned(unit, ws, x))), (
        expert_weights(size),
        rows(size),
    )


@program(units=True)
def experts_with_capacity(size, remat):
    """Rows dispatched by products with one-hot masks; a loss that balances the load beside."""

    @remat
    def unit(w, x):
        gates = jax.nn.softmax(x @ w["gate"])
        mask = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
        place = (jnp.cumsum(mask, 0) * mask).astype(jnp.int32)
        room = len(x) // EXPERTS
        sent = jax.nn.one_hot(place - 1, room) * (place <= room)[..., None] * mask[..., None]
        inputs = jnp.einsum("tec,td->ecd", sent, x)
        h = jax.nn.gelu(jnp.einsum("ecd,edh->ech", inputs, w["up"]))
        y = jnp.einsum("ech,ehd->ecd", h, w["down"])
        balance = EXPERTS * jnp.sum(mask.mean(0) * gates.mean(0))
        return x + jnp.einsum("tec,ecd,te->td", sent, y, gates), balance

    def loss(ws, x):
        x, balance = lax.scan(lambda x, w: unit(w, x), x, ws)
        return mean_square(x) + 0.01 * balance.mean()

    return trained(loss), (expert_weights(size), rows(Size(min(size.rows, 512), size.width)))


@program(units=True)
def experts_of_the_best_two(size, remat):
    """Every row through all experts, weighted by the two best gates."""

    @remat
    def unit(w, x):
        top, places = lax.top_k(x @ w["gate"], 2)
        gates = jnp.zeros((len(x), EXPERTS)).at[jnp.arange(len(x))[:, None], places]
        h = jax.nn.gelu(jnp.einsum("td,edh->eth", x, w["up"]))
        return x + jnp.einsum("eth,ehd,te->td", h, w["down"], gates.set(jax.nn.softmax(top)))

    return trained(lambda ws, x: mean_square(unrolled(unit, ws, x))), (
        expert_weights(size),
        rows(size),
    )


def edges(size):
    return integers(size.rows, 2, 4 * size.rows)


@program(units=True)
def graph_by_segment_sum(size, remat):
    """Messages along edges, summed where they arrive."""

    @remat
    def unit(w, x, edges):
        start, end = edges
        messages = jnp.tanh((x[start] - x[end]) @ w["up"])
        return x + jax.ops.segment_sum(messages, end, num_segments=len(x)) @ w["down"]

    def loss(ws, x, edges):
        for i in range(size.layers):
            x = unit(layer(ws, i), x, edges)
        return mean_square(x)

    return trained(loss), (weights(size), rows(size), edges(size))


@program(units=True)
def graph_attention(size, remat):
    """A softmax over the edges that arrive at a node."""

    @remat
    def unit(w, x, edges):
        start, end = edges
        h = x @ w["up"]
        score = jax.nn.leaky_relu(jnp.sum(h[start] * h[end], -1))
        score = jnp.exp(score - jax.ops.segment_max(score, end, num_segments=len(x))[end])
        total = jax.ops.segment_sum(score, end, num_segments=len(x))
        sent = h[start] * (score / (total[end] + 1e-6))[:, None]
        return x + jnp.tanh(jax.ops.segment_sum(sent, end, num_segments=len(x)) @ w["down"])

    def loss(ws, x, edges):
        return mean_square(scanned(lambda w, x: unit(w, x, edges), ws, x))

    return trained(loss), (weights(size), rows(size), edges(size))


@program(units=True)
def forces_of_an_energy(size, remat):
    """Molecules: the loss is about the gradient of the energy by the places of atoms."""
    unit = remat(block)

    def energy(ws, places):
        apart = places[:, None] - places[None]
        distance = jnp.sqrt(jnp.sum(apart**2, -1) + 1e-2)
        basis = jnp.exp(-((distance[..., None] - jnp.linspace(0.0, 3.0, size.width)) ** 2))
        return unrolled(unit, ws, basis.sum(1)).sum()

    def loss(ws, places, forces):
        value, g = jax.value_and_grad(energy, argnums=1)(ws, places)
        return mean_square(g + forces) + 0.01 * value**2

    atoms = min(size.rows, 256)
    return trained(loss), (weights(size), array(atoms, 3), array(atoms, 3, seed=1))


@program(units=True, small=FEW)
def state_space(size, remat):
    """A diagonal linear recurrence as a parallel scan, with complex states."""

    @remat
    def unit(w, x):
        decay = jnp.exp(-jnp.exp(w["decay"]) + 1j * w["phase"])
        inputs = (x @ w["up"]).astype(jnp.complex64)
        over = jnp.broadcast_to(decay, inputs.shape)
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        _, states = lax.associative_scan(combine, (over, inputs))
        return x + jax.nn.gelu(states.real @ w["down"])

    ws = weights(size, wide=1)
    ws |= {n: array(size.layers, size.width, seed=i) for i, n in enumerate(("decay", "phase"))}
    return trained(lambda ws, x: mean_square(unrolled(unit, ws, x))), (ws, rows(size))


@program(units=True)
def selective_state_space(size, remat):
    """The same over chunks of time in a loop, its decay made from the input."""

    @remat
    def unit(w, x):
        def body(state, row):
            decay = jax.nn.sigmoid(row @ w["up"])
            state = decay * state + (1 - decay) * (row @ w["in"])
            return state, state

        _, y = lax.scan(body, jnp.zeros((x.shape[0], w["up"].shape[-1])), jnp.swapaxes(x, 0, 1))
        return x + jnp.tanh(jnp.swapaxes(y, 0, 1) @ w["down"])

    ws = weights(size)
    ws["in"] = array(*ws["up"].shape, scale=0.2, seed=7)
    x = array(size.rows // 8, 8, size.width)
    return trained(lambda ws, x: mean_square(unrolled(unit, ws, x))), (ws, x)


@program(units=True)
def linear_attention_in_chunks(size, remat):
    """A state that is carried over chunks, products inside each."""

    @remat
    def unit(w, x):
        parts = x.reshape(8, -1, size.width)

        def chunk(state, x):
            q, k, v = jnp.split(x @ w["up"], [size.width // 2, size.width], -1)
            inside = jnp.tril(q @ k.T) @ v
            return state + k.T @ v, inside + q @ state

        state = jnp.zeros((size.width // 2, size.width))
        _, y = lax.scan(chunk, state, parts)
        return x + jnp.tanh(y.reshape(len(x), -1) @ w["down"] / len(x))

    ws = {"up": array(size.layers, size.width, 2 * size.width, scale=0.2)}
    ws["down"] = array(size.layers, size.width, size.width, scale=0.2)
    return trained(lambda ws, x: mean_square(unrolled(unit, ws, x))), (ws, rows(size))


@program(units=True)
def spectral_operator(size, remat):
    """A Fourier operator: products of a few low frequencies."""

    @remat
    def unit(w, x):
        f = jnp.fft.rfft(x, axis=0)[:4]
        mixed = jnp.einsum("kd,kde->ke", f, w["real"] + 1j * w["imaginary"])
        out = jnp.fft.irfft(mixed, n=len(x), axis=0)
        return x + jnp.tanh(out + x @ w["local"])

    shape = (size.layers, 4, size.width, size.width)
    ws = {n: array(*shape, scale=0.1, seed=i) for i, n in enumerate(("real", "imaginary"))}
    ws["local"] = array(size.layers, size.width, size.width, scale=0.2)
    return trained(lambda ws, x: mean_square(unrolled(unit, ws, x))), (ws, rows(size))


@program(units=True)
def reversible_blocks(size, remat):
    """Two streams; what enters a block could be found from what it gives."""
    unit = remat(block)

    def loss(ws, x):
        a, b = x, jnp.sin(x)
        for i in range(size.layers):
            a = a + jnp.tanh(unit(layer(ws, i), b))
            b = b + jnp.tanh(unit(layer(ws, i), a))
        return mean_square(a * b)

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def normalizing_flow(size, remat):
    """Couplings with a sum of logarithms on the side."""

    @remat
    def coupling(w, x):
        a, b = jnp.split(x, 2, -1)
        scale, shift = jnp.split(jnp.tanh(jnp.tanh(a @ w["up"]) @ w["down"]), 2, -1)
        return jnp.concatenate([b * jnp.exp(scale) + shift, a], -1), scale.sum(-1)

    def loss(ws, x):
        total = 0.0
        for i in range(size.layers):
            x, added = coupling(layer(ws, i), x)
            total += added
        return jnp.mean(0.5 * jnp.sum(x**2, -1) - total)

    half = size.width // 2
    ws = {"up": array(size.layers, half, 2 * size.width, scale=0.3)}
    ws["down"] = array(size.layers, 2 * size.width, size.width, scale=0.3)
    return trained(loss), (ws, rows(size))


@program(units=True)
def radiance_field(size, remat):
    """Points along rays in chunks, summed by products of what light is left."""
    unit = remat(block)

    def render(ws, ray):
        x = jnp.tanh(ray[:, None] * jnp.linspace(0.1, 1.0, 8)[None, :, None])
        out = unrolled(unit, ws, x)
        density = jax.nn.softplus(out[..., :1])
        left = jnp.cumprod(jnp.exp(-density), 1)
        return jnp.sum(left * (1 - jnp.exp(-density)) * out, 1)

    def loss(ws, rays):
        parts = rays.reshape(4, -1, size.width)
        return mean_square(lax.map(functools.partial(render, ws), parts))

    return trained(loss), (weights(size), rows(Size(size.rows // 8, size.width)))


@program(units=True)
def memory_written_by_gradient(size, remat):
    """Test-time training: each chunk takes a gradient step of an inner loss, in the outer one."""
    unit = remat(lambda w, x: jnp.tanh(x @ w["up"]) @ w["down"])

    def loss(ws, xs):
        def chunk(fast, x):
            inner = lambda fast: mean_square(x @ fast - jnp.sin(x))  # noqa: E731
            fast = fast - 0.1 * jax.grad(inner)(fast)
            return fast, mean_square(unit(ws["slow"], x @ fast))

        return lax.scan(chunk, ws["fast"], xs)[1].mean()

    ws = {"fast": array(size.width, size.width, scale=0.2), "slow": layer(weights(size), 0)}
    return trained(loss), (ws, rows(size).reshape(4, -1, size.width))


@program(units=True)
def quantised_codes(size, remat):
    """VQ-VAE: the nearest code, and a gradient that goes by it."""
    unit = remat(block)

    def loss(ws, x):
        z = unrolled(unit, ws["encoder"], x)
        far = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ ws["codes"].T
        q = ws["codes"][jnp.argmin(far + jnp.sum(ws["codes"] ** 2, -1), -1)]
        y = unrolled(unit, ws["decoder"], z + lax.stop_gradient(q - z))
        return mean_square(y - x) + mean_square(q - lax.stop_gradient(z))

    ws = {"encoder": weights(size), "decoder": weights(size), "codes": array(16, size.width)}
    return trained(loss), (ws, rows(size))
