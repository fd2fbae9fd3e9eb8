"""Hand-written policies as decisions about residuals, so that they can be shown and compared."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jdelta import _jax
from jdelta._decision import Decision
from jdelta._graph import Graph, Operation
from jdelta._naming import RegionName
from jdelta._residual import Residual
from jdelta._trace import Trace


def decisions_of(
    policy: Callable[..., Any], trace: Trace, residuals: Sequence[Residual]
) -> Mapping[str, Decision]:
    """What a ``jax.checkpoint`` policy would do with each residual, as patterns for ``pin``.

    A policy is asked twice about a value that the user named: about the equation that makes it,
    and about the name; either may keep it. What enters a region is no question to a policy.

    Args:
        policy: As for ``jax.checkpoint``.
        trace: The step.
        residuals: Its residuals.
    """
    answers = _answers(policy, trace)
    asked = [r.name for r in residuals if r.name in answers and not r.boundary]
    return {glob.escape(name): answers[name] for name in asked}


def _answers(policy: Callable[..., Any], trace: Trace) -> dict[str, Decision]:
    found: dict[str, Decision] = {}
    for region in trace.regions:
        graph = region.graph
        producers = graph.producers()
        for op in graph.operations:
            if isinstance(op.name, RegionName) and not op.name.is_input:
                maker = graph.operations[producers[op.inputs[0]]]
                asked = [_decision(policy, graph, maker)]
                if op.name.given:
                    asked.append(_decision_by_name(policy, op.name.given))
                kept = (d for d in asked if d is not Decision.RECOMPUTE)
                found[trace.plan_name(op.name)] = next(kept, Decision.RECOMPUTE)
    return found


def _decision(policy: Callable[..., Any], graph: Graph, op: Operation) -> Decision:
    values = [graph.values[v] for v in op.inputs]
    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
    return Decision(_jax.answer(policy, op.primitive, avals, op.params))


def _decision_by_name(policy: Callable[..., Any], name: str) -> Decision:
    return Decision(_jax.answer(policy, "name", (), {"name": name}))
