"""Parts of a program that can be ordered by themselves."""

from __future__ import annotations

from jdelta._src.order.problem import Problem


def separators(problem: Problem) -> list[int]:
    """Operators that all others either come before or after, in every order.

    Best orders of what lies between them make the best order of the whole (ROAM). Found in one pass
    over program order: all operators up to one lead to it if it is the only one of them without a
    successor among them, since from any operator a path goes on until there is none. Likewise all
    from it on depend on it if it is the only one of them without a predecessor among them.
    """
    count = len(problem)
    ends, starts = [0] * (count + 1), [0] * (count + 1)
    for index in problem.program:
        first = min(problem.successors[index], default=count)
        ends[index] += 1  # an end of the program up to here, till its first successor comes
        ends[first] -= 1
        last = max(problem.predecessors[index], default=-1)
        starts[last + 1] += 1  # a start of the program from there on, till it comes itself
        starts[index + 1] -= 1
    places: list[int] = []
    open_ends = open_starts = 0
    for index in problem.program:
        open_ends += ends[index]
        open_starts += starts[index]
        if open_ends == open_starts == 1:
            places.append(index)
    return places
