"""DenseNet in Flax Linen (Huang et al. 2017): each bottleneck layer reads all layers before it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from .case import Case
from .resnet import image_case, layers, stem


@dataclass(frozen=True)
class Config:
    """Shape of a DenseNet and of its training step.

    Attributes:
        blocks: Layers in every dense block.
        growth: Channels that every layer adds.
        classes: Number of classes.
        batch: Images in a batch.
        length: Side of the square image, in pixels.
        dtype: Type to compute in; parameters are float32.
        rate: Learning rate.
    """

    blocks: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    classes: int = 1000
    batch: int = 64
    length: int = 224
    dtype: Any = jnp.float32
    rate: float = 0.1

    checkpoint = staticmethod(nn.remat)

    def small(self) -> "Config":
        """The same structure in tiny widths."""
        return dataclasses.replace(self, growth=4, classes=10, batch=4, length=32, rate=0.01)

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every layer."""
        return image_case(name, DenseNet(self, remat(Layer)), self)


class Layer(nn.Module):
    """What a layer adds, by 1x1 and 3x3 convolutions: a region."""

    growth: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        """New channels for `x`, `[batch, height, width, channels]`."""
        conv, norm = layers(self.dtype)
        y = conv(4 * self.growth, (1, 1), name="conv_1")(nn.relu(norm(name="bn_1")(x)))
        return conv(self.growth, (3, 3), padding=1, name="conv_2")(nn.relu(norm(name="bn_2")(y)))


class DenseNet(nn.Module):
    """Images `[batch, side, side, 3]` to float32 logits `[batch, classes]`."""

    config: Config
    layer: type[nn.Module]

    @nn.compact
    def __call__(self, images):
        """Scores every class."""
        c = self.config
        conv, norm = layers(c.dtype)
        x = stem(images, 2 * c.growth, c.dtype)
        for i, count in enumerate(c.blocks):
            if i:
                x = nn.relu(norm(name=f"bn_transition_{i}")(x))
                x = conv(x.shape[-1] // 2, (1, 1), name=f"conv_transition_{i}")(x)
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            for j in range(count):
                new = self.layer(c.growth, c.dtype, name=f"block_{i}_layer_{j}")(x)
                x = jnp.concatenate([x, new], axis=-1)
        x = jnp.mean(nn.relu(norm(name="bn_final")(x)), axis=(1, 2))
        return nn.Dense(c.classes, dtype=c.dtype, name="head")(x).astype(jnp.float32)


MODELS = {"densenet121": Config()}
