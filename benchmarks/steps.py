"""The steps that plans are compared on: published shapes, the usual batch, the usual optimiser."""

from typing import Any

import jax.numpy as jnp

import jdelta
from benchmarks import models

HALF = {"dtype": jnp.bfloat16}

STEPS: dict[str, dict[str, Any]] = {
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
"""From the name of a step to the arguments of `models.build`."""

UNITS = {"marked": jdelta.remat, "found": models.identity}
"""By who says what a unit of recompute is, the model or jdelta: the decorator of its blocks."""

TARGETS = ("tpu:v5e:2x2", "tpu:v5p:2x2x1", "cuda:h100", "cuda:a100")


def build(step: str, **options: Any) -> models.Case:
    """The training step of that name.

    Args:
        step: A key of `STEPS`.
        **options: Arguments of `models.build` in place of the step's own.
    """
    return models.build(**{**STEPS[step], **options})


def checkpointed(step: str, **options: Any) -> Any:
    """JAX's own decorator for the step's unit of recompute; `options` go to `jax.checkpoint`."""
    outside_of_loops = not STEPS[step].get("scan", False)
    return models.checkpoint(STEPS[step]["name"], prevent_cse=outside_of_loops, **options)
