"""Proposes candidates for a search: solves, traces, predicts. Nothing is compiled here."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jdelta._src.decision import Decision
from jdelta._src.errors import OffloadError, PlanMismatchError, SpillError
from jdelta._src.estimate.seconds import program_seconds
from jdelta._src.passes.emit import Emission, Step, emit
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import Trace
from jdelta._src.residuals.items import Items
from jdelta._src.residuals.residual import Residual
from jdelta._src.search.candidate import Candidate, CompiledCandidate
from jdelta._src.search.capacities import Ends, Proposal, between_larger, quickest
from jdelta._src.search.chain import Chain, chain_of
from jdelta._src.search.history import Correction
from jdelta._src.search.reruns import rerun_seconds
from jdelta._src.search.rules import saved_bytes
from jdelta._src.solver.base import Solver
from jdelta._src.solver.problem import Problem
from jdelta._src.solver.solution import Outcome

MOST_TRACES = 5
"""Candidates traced and simulated for one compile."""

CLOSE = 0.02
"""Part of the budget that a candidate may leave, by its prediction."""

NEXT_TO_NO_SECONDS = 0.002
"""Part of the plain step for which no further candidate is traced."""

NEXT_TO_NOTHING = 0.02
"""Part of the budget that may be kept where as much as possible is to leave."""

MOST_FORWARD = 3
"""Forward passes that a plan of the least peak may take more, beside one for each region."""

ROW_PASSES = 6
"""Times that what layers have rows of passes through memory more if an iteration runs several: 5.4
by the instructions of a compiled GPT-2 (jax 0.12.0.1, cuda:h100, three layers)."""


class Proposals:
    """Candidates for a step, with what is known of it by now.

    Attributes:
        step: The step.
        items: What is to be decided, by the links that are still open.
        trace: The step as it was staged.
        solver: What decides.
        correction: How far simulated peaks are off.
        splitting_seconds: What a step takes longer if an iteration of its loops runs several
            layers.
        extra_seconds: What the way that loops are run adds to each plan.
    """

    def __init__(
        self,
        step: Step,
        items: Items,
        trace: Trace,
        solver: Solver,
        correction: Correction,
        *,
        may_nest: bool,
    ):
        """Begin to propose.

        Args:
            step: The step.
            items: What is to be decided.
            trace: The step as it was staged.
            solver: What decides.
            correction: How far simulated peaks are off.
            may_nest: Whether what enters regions may be computed again, too.
        """
        self.step = step
        self.items = items
        self.trace = trace
        self.solver = solver
        self.correction = correction
        self._may_nest = may_nest
        self.splitting_seconds = ROW_PASSES * trace.row_bytes / step.target.rates.bandwidth
        self.extra_seconds = self.splitting_seconds if step.grouping.layers > 1 else 0.0
        if step.grouping.nested:
            self.extra_seconds += items.recompute_seconds(_nothing_kept(items))
        if states := step.grouping.states:
            target = step.target
            self.extra_seconds += rerun_seconds(trace.graph, states, target.rates, target.backend)
        self._emitted: dict[Policy | None, Emission] = {}
        self._seconds: dict[Policy | None, float] = {}
        self._dropped: dict[tuple[tuple[str, int], ...], float] = {}
        self._known: dict[Policy | None, Proposal] = {}
        self._known_for: Items | None = None
        self._least = 0.0

    def plain(self) -> Candidate:
        """The step as it is."""
        emission = self._emit(None)
        return Candidate(None, 0.0, emission, self.correction.predicted(emission))

    def floor(self, *, least: bool = False) -> Candidate:
        """Everything recomputed; with ``least``, nothing spent on overlap."""
        decisions = _nothing_kept(self.items)
        return self._priced(decisions, Outcome.HEURISTIC, self._policy(decisions, least=least))

    def floor_by_hand(self, floor: Candidate) -> Candidate | None:
        """Everything recomputed as by hand, if that makes another program.

        By hand a region computes its result again although the next region has it, so it need not
        stay until the region's own backward pass.
        """
        policy, decisions = floor.emission.policy, floor.decisions
        assert policy is not None
        assert decisions is not None
        by_hand = self._policy_of(self.items.decisions_by_hand(decisions), least=True)
        differs = policy.may_differ_from_by_hand or policy.kept != by_hand.kept
        if not differs and not self.step.target.backend.transfers.are_tied:
            return None
        candidate = self._priced(decisions, Outcome.HEURISTIC, by_hand)
        more = max(0.0, self.seconds(candidate) - self.seconds(floor))
        return replace(candidate, overhead=floor.overhead + more)

    def dropping_inputs(self, goal: int) -> Candidate | None:
        """Everything recomputed, and as much of what enters regions as a peak in bytes asks for.

        Returns:
            The quickest that is predicted to need no more; None if none is.
        """
        chain = self._chain
        if chain is None:
            return None
        room = float(goal - self._beside_temporaries)
        for _ in range(MOST_TRACES):
            levels = chain.levels(room)
            candidate = None if levels is None else self._dropping(levels)
            if candidate is None or candidate.predicted <= goal:
                return candidate
            room = chain.solved.less(room, candidate.predicted - goal)
        return None

    def dropping_most_inputs(self) -> Candidate | None:
        """The least peak with what enters regions dropped at a price that anyone would pay."""
        chain = self._chain
        if chain is None:
            return None
        levels = chain.levels(chain.solved.least(MOST_FORWARD))
        return None if levels is None else self._dropping(levels)

    def least_predicted(self) -> int:
        """About the least peak that is predicted of a plan with nothing on the host, bytes."""
        floor, chain = self.floor().predicted, self._chain
        if chain is None:
            return floor
        return min(floor, round(chain.solved.least(MOST_FORWARD)) + self._beside_temporaries)

    def promised_seconds(self, goal: int) -> float:
        """About the seconds that a plan within a peak in bytes adds; infinity if there is none."""
        room = goal - self.floor().predicted
        if room >= 0:
            problem = replace(self.items.problem, capacity=float(room))
            return self.solved_seconds(problem) + self.extra_seconds
        dropping = self.dropping_inputs(goal)
        return min(dropping.overhead if dropping else math.inf, self.moving_seconds(goal))

    def moving_seconds(self, goal: int) -> float:
        """About the same where what enters regions may leave the device."""
        deep = self.items.deep
        if deep is None:
            return math.inf
        leaving = (item for item in deep.items if item.name in self.items.leaving)
        moved = sum(item.bytes for item in leaving if item.needed)
        room = goal - (self.floor().predicted - moved)
        return self.solved_seconds(replace(deep, capacity=room)) if room >= 0 else math.inf

    @property
    def _beside_temporaries(self) -> int:
        """Bytes that a program is expected to need beside its simulated temporaries."""
        floor = self.floor()
        return self.expected(floor) - floor.emission.timeline.peak

    def _dropping(self, levels: Mapping[str, int]) -> Candidate | None:
        """The floor without some of what enters regions; None where that cannot be written."""
        try:
            return self._priced(*self._decided_without(levels))
        except PlanMismatchError:
            return None

    def _decided_without(
        self, levels: Mapping[str, int]
    ) -> tuple[dict[str, Decision], Outcome, Policy]:
        """What is decided at the floor without some of what enters regions."""
        dropped = (r.name for r in self.items.residuals if (r.entering or r.name) in levels)
        decisions = _nothing_kept(self.items) | dict.fromkeys(dropped, Decision.RECOMPUTE)
        return decisions, Outcome.HEURISTIC, self._policy(decisions).dropping(levels)

    def _dropping_seconds(self, levels: tuple[tuple[str, int], ...]) -> float:
        """What it adds to the floor to drop what enters regions, of which no problem knows."""
        if levels and levels not in self._dropped:
            *_, policy = self._decided_without(dict(levels))
            more = self._seconds_of(self._emit(policy)) - self.seconds(self.floor())
            self._dropped[levels] = max(0.0, more)
        return self._dropped.get(levels, 0.0)

    @functools.cached_property
    def _chain(self) -> Chain | None:
        """The regions as a chain; None where what enters them cannot be dropped."""
        items, emission = self.items, self.floor().emission
        if not emission.is_written or not self._may_nest:
            return None
        pinned = (r for r in items.residuals if r.name in items.pinned)
        stay = {r.entering or r.name for r in pinned}
        return chain_of(emission.timeline, stay, self.step.target)

    def keeping(self, capacity: float) -> Candidate:
        """The solver's candidate that keeps so many bytes at most.

        A link that JAX cannot use is closed.

        Raises:
            OffloadError: JAX cannot put on the host what the user pinned there.
            SpillError: The same for files.
        """
        solution = self.solver.solve(replace(self.items.problem, capacity=capacity))
        decisions = self.items.decisions(solution.decisions)
        try:
            return self._priced(decisions, solution.outcome, self._policy(decisions))
        except OffloadError as error:
            self.close(error, Decision.OFFLOAD, Decision.SPILL)
        except SpillError as error:
            self.close(error, Decision.SPILL)
        return self.keeping(capacity)

    def keeping_next_to_nothing(self, bound: int) -> Candidate:
        """What the cheapest moves off the device make; for nothing at all they are not refined.

        See ``_REFINED`` of the solver's frontier.
        """
        return self.keeping(NEXT_TO_NOTHING * bound)

    def fitting(self, floor: Candidate, goal: int) -> Candidate:
        """The fastest candidate whose predicted peak is within ``goal``: a bracketed search.

        A byte kept seldom moves the peak by just a byte, since it may not be alive at the peak. The
        search goes on from what was proposed before, predicted with all that is known by now, and
        ends where what is left would save next to nothing.
        """
        enough = NEXT_TO_NO_SECONDS * self.seconds(self.plain())
        for _ in range(MOST_TRACES):
            proposals = self._proposals(floor)
            best, ends = quickest(proposals, goal), Ends.of(proposals, goal)
            if goal - CLOSE * goal <= best.peak <= goal or best.overhead - self._least <= enough:
                break
            is_equal = ends.above is not None and best.overhead - ends.above.overhead <= enough
            is_closed = is_equal or ends.are_closed(goal)
            capacity = between_larger(proposals, best, goal) if is_closed else ends.capacity(goal)
            if capacity is None:
                break
            self._propose(capacity)
        return quickest(self._proposals(floor), goal).candidate

    def _proposals(self, floor: Candidate) -> list[Proposal]:
        """What was proposed before, the floor first, predicted with all that is known by now."""
        self._forget_other_items()
        first = Proposal(floor, 0.0, 0.0, self.expected(floor))
        known = self._known.values()
        return [first, *(p.predicted_anew(self.expected(p.candidate)) for p in known)]

    def _propose(self, capacity: float) -> None:
        """Add the candidate that keeps so many bytes at most to what was proposed."""
        candidate = self.keeping(capacity)
        self._forget_other_items()
        policy, kept = candidate.emission.policy, saved_bytes(candidate, self.items)
        if policy in self._known:
            capacity = max(capacity, self._known[policy].capacity)
        self._known[policy] = Proposal(candidate, capacity, kept, candidate.predicted)

    def _forget_other_items(self) -> None:
        """Begin anew where a link was closed since something was proposed."""
        if self._known_for is not self.items:
            problem = replace(self.items.problem, capacity=math.inf)
            self._least = self.solved_seconds(problem) + self.extra_seconds
            self._known, self._known_for = {}, self.items

    def with_one_more(self, best: Candidate) -> Candidate | None:
        """The plan with one more value saved, the one which saves most; None if none does."""
        decisions = best.decisions or {}
        for r in by_worth(self.items, decisions)[:MOST_TRACES]:
            more = {**decisions, r.name: Decision.SAVE}
            policy = self._policy(more).dropping(dict(best.levels))
            candidate = self._priced(more, Outcome.HEURISTIC, policy)
            if candidate.overhead < best.overhead:
                return candidate
        return None

    def known(self, policy: Policy, floor: Candidate) -> Candidate | None:
        """The candidate that a policy makes; None if it is the floor."""
        decisions = {r.name: policy.decision(r.name, r.entering) for r in self.items.residuals}
        if decisions == floor.decisions:
            return None
        return self._priced(decisions, Outcome.HEURISTIC, policy)

    def close(self, error: Exception, *failed: Decision) -> None:
        """Go on without links that have failed.

        Raises:
            Exception: The user asked for one of them.
        """
        if set(failed) & set(self.items.pinned.values()):
            raise error
        self.items = self.items.without(*failed)

    def expected(self, candidate: Candidate) -> int:
        """Compiled peak, else the peak predicted with all that is known by now, bytes."""
        if isinstance(candidate, CompiledCandidate):
            return candidate.peak
        return self.correction.predicted(candidate.emission)

    def seconds(self, candidate: Candidate) -> float:
        """Of a step, by the instructions of its program as traced."""
        return self._seconds_of(candidate.emission)

    def _seconds_of(self, emission: Emission) -> float:
        if emission.policy not in self._seconds:
            target, graph = self.step.target, emission.timeline.graph
            self._seconds[emission.policy] = program_seconds(graph, target.rates, target.backend)
        return self._seconds[emission.policy]

    def solved_seconds(self, problem: Problem) -> float:
        """What the solver's decisions add to the step."""
        return problem.overhead(self.solver.solve(problem).decisions)

    def _policy(self, decisions: Mapping[str, Decision], *, least: bool = False) -> Policy:
        return self._policy_of(self.items.policy_decisions(decisions), least=least)

    def _policy_of(self, names: Mapping[str, Decision], *, least: bool) -> Policy:
        trace = self.trace
        return Policy.of(
            names,
            trace.loops,
            self.step.target.backend,
            least=least,
            partly=trace.partly,
            together=trace.together,
        )

    def _priced(
        self, decisions: Mapping[str, Decision], outcome: Outcome, policy: Policy
    ) -> Candidate:
        emission = self._emit(policy)
        overhead = self.items.overhead(decisions) + self.extra_seconds
        overhead += self._dropping_seconds(policy.levels)
        predicted = self.correction.predicted(emission)
        return Candidate(decisions, overhead, emission, predicted, outcome)

    def _emit(self, policy: Policy | None) -> Emission:
        if policy not in self._emitted:
            self._emitted[policy] = emit(self.step, policy)
        return self._emitted[policy]


def by_worth(items: Items, decisions: Mapping[str, Decision]) -> Sequence[Residual]:
    """The values that decisions do not save though they may, by the seconds that saving them saves.

    Those that save nothing are left out.
    """
    dropped = [
        r
        for r in items.residuals
        if r.needed and r.name not in items.pinned
        if decisions[r.name] is not Decision.SAVE and r.seconds > r.holding
    ]
    return sorted(dropped, key=lambda r: r.holding - r.seconds)


def _nothing_kept(items: Items) -> dict[str, Decision]:
    return items.decisions([Decision.RECOMPUTE] * len(items.problem.items))
