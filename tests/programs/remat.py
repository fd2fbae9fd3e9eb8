"""Steps that have checkpoints of the user's own, or names and places for what is saved."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.programs.parts import (
    array,
    block,
    layer,
    mean_square,
    rows,
    scanned,
    stack_step,
    trained,
    unrolled,
    weights,
)
from tests.programs.table import Size, program
from tests.rules import bell

POLICIES = jax.checkpoint_policies


def own(unit=block, **options):
    """A unit that the user has put a checkpoint around."""
    return jax.checkpoint(unit, **options)


def named(w, x):
    """A block with two names in it."""
    h = checkpoint_name(jax.nn.gelu(x @ w["up"]), "hidden")
    return checkpoint_name(x + jnp.tanh(h @ w["down"]), "out")


@program()
def own_checkpoint(size, remat):
    return stack_step(own(), size)


@program()
def own_checkpoint_in_a_scan(size, remat):
    return stack_step(own(prevent_cse=False), size, scanned)


@program()
def own_checkpoint_around_a_scan(size, remat):
    """Which saves nothing that matters."""
    checkpointed = jax.checkpoint(lambda ws, x: scanned(block, ws, x))
    return trained(lambda ws, x: mean_square(checkpointed(ws, x))), (weights(size), rows(size))


@program()
def own_checkpoint_of_the_loss(size, remat):
    loss = jax.checkpoint(lambda ws, x: mean_square(unrolled(block, ws, x)))
    return trained(loss), (weights(size), rows(size))


@program()
def own_checkpoint_saves_dots(size, remat):
    return stack_step(own(policy=POLICIES.dots_saveable), size)


@program()
def own_checkpoint_saves_dots_without_batch(size, remat):
    policy = POLICIES.dots_with_no_batch_dims_saveable
    return stack_step(own(policy=policy, prevent_cse=False), size, scanned)


@program()
def own_checkpoint_saves_names(size, remat):
    policy = POLICIES.save_only_these_names("hidden")
    return stack_step(own(named, policy=policy), size)


@program()
def own_checkpoint_saves_all_but_names(size, remat):
    policy = POLICIES.save_anything_except_these_names("hidden")
    return stack_step(own(named, policy=policy), size)


@program()
def own_checkpoint_of_two_policies(size, remat):
    both = POLICIES.save_from_both_policies(
        POLICIES.dots_saveable, POLICIES.save_only_these_names("out")
    )
    return stack_step(own(named, policy=both), size)


@program()
def own_policy_is_a_function(size, remat):
    """Any function of the primitive will do as a policy."""

    def policy(prim, *avals, **params):
        return prim.name in ("tanh", "dot_general")

    return stack_step(own(policy=policy), size)


@program()
def checkpoint_in_a_checkpoint(size, remat):
    inner = jax.checkpoint(lambda w, x: jax.nn.gelu(x @ w["up"]))
    return stack_step(own(lambda w, x: x + jnp.tanh(inner(w, x) @ w["down"])), size)


@program()
def checkpoint_of_two_blocks_each(size, remat):
    """Groups of units, by hand."""
    size = Size(size.rows, size.width, 4)
    pair = jax.checkpoint(lambda ws, x: unrolled(block, ws, x))

    def loss(ws, x):
        for i in (0, 2):
            x = pair(jax.tree.map(lambda w, i=i: w[i : i + 2], ws), x)
        return mean_square(x)

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def every_second_block(size, remat):
    """Half of the units have the user's own checkpoint."""
    ways = remat(block), own()

    def loss(ws, x):
        for i in range(4):
            x = ways[i % 2](layer(ws, i), x)
        return mean_square(x)

    size = Size(size.rows, size.width, 4)
    return trained(loss), (weights(size), rows(size))


@program(units=True)
def names_without_a_checkpoint(size, remat):
    return stack_step(remat(named), size, scanned)


@program()
def static_arguments_of_a_checkpoint(size, remat):
    @functools.partial(jax.checkpoint, static_argnums=(0, 2))
    def unit(kind, w, scale, x):
        h = jnp.sin(x @ w["up"]) if kind == "sin" else jnp.cos(x @ w["up"])
        return x + scale * jnp.tanh(h @ w["down"])

    return stack_step(lambda w, x: unit("sin", w, 0.5, x), size)


@program()
def checkpoint_under_vmap(size, remat):
    unit = jax.checkpoint(lambda w, row: row + jnp.tanh(jnp.sin(row @ w["up"]) @ w["down"]))
    return stack_step(lambda w, x: jax.vmap(unit, (None, 0))(w, x), size)


