"""A Llama in plain JAX (Touvron et al. 2023), with attention behind a custom VJP.

Values inside a block carry MaxText's names, which hand-written recompute policies go by.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

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
        span: Scanned blocks under one further recompute decorator of JAX's; 1: there is none.
        rows: Sharding of the residual stream `[batch, length, width]`; None: left to the compiler.
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
    span: int = 1
    rows: Any = None
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
        return decoder_case(self, name, remat, transform, block_params)


def decoder_case(
    config: Any,
    name: str,
    remat: Callable[[Any], Any],
    transform: Callable[..., jax.Array],
    block_params: Callable[..., dict[str, Any]],
) -> Case:
    """The training step of a stack of blocks between embedding and head.

    Args:
        config: Shape of the model.
        name: Name of the case.
        remat: Decorator of every block.
        transform: One block, `(config, params, x) -> x`.
        block_params: Draws the weights of all blocks, stacked, from configuration and key.

    Returns:
        The case.
    """

    @remat
    def block(params, x):
        return transform(config, params, x)

    def batch(key):
        shape = config.batch, config.length + 1
        return {"tokens": jax.random.randint(key, shape, 0, config.vocab)}

    def forward(params, stats, batch, key):
        del key
        tokens = batch["tokens"]
        logits = score(config, params, tokens[:, :-1], block)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), stats

    return make_case(
        name,
        variables=lambda key: (random_params(config, key, block_params), {}),
        batch=batch,
        forward=forward,
        optimizer=adamw(config.rate, config.warmup),
    )


def random_params(
    config: Config, key: jax.Array, block_params: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
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
    attn_key, mlp_key = jax.random.split(key)
    width, hidden = config.width, config.hidden
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return {
        "norm_1": ones(config),
        "attn": attention_params(config, attn_key),
        "norm_2": ones(config),
        "mlp": matrices(config, mlp_key, shapes),
    }


def attention_params(config: Config, key: jax.Array) -> dict[str, jax.Array]:
    """Random weights of every block's attention, stacked."""
    width, narrow = config.width, config.width // config.heads * config.groups
    square, thin = (width, width), (width, narrow)
    return matrices(config, key, {"q": square, "k": thin, "v": thin, "out": square})


def matrices(
    config: Config, key: jax.Array, shapes: dict[str, tuple[int, ...]]
) -> dict[str, jax.Array]:
    """Random weights of the given shapes for every block, stacked."""
    keys = jax.random.split(key, len(shapes))
    return {
        name: normal(config, k, (config.layers, *shape))
        for (name, shape), k in zip(shapes.items(), keys, strict=True)
    }


def ones(config: Config) -> jax.Array:
    """Scales of one norm of every block, stacked."""
    return jnp.ones((config.layers, config.width), config.param_dtype)


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
    x = cut(config, params["embed"].astype(config.dtype)[tokens])
    if config.scan:
        x = scanned(config, params["h"], x, block)
    else:
        for i, weights in enumerate(params["h"]):
            with jax.named_scope(f"h_{i}"):
                x = block(weights, x)
    return (rms_norm(x, params["norm"]) @ params["head"].astype(config.dtype)).astype(jnp.float32)


def scanned(
    config: Config, stacked: Any, x: jax.Array, block: Callable[..., jax.Array]
) -> jax.Array:
    """All blocks under one scan, or under a scan of recomputed scans."""

    def body(x, weights):
        return block(weights, x), None

    if config.span > 1:
        group = config.layers // config.span, config.span
        stacked = jax.tree.map(lambda w: w.reshape(*group, *w.shape[1:]), stacked)
        inner = functools.partial(jax.lax.scan, body)
        return jax.lax.scan(jax.checkpoint(inner, prevent_cse=False), x, stacked)[0]
    return jax.lax.scan(body, x, stacked)[0]


def transform(config: Config, params: dict[str, Any], x: jax.Array) -> jax.Array:
    """One block on `[batch, length, width]`: a region."""
    x = checkpoint_name(cut(config, x), "decoder_layer_input")
    params = jax.tree.map(lambda weight: weight.astype(config.dtype), params)
    with jax.named_scope("attn"):
        x = x + attend(config, params["attn"], rms_norm(x, params["norm_1"]))
    with jax.named_scope("mlp"):
        return cut(config, x + swiglu(params["mlp"], rms_norm(x, params["norm_2"])))


def cut(config: Config, x: jax.Array) -> jax.Array:
    """The residual stream, cut over devices as the configuration says."""
    return x if config.rows is None else jax.lax.with_sharding_constraint(x, config.rows)


def attend(config: Config, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Rotary self-attention with grouped key-value heads."""
    split = (*x.shape[:2], -1, config.width // config.heads)
    q, k, v = ((x @ params[name]).reshape(split) for name in ("q", "k", "v"))
    q = checkpoint_name(rotate(q, config.base), "query_proj")
    k = checkpoint_name(rotate(k, config.base), "key_proj")
    mixed = attention(q, k, checkpoint_name(v, "value_proj"), config.block)
    mixed = checkpoint_name(mixed, "context").reshape(x.shape)
    return checkpoint_name(mixed @ params["out"], "out_proj")


def swiglu(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Gated feed-forward layers."""
    gate = checkpoint_name(x @ params["gate"], "mlpwi_0")
    up = checkpoint_name(x @ params["up"], "mlpwi_1")
    return checkpoint_name((jax.nn.silu(gate) * up) @ params["down"], "mlpwo")


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


_LLAMA3_8B = Config(
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
)

MODELS = {
    "llama": Config(),
    "llama-160m": Config(
        layers=12, width=768, heads=12, groups=12, hidden=3072, batch=8, length=1024
    ),
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": dataclasses.replace(_LLAMA3_8B, layers=80, width=8192, heads=64, hidden=28672),
}
