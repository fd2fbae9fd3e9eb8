"""Watches whether a directory still takes and gives what a plan reckons with."""

from __future__ import annotations

import statistics
import warnings

from jdelta._src.sizes import format_bytes
from jdelta._src.spill import Spill, SpillRates, rates_of

WINDOW = 16
"""Steps of which the median duration is taken; the first of all is left out."""

SLOWER = 1.5
"""Times the first steps' duration from which on the directory is measured again."""

LOST = 0.5
"""Part of a planned rate below which the plan is told to be out of date."""


class SpillDriftWarning(UserWarning):
    """A directory has become slower than a plan reckons with."""


class Drift:
    """The durations of a planned step, and what they say about its directory.

    TBA measures bandwidth and adapts what it offloads while it runs. A compiled step cannot, so
    that the user is told to plan again; the next plan goes by the rates measured here.
    """

    def __init__(self, spill: Spill, planned: SpillRates):
        self._spill = spill
        self._planned = planned
        self._durations: list[float] = []
        self._usual: float | None = None
        self._warned = False

    def add(self, seconds: float) -> None:
        """Take a step's duration down.

        Warns:
            SpillDriftWarning: Once, if steps have become slow and the directory is to blame.
        """
        self._durations.append(seconds)
        if self._warned or len(self._durations) <= WINDOW:
            return
        now = statistics.median(self._durations[-WINDOW:])
        self._durations.clear()
        if self._usual is None:
            self._usual = now
        elif now > SLOWER * self._usual:
            self._measure()

    def _measure(self) -> None:
        rates, planned = rates_of(self._spill, remeasure=True), self._planned
        if rates.write >= LOST * planned.write and rates.read >= LOST * planned.read:
            return
        self._warned = True
        warnings.warn(
            f"{self._spill.path} takes {format_bytes(round(rates.write))}/s and gives "
            f"{format_bytes(round(rates.read))}/s by now, and the plan reckons with "
            f"{format_bytes(round(planned.write))}/s and {format_bytes(round(planned.read))}/s: "
            "plan again, or spill to another directory.",
            SpillDriftWarning,
            stacklevel=4,
        )
