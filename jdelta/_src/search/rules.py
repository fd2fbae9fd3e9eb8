"""The rules of a search: what to try next, and what to make of what was compiled.

Each is a function of records. None traces or compiles anything: `propose.py` and `attempts.py` do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jdelta._src.decision import Decision
from jdelta._src.regions.binomial import repeats
from jdelta._src.regions.cut import Cuts
from jdelta._src.regions.head_product import LargeHead
from jdelta._src.regions.region import Grouping
from jdelta._src.residuals.items import Items
from jdelta._src.residuals.residual import Residual
from jdelta._src.search.candidate import (
    GOOD_USE,
    Candidate,
    CompiledCandidate,
    Found,
    Refused,
)
from jdelta._src.solver.base import Solver

MAY_FIT = 1.15
"""Times the budget that the plain step may take by the simulation and still be compiled. That was
at most 6.5 % too high for plain steps (BERT-base on a v5e), on CUDA 1.2 % (jax 0.12.0.1)."""

MAY_BE_BELOW = 1.05
"""Times a peak that the floor of other regions may be predicted to take and still be compiled."""

CLEARLY_BELOW = 0.97
"""Part of the floor that another is to be predicted to take to be told in its place."""

FAR_BELOW = 0.7
"""Part of what is simulated below which a compiled peak says that the simulation is of no use."""

SURELY_BELOW = 0.97
"""Part of the budget that the simulated floor must stay below to go without compiling it."""

PROGRAMS_BEFORE_FLOOR = 4
"""Programs after which a small floor is believed without compiling it."""

DEAR = 0.05
"""Part of the plain step's seconds from which on a plan adds so much that other cuts are tried."""

OTHER_CUTS = tuple(Grouping(1, cuts=cuts) for cuts in (Cuts.IN_TURN, Cuts.FEW, Cuts.APART))
"""The other ways to cut a step, in the order in which they are tried."""

WORTH_COMPILING = 0.02
"""Part of the plain step's seconds that another plan must promise to save to be compiled, once one
is there that uses the budget fairly."""

MOST_REPEATS = 5
"""How often an iteration of a long loop may be run for a plan, beside in its own derivative."""

LARGE_HEAD = 0.1
"""Part of the budget that the logits must take for the head to be computed in pieces."""

LOGITS = 1 / 24
"""Part of the budget that the logits of a piece may take. Two or three such arrays are alive."""

PIECE = 512
"""Tokens of a piece at least: a product of fewer is slow."""

MOST_PIECES = 64
"""Pieces at most: each reads the head's weights, and adds to their gradient."""

UNDONE = 0.2
"""Part of what a plan promises to spare of the peak below which its recompute is taken as undone.
Four unrolled layers, planned to half for a CPU with jax 0.10.2, spared 5 % of that (22.4 MiB became
21.9, 11 were promised)."""

MUCH_SPARED = 0.1
"""Part of the plain step's peak that has to be promised for that."""

WORTH = 0.005
"""Part of the regions' forward pass that more layers in an iteration must save to be worth it."""


@dataclass(frozen=True)
class Trials:
    """What was compiled for a budget, and did what it said.

    Attributes:
        bound: The budget, bytes.
        floor: Everything recomputed, once it was compiled and fits.
        plans: The others, in the order in which they were compiled.
    """

    bound: int
    floor: CompiledCandidate | None = None
    plans: tuple[CompiledCandidate, ...] = ()

    def with_floor(self, floor: CompiledCandidate) -> Trials:
        """These, and the floor."""
        return replace(self, floor=floor)

    def with_plan(self, plan: CompiledCandidate) -> Trials:
        """These, and one plan more."""
        return replace(self, plans=(*self.plans, plan))

    @property
    def best(self) -> CompiledCandidate | None:
        """The quickest that fits, of equally quick ones the last; None if none does."""
        best = self.floor
        for plan in self.plans:
            if plan.peak <= self.bound and (best is None or plan.overhead <= best.overhead):
                best = plan
        return best

    @property
    def excess(self) -> int:
        """Bytes by which the last plan that exceeded the budget did; 0 if none did."""
        exceeding = [plan.peak - self.bound for plan in self.plans if plan.peak > self.bound]
        return exceeding[-1] if exceeding else 0

    @property
    def exceeded(self) -> int:
        """How many plans exceeded the budget."""
        return sum(plan.peak > self.bound for plan in self.plans)


def aim(trials: Trials, *, is_last: bool) -> int:
    """The peak in bytes to aim at with the next plan: lower after an overrun.

    Args:
        trials: What was compiled so far.
        is_last: Whether no other plan is compiled after this one.
    """
    bound, floor = trials.bound, trials.floor
    has_none = trials.best is None
    in_doubt = trials.exceeded > 1 or (is_last and (has_none or trials.exceeded > 0))
    must_fit = in_doubt and trials.best is floor  # both are None where there is no plan
    goal = bound - margin(trials.excess, bound, must_fit=must_fit)
    if floor and goal <= floor.peak:  # nothing is below the floor
        return (floor.peak + bound) // 2
    return goal


