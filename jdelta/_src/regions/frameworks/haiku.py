"""Haiku functions as regions: parameters, state and random keys go in and come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from haiku._src import base as _base
from haiku._src import stateful

from jdelta._src.regions.region import RegionPolicy, region


def inside_transform() -> bool:
    """Whether a function of ``hk.transform`` is being run."""
    return bool(_base.inside_transform())


def call(
    fun: Callable[..., Any],
    name: str,
    policy: RegionPolicy | None,
    prevent_cse: bool | None,
    args: Any,
    kwargs: Any,
) -> Any:
    """Call a function that uses Haiku's state as a region, as ``hk.remat`` does."""
    marked = stateful.thread_hk_state_in_kwargs(region)(fun, name, policy, prevent_cse)
    return marked(*args, **kwargs)
