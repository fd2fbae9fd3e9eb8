"""The models that tests and benchmarks train: published shapes, random weights.

A family is one file. It has a frozen `Config` (with `small`, `case` and `checkpoint`) and a
dictionary `MODELS` from names to configurations; adding the file's `MODELS` here is all that a new
one needs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from . import bert, densenet, gpt2, inception, llama, mixtral, mlp, resnet, t5, unet, vit
from .case import Case, State, identity

__all__ = ["MODELS", "Case", "State", "build", "checkpoint", "find", "identity"]

MODELS: dict[str, Any] = {
    **gpt2.MODELS,
    **bert.MODELS,
    **resnet.MODELS,
    **vit.MODELS,
    **mlp.MODELS,
    **llama.MODELS,
    **mixtral.MODELS,
    **t5.MODELS,
    **unet.MODELS,
    **densenet.MODELS,
    **inception.MODELS,
}


def build(
    name: str,
    *,
    remat: Callable[[Any], Any] = identity,
    small: bool = False,
    **options: Any,
) -> Case:
    """Builds the training step of a model.

    Args:
        name: A key of `MODELS`.
        remat: Decorator of what is to be a region (a Linen class or a function, see `checkpoint`).
        small: Whether to keep the structure but shrink every width, to run anywhere.
        **options: Fields of the model's `Config` in place of the usual ones, as `batch=8`; None and
            False leave the usual one.

    Returns:
        The case.

    Raises:
        ValueError: If the model is unknown or lacks an option that was given.
    """
    config = find(name).small() if small else find(name)
    unusual = {k: v for k, v in options.items() if v is not None and v is not False}
    if unknown := unusual.keys() - {field.name for field in dataclasses.fields(config)}:
        raise ValueError(f"model {name!r} has no option {', '.join(sorted(unknown))}")
    return dataclasses.replace(config, **unusual).case(name, remat)


def checkpoint(name: str, **options: Any) -> Callable[[Any], Any]:
    """JAX's own recompute decorator for a model's regions, to pass as `remat`.

    Args:
        name: A key of `MODELS`.
        **options: Options of `jax.checkpoint` or `flax.linen.remat`, such as `policy`.

    Returns:
        The decorator.
    """
    return functools.partial(find(name).checkpoint, **options)


def find(name: str) -> Any:
    """The configuration of a model by its name."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name]
