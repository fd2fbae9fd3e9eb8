"""Which states of a long loop are kept, and when: binomial checkpoints.

A loop of ``n`` steps is differentiated backwards with ``k`` states kept at a time: what stands
between two of them is computed again. Griewank and Walther ("Algorithm 799: Revolve", ACM TOMS
26(1), 2000) give the schedule with the fewest steps. With ``beta(k, r) = C(k + r, k)``, and ``r``
the least number for which ``n <= beta(k, r)``, no step is run more than ``r`` times, and

    steps(n, k) = r * n - beta(k + 1, r - 1)        (their equation 4)

are run in all before each of the ``n`` is differentiated, which runs it once more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb


def repeats(length: int, kept: int) -> int:
    """How often a step is run at most, its own derivative not counted.

    Args:
        length: Steps of the loop.
        kept: States that are kept at a time, the first one too; at least one.
    """
    count = 0
    while comb(kept + count, kept) < length:
        count += 1
    return count


def steps(length: int, kept: int) -> int:
    """Steps that are run before the derivatives of each, the first forward pass among them.

    Args:
        length: Steps of the loop.
        kept: States that are kept at a time, the first one too; at least one.
    """
    most = repeats(length, kept)
    return most * length - comb(kept + most, kept + 1)


def runs_again(length: int, kept: int) -> int:
    """Steps that are run again before the derivatives: all but those of the forward pass.

    The forward pass runs the last step too, for what the loop carries in the end.
    """
    return steps(length, kept) - (length - 1)


def split(length: int, kept: int) -> int:
    """After how many steps the next state is kept: an optimal place (their equation 6)."""
    most = repeats(length, kept)
    return min(comb(kept + most - 1, kept), length - comb(kept + most - 2, kept - 1))


@dataclass(frozen=True)
class Turn:
    """What is done before one step is differentiated.

    For example ``Turn(step=9, slot=1, begin=4, keep=((7, 2), (8, 3)))``: the state before step 4 is
    taken from slot 1, that before step 7 is kept in slot 2, that before step 8 in slot 3, and step
    8 is run so that step 9 can be differentiated.

    Attributes:
        step: The step that is differentiated.
        slot: Where the state is that is begun from.
        begin: The step before which that was the state.
        keep: States to keep on the way: before which step, in which slot.
    """

    step: int
    slot: int
    begin: int
    keep: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Binomial:
    """The schedule for a loop.

    Attributes:
        length: Steps of the loop.
        kept: States that are kept at a time, the first one too.
    """

    length: int
    kept: int

    @functools.cached_property
    def turns(self) -> tuple[Turn, ...]:
        """What is done, from the last step to the first; the first turn is the forward pass."""
        return tuple(self._turns())

    def _turns(self) -> Iterator[Turn]:
        states = [0]  # before which step, by slot: kept as on a stack
        for step in reversed(range(self.length)):
            while states[-1] > step:
                states.pop()
            slot, begin = len(states) - 1, states[-1]
            keep: list[tuple[int, int]] = []
            while (rest := step + 1 - states[-1]) > 1 and len(states) < self.kept:
                states.append(states[-1] + split(rest, self.kept - len(states) + 1))
                keep.append((states[-1], len(states) - 1))
            yield Turn(step, slot, begin, tuple(keep))
