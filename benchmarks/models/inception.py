"""Inception-v4 in Flax Linen (Szegedy et al. 2017), without dropout."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from .case import Case
from .resnet import image_case, layers

Kernel = tuple[int, int]
Branch = tuple[tuple[int, tuple[Kernel, ...]], ...]
"""Channels and kernel of each of its convolutions: ((192, ((1, 1),)), (256, ((1, 3), (3, 1)))) ends
in two side by side."""


@dataclass(frozen=True)
class Config:
    """Shape of an Inception-v4 and of its training step.

    Attributes:
        modules: Modules of the kinds A, B and C.
        divisor: By what the channels of all convolutions are divided.
        classes: Number of classes.
        batch: Images in a batch.
        length: Side of the square image, in pixels.
        dtype: Type to compute in; parameters are float32.
        rate: Learning rate.
    """

    modules: tuple[int, int, int] = (4, 7, 3)
    divisor: int = 1
    classes: int = 1000
    batch: int = 64
    length: int = 299
    dtype: Any = jnp.float32
    rate: float = 0.1

    checkpoint = staticmethod(nn.remat)

    def small(self) -> "Config":
        """The same structure in tiny widths."""
        small = {"divisor": 32, "classes": 10, "batch": 2, "length": 75, "rate": 0.01}
        return dataclasses.replace(self, **small)

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every module."""
        return image_case(name, Inception(self, remat(Module)), self)


class Convolution(nn.Module):
    """A convolution to a part of so many features, normalised."""

    features: int
    kernel: Kernel
    stride: int
    padding: str
    divisor: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        """Transforms `x`, `[batch, height, width, channels]`."""
        conv, norm = layers(self.dtype)
        width, stride = max(1, self.features // self.divisor), (self.stride, self.stride)
        x = conv(width, self.kernel, stride, padding=self.padding, name="conv")(x)
        return nn.relu(norm(name="bn")(x))


class Module(nn.Module):
    """Branches of convolutions beside each other, and a pooled one: a region.

    Attributes:
        branches: What the branches compute.
        pooled: Channels after the mean of neighbours; 0 for their maximum as it is.
        halves: Whether the last convolution of each branch halves the image.
        divisor: By what channels are divided.
        dtype: Type to compute in.
    """

    branches: tuple[Branch, ...]
    pooled: int
    halves: bool
    divisor: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        """Transforms `x`, `[batch, height, width, channels]`."""
        convolution = functools.partial(Convolution, divisor=self.divisor, dtype=self.dtype)
        outputs = []
        for i, branch in enumerate(self.branches):
            y = x
            for j, (features, kernels) in enumerate(branch):
                halves = self.halves and j == len(branch) - 1
                stride, padding = (2, "VALID") if halves else (1, "SAME")
                sides = [
                    convolution(features, kernel, stride, padding, name=f"branch_{i}_{j}_{k}")(y)
                    for k, kernel in enumerate(kernels)
                ]
                y = jnp.concatenate(sides, axis=-1)
            outputs.append(y)
        if self.halves:
            outputs.append(nn.max_pool(x, (3, 3), strides=(2, 2)))
        else:
            mean = nn.avg_pool(x, (3, 3), padding="SAME")
            outputs.append(convolution(self.pooled, (1, 1), 1, "SAME", name="pooled")(mean))
        return jnp.concatenate(outputs, axis=-1)


ONE, SQUARE, WIDE, TALL = ((1, 1),), ((3, 3),), ((1, 7),), ((7, 1),)
A: tuple[Branch, ...] = (
    ((96, ONE),),
    ((64, ONE), (96, SQUARE)),
    ((64, ONE), (96, SQUARE), (96, SQUARE)),
)
B: tuple[Branch, ...] = (
    ((384, ONE),),
    ((192, ONE), (224, WIDE), (256, TALL)),
    ((192, ONE), (192, TALL), (224, WIDE), (224, TALL), (256, WIDE)),
)
C: tuple[Branch, ...] = (
    ((256, ONE),),
    ((384, ONE), (256, ((1, 3), (3, 1)))),
    ((384, ONE), (448, ((3, 1),)), (512, ((1, 3),)), (256, ((1, 3), (3, 1)))),
)
A_TO_B: tuple[Branch, ...] = (
    ((384, SQUARE),),
    ((192, ONE), (224, SQUARE), (256, SQUARE)),
)
B_TO_C: tuple[Branch, ...] = (
    ((192, ONE), (192, SQUARE)),
    ((256, ONE), (256, WIDE), (320, TALL), (320, SQUARE)),
)
POOLED = 96, 128, 256


class Inception(nn.Module):
    """Images `[batch, side, side, 3]` to float32 logits `[batch, classes]`."""

    config: Config
    module: type[nn.Module]

    @nn.compact
    def __call__(self, images):
        """Scores every class."""
        c = self.config
        module = functools.partial(self.module, divisor=c.divisor, dtype=c.dtype)
        x = self._stem(images)
        for kind, (branches, pooled) in enumerate(zip((A, B, C), POOLED, strict=True)):
            for i in range(c.modules[kind]):
                x = module(branches, pooled, False, name=f"{'abc'[kind]}_{i}")(x)
            if kind < 2:
                x = module((A_TO_B, B_TO_C)[kind], 0, True, name=f"halve_{'ab'[kind]}")(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(c.classes, dtype=c.dtype, name="head")(x).astype(jnp.float32)

    @nn.compact
    def _stem(self, x):
        c = self.config

        def convolution(x, features, kernels, name, stride=1, padding="VALID"):
            (kernel,) = kernels
            module = Convolution(features, kernel, stride, padding, c.divisor, c.dtype, name=name)
            return module(x)

        x = convolution(x, 32, SQUARE, "stem_0", stride=2)
        x = convolution(x, 32, SQUARE, "stem_1")
        x = convolution(x, 64, SQUARE, "stem_2", padding="SAME")
        pooled = nn.max_pool(x, (3, 3), strides=(2, 2))
        x = jnp.concatenate([pooled, convolution(x, 96, SQUARE, "stem_3", stride=2)], axis=-1)
        one = convolution(convolution(x, 64, ONE, "stem_4a"), 96, SQUARE, "stem_5a")
        other = convolution(x, 64, ONE, "stem_4b")
        other = convolution(other, 64, TALL, "stem_5b", padding="SAME")
        other = convolution(other, 64, WIDE, "stem_6b", padding="SAME")
        x = jnp.concatenate([one, convolution(other, 96, SQUARE, "stem_7b")], axis=-1)
        pooled = nn.max_pool(x, (3, 3), strides=(2, 2))
        return jnp.concatenate([convolution(x, 192, SQUARE, "stem_8", stride=2), pooled], axis=-1)


MODELS = {"inception-v4": Config()}
