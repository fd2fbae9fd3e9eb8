"""How many bytes to let the solver keep next, so that a plan takes what the budget allows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jdelta._src.search.candidate import Candidate

NARROW = 0.005
"""Part of a peak by which two candidates' bytes may differ and no other is looked for between."""

WIDE = 0.02
"""Part of a peak by which they must differ where both exceed it."""


@dataclass(frozen=True)
class Bracket:
    """How many bytes may be kept.

    Attributes:
        fits: With so many the plan fits.
        exceeds: With so many it does not.
    """

    fits: float
    exceeds: float

    @property
    def middle(self) -> float:
        """Half way between the two."""
        return (self.fits + self.exceeds) / 2

    def narrowed(self, capacity: float, *, fits: bool) -> Bracket:
        """The bracket, now that so many bytes fit or do not."""
        return replace(self, fits=capacity) if fits else replace(self, exceeds=capacity)


@dataclass(frozen=True)
class Proposal:
    """A candidate that the solver made.

    Attributes:
        candidate: The candidate.
        capacity: The most bytes that the solver was allowed to keep when it made this candidate.
        kept: Bytes that the candidate keeps, ``capacity`` at most.
        peak: Its peak, predicted with all that is known by now, bytes.
    """

    candidate: Candidate
    capacity: float
    kept: float
    peak: int

    @property
    def overhead(self) -> float:
        """Predicted seconds that it adds to the step."""
        return self.candidate.overhead

    def predicted_anew(self, peak: int) -> Proposal:
        """The same with another prediction of its peak, bytes."""
        return replace(self, candidate=replace(self.candidate, predicted=peak), peak=peak)


@dataclass(frozen=True)
class Ends:
    """The neighbours of the candidate that takes just so much, among those known by now.

    Attributes:
        below: The one that fits and keeps most.
        above: The one that does not fit and keeps least; None where all fit.
    """

    below: Proposal
    above: Proposal | None

    @staticmethod
    def of(proposals: Sequence[Proposal], goal: int) -> Ends:
        """The neighbours of a peak in bytes.

        Args:
            proposals: What is known; the first keeps nothing, and counts as fitting.
            goal: The peak.
        """
        exceeding = [p for p in proposals[1:] if p.peak > goal]
        above = min(exceeding, key=lambda p: p.kept, default=None)
        most = above.kept if above else math.inf
        fitting = [p for p in proposals[1:] if p.peak <= goal and p.kept < most]
        return Ends(max([proposals[0], *fitting], key=lambda p: (p.kept, p.capacity)), above)

    def are_closed(self, goal: int) -> bool:
        """Whether next to nothing can be between the two, for a peak in bytes."""
        return self.above is not None and self.above.kept <= self.below.capacity + NARROW * goal

    def capacity(self, goal: int) -> float:
        """How many bytes to allow next, to come close to a peak in bytes.

        The same candidate again says that items are not arbitrarily small: further each time.
        """
        below, above = self.below, self.above
        spare = goal - below.peak
        if above is None:
            return below.capacity + max(spare, goal // 50) + 2 * (below.capacity - below.kept)
        part = spare / max(1, above.peak - below.peak)
        width = above.kept - below.capacity
        return below.capacity + min(max(part, 0.2), 0.8) * width


def between_larger(proposals: Sequence[Proposal], best: Proposal, goal: int) -> float | None:
    """How many bytes to allow where the neighbours of a peak are known; None where nothing is left.

    More bytes kept may take less at the peak: the largest gap is tried among candidates that do not
    fit, and are quicker than the best.
    """
    larger = [p for p in proposals[1:] if p.kept > best.kept and p.overhead < best.overhead]
    larger.sort(key=lambda p: p.kept)
    gaps = [(high.kept - low.capacity, low.capacity) for low, high in itertools.pairwise(larger)]
    width, start = max(gaps, default=(0.0, 0.0))
    return start + width / 2 if width > WIDE * goal else None


def quickest(proposals: Sequence[Proposal], goal: int) -> Proposal:
    """Of those that fit into a peak in bytes the one that adds the least; the first counts."""
    fitting = [p for p in proposals[1:] if p.peak <= goal]
    return min([*reversed(fitting), proposals[0]], key=lambda p: p.overhead)