def margin(excess: int, bound: int, *, must_fit: bool) -> int:
    """How far below the budget to aim after a plan exceeded it, bytes.

    Args:
        excess: Bytes by which it did.
        bound: The budget, bytes.
        must_fit: Whether no other plan may exceed it.
    """
    excess = min(excess, bound // 10)
    return 2 * excess + bound // 50 if must_fit else excess // 4 + bound // 100


def is_floor_in_doubt(predicted: int, bound: int) -> bool:
    """Whether the floor may be above the budget, by its predicted peak in bytes."""
    return predicted > SURELY_BELOW * bound


def is_floor_believed(predicted: int, large: float, programs: int) -> bool:
    """Whether the floor need not be compiled where plans took what was predicted.

    Args:
        predicted: Its predicted peak, bytes.
        large: Bytes from which on the compiler's floors are as predicted.
        programs: How many programs were compiled.
    """
    return predicted >= large or programs >= PROGRAMS_BEFORE_FLOOR


def is_lost(trials: Trials, tolerated: float) -> bool:
    """Whether the floor is to be compiled next: nothing fits, and the last plan is far off.

    Args:
        trials: What was compiled so far.
        tolerated: Part of the budget by which a plan may exceed it.
    """
    return trials.best is None and trials.excess > tolerated * trials.bound


def uses_budget(trials: Trials) -> bool:
    """Whether the last plan is the best so far, and uses the budget."""
    last = trials.plans[-1]
    return trials.best is last and last.peak >= GOOD_USE * trials.bound


def is_worth_compiling(candidate: Candidate, trials: Trials, seconds: float) -> bool:
    """Whether a candidate promises enough beside the best plan so far.

    Args:
        candidate: What would be compiled next.
        trials: What was compiled so far.
        seconds: What the plain step takes.
    """
    best = trials.best
    if best is None:
        return True
    saved = best.overhead - candidate.overhead
    is_little = saved < WORTH_COMPILING * seconds
    return saved > 0 and (not is_little or best.leaves_much(trials.bound))


def is_quicker_without_offload(
    plan: CompiledCandidate, items: Items, solver: Solver, extra_seconds: float
) -> bool:
    """Whether recompute alone is quicker than transfers as exposed as the compiler has them.

    Args:
        plan: What was compiled.
        items: What is to be decided.
        solver: What decides.
        extra_seconds: What the way that loops are run adds to each plan.
    """
    decisions, without = plan.decisions or {}, items.without(Decision.OFFLOAD)
    if without.problem == items.problem or Decision.OFFLOAD not in decisions.values():
        return False
    solution = solver.solve(replace(without.problem, capacity=saved_bytes(plan, items)))
    seconds = items.overhead(without.decisions(solution.decisions)) + extra_seconds
    return seconds < plan.overhead


def saved_bytes(candidate: Candidate, items: Items) -> float:
    """Bytes of all items that a candidate saves."""
    decisions = candidate.decisions or {}
    saved = (i for i in items.problem.items if decisions[i.name] is Decision.SAVE)
    return sum(item.bytes for item in saved)


def is_free(pinned: Mapping[str, Decision]) -> bool:
    """Whether the user pinned nothing but what stays on the device: ``{"h/tanh": SAVE}``."""
    return not set(pinned.values()) - {Decision.SAVE}


def may_plain_fit(predicted: int, bound: int) -> bool:
    """Whether compiling the plain step first is worth it, by its predicted peak in bytes."""
    return predicted <= MAY_FIT * bound


def may_plain_fit_after_all(
    plain: Candidate, predicted: int, best: CompiledCandidate, bound: int, *, is_small: bool
) -> bool:
    """Whether compiling the plain step is worth it, by what was compiled for the best plan.

    A small step that stays in a TPU's on-chip memory takes much less than what is simulated, and
    about the same whatever is kept.

    Args:
        plain: The plain step.
        predicted: Its peak, predicted with all that is known by now, bytes.
        best: The best plan.
        bound: The budget, bytes.
        is_small: Whether the step is small.
    """
    if isinstance(plain, CompiledCandidate) or best.overhead <= 0.0:
        return False
    is_far_off = is_small and best.peak < FAR_BELOW * best.emission.simulated
    return is_far_off or predicted <= bound


def may_be_below(predicted: int, peak: int) -> bool:
    """Whether the floor of other regions may be below a peak, by its predicted peak in bytes."""
    return predicted < MAY_BE_BELOW * peak


def worthwhile_grouping(
    seconds: Mapping[Grouping, float], alike: float, forward: float
) -> Grouping | None:
    """The first way of running loops that is about the quickest, if it is worth it.

    Args:
        seconds: What the best plan with each adds to the step by what is predicted, such as
            ``{Grouping(2): 0.011, Grouping(4): 0.010}``.
        alike: The same for loops as they are.
        forward: Seconds of the regions' forward pass.
    """
    enough = min(seconds.values()) + WORTH * forward
    if enough > alike:
        return None
    return next(grouping for grouping, s in seconds.items() if s <= enough)


def nested_grouping(trips: Mapping[str, int]) -> Grouping | None:
    """Layers of a loop under nested checkpoints: what to try where everything else is too much.

    Args:
        trips: From regions to the layers of the loop that they are in, such as ``{"layer": 12}``.
    """
    layers = _near_root(max(trips.values(), default=1))
    return Grouping(layers, nested=True) if layers > 1 else None


def head_pieces(head: LargeHead | None, bound: int) -> list[int]:
    """In how many pieces, at most, the head is to be computed: numbers to try, fewer ones first.

    Each piece reads the head's weights, and adds to their gradient: so there are as few as bring
    the logits down to a small part of the budget, or else as many as are of use.

    Args:
        head: The product that makes the logits; None without one.
        bound: The budget, bytes.

    Returns:
        Nothing where the head is too small for that.
    """
    if head is None or head.bytes < LARGE_HEAD * bound:
        return []
    most = min(MOST_PIECES, head.tokens // PIECE)
    enough = min(most, math.ceil(head.bytes / (LOGITS * bound)))
    return sorted({pieces for pieces in (enough, most) if pieces > 1})


def fewest_states(length: int) -> int:
    """States of a loop to keep at least, so that no iteration is run too often.

    Args:
        length: Iterations of the loop.
    """
    return next(kept for kept in itertools.count(1) if repeats(length, kept) <= MOST_REPEATS)


def may_other_cuts_be_quicker(best: Candidate, floor: Candidate, seconds: float) -> bool:
    """Whether the step is to be cut otherwise, too, although there is a plan.

    A plan for which next to everything has to go adds much, and other regions may keep less of
    what enters them.

    Args:
        best: The plan.
        floor: Everything recomputed.
        seconds: What the plain step takes.
    """
    decisions = best.decisions or {}
    is_dear = best.overhead > DEAR * seconds
    leaves = not {Decision.OFFLOAD, Decision.SPILL}.isdisjoint(decisions.values())
    return is_dear and (leaves or bool(best.levels) or decisions == floor.decisions)


def _near_root(count: int) -> int:
    """The divisor of a number that is nearest to its square root, itself left out."""
    divisors = (d for d in range(1, count) if count % d == 0)
    return min(divisors, key=lambda d: abs(math.log(d * d / count)), default=1)


def refused(
    plans: Sequence[CompiledCandidate],
    best: CompiledCandidate,
    bound: int,
    residuals: Sequence[Residual],
) -> Refused | None:
    """What would be saved next, had it fitted; None where little is left, or nothing is quicker.

    Args:
        plans: All that was compiled. Of the quicker ones that exceed the budget, the one with the
            least peak says it.
        best: The plan.
        bound: The budget, bytes.
        residuals: Residuals of the step.
    """
    quicker = [plan for plan in plans if plan.overhead < best.overhead and plan.peak > bound]
    if not best.leaves_much(bound) or not quicker:
        return None
    least = min(quicker, key=lambda plan: plan.peak)
    saved, kept = (
        {name for name, d in (plan.decisions or {}).items() if d is Decision.SAVE}
        for plan in (least, best)
    )
    more = [r for r in residuals if r.name in saved - kept]
    more.sort(key=lambda r: -r.bytes)
    names = tuple(r.name for r in more)
    return Refused(names, sum(r.bytes for r in more), least.peak) if names else None


def settled(
    outcome: Found, floor: Candidate, floor_bytes: int, plain: Candidate, least: int | None
) -> Found:
    """What was found, with its floor no higher than any peak that was reached.

    Args:
        outcome: What was found.
        floor: Everything recomputed.
        floor_bytes: Its peak, compiled or predicted with all that is known by now.
        plain: The plain step.
        least: The least compiled peak of any plan, bytes.
    """
    plain_bytes = plain.peak if isinstance(plain, CompiledCandidate) else None
    known = [least, outcome.best.peak, plain_bytes]
    known += [None if "floor" in outcome.estimates else outcome.floor]
    least = min(floor_bytes, *filter(None, known))
    estimated = estimates(floor, plain)
    return replace(
        outcome,
        floor=least,
        ceiling=max(least, outcome.ceiling if plain_bytes is None else plain_bytes),
        estimates=tuple(name for name in outcome.estimates if name in estimated),
    )


def with_lower_floor(outcome: Found, predicted: int) -> Found:
    """What was found, with a floor that is predicted, if that is clearly lower."""
    if predicted >= CLEARLY_BELOW * outcome.floor:
        return outcome
    estimated = tuple(dict.fromkeys(("floor", *outcome.estimates)))
    return replace(outcome, floor=predicted, estimates=estimated)


def estimates(floor: Candidate, plain: Candidate) -> tuple[str, ...]:
    """Which of "floor" and "ceiling" were not compiled."""
    figures = {"floor": floor, "ceiling": plain}
    return tuple(n for n, figure in figures.items() if not isinstance(figure, CompiledCandidate))


def is_recompute_undone(plan: CompiledCandidate, plain: CompiledCandidate) -> bool:
    """Whether next to nothing is left of what a plan promised to spare of the plain step's peak."""
    promised = 1 - plan.emission.simulated / max(1, plain.emission.simulated)
    return promised >= MUCH_SPARED and 1 - plan.peak / max(1, plain.peak) < UNDONE * promised
