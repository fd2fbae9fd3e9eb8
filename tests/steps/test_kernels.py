"""Custom derivatives, kernels, control flow and library functions inside regions.

Each kind is the middle of a small region that a step calls twice, marked and found. Plans are made
for a TPU, without compiling for it; numbers come from the CPU, where host memory is none.
"""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals
from jax.experimental import pallas as pl

import jdelta
from jdelta import Decision
from jdelta._src.backends.chips import Rates
from jdelta._src.backends.cpu import CPU
from jdelta._src.backends.target import resolve
from jdelta._src.estimate.buffers import Compiler, storage
from jdelta._src.estimate.seconds import operation_seconds
from jdelta._src.passes.emit import Step, emit
from jdelta._src.program.graph import graph_of
from jdelta._src.program.loop_nest import walk
from jdelta._src.regions.find import with_regions
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.links import offload_refusal
from jdelta._src.residuals.residual import residuals
from tests.compilers import needs_cuda
from tests.crossed import crossed
from tests.planning import decided, under

ROWS, WIDTH = 16, 16


@jax.custom_vjp
def hidden(x):
    return lax.erf_inv(0.5 * jnp.tanh(x))


def hidden_forward(x):
    """One residual is the output, one is none of the function's outputs."""
    y = lax.erf_inv(0.5 * jnp.tanh(x))
    return y, (y, jnp.exp(y**2))


def hidden_backward(kept, g):
    y, slope = kept
    return (g * slope * (1.0 + 0.1 * y),)


hidden.defvjp(hidden_forward, hidden_backward)


@jax.custom_jvp
def bent(x):
    return lax.erf_inv(0.5 * jnp.tanh(x))


@bent.defjvp
def bent_jvp(primals, tangents):
    y = bent(primals[0])
    return y, tangents[0] * jnp.exp(y**2)


def kernel_call(kernel, shapes, *args):
    out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return pl.pallas_call(kernel, out_shape=out, interpret=True)(*args)


def softmax_kernel(x_ref, y_ref, lse_ref):
    x = x_ref[...]
    top = jnp.max(x, -1, keepdims=True)
    total = jnp.sum(jnp.exp(x - top), -1, keepdims=True)
    y_ref[...] = jnp.exp(x - top) / total
    lse_ref[...] = top + jnp.log(total)


def softmax_backward_kernel(y_ref, lse_ref, g_ref, d_ref):
    y, g = y_ref[...], g_ref[...]
    d_ref[...] = y * (g - jnp.sum(g * y, -1, keepdims=True)) + 0.0 * lse_ref[...]


@jax.custom_vjp
def pallas_softmax(x):
    return pallas_forward(x)[0]


def pallas_forward(x):
    y, lse = kernel_call(softmax_kernel, [x.shape, (*x.shape[:-1], 1)], x)
    return y, (y, lse)


def pallas_backward(kept, g):
    return tuple(kernel_call(softmax_backward_kernel, [g.shape], *kept, g))


pallas_softmax.defvjp(pallas_forward, pallas_backward)


