"""A Mixtral in plain JAX (Jiang et al. 2024): Llama's attention, two of eight experts a token.

Tokens reach their experts through one-hot products of fixed capacity, as in GShard (Lepikhin et
al. 2021, algorithm 1) and Switch; there is no auxiliary loss. Axes: g group of tokens, s token in
it, e expert, c place at an expert, d width, f width inside an expert.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from . import llama
from .case import Case


@dataclass(frozen=True)
class Config(llama.Config):
    """Shape of a Mixtral and of its training step; the rest is as in Llama's.

    Attributes:
        experts: Feed-forward networks in a block.
        top: Experts that a token goes to.
        room: Places at an expert, as a multiple of those that even routing takes.
        tokens: Tokens that are routed together; divides the length, or exceeds it.
    """

    layers: int = 2
    width: int = 4096
    heads: int = 32
    groups: int = 8
    hidden: int = 14336
    base: float = 1_000_000.0
    batch: int = 1
    length: int = 4096
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.bfloat16
    experts: int = 8
    top: int = 2
    room: float = 1.25
    tokens: int = 1024

    def case(self, name: str, remat: Callable[[Any], Any]) -> Case:
        """The training step with `remat` around every block."""
        return llama.decoder_case(self, name, remat, transform, block_params)

    @property
    def places(self) -> int:
        """Places at each expert for the tokens of one group."""
        return math.ceil(self.room * self.top * min(self.tokens, self.length) / self.experts)


def block_params(config: Config, key: jax.Array) -> dict[str, Any]:
    """Random weights of every block, stacked."""
    attn_key, moe_key = jax.random.split(key)
    width, hidden, experts = config.width, config.hidden, config.experts
    shapes = {
        "router": (width, experts),
        "gate": (experts, width, hidden),
        "up": (experts, width, hidden),
        "down": (experts, hidden, width),
    }
    return {
        "norm_1": llama.ones(config),
        "attn": llama.attention_params(config, attn_key),
        "norm_2": llama.ones(config),
        "moe": llama.matrices(config, moe_key, shapes),
    }


def transform(config: Config, params: dict[str, Any], x: jax.Array) -> jax.Array:
    """One block on `[batch, length, width]`: a region."""
    x = checkpoint_name(x, "decoder_layer_input")
    params = jax.tree.map(lambda weight: weight.astype(config.dtype), params)
    with jax.named_scope("attn"):
        x = x + llama.attend(config, params["attn"], llama.rms_norm(x, params["norm_1"]))
    with jax.named_scope("moe"):
        return x + mixture(config, params["moe"], llama.rms_norm(x, params["norm_2"]))


def mixture(config: Config, params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Every token through its experts, weighted by the router."""
    grouped = x.reshape(-1, min(config.tokens, x.shape[1]), x.shape[-1])
    weights = route(config, (grouped @ params["router"]).astype(jnp.float32)).astype(x.dtype)
    sent = (weights > 0).astype(x.dtype)
    inputs = jnp.einsum("gsec,gsd->egcd", sent, grouped)
    outputs = swiglu(params, inputs)
    return jnp.einsum("gsec,egcd->gsd", weights, outputs).reshape(x.shape)


def route(config: Config, logits: jax.Array) -> jax.Array:
    """Weight of each token at each place of each expert, `[g, s, e, c]`.

    The first choices of all tokens take their places before any second choice does; who finds none
    left is passed over by that expert.
    """
    top, chosen = jax.lax.top_k(logits, config.top)
    choices = jax.nn.one_hot(jnp.moveaxis(chosen, 2, 1), config.experts)  # group, choice, token, e
    in_order = choices.reshape(choices.shape[0], -1, config.experts)
    place = (jnp.cumsum(in_order, axis=1) - in_order).reshape(choices.shape)
    place = jnp.sum(place * choices, axis=-1).astype(jnp.int32)
    places = jax.nn.one_hot(place, config.places)  # all zero beyond the last place
    gates = jnp.moveaxis(jax.nn.softmax(top), 2, 1)
    return jnp.einsum("gkse,gksc,gks->gsec", choices, places, gates)


def swiglu(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The gated feed-forward layers of all experts on `[e, g, c, d]`."""
    gate = checkpoint_name(jnp.einsum("egcd,edf->egcf", x, params["gate"]), "mlpwi_0")
    up = checkpoint_name(jnp.einsum("egcd,edf->egcf", x, params["up"]), "mlpwi_1")
    hidden = jax.nn.silu(gate) * up
    return checkpoint_name(jnp.einsum("egcf,efd->egcd", hidden, params["down"]), "mlpwo")


MODELS = {
    "mixtral": Config(),
    "mixtral-8x7b": dataclasses.replace(Config(), layers=32),
}
