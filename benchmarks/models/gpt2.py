"""GPT-2 in Flax Linen (Radford et al. 2019): pre-norm blocks, learnt positions, tied head.

Values inside a block carry MaxText's names, which hand-written recompute policies go by.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from .case import Case, adamw, make_case


@dataclass(frozen=True)
class Config:
    """Shape of a GPT-2 and of its training step.

    Attributes:
        layers: Number of blocks.
        width: Width of the residual stream.
        heads: Attention heads.
        vocab: Size of the vocabulary.
        positions: Learnt positions.
        batch: Sequences in a batch.
        length: Tokens in a sequence, at most `positions`.
        dropout: Dropout rate of embeddings, attention weights and residual branches.
        dtype: Type to compute in; parameters are float32.
        scan: Whether one block is scanned over stacked parameters.
        span: Scanned blocks under one further recompute decorator of JAX's; 1: there is none.
        rate: Peak learning rate.
        warmup: Warm-up steps.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50257
    positions: int = 1024
    batch: int = 8
    length: int = 1024
    dropout: float = 0.1
    dtype: Any = jnp.float32
    scan: bool = False
    span: int = 1
    rate: float = 6e-4
    warmup: int = 2000

    checkpoint = staticmethod(nn.remat)

    def small(self) -> "Config":
        """The same structure in tiny widths."""
        return dataclasses.replace(
            self, width=32, heads=2, vocab=64, positions=32, batch=2, length=16, warmup=4
        )

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every block."""
        model = GPT2(self, remat(Block))

        def variables(key):
            tokens = jnp.zeros((1, self.length), jnp.int32)
            return model.init({"params": key, "dropout": key}, tokens)["params"], {}

        def batch(key):
            shape = self.batch, self.length + 1
            return {"tokens": jax.random.randint(key, shape, 0, self.vocab)}

        def forward(params, stats, batch, key):
            tokens = batch["tokens"]
            logits = model.apply({"params": params}, tokens[:, :-1], rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean(), stats

        return make_case(
            name,
            variables=variables,
            batch=batch,
            forward=forward,
            optimizer=adamw(self.rate, self.warmup),
        )


def dense(config: Config, features: int, name: str, scale: float = 1.0) -> nn.Dense:
    """A linear layer initialised as GPT-2's."""
    init = nn.initializers.normal(0.02 * scale)
    return nn.Dense(features, dtype=config.dtype, kernel_init=init, name=name)


class Attention(nn.Module):
    """Causal self-attention."""

    config: Config

    @nn.compact
    def __call__(self, x):
        """Mixes positions of `x`, `[batch, length, width]`."""
        c = self.config
        batch, length, width = x.shape
        qkv = checkpoint_name(dense(c, 3 * width, "qkv")(x), "qkv_proj")
        parts = jnp.moveaxis(qkv.reshape(batch, length, 3, c.heads, -1), 2, 0)
        q, k, v = map(checkpoint_name, parts, ("query_proj", "key_proj", "value_proj"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // c.heads)
        causal = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(causal, scores.astype(jnp.float32), -1e30)
        weights = jax.nn.softmax(scores).astype(c.dtype)
        weights = nn.Dropout(c.dropout, deterministic=False, name="drop")(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width)
        mixed = checkpoint_name(mixed, "context")
        out = dense(c, width, "proj", scale=(2 * c.layers) ** -0.5)(mixed)
        return checkpoint_name(out, "out_proj")


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    config: Config

    @nn.compact
    def __call__(self, x):
        """Transforms every position of `x`, `[batch, length, width]`."""
        c = self.config
        hidden = nn.gelu(checkpoint_name(dense(c, 4 * c.width, "ff1")(x), "mlpwi"))
        out = dense(c, c.width, "ff2", scale=(2 * c.layers) ** -0.5)(hidden)
        return checkpoint_name(out, "mlpwo")


class Block(nn.Module):
    """One pre-norm block: a region."""

    config: Config

    @nn.compact
    def __call__(self, x):
        """Adds both branches to the residual stream `x`, `[batch, length, width]`."""
        c = self.config
        x = checkpoint_name(x, "decoder_layer_input")
        norm = functools.partial(nn.LayerNorm, epsilon=1e-5, dtype=c.dtype)
        drop = functools.partial(nn.Dropout, c.dropout, deterministic=False)
        x = x + drop(name="drop_1")(Attention(c, name="attn")(norm(name="ln_1")(x)))
        return x + drop(name="drop_2")(MLP(c, name="mlp")(norm(name="ln_2")(x)))


class GPT2(nn.Module):
    """Tokens `[batch, length]` to float32 logits `[batch, length, vocab]`."""

    config: Config
    block: type[nn.Module]

    @nn.compact
    def __call__(self, tokens):
        """Scores the next token at every position."""
        c = self.config
        embed = functools.partial(nn.Embed, features=c.width, dtype=c.dtype)
        wte = embed(c.vocab, embedding_init=nn.initializers.normal(0.02), name="wte")
        wpe = embed(c.positions, embedding_init=nn.initializers.normal(0.01), name="wpe")
        x = wte(tokens) + wpe(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(c.dropout, deterministic=False, name="drop")(x)
        x = self._scanned(x) if c.scan else self._unrolled(x)
        x = nn.LayerNorm(epsilon=1e-5, dtype=c.dtype, name="ln_f")(x)
        return wte.attend(x).astype(jnp.float32)

    def _unrolled(self, x):
        for i in range(self.config.layers):
            x = self.block(self.config, name=f"h_{i}")(x)
        return x

    def _scanned(self, x):
        c = self.config

        def body(block, x, _):
            return block(x), None

        if c.span > 1:
            body = nn.remat(_over(body, c.span), prevent_cse=False)
        body = _over(body, c.layers // c.span)
        return body(self.block(c, name="h"), x, None)[0]


def _over(body, length):
    """Scans a function of a block and `x` over stacked parameters."""
    return nn.scan(
        body,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=length,
    )


MODELS = {
    "gpt2": Config(),
    "gpt2-medium": Config(layers=24, width=1024, heads=16),
    "gpt2-large": Config(layers=36, width=1280, heads=20),
    "gpt2-xl": Config(layers=48, width=1600, heads=25),
    "nano": Config(
        layers=4, width=128, heads=4, vocab=256, positions=128, batch=16, length=128, warmup=20
    ),
}
