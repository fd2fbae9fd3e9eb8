"""Hand-written policies as decisions about residuals, so that they can be shown and compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jdelta._src import _jax
from jdelta._src.decision import Decision
from jdelta._src.errors import JdeltaError, PlanMismatchError
from jdelta._src.program.graph import Graph, Operation
from jdelta._src.program.names import RegionName
from jdelta._src.program.primitives import PARTS
from jdelta._src.regions.region import plan_in
from jdelta._src.regions.trace import Trace
from jdelta._src.residuals.residual import Residual


def decisions_of(
    policy: Callable[..., Any], trace: Trace, residuals: Sequence[Residual]
) -> Mapping[str, Decision]:
    """What a ``jax.checkpoint`` policy would do with each residual, as ``pin`` takes it.

    A policy is asked about the equation that makes a value, and about those that only view it, the
    user's ``checkpoint_name`` among them; any of them may keep it. What enters a region stays
    whatever a policy says, but may be offloaded.

    Args:
        policy: As for ``jax.checkpoint``.
        trace: The step.
        residuals: Its residuals.

    Returns:
        For example ``{"h/3/mlp/tanh": Decision.SAVE}``.

    Raises:
        PlanMismatchError: The policy fails, gives no answer that ``jax.checkpoint`` takes, or is a
            plan.
    """
    if plan_in(policy):
        raise PlanMismatchError(
            "pin: got a plan; it decides by the names of its residuals, which no equation of this "
            "step has yet. Give its decisions: pin=plan.decisions."
        )
    answers = dict(_answers(policy, trace, {r.name for r in residuals}))
    return {
        r.name: answers[r.name]
        for r in residuals
        if r.name in answers and (not r.region_input or answers[r.name] is Decision.OFFLOAD)
    }


def _answers(
    policy: Callable[..., Any], trace: Trace, wanted: Collection[str]
) -> Iterator[tuple[str, Decision]]:
    for region in trace.regions:
        asked = _asked(region.graph)
        for traced, buffer in _named(region.graph):
            name = trace.plan_name(traced)
            if name in wanted:
                said = (_decision(policy, op, name) for op in asked[buffer])
                kept = (d for d in said if d is not Decision.RECOMPUTE)
                yield name, next(kept, Decision.RECOMPUTE)


def _named(graph: Graph) -> Iterator[tuple[RegionName, int]]:
    """The names given here in a region, each with the buffer that has it."""
    buffers = graph.buffers()
    for op in graph.operations:
        if isinstance(op.name, RegionName):
            yield op.name, buffers[op.outputs[0]]


def _asked(graph: Graph) -> Mapping[int, Sequence[Operation]]:
    """For each buffer the operations that a policy is asked about: its maker first, then views."""
    buffers, producers = graph.buffers(), graph.producers()
    asked: defaultdict[int, list[Operation]] = defaultdict(list)
    for op in graph.operations:
        if op.equation is None or isinstance(op.name, RegionName):
            continue
        for buffer in dict.fromkeys(buffers[v] for v in op.outputs):
            asked[buffer].append(op)
            if op.primitive in PARTS and op.inputs[0] in producers:  # kept in place of the whole
                asked[buffer].append(graph.operations[producers[op.inputs[0]]])
    return asked


def _decision(policy: Callable[..., Any], op: Operation, name: str) -> Decision:
    assert op.equation is not None
    try:
        return Decision(_jax.answer(policy, op.equation))
    except JdeltaError:
        raise
    except Exception as error:
        called = getattr(policy, "__qualname__", repr(policy))
        raise PlanMismatchError(
            f"pin: the policy {called} fails for {op.primitive}, which makes {name!r}: "
            f"{type(error).__name__}: {error}. jax.checkpoint calls a policy as policy(primitive, "
            "*types_of_operands, **parameters) for every equation, and expects a bool or what "
            "those of jax.checkpoint_policies return."
        ) from error
