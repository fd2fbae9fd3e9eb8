"""When copies to the host start and end, and fetches start: as seconds and places, no programs.

A place is the index of an equation in the forward pass, a region the number of a backward region.
What is timed here, ``program_timing.py`` reads in a program, and ``timed_transfers.py`` writes into
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jdelta._src.backends.backend import Transfers

IN_FLIGHT = 2
"""Copies to the host that XLA has under way at a time."""

MOST_AHEAD = 3
"""Regions that a transfer may be ahead of its use, or lag behind its producer."""

IN_TURN = 2.0
"""How many times the backward regions' compute fetches take, on the link, where they wait for each
other, for less memory. GPT-2's queries, keys and values, unrolled on a v5p, are at 1.4: 25 % is
hidden without waiting, 15 % with it. The stack of ``benchmarks/compilers/offload.py`` is above
4."""


@dataclass(frozen=True)
class Copy:
    """A copy to the host, as the program has it.

    Attributes:
        place: Index of its equation: ``4``.
        seconds: Seconds that it keeps the link busy.
        read_at: The first place at which what it copies is read; that after the last one if none.
        stops: Places, in order, by which it may be done: ``(6, 9)``.
    """

    place: int
    seconds: float
    read_at: int
    stops: Iterable[int]


@dataclass(frozen=True)
class TimedCopy:
    """When a copy starts and ends.

    Attributes:
        place: Index of its equation.
        start: The place after which it starts; None to start where the program has it.
        end: The place by which it is done; None for the end of the forward pass.
    """

    place: int
    start: int | None
    end: int | None


@dataclass(frozen=True)
class TimedCopies:
    """When all copies to the host start and end.

    Attributes:
        copies: Each copy, as they come in the program.
        are_bound: Whether they take longer than the compute that could hide them.
        done_seconds: Seconds of compute after which the last one can be done.
    """

    copies: tuple[TimedCopy, ...] = ()
    are_bound: bool = False
    done_seconds: float = 0.0


def time_copies(
    copies: Sequence[Copy], elapsed: Sequence[float], regions: int, habits: Transfers
) -> TimedCopies:
    """Let each copy to the host end at the first later stop by which it can be done.

    XLA has few copies in flight: one more would end another as soon as it starts. So it does not
    start before an earlier one has ended, unless a backward loop before the first region reads what
    it copies.

    Args:
        copies: The copies of the forward pass, in order.
        elapsed: Seconds of compute before each place, and after the last one.
        regions: How many backward regions there are.
        habits: When the compiler runs transfers.
    """
    are_bound = sum(copy.seconds for copy in copies) >= elapsed[-1]
    longest = elapsed[-1] / regions * (1 if are_bound else MOST_AHEAD)
    timed: list[TimedCopy] = []
    ends = [-1] * IN_FLIGHT
    done = 0.0
    for copy in copies:
        begin = max(copy.place, ends[-IN_FLIGHT] + 1) if habits.are_tied else copy.place
        begin = begin if begin <= copy.read_at else copy.place
        free = max(done, elapsed[begin])
        allowed = free + habits.slack * copy.seconds
        done = free + copy.seconds if habits.are_tied else allowed
        goal = min(allowed, elapsed[copy.place] + longest)
        stops = (stop for stop in copy.stops if begin <= stop < copy.read_at)
        end = next((stop for stop in stops if elapsed[stop + 1] >= goal), None)
        ends.append(ends[-1] if end is None else end)
        timed.append(TimedCopy(copy.place, begin - 1 if begin > copy.place else None, end))
    return TimedCopies(tuple(timed), are_bound, done)


@dataclass(frozen=True)
class TimedFetches:
    """When fetches outside of loops start.

    Attributes:
        starts: For each region the region that its fetches start with: ``(0, 0, 1)``.
        are_in_turn: Whether each waits for the one before it.
    """

    starts: tuple[int, ...] = ()
    are_in_turn: bool = False


def time_fetches(
    link_seconds: Sequence[float], compute_seconds: Sequence[float], *, least: bool
) -> TimedFetches:
    """Start each fetch as many regions ahead as it takes to hide it.

    Args:
        link_seconds: Seconds that the fetches of each region keep the link busy.
        compute_seconds: Seconds of compute of each region.
        least: Whether the least memory matters more than hiding transfers: then nothing is fetched
            ahead of its use.
    """
    link, compute = sum(link_seconds), sum(compute_seconds)
    most_ahead = 0 if least else 1 if link >= compute else MOST_AHEAD
    starts: list[int] = []
    for region, seconds in enumerate(link_seconds):
        start, hidden = region, 0.0
        while start > max(0, region - most_ahead) and hidden < seconds:
            start -= 1
            hidden += compute_seconds[start]
        starts.append(start)
    return TimedFetches(tuple(starts), least or link >= IN_TURN * compute)


def place_in_head(
    stops: Sequence[int], elapsed: Sequence[float], done_seconds: float, link_seconds: float
) -> int | None:
    """Where between forward and backward regions the first fetch starts; None for nowhere.

    It is the last stop from which on the compute left hides the fetch, else the first; in any case
    one by which all copies to the host can be done.

    Args:
        stops: Places after which it may start, in order.
        elapsed: Seconds of compute before each place, and after the last one.
        done_seconds: Seconds of compute after which the last copy to the host can be done.
        link_seconds: Seconds that the fetch keeps the link busy.
    """
    ended = [stop for stop in stops if elapsed[stop + 1] >= done_seconds]
    hiding = [stop for stop in ended if elapsed[-1] - elapsed[stop + 1] >= link_seconds]
    return max(hiding, default=min(ended, default=None))
