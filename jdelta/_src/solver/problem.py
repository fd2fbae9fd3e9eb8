"""The planning problem as plain records: a knapsack with links to other memories. No JAX here.

DELTA (2024) states rematerialisation as a 0/1 knapsack of memory against throughput; the records
below add links (an item may leave for another memory, each direction of its link on its own) and
the chains of recompute: dropping a residual whose source is dropped too costs the whole chain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jdelta._src.decision import Decision

AWAY = (Decision.OFFLOAD, Decision.SPILL)
"""The decisions that move an item to another memory."""


@dataclass(frozen=True)
class Move:
    """What it takes to move an item to another memory and back.

    Attributes:
        to: The decision that it belongs to, one of ``AWAY``.
        seconds_out: Seconds on the link out.
        seconds_in: Seconds on the link back.
        bytes: Bytes that the item takes there.
        seconds_exposed: Seconds that the transfers add to the step even where there is compute to
            hide them: no schedule fits without a gap.
    """

    to: Decision
    seconds_out: float
    seconds_in: float
    bytes: float
    seconds_exposed: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that it adds to the step when none are hidden."""
        return self.seconds_out + self.seconds_in + self.seconds_exposed


@dataclass(frozen=True)
class Item:
    """One value the planner decides about.

    Attributes:
        name: Unique name of the value.
        bytes: Device bytes it takes from forward to backward when saved (all loop iterations).
        seconds: Seconds to compute it once more, given its sources (all loop iterations).
        sources: Indices in ``Problem.items`` of the items it is computed from; each is smaller
            than the item's own index, so the tuple of items is in topological order.
        needed: Whether the backward pass itself reads it. An item that is not needed costs
            nothing when dropped, unless it is the source of something that is recomputed.
        moves: How it may leave the device, at most one move for each decision.
        holding: Seconds that saving it costs: copies to where it stays, and from there. None where
            it takes no bytes.
    """

    name: str
    bytes: float
    seconds: float
    sources: tuple[int, ...] = ()
    needed: bool = True
    moves: tuple[Move, ...] = ()
    holding: float = 0.0

    def move(self, to: Decision) -> Move | None:
        """How it moves by a decision; None where it may not."""
        return next((move for move in self.moves if move.to is to), None)


@dataclass(frozen=True)
class Memory:
    """Another memory, and the link to it.

    Attributes:
        decision: What moves an item there, one of ``AWAY``.
        capacity: Bytes that items may take there together.
        hidden_out: Seconds on the link out that forward compute hides.
        hidden_in: Seconds on the link back that backward compute hides.
    """

    decision: Decision
    capacity: float = math.inf
    hidden_out: float = 0.0
    hidden_in: float = 0.0


@dataclass(frozen=True)
class Problem:
    """Choose a decision for each item, so that what is kept fits and the step is slowed least.

    Attributes:
        items: The items, sources before what is computed from them.
        capacity: Device bytes that saved items may take together.
        memories: The other memories, one for each decision that moves an item.
    """

    items: tuple[Item, ...]
    capacity: float
    memories: tuple[Memory, ...] = ()

    def recomputed(self, decisions: Sequence[Decision]) -> list[bool]:
        """Which items the backward pass computes again: dropped and needed, now or by a chain."""
        recomputed = [
            item.needed and decision is Decision.RECOMPUTE
            for item, decision in zip(self.items, decisions, strict=True)
        ]
        for index in reversed(range(len(self.items))):
            if recomputed[index]:
                for source in self.items[index].sources:
                    if decisions[source] is Decision.RECOMPUTE:
                        recomputed[source] = True
        return recomputed

    def moved(self, decisions: Sequence[Decision], memory: Memory) -> list[Move]:
        """How the items move that decisions put into a memory."""
        pairs = zip(self.items, decisions, strict=True)
        moves = [item.move(d) for item, d in pairs if d is memory.decision]
        return [move for move in moves if move is not None]

    def recompute_seconds(self, decisions: Sequence[Decision]) -> float:
        """Seconds to compute again what ``decisions`` drop, chains included."""
        pairs = zip(self.items, self.recomputed(decisions), strict=True)
        return sum(item.seconds for item, is_recomputed in pairs if is_recomputed)

    def overhead(self, decisions: Sequence[Decision]) -> float:
        """Seconds that ``decisions`` add to a step that saves all its backward pass reads.

        They are recompute, exposed transfers, and what it costs to save more; less than zero where
        it costs less to recompute.
        """
        seconds = self.recompute_seconds(decisions)
        for item, decision in zip(self.items, decisions, strict=True):
            seconds += item.holding * ((decision is Decision.SAVE) - item.needed)
        for memory in self.memories:
            moves = self.moved(decisions, memory)
            seconds += sum(move.seconds_exposed for move in moves)
            seconds += max(0.0, sum(move.seconds_out for move in moves) - memory.hidden_out)
            seconds += max(0.0, sum(move.seconds_in for move in moves) - memory.hidden_in)
        return seconds
