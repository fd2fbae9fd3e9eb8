"""The search for a plan, with loops as they are and with several layers in an iteration."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jdelta._boundary import with_boundaries
from jdelta._budget import Budget
from jdelta._decision import Decision
from jdelta._emit import Step
from jdelta._errors import BudgetError
from jdelta._items import items_of
from jdelta._planner import EARLY, GROUPS, MOST_COMPILES, Found, Search
from jdelta._region import AS_WRITTEN, Grouping
from jdelta._solver import Solver
from jdelta._trace import Trace

ROW_PASSES = 6
"""Times that what layers have rows of passes through memory more if an iteration runs several: 5.4
by the instructions of a compiled GPT-2 (jax 0.12.0.1, cuda:h100, three layers)."""


@dataclass(frozen=True)
class Result:
    """A plan, and the step that it is for.

    Attributes:
        trace: The step, its loops run as in the plan.
        search: What found the plan.
        found: The plan.
    """

    trace: Trace
    search: Search
    found: Found


@dataclass(frozen=True)
class Planning:
    """What a plan is to be found for.

    Attributes:
        traced: Stages the step, its loops run in the given way.
        step: What is compiled of it.
        host_room: Bytes that may be offloaded.
        pin: Decisions taken by hand.
        solver: What decides.
        per_layer: Whether layers of a loop may be decided differently.
    """

    traced: Callable[[Grouping], Trace]
    step: Callable[[Trace], Step]
    host_room: float
    pin: Mapping[str, Decision | str]
    solver: Solver
    per_layer: bool

    def result(self, budget: Budget) -> Result:
        """Search until the budget is used, or no way of running the loops promises more.

        Raises:
            BudgetError: The budget is below the least peak that the step can reach.
            OffloadError: What the user pinned to the host is not there in the compiled program.
        """
        first = self._begin(AS_WRITTEN)
        bound = first.search.bound(budget)
        trips = {r.name: r.nest.kept for r in first.trace.regions if r.nest.loops}
        if not trips or not self.per_layer or self.pin:
            return first.run(bound)
        may_be_apart = first.search.step.target.platform in GROUPS
        try:
            result = first.run(bound, EARLY if may_be_apart else MOST_COMPILES)
        except BudgetError as error:
            return self._nested(first, bound, max(trips.values()), error)
        is_done = result.found.is_good or not may_be_apart
        return result if is_done else self._apart(result, bound, trips)

    def _begin(self, grouping: Grouping, before: Search | None = None) -> _Begun:
        trace = self.traced(grouping)
        step = self.step(trace)
        rates = step.target.rates
        residuals = with_boundaries(trace, step.target)
        items = items_of(residuals, step.target, self.host_room, self.pin)
        splitting = ROW_PASSES * trace.row_bytes / rates.bandwidth
        search = Search(
            step,
            items,
            trace.loops,
            self.solver,
            trace.fingerprint,
            splitting,
            before,
            trace.partly,
        )
        return _Begun(trace, search)

    def _nested(self, first: _Begun, bound: int, trips: int, error: BudgetError) -> Result:
        """Nested checkpoints, since everything else needs more than the budget."""
        layers = _near_root(trips)
        if layers == 1:
            raise error
        try:
            return self._begin(Grouping(layers, nested=True), first.search).run(bound)
        except BudgetError as other:
            raise min(error, other, key=lambda e: e.floor or math.inf) from None

    def _apart(self, result: Result, bound: int, trips: Mapping[str, int]) -> Result:
        """The best plan with layers decided alike or apart."""
        grouping = result.search.better_grouping(result.found, trips)
        if grouping:
            with contextlib.suppress(BudgetError):
                apart = self._begin(grouping, result.search).run(bound)
                if apart.found.best.overhead < result.found.best.overhead:
                    result = apart
        if result.trace.grouping == AS_WRITTEN:
            result = _Begun(result.trace, result.search).run(bound)
        known = result.search.known_grouping(bound, result.found.best.overhead)
        if known is None or known == result.trace.grouping:
            return result
        return self._begin(known, result.search).run(bound)


@dataclass(frozen=True)
class _Begun:
    """A search that has not ended."""

    trace: Trace
    search: Search

    def run(self, bound: int, most: int = MOST_COMPILES) -> Result:
        return Result(self.trace, self.search, self.search.run(bound, most))


def _near_root(count: int) -> int:
    """The divisor of a number that is nearest to its square root, itself left out."""
    divisors = (d for d in range(1, count) if count % d == 0)
    return min(divisors, key=lambda d: abs(math.log(d * d / count)), default=1)
