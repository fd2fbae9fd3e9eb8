"""What memory costs: plans of one step over many budgets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jdelta._src.api.plan import Plan
from jdelta._src.api.planning import plan
from jdelta._src.api.progress import IS_LEAD, showing
from jdelta._src.errors import BudgetError, TraceError
from jdelta._src.search.history import History
from jdelta._src.sizes import format_bytes

_LOG = logging.getLogger(__name__)

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class Frontier:
    """Plans from the largest budget to the floor.

    Attributes:
        plans: One for each budget that can be met, the largest first.
        floor: Least compiled peak, bytes per device; None if no budget was below it.
    """

    plans: tuple[Plan, ...]
    floor: int | None

    def __repr__(self) -> str:
        """The frontier in a line."""
        if not self.plans:
            return f"<jdelta.Frontier: no plan{_floor(self.floor)}>"
        peaks = [plan.compiled_peak for plan in self.plans]
        return (
            f"<jdelta.Frontier: {len(peaks)} plan{'' if len(peaks) == 1 else 's'} from "
            f"{format_bytes(max(peaks))} to {format_bytes(min(peaks))}{_floor(self.floor)}>"
        )

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Compiled peak in bytes, and overhead as a part of the plain step, of each plan."""
        return tuple((p.compiled_peak, p.overhead_share) for p in self.plans)


def _floor(floor: int | None) -> str:
    return "" if floor is None else f", floor {format_bytes(floor)}"


def frontier(
    step_fn: Callable[..., Any],
    *args: Any,
    budgets: Sequence[int | float | str] = SHARES,
    progress: bool = True,
    **options: Any,
) -> Frontier:
    """Plan a step to several budgets, down to its floor.

    Args:
        step_fn: As in ``jdelta.plan``.
        *args: Arguments of the step, or their shapes.
        budgets: What to plan to, as in ``jdelta.plan``, largest first; those behind the first that
            is below the floor are not tried.
        progress: As in ``jdelta.plan``; one line for all budgets.
        **options: Other arguments of ``jdelta.plan``, such as ``target``.

    Raises:
        JdeltaError: What ``jdelta.plan`` raises, but that a budget is below the floor.
    """
    plans: list[Plan] = []
    options = {"history": History(), "progress": progress, **options}
    with showing(progress):
        for number, budget in enumerate(budgets, 1):
            lead = "budget %s (%d of at most %d)"
            _LOG.info(lead, budget, number, len(budgets), extra={IS_LEAD: True})
            try:
                plans.append(plan(step_fn, budget, *args, **options))
            except (BudgetError, TraceError) as error:
                if error.floor is None:
                    raise
                return Frontier(tuple(plans), error.floor)
    return Frontier(tuple(plans), None)
