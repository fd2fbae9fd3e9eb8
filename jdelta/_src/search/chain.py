"""The regions of a step as a chain, where what enters them may be computed again, too.

The figures are those of the step with everything but that recomputed, as it is simulated: it has
all that enters regions alive until their own turns, so what else is alive is left over.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from jdelta._src.backends.target import Target
from jdelta._src.estimate.memory import Timeline
from jdelta._src.estimate.seconds import each_seconds
from jdelta._src.program.graph import Graph
from jdelta._src.program.names import RegionName
from jdelta._src.solver.nested import NestedRecompute, Stage

MOST_STAGES = 120
"""Stages of a chain that is solved: the work grows with the third power."""


@dataclass(frozen=True)
class Chain:
    """The regions of a step in order, and what it takes to run them in less.

    Attributes:
        entering: For each stage the names by which values of the stage before it enter it:
            ``((), ("h_1/input_1",), ("h_2/input_1",))``. What comes from further back stays.
        solved: The schedules.
    """

    entering: tuple[tuple[str, ...], ...]
    solved: NestedRecompute

    def levels(self, room: float) -> dict[str, int] | None:
        """The level of each value that is dropped so that no more than some bytes are alive.

        Returns:
            None if that cannot be.
        """
        levels = self.solved.levels(room)
        if levels is None:
            return None
        pairs = zip(self.entering, levels, strict=True)
        return {name: level for names, level in pairs for name in names if level}


@dataclass(frozen=True)
class _Stage:
    """A stage while the chain is put together.

    Attributes:
        region: The region; empty for what is in front of the first.
        begin: The operation of the forward pass that names what enters it.
        names: What enters it, and no other, from the stage before.
        bytes: Of that.
    """

    region: str
    begin: int
    names: tuple[str, ...]
    bytes: int


def chain_of(timeline: Timeline, pinned: Set[str], target: Target) -> Chain | None:
    """The chain of a step.

    Args:
        timeline: The step with everything recomputed but what enters regions.
        pinned: Names of what must stay.
        target: What it is for.

    Returns:
        None if nothing that enters a region can be computed again, or if there are too many.
    """
    graph, live = timeline.graph, timeline.live
    stages = [_Stage("", 0, (), 0), *_stages(graph, pinned)]
    if not 1 < len(stages) <= MOST_STAGES:
        return None
    seconds = [
        0.0 if op.backward else needed
        for op, needed in zip(
            graph.operations, each_seconds(graph, target.rates, target.backend), strict=True
        )
    ]
    turns = _turns(graph, [stage.region for stage in stages])
    ends = [len(live), *turns]
    nexts = [*(stage.begin for stage in stages[1:]), turns[-1]]
    alive = itertools.accumulate(stage.bytes for stage in stages)
    chain = [
        Stage(
            stage.bytes,
            sum(seconds[stage.begin : after]),
            max(live[turn:end], default=entered) - entered,
        )
        for stage, after, turn, end, entered in zip(stages, nexts, turns, ends, alive, strict=False)
    ]
    loss = max(
        live[i] - sum(stage.bytes for stage in stages if stage.begin <= i)
        for i in range(min(turns[-1] + 1, len(live)))
    )
    return Chain(tuple(stage.names for stage in stages), NestedRecompute(chain, loss))


def _stages(graph: Graph, pinned: Set[str]) -> list[_Stage]:
    """The stages after the first, in order."""
    stages: list[_Stage] = []
    for region, group in itertools.groupby(_inputs(graph), lambda one: one.name.region):
        some = list(group)
        before = stages[-1].begin if stages else 0
        adjacent = [one for one in some if one.maker >= before and one.name not in pinned]
        if adjacent:
            size = sum(graph.values[one.value].bytes for one in adjacent)
            stages.append(_Stage(region, some[0].begin, tuple(one.name for one in adjacent), size))
    return stages


class _Input(NamedTuple):
    """What enters a region.

    Attributes:
        value: The buffer.
        maker: The operation that makes it.
        begin: The operation that names it.
        name: Its name.
    """

    value: int
    maker: int
    begin: int
    name: RegionName


def _inputs(graph: Graph) -> list[_Input]:
    """What enters one region and may be computed again, in order."""
    buffers, makers = graph.buffers(), graph.producers()
    inputs: dict[int, list[_Input]] = {}
    for index, op in enumerate(graph.operations):
        if not isinstance(op.name, RegionName) or not op.name.is_input or op.backward:
            continue
        value = buffers[op.inputs[0]]
        maker = makers.get(value)
        if maker is not None and graph.operations[maker].differentiated:
            inputs.setdefault(value, []).append(_Input(value, maker, index, op.name))
    return [one for (one, *others) in inputs.values() if not others]


def _turns(graph: Graph, regions: Sequence[str]) -> list[int]:
    """Where the turn of each region begins in the backward pass.

    One with nothing to compute again has none of its own.
    """
    first: dict[str, int] = {}
    for index, op in enumerate(graph.operations):
        if op.recomputed and isinstance(op.name, RegionName):
            first.setdefault(op.name.region, index)
    turns: list[int] = []
    for region in regions:
        turns.append(first.get(region, turns[-1] if turns else len(graph.operations)))
    return turns
