"""Compiles what a search proposes, and judges whether the program does what the plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from jdelta._src.decision import Decision
from jdelta._src.errors import SpillError
from jdelta._src.passes.spill_record import check_spilled
from jdelta._src.search import rules
from jdelta._src.search.candidate import Candidate, CompiledCandidate
from jdelta._src.search.gate import host_fault
from jdelta._src.search.history import Compiles
from jdelta._src.search.propose import Proposals

LEAST_PART = 0.9
"""Part of a program's peak that its arguments and results are, if no other plan is to be tried for
a budget below them."""


class Attempts:
    """What was compiled for a step, and what became of it.

    Attributes:
        compiles: The programs compiled so far.
        plans: All plans that were compiled and not refused, in that order.
    """

    def __init__(
        self,
        proposals: Proposals,
        compiles: Compiles,
        compiled_plain: Callable[[], CompiledCandidate],
        alike: CompiledCandidate | None = None,
    ):
        """Begin.

        Args:
            proposals: What proposes; it learns from each program, and of each link that failed.
            compiles: The programs compiled so far.
            compiled_plain: Compiles the plain step, unless it was compiled before.
            alike: The best plan with the loops as they are, if this is about another grouping.
        """
        self.compiles = compiles
        self.plans: list[CompiledCandidate] = []
        self._proposals = proposals
        self._compiled_plain = compiled_plain
        self._alike = alike

    @property
    def is_recompute_undone(self) -> bool:
        """Whether the compiler keeps what was to be computed again, so that no plan takes less.

        Loops are left out: what is computed again in them is. Files would be another way out.
        """
        step, trips = self._proposals.step, self._proposals.trace.trips
        if step.store or trips or not step.target.backend.tolerances.undoes_recompute:
            return False
        doubtful = [plan for plan in self.plans if plan.measurement.undone]
        return any(rules.is_recompute_undone(plan, self._compiled_plain()) for plan in doubtful)

    def is_hopeless(self, bound: int) -> bool:
        """Whether the programs compiled so far show that no plan fits a budget in bytes.

        The compiler keeps what was to be computed again. Or arguments and results alone exceed the
        budget, and one of the programs takes little more: so the floor that is said is near.
        """
        measured = [plan.measurement for plan in self.plans if plan.measurement.fixed > bound]
        is_near = any(LEAST_PART * m.peak <= m.fixed for m in measured)
        return is_near or self.is_recompute_undone

    def has(self, candidate: Candidate) -> bool:
        """Whether the candidate's program was compiled."""
        return self.compiles.has(self._proposals.step.grouping, candidate.emission.policy)

    def compile(self, candidate: Candidate) -> CompiledCandidate:
        """The candidate, compiled, unless it was before.

        Raises:
            SpillError: The program does not write and read what it should.
            OffloadError: It does not offload what the user pinned to the host.
        """
        proposals = self._proposals
        compiled = self.compiles.compiled(proposals.step, candidate)
        emission, measurement = compiled.emission, compiled.measurement
        proposals.correction.learn(compiled)
        if (decisions := compiled.decisions) is not None:
            if not measurement.refused:
                residuals, files = proposals.items.residuals, measurement.files
                check_spilled(residuals, decisions, emission.spilled, files)
                self.plans.append(compiled)
            compiled = replace(compiled, overhead=self._overhead(compiled, decisions))
        if emission.policy is not None and not self.offload_failed(compiled):
            overhead, peak = compiled.overhead, compiled.peak
            self.compiles.know(proposals.step.grouping, emission.policy, overhead, peak)
        return compiled

    def tried(self, candidate: Candidate) -> CompiledCandidate | None:
        """The candidate, compiled; None if the program does not do what it says.

        The link that failed is closed then.

        Raises:
            SpillError: The user asked for that link.
            OffloadError: The same.
        """
        try:
            compiled = self.compile(candidate)
        except SpillError as error:
            self._proposals.close(error, Decision.SPILL)
            return None
        if self.offload_failed(compiled):
            self._proposals.items = self._proposals.items.without(Decision.OFFLOAD)
            return None
        return compiled

    def offload_failed(self, candidate: CompiledCandidate) -> bool:
        """Whether the compiled program does not offload what the plan does, or does it wrong.

        Raises:
            OffloadError: It does not, and the user asked for it.
        """
        items = self._proposals.items
        fault = host_fault(candidate, items.residuals)
        if fault is None:
            return False
        decisions = candidate.decisions or {}
        if any(decisions[name] is Decision.OFFLOAD for name in items.pinned):
            raise fault
        return True

    def _overhead(self, candidate: CompiledCandidate, decisions: Mapping[str, Decision]) -> float:
        """Seconds that a plan adds, now that it is compiled.

        Transfers are as exposed as in its schedule. On GPUs, whose steps take about what their
        instructions do, these say what several layers in an iteration take more.
        """
        alike, measurement, proposals = self._alike, candidate.measurement, self._proposals
        by_overlap = proposals.step.target.backend.tolerances.judges_by_overlap
        if alike and by_overlap and not measurement.refused:
            return alike.overhead + measurement.overlap.seconds - alike.measurement.overlap.seconds
        if measurement.host:
            rest = proposals.items.overhead_but_for_host(decisions)
            return rest + measurement.overlap.exposed + proposals.extra_seconds
        return candidate.overhead
