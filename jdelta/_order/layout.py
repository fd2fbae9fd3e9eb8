"""Offsets for tensors whose lives are known, in little more memory than is alive at once.

Long-lived tensors first, from the bottom, then the others; in each class by decreasing size, each
into the gap that it fits best (ROAM's layout, reconstructed). What is so small that it cannot
matter is stacked on top. Where that leaves too much unused, large tensors that end up high are put
ahead of others, at random, as long as no more memory is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jdelta._order.problem import Ints

SMALL = 1 / 1024
"""Part of the peak that small tensors may hold at once; they are stacked with less care."""

SHORT = (64, 256, 1024, 16)
"""Places in the order that a short life spans at most, tried in turn."""

TIGHT = 1.002
"""Times what is alive at once that is not worth another try."""

LOOSE = 1.005
"""Times what is alive at once from which on it is worth many tries."""

LARGE = 1 / 256
"""Part of what is alive at once from which on a tensor may be put ahead of others then."""

STARTS, PLACED = 4, 50_000
"""How often the search begins anew, and how many tensors it places in all."""


def layout(sizes: Ints, first: Ints, last: Ints) -> Ints:
    """An offset for each tensor, so that no two share a byte while both are alive.

    Args:
        sizes: Bytes of each tensor.
        first: First place in the order at which each is alive.
        last: Last place, included.
    """
    least = _peak(sizes, first, last)
    tried: list[Ints] = []
    for short in SHORT:
        tried.append(_layout(sizes, first, last, short))
        if arena(sizes, tried[-1]) <= TIGHT * least:
            return tried[-1]
    if min(arena(sizes, offsets) for offsets in tried) > LOOSE * least:
        for offsets in _searched(sizes, first, last, least):
            tried.append(offsets)
            if arena(sizes, offsets) <= LOOSE * least:
                break
    return min(tried, key=lambda offsets: arena(sizes, offsets))


def arena(sizes: Ints, offsets: Ints) -> int:
    """Bytes that tensors at these offsets take together."""
    return int((offsets + sizes).max(initial=0))


def _searched(sizes: Ints, first: Ints, last: Ints, least: int) -> Iterator[Ints]:
    """Layouts of large tensors, long-lived ones first but for those moved ahead, and the rest."""
    by_life, by_size = np.lexsort((-sizes, first - last)), np.lexsort((first - last, -sizes))
    is_large = sizes >= LARGE * least
    large, rest = by_life[is_large[by_life]], by_size[~is_large[by_size]]

    def ends_of(order: Ints) -> Ints:
        return _placed(order, sizes, first, last) + sizes

    for seed in range(STARTS):
        random = np.random.default_rng(seed)
        order, ends = large, ends_of(large)
        for _ in range(PLACED // STARTS // max(1, len(large))):
            high = np.flatnonzero(ends[order] > TIGHT * least)
            if not high.any():
                break
            place = random.choice(high[high > 0])
            ahead = np.insert(np.delete(order, place), random.integers(place), order[place])
            moved = ends_of(ahead)
            if moved.max() <= ends.max():
                order, ends = ahead, moved
        yield _placed(np.concatenate([order, rest]), sizes, first, last)


def _placed(order: Ints, sizes: Ints, first: Ints, last: Ints) -> Ints:
    """Offsets of tensors placed in an order, each into the gap that it fits best; else zero."""
    offsets = np.zeros(len(sizes), dtype=np.int64)
    rows = _Rows()
    for index in order:
        taken = rows.meeting(int(first[index]), int(last[index]))
        offsets[index] = _best_gap(taken, int(sizes[index]))
        end = int(offsets[index] + sizes[index])
        rows.add(int(first[index]), int(last[index]), int(offsets[index]), end)
    return offsets


def _layout(sizes: Ints, first: Ints, last: Ints, short: int) -> Ints:
    offsets = np.zeros(len(sizes), dtype=np.int64)
    by_size = np.lexsort((first - last, -sizes))
    by_size = by_size[sizes[by_size] > 0]
    small = len(by_size) - _small(sizes[by_size], first[by_size], last[by_size])
    large = by_size[:small]
    memory = _Memory(int(last.max(initial=0)) + 1, short)
    is_short = last[large] - first[large] < short
    for chosen, place in ((~is_short, memory.place_long), (is_short, memory.place_short)):
        for index in large[chosen]:
            offsets[index] = place(int(sizes[index]), int(first[index]), int(last[index]))
    _stack(offsets, by_size[small:], sizes, first, last, memory.top)
    return offsets


def _small(sizes: Ints, first: Ints, last: Ints) -> int:
    """How many of the smallest tensors (the last ones) hold too little at once to matter."""
    limit = SMALL * _peak(sizes, first, last)
    few, many = 0, len(sizes)
    while few < many:
        count = (few + many + 1) // 2
        rest = slice(len(sizes) - count, None)
        if _peak(sizes[rest], first[rest], last[rest]) <= limit:
            few = count
        else:
            many = count - 1
    return few


def _peak(sizes: Ints, first: Ints, last: Ints) -> int:
    changes = np.zeros(int(last.max(initial=0)) + 2, dtype=np.int64)
    np.add.at(changes, first, sizes)
    np.subtract.at(changes, last + 1, sizes)
    return int(np.cumsum(changes).max(initial=0))


def _stack(offsets: Ints, chosen: Ints, sizes: Ints, first: Ints, last: Ints, bottom: int) -> None:
    """Put tensors on top of each other, each as low as what is below it allows."""
    height = np.full(int(last.max(initial=0)) + 1, bottom, dtype=np.int64)
    for index in chosen:
        span = slice(first[index], last[index] + 1)
        offsets[index] = height[span].max()
        height[span] = offsets[index] + sizes[index]


@dataclass
class _Rows:
    """Tensors that are placed: first and last place in the order, offset and end of each."""

    table: Ints = field(default_factory=lambda: np.zeros((16, 4), dtype=np.int64))
    count: int = 0

    def add(self, *row: int) -> None:
        if self.count == len(self.table):
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        self.table[self.count] = row
        self.count += 1

    def meeting(self, first: int, last: int) -> Ints:
        """Offset and end of those that are alive between two places."""
        rows = self.table[: self.count]
        return rows[(rows[:, 0] <= last) & (rows[:, 1] >= first), 2:]


class _Memory:
    """What is placed already: long lives in one table, short ones in one for each stretch.

    Long ones are placed first. A short one then meets few of them that begin or end near it, and
    the others as the few stretches of memory that they fill together.
    """

    def __init__(self, places: int, stretch: int):
        self._stretch = stretch
        self._long = _Rows()
        self._short = [_Rows() for _ in range(places // stretch + 1)]
        self._near: dict[int, tuple[Ints, _Rows]] = {}
        self.top = 0

    def place_long(self, size: int, first: int, last: int) -> int:
        """The offset of the smallest gap that a tensor fits in; it is taken."""
        return self._take(self._long.meeting(first, last), size, first, last, self._long)

    def place_short(self, size: int, first: int, last: int) -> int:
        """The same for a short life, after all long ones."""
        begin = first // self._stretch
        if begin not in self._near:
            self._near[begin] = self._long_near(begin)
        filled, others = self._near[begin]
        near = self._short[max(0, begin - 1) : last // self._stretch + 1]
        taken = [rows.meeting(first, last) for rows in (others, *near)]
        return self._take(np.concatenate([filled, *taken]), size, first, last, self._short[begin])

    def _take(self, taken: Ints, size: int, first: int, last: int, rows: _Rows) -> int:
        offset = _best_gap(taken, size)
        rows.add(first, last, offset, offset + size)
        self.top = max(self.top, offset + size)
        return offset

    def _long_near(self, begin: int) -> tuple[Ints, _Rows]:
        """Memory that long lives fill all through two stretches, and the others alive there."""
        first, last = begin * self._stretch, (begin + 2) * self._stretch - 1
        rows = self._long.table[: self._long.count]
        rows = rows[(rows[:, 0] <= last) & (rows[:, 1] >= first)]
        through = (rows[:, 0] <= first) & (rows[:, 1] >= last)
        others = rows[~through]
        return _merged(rows[through, 2:]), _Rows(others, len(others))


def _merged(spans: Ints) -> Ints:
    """The same bytes in as few spans as can be."""
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(spans[:, 1])
    starts = np.flatnonzero(np.concatenate([[True], spans[1:, 0] > ends[:-1]]))
    stops = np.concatenate([starts[1:], [len(spans)]]) - 1
    return np.stack([spans[starts, 0], ends[stops]], axis=1)


def _best_gap(taken: Ints, size: int) -> int:
    """Where the smallest gap between taken stretches begins that has the size; else their end."""
    if not len(taken):
        return 0
    taken = taken[np.argsort(taken[:, 0])]
    ends = np.maximum.accumulate(taken[:, 1])
    starts = np.concatenate([[0], ends[:-1]])
    room = taken[:, 0] - starts
    room[room < size] = np.iinfo(np.int64).max
    best = int(room.argmin())
    return int(starts[best] if room[best] < np.iinfo(np.int64).max else ends[-1])
