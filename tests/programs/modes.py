"""Flags of jax around a step, and transformations that change what it gives."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from tests.flags import flags
from tests.programs.parts import block, mean_square, rows, scanned, stack_step, trained, weights
from tests.programs.table import program
from tests.rules import bell, soft

NEWEST = (0, 12)
"""The version of jax that has these flags."""


def with_both_rules(w, x):
    return x + jnp.tanh(soft(bell(x @ w["up"])) @ w["down"])


def with_a_vjp_rule(w, x):
    return x + jnp.tanh(bell(x @ w["up"]) @ w["down"])


@program(units=True, around=functools.partial(flags, jax_remat3=True), since=(0, 11), large=None)
def remat3(size, remat):
    return stack_step(remat(block), size)


@program(around=functools.partial(flags, jax_remat3=True), since=(0, 11), large=None)
def remat3_of_own_checkpoint(size, remat):
    return stack_step(jax.checkpoint(block), size, scanned)


@program(units=True, around=functools.partial(flags, jax_custom_vjp3=True), large=None)
def custom_vjp3(size, remat):
    return stack_step(remat(with_a_vjp_rule), size)


@program(
    units=True,
    around=functools.partial(flags, jax_custom_jvp3=True),
    since=NEWEST,
    large=None,
)
def custom_jvp3(size, remat):
    return stack_step(remat(with_both_rules), size)


@program(
    around=functools.partial(flags, jax_remat_barrier_no_cotangents=True),
    since=NEWEST,
    large=None,
)
def barriers_without_cotangents(size, remat):
    return stack_step(jax.checkpoint(block), size)


@program(around=functools.partial(flags, jax_debug_nans=True), large=None)
def debug_nans(size, remat):
    return stack_step(block, size)


@program(around=functools.partial(flags, jax_debug_infs=True), large=None)
def debug_infs(size, remat):
    return stack_step(block, size, scanned)


@program(around=functools.partial(flags, jax_disable_jit=True), large=None)
def disable_jit(size, remat):
    return stack_step(block, size)


@program(around=functools.partial(flags, jax_numpy_rank_promotion="raise"), large=None)
def no_promotion_of_ranks(size, remat):
    return stack_step(block, size)


@program(around=functools.partial(flags, jax_numpy_dtype_promotion="strict"), large=None)
def strict_promotion_of_types(size, remat):
    return stack_step(block, size)


@program(around=functools.partial(flags, jax_check_tracer_leaks=True), large=None)
def check_tracer_leaks(size, remat):
    return stack_step(block, size, scanned)


@program(around=functools.partial(flags, jax_default_matmul_precision="highest"), large=None)
def highest_precision(size, remat):
    return stack_step(block, size)


@program(around=functools.partial(flags, jax_threefry_partitionable=False), large=None)
def old_random_bits(size, remat):
    def unit(w, x):
        key = jax.random.fold_in(jax.random.key(0), 1)
        return block(w, jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0.0))

    return stack_step(unit, size)


@program(large=None)
def checkified(size, remat):
    """Checks of the user's; whether they fail is a result of the step.

    The error's number is none: that counts all checks that the process has traced.
    """

    def loss(ws, x):
        y = scanned(block, ws, x)
        checkify.check(jnp.all(jnp.isfinite(y)), "not finite")
        return mean_square(y)

    def checked(ws, x):
        error, results = checkify.checkify(trained(loss))(ws, x)
        return results, [x for x in jax.tree.leaves(error) if x.dtype == bool]

    return checked, (weights(size), rows(size))
