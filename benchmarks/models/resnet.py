"""ResNet with bottleneck blocks in Flax Linen (He et al. 2016), version 1.5: stride on the 3x3."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .case import Case, labelled_images, make_case, matrices


@dataclass(frozen=True)
class Config:
    """Shape of a ResNet and of its training step.

    Attributes:
        stages: Blocks in every stage.
        width: Channels of the first stage.
        classes: Number of classes.
        batch: Images in a batch.
        length: Side of the square image, in pixels.
        dtype: Type to compute in; parameters are float32.
        rate: Learning rate.
    """

    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    batch: int = 64
    length: int = 224
    dtype: Any = jnp.float32
    rate: float = 0.1

    checkpoint = staticmethod(nn.remat)

    def small(self) -> "Config":
        """The same structure in tiny widths."""
        return dataclasses.replace(self, width=4, classes=10, batch=4, length=32, rate=0.01)

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every bottleneck."""
        return image_case(name, ResNet(self, remat(Bottleneck)), self)


def image_case(name: str, model: nn.Module, config: Any) -> Case:
    """The usual training step of a network that classifies images.

    Args:
        name: Name of the case.
        model: From images `[batch, side, side, 3]` to logits `[batch, classes]`, with statistics of
            the batch.
        config: Says `length`, `batch`, `classes` and `rate`.
    """

    def variables(key):
        drawn = model.init(key, jnp.zeros((1, config.length, config.length, 3)))
        return drawn["params"], drawn["batch_stats"]

    def forward(params, stats, batch, key):
        del key
        logits, updated = model.apply(
            {"params": params, "batch_stats": stats}, batch["images"], mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean(), updated["batch_stats"]

    optimizer = optax.chain(
        optax.add_decayed_weights(1e-4, mask=matrices),
        optax.sgd(config.rate, momentum=0.9, nesterov=True),
    )
    return make_case(
        name,
        variables=variables,
        batch=functools.partial(labelled_images, config=config),
        forward=forward,
        optimizer=optimizer,
    )


def layers(dtype: Any) -> tuple[Callable[..., nn.Conv], Callable[..., nn.BatchNorm]]:
    """The convolution and the training-mode normalisation that a ResNet is made of."""
    init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    conv = functools.partial(nn.Conv, use_bias=False, dtype=dtype, kernel_init=init)
    norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=dtype)
    return conv, norm


def stem(images: jax.Array, width: int, dtype: Any) -> jax.Array:
    """What is in front of the first block: images to `[batch, side / 4, side / 4, width]`."""
    conv, norm = layers(dtype)
    x = conv(width, (7, 7), (2, 2), padding=3, name="conv_init")(images)
    x = nn.relu(norm(name="bn_init")(x))
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut: a region."""

    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        """Transforms `x`, `[batch, height, width, channels]`."""
        conv, norm = layers(self.dtype)
        stride, wide = (self.stride, self.stride), 4 * self.features
        y = nn.relu(norm(name="bn_1")(conv(self.features, (1, 1), name="conv_1")(x)))
        y = conv(self.features, (3, 3), stride, padding=1, name="conv_2")(y)
        y = conv(wide, (1, 1), name="conv_3")(nn.relu(norm(name="bn_2")(y)))
        y = norm(scale_init=nn.initializers.zeros, name="bn_3")(y)
        if x.shape != y.shape:
            x = norm(name="bn_proj")(conv(wide, (1, 1), stride, name="conv_proj")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images `[batch, side, side, 3]` to float32 logits `[batch, classes]`."""

    config: Config
    block: type[nn.Module]

    @nn.compact
    def __call__(self, images):
        """Scores every class."""
        c = self.config
        x = stem(images, c.width, c.dtype)
        for i, (features, stride) in enumerate(self._plan()):
            x = self.block(features, stride, c.dtype, name=f"block_{i}")(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(c.classes, dtype=c.dtype, name="head")(x).astype(jnp.float32)

    def _plan(self):
        """Yields features and stride of every block: each stage but the first halves the image."""
        for stage, count in enumerate(self.config.stages):
            for block in range(count):
                yield self.config.width * 2**stage, 2 if stage and not block else 1


MODELS = {
    "resnet50": Config(),
    "resnet101": Config(stages=(3, 4, 23, 3)),
}
