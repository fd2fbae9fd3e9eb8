"""The floor: the least peak that a step can be planned to, compiled as far as need be."""

from __future__ import annotations

import contextlib
import math

import jax

from jdelta._src.errors import OffloadError, SpillError
from jdelta._src.search.attempts import Attempts
from jdelta._src.search.candidate import Candidate, CompiledCandidate
from jdelta._src.search.messages import too_small
from jdelta._src.search.propose import Proposals

PROMISED = 0.95
"""Part of the floor that everything recomputed as by hand may be predicted to take and is compiled,
where that is only to say the floor."""

MUCH_LESS = 0.9
"""Part of the floor that it may be predicted to take with what enters regions on the host, and is
compiled to say the floor."""

NEAR_FLOOR = 0.85
"""Part of the floor that a budget has to be for a plan that keeps some to be compiled for it."""

LITTLE_MORE = 1.1
"""Part of the floor that such a plan may be predicted to take."""

MOST_GOALS = 3
"""Plans that drop what enters regions and are compiled for one budget."""

GOAL_STEP = 0.01
"""Part of the budget by which the next of them is to need less than one that does not fit."""


def fitting_floor(proposals: Proposals, attempts: Attempts, bound: int) -> CompiledCandidate:
    """Everything recomputed, or a plan that also drops what enters regions as far as need be.

    What enters them is computed again, too, or is on the host, whichever promises to be quicker.
    Before that, XLA is left to itself as by hand (`Policy.is_by_hand`). And next to nothing is
    kept: indices of rows take less than what they are computed from. If files are at hand, as much
    leaves as is quicker than recompute: what a CPU recomputes for a region may take more memory
    than the same values that come back from files. At last some values are kept (`_keeping_some`).

    Where none of that helps (`Attempts.is_hopeless`) the first of them is the last.

    Raises:
        BudgetError: It does not fit.
    """
    far_above = proposals.step.target.backend.tolerances.floor_far_above * bound
    if proposals.expected(proposals.floor()) > far_above and not _moves_first(proposals, bound):
        dropping = _dropping_inputs(proposals, attempts, bound)
        if dropping and (dropping.peak <= bound or attempts.is_hopeless(bound)):
            return _checked(proposals, attempts, dropping, bound)
    floor = attempts.compile(proposals.floor())
    for lower in (_less_by_hand, _keeping_next_to_nothing, _without_inputs, _keeping_some):
        if floor.peak > bound and not attempts.is_hopeless(bound):
            floor = lower(proposals, attempts, floor, bound)
    return _checked(proposals, attempts, floor, bound)


def _checked(
    proposals: Proposals, attempts: Attempts, floor: CompiledCandidate, bound: int
) -> CompiledCandidate:
    """A plan that fits.

    Raises:
        BudgetError: It does not.
    """
    if floor.peak > bound:
        least = min(filter(None, (floor.peak, attempts.compiles.least)))
        is_undone = attempts.is_recompute_undone
        raise too_small(bound, floor, least, proposals, is_undone=is_undone)
    return floor


def settled_floor(
    proposals: Proposals, attempts: Attempts, *, is_sure: bool, is_small: bool
) -> Candidate:
    """Everything recomputed; of a small step also with what enters regions on the host.

    Args:
        proposals: What proposes.
        attempts: What was compiled.
        is_sure: Whether the floor is believed without compiling it.
        is_small: Whether the step is small.
    """
    floor, items = proposals.floor(), proposals.items
    # A plan that does what it says is no worse for a floor that the compiler fails at.
    with contextlib.suppress(OffloadError, SpillError, jax.errors.JaxRuntimeError):
        if not is_sure or attempts.has(floor):
            floor = compiled = attempts.compile(floor)
            policy = floor.emission.policy
            if is_small and policy and policy.writes_bits:  # else none promises less
                floor = _less_by_hand(
                    proposals, attempts, compiled, compiled.peak, PROMISED * compiled.peak
                )
        if items.deep and is_small:
            floor = _likely_deep(proposals, attempts, floor)
    proposals.items = items
    return floor


def _less_by_hand(
    proposals: Proposals,
    attempts: Attempts,
    floor: CompiledCandidate,
    _: int,
    most: float = math.inf,
) -> CompiledCandidate:
    """The floor, or everything recomputed as by hand, if that is compiled to less.

    It is compiled if at most ``most`` bytes are predicted.
    """
    candidate = proposals.floor_by_hand(floor)
    if candidate is None or candidate.predicted > most:
        return floor
    return min(floor, attempts.compile(candidate), key=lambda c: c.peak)


