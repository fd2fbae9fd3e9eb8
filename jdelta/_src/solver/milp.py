"""The exact solver: a mixed-integer linear programme, solved by HiGHS."""

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import scipy  # imports its parts when they are first used, which takes long

from jdelta._src.decision import Decision
from jdelta._src.solver.base import Solver
from jdelta._src.solver.problem import Problem
from jdelta._src.solver.solution import Outcome, Solution

_CUTS, _ROUNDING = 8, 2e-6
"""How often a solution that is over a capacity is cut off before the capacities are lowered, and by
which part: HiGHS may exceed a row by 1e-6, and takes what is within 1e-6 for a whole number."""


@dataclass(frozen=True)
class Milp(Solver):
    """Exact, and slow in the worst case: what heuristics are measured against.

    DELTA's knapsack (ACM TACO 2024, doi:10.1145/3689338) with links to other memories. The rows for
    chains are those of Checkmate (arXiv 1910.02653) for a value computed again at most once. Item
    ``i`` has binaries ``s_i`` (save) and ``m_it`` (move to memory ``t``) and a continuous ``r_i``
    in [0, 1] (computed again); ``x_t`` and ``y_t`` are exposed seconds of a link, out and in::

        minimise    sum_i (seconds_i r_i + holding_i s_i)
                    + sum_t (sum_i exposed_it m_it + x_t + y_t)
        subject to  s_i + sum_t m_it <= 1
                    r_i >= 1 - s_i - sum_t m_it               for each needed i
                    r_j >= r_i - s_j - sum_t m_jt             for each source j of i
                    sum_i bytes_i s_i <= capacity
                    sum_i bytes_it m_it <= capacity_t
                    x_t >= sum_i seconds_out_it m_it - hidden_out_t, and likewise y_t

    With ``s`` and ``m`` binary the least ``r`` is 0 or 1 by itself.

    Attributes:
        time_limit: Seconds after which the best decisions so far are returned. With a limit the
            answer depends on the speed of the machine, and processes may disagree.
        mip_rel_gap: Relative gap between an answer and its bound at which the search may stop.
            HiGHS also stops at an absolute gap, here 1e-6 of all recompute seconds together.
    """

    time_limit: float = math.inf
    mip_rel_gap: float = 1e-4

    def _search(self, problem: Problem) -> Solution:
        if not problem.items:  # a programme without columns is none
            return Solution.of(problem, (), Outcome.OPTIMAL)
        programme = _Programme(problem)
        end = time.monotonic() + self.time_limit
        for _ in range(_CUTS):
            solution = self._attempt(programme, end)
            if not programme.cut_off(solution):
                return solution
        programme.lower_capacities()
        return replace(self._attempt(programme, end), outcome=Outcome.ROUNDED)

    def _attempt(self, programme: "_Programme", end: float) -> Solution:
        """Solve the programme as it stands, until a moment of the monotonic clock."""
        result = programme.run(max(0.0, end - time.monotonic()), self.mip_rel_gap)
        if result.x is None:  # Ran out of time without a point; keeping nothing is one.
            decisions = [Decision.RECOMPUTE] * programme.size
        else:
            decisions = programme.decisions(result.x)
        outcome = Outcome.OPTIMAL if result.status == 0 else Outcome.TIME_LIMIT
        return Solution.of(programme.problem, decisions, outcome)


class _Memory(NamedTuple):
    """The device's memory, or another one.

    Attributes:
        decision: What puts an item there.
        column: Column of the first item's binary.
        weights: Bytes that each item takes there.
        capacity: Bytes that all may take.
    """

    decision: Decision
    column: int
    weights: list[float]
    capacity: float


