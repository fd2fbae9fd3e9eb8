"""DELTA's heuristic, in polynomial time."""

import functools
import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from jdelta._src.decision import Decision
from jdelta._src.solver.base import Solver
from jdelta._src.solver.chains import Chains
from jdelta._src.solver.director import DECISIONS, FREE, RECOMPUTE, SAVE, Codes, Director
from jdelta._src.solver.exchange import Exchange
from jdelta._src.solver.frontier import Frontier
from jdelta._src.solver.greedy import Release
from jdelta._src.solver.min_cuts import Exits, Filter
from jdelta._src.solver.problem import AWAY, Problem
from jdelta._src.solver.solution import Outcome, Solution

_STEP = 1e-6
"""Part of all recompute seconds by which a state must be better than another to count."""

_GAPS, _MISSING = 12, 2.5e-3
"""States improved in a round, and the part of the value that must be missing for that."""

_WIDE = 0.02
"""Part of the value that must be missing for a gap to be searched as a problem of its own."""


@dataclass(frozen=True)
class Knapsack(Solver):
    """DELTA's knapsack heuristic, extended to chains and to transfers in both directions.

    DELTA (arXiv 2203.15980; ACM TACO 2024, doi:10.1145/3689338) releases tensors until the rest
    fits. The text of 2024 was not available: parts marked (R) are reconstructed from its abstract.

    - The *filter*, which item leaves: ``Filter`` at a price, ``Release`` one item at a time; by
      value density (R), where DELTA of 2022 took bytes times staleness.
    - The *director*, recompute or move: whichever costs less, chain or exposed transfer.
      ``Filter`` weighs the two with no second hidden; ``Director`` shares out the hidden ones.
    - *Re-pricing* of recompute chains after each change (R): ``Chains``.
    - The *best single item* as a guard (R): when every item fits by itself, and there are neither
      chains nor transfers, the value is at least half of the best, as for every such greedy.
    - *Improvement* until nothing changes (R), in a few rounds: ``Exchange`` fills slack and swaps.
      A gap that is wide because an item is large is searched twice more among the items smaller
      than the gap, once without the large one and once with it.

    No step looks at the capacity. All add to one frontier of states, and the answer is the best
    one that fits, so overhead never rises with capacity. 1000 items take some tenths of a second,
    and further answers for the same items next to nothing.

    Attributes:
        prices: Prices that the filter tries, for each way of charging transfers.
        rounds: Rounds of improvement at most.
    """

    prices: int = 40
    rounds: int = 4

    def frontier(self, problem: Problem) -> tuple[Solution, ...]:
        """The solutions among which every answer is chosen, whatever the capacity.

        Args:
            problem: Its capacity has no influence; those of its memories have.

        Returns:
            Solutions from fewest ``kept_bytes`` to most, ``overhead`` strictly decreasing.
        """
        best: list[Solution] = []
        for row in self._frontier(problem).codes:
            solution = _solution(problem, row)
            if not best or solution.kept_bytes > best[-1].kept_bytes:
                best.append(solution)
        return tuple(best)

    def _search(self, problem: Problem) -> Solution:
        frontier = self._frontier(problem)
        # The frontier's sums are rounded, a solution's are not: start a little high.
        limit = problem.capacity * (1 + 1e-9)
        index = int(np.searchsorted(frontier.kept, limit, side="right")) - 1
        while True:
            solution = _solution(problem, frontier.codes[index])
            if solution.kept_bytes <= problem.capacity:
                return solution
            index -= 1

    def _frontier(self, problem: Problem) -> Frontier:
        return _frontier(replace(problem, capacity=math.inf), self.prices, self.rounds)


def _solution(problem: Problem, row: Codes) -> Solution:
    return Solution.of(problem, [DECISIONS[code] for code in row.tolist()], Outcome.HEURISTIC)


@functools.lru_cache(maxsize=4)  # A plan is repaired by asking again with another capacity.
def _frontier(problem: Problem, prices: int, rounds: int) -> Frontier:
    """All states found for a problem of whatever capacity."""
    chains = Chains(problem.items)
    frontier = Frontier(Director(problem), _STEP * sum(item.seconds for item in problem.items))
    frontier.add(_single_items(chains))
    free = np.full(len(problem.items), FREE, dtype=np.int8)
    frontier.add(*_releases(chains, Exits.of(problem.items, ()), free, prices))
    for memories in _memories(problem):
        frontier.add(_releases(chains, Exits.of(problem.items, memories), free, prices)[0])
    exits = Exits.of(problem.items, AWAY)
    exchange = Exchange(problem, chains)
    for _ in range(rounds):
        gaps = frontier.gaps(_GAPS, _MISSING)
        wishes = [wish for gap in gaps for wish in exchange.propose(frontier, gap)]
        if gaps and gaps[0].share > _WIDE:
            for fixed in frontier.sides(gaps[0]):
                wishes += _releases(chains, exits, fixed, prices)[0]
        frontier.tried[[gap.state for gap in gaps]] = True
        frontier.add(wishes)
    return frontier


def _single_items(chains: Chains) -> list[Codes]:
    """Nothing kept, and each item alone that is worth more than all smaller ones."""
    items = chains.items
    weightless = [item.bytes == 0 for item in items]
    nothing = np.where(weightless, SAVE, RECOMPUTE).astype(np.int8)
    chains.start(weightless)
    states, most = [nothing], 0.0
    for index in sorted(range(len(items)), key=lambda i: items[i].bytes):
        worth = chains.seconds(index) - items[index].holding
        if worth > most and not weightless[index]:
            most = worth
            states.append(nothing.copy())
            states[-1][index] = SAVE
    return states


def _memories(problem: Problem) -> list[tuple[Decision, ...]]:
    """Sets of memories to move items to: all that are used, and if there are several each alone."""
    used = {move.to for item in problem.items for move in item.moves}
    alone = [(to,) for to in AWAY if to in used]
    return alone if len(alone) < 2 else [AWAY, *alone]


def _releases(
    chains: Chains, exits: Exits, fixed: Codes, count: int
) -> tuple[list[Codes], list[float]]:
    """States at the filter's prices and on the way from each to the next, and their prices."""
    corners = Filter(chains.items, exits, fixed).corners(count)
    states, prices = [corners[-1].codes], [0.0]
    for low, high in itertools.pairwise(corners):
        release = Release(chains, exits, high, low)
        released = release.states()
        states += released
        prices += [release.price] * len(released)
    return states, prices
