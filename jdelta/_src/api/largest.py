"""The largest size that fits: of a batch, of a sequence, or of anything that a step is made of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jdelta._src.api.plan import Plan
from jdelta._src.api.planning import plan
from jdelta._src.api.progress import IS_LEAD, showing
from jdelta._src.errors import BudgetError, TraceError

_LOG = logging.getLogger(__name__)

RESOLUTION = 32
"""A size is found up to one part in this many."""


def bisected(fits: Callable[[int], bool], low: int = 0, step: int = 1) -> int:
    """The largest size that fits: doubled until one does not, then bisected.

    Args:
        fits: Says whether a size fits. Where one does, all smaller ones are taken to fit.
        low: A size that is known to fit, a multiple of ``step``.
        step: Only multiples of it are tried.

    Returns:
        A size that fits, less than one part in `RESOLUTION` (or one ``step``) below one that does
        not; ``low`` if none above it was found.
    """

    def least(size: int) -> int:
        return max(step, size // RESOLUTION // step * step)

    high = low + least(low)
    while fits(high):
        low, high = high, 2 * high
    while high - low > least(low):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Largest:
    """Outcome of a search for the largest size.

    Attributes:
        size: The largest size found; 0 if not even the smallest fits.
        plan: The plan for it; None if nothing fits.
        tried: Every size tried, in order, with the compiled peak in bytes (None: below the floor)
            and the predicted overhead as a part of the plain step (None likewise).
    """

    size: int
    plan: Plan | None
    tried: tuple[tuple[int, int | None, float | None], ...]

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
    progress: bool = True,
    **options: Any,
) -> Largest:
    """The largest batch, or length, with which a step fits at little cost.

    Each size is planned and compiled: some ten sizes, with one or two compiles for each.

    Args:
        step_fn: As in ``jdelta.plan``.
        make_args: From a size to the arguments of the step, best as ``jax.ShapeDtypeStruct``.
        budget: Bytes or a size such as ``"14GiB"``; default: what the target has less 5 %.
        overhead: Largest predicted overhead, as a part of the plain step of that size; None for
            any.
        step: Only multiples of it are tried: the number of devices, say.
        progress: As in ``jdelta.plan``; one line for all sizes.
        **options: Other arguments of ``jdelta.plan``, such as ``target``.

    Raises:
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

    def fits(size: int) -> bool:
        _LOG.info("size %d (number %d)", size, len(tried) + 1, extra={IS_LEAD: True})
        try:
            candidate = plan(step_fn, budget, *make_args(size), **options)
        except (BudgetError, TraceError) as error:
            if error.floor is None:
                raise
            tried.append((size, None, None))
            return False
        tried.append((size, candidate.compiled_peak, candidate.overhead_share))
        plans[size] = candidate
        return overhead is None or candidate.overhead_share <= overhead

    options["progress"] = progress
    with showing(progress):
        size = bisected(fits, step=step)
    return Largest(size, plans.get(size), tuple(tried))
