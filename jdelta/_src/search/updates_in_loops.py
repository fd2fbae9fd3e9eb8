"""A search for a plan with weight updates inside the backward loops, if that lowers the peak."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from jdelta._src.errors import BudgetError
from jdelta._src.hlo.measure import measure
from jdelta._src.passes.emit import Step, emit
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import Trace
from jdelta._src.search.candidate import Found
from jdelta._src.search.groupings import Planning
from jdelta._src.search.search import Search
from jdelta._src.sizes import Budget

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """A search, the plan that it found, and what moving the updates is worth.

    Attributes:
        search: The search.
        outcome: What it found.
        saved: Bytes by which the compiled peak of the plan is lower with its updates moved; 0 where
            they stay where they are.
    """

    search: Search
    outcome: Found
    saved: int = 0


def result(planning: Planning, plain: Step, budget: Budget) -> Result:
    """The better of two plans: with updates where they are, and inside the backward loops.

    The latter is used only if the compiled peak of the same plan is lower for it.

    Args:
        planning: What a plan is to be found for.
        plain: The step, to know what a budget that is a share is a share of.
        budget: The budget.

    Raises:
        BudgetError: The budget is below the least peak that the step can reach either way.
    """
    ceiling = None
    if budget.share is not None:
        ceiling = _peak(plain, None)
        budget = Budget(bytes=int(budget.share * ceiling))
    stay = _tried(lambda: Result(*planning.result(budget)))
    moved = _tried(lambda: _moved(planning, budget))
    both = [r for r in (stay, moved) if isinstance(r, Result)]
    if not both:
        assert isinstance(stay, BudgetError)
        raise min((e for e in (stay, moved) if isinstance(e, BudgetError)), key=_floor)
    best = min(both, key=lambda r: (r.outcome.best.overhead, r.outcome.best.peak))
    return best if ceiling is None else replace(best, outcome=_under(best.outcome, ceiling))


def _under(outcome: Found, ceiling: int) -> Found:
    """What was found, beside the compiled peak of the plain step."""
    estimates = tuple(e for e in outcome.estimates if e != "ceiling")
    floor = min(outcome.floor, ceiling)
    return replace(outcome, floor=floor, ceiling=ceiling, estimates=estimates)


def _tried(search: Callable[[], Result | None]) -> Result | BudgetError | None:
    try:
        return search()
    except BudgetError as error:
        return error


def _moved(planning: Planning, budget: Budget) -> Result | None:
    def step(trace: Trace) -> Step:
        return replace(planning.step(trace), updates_in_loops=True)

    search, outcome = replace(planning, step=step).result(budget)
    policy = outcome.best.emission.policy
    saved = _peak(replace(search.step, updates_in_loops=False), policy) - outcome.best.peak
    return Result(search, outcome, saved) if saved > 0 else None


def _peak(step: Step, policy: Policy | None) -> int:
    """Compiled peak of a step under a policy."""
    what = "the plain step" if policy is None else "the plan with its updates where they were"
    _LOG.info("compiling %s for %s", what, step.target.name)
    emission = emit(step, policy)
    return measure(emission.lower(), step.target, emission.options)[1].peak


def _floor(error: BudgetError) -> float:
    return float("inf") if error.floor is None else error.floor
