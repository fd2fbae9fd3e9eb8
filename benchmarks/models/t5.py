"""T5 in Flax Linen (Raffel et al. 2020): encoder and decoder, RMSNorm, relative positions."""

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

from .case import Case, make_case

DISTANCE = 128
"""Tokens further apart than this share the last bucket of relative positions."""


@dataclass(frozen=True)
class Config:
    """Shape of a T5 and of its training step.

    Attributes:
        layers: Number of encoder blocks, and of decoder blocks.
        width: Width of the residual streams.
        hidden: Width inside the feed-forward layers.
        heads: Attention heads.
        vocab: Size of the vocabulary.
        buckets: Buckets of relative positions.
        batch: Pairs of sequences in a batch.
        length: Tokens of a sequence, the encoder's and the decoder's.
        dropout: Dropout rate of embeddings, attention weights, branches and feed-forward layers.
        dtype: Type to compute in; parameters are float32.
        scan: Whether one encoder and one decoder block are scanned over stacked parameters.
        rate: Learning rate up to the end of the warm-up; then it falls with the root of the step.
        warmup: Warm-up steps.
    """

    layers: int = 24
    width: int = 1024
    hidden: int = 4096
    heads: int = 16
    vocab: int = 32128
    buckets: int = 32
    batch: int = 8
    length: int = 512
    dropout: float = 0.1
    dtype: Any = jnp.float32
    scan: bool = False
    rate: float = 1e-2
    warmup: int = 10_000

    checkpoint = staticmethod(nn.remat)

    def small(self) -> "Config":
        """The same structure in tiny widths."""
        return dataclasses.replace(
            self, width=32, hidden=64, heads=2, vocab=64, batch=2, length=16, warmup=4
        )

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every block."""
        model = T5(self, remat(EncoderBlock), remat(DecoderBlock))

        def variables(key):
            tokens = jnp.zeros((1, self.length), jnp.int32)
            return model.init({"params": key, "dropout": key}, tokens, tokens)["params"], {}

        def batch(key):
            inputs, targets = jax.random.split(key)
            shape = self.batch, self.length
            return {
                "inputs": jax.random.randint(inputs, shape, 0, self.vocab),
                "targets": jax.random.randint(targets, (shape[0], shape[1] + 1), 0, self.vocab),
            }

        def forward(params, stats, batch, key):
            targets = batch["targets"]
            logits = model.apply(
                {"params": params}, batch["inputs"], targets[:, :-1], rngs={"dropout": key}
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets[:, 1:])
            return losses.mean(), stats

        return make_case(
            name,
            variables=variables,
            batch=batch,
            forward=forward,
            optimizer=optax.adafactor(functools.partial(falling, self.rate, self.warmup)),
        )


def falling(rate: float, warmup: int, step: jax.Array) -> jax.Array:
    """T5's learning rate: constant, then falling with the root of the step."""
    return rate * jnp.sqrt(warmup / jnp.maximum(step, warmup))


class RelativeBias(nn.Module):
    """What is added to the scores of every block for the distance of query and key."""

    config: Config
    causal: bool

    @nn.compact
    def __call__(self, length):
        """The bias `[1, heads, length, length]`; minus infinity where a causal query sees none."""
        c = self.config
        place = jnp.arange(length)
        ahead = place[None, :] - place[:, None]
        buckets = bucket(ahead, c.buckets, self.causal)
        init = nn.initializers.normal(1.0)
        table = self.param("embedding", init, (c.buckets, c.heads)).astype(c.dtype)
        bias = jnp.moveaxis(table[buckets], -1, 0)[None]
        return jnp.where(ahead > 0, jnp.finfo(c.dtype).min, bias) if self.causal else bias


def bucket(ahead: jax.Array, buckets: int, causal: bool) -> jax.Array:
    """Bucket of each relative position: one for each short distance, then ever wider ones.

    Args:
        ahead: Position of the key less that of the query.
        buckets: Number of buckets, shared by both directions unless `causal`.
        causal: Whether keys ahead of the query do not matter.

    Returns:
        Indices from 0 to `buckets - 1`, shaped like `ahead`.
    """
    one_way = buckets if causal else buckets // 2
    offset = 0 if causal else jnp.where(ahead > 0, one_way, 0)
    distance = jnp.maximum(-ahead, 0) if causal else jnp.abs(ahead)
    exact = one_way // 2
    far = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(DISTANCE / exact)
    wide = exact + (far * (one_way - exact)).astype(jnp.int32)
    return offset + jnp.where(distance < exact, distance, jnp.minimum(wide, one_way - 1))


