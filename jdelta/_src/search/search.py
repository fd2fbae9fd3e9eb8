"""The search for a plan of one program: propose, compile, compare with the budget, correct."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import jax

from jdelta._src.decision import Decision
from jdelta._src.errors import BudgetError
from jdelta._src.estimate.seconds import program_seconds
from jdelta._src.passes.emit import Step
from jdelta._src.program.loop_nest import walk
from jdelta._src.regions.region import Grouping
from jdelta._src.regions.trace import Trace
from jdelta._src.residuals.items import Items
from jdelta._src.search import rules
from jdelta._src.search.attempts import Attempts
from jdelta._src.search.candidate import Candidate, CompiledCandidate, Found
from jdelta._src.search.filling import filled
from jdelta._src.search.floor import fitting_floor, settled_floor
from jdelta._src.search.history import Compiles, Correction, History, with_executable
from jdelta._src.search.messages import above_plain, grown, nothing_kept, too_small
from jdelta._src.search.propose import Proposals
from jdelta._src.sizes import Budget, format_bytes
from jdelta._src.solver.base import Solver

MOST_COMPILES = 4
EARLY = 3
"""Compiles after which more layers in an iteration are thought of, if the budget is not used."""

SMALL = 1500
"""Operations of a step, loop bodies once, up to which compiling takes a few seconds."""

SHORT = 8 << 20
"""Bytes of a compiled program up to which the same holds: a TPU's compiler took 20 to 90 s for four
small steps with 11 to 16 MiB of code, and 5 s or so below 6 MiB (rows of `programs`)."""


def executable(step: Step, outcome: Found) -> jax.stages.Compiled | None:
    """The plan that was found, compiled now if its measurement came from disk.

    Args:
        step: The step that it was found for.
        outcome: What was found.

    Raises:
        BudgetError: Compiled once more the plan takes more than the measurement kept on disk.
    """
    best = outcome.best
    if best.compiled is None:
        best = with_executable(step, best)
    if best.peak > outcome.budget:
        raise grown(outcome.budget, outcome.best, best)
    return best.compiled


class Search:
    """One search. Compiled peaks of planned steps correct simulated ones of later candidates."""

    def __init__(
        self,
        step: Step,
        items: Items,
        trace: Trace,
        solver: Solver,
        history: History,
        before: Search | None = None,
        alike: CompiledCandidate | None = None,
        *,
        may_nest: bool = True,
    ):
        """Begin a search.

        Args:
            step: The step.
            items: What is to be decided.
            trace: The step as it was staged.
            solver: What decides.
            history: What searches with other budgets have learnt.
            before: The search for the same step as it is cut first, its loops as they are.
            alike: The plan that was found there, where only the loops are run otherwise: this
                search may then end without one.
            may_nest: Whether what enters regions may be computed again, too, which no policy of a
                single ``jax.checkpoint`` says.
        """
        self.step = step
        self.trace = trace
        pins = frozenset(items.pinned.items())
        spill = step.store and step.store.spill
        emitted = step.donate, step.updates_in_loops, spill
        key = (trace.fingerprint, step.target.name, emitted, items.problem, pins)
        correction = Correction(is_proportional=step.target.backend.tolerances.errs_in_parts)
        if before and before.step.grouping.cuts is step.grouping.cuts:
            correction = before.proposals.correction.copy()
        compiles = before.attempts.compiles if before else Compiles(history.plans(key))
        self.proposals = Proposals(step, items, trace, solver, correction, may_nest=may_nest)
        self.attempts = Attempts(self.proposals, compiles, self._compiled_plain, alike)
        self._plain: Candidate = before._plain if before else self.proposals.plain()
        self._may_fail = alike is not None
        grouping = step.grouping
        is_rewritten = bool(grouping.states or grouping.pieces)
        self._as_written = before.trace if before and is_rewritten else trace
        if grouping.pieces:
            seconds = self._seconds_of(trace) - self.step_seconds
            self.proposals.extra_seconds += max(0.0, seconds)

    @property
    def items(self) -> Items:
        """What is to be decided, by the links that are still open."""
        return self.proposals.items

    def bound(self, budget: Budget) -> int:
        """The budget in bytes; the plain step is compiled if it is a share, or may fit.

        It is compiled too where nothing can be decided: there is no other program then.
        """
        if budget.bytes is None:
            return int((budget.share or 1.0) * self._compiled_plain().peak)
        if not self.items.residuals or rules.may_plain_fit(self._plain.predicted, budget.bytes):
            self._compiled_plain()
        return budget.bytes

    def better_grouping(self, outcome: Found) -> Grouping | None:
        """How loops over layers should be run to be quicker within the budget, if there is a way.

        Args:
            outcome: What was found with the loops as they are. It may leave memory that another
                plan for them uses, which is no reason for a grouping.
        """
        proposals, items = self.proposals, self.items
        capacity = max(0.0, float(outcome.budget - proposals.floor().predicted))
        trips = self.trace.trips
        seconds: dict[Grouping, float] = {}
        for layers in self.step.target.backend.loops.layers:
            apart = {name for name, count in trips.items() if count % layers == 0 < count - layers}
            problem = replace(items.in_parts(layers, apart), capacity=capacity)
            added = proposals.solved_seconds(problem) + proposals.splitting_seconds
            seconds[Grouping(layers)] = added
        alike = proposals.solved_seconds(replace(items.problem, capacity=capacity))
        forward = sum(item.seconds for item in items.problem.items)
        return rules.worthwhile_grouping(seconds, min(outcome.best.overhead, alike), forward)

    def known_grouping(self, bound: int, seconds: float) -> Grouping | None:
        """That of the quickest plan compiled so far that fits, if it adds less than ``seconds``."""
        known = self.attempts.compiles.quickest(bound)
        return known.grouping if known and known.overhead < seconds else None

    def may_other_cuts_be_quicker(self, outcome: Found) -> bool:
        """Whether the step is to be cut otherwise, too, although there is a plan."""
        if not self.trace.automatic or self.trace.trips:  # the bodies of loops are cut in one way
            return False
        return self.is_dear(outcome)

    def is_dear(self, outcome: Found) -> bool:
        """Whether next to everything has to go for a plan, which adds much."""
        proposals = self.proposals
        seconds = proposals.seconds(self._plain)
        return rules.may_other_cuts_be_quicker(outcome.best, proposals.floor(), seconds)

    def promise(self, bound: int) -> tuple[float, int]:
        """What a plan within a budget adds, seconds, and the floor, bytes: both predicted."""
        return self.promised_seconds(bound), self.expected_floor

    def is_plain_within(self, bound: int) -> bool:
        """Whether the plain step is compiled, or predicted, to fit."""
        return self.proposals.expected(self._plain) <= bound

    def moving_seconds(self, bound: int) -> float:
        """About what a plan with region inputs off the device adds; infinity if there is none."""
        return self.proposals.moving_seconds(bound)

    @property
    def least_overhead(self) -> float:
        """Seconds that the way in which loops are run adds to each plan."""
        return self.proposals.extra_seconds

    @property
    def expected_floor(self) -> int:
        """The peak with everything recomputed, compiled or predicted with all that is known."""
        return self.proposals.expected(self.proposals.floor())

    @property
    def least_peak(self) -> int:
        """The least compiled peak of a plan of this search, bytes; 0 where none was compiled."""
        return min((plan.peak for plan in self.attempts.plans), default=0)

    def promises(self, peak: int) -> bool:
        """Whether the floor may be below a peak, by its prediction."""
        return rules.may_be_below(self.proposals.least_predicted(), peak)

    def promised_seconds(self, bound: int) -> float:
        """About what a plan within a budget adds to the step; infinity if there is none."""
        return self.proposals.promised_seconds(bound)

    def is_floor_above(self, bound: int) -> bool:
        """Whether everything recomputed exceeds a budget by its prediction, if that is believed."""
        is_believed = self.step.target.backend.tolerances.floor_far_above < math.inf
        if not is_believed or not self.items.residuals:
            return False
        return self.proposals.floor().predicted > bound

    def run(self, bound: int, most: int = MOST_COMPILES) -> Found:
        """Find a plan within the budget.

        Args:
            bound: The budget in bytes.
            most: Compiles after which the best plan so far has to do.

        Raises:
            BudgetError: The budget is below the least peak that the step can reach.
            OffloadError: What the user pinned to the host is not there in the compiled program.
            SpillError: What the user pinned to files the compiled program does not write and read.
        """
        if plain := self._fitting_plain(bound):
            return self._as_it_is(plain, bound)
        if not self.items.residuals and self._as_written is self.trace:
            raise nothing_kept(bound, self._compiled_plain(), self.proposals)
        try:
            best, floor = self._improve(bound, most)
        except BudgetError as error:
            return self._met_otherwise(bound, error)
        if most >= MOST_COMPILES:
            self._say_best(best, " to use more of the budget")
            best = filled(self.proposals, self.attempts, best, bound, is_small=self._is_small)
        if self._plain_may_fit_after_all(best, bound):
            self._compiled_plain()
            if plain := self._fitting_plain(bound):
                return self._as_it_is(plain, bound)
        return self._outcome(best, bound, floor)

    def settled(self, outcome: Found) -> Found:
        """What was found, with its floor no higher than any peak that was reached.

        A floor that was not compiled is called an estimate. It is taken only after some programs,
        plans among which took what was predicted: simulated floors were up to 29 % too low on CPUs,
        and on TPUs, where a small step stays in on-chip memory, below zero once corrected by larger
        plans. There a large one is believed at once: compiling it takes minutes.
        """
        if outcome.best.decisions is None:
            return outcome
        if outcome.best.levels:  # below everything recomputed
            return rules.with_lower_floor(outcome, self.proposals.least_predicted())
        compiles, proposals = self.attempts.compiles, self.proposals
        large = self.step.target.backend.tolerances.large_floor
        self._say_best(outcome.best, " for the floor")
        is_sure = compiles.are_foretold and rules.is_floor_believed(
            self.expected_floor, large, compiles.count
        )
        floor = settled_floor(proposals, self.attempts, is_sure=is_sure, is_small=self._is_small)
        settled = rules.settled(
            outcome, floor, proposals.expected(floor), self._plain, compiles.least
        )
        settled = replace(settled, compiles=compiles.count)
        return rules.with_lower_floor(settled, proposals.least_predicted())

    def own_recompute(self) -> float:
        """Seconds that the user's own ``jax.checkpoint`` adds to the plain step."""
        if not self._has_own_recompute:
            return 0.0
        return max(0.0, self.proposals.seconds(self._plain) - self.step_seconds)

    @functools.cached_property
    def step_seconds(self) -> float:
        """Seconds of the step without any recompute."""
        return self._seconds_of(self._as_written)

    def _seconds_of(self, step_trace: Trace) -> float:
        target = self.step.target
        return program_seconds(step_trace.graph, target.rates, target.backend)

    def _improve(self, bound: int, most: int) -> tuple[CompiledCandidate, Candidate]:
        """The best plan found for the budget, and the floor.

        The floor is compiled only where it is in doubt that it fits, and where nothing else does;
        and not at all where another search has a plan.
        """
        proposals, attempts, compiles = self.proposals, self.attempts, self.attempts.compiles
        trials, floor = rules.Trials(bound), proposals.floor()
        plain_seconds = proposals.seconds(self._plain)
        if rules.is_floor_in_doubt(floor.predicted, bound) and not self._may_fail:
            count = compiles.count
            floor = self._fitting_floor(bound)
            if floor.levels:  # as quick as may be, where nothing else fits
                return floor, floor
            trials = trials.with_floor(floor)
            if compiles.count > count:  # so that one more plan is tried
                most = max(most, compiles.count + 1)
        tolerances = self.step.target.backend.tolerances
        most += tolerances.compiles_for_spill if self.step.store else 0
        known = self._known(bound, floor)
        most -= known is not None and not attempts.has(known)
        files_tried = False
        for _ in range(most):  # a program compiled before does not count
            if compiles.count >= most:
                break
            if rules.is_lost(trials, tolerances.lost) and not self._may_fail:
                floor = self._fitting_floor(bound)
                trials = trials.with_floor(floor)
                continue
            goal = rules.aim(trials, is_last=compiles.count == most - 1)
            candidate = proposals.fitting(floor, goal)
            # With the floor's error, what recomputes little may be predicted too high.
            if candidate.decisions == floor.decisions and self.step.store and not files_tried:
                candidate, files_tried = proposals.keeping_next_to_nothing(bound), True
            if candidate.decisions == (trials.best or floor).decisions:
                break
            if not rules.is_worth_compiling(candidate, trials, plain_seconds):
                break
            compiles.most, compiles.purpose = most, ""
            plan = attempts.tried(candidate)
            if plan is None:
                continue
            if plan.peak > bound and attempts.is_recompute_undone:
                least = compiles.least or plan.peak
                raise too_small(bound, plan, least, proposals, is_undone=True)
            trials = trials.with_plan(plan)
            self._say_best(trials.best)
            is_slow = rules.is_quicker_without_offload(
                plan, self.items, proposals.solver, proposals.extra_seconds
            )
            if is_slow:
                proposals.items = self.items.without(Decision.OFFLOAD)
            if rules.uses_budget(trials) and not is_slow:
                break
        best = trials.best
        if known and (best is None or known.overhead < best.overhead):
            plan = attempts.tried(known)
            if plan and plan.peak <= bound and (best is None or plan.overhead < best.overhead):
                best = plan
        if best is None and self._may_fail:
            raise BudgetError(f"No plan within {format_bytes(bound)} after {most} compiles.")
        if best is None:
            floor = best = self._fitting_floor(bound)
        return best, floor

    def _fitting_floor(self, bound: int) -> CompiledCandidate:
        """The floor, or a plan that needs still less.

        Raises:
            BudgetError: It does not fit.
        """
        self._say_best(None, " for the floor")
        floor = fitting_floor(self.proposals, self.attempts, bound)
        self._say_best(floor)
        return floor

    def _say_best(self, best: CompiledCandidate | None, purpose: str = "") -> None:
        """What the log is to say of the best plan so far, and of what is compiled next."""
        compiles, seconds = self.attempts.compiles, self.proposals.seconds(self._plain)
        compiles.most, compiles.purpose = 0, purpose
        if best is not None:
            added = max(0.0, best.overhead) / seconds if seconds else 0.0
            compiles.best = f"{format_bytes(best.peak)}, +{100 * added:.1f} %"

    def _met_otherwise(self, bound: int, error: BudgetError) -> Found:
        """What meets the budget though it is below the floor: the plain step, or a known plan.

        A step with a ``jax.checkpoint`` of the user's may take less as it is.

        Raises:
            BudgetError: Nothing does.
        """
        if self._may_fail:
            raise error
        plain = self._compiled_plain()
        if self._fitting_plain(bound):
            return self._as_it_is(plain, bound)
        known = self._known(bound, self.proposals.floor())
        best = self.attempts.tried(known) if known else None
        if best and best.peak <= bound:
            return self._outcome(best, bound, best)
        if self._is_free and error.floor is not None and plain.peak < error.floor:
            floor = self.attempts.compile(self.proposals.floor())
            error = above_plain(bound, plain, floor, self.proposals)
        error.budget, error.ceiling = bound, plain.peak
        raise error from None

    def _known(self, bound: int, floor: Candidate) -> Candidate | None:
        """The fastest plan but the floor that was compiled for another budget and fits this too."""
        known = self.attempts.compiles.quickest(bound, self.step.grouping)
        return self.proposals.known(known.policy, floor) if known else None

    def _plain_may_fit_after_all(self, best: CompiledCandidate, bound: int) -> bool:
        predicted = self.proposals.expected(self._plain)
        return self._is_free and rules.may_plain_fit_after_all(
            self._plain, predicted, best, bound, is_small=self._is_small
        )

    def _compiled_plain(self) -> CompiledCandidate:
        """The plain step, compiled unless it was before."""
        plain = self._plain = self.attempts.compile(self._plain)
        return plain

    def _fitting_plain(self, bound: int) -> CompiledCandidate | None:
        """The plain step, if that is the plan: it was compiled, and fits."""
        plain = self._plain
        if isinstance(plain, CompiledCandidate) and plain.peak <= bound and self._is_free:
            return plain
        return None

    def _as_it_is(self, plain: CompiledCandidate, bound: int) -> Found:
        """The plain step as the plan."""
        return Found(plain, bound, plain.peak, plain.peak, (), self.attempts.compiles.count)

    def _outcome(self, best: CompiledCandidate, bound: int, floor: Candidate) -> Found:
        """The outcome, its floor and ceiling as far as they are known by now."""
        proposals, attempts = self.proposals, self.attempts
        least = min(proposals.expected(floor), best.peak)
        return Found(
            best,
            bound,
            least,
            max(least, proposals.expected(self._plain)),
            rules.estimates(floor, self._plain),
            attempts.compiles.count,
            rules.refused(attempts.plans, best, bound, self.items.residuals),
        )

    @property
    def _is_free(self) -> bool:
        """Whether the plain step does what was pinned: it saves all, but for its own recompute."""
        pinned = self.items.pinned
        return rules.is_free(pinned) and not (pinned and self._has_own_recompute)

    @functools.cached_property
    def _has_own_recompute(self) -> bool:
        """Whether the user's own ``jax.checkpoint`` recomputes something."""
        return any(op.recomputed for op, _ in walk(self._plain.emission.timeline.graph))

    @property
    def _is_small(self) -> bool:
        operations = sum(1 for _ in walk(self._plain.emission.timeline.graph))
        return operations <= SMALL and self.attempts.compiles.most_code <= SHORT
