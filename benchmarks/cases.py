"""Training steps as programs, by hand or planned: traced, priced alike, compiled for a target."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

import jdelta
from benchmarks.models import Case
from benchmarks.study import Row
from jdelta._src._jax.sharding import shardings_of
from jdelta._src.backends.chips import Rates
from jdelta._src.backends.target import Target, resolve
from jdelta._src.estimate.seconds import program_seconds
from jdelta._src.hlo.measure import Measurement, measure
from jdelta._src.hlo.overlap import Overlap, read_overlap
from jdelta._src.hlo.seconds import seconds
from jdelta._src.hlo.text import Computation, Instruction, Module, parse
from jdelta._src.passes.emit import Step, emit
from jdelta._src.plan.call import call_of
from jdelta._src.plan.planned_step import step_of
from jdelta._src.plan.user_step import jitted
from jdelta._src.program.graph import Graph, graph_of
from jdelta._src.program.hlo_names import NOTHING, Computed
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import Trace, trace, walk

PER_CYCLE = {"tpu:v5e:2x2": 4 * 2 * 128 * 128, "tpu:v5p:2x2x1": 8 * 2 * 128 * 128}
"""By target, what its matrix units of 128 x 128 add and multiply in a cycle."""


@dataclass(frozen=True)
class Price:
    """Predicted seconds of a program, by the one cost model that also makes plans.

    Attributes:
        compute: Seconds of all operations, one after the other.
        to_host: Bytes copied to host memory in a step, as the compiled program does.
        to_device: Bytes copied back.
        seconds: Everything, with the part of the copies that the compiled schedule exposes.
    """

    compute: float
    to_host: int
    to_device: int
    seconds: float


@dataclass(frozen=True)
class Program:
    """A step, not compiled yet.

    Attributes:
        graph: Its operations.
        lower: Lowers it for the target.
        target: What it is for.
        options: Options of XLA to compile it with.
        computed: Named values that its plan wants looked for in the compiled program.
    """

    graph: Graph
    lower: Callable[[], jax.stages.Lowered]
    target: Target
    options: Mapping[str, str | bool] = field(default_factory=dict[str, str | bool])
    computed: Computed = NOTHING

    @functools.cached_property
    def measured(self) -> Measurement:
        """What the compiler says."""
        return measure(self.lower(), self.target, self.options, computed=self.computed)[1]

    @functools.cached_property
    def scheduled(self) -> Row:
        """What its compiled instructions take; nothing if the compiler refuses it.

        "scheduled" are predicted seconds, with exposed transfers; "cycles" are what a TPU's
        compiler expects of each instruction, transfers left out.
        """
        compiled, _ = measure(self.lower(), self.target, self.options, executable=True)
        if compiled is None:
            return {}
        module = parse(compiled.as_text() or "")
        overlap = read_overlap(module, self.target.rates)
        cycles = read_overlap(module, self.target.rates, noted_cycles).compute
        return {"scheduled": overlap.seconds, "cycles": int(cycles)}

    def added(self, plain: "Program") -> float:
        """What its compiled instructions take more than those of the plain step, as a part of it.

        Where the compiler refuses the plain step, both are priced as they are traced.
        """
        if plain.scheduled:
            return self.scheduled["scheduled"] / plain.scheduled["scheduled"] - 1
        return self.added_as_traced(plain)

    def added_as_traced(self, plain: "Program") -> float:
        """What its operations as traced are priced above those of the plain step, as a part."""
        return self.price.seconds / plain.price.seconds - 1

    @functools.cached_property
    def price(self) -> Price:
        """Predicted seconds of its operations as traced."""
        return self.priced(self.measured.overlap)

    def priced(self, overlap: Overlap) -> Price:
        """The same where it is known already what its compiled schedule hides."""
        compute = program_seconds(self.graph, self.target.rates, self.target.backend)
        return Price(compute, overlap.bytes_out, overlap.bytes_in, compute + overlap.exposed)

    def names(self) -> set[str]:
        """Names that `checkpoint_name` gave to its values."""
        return {str(op.name) for op, _ in walk(self.graph) if op.name}

    def figures(self) -> Row:
        """Everything known of it, as a part of a row."""
        return {**dataclasses.asdict(self.measured), "price": dataclasses.asdict(self.price)}


def noted_cycles(
    module: Module, computation: Computation, instruction: Instruction, rates: Rates
) -> float:
    """A price for `read_overlap`: the cycles that a TPU's compiler notes; 0 where it notes none."""
    return float(instruction.config.get("window_config", {}).get("estimated_cycles", 0))


