"""Flax Linen with a TrainState: blocks are marked as regions, the plan printed and explained.

python examples/linen.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jdelta

LAYERS, WIDTH, ROWS = 8, 128, 2048


@jdelta.remat
class Block(nn.Module):
    """One residual block; the decorator makes it a region that a plan decides about."""

    @nn.compact
    def __call__(self, x, _=None):
        """Transforms `x`, `[rows, width]`."""
        h = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        h = nn.Dropout(0.1, deterministic=False)(h)
        return x + nn.Dense(WIDTH, name="down")(h), None


class Stack(nn.Module):
    """Blocks, scanned."""

    @nn.compact
    def __call__(self, x):
        """Transforms `x`, `[rows, width]`."""
        rngs = {"params": True, "dropout": True}
        blocks = nn.scan(Block, {"params": 0}, split_rngs=rngs, length=LAYERS)
        return blocks(name="blocks")(x, None)[0]


def train_step(state, x, key):
    """One step of Adam on a toy target: the next row."""

    def loss_fn(params):
        y = state.apply_fn({"params": params}, x, rngs={"dropout": key})
        return jnp.mean((y - jnp.roll(x, 1, axis=0)) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main() -> None:
    model, key = Stack(), jax.random.key(0)
    x = jax.random.normal(key, (ROWS, WIDTH))
    params = model.init({"params": key, "dropout": key}, x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    plan = jdelta.plan(train_step, 0.4, state, x, key, donate_argnums=0)
    print(plan)
    for explanation in plan.explain("*/up/*"):
        print(explanation)

    step = plan.jit()
    for number in range(5):
        state, loss = step(state, x, jax.random.fold_in(key, number))
        print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
