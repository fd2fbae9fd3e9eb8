"""Functions with derivatives of their own: one by ``custom_vjp``, one by ``custom_jvp``."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def bell(x):
    return jnp.exp(-(x**2))


def bell_forward(x):
    y = jnp.exp(-(x**2))
    return y, (x, y)


bell.defvjp(bell_forward, lambda kept, g: (-2.0 * kept[0] * kept[1] * g,))


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda x, t: (soft(x[0]), t[0] * jax.nn.sigmoid(x[0])))
