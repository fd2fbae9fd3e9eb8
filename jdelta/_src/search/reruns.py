"""What it takes to run iterations of long loops again."""

from __future__ import annotations

from jdelta._src.backends.backend import Backend
from jdelta._src.backends.chips import Rates
from jdelta._src.estimate.seconds import program_seconds
from jdelta._src.program.graph import Graph
from jdelta._src.program.loop_nest import walk
from jdelta._src.regions.binomial import runs_again
from jdelta._src.regions.long_loops import is_from_few_states


def rerun_seconds(graph: Graph, states: int, rates: Rates, backend: Backend) -> float:
    """Seconds that long loops take for the iterations that they run again.

    How often a loop of the backward pass runs is not in the program; the schedule says it.

    Args:
        graph: The step, traced with few states of its long loops.
        states: How many of them are kept at a time.
        rates: Rates of the target.
        backend: Compiler and devices of the target.
    """
    seconds = 0.0
    for loop, nest in walk(graph):
        if loop.body is not None and loop.equation and is_from_few_states(loop.equation):
            runs = [op.body for op in loop.body.operations if op.primitive == "while" and op.body]
            each = program_seconds(runs[-1], rates, backend)  # up to the iteration itself
            reruns = runs_again(loop.trips, min(states, loop.trips))
            seconds += nest.trips * (reruns + loop.trips) * each
    return seconds
