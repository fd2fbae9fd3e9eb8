"""The gate: what every plan is held against at the end of planning, whatever made it.

It goes by the plan and by what the compiler says of its program, not by what the search believes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jdelta._src.decision import Decision
from jdelta._src.errors import BudgetError, OffloadError, PlanMismatchError, SpillError
from jdelta._src.hlo.host_buffers import without_place
from jdelta._src.passes.spill_record import check_spilled
from jdelta._src.program.graph import TRANSFER, Graph
from jdelta._src.program.loop_nest import OUTSIDE, Nest
from jdelta._src.residuals.residual import Residual
from jdelta._src.search.candidate import Candidate, CompiledCandidate
from jdelta._src.search.messages import not_there, wrong_order
from jdelta._src.sizes import format_bytes, format_some


@dataclass(frozen=True)
class Limits:
    """What a plan must keep to, bytes per device.

    Attributes:
        peak: The budget.
        host: What may be offloaded.
        files: What may be in files at once.
    """

    peak: int
    host: float
    files: float


def verify(candidate: Candidate, residuals: Sequence[Residual], limits: Limits) -> None:
    """Refuse a plan whose compiled program is not what it says.

    Raises:
        BudgetError: The program needs more than the budget.
        OffloadError: It does not hold on the host what the plan puts there, or more than there is
            room for, or fetches it in the wrong order.
        SpillError: The same for files.
        PlanMismatchError: The program was not made by the plan's decisions, or lacks values that
            these keep.
    """
    candidate = _fitting(candidate, limits.peak)
    if candidate.decisions is None:
        return
    check_names(candidate, residuals)
    if fault := host_fault(candidate, residuals):
        raise fault
    _check_host_room(candidate, residuals, limits.host)
    _check_files(candidate, candidate.decisions, residuals, limits.files)


def _fitting(candidate: Candidate, bound: int) -> CompiledCandidate:
    """The candidate, if it was compiled and needs no more than the budget.

    Raises:
        BudgetError: It was not, or needs more.
    """
    if not isinstance(candidate, CompiledCandidate):
        raise BudgetError("The plan was not compiled, so nothing says that it fits the budget.")
    if candidate.measurement.refused or candidate.peak > bound:
        raise BudgetError(
            f"The plan's compiled program needs {format_bytes(candidate.peak)} per device, over "
            f"the budget of {format_bytes(bound)}. Raise the budget, or report this step: the "
            "search should not have chosen the plan."
        )
    return candidate


def check_names(candidate: Candidate, residuals: Sequence[Residual]) -> None:
    """Refuse a program that was not made by the decisions.

    Raises:
        PlanMismatchError: It is one.
    """
    policy, decisions = candidate.emission.policy, candidate.decisions
    if policy is None or decisions is None:
        raise PlanMismatchError("The plan decides about values, but its program has no policy.")
    said = {r.name: policy.decision(r.name, r.entering) for r in residuals}
    others = [name for name, decision in said.items() if decision is not decisions.get(name)]
    if others:
        raise PlanMismatchError(
            f"The compiled program was not made by the plan's decisions: {format_some(others, 5)} "
            "are decided otherwise."
        )
    if missing := sorted(policy.kept - candidate.emission.names):
        raise PlanMismatchError(
            f"The compiled program lacks {len(missing)} of the values that the plan keeps: "
            f"{format_some(missing, 5)}."
        )


def host_fault(candidate: CompiledCandidate, residuals: Sequence[Residual]) -> OffloadError | None:
    """What is wrong with the offload of a compiled program, if anything is."""
    away, measured = _away(candidate, residuals), candidate.measurement
    if measured.refused:
        return None
    if measured.wrong_fetches:
        return OffloadError(wrong_order(measured.wrong_fetches))
    missing = without_place(away, measured.host_buffers)
    if not missing and away and measured.host < max(away.values()):
        missing = [max(away, key=away.__getitem__)]
    return OffloadError(not_there(missing, away, measured)) if missing else None


def _away(candidate: Candidate, residuals: Sequence[Residual]) -> dict[str, int]:
    """From what a plan puts on the host to bytes."""
    decisions = candidate.decisions or {}
    return {r.name: r.bytes for r in residuals if decisions[r.name] is Decision.OFFLOAD}


def _check_host_room(
    candidate: CompiledCandidate, residuals: Sequence[Residual], room: float
) -> None:
    away = sum(_away(candidate, residuals).values())
    if away > room:
        raise OffloadError(
            f"The plan puts {format_bytes(away)} on the host, more than host_budget, "
            f"{format_bytes(round(room))}."
        )
    measured = candidate.measurement
    own = max(0, _copied_to_host(candidate.emission.timeline.graph) - away)
    if measured.host > room + own:
        raise OffloadError(
            f"The plan's compiled program holds {format_bytes(measured.host)} on the host, where "
            f"the plan puts {format_bytes(away)} and the step itself {format_bytes(own)}: more "
            f"than host_budget, {format_bytes(round(room))}, allows. Raise host_budget."
        )


def _copied_to_host(graph: Graph, nest: Nest = OUTSIDE) -> int:
    """Bytes per device that a program copies to the host: so many may be there at once."""
    copied = 0
    for op in graph.operations:
        if op.primitive == TRANSFER:  # what is fetched counts nothing: it is on the host
            copied += nest.trips * graph.values[op.inputs[0]].bytes
        copied += sum(_copied_to_host(body, nest.inside(op)) for body in op.bodies)
    return copied


def _check_files(
    candidate: CompiledCandidate,
    decisions: Mapping[str, Decision],
    residuals: Sequence[Residual],
    room: float,
) -> None:
    spilled = candidate.emission.spilled
    if spilled.bytes > room:
        raise SpillError(
            f"The plan holds {format_bytes(spilled.bytes)} in files at once, more than the limit "
            f"of spill, {format_bytes(round(room))}."
        )
    check_spilled(residuals, decisions, spilled, candidate.measurement.files)
