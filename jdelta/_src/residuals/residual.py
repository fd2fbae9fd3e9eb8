"""Residuals: the values of a region that its backward pass can be given instead of computing."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jdelta._src import _jax
from jdelta._src._jax.sharding import Spec
from jdelta._src.backends.target import Target
from jdelta._src.estimate.buffers import Compiler, read_narrowly, storage
from jdelta._src.estimate.seconds import operation_seconds
from jdelta._src.estimate.traffic import spared_reads, stacked_passes
from jdelta._src.program.graph import TRANSFER, Graph, Operation
from jdelta._src.program.names import RegionName
from jdelta._src.program.primitives import CHEAP, FREE, PARTS, SPLITS, VIEWS
from jdelta._src.regions.trace import Region
from jdelta._src.sizes import format_array, format_bytes


@dataclass(frozen=True)
class Residual:
    """A value computed in the forward pass of a region. Weights and inputs are none.

    Attributes:
        name: ``region/scopes/primitive``, or the user's own ``checkpoint_name`` in its last part.
        region: Name of its region.
        shape: Shape of one instance, unsharded; in a ``shard_map`` that of the part there. With
            ``jax.vmap`` around the gradient, before that how many of it one device has.
        dtype: Name of its dtype.
        count: Instances alive at once: iterations of the loops that keep them.
        bytes: Bytes of those instances on one device, without padding.
        producer: The JAX primitive that makes it.
        consumers: Names of the residuals computed from it, in program order.
        sources: Names of the residuals it is computed from, in program order. Of a region by itself
            its inputs are among them.
        needed: Whether the backward pass reads it. If not, it can only be worth keeping for what
            is recomputed from it.
        read_narrowly: Whether nothing but matrix products and casts to bfloat16 reads it.
        seconds: Predicted seconds to compute all instances of a step again, given its sources.
        holding: Predicted seconds that saving them in stacks of loops costs.
        loops: Number of loops that keep its instances; offload works under one at most.
        repeats: How often all of that happens in a step: iterations of the loops that have the
            backward pass inside too (micro-batches, several steps in one).
        spec: For each dimension the mesh axes that it is sharded over, and the devices along each;
            empty when it is not sharded.
        conditional: Whether it is in a branch of a ``cond``; offload does not work there.
        region_input: Whether it enters a region, and so stays in memory unless it is offloaded.
        entering: Name that it has there, where it is a residual of the region it comes from too.
        user_name: The user's own ``checkpoint_name`` of the value; empty where it has none.
        line: Where the user's code computes it, ``model.py:31``; empty where that is not known.
    """

    name: str
    region: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int
    producer: str
    consumers: tuple[str, ...]
    sources: tuple[str, ...]
    needed: bool
    read_narrowly: bool
    seconds: float
    loops: int
    repeats: int = 1
    holding: float = 0.0
    spec: Spec = ()
    conditional: bool = False
    region_input: bool = False
    entering: str | None = None
    user_name: str = ""
    line: str = ""

    def __repr__(self) -> str:
        """The residual in a line."""
        kind = format_array(self.dtype, self.shape)
        count = f", {self.count} in loop" if self.count > 1 else ""
        return f"<jdelta.Residual {self.label}: {kind}{count}, {format_bytes(self.bytes)}>"

    @property
    def label(self) -> str:
        """Its name as it is printed, with the user's own, where that is given outside of it."""
        is_in_name = not self.user_name or f"/{self.user_name}" in self.name
        return self.name if is_in_name else f"{self.name} ({self.user_name})"


def residuals(region: Region, target: Target) -> tuple[Residual, ...]:
    """The residuals of a region, sources before what is computed from them."""
    return with_consumers(_Analysis(region, target).residuals())


def needed_inputs(region: Region, target: Target) -> frozenset[str]:
    """Names of the region's inputs that its backward pass reads, whatever is kept of the rest."""
    return _Analysis(region, target).needed_inputs()


