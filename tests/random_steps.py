"""Random training steps: units of random operations, in random loops, and their derivatives."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.frameworks import mean_square
from tests.rules import bell, soft

ROWS, WIDTH, LAYERS = 4, 6, 4
UNROLLED = 3
"""Of them, where each is traced."""
KEY = jax.random.key(5)


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)


def dropped(x):
    return jnp.where(jax.random.bernoulli(KEY, 0.8, x.shape), x / 0.8, 0.0)


def noisy(x):
    return x + 0.1 * jax.random.normal(jax.random.fold_in(KEY, jnp.argmax(x[0])), x.shape)


def along_rows(x):
    """A loop inside the unit, its carry and its results both used."""

    def body(carry, row):
        carry = jnp.tanh(carry + row)
        return carry, carry * row

    carry, rows = lax.scan(body, jnp.zeros(WIDTH, x.dtype), x)
    return rows + carry


def powers(x):
    return lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * x + i, x)


def searched(x):
    """A loop of unknown length, whose result is not differentiated."""
    start = lax.stop_gradient(abs(x).mean() + 0.1)
    scale = lax.while_loop(lambda s: s < 3.0, lambda s: 2.0 * s, start)
    return jnp.sin(x * scale)


def branching(x):
    return lax.cond(x.sum() > 0, lambda x: jnp.sin(x) * x, lambda x: jnp.tanh(2 * x), x)


def switching(x):
    ways = [jnp.sin, lambda x: x, lambda x: jnp.exp(-(x**2))]
    return lax.switch(jnp.argmax(x[0]) % 3, ways, x)


def permuted(x):
    return x[jnp.argsort(x[:, 0])] * jnp.cos(x)


def looked_up(x):
    return jnp.take_along_axis(jnp.sin(x), jnp.argmax(x, -1, keepdims=True), -1) + x


def scattered(x):
    return jnp.tanh(x).at[jnp.argmax(x, 0) % ROWS].add(0.5 * x[0])


def best(x):
    values, places = lax.top_k(x, 3)
    return jnp.concatenate([values * places, jnp.cos(values)], -1)


def window(x):
    start = jnp.argmin(x[:, 0]) % 2
    part = lax.dynamic_slice(x, (start, 0), (2, WIDTH))
    return lax.dynamic_update_slice(jnp.sin(x), part * part, (start, 0))


def transposed(x):
    return jnp.tanh(x.T.reshape(ROWS, WIDTH)) * x


def halves(x):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.tanh(b), jnp.exp(-abs(a))], -1)


def solved(x):
    return jnp.linalg.solve(jnp.eye(ROWS) + 0.1 * jnp.tanh(x @ x.T), x)


def spectrum(x):
    return jnp.abs(jnp.fft.rfft(jnp.pad(x, ((0, 0), (0, 4)))))[:, :WIDTH] ** 2 / 10


def convolved(x):
    kernel = jnp.array([0.2, 0.5, 0.3])[:, None, None]
    return lax.conv_general_dilated(
        jnp.tanh(x)[..., None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[..., 0]


@jax.jit
def called(x):
    return jnp.tanh(x) * jnp.sin(x)


SHIFT = jnp.linspace(-1.0, 1.0, WIDTH)


def closed_over(x):
    """A function made anew, which closes over a constant and over what is traced."""
    level = jnp.tanh(x).mean()
    return jax.checkpoint(lambda y: jnp.sin(y + SHIFT) * level)(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled_by(factor, x):
    return factor * jnp.sin(x)


scaled_by.defvjp(
    lambda factor, x: (scaled_by(factor, x), jnp.cos(x)),
    lambda factor, kept, g: (factor * kept * g,),
)


def told(x):
    """An effect that may happen at any time, any number of times."""
    jax.debug.callback(lambda value: None, x.sum())
    return jnp.tanh(x)


def written(x):
    """Through a mutable array, which nothing outside sees."""
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = jnp.sin(x)
    return ref[...] * x


def looped_twice(x):
    """A loop in a loop, the inner one written out."""

    def inner(y, _):
        return jnp.tanh(y) + 0.1 * x, None

    def outer(y, _):
        return lax.scan(inner, y, None, length=2, unroll=True)[0], None

    return lax.scan(outer, x, None, length=2)[0]


def drawn(x):
    """Bits of a key that the unit makes."""
    key = jax.random.split(jax.random.fold_in(KEY, 3))[1]
    return x + jnp.where(jax.random.uniform(key, x.shape) > 0.3, jnp.sin(x), 0.0)


def drawn_by_rbg(x):
    """Bits of another generator, whose primitive is another."""
    return x * jax.random.uniform(jax.random.key(7, impl="rbg"), x.shape)


def ruled_inside(x):
    """A rule made anew by each call; JAX lets it close over nothing that is traced in a loop."""

    @jax.custom_jvp
    def swell(y):
        return jnp.sin(y + SHIFT)

    swell.defjvp(lambda y, t: (swell(y[0]), jnp.cos(y[0] + SHIFT) * t[0]))
    return swell(x)


UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True),
    "normalized": normalized,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "custom_vjp": bell,
    "custom_jvp": soft,
    "named": lambda x: checkpoint_name(jnp.sin(x), "mine"),
    "half": lambda x: jnp.tanh(x.astype(jnp.float16)).astype(x.dtype),
    "sort": lambda x: jnp.sort(x, -1) * x,
    "cumsum": lambda x: jnp.tanh(jnp.cumsum(x, 0)),
    "cummax": lambda x: lax.cummax(x, 0) * x,
    "associative_scan": lambda x: lax.associative_scan(jnp.multiply, jnp.cos(x)),
    "stopped": lambda x: lax.stop_gradient(jnp.sin(x)) * x,
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x))),
    "checkpoint with a policy": jax.checkpoint(
        lambda x: jnp.sin(jnp.tanh(x) @ x.T) @ x, policy=jax.checkpoint_policies.dots_saveable
    ),
    "checkpoint that saves names": jax.checkpoint(
        lambda x: jnp.sin(checkpoint_name(jnp.tanh(x), "own")),
        policy=jax.checkpoint_policies.save_only_these_names("own"),
    ),
    "closure": closed_over,
    "custom_vjp with a constant": functools.partial(scaled_by, 0.5),
    "debug callback": told,
    "vmap": jax.vmap(lambda row: row * jnp.tanh(row @ row)),
    "rng": dropped,
    "noise": noisy,
    "drawn": drawn,
    "drawn by rbg": drawn_by_rbg,
    "rule made inside": ruled_inside,
    "scan": along_rows,
    "scan of scans": looped_twice,
    "fori_loop": powers,
    "while_loop": searched,
    "cond": branching,
    "switch": switching,
    "gather": permuted,
    "take_along_axis": looked_up,
    "scatter": scattered,
    "top_k": best,
    "dynamic_slice": window,
    "transpose": transposed,
    "split": halves,
    "solve": solved,
    "fft": spectrum,
    "conv": convolved,
    "jit": called,
    **({"ref": written} if hasattr(jax, "new_ref") else {}),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "div": lambda x, y: x / (1.0 + y * y),
    "where": lambda x, y: jnp.where(x > y, jnp.sin(x), y),
    "maximum": jnp.maximum,
    "attention": lambda x, y: jax.nn.softmax(x @ y.T) @ y,
    "atan2": lambda x, y: jnp.arctan2(x, 1.0 + y * y),
    "hypot": lambda x, y: jnp.sqrt(1.0 + x * x + y * y),
}
WRAPPED = ["nothing", "micro-batches", "per example", *(["ref"] if hasattr(jax, "new_ref") else [])]
PRODUCTS = {"first": 0, "second": 1}


@dataclass(frozen=True)
class Op:
    """One operation of a unit: what it does to values that are there already."""

    kind: str
    x: int
    y: int


@dataclass(frozen=True)
class Form:
    """How a step puts units together.

    Attributes:
        ops: What a unit does, in order.
        layers: How they follow each other.
        wrapped: What is around the gradient.
        argnums: What the gradient is taken of: weights, input.
        marked: Whether units are marked.
    """

    ops: tuple[Op, ...]
    layers: str
    wrapped: str
    argnums: tuple[int, ...]
    marked: bool


def unit(ops, w, x):
    """Runs the operations; gives the last value, one on the side, and integers."""
    values = [jnp.sin(x @ w[0])]
    for op in ops:
        a, b = values[op.x % len(values)], values[op.y % len(values)]
        if op.kind in UNARY:
            y = UNARY[op.kind](a)
        elif op.kind in BINARY:
            y = BINARY[op.kind](a, b)
        else:
            y = a @ w[PRODUCTS[op.kind]]
        values.append(y)
    last = values[-1]
    return x + jnp.tanh(last @ w[1]), {
        "side": values[len(values) // 2],
        "place": jnp.argmax(last, -1),
    }


def unrolled(unit, ws, x):
    total = 0.0
    for i in range(UNROLLED):
        x, aux = unit(jax.tree.map(lambda w, i=i: w[i], ws), x)
        total += jnp.sum(aux["side"][:, 0] * aux["place"])
    return x, total


def shared(unit, ws, x):
    """The same weights twice, the first unit's results read late."""
    w = jax.tree.map(lambda w: w[0], ws)
    y, aux = unit(w, x)
    z, _ = unit(w, y)
    return z * y, aux["side"].sum()


