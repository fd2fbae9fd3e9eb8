"""The largest size that fits: of a batch, of a sequence, or of anything that a step is made of."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jdelta._src.api.plan import Plan
from jdelta._src.api.planning import plan
from jdelta._src.api.progress import IS_LEAD, showing
from jdelta._src.errors import ArgumentError, BudgetError, TraceError
from jdelta._src.sizes import format_bytes

_LOG = logging.getLogger(__name__)

RESOLUTION = 32
"""A size is found up to one part in this many."""

MOST = 30
"""Sizes that are tried at most: from 1 that is 33 million, and then as exact as `RESOLUTION`."""


def bisected(
    fits: Callable[[int], bool], low: int = 0, step: int = 1, most: int | None = None
) -> int:
    """The largest size that fits: doubled until one does not, then bisected.

    Args:
        fits: Says whether a size fits. Where one does, all smaller ones are taken to fit.
        low: A size that is known to fit, a multiple of ``step``.
        step: Only multiples of it are tried.
        most: Sizes that are tried at most; None for any number.

    Returns:
        A size that fits, less than one part in `RESOLUTION` (or one ``step``) below one that does
        not; ``low`` if none above it was found. After ``most`` sizes the largest that fitted.
    """
    left = math.inf if most is None else most

    def least(size: int) -> int:
        return max(step, size // RESOLUTION // step * step)

    def fits_too(size: int) -> bool:
        nonlocal left
        left -= 1
        return fits(size)

    high = low + least(low)
    while left and fits_too(high):
        low, high = high, 2 * high
    while left and high - low > least(low):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits_too(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Largest:
    """Outcome of a search for the largest size.

    Attributes:
        size: The largest size found; 0 if not even the smallest fits.
        plan: The plan for it; None if nothing fits.
        tried: Every size tried, in order, with the compiled peak in bytes (None: below the floor)
            and the predicted overhead as a part of the plain step (None likewise).
        too_large: The least size tried that was too large or too dear; None if none was, since as
            many sizes were tried as may be.
    """

    size: int
    plan: Plan | None
    tried: tuple[tuple[int, int | None, float | None], ...]
    too_large: int | None

    def __repr__(self) -> str:
        """The outcome in a line."""
        return f"<jdelta.Largest: size {self.size} of {len(self.tried)} tried, {self.plan!r}>"


def largest(
    step_fn: Callable[..., Any],
    make_args: Callable[[int], tuple[Any, ...]],
    budget: int | str | None = None,
    *,
    overhead: float | None = 0.1,
    step: int = 1,
    most: int = MOST,
    progress: bool = True,
    **options: Any,
) -> Largest:
    """The largest batch, or length, with which a step fits at little cost.

    The size is doubled until it is too large, then bisected. Each size is planned and compiled:
    some ten sizes, with one or two compiles for each, and never more sizes than ``most``.

    Args:
        step_fn: As in ``jdelta.plan``.
        make_args: From a size to the arguments of the step, best as ``jax.ShapeDtypeStruct``.
        budget: Bytes or a size such as ``"14GiB"``; default: what the target has less 5 %.
        overhead: Largest predicted overhead, as a part of the plain step of that size; None for
            any.
        step: Only multiples of it are tried: the number of devices, say.
        most: How many sizes are tried at most.
        progress: As in ``jdelta.plan``; one line for all sizes.
        **options: Other arguments of ``jdelta.plan``, such as ``target``.

    Raises:
        ArgumentError: ``make_args`` makes the same arguments for two sizes, so none is too large.
        JdeltaError: What ``jdelta.plan`` raises, but that a budget is below the floor.

    Example:
        >>> import jax, jax.numpy as jnp, jdelta
        >>> def step(w, x):
        ...     return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)
        >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> def make_args(rows):
        ...     return w, jax.ShapeDtypeStruct((rows, 64), jnp.float32)
        >>> result = jdelta.largest(step, make_args, "1MiB", step=128)
        >>> result.plan.compiled_peak <= 2**20 and result.size % 128 == 0
        True
    """
    tried: list[tuple[int, int | None, float | None]] = []
    plans: dict[int, Plan] = {}
    sizes: dict[str, int] = {}

    def fits(size: int) -> bool:
        _LOG.info("size %d (number %d)", size, len(tried) + 1, extra={IS_LEAD: True})
        args = make_args(size)
        other = sizes.setdefault(_kinds(args), size)
        if other != size:
            raise ArgumentError(
                f"make_args makes the same arguments for the sizes {other} and {size}, so there is "
                "no largest size: make them of the size that it is called with."
            )
        try:
            candidate = plan(step_fn, budget, *args, **options)
        except (BudgetError, TraceError) as error:
            if error.floor is None:
                raise
            tried.append((size, None, None))
            _LOG.info("size %d does not fit", size)
            return False
        peak, added = candidate.compiled_peak, candidate.overhead_share
        tried.append((size, peak, added))
        plans[size] = candidate
        is_cheap = overhead is None or added <= overhead
        _LOG.info("size %d takes %s, %s more time", size, format_bytes(peak), f"{added:.1%}")
        return is_cheap

    options["progress"] = progress
    with showing(progress):
        size = bisected(fits, step=step, most=most)
    above = [other for other, *_ in tried if other > size]
    return Largest(size, plans.get(size), tuple(tried), min(above, default=None))


def _kinds(args: Any) -> str:
    """Structure, shapes and dtypes of arguments; of what is no array, what Python calls it."""
    leaves, tree = jax.tree.flatten(args)
    kinds = [(x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves]
    return f"{tree} {kinds}"
