"""A residual stack of tanh, exp and softmax, whose residuals exist only after differentiation."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .case import Case, make_case


@dataclass(frozen=True)
class Config:
    """Shape of the stack and of its training step.

    Attributes:
        layers: Number of layers.
        width: Width of every layer.
        batch: Rows in a batch.
        dtype: Type to compute in; parameters are float32.
        rate: Learning rate.
        scan: Whether one loop runs all layers.
    """

    layers: int = 8
    width: int = 2048
    batch: int = 8192
    dtype: Any = jnp.float32
    rate: float = 1e-3
    scan: bool = False

    checkpoint = staticmethod(jax.checkpoint)

    def small(self) -> "Config":
        """The same structure in tiny widths."""
        return dataclasses.replace(self, width=32, batch=64)

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every layer."""
        marked = remat(layer)

        def run(x, weights):
            return marked(jax.tree.map(lambda w: w.astype(self.dtype), weights), x), None

        def variables(key):
            keys = jax.random.split(key, self.layers)
            layers = [layer_params(k, self.width) for k in keys]
            return (
                jax.tree.map(lambda *rows: jnp.stack(rows), *layers) if self.scan else layers
            ), {}

        def batch(key):
            inputs, targets = jax.random.normal(key, (2, self.batch, self.width))
            return {"inputs": inputs, "targets": targets}

        def forward(params, stats, batch, key):
            del key
            x = batch["inputs"].astype(self.dtype)
            if self.scan:
                x, _ = jax.lax.scan(run, x, params)
            else:
                for weights in params:
                    x, _ = run(x, weights)
            return jnp.mean(jnp.square(x.astype(jnp.float32) - batch["targets"])), stats

        return make_case(
            name,
            variables=variables,
            batch=batch,
            forward=forward,
            optimizer=optax.adam(self.rate),
        )


def layer_params(key: jax.Array, width: int) -> dict[str, jax.Array]:
    """Random weights of one layer."""
    init = jax.nn.initializers.lecun_normal()
    keys = jax.random.split(key, 3)
    matrices = {
        n: init(k, (width, width)) for n, k in zip(("in", "gate", "out"), keys, strict=True)
    }
    return {**matrices, "bias": jnp.zeros(width)}


def layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """One layer `[batch, width] -> [batch, width]`: a region."""
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    bump = jnp.exp(-jnp.square(hidden))
    gate = jax.nn.softmax(bump @ params["gate"])
    return x + (gate * hidden) @ params["out"]


MODELS = {"mlp": Config()}
