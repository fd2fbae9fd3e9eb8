"""Vision Transformer in Flax Linen (Dosovitskiy et al. 2021), with class token."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import optax

from .case import Case, adamw, labelled_images, make_case


@dataclass(frozen=True)
class Config:
    """Shape of a ViT and of its training step.

    Attributes:
        layers: Number of blocks.
        width: Width of the residual stream.
        heads: Attention heads.
        patch: Side of a patch, in pixels.
        classes: Number of classes.
        batch: Images in a batch.
        length: Side of the square image, in pixels.
        dropout: Dropout rate of embeddings and of the blocks' linear layers.
        dtype: Type to compute in; parameters are float32.
        scan: Whether one block is scanned over stacked parameters.
        rate: Peak learning rate.
        warmup: Warm-up steps.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    patch: int = 16
    classes: int = 1000
    batch: int = 64
    length: int = 224
    dropout: float = 0.1
    dtype: Any = jnp.float32
    scan: bool = False
    rate: float = 1e-3
    warmup: int = 10_000

    checkpoint = staticmethod(nn.remat)

    def small(self) -> "Config":
        """The same structure in tiny widths."""
        return dataclasses.replace(
            self, width=32, heads=2, patch=8, classes=10, batch=2, length=32, warmup=4
        )

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every block."""
        model = ViT(self, remat(Block))

        def variables(key):
            image = jnp.zeros((1, self.length, self.length, 3))
            return model.init({"params": key, "dropout": key}, image)["params"], {}

        def forward(params, stats, batch, key):
            logits = model.apply({"params": params}, batch["images"], rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return losses.mean(), stats

        return make_case(
            name,
            variables=variables,
            batch=functools.partial(labelled_images, config=self),
            forward=forward,
            optimizer=adamw(self.rate, self.warmup, b2=0.999),
        )


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    config: Config

    @nn.compact
    def __call__(self, x):
        """Transforms every position of `x`, `[batch, patches, width]`."""
        c = self.config
        drop = functools.partial(nn.Dropout, c.dropout, deterministic=False)
        hidden = nn.gelu(nn.Dense(4 * c.width, dtype=c.dtype, name="ff1")(x), approximate=False)
        hidden = drop(name="drop_1")(hidden)
        return drop(name="drop_2")(nn.Dense(c.width, dtype=c.dtype, name="ff2")(hidden))


class Block(nn.Module):
    """One pre-norm block: a region."""

    config: Config

    @nn.compact
    def __call__(self, x):
        """Adds both branches to the residual stream `x`, `[batch, patches, width]`."""
        c = self.config
        attention = nn.MultiHeadDotProductAttention(c.heads, dtype=c.dtype, name="attn")
        mixed = attention(nn.LayerNorm(dtype=c.dtype, name="ln_1")(x))
        x = x + nn.Dropout(c.dropout, deterministic=False, name="drop")(mixed)
        return x + MLP(c, name="mlp")(nn.LayerNorm(dtype=c.dtype, name="ln_2")(x))


class ViT(nn.Module):
    """Images `[batch, side, side, 3]` to float32 logits `[batch, classes]`."""

    config: Config
    block: type[nn.Module]

    @nn.compact
    def __call__(self, images):
        """Scores every class."""
        c = self.config
        patch = c.patch, c.patch
        x = nn.Conv(c.width, patch, patch, padding="VALID", dtype=c.dtype, name="patch")(images)
        x = x.reshape(x.shape[0], -1, c.width)
        token = self.param("class_token", nn.initializers.zeros, (1, 1, c.width))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)).astype(c.dtype), x], axis=1)
        init = nn.initializers.normal(0.02)
        x = x + self.param("positions", init, (1, *x.shape[1:])).astype(c.dtype)
        x = nn.Dropout(c.dropout, deterministic=False, name="drop")(x)
        x = self._scanned(x) if c.scan else self._unrolled(x)
        x = nn.LayerNorm(dtype=c.dtype, name="ln_f")(x[:, 0])
        return nn.Dense(c.classes, dtype=c.dtype, name="head")(x).astype(jnp.float32)

    def _unrolled(self, x):
        for i in range(self.config.layers):
            x = self.block(self.config, name=f"h_{i}")(x)
        return x

    def _scanned(self, x):
        scan = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.config.layers,
        )
        return scan(self.block(self.config, name="h"), x, None)[0]


MODELS = {
    "vit-b": Config(),
    "vit-l": Config(layers=24, width=1024, heads=16),
}
