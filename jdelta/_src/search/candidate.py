"""A plan on trial: what it decides, and what the compiler says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from jdelta._src.decision import Decision
from jdelta._src.hlo.measure import Measurement
from jdelta._src.passes.emit import Emission
from jdelta._src.solver.solution import Outcome

GOOD_USE = 0.97
"""Share of the budget that a plan should use before the search for a faster one ends."""

FAIR_USE = 0.85
"""Share of the budget below which a plan that adds time has to say what did not fit."""


@dataclass(frozen=True)
class Candidate:
    """Decisions, and what is predicted of the step they make.

    Attributes:
        decisions: One for each residual, such as ``{"h/mlp/tanh": Decision.SAVE}``; None stands for
            the plain step.
        overhead: Predicted seconds they add to the step; below zero where it is quicker.
        emission: The traced step.
        predicted: Peak predicted before it was compiled, bytes per device.
        outcome: How the solver ended; None for the plain step.
    """

    decisions: Mapping[str, Decision] | None
    overhead: float
    emission: Emission
    predicted: int
    outcome: Outcome | None = None

    @property
    def levels(self) -> tuple[tuple[str, int], ...]:
        """What enters regions and is dropped; see ``Policy.levels``."""
        policy = self.emission.policy
        return policy.levels if policy else ()


@dataclass(frozen=True, kw_only=True)
class CompiledCandidate(Candidate):
    """A candidate whose program was compiled.

    Attributes:
        measurement: What the compiler says of the program.
        compiled: The executable, where the devices are attached.
    """

    measurement: Measurement
    compiled: jax.stages.Compiled | None

    @property
    def peak(self) -> int:
        """Compiled peak and what spilling holds beside it, bytes per device."""
        return self.measurement.peak + self.emission.pool

    def leaves_much(self, bound: int) -> bool:
        """Whether it adds time and leaves much of a budget in bytes."""
        return self.overhead > 0 and self.peak < FAIR_USE * bound


@dataclass(frozen=True)
class Refused:
    """What did not fit beside what a plan keeps.

    Attributes:
        names: The values, such as ``("h/mlp/tanh",)``, the largest first.
        bytes: Bytes of them all.
        peak: Compiled peak with them, bytes per device.
    """

    names: tuple[str, ...]
    bytes: int
    peak: int


@dataclass(frozen=True)
class Found:
    """Outcome of a search.

    Attributes:
        best: The plan to use.
        budget: The budget in bytes.
        floor: Least peak that recompute reaches; the plain step's where that fits.
        ceiling: Peak of the plain step.
        estimates: Which of "floor" and "ceiling" were not compiled, so are predictions.
        compiles: How many programs were compiled (or read from the cache of measurements).
        refused: What did not fit, where the plan leaves much of the budget at a price.
    """

    best: CompiledCandidate
    budget: int
    floor: int
    ceiling: int
    estimates: tuple[str, ...]
    compiles: int
    refused: Refused | None = None

    @property
    def is_used(self) -> bool:
        """Whether the budget is used."""
        return self.best.peak >= GOOD_USE * self.budget

    @property
    def is_good(self) -> bool:
        """Whether the budget is used, or nothing is left to use it for."""
        return self.is_used or not self.best.overhead
