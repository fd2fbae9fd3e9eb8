"""What searches for a plan have compiled, and what it says of plans that are not compiled yet."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jdelta._src.hlo.measure import Measurement, measure
from jdelta._src.passes.emit import Emission, Step
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.region import Grouping
from jdelta._src.search.candidate import Candidate, CompiledCandidate
from jdelta._src.sizes import format_bytes

_LOG = logging.getLogger(__name__)

OUTLIER = 1.5
"""Times its prediction at which a compiled peak says nothing about other candidates."""

LEAST_TRUST = 0.5
"""Part of the error of a simulation that is carried over to a plan with a far higher peak. In MiB
the error was, at the floor and at 60 % of the plain peak: on CUDA 0 and 0 (GPT-2), 94 and 94
(Llama), -183 and -66 (ResNet-50), -65 and -64 (BERT), -16 and -271 (MLP)."""


NEAR = 0.1
"""Part of a predicted peak by which the compiled one may differ from it and count as foretold."""


class Program(NamedTuple):
    """A compiled program.

    Attributes:
        compiled: The executable, where the devices are attached.
        measurement: What the compiler says of it.
        predicted: Peak predicted before it was compiled, bytes per device.
    """

    compiled: jax.stages.Compiled | None
    measurement: Measurement
    predicted: int


class KnownPlan(NamedTuple):
    """A plan that was compiled for some budget.

    Attributes:
        overhead: Seconds that it adds to the step.
        grouping: How it runs the loops over layers.
        policy: What it does in them.
    """

    overhead: float
    grouping: Grouping
    policy: Policy


class History:
    """What searches for plans of one step with several budgets have learnt.

    A plan found for a small budget is never missed by a larger one. Without a history each plan is
    a function of its arguments alone.
    """

    def __init__(self):
        self._plans: dict[Any, dict[tuple[Grouping, Policy], tuple[float, int]]] = {}

    def plans(self, key: Any) -> dict[tuple[Grouping, Policy], tuple[float, int]]:
        """Overhead in seconds and compiled peak in bytes of each plan, by grouping and policy.

        Args:
            key: What the plans of a step depend on, but for the budget: the whole program by its
                fingerprint, the target, what is donated, what is to be decided.
        """
        return self._plans.setdefault(key, {})


class Compiles:
    """The programs compiled for a step, each once, and the plans among them that can be used.

    Attributes:
        count: How many programs were compiled (or read from the cache of measurements).
        most: How many there will be at most, until this part of the search ends; 0 where that is
            not known. This and what follows is for the log only.
        purpose: What the next ones are compiled for, ``" for the floor"``; empty if that is to
            meet the budget.
        best: The best plan so far, ``"6.90 GiB, +4.2 %"``; empty if there is none.
    """

    def __init__(self, known: dict[tuple[Grouping, Policy], tuple[float, int]]):
        """Begin to count.

        Args:
            known: Overhead and compiled peak of each plan known before, by grouping and policy;
                those that are compiled now are added.
        """
        self.count = 0
        self.most = 0
        self.purpose = ""
        self.best = ""
        self._programs: dict[tuple[Grouping, Policy | None], Program] = {}
        self._known = known

    @property
    def are_foretold(self) -> bool:
        """Whether each program of a plan took what was predicted, to `NEAR`.

        Not the plain step, of which compilers make other programs than of plans.
        """
        plans = (p for (_, policy), p in self._programs.items() if policy is not None)
        programs = [p for p in plans if not p.measurement.refused]
        return all(abs(p.predicted - p.measurement.peak) <= NEAR * p.predicted for p in programs)

    @property
    def most_code(self) -> int:
        """Bytes of the longest program."""
        return max((p.measurement.code for p in self._programs.values()), default=0)

    def has(self, grouping: Grouping, policy: Policy | None) -> bool:
        """Whether the program was compiled already."""
        return (grouping, policy) in self._programs

    def compiled(self, step: Step, candidate: Candidate) -> CompiledCandidate:
        """The candidate with what the compiler makes and says of its program."""
        emission = candidate.emission
        key = step.grouping, emission.policy
        if key not in self._programs:
            self.count += 1
            self._announce(step, candidate)
            compiled, measurement = measure(
                emission.lower(), step.target, emission.options, computed=emission.computed
            )
            self._programs[key] = Program(compiled, measurement, candidate.predicted)
            _LOG.info("compile %d: %s", self.count, format_bytes(measurement.peak))
        program = self._programs[key]
        return CompiledCandidate(
            candidate.decisions,
            candidate.overhead,
            emission,
            program.predicted,
            candidate.outcome,
            measurement=program.measurement,
            compiled=program.compiled,
        )

    def _announce(self, step: Step, candidate: Candidate) -> None:
        """Say in the log what is compiled now."""
        _LOG.info(
            "compile %d%s for %s%s: %s predicted%s",
            self.count,
            f" of at most {self.most}" if self.count <= self.most else "",
            step.target.name,
            " as it is" if candidate.decisions is None else self.purpose,
            format_bytes(candidate.predicted),
            f"; best so far {self.best}" if self.best else "",
        )

    def know(self, grouping: Grouping, policy: Policy, overhead: float, peak: int) -> None:
        """Remember a plan that does what it says, for this and any later search."""
        self._known[grouping, policy] = overhead, peak

    @property
    def least(self) -> int | None:
        """The least compiled peak of a known plan, bytes per device; None if none is known."""
        return min((peak for _, peak in self._known.values()), default=None)

    def quickest(self, bound: int, grouping: Grouping | None = None) -> KnownPlan | None:
        """The known plan within the budget that adds the least time, maybe of one grouping only."""
        fitting = (
            KnownPlan(overhead, *plan)
            for plan, (overhead, peak) in self._known.items()
            if peak <= bound and grouping in (None, plan[0])
        )
        return min(fitting, key=lambda plan: plan.overhead, default=None)


def with_executable(step: Step, candidate: CompiledCandidate) -> CompiledCandidate:
    """A candidate whose measurement came from disk, compiled all the same."""
    emission = candidate.emission
    _LOG.info("compiling the plan, %s when it was measured", format_bytes(candidate.peak))
    compiled, measurement = measure(
        emission.lower(),
        step.target,
        emission.options,
        computed=emission.computed,
        executable=True,
    )
    return replace(candidate, compiled=compiled, measurement=measurement)


class Correction:
    """How far simulated peaks are off, by the programs compiled so far.

    The error of the simulation is piecewise linear in the simulated peak, through those compiled so
    far. Far above them only a part of it is believed: what the compiler needs beyond the simulation
    at the floor is often needed elsewhere in the step than where a larger plan has its peak.
    """

    def __init__(
        self, errors: Mapping[int, int] = MappingProxyType({}), *, is_proportional: bool = False
    ):
        """Begin with what is known.

        Args:
            errors: From simulated bytes of temporaries to the compiled peak less the simulated one.
            is_proportional: Whether a program has as large an error, in parts, as the plain step.
        """
        self._errors = dict(errors)
        self._is_proportional = is_proportional

    def copy(self) -> Correction:
        """Another one that begins with what is known here."""
        return Correction(self._errors, is_proportional=self._is_proportional)

    def learn(self, candidate: CompiledCandidate) -> None:
        """Compare the peak of a compiled program with the simulation, if it is not far out."""
        is_like_plans = candidate.decisions is not None or self._is_proportional
        if is_like_plans and candidate.peak <= OUTLIER * candidate.predicted:
            emission = candidate.emission
            self._errors[emission.timeline.peak] = candidate.peak - emission.simulated

    def predicted(self, emission: Emission) -> int:
        """The simulated peak of a step, corrected."""
        if not self._errors:
            return emission.simulated
        known = {**({0: 0} if self._is_proportional else {}), **self._errors}
        temporaries, peaks = emission.timeline.peak, sorted(known)
        error = float(np.interp(temporaries, peaks, [known[peak] for peak in peaks]))
        trust = max(LEAST_TRUST, min(1.0, peaks[-1] / max(1, temporaries)))
        fixed = emission.simulated - emission.timeline.peak  # arguments and results are there
        return max(fixed, emission.simulated + round(trust * error))
