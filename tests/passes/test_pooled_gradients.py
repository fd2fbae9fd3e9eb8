"""Gradients of pooled maxima are scattered into zeros that are no other's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jdelta._src import _jax
from jdelta._src.backends.platforms import backend_of
from jdelta._src.backends.target import resolve
from jdelta._src.passes.pooled_gradients import with_own_zeros
from jdelta._src.passes.program import Context, Program
from tests.compilers import needs_cuda

TARGET = resolve("cpu")
IMAGES = jax.ShapeDtypeStruct((8, 8, 8, 2), jnp.float32)


def pooled(x, pool=nn.max_pool):
    return pool(nn.relu(jnp.sin(x)), (2, 2), (2, 2))


def loss(x):
    return jnp.sum(pooled(x) ** 2)


def scanned(x):
    return jax.lax.scan(lambda total, image: (total + loss(image[None]), None), 0.0, x)[0]


def of_examples(x):
    return jax.vmap(lambda image: pooled(image[None]))(x).sum()


def of_minima(x):
    return jnp.sum(pooled(x, nn.pooling.min_pool) ** 2)


def over_devices(x):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.shard_map(
        lambda x: jax.lax.psum(loss(x), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    return part(x)


LOSSES = {
    "pooled": loss,
    "narrow": lambda x: loss(x.astype(jnp.bfloat16)).astype(jnp.float32),
    "under a checkpoint": jax.checkpoint(loss),
    "in a loop": scanned,
    "of examples": of_examples,
    "of minima": of_minima,
    "twice": lambda x: loss(x) + loss(pooled(x)),
    "over devices": over_devices,
}


def rewritten(step, platform):
    program = Program(_jax.jaxpr_of(step, IMAGES))
    return program, with_own_zeros(program, Context(backend_of(platform), TARGET.rates))


def count(program, primitive):
    return sum(e.primitive.name == primitive for e in _jax.equations(program.jaxpr))


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_step(name):
    step = jax.value_and_grad(LOSSES[name])
    before, after = rewritten(step, "cuda")
    scatters = count(before, "select_and_scatter_add")
    assert scatters == (3 if name == "twice" else 1)
    own = count(after, "select_and_scatter")
    assert own == (0 if name == "over devices" else scatters)
    assert own + count(after, "select_and_scatter_add") == scatters
    x = jax.random.normal(jax.random.key(0), IMAGES.shape)
    results = jax.jit(after.evaluate)(x)
    for result, expected in zip(results, jax.jit(step)(x), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_each_has_a_zero_behind_a_barrier():
    _, after = rewritten(jax.grad(LOSSES["twice"]), "cuda")
    eqns = list(_jax.equations(after.jaxpr))
    zeros = [e.outvars[0] for e in eqns if e.primitive.name == "optimization_barrier"]
    read = [e.invars[2] for e in eqns if e.primitive.name == "select_and_scatter"]
    assert len(set(zeros)) == 3
    assert set(zeros) == set(read)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_compilers_get_the_program_as_it_is(platform):
    before, after = rewritten(jax.grad(loss), platform)
    assert after is before


def test_where_what_is_pooled_is_padded_the_zeros_are_no_others():
    def padded(x):
        return jnp.sum(nn.max_pool(nn.relu(jnp.sin(x)), (3, 3), (2, 2), padding=((1, 1), (1, 1))))

    before, after = rewritten(jax.grad(padded), "cuda")
    assert count(before, "select_and_scatter_add") == 1
    assert after is before


def test_without_pooling_a_program_is_as_it_was():
    before, after = rewritten(jax.grad(lambda x: jnp.sum(jnp.sin(x))), "cuda")
    assert after is before


@needs_cuda
def test_a_gpus_compiler_keeps_no_zeros_for_the_whole_step():
    def objective(w, x):
        for _ in range(3):
            x = nn.relu(nn.relu(x @ w) @ w)
        return jnp.sum(nn.max_pool(x, (2, 2), (2, 2)) ** 2)

    target = resolve("cuda:h100")
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (8, 256, 256, 64))]
    program = Program(_jax.jaxpr_of(jax.grad(objective), *shapes))
    own = with_own_zeros(program, Context(target.backend, target.rates))
    args = target.abstract(tuple(shapes))

    def temporaries(program):
        lowered = jax.jit(program.evaluate).trace(*args).lower(lowering_platforms=("cuda",))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(own) <= temporaries(program) - 8 * 256 * 256 * 64 * 4