def attention(h):
    q, k = (h * s for s in (1.0, 0.5))
    q, k = (x.reshape(1, ROWS, 2, WIDTH // 2) for x in (q, k))
    return jax.nn.dot_product_attention(q, k, k, is_causal=True).reshape(h.shape)


def branches(h):
    return lax.cond(h.sum() > 0, lambda h: jnp.exp(jnp.sin(h)), lambda h: jnp.cos(h) ** 3, h)


def fixed_loop(h):
    return lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * jnp.exp(-(h**2)), h)


def search(h):
    """A loop that no derivative goes through decides on a scale."""
    start = lax.stop_gradient(jnp.abs(h).max())
    scale = lax.while_loop(lambda s: s < 100.0, lambda s: 2.0 * s, 1.0 + start)
    return jnp.sin(h) * jnp.exp(h) / scale


def prefix_products(h):
    return lax.associative_scan(jnp.multiply, 1.0 + 0.1 * jnp.tanh(h))


def spectrum(h):
    return jnp.abs(jnp.fft.rfft(h, n=2 * WIDTH - 1)) ** 2


def sorted_rows(h):
    return jnp.sort(h, axis=-1) * jnp.arange(1.0, WIDTH + 1)


def factors(h):
    c = jnp.linalg.cholesky(h @ h.T + 3.0 * jnp.eye(ROWS))
    return jnp.linalg.solve(c + jnp.eye(ROWS), h)


KINDS = {
    "custom_vjp": (hidden, "erf_inv", 1),
    "custom_jvp": (bent, "erf_inv", 1),
    "dot_product_attention": (attention, "exp", 1),
    "pallas": (pallas_softmax, "pallas_call", 1),
    "cond": (branches, "exp", 1),
    "fixed loop": (fixed_loop, "exp", 1),
    "while": (search, "while", 1),
    "associative_scan": (prefix_products, "concatenate", 1),
    "fft": (spectrum, "fft", 1),
    "sort": (sorted_rows, "sort", 1),
    "linalg": (factors, "cholesky", 1),
}
"""From a kind to the function, a primitive of its forward pass, and how often that is there."""


def make_step(kind, remat):
    middle = KINDS[kind][0]

    @remat
    def unit(w, x):
        h = x @ w[0]
        y = jnp.tanh(middle(jnp.sin(h))) * h
        return x + y @ w[1]

    def loss(w, x):
        for i in range(2):
            x = unit([m[i] for m in w], x)
        return jnp.mean(x**2)

    return loss


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    w = [0.3 * jax.random.normal(k, (2, WIDTH, WIDTH)) for k in keys[:2]]
    return w, jax.random.normal(keys[2], (ROWS, WIDTH))


def keep_all(i, r):
    return Decision.SAVE


def keep_nothing(i, r):
    return Decision.RECOMPUTE


def offload_all(i, r):
    """All that is an array outside of the region's own loops, however small."""
    return Decision.OFFLOAD if r.shape and not (r.loops or r.conditional) else Decision.SAVE


def mix(i, r):
    return (Decision.SAVE, Decision.RECOMPUTE, offload_all(i, r))[i % 3]


CHOICES = {"saved": keep_all, "recomputed": keep_nothing, "offloaded": offload_all, "mixed": mix}
MEANT = {
    "saved": {Decision.SAVE},
    "recomputed": {Decision.RECOMPUTE},
    "offloaded": {Decision.OFFLOAD},
    "mixed": {Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE},
}
FOUND = [
    pytest.param(
        *(kind, lambda f: f, choice),
        id=f"{kind}-found {choice}",
        marks=() if choice == "mixed" else pytest.mark.full,
    )
    for kind in KINDS
    for choice in CHOICES
]
"""Regions that are found are decided about by name, as marked ones are: one choice says that."""

MARKED = [
    pytest.param(
        *(kind, jdelta.remat, choice),
        id=f"{kind}-{choice}",
        marks=() if choice == "mixed" or number % len(CHOICES) == turn else pytest.mark.full,
    )
    for number, kind in enumerate(KINDS)
    for turn, choice in enumerate(CHOICES)
]
CHOSEN = pytest.mark.parametrize(("kind", "remat", "choice"), MARKED + FOUND)


@CHOSEN
def test_loss_and_gradients_equal_the_plain_step(kind, remat, choice):
    step = jax.value_and_grad(make_step(kind, remat))
    step_trace, _, decisions = decided(step, CHOICES[choice], *arguments())
    assert step_trace.automatic is (remat is not jdelta.remat)
    assert MEANT[choice] <= set(decisions.values())
    got = jax.jit(under(step_trace, decisions, step))(*arguments())
    expected = jax.jit(jax.value_and_grad(make_step(kind, lambda f: f)))(*arguments())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(abs(b).max()))


