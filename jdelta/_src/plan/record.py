"""What a plan is, as a record: the decisions, and what the compiler says of the program."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from jdelta._src.backends.platforms import backend_of
from jdelta._src.decision import Decision
from jdelta._src.hlo.overlap import Overlap
from jdelta._src.plan.user_step import Arguments
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.region import Grouping
from jdelta._src.residuals.residual import Residual
from jdelta._src.spill import Spill, SpillRates, Store


@dataclass(frozen=True)
class PlanRecord:
    """What becomes of every residual of a training step, and the checked result of compiling it.

    A file of a plan holds these fields, and reports are made of them. ``jdelta.Plan``, the plan
    that users hold, says what each is.
    """

    policy: Policy | None
    residuals: tuple[Residual, ...] = field(repr=False)
    budget: int
    predicted_peak: int
    compiled_peak: int
    code_bytes: int
    host_bytes: int
    spill_bytes: int
    spill_written: int
    overlap: Overlap = field(repr=False)
    floor: int
    ceiling: int
    estimates: tuple[str, ...]
    overhead: float
    step_seconds: float
    result: str
    compiles: int
    target: str
    donate_argnums: Arguments
    static: Arguments = field(repr=False)
    arguments: tuple[str, ...] = field(repr=False)
    fingerprint: str
    versions: tuple[tuple[str, str], ...] = field(repr=False)
    spill: Spill | None
    spill_rates: SpillRates | None
    aliases: tuple[tuple[str, str], ...] = field(repr=False)
    grouping: Grouping
    undone: tuple[str, ...]
    updates_moved: int
    _store: Store | None = field(default=None, repr=False, compare=False)

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """From the name of each residual to its decision."""
        policy = self.policy
        if policy is None:
            return MappingProxyType({r.name: Decision.SAVE for r in self.residuals})
        return MappingProxyType(
            {r.name: policy.decision(r.name, r.entering) for r in self.residuals}
        )

    @property
    def overhead_share(self) -> float:
        """Predicted overhead as a part of the plain step."""
        return self.overhead / self.step_seconds if self.step_seconds else 0.0

    @functools.cached_property
    def store(self) -> Store | None:
        """What the step spills to when it runs; None if nothing can be spilled."""
        if self.policy is None or self.spill is None:
            return None
        calls = backend_of(self.target.partition(":")[0]).spilling.by_callback
        return self._store or Store(self.spill, by_callback=calls)
