"""The loops around a part of a step: those that keep its values, and those that repeat it.

A loop that the step differentiates keeps a value for each of its iterations, since a second loop
reads them back. A loop with the whole gradient inside (micro-batches, several steps in one) has the
backward pass in the same iteration: it keeps nothing from one to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jdelta._src.program.graph import Graph, Operation


@dataclass(frozen=True)
class Nest:
    """The loops around an operation.

    Attributes:
        kept: How many instances of a value are alive at once: iterations of differentiated loops.
        loops: Number of those loops.
        repeats: How often that happens in a step: iterations of the loops around the gradient.
        together: Whether one of those loops runs its body several times in an iteration, as
            compiled: ``scan(unroll=2)``.
    """

    kept: int = 1
    loops: int = 0
    repeats: int = 1
    together: bool = False

    @property
    def trips(self) -> int:
        """How often the operation runs in a step."""
        return self.kept * self.repeats

    def inside(self, op: Operation) -> Nest:
        """The loops around the operations in the body of a loop, or in a branch of a ``cond``."""
        if op.primitive == "cond":
            return self
        if op.differentiated or self.loops:
            together = self.together or op.params.get("unroll", 1) > 1
            return Nest(self.kept * op.trips, self.loops + 1, self.repeats, together)
        return Nest(self.kept, self.loops, self.repeats * op.trips)


OUTSIDE = Nest()
"""No loop around it."""


def walk(graph: Graph, nest: Nest = OUTSIDE) -> Iterator[tuple[Operation, Nest]]:
    """All operations in program order, each with the loops around it."""
    for op in graph.operations:
        yield op, nest
        for body in op.bodies:
            yield from walk(body, nest.inside(op))
