"""The search for a plan: with the step as it is cut first, other cuts, or layers together."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jdelta._src.decision import Decision
from jdelta._src.errors import BudgetError, JdeltaError, TraceError
from jdelta._src.passes.emit import Step
from jdelta._src.regions.long_loops import LONG
from jdelta._src.regions.region import AS_WRITTEN, Grouping
from jdelta._src.regions.trace import Trace
from jdelta._src.residuals.hand_policy import decisions_of
from jdelta._src.residuals.items import items_of
from jdelta._src.residuals.links import Link
from jdelta._src.residuals.pins import Pins
from jdelta._src.residuals.region_inputs import users_names, with_region_inputs
from jdelta._src.residuals.residual import Residual
from jdelta._src.residuals.unpinnable import why_unpinnable
from jdelta._src.search.candidate import CompiledCandidate, Found
from jdelta._src.search.history import History
from jdelta._src.search.rules import (
    OTHER_CUTS,
    fewest_states,
    head_pieces,
    nested_grouping,
    with_lower_floor,
)
from jdelta._src.search.search import EARLY, MOST_COMPILES, Search
from jdelta._src.sizes import Budget
from jdelta._src.solver import Solver

_LOG = logging.getLogger(__name__)

OTHERWISE = 3
"""Compiles for a step that is cut otherwise."""

MOST_STATES = 3
"""Numbers of states of long loops that are compiled for a budget, beside the fewest."""

FAR_ABOVE = 1.5
"""Times the budget from which on what enters each iteration of a long loop is far too much."""

AIM = 0.97
"""Part of the budget that is aimed at with them: what a loop carries is most of what they need."""


@dataclass(frozen=True)
class Planning:
    """What a plan is to be found for.

    Attributes:
        traced: Stages the step, its loops run in the given way.
        step: What is compiled of it.
        host_room: Bytes that may be offloaded.
        files: Tells for its residuals the link to files, if there is one.
        pin: Decisions taken by hand, or a hand-written policy.
        solver: What decides.
        per_layer: Whether layers of a loop may be decided differently, and recompute be nested.
        history: What searches with other budgets have learnt.
    """

    traced: Callable[[Grouping], Trace]
    step: Callable[[Trace], Step]
    host_room: float
    files: Callable[[Sequence[Residual]], Link | None]
    pin: Mapping[str, Decision | str] | Callable[..., Any]
    solver: Solver
    per_layer: bool
    history: History
    _cut: dict[str, list[Search]] = field(default_factory=dict[str, list[Search]])
    _few: dict[str, tuple[Search, Search]] = field(default_factory=dict[str, tuple[Search, Search]])

    def result(self, budget: Budget) -> tuple[Search, Found]:
        """Search until the budget is used, or no way of running the loops promises more.

        Returns:
            The search, and the plan that it found.

        Raises:
            BudgetError: The budget is below the least peak that the step can reach.
            OffloadError: What the user pinned to the host is not there in the compiled program.
            SpillError: The same for files.
        """
        first = self._search(AS_WRITTEN)
        search, outcome = self._searched(first, first.bound(budget))
        grouping = search.step.grouping
        if not grouping.states:
            outcome = (first if grouping.layers > 1 else search).settled(outcome)
        if outcome.best.decisions is not None and self._has_long_loops(first):
            with contextlib.suppress(TraceError):
                fewest, _ = self._fewest_states(first)
                outcome = with_lower_floor(outcome, fewest.expected_floor)
        return search, outcome

    def _searched(self, search: Search, bound: int) -> tuple[Search, Found]:
        """The plan with the head in pieces where that promises to be quicker, else as it is.

        Where no plan is promised at all, a lower floor does. Where the head as it is has no plan
        after all, as a compiler may undo its recompute, pieces are tried that promised less.
        """
        if self.pin:
            return search, self._pinned(search, bound)
        refused: BudgetError | None = None
        slower: list[Search] = []
        for pieces in self._with_pieces(search, bound):
            if pieces.promise(bound) >= search.promise(bound):
                slower.append(pieces)
                continue
            try:
                return pieces, pieces.run(bound)
            except BudgetError as error:
                refused = error
            except (JdeltaError, jax.errors.JaxRuntimeError):
                break
        if refused is not None and not search.promises(refused.floor or 0):
            raise refused
        try:
            return self._searched_whole(search, bound)
        except BudgetError as error:
            least = min(filter(None, (refused, error)), key=lambda e: e.floor or math.inf)
        try:
            return _first_that_fits(slower, bound, least)
        except jax.errors.JaxRuntimeError:
            raise least from None

    def _searched_whole(self, search: Search, bound: int) -> tuple[Search, Found]:
        """The plan with the head as it is."""
        if search.is_floor_above(bound) and not search.trace.trips:
            return self._of_all_cuts([search, *self._others(search)], bound)
        if self._has_long_loops(search) and search.expected_floor > FAR_ABOVE * bound:
            return _first_that_fits(self._long_loops_first(search, bound), bound)
        has_layers = bool(search.trace.trips) and self.per_layer
        may_be_apart = has_layers and bool(search.step.target.backend.loops.layers)
        try:
            outcome = search.run(bound, EARLY if may_be_apart else MOST_COMPILES)
        except BudgetError as error:
            if search.attempts.is_hopeless(bound):
                raise
            return self._otherwise(search, bound, error)
        if search.may_other_cuts_be_quicker(outcome):
            return self._cut_otherwise(search, outcome, self._others(search))
        if self._has_long_loops(search) and search.is_dear(outcome):
            few = self._with_few_states(search, bound)
            quicker = (s for s in few if s.least_overhead < outcome.best.overhead)
            return self._cut_otherwise(search, outcome, quicker)
        is_done = outcome.is_good or not may_be_apart
        return (search, outcome) if is_done else self._apart(search, outcome)

    def _with_pieces(self, first: Search, bound: int) -> Iterator[Search]:
        """The searches with the head in pieces, if there are any: few pieces first."""
        if not self.per_layer or first.is_plain_within(bound):
            return
        for pieces in head_pieces(first.trace.head, bound):
            with contextlib.suppress(TraceError):
                search = self._search(Grouping(1, pieces=pieces), first)
                if search.trace.fingerprint == first.trace.fingerprint:
                    return
                yield search

    def _pinned(self, search: Search, bound: int) -> Found:
        """A plan that does what the user decided."""
        outcome = search.run(bound)
        if outcome.best.decisions and not callable(self.pin):
            search.items.check_moved(outcome.best.decisions)
        return outcome

    def _search(
        self,
        grouping: Grouping,
        before: Search | None = None,
        alike: CompiledCandidate | None = None,
    ) -> Search:
        loops = f", {grouping.layers} layers in an iteration" if grouping.layers > 1 else ""
        cuts = ", cut otherwise" if grouping.cuts is not AS_WRITTEN.cuts else ""
        _LOG.info("tracing the step%s%s", loops, cuts)
        trace = self.traced(grouping)
        if trace.uncut and self.pin:
            raise TraceError(trace.uncut)
        step = self.step(trace)
        residuals = with_region_inputs(trace, step.target)
        files = self.files(residuals)
        pins = self._pins(trace, residuals)
        items = items_of(residuals, step.target, self.host_room, pins, files)
        asked = step, items, trace, self.solver, self.history
        return Search(*asked, before, alike, may_nest=self.per_layer)

    def _pins(self, trace: Trace, residuals: Sequence[Residual]) -> Pins:
        if callable(self.pin):
            return Pins(decisions_of(self.pin, trace, residuals))
        names = {r.name for r in residuals}
        unpinnable = functools.partial(why_unpinnable, trace, names)
        return Pins(self.pin, users_names(trace, residuals), unpinnable)

    def _others(self, first: Search) -> list[Search]:
        """The searches for a step of which nothing is marked with other cuts, each program once."""
        if not first.trace.automatic:
            return []
        if first.trace.fingerprint not in self._cut:
            searches = {first.trace.fingerprint: first}
            for grouping in OTHER_CUTS:
                with contextlib.suppress(JdeltaError, jax.errors.JaxRuntimeError):
                    search = self._search(grouping, first)
                    searches.setdefault(search.trace.fingerprint, search)
            self._cut[first.trace.fingerprint] = list(searches.values())[1:]
        return self._cut[first.trace.fingerprint]

    def _of_all_cuts(self, searches: Sequence[Search], bound: int) -> tuple[Search, Found]:
        """The plan with the cuts that promise the quickest, else with the next ones."""
        in_order = sorted(searches, key=lambda search: search.promised_seconds(bound))
        search, outcome = _first_that_fits(in_order, bound)
        if not search.may_other_cuts_be_quicker(outcome):
            return search, outcome
        others = [other for other in searches if other is not search]
        return self._cut_otherwise(search, outcome, others)

    def _otherwise(self, first: Search, bound: int, error: BudgetError) -> tuple[Search, Found]:
        """Other regions, or nested checkpoints, as everything else needs more than the budget."""
        return _first_that_fits(self._elsewhere(first, bound), bound, error)

    def _elsewhere(self, first: Search, bound: int) -> Iterator[Search]:
        """The searches with other regions, then with loops under further checkpoints."""
        yield from self._others(first)
        if self._has_long_loops(first):
            yield from self._with_few_states(first, bound)
        elif self.per_layer and (grouping := nested_grouping(first.trace.trips)) is not None:
            with contextlib.suppress(TraceError):
                yield self._search(grouping, first)

    def _has_long_loops(self, search: Search) -> bool:
        """Whether some loops may be run from few states, unless the user decided something."""
        return self.per_layer and not self.pin and search.trace.longest >= LONG

    def _long_loops_first(self, first: Search, bound: int) -> Iterator[Search]:
        """The searches where what enters iterations takes far more than the budget.

        What leaves the device comes first where that is quicker than to run iterations again.
        """
        moves_first = False
        with contextlib.suppress(TraceError):
            fewest, _ = self._fewest_states(first)
            moves_first = first.moving_seconds(bound) < fewest.least_overhead
        if moves_first:
            yield first
        yield from self._with_few_states(first, bound)
        if not moves_first:
            yield first

    def _with_few_states(self, first: Search, bound: int) -> Iterator[Search]:
        """The searches with fewer and fewer states of long loops, until one has a plan.

        What each state takes is read off two simulated floors; what the compiler takes more for the
        first program, it is taken to take for those after it.
        """
        longest = first.trace.longest
        with contextlib.suppress(TraceError):
            least, more = self._fewest_states(first)
            if least.trace.fingerprint == first.trace.fingerprint:  # no loop can be run so
                return
            fewest, goal = least.step.grouping.states, AIM * bound
            each = (more.expected_floor - least.expected_floor) / fewest
            for _ in range(MOST_STATES):
                room = (goal - least.expected_floor) / each if each > 0 else longest
                states = fewest + math.floor(min(room, longest - fewest))
                if states <= fewest:
                    break
                search = self._search(Grouping(1, states=states), first)
                yield search
                goal -= max(each, search.least_peak - AIM * bound)
            yield least

    def _fewest_states(self, first: Search) -> tuple[Search, Search]:
        """The searches with the fewest states of long loops, and with twice as many."""
        key = first.trace.fingerprint
        if key not in self._few:
            fewest = fewest_states(first.trace.longest)
            groupings = (Grouping(1, states=states) for states in (fewest, 2 * fewest))
            least, more = (self._search(grouping, first) for grouping in groupings)
            self._few[key] = least, more
        return self._few[key]

    def _cut_otherwise(
        self, first: Search, alike: Found, others: Iterable[Search]
    ) -> tuple[Search, Found]:
        """The first quicker plan with other cuts, else the one that there is."""
        most = alike.compiles + OTHERWISE
        for search in others:
            with contextlib.suppress(JdeltaError, jax.errors.JaxRuntimeError):
                outcome = search.run(alike.budget, most) if search.promises(alike.budget) else alike
                if outcome.best.overhead < alike.best.overhead:
                    return search, outcome
        return first, alike

    def _apart(self, first: Search, alike: Found) -> tuple[Search, Found]:
        """The best plan with layers decided alike or apart."""
        bound, search, outcome = alike.budget, first, alike
        grouping = first.better_grouping(alike)
        if grouping:
            with contextlib.suppress(BudgetError, TraceError):
                other = self._search(grouping, first, alike.best)
                apart = other.run(bound)
                if apart.best.overhead < alike.best.overhead:
                    search, outcome = other, apart
        if search is first:
            outcome = first.run(bound)
        known = search.known_grouping(bound, outcome.best.overhead)
        if known is None or known == search.trace.grouping:
            return search, outcome
        search = self._search(known, search, alike.best)
        return search, search.run(bound)


def _first_that_fits(
    searches: Iterable[Search], bound: int, error: BudgetError | None = None
) -> tuple[Search, Found]:
    """The first plan within a budget.

    Args:
        searches: What to try in turn. One that promises no lower floor than those that were too
            high before is left out, but for nested checkpoints, whose floor is not foretold.
        bound: The budget, bytes.
        error: What was said of those before.

    Raises:
        BudgetError: There is none; the error with the lowest floor.
    """
    for search in searches:
        is_foretold = search.step.grouping.is_foretold
        if error is not None and is_foretold and not search.promises(error.floor or 0):
            continue
        try:
            return search, search.run(bound)
        except TraceError:
            if error is None:
                raise
        except BudgetError as other:
            if search.attempts.is_hopeless(bound):
                raise
            errors = (other,) if error is None else (error, other)
            error = min(errors, key=lambda e: e.floor or math.inf)
    assert error is not None
    raise error from None