def clock(target: Target) -> float:
    """Cycles in a second of a TPU of `PER_CYCLE`."""
    return target.rates.flops("bfloat16") / PER_CYCLE[target.name]


def overlap_by_cycles(text: str, target: Target) -> Overlap:
    """The schedule of a program for a TPU, read by the cycles noted on it, else by the roofline."""

    def price(
        module: Module, computation: Computation, instruction: Instruction, rates: Rates
    ) -> float:
        where = module, computation, instruction, rates
        return noted_cycles(*where) / clock(target) or seconds(*where)

    return read_overlap(parse(text), target.rates, price)


def traced(case: Case, target: str) -> Program:
    """The step of a case as it is."""
    where = resolve(target)
    placed = where.abstract((case.state, case.batch))
    plain = jax.jit(case.step, donate_argnums=0).trace(*placed)
    lower = functools.partial(plain.lower, lowering_platforms=(where.platform,))
    shardings = shardings_of(plain.jaxpr, placed, where.platform)
    return Program(graph_of(plain.jaxpr, shardings), lower, where)


def recomputed(case: Case, target: str) -> Program:
    """The step of a case, built with `jdelta.remat`, with everything in its regions recomputed."""
    step, step_trace = staged(case, target)
    emission = emit(step, Policy.of({}, step_trace.loops, step.target.backend))
    return Program(emission.timeline.graph, emission.lower, step.target, emission.options)


def staged(case: Case, target: str) -> tuple[Step, Trace]:
    """The step of a case, built with `jdelta.remat`, before anything is decided."""
    where = resolve(target)
    args = where.abstract((case.state, case.batch))
    step_trace = trace(case.step, *args)
    return Step(case.step, args, (0,), where, step_trace.aliases), step_trace


def planned(case: Case, plan: jdelta.Plan) -> Program:
    """The step of a case under a plan that was made for it."""
    return under(plan, case.step, case.state, case.batch)


def under(plan: jdelta.Plan, step_fn: Callable[..., Any], *args: Any) -> Program:
    """A step under a plan that was made for it and its arguments."""
    call = call_of(dataclasses.replace(jitted(step_fn), static=plan.static), args, {})
    step, _ = step_of(plan, call, plan.donate_argnums)
    emission = emit(step, plan.policy)
    graph, computed = emission.timeline.graph, emission.computed
    return Program(graph, emission.lower, step.target, emission.options, computed)


def plan(case: Case, budget: float, target: str, **options: Any) -> tuple[Row, jdelta.Plan | None]:
    """Plans the step of a case, built with `jdelta.remat`, to a budget: bytes or a share.

    `options` are further ones of `jdelta.plan`.

    Returns:
        What is known of the plan, as a part of a row, and the plan; only the error and the floor if
        there is none.
    """
    try:
        plan = jdelta.plan(
            case.step, budget, case.state, case.batch, target=target, donate_argnums=0, **options
        )
    except jdelta.BudgetError as error:
        return {"error": str(error), "floor": error.floor, "budget": budget}, None
    price = planned(case, plan).priced(plan.overlap)
    return {**of_plan(plan), "price": dataclasses.asdict(price)}, plan


def of_plan(plan: jdelta.Plan) -> Row:
    """What a plan promises, and what the compiler says."""
    kept = sum(d is not jdelta.Decision.RECOMPUTE for d in plan.decisions.values())
    return {
        "budget": plan.budget,
        "predicted_peak": plan.predicted_peak,
        "compiled_peak": plan.compiled_peak,
        "code_bytes": plan.code_bytes,
        "host_bytes": plan.host_bytes,
        "floor": plan.floor,
        "ceiling": plan.ceiling,
        "estimates": list(plan.estimates),
        "overhead": plan.overhead,
        "step_seconds": plan.step_seconds,
        "compiles": plan.compiles,
        "layers": plan.grouping.layers,
        "kept": kept,
        "residuals": len(plan.decisions),
    }
