"""The staged step: forward, backward and update in one graph, and the regions marked in it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jdelta import _jax
from jdelta._automatic import tracing
from jdelta._errors import TraceError
from jdelta._graph import Graph, graph_of
from jdelta._naming import RegionName
from jdelta._nest import Nest, walk
from jdelta._region import AS_WRITTEN, Grouping, Session


@dataclass(frozen=True)
class Region:
    """A unit of recompute as it occurs in the step.

    Attributes:
        name: Its name in plans.
        traced: Its name while tracing, ``base#call``.
        graph: Its JVP with every value named, loops unfolded, in the names of ``traced``.
        primals: How many of the graph's inputs are no tangents (the first ones).
        nest: The loops around it.
    """

    name: str
    traced: str
    graph: Graph
    primals: int
    nest: Nest


@dataclass(frozen=True)
class Trace:
    """A training step as one program.

    Attributes:
        graph: The un-rematerialised step, with the names of its regions' values in it.
        regions: Its regions, in the order of the forward pass.
        automatic: Whether they were found in the program, since nothing is marked.
        grouping: How its loops over layers are run.
        fingerprint: Digest of the program; equal programs have equal ones on every process.
    """

    graph: Graph
    regions: tuple[Region, ...]
    automatic: bool
    grouping: Grouping
    fingerprint: str

    @property
    def aliases(self) -> dict[str, str]:
        """From the name of each region while tracing to its name in plans."""
        return {region.traced: region.name for region in self.regions}

    @property
    def loops(self) -> dict[str, int]:
        """From the name of each region in plans to the number of loops that keep its values."""
        return {region.name: region.nest.loops for region in self.regions}

    def plan_name(self, name: RegionName) -> str:
        """The name in plans of a value."""
        return self.aliases[name.region] + name.removeprefix(name.region)


def trace(step_fn: Callable[..., Any], *args: Any, grouping: Grouping = AS_WRITTEN) -> Trace:
    """Stage a step and find its regions: those that are marked, or its own where none is.

    Args:
        step_fn: The step.
        *args: Its arguments.
        grouping: How its loops over layers are to be run.

    Raises:
        TraceError: The step takes no gradient, or none through a region.
    """
    session, graph = _staged(step_fn, args, Session(grouping=grouping))
    if not session.called:
        session, graph = _staged(step_fn, args, Session(automatic=True, grouping=grouping))
    found: dict[str, Nest] = {}
    for op, nest in walk(graph):
        if isinstance(op.name, RegionName) and op.name.loops == 0:
            # JAX hoists what does not change out of loops: the deepest values tell.
            deepest = found.get(op.name.region, nest)
            found[op.name.region] = max(deepest, nest, key=lambda n: (n.loops, n.trips))
    _check(session, found)
    names = _plan_names(list(found))
    entering = dict(_entering(graph))
    regions = tuple(
        Region(names[traced], traced, *_derivative(session, traced, entering), nest)
        for traced, nest in found.items()
    )
    return Trace(graph, regions, session.automatic, grouping, _fingerprint(graph))


def _staged(
    step_fn: Callable[..., Any], args: tuple[Any, ...], session: Session
) -> tuple[Session, Graph]:
    with tracing(session):
        return session, graph_of(jax.make_jaxpr(step_fn)(*args))


def _entering(graph: Graph) -> Iterator[tuple[str, int]]:
    """Names of the inputs of regions, and how many elements each has in the step."""
    for op in graph.operations:
        if isinstance(op.name, RegionName) and op.name.is_input and not op.backward:
            yield op.name, math.prod(graph.values[op.outputs[0]].shape)
        if op.body is not None:
            yield from _entering(op.body)


def _derivative(session: Session, traced: str, entering: Mapping[str, int]) -> tuple[Graph, int]:
    """The JVP of a region, and how many of its inputs are no tangents.

    Under ``jax.vmap`` a region is staged for one example; in the step its inputs are larger.
    """
    closed, primals = session.derivatives[traced]
    inner = _jax.open_jaxpr(closed)
    first = [eqn for eqn in inner.eqns[: len(inner.invars)] if _jax.named_value(eqn)]
    names = {eqn.invars[0]: _jax.named_value(eqn) for eqn in first}
    times = [
        entering.get(str(names.get(v)), 0) // max(1, math.prod(v.aval.shape))
        for v in inner.invars[:primals]
    ]
    if max(times, default=1) > 1:
        moving = [True] * (len(inner.invars) - primals)
        closed = _jax.vmapped(closed, max(times), [n > 1 for n in times] + moving)
    return graph_of(closed, unfold_loops=True), primals


def _check(session: Session, found: dict[str, Any]) -> None:
    if not session.called:
        raise TraceError(
            "The step takes no gradient: nothing in it is marked with jdelta.remat, and it calls "
            "none of jax.grad, jax.value_and_grad and jax.vjp. Plan the function that does."
        )
    if not found:
        raise TraceError(
            "The step takes no gradient through its regions "
            f"({', '.join(sorted(session.called)[:5])}), so there is nothing to keep or to "
            "recompute. Plan the function that calls jax.grad or jax.value_and_grad."
        )


def _plan_names(traced: list[str]) -> dict[str, str]:
    """Names for plans: the base alone where it is unique, else numbered in program order.

    A base that others begin with is numbered too: their values' names would look like its own.
    """
    calls: dict[str, list[str]] = {}
    for name in traced:
        calls.setdefault(name.rsplit("#", 1)[0], []).append(name)
    begun = {"/".join(base.split("/")[:n]) for base in calls for n in range(1, base.count("/") + 1)}
    return {
        name: base if len(group) == 1 and base not in begun else f"{base}_{number}"
        for base, group in calls.items()
        for number, name in enumerate(group)
    }


def _fingerprint(graph: Graph) -> str:
    digest = hashlib.sha256()
    for op, nest in walk(graph):
        digest.update(f"{op.primitive} {op.inputs} {op.outputs} {op.name} {nest.trips};".encode())
    for value in graph.values:
        digest.update(f"{value.shape}{value.dtype};".encode())
    return digest.hexdigest()[:16]