def scanned(unit, ws, x, **options):
    x, aux = lax.scan(lambda x, w: unit(w, x), x, ws, **options)
    return x, jnp.sum(aux["side"][..., 0] * aux["place"])


def twice_scanned(unit, ws, x):
    pairs = jax.tree.map(lambda w: w.reshape(2, LAYERS // 2, *w.shape[1:]), ws)
    return lax.scan(lambda x, w: scanned(unit, w, x), x, pairs)[0], 0.0


def vmapped(unit, ws, x):
    pair = jnp.stack([x, 2 * x], 1)
    y, total = jax.vmap(lambda x: scanned(unit, ws, x), in_axes=1, out_axes=(1, 0))(pair)
    return y.sum(1), total.sum()


def branched(unit, ws, x):
    w = jax.tree.map(lambda w: w[0], ws)
    y = lax.cond(x.sum() > 100, lambda x: x, lambda x: unit(w, x)[0], x)
    return unit(w, y)[0], 0.0


def every_second(unit, ws, x):
    """In a loop, in a branch of it."""

    def body(x, iw):
        i, w = iw
        return lax.cond(i % 2 == 0, lambda x: unit(w, x)[0], jnp.sin, x), None

    return lax.scan(body, x, (jnp.arange(LAYERS), ws))[0], 0.0


def checkpointed(unit, ws, x):
    """Every second unit has a checkpoint of the user's own."""
    ways, total = (unit, jax.checkpoint(unit)), 0.0
    for i in range(UNROLLED):
        x, aux = ways[i % 2](jax.tree.map(lambda w, i=i: w[i], ws), x)
        total += jnp.sum(aux["side"][:, 0] * aux["place"])
    return x, total


LAYER_FORMS = {
    "unrolled": unrolled,
    "checkpointed": checkpointed,
    "shared": shared,
    "scan": scanned,
    "reversed scan": functools.partial(scanned, reverse=True),
    "scan unrolled by two": functools.partial(scanned, unroll=2),
    "scan unrolled by three": functools.partial(scanned, unroll=3),
    "scan unrolled whole": functools.partial(scanned, unroll=True),
    "scan of scans": twice_scanned,
    "vmap": vmapped,
    "cond": branched,
    "cond in a scan": every_second,
}


def step_of(form, remat):
    """The step of a form; ``remat`` marks its units."""
    run = LAYER_FORMS[form.layers]
    one = functools.partial(unit, form.ops)
    marked = remat(one) if form.marked else one

    def loss(ws, x):
        y, side = run(marked, ws, x)
        return mean_square(y) + 0.01 * side, (y, jnp.argmax(y, -1))

    gradient = jax.value_and_grad(loss, form.argnums, has_aux=True)
    if form.wrapped == "micro-batches":
        return lambda ws, x: lax.scan(
            lambda total, x: (jax.tree.map(jnp.add, total, gradient(ws, x)), None),
            jax.tree.map(jnp.zeros_like, jax.eval_shape(gradient, ws, x)),
            jnp.stack([x, 0.5 * x]),
        )[0]
    if form.wrapped == "per example":
        return lambda ws, x: jax.vmap(gradient, (None, 0))(ws, jnp.stack([x, 0.5 * x]))
    if form.wrapped == "ref":
        return lambda ws, x: noted(gradient(ws, x))
    return gradient


def noted(results):
    """Results, and some of them by way of a mutable array."""
    (value, _), grads = results
    ref = jax.new_ref(jnp.zeros(2, value.dtype))
    ref[0] += value
    ref[1] += jax.tree.leaves(grads)[0].sum()
    return results, ref[...]


def arguments():
    """Weights of all layers, and the input."""
    a, b, c = jax.random.split(jax.random.key(0), 3)
    shape = (LAYERS, WIDTH, WIDTH)
    ws = (0.4 * jax.random.normal(a, shape), 0.4 * jax.random.normal(b, shape))
    return ws, jax.random.normal(c, (ROWS, WIDTH))


WITHOUT_REFS = {"checkpointed", *(layers for layers in LAYER_FORMS if "scan" in layers)}
"""``jax.checkpoint`` takes no refs. Of a loop that makes one in its body JAX (0.10.2, 0.12.0) gives
wrong gradients by itself: zero where a finite difference is not."""

STARTING = {"scan", "scan of scans", "fori_loop"}
"""Operations that are loops: JAX hands on to the backward pass what they begin with, although they
give what was kept of each iteration."""


def forms(layers):
    """Forms whose units follow each other as ``layers`` says."""
    kinds = [*UNARY, *BINARY, *PRODUCTS, *PRODUCTS]
    if layers in WITHOUT_REFS and "ref" in kinds:
        kinds.remove("ref")
    turn = 5 * sorted(LAYER_FORMS).index(layers)  # examples are the same in every test
    places = st.integers(0, 9)
    return st.builds(
        Form,
        st.lists(
            st.builds(Op, st.sampled_from(kinds[turn:] + kinds[:turn]), places, places),
            min_size=1,
            max_size=8,
        ).map(tuple),
        st.just(layers),
        st.sampled_from(WRAPPED),
        st.sampled_from([(0,), (1,), (0, 1)]),
        st.booleans(),
    ).map(unmarked_with_refs)


def unmarked_with_refs(form):
    """What writes to a ref must happen once, so it is in no marked unit."""
    has_refs = any(op.kind == "ref" for op in form.ops)
    return dataclasses.replace(form, marked=form.marked and not has_refs)
