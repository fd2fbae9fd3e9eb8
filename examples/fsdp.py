"""A scanned model, weights and batch cut over eight devices (of this CPU): bytes are per device.

python examples/fsdp.py
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdelta

jax.config.update("jax_num_cpu_devices", 8)  # before JAX looks for devices

LAYERS, WIDTH, ROWS = 8, 256, 8192


def train_step(weights, x):
    """One step; JAX gathers each layer's weights as the layer needs them."""

    def loss_fn(weights):
        def layer(x, w):
            return x + jnp.tanh(jax.nn.gelu(x @ w["up"]) @ w["down"]), None

        y = jax.lax.scan(layer, x, weights)[0]
        return jnp.mean((y - jnp.roll(x, 1, axis=1)) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def main() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, weight = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))

    def normal(seed, shape, sharding):
        return jax.device_put(jax.random.normal(jax.random.key(seed), shape), sharding)

    x = normal(0, (ROWS, WIDTH), rows)
    weights = {
        "up": 0.05 * normal(1, (LAYERS, WIDTH, 4 * WIDTH), weight),
        "down": 0.05 * normal(2, (LAYERS, 4 * WIDTH, WIDTH), weight),
    }
    plan = jdelta.plan(train_step, 0.5, weights, x, donate_argnums=0)
    print(plan)
    step = plan.jit()
    for _ in range(3):
        weights, loss = step(weights, x)
        print(f"loss {loss:.4f}, weights over {len(weights['up'].sharding.device_set)} devices")


if __name__ == "__main__":
    main()
