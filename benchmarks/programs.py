"""Training steps as programs, by hand or planned: traced, priced alike, compiled for a target."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

import jdelta
from benchmarks.models import Case
from benchmarks.record import Row
from jdelta._cost import program_seconds
from jdelta._emit import Step, emit
from jdelta._graph import Graph, graph_of
from jdelta._measure import Measurement, measure
from jdelta._target import Target, resolve
from jdelta._trace import walk


@dataclass(frozen=True)
class Price:
    """Predicted seconds of a program, by the one cost model that also makes plans.

    Attributes:
        compute: Seconds of all operations, one after the other.
        to_host: Bytes copied to host memory in a step.
        to_device: Bytes copied back.
        seconds: Everything, the copies charged in full.
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
    """

    graph: Graph
    lower: Callable[[], jax.stages.Lowered]
    target: Target

    @functools.cached_property
    def measured(self) -> Measurement:
        """What the compiler says."""
        return measure(self.lower(), self.target)[1]

    @functools.cached_property
    def price(self) -> Price:
        """Predicted seconds."""
        rates = self.target.rates
        compute = program_seconds(self.graph, rates, self.target.platform)
        to_host, to_device = copied(self.graph, "host"), copied(self.graph, "device")
        copies = to_host / rates.device_to_host + to_device / rates.host_to_device
        return Price(compute, to_host, to_device, compute + copies)

    def names(self) -> set[str]:
        """Names that `checkpoint_name` gave to its values."""
        return {str(op.name) for op, _, _ in walk(self.graph) if op.name}

    def figures(self) -> Row:
        """Everything known of it, as a part of a row."""
        return {**dataclasses.asdict(self.measured), "price": dataclasses.asdict(self.price)}


def copied(graph: Graph, space: str) -> int:
    """Bytes that a step copies to "host" or "device" memory."""
    return sum(
        trips * value.bytes
        for op, trips, values in _copies(graph)
        for value, destination in zip(values, op.params["devices"], strict=True)
        if space in _memory(destination)
    )


def _copies(graph: Graph, trips: int = 1):
    """Yields each copying operation, how often it runs and what it copies."""
    for op in graph.operations:
        if op.primitive == "device_put":
            yield op, trips, [graph.values[v] for v in op.outputs]
        if op.body is not None:
            yield from _copies(op.body, trips * op.trips)


def _memory(destination: Any) -> str:
    """Name of the memory that a copy goes to, empty where it names a device only."""
    name = getattr(destination, "memory_kind", None) or getattr(destination, "name", None)
    return str(name or "").lower()


def traced(case: Case, target: str) -> Program:
    """The step of a case as it is."""
    where = resolve(target)
    placed = where.abstract((case.state, case.batch))
    staged = jax.jit(case.step, donate_argnums=0).trace(*placed)
    lower = functools.partial(staged.lower, lowering_platforms=(where.platform,))
    return Program(graph_of(staged.jaxpr), lower, where)


def planned(case: Case, plan: jdelta.Plan) -> Program:
    """The step of a case under a plan that was made for it."""
    where = resolve(plan.target)
    placed = where.abstract((case.state, case.batch))
    step = Step(case.step, placed, plan.donate_argnums, where, dict(plan.aliases))
    emission = emit(step, plan.policy)
    return Program(emission.timeline.graph, emission.lower, where)


def plan(case: Case, budget: float, target: str) -> tuple[Row, jdelta.Plan | None]:
    """Plans the step of a case, built with `jdelta.remat`, to a budget: bytes or a share.

    Returns:
        What is known of the plan, as a part of a row, and the plan; only the error and the floor if
        there is none.
    """
    try:
        made = jdelta.plan(
            case.step, budget, case.state, case.batch, target=target, donate_argnums=0
        )
    except jdelta.BudgetError as error:
        return {"error": str(error), "floor": error.floor, "budget": budget}, None
    price = dataclasses.asdict(planned(case, made).price)
    return {**of_plan(made), "price": price}, made


def of_plan(plan: jdelta.Plan) -> Row:
    """What a plan promises, and what the compiler says."""
    kept = sum(d is not jdelta.Decision.RECOMPUTE for d in plan.decisions.values())
    return {
        "budget": plan.budget,
        "predicted_peak": plan.predicted_peak,
        "compiled_peak": plan.compiled_peak,
        "host_bytes": plan.host_bytes,
        "floor": plan.floor,
        "ceiling": plan.ceiling,
        "overhead": plan.overhead,
        "step_seconds": plan.step_seconds,
        "compiles": plan.compiles,
        "kept": kept,
        "residuals": len(plan.decisions),
    }
