"""The steps that studies are about: from a label to a program, the same one in every study."""

from typing import Any

import jax.numpy as jnp

import jdelta
from benchmarks import models

HALF = {"dtype": jnp.bfloat16}

_PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2 scanned": {"name": "gpt2", "scan": True},
    "gpt2 unrolled": {"name": "gpt2"},
    "gpt2-large scanned": {"name": "gpt2-large", "scan": True, **HALF},
    "gpt2-large unrolled": {"name": "gpt2-large", **HALF},
    "gpt2-xl scanned": {"name": "gpt2-xl", "scan": True, **HALF},
    "gpt2-xl unrolled": {"name": "gpt2-xl", **HALF},
    "bert-large scanned": {"name": "bert-large", "scan": True},
    "bert-large unrolled": {"name": "bert-large"},
    "t5-large scanned": {"name": "t5-large", "scan": True},
    "t5-large unrolled": {"name": "t5-large"},
    "vit-l scanned": {"name": "vit-l", "scan": True},
    "vit-l unrolled": {"name": "vit-l"},
    "resnet50": {"name": "resnet50"},
    "resnet101": {"name": "resnet101"},
    "llama scanned": {"name": "llama-160m", "scan": True},
    "llama unrolled": {"name": "llama-160m"},
    "llama3-8b scanned": {"name": "llama3-8b", "scan": True},
    "mixtral scanned": {"name": "mixtral", "scan": True},
    "mixtral unrolled": {"name": "mixtral"},
}
"""Published shapes, the usual batch, the usual optimiser."""

STEPS: dict[str, dict[str, Any]] = {
    **_PUBLISHED,
    "mlp": {"name": "mlp", "batch": 32768},
    "mlp scanned": {"name": "mlp", "batch": 32768, "scan": True},
    "gpt2 length 512 scanned": {"name": "gpt2", "scan": True, "length": 512},
    "gpt2 length 512 unrolled": {"name": "gpt2", "length": 512},
    "gpt2 bfloat16 scanned": {"name": "gpt2", "scan": True, **HALF},
    "gpt2 bfloat16 unrolled": {"name": "gpt2", **HALF},
    "bert-base": {"name": "bert-base", "batch": 64, "length": 128},
    "bert-base bfloat16 scanned": {"name": "bert-base", "scan": True, **HALF},
    "bert-base bfloat16 unrolled": {"name": "bert-base", **HALF},
    "llama bfloat16 scanned": {"name": "llama-160m", "scan": True, **HALF},
    "llama bfloat16 unrolled": {"name": "llama-160m", **HALF},
    "vit-b": {"name": "vit-b"},
    "mixtral batch 4 scanned": {"name": "mixtral", "scan": True, "batch": 4},
    "unet": {"name": "unet"},
    "densenet121": {"name": "densenet121"},
    "inception-v4": {"name": "inception-v4"},
    "gpt2 batch 32 scanned": {"name": "gpt2", "scan": True, "batch": 32, **HALF},
    "llama with 256,000 words scanned": {
        **{"name": "llama-160m", "scan": True, "layers": 4, "width": 2048, "hidden": 8192},
        **{"heads": 16, "groups": 4, "vocab": 256_000, "length": 2048, "batch": 4, **HALF},
    },
}
"""From the label of a step to the arguments of `models.build`."""

PUBLISHED = tuple(_PUBLISHED)
SMALL = (
    *("mlp", "gpt2 length 512 scanned", "gpt2 bfloat16 scanned", "llama scanned", "resnet50"),
    *("bert-base", "vit-b", "gpt2 length 512 unrolled"),
)
LARGE = (
    *("gpt2-large scanned", "gpt2-xl scanned", "bert-large scanned", "t5-large scanned"),
    *("vit-l scanned", "resnet101", "mixtral batch 4 scanned"),
)
PLANNED = (*SMALL, *LARGE)
"""What plans at budgets are made of, and predictions compared on: small relatives of the published
shapes, and some of those."""

TWO_TARGETS = ("tpu:v5e:2x2", "cuda:h100")
FOUR_TARGETS = ("tpu:v5e:2x2", "tpu:v5p:2x2x1", "cuda:h100", "cuda:a100")

REGIONS = {"marked": jdelta.remat, "found": models.identity}
"""By who says what a region is, the model or jdelta: the decorator of its blocks."""


def build(step: str, **options: Any) -> models.Case:
    """The training step of that name.

    Args:
        step: A key of `STEPS`.
        **options: Arguments of `models.build` in place of the step's own.
    """
    return models.build(**{**STEPS[step], **options})


def checkpointed(step: str, **options: Any) -> Any:
    """JAX's own decorator for the step's regions; `options` go to `jax.checkpoint`."""
    outside_of_loops = not STEPS[step].get("scan", False)
    return models.checkpoint(STEPS[step]["name"], prevent_cse=outside_of_loops, **options)
