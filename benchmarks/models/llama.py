"""A Llama in plain JAX (Touvron et al. 2023), with attention behind a custom VJP."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .case import Case, adamw, make_case
from .flash import attention


@dataclass(frozen=True)
class Config:
    """Shape of a Llama and of its training step.

    Attributes:
        layers: Number of blocks.
        width: Width of the residual stream.
        heads: Query heads.
        groups: Key-value heads.
        hidden: Width inside the feed-forward layers.
        vocab: Size of the vocabulary.
        base: Base of the rotary frequencies.
        batch: Sequences in a batch.
        length: Tokens in a sequence.
        block: Keys that attention visits at a time.
        dtype: Type to compute in.
        param_dtype: Type of parameters and optimiser state.
        scan: Whether one block is scanned over stacked parameters.
        rate: Peak learning rate.
        warmup: Warm-up steps.
    """

    layers: int = 22
    width: int = 2048
    heads: int = 32
    groups: int = 4
    hidden: int = 5632
    vocab: int = 32000
    base: float = 10_000.0
    batch: int = 4
    length: int = 2048
    block: int = 512
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    scan: bool = False
    rate: float = 4e-4
    warmup: int = 2000

    checkpoint = staticmethod(jax.checkpoint)

    def small(self) -> "Config":
        """The same structure in tiny widths and float32."""
        return dataclasses.replace(
            self,
            width=32,
            heads=4,
            groups=2,
            hidden=64,
            vocab=64,
            batch=2,
            length=16,
            block=8,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
            rate=1e-3,
            warmup=4,
        )

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every block."""

        @remat
        def block(params, x):
            return transform(self, params, x)

        def batch(key):
            shape = self.batch, self.length + 1
            return {"tokens": jax.random.randint(key, shape, 0, self.vocab)}

        def forward(params, stats, batch, key):
            del key
            tokens = batch["tokens"]
            logits = score(self, params, tokens[:, :-1], block)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean(), stats

        return make_case(
            name,
            variables=lambda key: (random_params(self, key), {}),
            batch=batch,
            forward=forward,
            optimizer=adamw(self.rate, self.warmup),
        )


def random_params(config: Config, key: jax.Array) -> dict[str, Any]:
    """Random weights; those of the blocks are stacked if they are to be scanned, else a list."""
    embed_key, head_key, block_key = jax.random.split(key, 3)
    shape = config.vocab, config.width
    blocks = block_params(config, block_key)
    return {
        "embed": normal(config, embed_key, shape),
        "h": blocks if config.scan else unstack(blocks),
        "norm": jnp.ones(config.width, config.param_dtype),
        "head": normal(config, head_key, shape[::-1]),
    }


def block_params(config: Config, key: jax.Array) -> dict[str, Any]:
    """Random weights of every block, stacked."""
    width, hidden = config.width, config.hidden
    narrow = width // config.heads * config.groups
    keys = iter(jax.random.split(key, 7))

    def matrix(*shape: int) -> jax.Array:
        return normal(config, next(keys), (config.layers, *shape))

    one = jnp.ones((config.layers, width), config.param_dtype)
    return {
        "norm_1": one,
        "attn": {
            "q": matrix(width, width),
            "k": matrix(width, narrow),
            "v": matrix(width, narrow),
            "out": matrix(width, width),
        },
        "norm_2": one,
        "mlp": {
            "gate": matrix(width, hidden),
            "up": matrix(width, hidden),
            "down": matrix(hidden, width),
        },
    }


def unstack(stacked: Any) -> list[Any]:
    """Splits a tree of stacked arrays into the trees that were stacked."""
    leaves, tree = jax.tree.flatten(stacked)
    return [tree.unflatten(layer) for layer in zip(*leaves, strict=True)]


def normal(config: Config, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A random matrix, or a stack of them."""
    return 0.02 * jax.random.normal(key, shape, config.param_dtype)


def score(
    config: Config, params: dict[str, Any], tokens: jax.Array, block: Callable[..., jax.Array]
) -> jax.Array:
    """Float32 logits `[batch, length, vocab]` of the next token for tokens `[batch, length]`."""
    x = params["embed"].astype(config.dtype)[tokens]
    if config.scan:
        x, _ = jax.lax.scan(lambda x, weights: (block(weights, x), None), x, params["h"])
    else:
        for i, weights in enumerate(params["h"]):
            with jax.named_scope(f"h_{i}"):
                x = block(weights, x)
    return (rms_norm(x, params["norm"]) @ params["head"].astype(config.dtype)).astype(jnp.float32)


def transform(config: Config, params: dict[str, Any], x: jax.Array) -> jax.Array:
    """One block on `[batch, length, width]`: the unit of recompute."""
    params = jax.tree.map(lambda weight: weight.astype(config.dtype), params)
    with jax.named_scope("attn"):
        x = x + attend(config, params["attn"], rms_norm(x, params["norm_1"]))
    with jax.named_scope("mlp"):
        return x + swiglu(params["mlp"], rms_norm(x, params["norm_2"]))


def attend(config: Config, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Rotary self-attention with grouped key-value heads."""
    split = (*x.shape[:2], -1, config.width // config.heads)
    q, k, v = ((x @ params[name]).reshape(split) for name in ("q", "k", "v"))
    q, k = rotate(q, config.base), rotate(k, config.base)
    return attention(q, k, v, config.block).reshape(x.shape) @ params["out"]


def swiglu(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Gated feed-forward layers."""
    return (jax.nn.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales the last axis to a root mean square of `scale`, in float32."""
    wide = x.astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
    return (wide * norm).astype(x.dtype) * scale.astype(x.dtype)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Turns pairs of features of `[batch, length, heads, features]` by their position."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(length)[:, None, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


MODELS = {
    "llama": Config(),
    "llama-160m": Config(
        layers=12, width=768, heads=12, groups=12, hidden=3072, batch=8, length=1024
    ),
    "llama3-8b": Config(
        layers=32,
        width=4096,
        groups=8,
        hidden=14336,
        vocab=128_256,
        base=500_000.0,
        batch=1,
        length=8192,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
    ),
}
