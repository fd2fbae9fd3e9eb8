"""BERT in Flax Linen (Devlin et al. 2019): post-norm encoder, masked-language-model head."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .case import Case, adamw, make_case

PAD = 0
"""Token that fills a sequence up to its length."""

INIT = nn.initializers.normal(0.02)


@dataclass(frozen=True)
class Config:
    """Shape of a BERT and of its training step.

    Attributes:
        layers: Number of blocks.
        width: Width of the encoder.
        heads: Attention heads.
        vocab: Size of the vocabulary.
        positions: Learnt positions.
        batch: Sequences in a batch.
        length: Tokens in a sequence, padding included, at most `positions`.
        dropout: Dropout rate of embeddings, attention weights and branches.
        dtype: Type to compute in; parameters are float32.
        scan: Whether one block is scanned over stacked parameters.
        rate: Peak learning rate.
        warmup: Warm-up steps.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 30522
    positions: int = 512
    batch: int = 32
    length: int = 512
    dropout: float = 0.1
    dtype: Any = jnp.float32
    scan: bool = False
    rate: float = 1e-4
    warmup: int = 10_000

    checkpoint = staticmethod(nn.remat)

    def small(self) -> "Config":
        """The same structure in tiny widths."""
        return dataclasses.replace(
            self,
            width=32,
            heads=2,
            vocab=64,
            positions=32,
            batch=2,
            length=16,
            rate=1e-3,
            warmup=4,
        )

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every block."""
        model = Bert(self, remat(Block))

        def variables(key):
            tokens = jnp.zeros((1, self.length), jnp.int32)
            return model.init({"params": key, "dropout": key}, tokens, tokens)["params"], {}

        def forward(params, stats, batch, key):
            logits = model.apply(
                {"params": params}, batch["tokens"], batch["segments"], rngs={"dropout": key}
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            hidden = batch["hidden"]
            return jnp.sum(losses * hidden) / jnp.maximum(jnp.sum(hidden), 1), stats

        return make_case(
            name,
            variables=variables,
            batch=functools.partial(random_batch, self),
            forward=forward,
            optimizer=adamw(self.rate, self.warmup, b2=0.999, decay=0.01),
        )


def random_batch(config: Config, key: jax.Array) -> dict[str, jax.Array]:
    """Two-segment sequences of unequal lengths, 15 % of whose tokens are hidden.

    Args:
        config: Shape of the batch.
        key: Random key.

    Returns:
        `tokens` as the model sees them, `segments` (0 or 1), `labels` (the true tokens) and
        `hidden` (which of them to predict), each `[batch, length]`.
    """
    shape = config.batch, config.length
    token_key, size_key, hidden_key = jax.random.split(key, 3)
    sizes = jax.random.randint(size_key, (config.batch, 1), config.length // 2, config.length + 1)
    place = jnp.arange(config.length)
    labels = jax.random.randint(token_key, shape, PAD + 2, config.vocab)
    labels = jnp.where(place < sizes, labels, PAD)
    hidden = jax.random.bernoulli(hidden_key, 0.15, shape) & (place < sizes)
    return {
        "tokens": jnp.where(hidden, PAD + 1, labels),
        "segments": (place >= sizes // 2).astype(jnp.int32),
        "labels": labels,
        "hidden": hidden,
    }


class Attention(nn.Module):
    """Self-attention over the positions that are not padding."""

    config: Config

    @nn.compact
    def __call__(self, x, mask):
        """Mixes positions of `x`, `[batch, length, width]`; `mask` is `[batch, 1, 1, length]`."""
        c = self.config
        project = functools.partial(nn.DenseGeneral, dtype=c.dtype, kernel_init=INIT)
        heads = c.heads, c.width // c.heads
        query, key, value = (project(heads, name=n)(x) for n in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / heads[1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(c.dtype).min))
        weights = nn.Dropout(c.dropout, deterministic=False, name="drop")(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return project(c.width, axis=(-2, -1), name="out")(mixed)


class MLP(nn.Module):
    """Two linear layers with an exact GELU between them."""

    config: Config

    @nn.compact
    def __call__(self, x):
        """Transforms every position of `x`, `[batch, length, width]`."""
        dense = functools.partial(nn.Dense, dtype=self.config.dtype, kernel_init=INIT)
        hidden = nn.gelu(dense(4 * self.config.width, name="ff1")(x), approximate=False)
        return dense(self.config.width, name="ff2")(hidden)


class Block(nn.Module):
    """One post-norm block: a region."""

    config: Config

    @nn.compact
    def __call__(self, x, mask):
        """Transforms `x`, `[batch, length, width]`; `mask` is `[batch, 1, 1, length]`."""
        c = self.config
        norm = functools.partial(nn.LayerNorm, epsilon=1e-12, dtype=c.dtype)
        drop = functools.partial(nn.Dropout, c.dropout, deterministic=False)
        x = norm(name="ln_1")(x + drop(name="drop_1")(Attention(c, name="attn")(x, mask)))
        return norm(name="ln_2")(x + drop(name="drop_2")(MLP(c, name="mlp")(x)))


class Bert(nn.Module):
    """Tokens and segments `[batch, length]` to float32 logits `[batch, length, vocab]`."""

    config: Config
    block: type[nn.Module]

    @nn.compact
    def __call__(self, tokens, segments):
        """Scores the true token at every position."""
        c = self.config
        norm = functools.partial(nn.LayerNorm, epsilon=1e-12, dtype=c.dtype)
        embed = functools.partial(nn.Embed, features=c.width, dtype=c.dtype, embedding_init=INIT)
        words = embed(c.vocab, name="words")
        x = words(tokens) + embed(2, name="segments")(segments)
        x = norm(name="ln")(x + embed(c.positions, name="positions")(jnp.arange(tokens.shape[1])))
        x = nn.Dropout(c.dropout, deterministic=False, name="drop")(x)
        mask = (tokens != PAD)[:, None, None, :]
        x = self._scanned(x, mask) if c.scan else self._unrolled(x, mask)
        x = nn.gelu(nn.Dense(c.width, dtype=c.dtype, name="head")(x), approximate=False)
        bias = self.param("bias", nn.initializers.zeros, (c.vocab,))
        return words.attend(norm(name="head_ln")(x)).astype(jnp.float32) + bias

    def _unrolled(self, x, mask):
        for i in range(self.config.layers):
            x = self.block(self.config, name=f"h_{i}")(x, mask)
        return x

    def _scanned(self, x, mask):
        scan = nn.scan(
            lambda block, x, mask: (block(x, mask), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.config.layers,
        )
        return scan(self.block(self.config, name="h"), x, mask)[0]


MODELS = {
    "bert-base": Config(),
    "bert-large": Config(layers=24, width=1024, heads=16, batch=16, length=384),
}
