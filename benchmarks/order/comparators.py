"""Other ways to order operators and to lay out memory, that the study `order` compares with.

All take the same `Problem` as jdelta does, so that only the planning differs.
"""

import bisect
import heapq
import time
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from jdelta._src.order import Problem, arena

BLOCK = 512
"""What PyTorch's caching allocator rounds sizes up to, in bytes."""

MOST_VARIABLES = 2_000_000
"""Variables beyond which the integer program is not even built: it would not fit in memory."""


def online(problem: Problem, order) -> int:
    """Memory of an allocator that learns of a tensor when it is made: best fit, merging gaps.

    As PyTorch's caching allocator without its rounding up to segments, so in its favour.
    """
    _, last = problem.lives(order)
    dying = [[] for _ in range(len(order) + 1)]
    live: list[tuple[int, int]] = []  # begin and end of each live tensor
    top = 0
    for place, operator in enumerate(order):
        for span in dying[place]:
            live.pop(bisect.bisect_left(live, span))
        for tensor in problem.allocated[operator]:
            size = -(-problem.tensors[tensor].bytes // BLOCK) * BLOCK
            if size:
                begin = _best_gap(live, size)
                bisect.insort(live, (begin, begin + size))
                dying[last[tensor] + 1].append((begin, begin + size))
                top = max(top, begin + size)
    return top


def _best_gap(live: list[tuple[int, int]], size: int) -> int:
    spans = np.array(live, dtype=np.int64).reshape(-1, 2)
    begins = np.concatenate([[0], spans[:, 1]])
    room = spans[:, 0] - begins[:-1]
    fits = np.flatnonzero(room >= size)
    return int(begins[fits[room[fits].argmin()] if len(fits) else -1])


def greedy_list(problem: Problem) -> list[int]:
    """The operator that frees most of those that can run, as in XLA's list scheduler."""
    users = [len(t.users) + t.kept for t in problem.tensors]
    waiting = [len(before) for before in problem.predecessors]
    ran = [False] * len(problem)

    def growth(i: int) -> int:
        allocated = sum(problem.tensors[t].bytes for t in problem.allocated[i] if users[t])
        return allocated - sum(problem.tensors[t].bytes for t in problem.used[i] if users[t] == 1)

    heap = [(growth(i), i) for i in problem.program if not waiting[i]]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        grown, i = heapq.heappop(heap)
        if ran[i] or grown != growth(i):
            continue  # an entry from before another one made it cheaper
        ran[i] = True
        order.append(i)
        changed = set()
        for t in problem.used[i]:
            users[t] -= 1
            if users[t] == 1:
                changed |= {u for u in problem.tensors[t].users if not ran[u] and not waiting[u]}
        for after in problem.successors[i]:
            waiting[after] -= 1
            if not waiting[after]:
                changed.add(after)
        for other in changed:
            heapq.heappush(heap, (growth(other), other))
    return order


def greedy_layout(problem: Problem, order) -> int:
    """Memory of a greedy layout: by decreasing size, each at the lowest place that is free."""
    first, last = problem.lives(order)
    table = np.zeros((len(problem.tensors), 4), dtype=np.int64)
    offsets = np.zeros(len(problem.tensors), dtype=np.int64)
    for count, t in enumerate(np.argsort(-problem.bytes, kind="stable")):
        size = problem.bytes[t]
        rows = table[:count]
        rows = rows[(rows[:, 0] <= last[t]) & (rows[:, 1] >= first[t]), 2:]
        rows = rows[rows[:, 0].argsort()]
        ends = np.concatenate([[0], np.maximum.accumulate(rows[:, 1])])
        fits = np.flatnonzero(rows[:, 0] - ends[:-1] >= size)
        offsets[t] = ends[fits[0] if len(fits) else -1]
        table[count] = first[t], last[t], offsets[t], offsets[t] + size
    return arena(problem.bytes, offsets)


@dataclass(frozen=True)
class Solved:
    """What the integer program came to.

    Attributes:
        peak: Bytes alive at the peak of its order; None without an order.
        optimal: Whether that is proven to be the least.
        seconds: Time it took.
        variables: Size of the program.
    """

    peak: int | None
    optimal: bool
    seconds: float
    variables: int


def integer_program(problem: Problem, limit: float) -> Solved:
    """MODeL's order (Steiner et al. 2022, arXiv 2210.12924) as an integer program, in HiGHS.

    After its formulation over tensors and steps (reconstructed): an operator's results are created
    at one step (C), at the earliest when all operators before it can have run and at the latest
    when those after it still can (its spans); created or preserved (P) until the last use; the
    memory of a step is what is created or preserved there, and the largest is least. Here the sum
    of C up to a step says whether an operator has run, and P follows from that of maker and users.
    """
    start = time.perf_counter()
    count = len(problem)
    earliest, latest = _spans(problem)
    width = latest - earliest
    # Columns of "has run by step s", s in [earliest, latest).
    column = np.concatenate([[0], np.cumsum(width)])
    lives = [_life(earliest, latest, t) for t in problem.tensors]
    total = int(column[-1]) + sum(end - begin for begin, end in lives) + 1
    if total > MOST_VARIABLES:
        return Solved(None, False, 0.0, total)
    rows = _Rows()

    def ran(i: int, s: int) -> tuple[int | None, int]:
        """Column of "operator i has run by step s", or the constant that it is."""
        if s < earliest[i]:
            return None, 0
        return (None, 1) if s >= latest[i] else (int(column[i] + s - earliest[i]), 0)

    for i in problem.program:
        for s in range(earliest[i] + 1, latest[i]):
            rows.add([(*ran(i, s - 1), 1), (*ran(i, s), -1)], 0)
        for p in problem.predecessors[i]:
            for s in range(earliest[i], latest[p] + 1):
                rows.add([(*ran(i, s), 1), (*ran(p, s - 1), -1)], 0)
    for s in range(count):  # one operator a step
        rows.add([(*ran(i, s), 1) for i in problem.program], s + 1)
        rows.add([(*ran(i, s), -1) for i in problem.program], -s - 1)
    alive = int(column[-1])
    scale = max(1, int(problem.bytes.max(initial=1)))
    memory = [[] for _ in range(count)]
    for t, (begin, end) in zip(problem.tensors, lives, strict=True):
        for s in range(begin, end):
            here = (alive, 0, -1)
            alive += 1
            memory[s].append((here[0], 0, t.bytes / scale))
            if t.kept or not t.users:
                before = [] if t.kept else [(*ran(t.maker, s - 1), -1)]
                rows.add([(*ran(t.maker, s), 1), *before, here], 0)
            else:
                for u in t.users:
                    rows.add([(*ran(t.maker, s), 1), (*ran(u, s - 1), -1), here], 0)
    for terms in memory:
        rows.add([*terms, (total - 1, 0, -1)], 0)
    cost = np.zeros(total)
    cost[-1] = 1
    integrality = np.zeros(total)
    integrality[: int(column[-1])] = 1
    upper = np.ones(total)
    upper[-1] = np.inf
    done = milp(
        cost,
        integrality=integrality,
        bounds=Bounds(0, upper),
        constraints=rows.constraint(total),
        options={"time_limit": limit},
    )
    seconds = time.perf_counter() - start
    if done.x is None:
        return Solved(None, False, seconds, total)
    steps = [
        earliest[i] + width[i] - round(done.x[column[i] : column[i + 1]].sum())
        for i in range(count)
    ]
    order = sorted(problem.program, key=steps.__getitem__)
    return Solved(problem.peak(order), done.status == 0, seconds, total)


def _spans(problem: Problem):
    """The earliest and the latest step of each operator."""
    count = len(problem)
    before, after = np.zeros((2, count, count), dtype=bool)
    for i in problem.program:
        for p in problem.predecessors[i]:
            before[i] |= before[p]
            before[i, p] = True
    after = before.T
    return before.sum(1), count - 1 - after.sum(1)


def _life(earliest, latest, tensor) -> tuple[int, int]:
    """Steps at which a tensor can be alive."""
    if tensor.kept:
        return int(earliest[tensor.maker]), len(earliest)
    ends = [latest[u] for u in (tensor.maker, *tensor.users)]
    return int(earliest[tensor.maker]), int(max(ends)) + 1


class _Rows:
    """Rows `sum of factor * (column or constant) <= bound` of the integer program."""

    def __init__(self):
        self.cells: list[tuple[int, int, float]] = []
        self.bounds: list[float] = []

    def add(self, terms, bound: float) -> None:
        fixed = sum(factor * constant for column, constant, factor in terms if column is None)
        cells = [(len(self.bounds), c, factor) for c, _, factor in terms if c is not None]
        if cells:
            self.cells += cells
            self.bounds.append(bound - fixed)

    def constraint(self, columns: int) -> LinearConstraint:
        row, column, factor = zip(*self.cells, strict=True)
        shape = len(self.bounds), columns
        return LinearConstraint(coo_array((factor, (row, column)), shape).tocsr(), ub=self.bounds)
