"""What memory costs: plans of one step over many budgets."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jdelta._src.api.plan import Plan
from jdelta._src.api.planning import plan
from jdelta._src.api.progress import IS_LEAD, showing
from jdelta._src.errors import BudgetError, TraceError
from jdelta._src.report.terminal import aligned
from jdelta._src.search.history import History
from jdelta._src.sizes import format_bytes

_LOG = logging.getLogger(__name__)

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


_SAME = 3
"""Digits of an overhead's share, here and where it is printed: 4.1 % are one, however exact."""


@dataclass(frozen=True)
class Stretch:
    """Budgets next to each other with one answer: equal peaks, equal times.

    Attributes:
        plans: The plans to these budgets, the largest first.
    """

    plans: tuple[Plan, ...]

    @property
    def plan(self) -> Plan:
        """The plan to the least of these budgets, which fits the others too."""
        return self.plans[-1]

    @property
    def budgets(self) -> str:
        """The budgets as text: ``3.20 to 4.61 MiB``, or the only one."""
        most, least = (format_bytes(p.budget) for p in (self.plans[0], self.plans[-1]))
        if most == least:
            return most
        number, unit = least.split()
        return f"{number if most.endswith(unit) else least} to {most}"


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
    def stretches(self) -> tuple[Stretch, ...]:
        """The plans that differ, each with the budgets that it is the answer to, largest first."""
        groups = itertools.groupby(self.plans, key=_outcome)
        return tuple(Stretch(tuple(group)) for _, group in groups)

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Compiled peak, and overhead as a part of the plain step, of each plan that differs."""
        plans = (stretch.plan for stretch in self.stretches)
        return tuple((p.compiled_peak, p.overhead_share) for p in plans)

    def __str__(self) -> str:
        """A table of the plans that differ, and the floor."""
        return "\n".join([*aligned(HEAD, self.cells), *self.notes])

    @property
    def notes(self) -> tuple[str, ...]:
        """The lines below the table, the floor where it was met."""
        return () if self.floor is None else (f"floor {format_bytes(self.floor, up=True)}",)

    @property
    def cells(self) -> tuple[tuple[str, ...], ...]:
        """The rows of the table."""
        return tuple(
            (
                stretch.budgets,
                format_bytes(stretch.plan.compiled_peak),
                format_bytes(stretch.plan.host_bytes),
                f"{stretch.plan.overhead_share:.1%}",
            )
            for stretch in self.stretches
        )


HEAD = ("budget", "compiled peak", "on the host", "overhead")
"""Titles of the table's columns."""


def _outcome(plan: Plan) -> tuple[int, int, int, float]:
    """What has to be equal for plans to be one point."""
    return (
        plan.compiled_peak,
        plan.host_bytes,
        plan.spill_bytes,
        round(plan.overhead_share, _SAME),
    )


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
