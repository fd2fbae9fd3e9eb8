"""The interface of every solver."""

import abc
import math
from collections.abc import Iterator

from jdelta._src.decision import Decision
from jdelta._src.solver.problem import AWAY, Item, Problem
from jdelta._src.solver.solution import Outcome, Solution


class Solver(abc.ABC):
    """Chooses a decision for each item of a problem.

    A solver is a frozen dataclass whose fields are its options, so two solvers with the same
    options are equal, and a plan can say which solver made it. The same problem always gets the
    same answer: no randomness, no clock (but for a time limit that is asked for), so that every
    process of a multi-host job plans alike.

    A new solver implements ``_search``, and may rely on all capacities being at least zero.
    """

    def solve(self, problem: Problem) -> Solution:
        """Choose a decision for each item, so that what is kept fits and the step is slowed least.

        Args:
            problem: Items (bytes and seconds), and the bytes they may take in each memory.

        Returns:
            Decisions within all capacities that move only items that may be. When a capacity is
            below zero (or not a number) there are none: then nothing is kept and the outcome is
            ``Outcome.INFEASIBLE``.

        Raises:
            ValueError: An item has bytes or seconds that are negative or not finite, a source
                that does not come before it, or moves to a memory that the problem has not; or
                two memories go by one decision.
        """
        _check(problem)
        if all(c >= 0 for c in (problem.capacity, *(m.capacity for m in problem.memories))):
            return self._search(problem)
        nothing = (Decision.RECOMPUTE,) * len(problem.items)
        return Solution.of(problem, nothing, Outcome.INFEASIBLE)

    @abc.abstractmethod
    def _search(self, problem: Problem) -> Solution:
        """Solve a problem whose capacities are at least zero."""


def _amounts(item: Item) -> Iterator[tuple[str, float]]:
    yield "bytes", item.bytes
    yield "seconds", item.seconds
    yield "holding", item.holding
    for move in item.moves:
        for field in ("seconds_out", "seconds_in", "bytes", "seconds_exposed"):
            yield f"{move.to.value}.{field}", getattr(move, field)


def _check(problem: Problem) -> None:
    """Refuse items that no solver can reckon with."""
    memories = [memory.decision for memory in problem.memories]
    if len(set(memories)) < len(memories) or not set(memories) <= set(AWAY):
        raise ValueError(
            f"each memory must have one decision of its own out of {AWAY}; got {memories}"
        )
    for index, item in enumerate(problem.items):
        moves = [move.to for move in item.moves]
        if len(set(moves)) < len(moves) or not set(moves) <= set(memories):
            raise ValueError(
                f"item {item.name!r}: it may move at most once to each of {memories}; got {moves}"
            )
        for field, amount in _amounts(item):
            if not 0 <= amount < math.inf:
                raise ValueError(
                    f"item {item.name!r}: {field} must be finite and not negative; got {amount}"
                )
        if not all(0 <= source < index for source in item.sources):
            raise ValueError(
                f"item {item.name!r} has index {index}: its sources must have smaller ones; "
                f"got {item.sources}. Put the items into topological order"
            )
