"""Offsets for tensors whose lives are known, in little more memory than is alive at once.

Long-lived tensors first, from the bottom, then the others; in each class by decreasing size, each
into the gap that it fits best (ROAM's layout, reconstructed). What is so small that it cannot
matter is stacked on top. Where that leaves too much unused, large tensors that end up high are put
ahead of others, at random, as long as no more memory is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jdelta._src.order.problem import Ints, bytes_alive

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

LONG = 1024
"""Places from which on lives of small tensors are stacked by groups."""

BLOCK = 32
"""Stretches of places that lives are sorted out for together."""

MERGED = 256
"""Long lives that are placed before those at the centre are merged again."""

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
        taken = rows.taken(int(first[index]), int(last[index]))
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
    is_short = last[large] - first[large] < short
    long = large[~is_short]
    centre = int(_alive_at(np.ones_like(long), first[long], last[long]).argmax())
    memory = _Memory(short, centre)
    for chosen, place in (
        (long, memory.place_long),
        (large[is_short], memory.place_short),
    ):
        tensors = (values[chosen].tolist() for values in (sizes, first, last))
        offsets[chosen] = list(map(place, *tensors))
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
    return int(_alive_at(sizes, first, last).max())


def _alive_at(sizes: Ints, first: Ints, last: Ints) -> Ints:
    """What is alive at each place up to the last end, of which there is always one."""
    return bytes_alive(sizes, first, last, int(last.max(initial=0)) + 1)


def _stack(offsets: Ints, chosen: Ints, sizes: Ints, first: Ints, last: Ints, bottom: int) -> None:
    """Put tensors on top of each other, each as low as what is below it allows."""
    height = np.full(int(last.max(initial=0)) + 1, bottom, dtype=np.int64)
    is_long = last[chosen] - first[chosen] >= LONG
    for place, group in _meeting(chosen[is_long], first, last):
        start, end = int(first[group].min()), int(last[group].max())
        tops = int(height[start : end + 1].max()) + sizes[group].cumsum()
        offsets[group] = tops - sizes[group]
        before, after = np.zeros(place - start + 1, np.int64), np.zeros(end - place + 1, np.int64)
        np.maximum.at(before, first[group] - start, tops)
        np.maximum.at(after, end - last[group], tops)
        for span, reached in (
            (height[start : place + 1], np.maximum.accumulate(before)),
            (height[place : end + 1], np.maximum.accumulate(after)[::-1]),
        ):
            np.maximum(span, reached, out=span)
    rest = chosen[~is_long]
    lives = (values[rest].tolist() for values in (sizes, first, last))
    for index, size, start, end in zip(rest.tolist(), *lives, strict=True):
        span = height[start : end + 1]
        top = int(span.max())
        offsets[index] = top
        span[:] = top + size


def _meeting(chosen: Ints, first: Ints, last: Ints) -> Iterator[tuple[int, Ints]]:
    """Groups of lives with a place that all of a group share, longest lives of a group first.

    The place is the one in a life that the largest power of two divides.
    """
    powers = np.frexp((first[chosen] ^ last[chosen]).astype(np.float64))[1] - 1
    places = last[chosen] >> powers << powers
    order = np.lexsort((first[chosen] - last[chosen], places, -powers))
    same = (np.diff(powers[order]) == 0) & (np.diff(places[order]) == 0)
    for group in np.split(order, np.flatnonzero(~same) + 1):
        if group.size:
            yield int(places[group[0]]), chosen[group]


class _Rows:
    """Tensors that are placed, by offset: first and last place in the order, offset and end."""

    def __init__(self, table: Ints | None = None):
        self.table = np.zeros((4, 16), dtype=np.int64) if table is None else table
        self.count = 0 if table is None else table.shape[1]

    @property
    def placed(self) -> Ints:
        """The part of the table that is filled."""
        return self.table[:, : self.count]

    def add(self, first: int, last: int, offset: int, end: int) -> None:
        count, table = self.count, self.table
        if count == table.shape[1]:
            self.table = np.concatenate([table, np.zeros((4, count + 16), np.int64)], axis=1)
            table = self.table
        at = int(table[2, :count].searchsorted(offset))
        table[:, at + 1 : count + 1] = table[:, at:count]
        table[:, at] = first, last, offset, end
        self.count += 1

    def taken(self, first: int, last: int) -> Ints:
        """Offsets and ends of those alive between two places, by offset."""
        rows = self.placed
        return rows[2:].compress((rows[0] <= last) & (rows[1] >= first), axis=1)


class _Memory:
    """What is placed already: long lives, then short ones in a table for each stretch of places.

    All long ones are placed first. A short one then meets the few that begin or end in a stretch of
    its own, and the others as the few spans of memory that they fill together all through it.
    Likewise a long one that is alive at the centre, as most are, meets the others that are.
    """

    def __init__(self, places_in_stretch: int, centre: int):
        self._places = places_in_stretch
        self._centre = centre
        self._long, self._central = _Rows(), _Rows()
        self._few = MERGED
        self._blocks: dict[int, Ints] = {}
        self._stretches: dict[int, _Rows] = {}
        self.top = 0

    def place_long(self, size: int, first: int, last: int) -> int:
        """The offset of the smallest gap that a tensor fits in; it is taken."""
        rows, other = self._long, self._central
        if first <= self._centre <= last:
            rows, other = other, rows
        offset = self._take(size, first, last, [rows])
        other.add(first, last, offset, offset + size)
        if self._central.count > self._few:
            merged = _merged_through(self._central.placed, self._centre, self._centre)
            self._central = _Rows(merged)
            self._few = self._central.count + MERGED
        return offset

    def place_short(self, size: int, first: int, last: int) -> int:
        """The same for a short life, after all long ones."""
        numbers = range(first // self._places, last // self._places + 1)
        return self._take(size, first, last, [self._stretch(number) for number in numbers])

    def _take(self, size: int, first: int, last: int, tables: list[_Rows]) -> int:
        taken = tables[0].taken(first, last)
        if len(tables) > 1:
            taken = np.concatenate([taken, *(t.taken(first, last) for t in tables[1:])], axis=1)
            taken = taken[:, taken[0].argsort()]
        offset = _best_gap(taken, size)
        for rows in tables:
            rows.add(first, last, offset, offset + size)
        self.top = max(self.top, offset + size)
        return offset

    def _stretch(self, number: int) -> _Rows:
        """What is alive in a stretch: long lives, and the short ones that are added."""
        if number not in self._stretches:
            block = number // BLOCK
            if block not in self._blocks:
                self._blocks[block] = _alive(self._long.placed, block, BLOCK * self._places)
            self._stretches[number] = _Rows(_alive(self._blocks[block], number, self._places))
        return self._stretches[number]


def _alive(rows: Ints, number: int, places: int) -> Ints:
    """What is alive in a stretch of so many places."""
    start, stop = number * places, (number + 1) * places
    alive = rows.compress((rows[0] < stop) & (rows[1] >= start), axis=1)
    return _merged_through(alive, start, stop - 1)


def _merged_through(rows: Ints, first: int, last: int) -> Ints:
    """The rows; those alive all through two places as the few spans that they fill together."""
    through = (rows[0] <= first) & (rows[1] >= last)
    filled = _merged(rows[2:].compress(through, axis=1))
    lives = np.full_like(filled, first)
    lives[1] = last
    rows = np.concatenate([rows.compress(~through, axis=1), np.stack([*lives, *filled])], axis=1)
    return rows[:, rows[2].argsort()]


def _merged(spans: Ints) -> Ints:
    """The same bytes in as few spans as can be, both by offset."""
    if not spans.size:
        return spans
    ends = np.maximum.accumulate(spans[1])
    starts = np.flatnonzero(np.concatenate([[True], spans[0, 1:] > ends[:-1]]))
    stops = np.concatenate([starts[1:], [len(ends)]]) - 1
    return np.stack([spans[0, starts], ends[stops]])


def _best_gap(taken: Ints, size: int) -> int:
    """Where the smallest gap between stretches that has the size begins; else their end.

    Args:
        taken: Offsets and ends of the stretches, by offset.
        size: Bytes.
    """
    if not taken.size:
        return 0
    ends = np.maximum.accumulate(taken[1])
    over = taken[0] - size
    over[1:] -= ends[:-1]
    best = int(over.view(np.uint64).argmin())  # as what has no sign, too little room is the most
    if over[best] < 0:
        return int(ends[-1])
    return int(ends[best - 1]) if best else 0
