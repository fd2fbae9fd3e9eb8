"""What a solver answers: a decision for each item, what they cost, and how sure it is."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jdelta._src.decision import Decision
from jdelta._src.solver.problem import Problem


class Outcome(enum.Enum):
    """How a search ended; the value says what it means and what to do about it."""

    OPTIMAL = (
        "No other decisions that fit are predicted to cost less, up to the solver's stated gap."
    )

    HEURISTIC = (
        "The decisions fit and are the best that a heuristic found; "
        "solver='milp' proves how far they are from the optimum."
    )

    TIME_LIMIT = (
        "The decisions fit, but time ran out before they were proven best: "
        "raise `time_limit`, widen `mip_rel_gap`, or use `Knapsack`."
    )

    ROUNDED = (
        "The decisions fit, but many sets of items come closer to a capacity than `Milp` can tell "
        "apart, and a better one of them may fit: change the capacity by some parts in a million."
    )

    INFEASIBLE = (
        "Nothing fits, not even keeping nothing, because a capacity is below zero: raise the "
        "budget by at least what is missing."
    )


@dataclass(frozen=True)
class Solution:
    """Decisions for the items of one problem.

    Attributes:
        decisions: One decision for each item, in the order of ``Problem.items``.
        overhead: Seconds that the decisions add to the step, as ``Problem.overhead`` counts them.
        kept_bytes: Device bytes of the saved items together.
        moved_bytes: For each memory of the problem the bytes of the items in it together.
        outcome: How the search ended.
    """

    decisions: tuple[Decision, ...]
    overhead: float
    kept_bytes: float
    moved_bytes: tuple[float, ...]
    outcome: Outcome

    @classmethod
    def of(cls, problem: Problem, decisions: Sequence[Decision], outcome: Outcome) -> "Solution":
        """The solution that ``decisions`` make, with its figures worked out from ``problem``."""
        pairs = list(zip(problem.items, decisions, strict=True))
        return cls(
            decisions=tuple(decisions),
            overhead=problem.overhead(decisions),
            # Summed without rounding error, so that no order of summation decides what fits.
            kept_bytes=math.fsum(i.bytes for i, d in pairs if d is Decision.SAVE),
            moved_bytes=tuple(
                math.fsum(move.bytes for move in problem.moved(decisions, memory))
                for memory in problem.memories
            ),
            outcome=outcome,
        )
