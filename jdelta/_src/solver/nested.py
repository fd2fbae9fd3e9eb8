"""The optimal persistent schedule of a chain: which of its values are kept, and which held when.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for heterogeneous
chains", for stages that are computed again whole in their own turn. The forward pass keeps what
enters some stages. The backward pass goes through the stages from the last to the first. Between
two that are kept it runs forward again to a stage, holds what enters that, does the same for what
is after it, lets go of it, and does the same for what is before it. No JAX here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

STEPS = 400
"""Parts of the memory that it is given out in."""

_Seconds = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Stage:
    """A stage of a chain. For example ``Stage(bytes=32e6, seconds=0.002, running=210e6)``.

    Attributes:
        bytes: Of what enters it from the stage before it.
        seconds: Of its forward pass.
        running: Bytes needed in its turn of the backward pass, beside what enters it and the stages
            before it as far as that is there then.
    """

    bytes: float
    seconds: float
    running: float


class NestedRecompute:
    """What it takes to run a chain within each number of bytes.

    Tables have a row for each part of the memory that is free, and seconds in it. What enters the
    first stage of a run is there, and takes nothing of what is free.
    """

    def __init__(self, stages: Sequence[Stage], loss: float):
        """Solve it.

        Args:
            stages: The stages, in the order of the forward pass. What enters the first is there
                whatever is done, and so counts as ``running`` of each.
            loss: Bytes that the forward pass needs beside what enters stages, its end included.
        """
        self._stages = [*stages, Stage(0.0, 0.0, loss)]
        alive = itertools.accumulate((stage.bytes for stage in self._stages[1:]), initial=0.0)
        needed = [s.running + more for s, more in zip(self._stages, alive, strict=True)]
        # All that is kept may come to half a part more for each stage.
        self._unit = max(needed) / (STEPS - len(self._stages)) or 1.0
        self._sizes = [round(stage.bytes / self._unit) for stage in self._stages]
        count = len(self._stages)
        seconds = [stage.seconds for stage in self._stages]
        self._begin = np.array([0.0, *itertools.accumulate(seconds)], np.float32)
        # By first and last stage of a run: its seconds; and the same if what enters it is held.
        self._runs = np.full((count, count, STEPS + 1), np.inf, np.float32)
        self._after = self._runs.copy()
        self._solve_runs()
        # By first stage: seconds of all from there on, as the forward pass keeps what enters some.
        self._kept = np.full((count, STEPS + 1), np.inf, np.float32)
        self._kept[-1] = self._runs[-1, -1]
        for first in reversed(range(count - 1)):
            self._kept[first] = self._next_kept(first).min(0)

    def levels(self, room: float) -> list[int] | None:
        """The schedule of the least seconds within some bytes.

        Returns:
            For each stage the level of what enters it: 0 is kept, any other is dropped; see
            ``Policy.levels``. None if no schedule does with so little.
        """
        if self.seconds(room) == np.inf:
            return None
        levels, first, free = [0] * len(self._stages), 0, self._row(room)
        while first < len(self._stages) - 1:
            kept = first + 1 + int(self._next_kept(first)[:, free].argmin())
            self._split(first, kept - 1, free, 1, levels)
            first, free = kept, free - self._sizes[kept]
        return levels[:-1]

    def seconds(self, room: float) -> float:
        """What the schedule within some bytes adds to one that keeps all; infinity if none does."""
        return float(self._kept[0, self._row(room)]) if room >= 0 else np.inf

    def least(self, passes: float) -> float:
        """The least bytes within which a schedule adds no more than some forward passes."""
        (enough,) = np.nonzero(self._kept[0] <= passes * self._begin[-1])
        return float(enough[0] if len(enough) else STEPS) * self._unit

    def less(self, room: float, excess: float) -> float:
        """Bytes within which another schedule is the best, by an excess less or by more."""
        room = min(room, STEPS * self._unit)
        known, lower = self.seconds(room), room - excess
        while lower >= 0 and self.seconds(lower) <= known:
            lower -= self._unit
        return lower

    def _row(self, room: float) -> int:
        return min(STEPS, int(room / self._unit + 1e-6))

    def _solve_runs(self) -> None:
        count, free = len(self._stages), np.arange(STEPS + 1) * self._unit
        for length in range(count):
            for first in range(count - length):
                last = first + length
                if length:
                    seconds = self._splits(first, last).min(0)
                else:
                    fits = free + self._unit / 2 >= self._stages[first].running
                    seconds = np.where(fits, 0.0, np.inf)
                self._runs[first, last] = seconds
                size = min(self._sizes[first], STEPS + 1)
                self._after[first, last, size:] = self._runs[first, last, : STEPS + 1 - size]

    def _splits(self, first: int, last: int) -> _Seconds:
        """Seconds of a run by what is held of it next (row), and by what is free."""
        some = slice(first + 1, last + 1)
        forward = (self._begin[some] - self._begin[first])[:, None]
        return forward + self._after[some, last] + self._runs[first, first:last]

    def _next_kept(self, first: int) -> _Seconds:
        """Seconds from a stage on by what is kept next (row), and by what is free."""
        rows = self._runs[first, first:-1].copy()
        for row, kept in zip(rows, range(first + 1, len(self._stages)), strict=True):
            size = min(self._sizes[kept], STEPS + 1)
            row[:size] = np.inf
            row[size:] += self._kept[kept, : STEPS + 1 - size]
        return rows

    def _split(self, first: int, last: int, free: int, level: int, levels: list[int]) -> None:
        """Write the levels of what enters a run of stages, but the first of them."""
        if first == last:
            return
        middle = first + 1 + int(self._splits(first, last)[:, free].argmin())
        levels[middle] = level
        self._split(middle, last, free - self._sizes[middle], level + 1, levels)
        self._split(first, middle - 1, free, level + 1, levels)
