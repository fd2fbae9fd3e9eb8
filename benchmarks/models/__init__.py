"""The models that tests and benchmarks train: published shapes, random weights.

A family is one file. It has a frozen `Config` (with `small`, `case` and `checkpoint`) and a
dictionary `MODELS` from names to configurations; adding the file's `MODELS` here is all that a new
one needs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from . import bert, gpt2, llama, mixtral, mlp, resnet, t5, unet, vit
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
}


def build(
    name: str,
    *,
    remat: Callable[[Any], Any] = identity,
    small: bool = False,
    batch: int | None = None,
    length: int | None = None,
    scan: bool = False,
    span: int | None = None,
    dtype: Any = None,
    dropout: float | None = None,
    rows: Any = None,
) -> Case:
    """Builds the training step of a model.

    Args:
        name: A key of `MODELS`.
        remat: Decorator of what is to be a region (a Linen class or a function, see `checkpoint`).
        small: Whether to keep the structure but shrink every width, to run anywhere.
        batch: Batch size in place of the usual one.
        length: Sequence length, or side of the image in pixels, in place of the usual one.
        scan: Whether equal blocks run under a scan.
        span: Scanned blocks under one further `jax.checkpoint`, a scan of scans.
        dtype: Type to compute in, in place of the usual one.
        dropout: Dropout rate in place of the usual one.
        rows: Sharding of the residual stream over devices.

    Returns:
        The case.

    Raises:
        ValueError: If the model is unknown or lacks an option that was given.
    """
    config = find(name).small() if small else find(name)
    given = {"batch": batch, "length": length, "span": span, "dtype": dtype}
    given |= {"dropout": dropout, "rows": rows}
    options = {key: value for key, value in given.items() if value is not None}
    if scan:
        options["scan"] = True
    if unknown := options.keys() - {field.name for field in dataclasses.fields(config)}:
        raise ValueError(f"model {name!r} has no option {', '.join(sorted(unknown))}")
    return dataclasses.replace(config, **options).case(name, remat)


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
