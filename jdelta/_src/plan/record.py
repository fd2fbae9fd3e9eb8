"""What a plan is, as records: what was asked, of which program, the answer, and its figures."""

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
from jdelta._src.solver import SOLVERS, Solver
from jdelta._src.spill import Spill, SpillRates, Store


@dataclass(frozen=True)
class Question:
    """What was asked of ``jdelta.plan``.

    Sizes are in bytes, and the target has its full name. For example ``Question(budget=8 << 30,
    target="tpu:v5e:2x2", donate_argnums=(0,), static=(), solver="milp",
    pins=(("h/mlp/*", Decision.SAVE),), host_budget=40 << 30, per_layer=True, spill=None,
    reorder=False)``. How the answer was to be found does not make two questions unequal: plans that
    came out alike are equal, and JAX traces a step under both of them once.

    Attributes:
        budget: Bound on the peak per device of the whole compiled step, bytes.
        target: Name of the target.
        donate_argnums: Arguments whose buffers the results may take: by number, or by name where
            they have no number.
        static: Arguments that are constants of the program, by number or name.
        solver: Name of the solver; of a solver object without a name its ``repr``.
        pins: From names and patterns to the decisions taken by hand, in the order they were given.
            Of a policy written by hand: from names of residuals to what the policy decides.
        host_budget: Bound on the bytes per device that are offloaded to pinned host memory; None
            where there is none, since nothing was asked and the host's memory is not known.
        per_layer: Whether layers of a scan may be decided differently.
        spill: Where spilled values go; None if there is no such place.
        reorder: Whether weight updates may be moved into the backward loops.
    """

    budget: int
    target: str
    donate_argnums: Arguments
    static: Arguments = field(repr=False)
    solver: str = field(compare=False)
    pins: tuple[tuple[str, Decision], ...] = field(compare=False, repr=False)
    host_budget: int | None = field(compare=False)
    per_layer: bool = field(compare=False)
    spill: Spill | None
    reorder: bool = field(compare=False)


@dataclass(frozen=True)
class ProgramIdentity:
    """Which program was planned.

    For example ``ProgramIdentity(step="mystep:train_step", fingerprint="1f0c93a27b6d5e48",
    arguments=("w: float32[8,64]", "x: float32[32,8]"), versions=(("jdelta", "0.1.0"),
    ("jax", "0.10.2"), ("jaxlib", "0.10.2")))``.

    Attributes:
        step: Module and name of the user's function; the name alone of one in a script.
        fingerprint: Digest of the plain program.
        arguments: Path, dtype, shape and sharding of each array among the arguments.
        versions: Of ``jdelta``, ``jax`` and ``jaxlib`` that staged and planned it.
    """

    step: str = field(compare=False)
    fingerprint: str
    arguments: tuple[str, ...] = field(repr=False)
    versions: tuple[tuple[str, str], ...] = field(repr=False)


@dataclass(frozen=True)
class Answer:
    """What is done with each residual, and how the loops are run.

    For example ``Answer(policy=Policy(saved=frozenset({"layer/tanh"}), ...),
    residuals=(Residual(name="layer/tanh", ...),), pinned=(("layer/tanh", Decision.SAVE),),
    aliases=(("layer#0", "layer"),), grouping=Grouping(layers=1), updates_moved=0)``.

    Attributes:
        policy: The decisions as a policy; None when the plain step fits the budget.
        residuals: The step's residuals, in the order of the forward pass.
        pinned: From the names of the residuals that pins fit to the decisions taken by hand.
        aliases: From regions' names while tracing to their names here.
        grouping: How the planned loops over layers are run.
        updates_moved: Bytes by which the compiled peak is lower because weight updates run inside
            the backward loops; 0 where they stay where they are.
    """

    policy: Policy | None
    residuals: tuple[Residual, ...] = field(repr=False)
    pinned: tuple[tuple[str, Decision], ...] = field(repr=False, compare=False)
    aliases: tuple[tuple[str, str], ...] = field(repr=False)
    grouping: Grouping
    updates_moved: int

    @property
    def nesting(self) -> str:
        """What the plan does that no policy of single checkpoints can; empty where it can."""
        if self.grouping.nested:
            return f"runs {self.grouping.layers} layers of a loop under one more checkpoint"
        if self.grouping.pieces:
            return "computes the head and the loss in pieces of tokens"
        if self.grouping.states:
            return f"keeps {self.grouping.states} states of long loops at a time"
        if self.policy and self.policy.levels:
            count = len(self.policy.levels)
            return f"computes {count} inputs of regions again from earlier regions"
        return ""