class Attention(nn.Module):
    """Attention whose scores are not scaled: the initialisation of the queries is."""

    config: Config

    @nn.compact
    def __call__(self, x, memory, bias):
        """Mixes positions of `memory` into those of `x`, both `[batch, length, width]`."""
        c = self.config
        features = c.width // c.heads
        project = functools.partial(nn.DenseGeneral, use_bias=False, dtype=c.dtype)
        inner = functools.partial(project, (c.heads, features))
        init = nn.initializers.normal
        query = inner(kernel_init=init((c.width * features) ** -0.5), name="query")(x)
        key = inner(kernel_init=init(c.width**-0.5), name="key")(memory)
        value = inner(kernel_init=init(c.width**-0.5), name="value")(memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        weights = jax.nn.softmax(scores if bias is None else scores + bias)
        weights = nn.Dropout(c.dropout, deterministic=False, name="drop")(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return project(c.width, axis=(-2, -1), kernel_init=init(c.width**-0.5), name="out")(mixed)


class MLP(nn.Module):
    """Two linear layers with a ReLU between them."""

    config: Config

    @nn.compact
    def __call__(self, x):
        """Transforms every position of `x`, `[batch, length, width]`."""
        c = self.config
        dense = functools.partial(nn.Dense, use_bias=False, dtype=c.dtype)
        init = nn.initializers.normal
        hidden = nn.relu(dense(c.hidden, kernel_init=init(c.width**-0.5), name="ff1")(x))
        hidden = nn.Dropout(c.dropout, deterministic=False, name="drop")(hidden)
        return dense(c.width, kernel_init=init(c.hidden**-0.5), name="ff2")(hidden)


def layers(config: Config) -> tuple[Callable[..., nn.RMSNorm], Callable[..., nn.Dropout]]:
    """The normalisation before every branch, and the dropout behind it."""
    norm = functools.partial(nn.RMSNorm, dtype=config.dtype)
    return norm, functools.partial(nn.Dropout, config.dropout, deterministic=False)


class EncoderBlock(nn.Module):
    """Self-attention and feed-forward layers: a region."""

    config: Config

    @nn.compact
    def __call__(self, x, bias):
        """Adds both branches to `x`, `[batch, length, width]`."""
        norm, drop = layers(self.config)
        y = norm(name="norm_1")(x)
        x = x + drop(name="drop_1")(Attention(self.config, name="attn")(y, y, bias))
        return x + drop(name="drop_2")(MLP(self.config, name="mlp")(norm(name="norm_2")(x)))


class DecoderBlock(nn.Module):
    """Causal attention, attention to the encoder and feed-forward layers: a region."""

    config: Config

    @nn.compact
    def __call__(self, x, memory, bias):
        """Adds all three branches to `x`, `[batch, length, width]`."""
        norm, drop = layers(self.config)
        y = norm(name="norm_1")(x)
        x = x + drop(name="drop_1")(Attention(self.config, name="attn")(y, y, bias))
        cross = Attention(self.config, name="cross")
        x = x + drop(name="drop_2")(cross(norm(name="norm_2")(x), memory, None))
        return x + drop(name="drop_3")(MLP(self.config, name="mlp")(norm(name="norm_3")(x)))


class T5(nn.Module):
    """Tokens of both sides `[batch, length]` to float32 logits `[batch, length, vocab]`."""

    config: Config
    encoder: type[nn.Module]
    decoder: type[nn.Module]

    @nn.compact
    def __call__(self, inputs, targets):
        """Scores the next target token at every position."""
        c = self.config
        init = nn.initializers.normal(1.0)
        embed = nn.Embed(c.vocab, c.width, dtype=c.dtype, embedding_init=init, name="embed")
        bias = RelativeBias(c, causal=False, name="encoder_bias")(inputs.shape[1])
        memory = self._stack(self.encoder, "encoder", embed(inputs), bias)
        bias = RelativeBias(c, causal=True, name="decoder_bias")(targets.shape[1])
        x = self._stack(self.decoder, "decoder", embed(targets), memory, bias)
        return embed.attend(x * c.width**-0.5).astype(jnp.float32)

    def _stack(self, block, name, x, *shared):
        """The blocks of one side, between dropout and a final norm and dropout."""
        norm, drop = layers(self.config)
        x = drop(name=f"{name}_drop")(x)
        run = self._scanned if self.config.scan else self._unrolled
        x = norm(name=f"{name}_norm")(run(block, name, x, *shared))
        return drop(name=f"{name}_last_drop")(x)

    def _unrolled(self, block, name, x, *shared):
        for i in range(self.config.layers):
            x = block(self.config, name=f"{name}_{i}")(x, *shared)
        return x

    def _scanned(self, block, name, x, *shared):
        scan = nn.scan(
            lambda block, x, *shared: (block(x, *shared), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.config.layers,
        )
        return scan(block(self.config, name=name), x, *shared)[0]


MODELS = {"t5-large": Config()}
