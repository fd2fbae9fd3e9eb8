"""The search for a plan: solve, trace, predict, compile, compare with the budget, correct."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax

from jdelta._src.decision import Decision
from jdelta._src.errors import BudgetError, OffloadError, SpillError
from jdelta._src.estimate.seconds import program_seconds
from jdelta._src.passes.emit import Emission, Step, emit
from jdelta._src.passes.spill_record import check_spilled
from jdelta._src.program.loop_nest import walk
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.region import Grouping
from jdelta._src.regions.trace import Trace
from jdelta._src.residuals.items import Items
from jdelta._src.search.candidate import (
    GOOD_USE,
    Candidate,
    CompiledCandidate,
    Found,
    Refused,
    above_plain,
    nothing_kept,
    too_small,
)
from jdelta._src.search.gate import host_fault
from jdelta._src.search.history import Compiles, Correction, History
from jdelta._src.sizes import Budget, format_bytes
from jdelta._src.solver.base import Solver
from jdelta._src.solver.problem import Problem
from jdelta._src.solver.solution import Outcome

MOST_COMPILES = 4
EARLY = 3
"""Compiles after which more layers in an iteration are thought of, if the budget is not used."""

MOST_TRACES = 5
"""Candidates traced and simulated for one compile."""

MAY_FIT = 1.15
"""Times the budget that the plain step may take by the simulation and still be compiled. That was
at most 6.5 % too high for plain steps (BERT-base on a v5e), on CUDA 1.2 % (jax 0.12.0.1)."""

MAY_BE_BELOW = 1.05
"""Times a peak that the floor of larger units may be predicted to take and still be compiled."""

FAR_BELOW = 0.7
"""Part of what is simulated below which a compiled peak says that the simulation is of no use."""

PROMISED = 0.95
"""Part of the floor that everything recomputed as by hand may be predicted to take and is compiled,
where that is only to say the floor."""

SURELY_BELOW = 0.9
"""Part of the budget that the simulated floor must stay below to go without compiling it."""

CLOSE = 0.02
"""Part of the budget that a candidate may leave, by its prediction."""

NEXT_TO_NOTHING = 0.02
"""Part of the budget that may be kept where as much as possible is to leave."""

ROW_PASSES = 6
"""Times that what layers have rows of passes through memory more if an iteration runs several: 5.4
by the instructions of a compiled GPT-2 (jax 0.12.0.1, cuda:h100, three layers)."""

SMALL = 1500
"""Operations of a step, loop bodies once, up to which compiling takes a second or two."""

FILLING = 6
"""Further compiles for a small step whose plan leaves much of the budget at a price; else one."""

WORTH = 0.005
"""Part of the regions' forward pass that more layers in an iteration must save to be worth it."""


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
    ):
        """Begin a search.

        Args:
            step: The step.
            items: What is to be decided.
            trace: The step as it was staged.
            solver: What decides.
            history: What searches with other budgets have learnt.
            before: The search for the same step with its loops as they are. Where that has a plan,
                this one may end without.
            alike: The plan that was found there.
        """
        self.step = step
        self.items = items
        self.trace = trace
        self.solver = solver
        pins = frozenset(items.pinned.items())
        spill = step.store and step.store.spill
        way = step.donate, step.updates_in_loops, spill
        key = (trace.fingerprint, step.target.name, way, items.problem, pins)
        self._compiles = before._compiles if before else Compiles(history.plans(key))
        self._correction = before._correction.copy() if before else Correction()
        self._emitted: dict[Policy | None, Emission] = {}
        self._plain = before._plain if before else self._of_plain()
        self._may_fail = before is not None and not (step.grouping.nested or step.grouping.coarse)
        self._alike = alike
        self._splitting = ROW_PASSES * trace.row_bytes / step.target.rates.bandwidth
        self._exceeding: list[CompiledCandidate] = []
        self._extra = self._splitting if step.grouping.layers > 1 else 0.0
        if step.grouping.nested:
            everything = items.decisions([Decision.RECOMPUTE] * len(items.problem.items))
            self._extra += items.recompute_seconds(everything)

    def bound(self, budget: Budget) -> int:
        """The budget in bytes; the plain step is compiled if it is a share, or may fit.

        It is compiled too where nothing can be decided: there is no other program then.
        """
        is_only = not self.items.residuals
        if budget.bytes is not None and not is_only and not self._may_fit(budget.bytes):
            return budget.bytes
        plain = self._plain = self._compile(self._plain)
        return budget.bytes or int((budget.share or 1.0) * plain.peak)

    def _fitting_plain(self, bound: int) -> CompiledCandidate | None:
        """The plain step, if that is the plan: it was compiled, and fits."""
        plain = self._plain
        if isinstance(plain, CompiledCandidate) and plain.peak <= bound and self._is_free:
            return plain
        return None

    def better_grouping(self, found: Found) -> Grouping | None:
        """How loops over layers should be run to be quicker within the budget, if there is a way.

        Args:
            found: What was found with the loops as they are. It may leave memory that another
                plan for them uses, which is no reason for a grouping.
        """
        capacity = max(0.0, float(found.budget - self._floor().predicted))
        trips = self.trace.trips

        def added(problem: Problem) -> float:
            problem = replace(problem, capacity=capacity)
            return problem.overhead(self.solver.solve(problem).decisions)

        seconds: dict[Grouping, float] = {}
        for layers in self.step.target.backend.loops.layers:
            apart = {name for name, count in trips.items() if count % layers == 0 < count - layers}
            seconds[Grouping(layers)] = added(self.items.in_parts(layers, apart)) + self._splitting
        worth = WORTH * sum(item.seconds for item in self.items.problem.items)
        enough = min(seconds.values()) + worth
        if enough > min(found.best.overhead, added(self.items.problem)):
            return None
        return next(grouping for grouping, s in seconds.items() if s <= enough)

    def known_grouping(self, bound: int, seconds: float) -> Grouping | None:
        """That of the quickest plan compiled so far that fits, if it adds less than ``seconds``."""
        known = self._compiles.quickest(bound)
        return known.grouping if known and known.overhead < seconds else None

    def promises(self, peak: int) -> bool:
        """Whether the floor may be below a peak, by its prediction."""
        return self._floor().predicted < MAY_BE_BELOW * peak

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
        if not self.items.residuals:
            raise nothing_kept(bound, self._compile(self._plain), self.trace.uncut)
        try:
            best, floor = self._improve(bound, most)
        except BudgetError as error:
            return self._met_otherwise(bound, error)
        best = self._filled(best, bound) if most >= MOST_COMPILES else best
        if self._plain_may_fit_after_all(best, bound):
            self._plain = self._compile(self._plain)
            if plain := self._fitting_plain(bound):
                return self._as_it_is(plain, bound)
        return self._found(best, bound, floor)

    def _as_it_is(self, plain: CompiledCandidate, bound: int) -> Found:
        """The plain step as the plan."""
        return Found(plain, bound, plain.peak, plain.peak, (), self._compiles.count)

    def _plain_may_fit_after_all(self, best: CompiledCandidate, bound: int) -> bool:
        """Whether compiling the plain step is worth it, by what was compiled for the best plan.

        A small step that stays in a TPU's on-chip memory takes much less than what is simulated,
        and about the same whatever is kept.
        """
        if not self._is_free or best.overhead <= 0.0 or isinstance(self._plain, CompiledCandidate):
            return False
        is_far_off = self._is_small and best.peak < FAR_BELOW * best.emission.simulated
        return is_far_off or self._expected(self._plain) <= bound

    def settled(self, found: Found) -> Found:
        """What was found, with its floor compiled and no higher than any peak that was reached.

        Simulated floors were up to 28 % too low, and on TPUs, where a small step stays in on-chip
        memory, below zero once corrected by larger plans. So one that was not compiled is called an
        estimate, and is taken only after four programs that each took what was predicted.
        """
        if found.best.decisions is None:
            return found
        floor = self._settled_floor()
        plain = self._plain.peak if isinstance(self._plain, CompiledCandidate) else None
        known = [self._compiles.least, found.best.peak, plain]
        known += [None if "floor" in found.estimates else found.floor]
        least = min(self._expected(floor), *filter(None, known))
        called = {"floor": not isinstance(floor, CompiledCandidate), "ceiling": plain is None}
        return replace(
            found,
            floor=least,
            ceiling=max(least, found.ceiling if plain is None else plain),
            estimates=tuple(e for e in found.estimates if called[e]),
            compiles=self._compiles.count,
        )

    def _settled_floor(self) -> Candidate:
        """Everything recomputed; of a small step also with what enters units on the host.

        Not compiled where what was compiled took what was predicted: the first of the two after
        four programs, the second after the first.
        """
        floor, near = self._floor(), self.items
        is_sure = self._compiles.count >= MOST_COMPILES and self._compiles.are_foretold
        # A plan that does what it says is no worse for a floor that the compiler fails at.
        with contextlib.suppress(OffloadError, SpillError, jax.errors.JaxRuntimeError):
            if not is_sure or self._was_compiled(floor):
                floor = compiled = self._compile(floor)
                policy = floor.emission.policy
                if self._is_small and policy and policy.writes_bits:  # else none promises less
                    floor = self._less_by_hand(compiled, PROMISED * compiled.peak)
            if self.items.deep and self._is_small:
                are_foretold = self._compiles.are_foretold
                if isinstance(floor, CompiledCandidate) and not are_foretold:
                    floor = self._deep_floor(floor)
                else:
                    floor = self._expected_deep(floor)
        self.items = near
        return floor

    def _expected_deep(self, floor: Candidate) -> Candidate:
        """The floor with what enters the units on the host too, if less is predicted for that."""
        self.items = self.items.with_boundaries()
        deep = self._floor(least=True)
        return deep if self._expected(deep) < self._expected(floor) else floor

    def _found(self, best: CompiledCandidate, bound: int, floor: Candidate) -> Found:
        """The outcome, its floor and ceiling as far as they are known by now."""
        estimates = {"floor": floor, "ceiling": self._plain}
        least = min(self._expected(floor), best.peak)
        return Found(
            best,
            bound,
            least,
            max(least, self._expected(self._plain)),
            tuple(
                name
                for name, figure in estimates.items()
                if not isinstance(figure, CompiledCandidate)
            ),
            self._compiles.count,
            self._refused(best, bound),
        )

    def _met_otherwise(self, bound: int, error: BudgetError) -> Found:
        """What meets the budget though it is below the floor: the plain step, or a known plan.

        A step with a ``jax.checkpoint`` of the user's may take less as it is.

        Raises:
            BudgetError: Nothing does.
        """
        if self._may_fail:
            raise error
        plain = self._plain = self._compile(self._plain)
        if self._fitting_plain(bound):
            return self._as_it_is(plain, bound)
        known = self._remembered(bound, self._floor())
        best = self._tried(known) if known else None
        if best and best.peak <= bound:
            return self._found(best, bound, best)
        if self._is_free and error.floor is not None and plain.peak < error.floor:
            floor, platform = self._compile(self._floor()), self.step.target.platform
            raise above_plain(bound, plain, floor, self.items.residuals, platform) from None
        raise error

    def _filled(self, best: CompiledCandidate, bound: int) -> CompiledCandidate:
        """A quicker plan, where one leaves much of the budget at a price: found by compiling.

        The simulation may be far off for a small step, so that nothing larger seemed to fit.
        """
        most = self._compiles.count + (FILLING if self._is_small else 1)
        fits = self._kept_bytes(best)
        exceeds = sum(item.bytes for item in self.items.problem.items if item.needed)
        seen: list[Mapping[str, Decision] | None] = [best.decisions]
        for _ in range(2 * FILLING if self._is_small else 0):
            if self._compiles.count >= most or not best.leaves_much(bound):
                return best
            capacity = (fits + exceeds) / 2
            candidate = self._decide(capacity)
            if candidate.decisions in seen or candidate.overhead >= best.overhead:
                fits = capacity
                continue
            seen.append(candidate.decisions)
            tried = self._tried(candidate)
            if tried is None:
                continue
            if tried.peak > bound:
                exceeds = capacity
            else:
                fits = capacity
                best = tried if tried.overhead <= best.overhead else best
        return self._with_single_values(best, bound, most)

    def _with_single_values(
        self, best: CompiledCandidate, bound: int, most: int
    ) -> CompiledCandidate:
        """The plan with one value more saved, and one more, as long as it fits."""
        while self._compiles.count < most and best.leaves_much(bound):
            candidate = self._with_one_more(best)
            tried = self._tried(candidate) if candidate else None
            if tried is None or tried.peak > bound or tried.overhead >= best.overhead:
                break
            best = tried
        return best

    def _with_one_more(self, best: Candidate) -> Candidate | None:
        """The plan with one more value saved, that which saves most; None if none does."""
        decisions = best.decisions or {}
        dropped = [
            r
            for r in self.items.residuals
            if r.needed and r.name not in self.items.pinned
            if decisions[r.name] is not Decision.SAVE and r.seconds > r.holding
        ]
        for r in sorted(dropped, key=lambda r: r.holding - r.seconds)[:MOST_TRACES]:
            more = {**decisions, r.name: Decision.SAVE}
            candidate = self._priced(more, Outcome.HEURISTIC, self._policy(more))
            if candidate.overhead < best.overhead:
                return candidate
        return None

    def _kept_bytes(self, candidate: Candidate) -> float:
        decisions = candidate.decisions or {}
        return sum(
            item.bytes for item in self.items.problem.items if decisions[item.name] is Decision.SAVE
        )

    def _refused(self, best: CompiledCandidate, bound: int) -> Refused | None:
        """What would be saved next, had it fitted: of the quicker plans that were too large.

        That of them that needs least.
        """
        quicker = [c for c in self._exceeding if c.overhead < best.overhead and c.peak > bound]
        if not best.leaves_much(bound) or not quicker:
            return None
        least, had = min(quicker, key=lambda c: c.peak), best.decisions or {}
        more = [
            r
            for r in self.items.residuals
            if (least.decisions or {})[r.name] is Decision.SAVE is not had[r.name]
        ]
        more.sort(key=lambda r: -r.bytes)
        names = tuple(r.name for r in more)
        return Refused(names, sum(r.bytes for r in more), least.peak) if names else None

    def own_recompute(self) -> float:
        """Seconds that the user's own ``jax.checkpoint`` adds to the plain step."""
        target = self.step.target
        if not any(op.again for op, _ in walk(self._plain.emission.timeline.graph)):
            return 0.0
        without = program_seconds(self.trace.graph, target.rates, target.platform)
        return max(0.0, self._seconds(self._plain) - without)

    @property
    def _is_free(self) -> bool:
        """Whether the user pinned nothing but what stays on the device."""
        return not set(self.items.pinned.values()) - {Decision.SAVE}

    @property
    def _is_small(self) -> bool:
        operations = walk(self._plain.emission.timeline.graph)
        return sum(1 for _ in operations) <= SMALL

    def _floor(self, *, least: bool = False) -> Candidate:
        """Everything recomputed, not compiled; with ``least``, nothing spent on overlap."""
        decisions = self.items.decisions([Decision.RECOMPUTE] * len(self.items.problem.items))
        return self._priced(decisions, Outcome.HEURISTIC, self._policy(decisions, least=least))

    def _seconds(self, candidate: Candidate) -> float:
        """Of a step, by the instructions of its program as traced."""
        target, graph = self.step.target, candidate.emission.timeline.graph
        return program_seconds(graph, target.rates, target.platform)

    def _compiled_floor(self, bound: int) -> CompiledCandidate:
        """The plan with the least peak; if need be what enters the units is on the host too.

        Before that, XLA is left to itself as by hand (`Policy.is_by_hand`). And next to nothing is
        kept: indices of rows take less than what they are computed from. If files are at hand, as
        much leaves as is quicker than recompute: what a CPU recomputes for a unit may take more
        memory than the same values that come back from files.

        Raises:
            BudgetError: It does not fit.
        """
        floor = self._compile(self._floor())
        if floor.peak > bound:
            floor = self._less_by_hand(floor)
        if floor.peak > bound:
            little = self._next_to_nothing_kept(bound)
            promises = self.step.store or little.predicted < floor.peak
            tried = self._tried(little) if promises else None
            floor = tried if tried and tried.peak < floor.peak else floor
        if floor.peak > bound and self.items.deep:
            floor = self._deep_floor(floor)
        if floor.peak > bound:
            least = min(filter(None, (floor.peak, self._compiles.least)))
            raise too_small(bound, floor, least, self.items.residuals, self.step.target.platform)
        return floor

    def _less_by_hand(self, floor: CompiledCandidate, most: float = math.inf) -> CompiledCandidate:
        """The floor, or everything recomputed as by hand, if that is compiled to less.

        By hand a unit computes its result again although the next unit has it, so it need not stay
        until the unit's own backward pass. XLA compiles it if that makes another program, and if at
        most ``most`` bytes are predicted.
        """
        policy, decisions = floor.emission.policy, floor.decisions
        assert policy is not None
        assert decisions is not None
        by_hand = self._policy_of(self.items.decisions_by_hand(decisions), least=True)
        differs = policy.may_differ_from_by_hand or policy.kept != by_hand.kept
        if not differs and not self.step.target.backend.transfers.are_tied:
            return floor
        candidate = self._priced(decisions, Outcome.HEURISTIC, by_hand)
        if candidate.predicted > most:
            return floor
        more = max(0.0, self._seconds(candidate) - self._seconds(floor))
        candidate = replace(candidate, overhead=floor.overhead + more)
        return min(floor, self._compile(candidate), key=lambda c: c.peak)

    def _deep_floor(self, floor: CompiledCandidate) -> CompiledCandidate:
        """The least peak with what enters the units on the host too, nothing spent on overlap.

        Larger plans, in which transfers are timed again, may put it there as well.
        """
        near, self.items = self.items, self.items.with_boundaries()
        with contextlib.suppress(OffloadError, SpillError):
            deep = self._compile(self._floor(least=True))
            if not self._offload_failed(deep) and deep.peak < floor.peak:
                return deep
        self.items = near
        return floor

    def _improve(self, bound: int, most: int) -> tuple[CompiledCandidate, Candidate]:
        """The best plan found for the budget, and the floor.

        The floor is compiled only where it is in doubt that it fits, and where nothing else does;
        and not at all where another search has a plan.
        """
        floor: Candidate = self._floor()
        best: CompiledCandidate | None = None
        if floor.predicted > SURELY_BELOW * bound and not self._may_fail:
            count = self._compiles.count
            floor = best = self._compiled_floor(bound)
            if self._compiles.count > count:  # so that one more plan is tried
                most = max(most, self._compiles.count + 1)
        tolerances = self.step.target.backend.tolerances
        most += tolerances.compiles_for_spill if self.step.store else 0
        known = self._remembered(bound, floor)
        most -= known is not None and not self._was_compiled(known)
        lost = tolerances.lost * bound
        excess, exceeded, files_tried = 0, 0, False
        for _ in range(most):  # a program compiled before does not count
            if self._compiles.count >= most:
                break
            if best is None and not self._may_fail and excess > lost:
                floor = best = self._compiled_floor(bound)
                continue
            last = self._compiles.count == most - 1
            in_doubt = exceeded > 1 or (last and (best is None or exceeded > 0))
            safe = in_doubt and (best is None or best is floor)
            goal = bound - _margin(excess, bound, safe=safe)
            if isinstance(floor, CompiledCandidate) and goal <= floor.peak:  # nothing is below
                goal = (floor.peak + bound) // 2
            candidate = self._fit(floor, goal)
            # With the floor's error, what recomputes little may be predicted too high.
            if candidate.decisions == floor.decisions and self.step.store and not files_tried:
                candidate, files_tried = self._next_to_nothing_kept(bound), True
            if candidate.decisions == (best or floor).decisions:
                break
            tried = self._tried(candidate)
            if tried is None:
                continue
            quicker_near = self._better_without_offload(tried)
            if quicker_near:
                self.items = self.items.without(Decision.OFFLOAD)
            if tried.peak > bound:
                excess, exceeded = tried.peak - bound, exceeded + 1
            elif best is None or tried.overhead <= best.overhead:
                best = tried
                if tried.peak >= GOOD_USE * bound and not quicker_near:
                    break
        if known and (best is None or known.overhead < best.overhead):
            tried = self._tried(known)
            if tried and tried.peak <= bound and (best is None or tried.overhead < best.overhead):
                best = tried
        if best is None and self._may_fail:
            raise BudgetError(f"No plan within {format_bytes(bound)} after {most} compiles.")
        if best is None:
            floor = best = self._compiled_floor(bound)
        return best, floor

    def _remembered(self, bound: int, floor: Candidate) -> Candidate | None:
        """The fastest plan that was compiled for another budget and fits this one too."""
        known = self._compiles.quickest(bound, self.step.grouping)
        if known is None:
            return None
        policy, residuals = known.policy, self.items.residuals
        decisions = {r.name: policy.decision(r.name, r.entering) for r in residuals}
        if decisions == floor.decisions:
            return None
        return self._priced(decisions, Outcome.HEURISTIC, policy)

    def _fit(self, floor: Candidate, goal: int) -> Candidate:
        """The fastest candidate whose predicted peak is within ``goal``: a bracketed search.

        A byte kept seldom moves the peak by just a byte, since it may not be alive at the peak.
        """
        best = floor
        fits, exceeds = 0.0, math.inf
        capacity = float(goal - self._expected(floor))
        seen: list[Mapping[str, Decision] | None] = []
        for _ in range(MOST_TRACES):
            candidate = self._decide(capacity)
            spare = goal - candidate.predicted
            if spare >= 0 and candidate.overhead <= best.overhead:
                best = candidate
            if 0 <= spare <= CLOSE * goal or candidate.overhead == 0.0:
                break
            fits, exceeds = (capacity, exceeds) if spare >= 0 else (fits, capacity)
            # The same candidate again: further each time, since items are not arbitrarily small.
            further = seen.count(candidate.decisions) * goal // 50
            seen.append(candidate.decisions)
            capacity += spare + further if spare >= 0 else spare - further
            if not fits < capacity < exceeds:
                capacity = (fits + exceeds) / 2
        return best

    def _decide(self, capacity: float) -> Candidate:
        problem = replace(self.items.problem, capacity=capacity)
        solution = self.solver.solve(problem)
        try:
            return self._candidate(solution.decisions, solution.outcome)
        except OffloadError as error:
            self._close(error, Decision.OFFLOAD, Decision.SPILL)
        except SpillError as error:
            self._close(error, Decision.SPILL)
        return self._decide(capacity)

    def _close(self, error: Exception, *ways: Decision) -> None:
        """Go on without ways that have failed, unless the user asked for them."""
        if set(ways) & set(self.items.pinned.values()):
            raise error
        self.items = self.items.without(*ways)

    def _next_to_nothing_kept(self, bound: int) -> Candidate:
        """What the cheapest ways to leave the device make; for nothing at all they are not refined.

        See ``_REFINED`` of the solver's frontier.
        """
        return self._decide(NEXT_TO_NOTHING * bound)

    def _candidate(self, chosen: Sequence[Decision], outcome: Outcome) -> Candidate:
        decisions = self.items.decisions(chosen)
        return self._priced(decisions, outcome, self._policy(decisions))

    def _policy(self, decisions: Mapping[str, Decision], *, least: bool = False) -> Policy:
        return self._policy_of(self.items.policy_decisions(decisions), least=least)

    def _policy_of(self, names: Mapping[str, Decision], *, least: bool) -> Policy:
        trace = self.trace
        return Policy.of(
            names,
            trace.loops,
            self.step.target.platform,
            least=least,
            partly=trace.partly,
            together=trace.together,
        )

    def _priced(
        self, decisions: Mapping[str, Decision], outcome: Outcome, policy: Policy
    ) -> Candidate:
        emission = self._emit(policy)
        overhead = self.items.overhead(decisions) + self._extra
        predicted = self._correction.predicted(emission)
        return Candidate(decisions, overhead, emission, predicted, outcome)

    def _of_plain(self) -> Candidate:
        emission = self._emit(None)
        return Candidate(None, 0.0, emission, self._correction.predicted(emission))

    def _emit(self, policy: Policy | None) -> Emission:
        if policy not in self._emitted:
            self._emitted[policy] = emit(self.step, policy)
        return self._emitted[policy]

    def _was_compiled(self, candidate: Candidate) -> bool:
        return self._compiles.has(self.step.grouping, candidate.emission.policy)

    def _tried(self, candidate: Candidate) -> CompiledCandidate | None:
        """The candidate, compiled; None if the program does not do what it says.

        The way that failed is closed then.
        """
        try:
            tried = self._compile(candidate)
        except SpillError as error:
            self._close(error, Decision.SPILL)
            return None
        if self._offload_failed(tried):
            self.items = self.items.without(Decision.OFFLOAD)
            return None
        return tried

    def _compile(self, candidate: Candidate) -> CompiledCandidate:
        """The candidate, compiled, unless it was before.

        Raises:
            SpillError: The program does not write and read what it should.
        """
        compiled = self._compiles.compiled(self.step, candidate)
        emission, decisions = compiled.emission, compiled.decisions
        measurement = compiled.measurement
        if decisions is not None and not measurement.refused:
            files = measurement.files
            check_spilled(self.items.residuals, decisions, emission.spilled, files)
            self._exceeding.append(compiled)
        if decisions is not None:
            self._correction.learn(compiled)
            compiled = replace(compiled, overhead=self._overhead(compiled, decisions))
        if emission.policy is not None and not self._offload_failed(compiled):
            overhead, peak = compiled.overhead, compiled.peak
            self._compiles.know(self.step.grouping, emission.policy, overhead, peak)
        return compiled

    def _overhead(self, candidate: CompiledCandidate, decisions: Mapping[str, Decision]) -> float:
        """Seconds that a plan adds, now that it is compiled.

        Transfers are as exposed as in its schedule. On GPUs, whose steps take about what their
        instructions do, these say what several layers in an iteration take more.
        """
        measurement = candidate.measurement
        alike, tolerances = self._alike, self.step.target.backend.tolerances
        by_overlap = tolerances.judges_by_overlap and not measurement.refused
        if alike and by_overlap:
            return alike.overhead + measurement.overlap.seconds - alike.measurement.overlap.seconds
        if measurement.host:
            rest = self.items.overhead_but_for_host(decisions)
            return rest + measurement.overlap.exposed + self._extra
        return candidate.overhead

    def _offload_failed(self, candidate: CompiledCandidate) -> bool:
        """Whether the compiled program does not offload what the plan does, or does it wrong.

        Raises:
            OffloadError: It does not, and the user asked for it.
        """
        fault = host_fault(candidate, self.items.residuals)
        if fault is None:
            return False
        decisions = candidate.decisions or {}
        if any(decisions[name] is Decision.OFFLOAD for name in self.items.pinned):
            raise fault
        return True

    def _better_without_offload(self, candidate: CompiledCandidate) -> bool:
        """Whether recompute alone is quicker than transfers as exposed as the compiler has them."""
        decisions, near = candidate.decisions, self.items.without(Decision.OFFLOAD)
        assert decisions is not None
        if near.problem == self.items.problem or Decision.OFFLOAD not in decisions.values():
            return False
        kept = sum(
            item.bytes for item in self.items.problem.items if decisions[item.name] is Decision.SAVE
        )
        solution = self.solver.solve(replace(near.problem, capacity=kept))
        seconds = self.items.overhead(near.decisions(solution.decisions)) + self._extra
        return seconds < candidate.overhead

    def _expected(self, candidate: Candidate) -> int:
        """Compiled peak, else the peak predicted with all that is known by now."""
        if isinstance(candidate, CompiledCandidate):
            return candidate.peak
        return self._correction.predicted(candidate.emission)

    def _may_fit(self, bound: int) -> bool:
        """Whether compiling the plain step is worth it."""
        return self._plain.predicted <= MAY_FIT * bound


def _margin(excess: int, bound: int, *, safe: bool) -> int:
    """How far below the budget to aim after a plan exceeded it, ``safe`` if none may again."""
    excess = min(excess, bound // 10)
    return 2 * excess + bound // 50 if safe else excess // 4 + bound // 100
