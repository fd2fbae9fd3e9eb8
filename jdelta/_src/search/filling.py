"""Fills what a plan leaves of its budget, by compiling: the simulation may be far off."""

from __future__ import annotations

from collections.abc import Mapping

from jdelta._src.decision import Decision
from jdelta._src.search.attempts import Attempts
from jdelta._src.search.candidate import CompiledCandidate
from jdelta._src.search.capacities import Bracket
from jdelta._src.search.propose import Proposals
from jdelta._src.search.rules import saved_bytes

FILLING = 6
"""Further compiles for a small step whose plan leaves much of the budget at a price; else one."""


def filled(
    proposals: Proposals,
    attempts: Attempts,
    best: CompiledCandidate,
    bound: int,
    *,
    is_small: bool,
) -> CompiledCandidate:
    """A quicker plan, where one leaves much of the budget at a price.

    The simulation may be far off for a small step, so that nothing larger seemed to fit.
    """
    compiles = attempts.compiles
    most = compiles.count + (FILLING if is_small else 1)
    needed = sum(item.bytes for item in proposals.items.problem.items if item.needed)
    bracket = Bracket(saved_bytes(best, proposals.items), needed)
    seen: list[Mapping[str, Decision] | None] = [best.decisions]
    for _ in range(2 * FILLING if is_small else 0):
        if compiles.count >= most or not best.leaves_much(bound):
            return best
        capacity = bracket.middle
        candidate = proposals.keeping(capacity)
        if candidate.decisions in seen or candidate.overhead >= best.overhead:
            bracket = bracket.narrowed(capacity, fits=True)
            continue
        seen.append(candidate.decisions)
        tried = attempts.tried(candidate)
        if tried is None:
            continue
        fits = tried.peak <= bound
        bracket = bracket.narrowed(capacity, fits=fits)
        best = tried if fits and tried.overhead <= best.overhead else best
    return _with_single_values(proposals, attempts, best, bound, most)


def _with_single_values(
    proposals: Proposals, attempts: Attempts, best: CompiledCandidate, bound: int, most: int
) -> CompiledCandidate:
    """The plan with one value more saved, and one more, as long as it fits."""
    while attempts.compiles.count < most and best.leaves_much(bound):
        candidate = proposals.with_one_more(best)
        tried = attempts.tried(candidate) if candidate else None
        if tried is None or tried.peak > bound or tried.overhead >= best.overhead:
            break
        best = tried
    return best