@program()
def checkpoint_of_integers_and_none(size, remat):
    """A unit that takes and gives what has no derivative."""

    @jax.checkpoint
    def unit(w, x, count, nothing):
        y = block(w, x)
        return y, count + 1, nothing, jnp.argmax(y, -1)

    def step(ws, x):
        def loss(ws):
            y, count = x, jnp.int32(0)
            for i in range(size.layers):
                y, count, _, best = unit(layer(ws, i), y, count, None)
            return mean_square(y), (count, best)

        return jax.value_and_grad(loss, has_aux=True)(ws)

    return step, (weights(size), rows(size))


@program()
def checkpoint_around_a_custom_rule(size, remat):
    return stack_step(own(lambda w, x: x + jnp.tanh(bell(x @ w["up"]) @ w["down"])), size)


@program()
def checkpoint_around_a_cond(size, remat):
    def unit(w, x):
        return lax.cond(x.sum() > 0, block, lambda w, x: jnp.sin(x), w, x)

    return stack_step(own(unit), size)


@program()
def checkpoint_around_a_while_loop(size, remat):
    def unit(w, x):
        start = lax.stop_gradient(jnp.abs(x).mean() + 0.1)
        return block(w, x * lax.while_loop(lambda s: s < 2.0, lambda s: 2.0 * s, start))

    return stack_step(own(unit), size)


@program()
def checkpoint_with_a_closure(size, remat):
    """What is differentiated comes in by a closure."""

    def loss(ws, x):
        for i in range(size.layers):
            w = layer(ws, i)
            x = jax.checkpoint(lambda x, w=w: block(w, x))(x)
        return mean_square(x)

    return trained(loss), (weights(size), rows(size))


@program()
def checkpoint_of_second_order(size, remat):
    unit = own()

    def step(ws, x):
        loss = lambda ws: mean_square(unrolled(unit, ws, x))  # noqa: E731
        return jax.jvp(jax.grad(loss), (ws,), (jax.tree.map(jnp.cos, ws),))

    return step, (weights(size), rows(size))


@program()
def checkpointed_chunks_of_a_scan(size, remat):
    """Square-root checkpointing of a long loop, as written by hand."""
    inner = jax.checkpoint(functools.partial(scanned, block), prevent_cse=False)

    def loss(ws, x):
        return mean_square(lax.scan(lambda x, w: (inner(w, x), None), x, ws)[0])

    ws = weights(Size(size.rows, size.width, 4))
    return trained(loss), (jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), ws), rows(size))


@program()
def optimization_barriers(size, remat):
    """The user's own, in forward and backward passes."""

    @jax.custom_vjp
    def barrier(x):
        return lax.optimization_barrier(x)

    barrier.defvjp(lambda x: (barrier(x), None), lambda _, g: (lax.optimization_barrier(g),))
    return stack_step(lambda w, x: barrier(block(w, x)), size)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(2 * x.shape[-1])(x))
        return x + jnp.tanh(nn.Dense(x.shape[-1])(h))


def linen_step(model, size):
    x = rows(size)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    params = jax.tree.map(lambda p: array(*p.shape, scale=0.2), params)
    return trained(lambda params, x: mean_square(model.apply(params, x))), (params, x)


@program()
def linen_remat(size, remat):
    return linen_step(nn.Sequential([nn.remat(Block)() for _ in range(size.layers)]), size)


@program()
def linen_remat_with_policy(size, remat):
    remat_block = nn.remat(Block, policy=POLICIES.dots_saveable)
    return linen_step(nn.Sequential([remat_block() for _ in range(size.layers)]), size)


class Looped(nn.Module):
    layers: int
    unit: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        body = lambda module, x, _: (module(x), None)  # noqa: E731
        loop = nn.scan(
            body, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        return loop(self.unit(), x, None)[0]


@program()
def linen_scan_of_remat(size, remat):
    return linen_step(Looped(size.layers, nn.remat(Block, prevent_cse=False)), size)


@program()
def linen_remat_scan(size, remat):
    """Flax's nested loops of checkpoints: memory of the square root."""
    return linen_step(nn.remat_scan(Block, lengths=(2, 2))(), size)


class NnxBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.down(nnx.gelu(self.up(x))))


@program()
def nnx_remat(size, remat):
    blocks = nnx.List([NnxBlock(size.width, nnx.Rngs(i)) for i in range(size.layers)])
    graph, state = nnx.split(blocks)
    unit = nnx.remat(lambda block, x: block(x))

    def loss(state, x):
        for one in nnx.merge(graph, state):
            x = unit(one, x)
        return mean_square(x)

    return trained(loss), (state, rows(size))