def _keeping_next_to_nothing(
    proposals: Proposals, attempts: Attempts, floor: CompiledCandidate, bound: int
) -> CompiledCandidate:
    """The floor, or next to nothing kept, if that is compiled to less."""
    little = proposals.keeping_next_to_nothing(bound)
    promises = proposals.step.store or little.predicted < floor.peak
    tried = attempts.tried(little) if promises else None
    return tried if tried and tried.peak < floor.peak else floor


def _without_inputs(
    proposals: Proposals, attempts: Attempts, floor: CompiledCandidate, bound: int
) -> CompiledCandidate:
    """The first plan that fits with what enters regions dropped, or moved; else the least peak."""
    moves_first = _moves_first(proposals, bound)
    if moves_first:
        floor = _deep(proposals, attempts, floor)
    if floor.peak > bound:
        dropping = _dropping_inputs(proposals, attempts, bound)
        floor = min(filter(None, (floor, dropping)), key=lambda c: c.peak)
    if floor.peak > bound:
        candidate = proposals.dropping_most_inputs()
        if candidate and proposals.expected(candidate) < floor.peak:
            floor = min(floor, attempts.compile(candidate), key=lambda c: c.peak)
    if floor.peak > bound and not moves_first:
        floor = _deep(proposals, attempts, floor)
    return floor


def _keeping_some(
    proposals: Proposals, attempts: Attempts, floor: CompiledCandidate, bound: int
) -> CompiledCandidate:
    """The floor, or a plan that keeps what is predicted to take little more, if that takes less.

    What a region computes again takes memory at once while its backward pass runs, and compilers
    order that in ways that are not foretold: four layers of an MLP with dropout took 19.00 MiB on a
    CPU, and 17.75 with its products kept.
    """
    if bound < NEAR_FLOOR * floor.peak:
        return floor
    candidate = proposals.fitting(floor, round(LITTLE_MORE * floor.peak))
    if candidate.decisions == floor.decisions:
        return floor
    tried = attempts.tried(candidate)
    return tried if tried and tried.peak < floor.peak else floor


def _moves_first(proposals: Proposals, bound: int) -> bool:
    """Whether what enters regions is quicker on the host than computed again."""
    dropping = proposals.dropping_inputs(bound)
    return dropping is not None and proposals.moving_seconds(bound) < dropping.overhead


def _dropping_inputs(
    proposals: Proposals, attempts: Attempts, bound: int
) -> CompiledCandidate | None:
    """The quickest plan that computes again what enters regions and fits; else the last one."""
    compiled, goal = None, bound
    for _ in range(MOST_GOALS):
        candidate = proposals.dropping_inputs(goal)
        if candidate is None:
            break
        compiled = attempts.compile(candidate)
        if compiled.peak <= bound or attempts.is_hopeless(bound):
            break
        goal -= round(GOAL_STEP * bound)
    return compiled


def _deep(proposals: Proposals, attempts: Attempts, floor: CompiledCandidate) -> CompiledCandidate:
    """The least peak with what enters the regions on the host too, nothing spent on overlap.

    Larger plans, in which transfers are timed again, may put it there as well.
    """
    if proposals.items.deep is None:
        return floor
    items, proposals.items = proposals.items, proposals.items.with_region_inputs()
    with contextlib.suppress(OffloadError, SpillError):
        deep = attempts.compile(proposals.floor(least=True))
        if not attempts.offload_failed(deep) and deep.peak < floor.peak:
            return deep
    proposals.items = items
    return floor


def _likely_deep(proposals: Proposals, attempts: Attempts, floor: Candidate) -> Candidate:
    """The floor with what enters the regions on the host too, if that takes less.

    In loops that is as predicted, if all else was. Outside of them compilers kept 4 to 44 % more
    than predicted (H100, twelve steps). What is not believed is compiled if much less is predicted,
    and else not thought of.
    """
    proposals.items = proposals.items.with_region_inputs()
    deep, expected = proposals.floor(least=True), proposals.expected(floor)
    policy = deep.emission.policy
    is_outside = policy is not None and policy.offloads_outside_loops
    if is_outside or not attempts.compiles.are_foretold:
        if proposals.expected(deep) > MUCH_LESS * expected:
            return floor
        deep = compiled = attempts.compile(deep)
        if attempts.offload_failed(compiled):
            return floor
    return deep if proposals.expected(deep) < expected else floor
