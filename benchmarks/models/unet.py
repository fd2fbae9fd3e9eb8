"""U-Net in Flax Linen (Ronneberger et al. 2015), padded so that masks have the images' size."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .case import Case, make_case


@dataclass(frozen=True)
class Config:
    """Shape of a U-Net and of its training step.

    Attributes:
        levels: Resolutions, each half of the one above.
        width: Channels at the highest resolution; doubled at each level below.
        batch: Images in a batch.
        length: Side of the square image, in pixels; a multiple of `2 ** (levels - 1)`.
        dtype: Type to compute in; parameters are float32.
        rate: Learning rate.
    """

    levels: int = 5
    width: int = 64
    batch: int = 8
    length: int = 256
    dtype: Any = jnp.float32
    rate: float = 1e-3

    checkpoint = staticmethod(nn.remat)

    def small(self) -> "Config":
        """The same structure in tiny widths."""
        return dataclasses.replace(self, width=2, batch=2, length=16, rate=0.01)

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every pair of convolutions."""
        model = UNet(self, remat(Pair))
        image = self.length, self.length, 1

        def variables(key):
            return model.init(key, jnp.zeros((1, *image)))["params"], {}

        def batch(key):
            image_key, mask_key = jax.random.split(key)
            shape = self.batch, *image
            mask = jax.random.bernoulli(mask_key, shape=shape).astype(jnp.float32)
            return {"images": jax.random.normal(image_key, shape), "masks": mask}

        def forward(params, stats, batch, key):
            del key
            logits = model.apply({"params": params}, batch["images"])
            return optax.sigmoid_binary_cross_entropy(logits, batch["masks"]).mean(), stats

        return make_case(
            name,
            variables=variables,
            batch=batch,
            forward=forward,
            optimizer=optax.adam(self.rate),
        )


class Pair(nn.Module):
    """Two 3x3 convolutions: a region."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        """Transforms `x`, `[batch, height, width, channels]`."""
        init = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
        for i in (1, 2):
            conv = nn.Conv(self.features, (3, 3), dtype=self.dtype, kernel_init=init)
            x = nn.relu(conv.copy(name=f"conv_{i}")(x))
        return x


class UNet(nn.Module):
    """Images `[batch, side, side, 1]` to float32 logits of the same shape."""

    config: Config
    pair: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        """Scores every pixel."""
        c = self.config
        widths = [c.width * 2**level for level in range(c.levels)]
        kept = []
        for level, width in enumerate(widths):
            if level:
                x = nn.max_pool(x, (2, 2), (2, 2))
            x = self.pair(width, c.dtype, name=f"down_{level}")(x)
            kept.append(x)
        for level, width in reversed(list(enumerate(widths[:-1]))):
            up = nn.ConvTranspose(width, (2, 2), (2, 2), dtype=c.dtype, name=f"up_conv_{level}")
            x = jnp.concatenate([kept[level], up(x)], axis=-1)
            x = self.pair(width, c.dtype, name=f"up_{level}")(x)
        return nn.Conv(1, (1, 1), dtype=c.dtype, name="head")(x).astype(jnp.float32)


MODELS = {"unet": Config()}
