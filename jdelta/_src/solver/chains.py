"""Prices of recompute chains, kept up to date while items are kept and dropped."""

import math
from collections.abc import Sequence

from jdelta._src.solver.problem import Item


class Chains:
    """What toggling an item (keeping a dropped one, dropping a kept one) does to recompute.

    An item is *in use* when the backward pass reads it or a recomputed item is computed from it;
    what is in use and not kept is recomputed. Prices are exact, chains and shared sources included
    (DELTA's re-pricing, reconstructed), and only the chain that changes is walked.

    Attributes:
        kept: Whether each item is kept, on the device or on the host.
        uses: How many readers each item has: the backward pass, and recomputed items.
    """

    def __init__(self, items: Sequence[Item]):
        self.items = items
        self.sources = [tuple(set(item.sources)) for item in items]
        self.consumers: list[list[int]] = [[] for _ in items]
        for index, sources in enumerate(self.sources):
            for source in sources:
                self.consumers[source].append(index)
        self.start([False] * len(items))

    def start(self, kept: Sequence[bool]) -> None:
        """Begin anew with these items kept."""
        self.kept = list(kept)
        self.uses = [int(item.needed) for item in self.items]
        for index in reversed(range(len(self.items))):
            if self.uses[index] and not self.kept[index]:
                for source in self.sources[index]:
                    self.uses[source] += 1

    def seconds(self, index: int, limit: float = math.inf) -> float:
        """Seconds of recompute that toggling an item takes or spares.

        Args:
            index: The item.
            limit: Seconds beyond which the price of dropping is not followed further: chains can
                be as long as the model is deep, and a high price is a high price.
        """
        return sum(self.items[link].seconds for link in self._chain(index, limit))

    def toggle(self, index: int) -> set[int]:
        """Keep or drop an item, and tell whose price may have changed."""
        chain = self._chain(index, math.inf)
        step = 1 if self.kept[index] else -1
        self.kept[index] = not self.kept[index]
        for link in chain:
            for source in self.sources[link]:
                self.uses[source] += step
        return self._touched(index, chain)

    def _chain(self, index: int, limit: float) -> list[int]:
        """The items whose recompute begins or ends when one is toggled."""
        if not self.uses[index]:
            return []
        return self._joining(index, limit) if self.kept[index] else self._leaving(index)

    def _joining(self, index: int, limit: float) -> list[int]:
        """A kept item, and the sources that come into use when it is dropped."""
        chain, seen = [index], {index}
        for link in chain:
            limit -= self.items[link].seconds
            if limit < 0:
                break
            for source in self.sources[link]:
                if not (self.kept[source] or self.uses[source] or source in seen):
                    seen.add(source)
                    chain.append(source)
        return chain

    def _leaving(self, index: int) -> list[int]:
        """A dropped item, and the sources that lose their last reader when it is kept."""
        chain = [index]
        lost: dict[int, int] = {}
        for link in chain:
            for source in self.sources[link]:
                lost[source] = lost.get(source, 0) + 1
                if lost[source] == self.uses[source] and not self.kept[source]:
                    chain.append(source)
        return chain

    def _touched(self, index: int, chain: Sequence[int]) -> set[int]:
        """Items whose chain runs through a change: sources, and what is computed from the change.

        Where a source still has three readers or more, that one of them changed is ignored: its
        price is put right when it is looked at next.
        """
        touched = {source for link in chain for source in self.sources[link]}
        front = [index, *chain]
        front += [source for source in touched if self.uses[source] <= 2 and self._through(source)]
        for item in front:
            for consumer in self.consumers[item]:
                if consumer not in touched:
                    touched.add(consumer)
                    if self._through(consumer):
                        front.append(consumer)
        return touched

    def _through(self, index: int) -> bool:
        """Whether chains run through an item, rather than end there."""
        return not (self.kept[index] or self.items[index].needed)
