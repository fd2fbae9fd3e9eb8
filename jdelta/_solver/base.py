"""The interface of every solver."""

import abc
import math

from jdelta._decision import Decision
from jdelta._problem import Item, Problem
from jdelta._solution import Outcome, Solution


class Solver(abc.ABC):
    """Chooses a decision for each item of a problem.

    A solver is a frozen dataclass whose fields are its options, so two solvers with the same
    options are equal, and a plan can say which solver made it. The same problem always gets the
    same answer: no randomness, no clock (but for a time limit that is asked for), so that every
    process of a multi-host job plans alike.

    A new solver implements ``_search``, and may rely on both capacities being at least zero.
    """

    def solve(self, problem: Problem) -> Solution:
        """Choose a decision for each item, so that what is kept fits and the step is slowed least.

        Args:
            problem: Items (bytes and seconds), and the device and host bytes they may take.

        Returns:
            Decisions within both capacities that offload only items that allow it. When a
            capacity is below zero (or not a number) there are none: then nothing is kept and the
            outcome is ``Outcome.INFEASIBLE``.

        Raises:
            ValueError: An item has bytes or seconds that are negative or not finite, or a source
                that does not come before it.
        """
        _check(problem)
        if problem.capacity >= 0 and problem.host_capacity >= 0:
            return self._search(problem)
        nothing = (Decision.RECOMPUTE,) * len(problem.items)
        return Solution.of(problem, nothing, Outcome.INFEASIBLE)

    @abc.abstractmethod
    def _search(self, problem: Problem) -> Solution:
        """Solve a problem whose capacities are at least zero."""


def _amounts(item: Item) -> tuple[tuple[str, float], ...]:
    return (
        ("bytes", item.bytes),
        ("seconds", item.seconds),
        ("seconds_exposed", item.seconds_exposed),
    )


def _check(problem: Problem) -> None:
    """Refuse items that no solver can reckon with."""
    for index, item in enumerate(problem.items):
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