def with_consumers(all_residuals: Sequence[Residual]) -> tuple[Residual, ...]:
    """The residuals, each with the names of those that it is a source of."""
    consumers: dict[str, list[str]] = {}
    for residual in all_residuals:
        for source in residual.sources:
            consumers.setdefault(source, []).append(residual.name)
    return tuple(replace(r, consumers=tuple(consumers.get(r.name, ()))) for r in all_residuals)


@dataclass
class _Chain:
    """What has to be computed for a value, given the residuals it starts from.

    Attributes:
        sources: Those residuals, and inputs of the region.
        work: Seconds of what makes a result, by the first one made with it: branches that meet
            share what is above.
    """

    sources: set[int] = field(default_factory=set[int])
    work: dict[int, float] = field(default_factory=dict[int, float])

    def then(self, result: int, seconds: float) -> _Chain:
        """The chain with one operation more."""
        return _Chain(self.sources, {**self.work, result: seconds})


def _made_together(op: Operation) -> list[tuple[int, ...]]:
    """The results of an operation, by what has to be computed for one of them."""
    apart = [(v,) for v in op.outputs]
    return apart if op.primitive in SPLITS or not apart else [op.outputs]


class _Analysis:
    """Groups views of one buffer, tells primal from tangent work, prices each buffer."""

    def __init__(self, region: Region, target: Target):
        self.region = region
        self.target = target
        self.compiler = Compiler(target.backend)
        self.graph: Graph = region.graph
        self.prefix = region.traced + "/"
        self.batch = max(region.copies.values(), default=1)
        self.producers = self.graph.producers()
        self.base = self.graph.buffers()
        self.names = self._names()
        self.inputs = {v for v, name in self.names.items() if name.is_input}
        self.constant = self._constant()
        self.makers, read = self._forward()
        self.needed = self._through_what_is_no_item(read)
        self.narrow = read_narrowly(self.graph)

    def _names(self) -> dict[int, RegionName]:
        """A name for each buffer that the step computes: the first one given here."""
        names: dict[int, RegionName] = {}
        for op in self.graph.operations:
            if isinstance(op.name, RegionName) and op.name in self.region.copies:
                names.setdefault(self.base[op.outputs[0]], op.name)
        return names

    def _forward(self) -> tuple[list[Operation], set[int]]:
        """Work of the forward pass, and the buffers that work on tangents reads.

        What depends on no tangent is forward work; of what does, the results that are named
        nevertheless (a loop makes both). Calls with a rule of their own have no names inside.
        """
        tangents = set(self.graph.inputs[self.region.primals :])
        makers: list[Operation] = []
        read: set[int] = set()
        for op in self.graph.operations:
            named = {v for v in op.outputs if self.base[v] in self.names}
            moving = any(v in tangents for v in op.inputs)
            if moving:
                read.update(self.base[v] for v in op.inputs if v not in tangents)
                tangents.update(v for v in op.outputs if op.primitive in VIEWS or v not in named)
            if op.primitive not in VIEWS and (named or not moving):
                makers.append(op)
        return makers, read

    def _through_what_is_no_item(self, read: set[int]) -> set[int]:
        """The buffers that are read, and those that what is always computed again is made of."""
        needed = set(read)
        for op in reversed(self.makers):
            recomputed = [v for v in op.outputs if v in needed and not self._may_be_kept(op, v)]
            if recomputed:
                needed.update(self.base[v] for v in op.inputs)
        return needed

    def _constant(self) -> set[int]:
        """Values made of no input and of no array held: the compiler folds them."""
        varying = set(self.graph.initial_values)
        for op in self.graph.operations:
            if not varying.isdisjoint(op.inputs):
                varying.update(op.outputs)
        return set(range(len(self.graph.values))) - varying

    def residuals(self) -> tuple[Residual, ...]:
        roots = storage(self.graph, self.compiler)
        along = spared_reads(self.graph, roots, self.compiler)
        spared = {id(self.graph.operations[index]): read for index, read in along.items()}
        items: dict[int, Residual] = {}
        below: dict[int, _Chain] = {}
        for op in self.makers:
            upstream = self._chain(op, below, items)
            seconds = self._seconds(op, roots, spared.get(id(op), frozenset()))
            seconds *= op.times * self.batch
            for results in _made_together(op):
                chain = upstream.then(results[0], seconds * len(results) / len(op.outputs))
                for v in results:
                    if self._is_item(op, v):
                        items[v] = self._residual(op, v, chain)
                    else:
                        below[v] = chain
        return tuple(items.values())

    def needed_inputs(self) -> frozenset[str]:
        return frozenset(self._plan_name(v) for v in self.inputs & self.needed)

    def _seconds(
        self, op: Operation, roots: Sequence[frozenset[int]], spared: frozenset[int]
    ) -> float:
        target = self.target
        if op.primitive == TRANSFER:  # a weight that is kept on the host is fetched again
            return sum(self.graph.values[v].bytes for v in op.outputs) / target.rates.host_to_device
        return operation_seconds(self.graph, op, roots, target.rates, target.backend, spared)

    def _chain(
        self, op: Operation, below: Mapping[int, _Chain], items: Mapping[int, Residual]
    ) -> _Chain:
        """Residuals and inputs an operation starts from, and what lies between them and it."""
        chain = _Chain()
        for base in (self.base[v] for v in op.inputs):
            if base in items or base in self.inputs:
                chain.sources.add(base)
            elif base in below:
                chain.sources |= below[base].sources
                chain.work |= below[base].work
        return chain

    def _is_item(self, op: Operation, value: int) -> bool:
        index = self.producers.get(op.inputs[0]) if op.primitive in PARTS else None
        maker = op if index is None else self.graph.operations[index]
        wanted = value in self.needed or maker.primitive not in CHEAP | FREE
        return wanted and self._may_be_kept(op, value)

    def _may_be_kept(self, op: Operation, value: int) -> bool:
        return op.primitive not in FREE and value in self.names and value not in self.constant

    def _residual(self, op: Operation, value: int, chain: _Chain) -> Residual:
        what, nest = self.graph.values[value], self.region.nest
        count = op.times * nest.kept
        copies = self.region.copies[self.names[value]]
        return Residual(
            name=self._plan_name(value),
            region=self.region.name,
            shape=(copies, *what.shape) if copies > 1 else what.shape,
            dtype=what.dtype,
            count=count,
            bytes=what.bytes * copies * count,
            producer=op.primitive,
            consumers=(),
            sources=tuple(self._plan_name(s) for s in sorted(chain.sources)),
            needed=value in self.needed,
            read_narrowly=value in self.narrow,
            seconds=sum(chain.work.values()) * nest.trips,
            loops=nest.loops + (op.times > 1),
            repeats=nest.repeats,
            holding=self._holding(op, value, copies),
            spec=((), *what.spec) if copies > 1 and what.spec else what.spec,
            conditional=self.region.conditional or self.names[value].conditional,
            user_name=self.names[value].user_name,
            line=_jax.line_of(op.equation),
        )

    @functools.cached_property
    def _passes(self) -> Mapping[int, int]:
        """For each buffer how often its bytes move when loops save it; no loop, no need to know."""
        return stacked_passes(self.graph, self.makers, self.base, self.compiler)

    def _holding(self, op: Operation, value: int, copies: int) -> float:
        """Seconds that saving a value in the stacks of a step's loops costs."""
        nest = self.region.nest
        if not nest.loops and op.times == 1:
            return 0.0
        narrowly = value in self.narrow
        row = self.compiler.stored_bytes(self.graph.values[value], read_narrowly=narrowly)
        size = row * copies * op.times * nest.trips
        return self._passes.get(value, 0) * size / self.target.rates.bandwidth

    def _plan_name(self, value: int) -> str:
        return f"{self.region.name}/{self.names[value].removeprefix(self.prefix)}"