class _Programme:
    """Matrix form of a problem. Columns: all s, all m by memory, all r, x and y by memory.

    Each row is at most its limit.

    HiGHS's tolerances are absolute, so bytes are in units of their capacity, and seconds in units
    of all recompute seconds together.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.size = len(problem.items)
        self.second = 1.0 / (math.fsum(item.seconds for item in problem.items) or 1.0)
        self.moves = [[item.move(t.decision) for item in problem.items] for t in problem.memories]
        self.recomputed = (1 + len(problem.memories)) * self.size
        self.exposed = self.recomputed + self.size
        self.upper = [1.0] * self.size
        for moves in self.moves:
            self.upper += [float(move is not None) for move in moves]
        self.upper += [1.0] * self.size + [math.inf] * (2 * len(problem.memories))
        self.rows: list[Mapping[int, float]] = []
        self.limits: list[float] = []
        sizes = [item.bytes for item in problem.items]
        self.memories = [_Memory(Decision.SAVE, 0, sizes, problem.capacity)]
        others = zip(problem.memories, self.moves, strict=True)
        for k, (memory, moves) in enumerate(others, start=1):
            weights = [move.bytes if move else 0.0 for move in moves]
            self.memories.append(_Memory(memory.decision, k * self.size, weights, memory.capacity))
        self._add_decisions()
        self._add_directions()
        self._add_memories()
        self.uncut = len(self.rows)

    def run(self, time_limit: float, mip_rel_gap: float) -> Any:
        """Have HiGHS solve the programme.

        Raises:
            RuntimeError: HiGHS neither solved it nor ran out of time.
        """
        links = 2 * len(self.moves)
        moves = itertools.chain.from_iterable(self.moves)
        result = scipy.optimize.milp(
            [
                *[item.holding * self.second for item in self.problem.items],
                *[move.seconds_exposed * self.second if move else 0.0 for move in moves],
                *[item.seconds * self.second for item in self.problem.items],
                *[1.0] * links,
            ],
            integrality=[1] * self.recomputed + [0] * (self.size + links),
            bounds=scipy.optimize.Bounds(0.0, self.upper),  # pyright: ignore[reportArgumentType]
            constraints=self._constraints(),
            options={
                "time_limit": time_limit,
                "mip_rel_gap": mip_rel_gap,
                # Presolve has cut off optima where sums of bytes differ by parts in a billion.
                "presolve": len(self.rows) == self.uncut,
            },
        )
        if result.status not in (0, 1):
            raise RuntimeError(f"HiGHS cannot solve the programme: {result.message}")
        return result

    def decisions(self, point: Any) -> list[Decision]:
        """Read a point's binaries."""
        decisions = [Decision.RECOMPUTE] * self.size
        for memory in self.memories:
            for i, chosen in enumerate(point[memory.column : memory.column + self.size]):
                decisions[i] = memory.decision if chosen > 0.5 else decisions[i]
        return decisions

    def cut_off(self, solution: Solution) -> bool:
        """Exclude a solution that is over a capacity because HiGHS rounds.

        Returns:
            Whether it was over a capacity.
        """
        over = False
        for memory in self.memories:
            chosen = [i for i, d in enumerate(solution.decisions) if d is memory.decision]
            if math.fsum(memory.weights[i] for i in chosen) > memory.capacity:
                over = True
                self._add_covers(memory, chosen)
        return over

    def lower_capacities(self) -> None:
        """Leave so much room that rounding cannot exceed a capacity, in place of any cuts."""
        del self.rows[self.uncut :], self.limits[self.uncut :]
        for row in range(self.uncut - len(self.memories), self.uncut):
            self.limits[row] -= _ROUNDING

    def _add_covers(self, memory: _Memory, chosen: list[int]) -> None:
        """Add extended cover inequalities (Balas 1975, doi:10.1007/BF01580440).

        A set that fits, with one item more that does not, is a cover: no two sets of as many items
        that are in it or as heavy as its heaviest fit either.
        """
        weights = memory.weights
        chosen = sorted(chosen, key=lambda i: (-weights[i], i))
        count = 0
        while math.fsum(weights[i] for i in chosen[: count + 1]) <= memory.capacity:
            count += 1
        fits, heaviest = chosen[:count], weights[chosen[0]]
        extended = {*fits, *(i for i in range(self.size) if weights[i] >= heaviest)}
        for last in chosen[count:]:
            if math.fsum(weights[i] for i in [*fits, last]) > memory.capacity:
                self._add({memory.column + i: 1.0 for i in {*extended, last}}, float(count))

    def _add(self, row: Mapping[int, float], limit: float) -> None:
        self.rows.append(row)
        self.limits.append(limit)

    def _add_decisions(self) -> None:
        """Rows that say what is computed again."""
        for i, item in enumerate(self.problem.items):
            self._add(dict.fromkeys(self._kept(i), 1.0), 1.0)
            if item.needed:
                self._add(dict.fromkeys((*self._kept(i), self.recomputed + i), -1.0), -1.0)
            for j in item.sources:
                unless = dict.fromkeys((*self._kept(j), self.recomputed + j), -1.0)
                self._add({self.recomputed + i: 1.0, **unless}, 0.0)

    def _kept(self, item: int) -> Iterator[int]:
        """Columns of the binaries of which one is set if an item is kept somewhere."""
        return (memory.column + item for memory in self.memories)

    def _add_directions(self) -> None:
        """Rows that say how much of the transfers is exposed."""
        for k, (memory, moves) in enumerate(zip(self.problem.memories, self.moves, strict=True)):
            pairs = [(self.memories[k + 1].column + i, m) for i, m in enumerate(moves) if m]
            out = {column: move.seconds_out * self.second for column, move in pairs}
            into = {column: move.seconds_in * self.second for column, move in pairs}
            exposed = self.exposed + 2 * k
            self._add({**out, exposed: -1.0}, memory.hidden_out * self.second)
            self._add({**into, exposed + 1: -1.0}, memory.hidden_in * self.second)

    def _add_memories(self) -> None:
        """Rows that say what fits; what does not fit by itself is ruled out by its bound."""
        for _, column, weights, capacity in self.memories:
            row: dict[int, float] = {}
            for i, weight in enumerate(weights):
                if weight > capacity:
                    self.upper[column + i] = 0.0
                elif weight > 0:
                    row[column + i] = weight / capacity
            self._add(row, 1.0)

    def _constraints(self) -> Any:
        entries = [(k, column, a) for k, row in enumerate(self.rows) for column, a in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        shape = (len(self.rows), len(self.upper))
        matrix = scipy.sparse.csr_array((values, (rows, columns)), shape=shape)
        limits: Any = self.limits
        return scipy.optimize.LinearConstraint(matrix, -math.inf, limits)