@CHOSEN
def test_exactly_the_planned_residuals_are_kept(kind, remat, choice):
    loss = make_step(kind, remat)
    step_trace, priced, decisions = decided(jax.grad(loss), CHOICES[choice], *arguments())
    run = under(step_trace, decisions, lambda *args: with_regions(loss)(*args))
    kept = saved_residuals(run, *arguments())
    sizes = {r.name: (r.count * math.prod(r.shape), r.dtype) for r in priced}
    looped = {r.name for r in priced if r.loops}
    branched = {r.name for r in priced if r.conditional}
    saved = {n for n, d in decisions.items() if d is Decision.SAVE}
    away = {n for n, d in decisions.items() if d is Decision.OFFLOAD}

    def planned(names):
        return Counter(sizes[n] for n in names)

    assert sized(a for a, _ in kept if a.memory_space == jax.memory.Space.Host) == planned(away)
    names = {what.split("'")[1] for _, what in kept if what.startswith("named")}
    assert saved - looped - branched <= names
    # Half are tangents.
    outputs = sum(len(region.graph.outputs) // 2 for region in step_trace.regions)
    assert len(names - saved) <= outputs  # they are inputs of the next region
    carried = stacked(kept) - planned(saved & looped)  # what enters each iteration of a loop
    assert stacked(kept) >= planned(saved & looped)
    assert carried.total() <= sum(region.nest.loops > 0 for region in step_trace.regions)
    joined = sized(a for a, what in kept if what.startswith("output of cond"))
    assert joined <= planned(saved & branched)  # one buffer serves both branches
    assert bool(joined) is bool(saved & branched)


def stacked(kept):
    return sized(a for a, what in kept if a.ndim == 3 and a.shape[0] == 3)


def sized(avals):
    return Counter((aval.size, str(aval.dtype)) for aval in avals)


def count(primitive, fun):
    """How often a step runs a primitive; JAX leaves dead ones to XLA, the graph does not."""
    operations = walk(graph_of(jax.make_jaxpr(fun)(*arguments())))
    return sum(nest.trips for op, nest in operations if op.primitive == primitive)


@crossed(kind=list(KINDS), remat={"marked": jdelta.remat, "found": lambda f: f})
def test_the_forward_pass_runs_again_only_where_it_is_dropped(kind, remat):
    primitive = KINDS[kind][1]
    step = jax.grad(make_step(kind, remat))
    counts = {}
    for choice in ("saved", "offloaded", "recomputed"):
        step_trace, _, decisions = decided(step, CHOICES[choice], *arguments())
        counts[choice] = count(primitive, under(step_trace, decisions, step))
    plain = count(primitive, jax.grad(make_step(kind, lambda f: f)))
    forward = count(primitive, make_step(kind, lambda f: f))
    assert forward
    recompute_count = counts.pop("recomputed") - plain
    assert counts == {"saved": plain, "offloaded": plain}
    # A unit that is found may end with the kernel: what enters the next one is kept.
    assert recompute_count == forward if remat is jdelta.remat else 0 < recompute_count <= forward


@pytest.mark.parametrize("kind", KINDS)
def test_every_residual_has_a_price(kind):
    _, priced, _ = decided(jax.grad(make_step(kind, jdelta.remat)), keep_all, *arguments())
    assert all(r.seconds > 0 for r in priced if math.prod(r.shape)), priced


# Kernels compiled for accelerators


LAYERS, SIDE, TILE = 4, 256, 128


def tiled(kernel, outs, *args):
    def block(x):
        return pl.BlockSpec((TILE, x.shape[1]), lambda i: (i, 0))

    specs = {"in_specs": [block(x) for x in args], "out_specs": [block(x) for x in outs]}
    return pl.pallas_call(kernel, grid=(args[0].shape[0] // TILE,), out_shape=outs, **specs)(*args)


def tiled_forward(x):
    lse = jax.ShapeDtypeStruct((x.shape[0], 1), x.dtype)
    y, lse = tiled(softmax_kernel, [jax.ShapeDtypeStruct(x.shape, x.dtype), lse], x)
    return y, (y, lse)


def tiled_backward(kept, g):
    return tuple(tiled(softmax_backward_kernel, [jax.ShapeDtypeStruct(g.shape, g.dtype)], *kept, g))


tiled_softmax = jax.custom_vjp(lambda x: tiled_forward(x)[0])
tiled_softmax.defvjp(tiled_forward, tiled_backward)


def by_pallas(w, x):
    return x + jnp.tanh(tiled_softmax(x @ w)) @ w.T


def by_cudnn(w, x):
    """Attention with one matrix for queries, keys and values."""
    h = (x @ w).reshape(2, x.shape[0] // 2, SIDE // 64, 64)
    options = {"is_causal": True, "implementation": "cudnn"}
    return x + jax.nn.dot_product_attention(h, 0.5 * h, h, **options).reshape(x.shape)


KERNELS = [
    pytest.param(by_pallas, "tpu:v5e:2x2", "tpu_custom_call", jnp.float32),
    pytest.param(by_cudnn, "cuda:h100", "__cudnn$fmha", jnp.bfloat16, marks=needs_cuda),
]


@pytest.mark.compiler
@pytest.mark.parametrize(("fun", "target", "call", "dtype"), KERNELS)
def test_kernels_run_as_often_as_planned_in_the_compiled_program(fun, target, call, dtype):
    unit = jdelta.remat(fun)

    def step(w, x):
        def loss(w):
            y = lax.scan(lambda x, w: (unit(w, x), None), x, w)[0]
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)(w)

    target = resolve(target)
    shapes = (LAYERS, SIDE, SIDE), (2048, SIDE)
    args = target.abstract(tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    step_trace = trace(step, *args)
    (region,) = step_trace.regions
    calls, host = {}, {}
    for decision in (Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE):
        decisions = {r.name: decision for r in residuals(region, target)}
        policy = Policy.of(decisions, step_trace.loops, target.backend)
        emission = emit(Step(step, args, (), target, step_trace.aliases), policy)
        compiled = emission.lower().compile(dict(emission.options))
        calls[decision] = compiled.as_text().count(f'custom_call_target="{call}')
        host[decision] = compiled.memory_analysis().host_temp_size_in_bytes
    assert calls == {Decision.SAVE: 2, Decision.OFFLOAD: 2, Decision.RECOMPUTE: 3}
    assert host[Decision.SAVE] == host[Decision.RECOMPUTE] == 0 < host[Decision.OFFLOAD]


# Prices and branches


def work(fun, *args):
    """Operations of the one equation of a program, at a rate of one a second."""
    rates = Rates(
        matmul=(("float32", 1.0),),
        vector=1.0,
        integer=1.0,
        bandwidth=math.inf,
        device_to_host=1.0,
        host_to_device=1.0,
    )
    program = graph_of(jax.make_jaxpr(fun)(*args))
    (op,) = [op for op in program.operations if op.primitive != "transpose"]
    roots = storage(program, Compiler(CPU))
    return operation_seconds(program, op, roots, rates, CPU)


def product_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...])


@pytest.mark.parametrize(
    "said", [None, pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=0)]
)
def test_a_kernel_costs_what_its_author_says_or_what_its_body_does(said):
    full = pl.BlockSpec((64, 64), lambda i: (0, 0))
    rows = pl.BlockSpec((16, 64), lambda i: (i, 0))
    x = jnp.zeros((64, 64))
    kernel = pl.pallas_call(
        product_kernel,
        grid=(4,),
        in_specs=[rows, full],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        cost_estimate=said,
    )
    assert work(kernel, x, x) == (7 if said else 2 * 64**3)


def test_a_solve_costs_by_its_right_hand_sides():
    a, b = jnp.eye(8), jnp.zeros((8, 3))
    run = functools.partial(lax.linalg.triangular_solve, left_side=True)
    assert work(run, a, b) == 2 * 8 * 8 * 3


def test_a_unit_in_a_branch_is_planned_but_not_offloaded():
    unit = jdelta.remat(lambda w, x: jnp.exp(jnp.sin(x @ w)))

    def loss(w, x):
        return jnp.mean(lax.cond(x[0, 0] > 0, unit, lambda w, x: x, w, x) ** 2)

    w, x = jnp.zeros((512, 512)), jnp.zeros((1024, 512))
    step_trace, priced, decisions = decided(jax.grad(loss), keep_all, w, x)
    (region,) = step_trace.regions
    assert (region.conditional, region.nest.loops) == (True, 0)
    target = resolve("tpu:v5e:2x2")
    assert {offload_refusal(r, target) for r in priced} == {
        "in a branch of a cond, where XLA fails on offloaded values"
    }
    assert Decision.SAVE in decisions.values()
    for sign in (-0.1, 0.1):
        args = w + 0.01, x + sign
        got = jax.jit(under(step_trace, decisions, jax.grad(loss)))(*args)
        np.testing.assert_allclose(got, jax.grad(loss)(*args), rtol=1e-5, atol=1e-8)
