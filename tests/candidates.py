"""Candidates and residuals as plain records, for rules that trace and compile nothing."""

import dataclasses
from types import SimpleNamespace

from jdelta._src.decision import Decision
from jdelta._src.search.candidate import Candidate, CompiledCandidate
from tests.stand_in import EXACT

SAVE, OFFLOAD, RECOMPUTE = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE


def emission(simulated):
    """What rules read of an emission."""
    return SimpleNamespace(policy=None, simulated=simulated, pool=0)


def predicted(peak, overhead=1.0):
    """A candidate that was not compiled."""
    return Candidate({}, overhead, emission(peak), peak)


def compiled(peak, overhead=1.0, simulated=None, **decisions):
    """A compiled one: `compiled(90, tanh=SAVE)` takes 90 bytes."""
    simulated = peak if simulated is None else simulated
    return CompiledCandidate(
        decisions,
        overhead,
        emission(simulated),
        simulated,
        measurement=dataclasses.replace(EXACT, peak=peak),
        compiled=None,
    )
