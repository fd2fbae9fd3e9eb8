"""The planning problem as plain records: a three-way knapsack over residuals. No JAX here.

DELTA (2024) states rematerialisation as a 0/1 knapsack of memory against throughput; the records
below add the third way (offload, with each direction of the link on its own) and the chains of
recompute: dropping a residual whose source is dropped too costs the whole chain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jdelta._decision import Decision


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
        seconds_out: Seconds of device-to-host transfer if offloaded; ``inf`` forbids offload.
        seconds_in: Seconds of host-to-device transfer if offloaded; ``inf`` forbids offload.
        host_bytes: Host bytes it takes if offloaded.
        seconds_exposed: Seconds that its transfers add to the step even where there is compute to
            hide them: no schedule fits without a gap.
    """

    name: str
    bytes: float
    seconds: float
    sources: tuple[int, ...] = ()
    needed: bool = True
    seconds_out: float = math.inf
    seconds_in: float = math.inf
    host_bytes: float = 0.0
    seconds_exposed: float = 0.0

    @property
    def offloadable(self) -> bool:
        """Whether ``OFFLOAD`` is allowed at all."""
        return math.isfinite(self.seconds_out) and math.isfinite(self.seconds_in)


@dataclass(frozen=True)
class Problem:
    """Choose a decision for each item, so that what is kept fits and the step is slowed least.

    Attributes:
        items: The items, sources before what is computed from them.
        capacity: Device bytes that saved items may take together.
        host_capacity: Host bytes that offloaded items may take together.
        hidden_out: Seconds of device-to-host transfer that forward compute hides.
        hidden_in: Seconds of host-to-device transfer that backward compute hides.
    """

    items: tuple[Item, ...]
    capacity: float
    host_capacity: float = math.inf
    hidden_out: float = 0.0
    hidden_in: float = 0.0

    def recomputed(self, decisions: Sequence[Decision]) -> list[bool]:
        """Which items the backward pass computes again: dropped and needed, now or by a chain."""
        again = [
            item.needed and decision is Decision.RECOMPUTE
            for item, decision in zip(self.items, decisions, strict=True)
        ]
        for index in reversed(range(len(self.items))):
            if again[index]:
                for source in self.items[index].sources:
                    if decisions[source] is Decision.RECOMPUTE:
                        again[source] = True
        return again

    def overhead(self, decisions: Sequence[Decision]) -> float:
        """Seconds that ``decisions`` add to the step: recompute chains and exposed transfers."""
        seconds = out = into = 0.0
        again = self.recomputed(decisions)
        for item, decision, computed in zip(self.items, decisions, again, strict=True):
            if computed:
                seconds += item.seconds
            elif decision is Decision.OFFLOAD:
                seconds += item.seconds_exposed
                out += item.seconds_out
                into += item.seconds_in
        return seconds + max(0.0, out - self.hidden_out) + max(0.0, into - self.hidden_in)