@dataclass(frozen=True)
class Figures:
    """What the step takes under the plan, by its compiler and by predictions.

    For example ``Figures(predicted_peak=7 << 30, compiled_peak=7 << 30, code_bytes=1 << 20,
    host_bytes=2 << 30, spill_bytes=0, spill_written=0, spill_rates=None,
    overlap=Overlap((), 0.21), overhead=0.012, step_seconds=0.2, undone=())``.

    Attributes:
        predicted_peak: Peak predicted before the plan was compiled, bytes per device.
        compiled_peak: Peak of the compiled program, bytes per device.
        code_bytes: Bytes of the compiled program itself.
        host_bytes: Bytes in pinned host memory in the compiled program.
        spill_bytes: Bytes per device that a step holds in files at once.
        spill_written: Bytes per device that a step writes to files.
        spill_rates: Bytes per second written and read where spilled values go, as measured.
        overlap: What the compiled schedule hides of the transfers, by the target's rates.
        overhead: Predicted seconds that the plan adds to a step.
        step_seconds: Predicted seconds of the plain step.
        undone: Names of residuals with which the compiler does otherwise than the plan.
    """

    predicted_peak: int
    compiled_peak: int
    code_bytes: int
    host_bytes: int
    spill_bytes: int
    spill_written: int
    spill_rates: SpillRates | None
    overlap: Overlap = field(repr=False)
    overhead: float
    step_seconds: float
    undone: tuple[str, ...]

    @property
    def overhead_share(self) -> float:
        """Predicted overhead as a part of the plain step."""
        return self.overhead / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True)
class SearchRecord:
    """Between which bounds the plan was searched, and how that ended.

    For example ``SearchRecord(floor=5 << 30, ceiling=14 << 30, estimates=("floor",),
    result="The plain step fits: nothing is changed.", compiles=3, hint="")``.

    Attributes:
        floor: Least peak that recompute reaches, bytes per device.
        ceiling: Peak of the plain step, bytes per device.
        estimates: Which of ``floor`` and ``ceiling`` are predictions.
        result: How the search ended, and what to do about it.
        compiles: Programs compiled to find the plan.
        hint: What would lower the peak, in a sentence; empty where nothing is known.
    """

    floor: int
    ceiling: int
    estimates: tuple[str, ...]
    result: str
    compiles: int
    hint: str = field(compare=False)


@dataclass(frozen=True)
class PlanRecord:
    """What becomes of every residual of a training step, and the checked result of compiling it.

    A file of a plan holds these records, and reports are made of them.

    Attributes:
        question: What was asked.
        program: Which program was planned.
        answer: What is done with each residual.
        figures: What the step takes so.
        search: How the answer was found.
    """

    question: Question
    program: ProgramIdentity
    answer: Answer
    figures: Figures
    search: SearchRecord
    _store: Store | None = field(default=None, repr=False, compare=False)
    _solver: Solver | None = field(default=None, repr=False, compare=False)

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """From the name of each residual to its decision."""
        policy, residuals = self.answer.policy, self.answer.residuals
        if policy is None:
            return MappingProxyType({r.name: Decision.SAVE for r in residuals})
        return MappingProxyType({r.name: policy.decision(r.name, r.entering) for r in residuals})

    @property
    def solver(self) -> Solver | None:
        """What decided; None where a file holds no more than the ``repr`` of a solver object."""
        return SOLVERS.get(self.question.solver) if self._solver is None else self._solver

    @functools.cached_property
    def store(self) -> Store | None:
        """What the step spills to when it runs; None if nothing can be spilled."""
        spill = self.question.spill
        if self.answer.policy is None or spill is None:
            return None
        calls = backend_of(self.question.target.partition(":")[0]).spilling.by_callback
        return self._store or Store(spill, by_callback=calls)
