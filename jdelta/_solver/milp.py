"""The exact solver: a mixed-integer linear programme, solved by HiGHS."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import scipy.optimize
import scipy.sparse

from jdelta._decision import Decision
from jdelta._problem import Problem
from jdelta._solution import Outcome, Solution
from jdelta._solver.base import Solver


@dataclass(frozen=True)
class Milp(Solver):
    """Exact, and slow in the worst case: what heuristics are measured against.

    DELTA's knapsack (ACM TACO 2024, doi:10.1145/3689338) with offload as a third way. The rows for
    chains are those of Checkmate (arXiv 1910.02653) for a value computed again at most once. Item
    ``i`` has binaries ``s_i`` (save) and ``o_i`` (offload) and a continuous ``r_i`` in [0, 1]
    (computed again); ``x_out`` and ``x_in`` are exposed seconds::

        minimise    sum_i seconds_i r_i + x_out + x_in
        subject to  s_i + o_i <= 1
                    r_i >= 1 - s_i - o_i                      for each needed i
                    r_j >= r_i - s_j - o_j                    for each source j of i
                    sum_i bytes_i s_i <= capacity
                    sum_i host_bytes_i o_i <= host_capacity
                    x_out >= sum_i seconds_out_i o_i - hidden_out, and likewise x_in

    With ``s`` and ``o`` binary the least ``r`` is 0 or 1 by itself.

    Attributes:
        time_limit: Seconds after which the best decisions so far are returned. With a limit the
            answer depends on the speed of the machine, and processes may disagree.
        mip_rel_gap: Relative gap between an answer and its bound at which the search may stop.
            HiGHS also stops at an absolute gap, here 1e-6 of all recompute seconds together.
    """

    time_limit: float = math.inf
    mip_rel_gap: float = 1e-4

    def _search(self, problem: Problem) -> Solution:
        programme = _Programme(problem)
        end = time.monotonic() + self.time_limit
        while True:
            result = programme.run(max(0.0, end - time.monotonic()), self.mip_rel_gap)
            if result.x is None:  # Ran out of time without a point; keeping nothing is one.
                nothing = (Decision.RECOMPUTE,) * len(problem.items)
                return Solution.of(problem, nothing, Outcome.TIME_LIMIT)
            outcome = Outcome.OPTIMAL if result.status == 0 else Outcome.TIME_LIMIT
            solution = Solution.of(problem, programme.decisions(result.x), outcome)
            if not programme.cut_off(solution):
                return solution


class _Programme:
    """Matrix form of a problem. Columns: all s, all o, all r, x_out, x_in; rows: ``<= limit``.

    HiGHS's tolerances are absolute, so bytes are scaled by the capacity of their row, and seconds
    by all recompute seconds together.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.size = len(problem.items)
        self.second = 1.0 / (math.fsum(item.seconds for item in problem.items) or 1.0)
        self.rows: list[Mapping[int, float]] = []
        self.limits: list[float] = []
        self._add_decisions()
        self._add_directions()
        for column, weights, capacity in self._memories():
            unit = 1.0 / (capacity or max(weights, default=0.0) or 1.0)
            self._add({column + i: w * unit for i, w in enumerate(weights)}, capacity * unit)

    def run(self, time_limit: float, mip_rel_gap: float) -> Any:
        """Have HiGHS solve the programme."""
        items, size = self.problem.items, self.size
        offload = [float(item.offloadable) for item in items]
        upper = [1.0] * size + offload + [1.0] * size + [math.inf, math.inf]
        return scipy.optimize.milp(
            [0.0] * (2 * size) + [item.seconds * self.second for item in items] + [1.0, 1.0],
            integrality=[1] * (2 * size) + [0] * (size + 2),
            bounds=scipy.optimize.Bounds(0.0, upper),
            constraints=self._constraints(),
            options={"time_limit": time_limit, "mip_rel_gap": mip_rel_gap},
        )

    def decisions(self, point: Any) -> list[Decision]:
        """Read a point's binaries."""
        size = self.size
        return [
            Decision.SAVE if save > 0.5 else Decision.OFFLOAD if off > 0.5 else Decision.RECOMPUTE
            for save, off in zip(point[:size], point[size : 2 * size], strict=True)
        ]

    def cut_off(self, solution: Solution) -> bool:
        """Exclude a solution that is over a capacity by less than HiGHS's tolerance.

        Adds the extended cover inequality (Balas 1975, doi:10.1007/BF01580440): when the set S is
        too heavy, so is any set of as many items that are in S or as heavy as its heaviest.

        Returns:
            Whether the solution was over a capacity.
        """
        chosen = (Decision.SAVE, Decision.OFFLOAD)
        over = False
        for decision, (column, weights, capacity) in zip(chosen, self._memories(), strict=True):
            cover = {i for i, d in enumerate(solution.decisions) if d is decision}
            if math.fsum(weights[i] for i in cover) > capacity:
                heaviest = max(weights[i] for i in cover)
                extended = cover | {i for i in range(self.size) if weights[i] >= heaviest}
                self._add({column + i: 1.0 for i in extended}, len(cover) - 1.0)
                over = True
        return over

    def _memories(self) -> list[tuple[int, list[float], float]]:
        """First column, bytes of each item and capacity, of the device and of the host."""
        items = self.problem.items
        return [
            (0, [item.bytes for item in items], self.problem.capacity),
            (self.size, [item.host_bytes for item in items], self.problem.host_capacity),
        ]

    def _add(self, row: Mapping[int, float], limit: float) -> None:
        if limit < math.inf:
            self.rows.append(row)
            self.limits.append(limit)

    def _add_decisions(self) -> None:
        """Rows that say what is computed again."""
        size = self.size
        for i, item in enumerate(self.problem.items):
            self._add({i: 1.0, size + i: 1.0}, 1.0)
            if item.needed:
                self._add({i: -1.0, size + i: -1.0, 2 * size + i: -1.0}, -1.0)
            for j in item.sources:
                self._add({2 * size + i: 1.0, j: -1.0, size + j: -1.0, 2 * size + j: -1.0}, 0.0)

    def _add_directions(self) -> None:
        """Rows that say how much of the transfers is exposed."""
        items = self.problem.items
        seconds_out = [item.seconds_out if item.offloadable else 0.0 for item in items]
        seconds_in = [item.seconds_in if item.offloadable else 0.0 for item in items]
        for column, seconds, hidden in (
            (3 * self.size, seconds_out, self.problem.hidden_out),
            (3 * self.size + 1, seconds_in, self.problem.hidden_in),
        ):
            row = {self.size + i: moved * self.second for i, moved in enumerate(seconds)}
            self._add(row | {column: -1.0}, hidden * self.second)

    def _constraints(self) -> scipy.optimize.LinearConstraint:
        entries = [(k, column, a) for k, row in enumerate(self.rows) for column, a in row.items()]
        rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        shape = (len(self.rows), 3 * self.size + 2)
        matrix = scipy.sparse.csr_array((values, (rows, columns)), shape=shape)
        return scipy.optimize.LinearConstraint(matrix, -math.inf, self.limits)
