"""What devices send each other for an operation: read off the shardings of what it reads and makes.

With automatic axes a program has no collectives until it is partitioned, but they follow from the
shardings: a contracted dimension that is sharded is summed over its devices, an operand that is
sharded where the operation needs it whole is gathered. Seconds are those of rings, which send each
byte over every link but one ("How to Scale Your Model", chapter 3,
jax-ml.github.io/scaling-book/sharding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jdelta._src._jax.sharding import Axis, Spec, parts
from jdelta._src.backends.chips import Rates
from jdelta._src.program.graph import RESHARD, Graph, Operation, Value
from jdelta._src.program.primitives import CHEAP, EXPENSIVE

_PASSES = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0, "all-to-all": 1.0}
"""How often the bytes go round the ring."""


@dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce" or "all-to-all".
        bytes: What one device has of the larger side: gathered, or not scattered yet.
        devices: How many take part in it.
    """

    kind: str
    bytes: int
    devices: int

    def seconds(self, rates: Rates) -> float:
        """Seconds of a ring of the devices, each sending to the next."""
        share = (self.devices - 1) / self.devices
        return _PASSES[self.kind] * share * self.bytes / rates.interconnect


Axes: TypeAlias = tuple[Axis, ...]
_Rule: TypeAlias = Callable[[Graph, Operation], Iterator[Collective]]


def collectives(graph: Graph, op: Operation) -> list[Collective]:
    """The exchanges that an operation takes, without those in its body."""
    rule = _RULES.get(op.primitive)
    exchanges = rule(graph, op) if rule else _aligned(graph, op) if _is_aligned(op) else ()
    return [one for one in exchanges if one.devices > 1 and one.bytes]


def collective_seconds(graph: Graph, op: Operation, rates: Rates) -> float:
    """Seconds of an operation's exchanges, one after the other."""
    return sum(one.seconds(rates) for one in collectives(graph, op))


def gathered_bytes(graph: Graph, op: Operation) -> int:
    """Bytes of the operands of an operation that are gathered for it alone."""
    if op.primitive == RESHARD:
        return 0  # its result
    return sum(one.bytes for one in collectives(graph, op) if one.kind == "all-gather")


def contracted(graph: Graph, op: Operation) -> Axes:
    """The mesh axes that a ``dot_general`` sums over: those that cut both operands alike."""
    if len(op.inputs) < 2:
        return ()
    left, right = (_spec(graph.values[v]) for v in op.inputs)
    (of_left, of_right), _ = op.params["dimension_numbers"]
    pairs = zip(of_left, of_right, strict=True)
    return tuple(axis for i, j in pairs for axis in left[i] if axis in right[j])


def _spec(value: Value) -> Spec:
    return value.spec or ((),) * len(value.shape)


def _full_bytes(value: Value, over: Sequence[Axis]) -> int:
    return value.bytes * parts(over)


def _reduced(value: Value, over: Axes) -> Iterator[Collective]:
    """A result summed over axes; those that cut it afterwards have it scattered."""
    kept = [axis for axes in value.spec for axis in axes]
    scattered = tuple(axis for axis in over if axis in kept)
    summed = tuple(axis for axis in over if axis not in kept)
    if scattered:
        yield Collective("reduce-scatter", _full_bytes(value, scattered), parts(scattered))
    if summed:
        yield Collective("all-reduce", value.bytes, parts(summed))


def _moved(value: Value, wanted: Sequence[Axes]) -> Iterator[Collective]:
    """A value brought to other shardings of its dimensions; cutting it further takes nothing."""
    pairs = zip(_spec(value), wanted, strict=True)
    lacking = [axis for have, want in pairs for axis in have if axis not in want]
    elsewhere = {axis for axes in wanted for axis in axes}
    crossing = tuple(axis for axis in lacking if axis in elsewhere)
    gathered = tuple(axis for axis in lacking if axis not in elsewhere)
    if crossing:
        yield Collective("all-to-all", value.bytes, parts(crossing))
    if gathered:
        yield Collective("all-gather", _full_bytes(value, gathered), parts(gathered))


def _dot(graph: Graph, op: Operation) -> Iterator[Collective]:
    if len(op.inputs) < 2:
        return
    values = [graph.values[v] for v in op.inputs]
    result = graph.values[op.outputs[0]]
    summed = contracted(graph, op)
    contracting, batch = op.params["dimension_numbers"]
    out = iter(_spec(result))
    shared = [next(out) for _ in batch[0]]
    for value, own, along in zip(values, contracting, batch, strict=True):
        wanted: list[Axes] = [()] * len(value.shape)
        for i, axes in zip(along, shared, strict=True):
            wanted[i] = axes
        for i in range(len(value.shape)):
            if i in own:
                wanted[i] = tuple(axis for axis in _spec(value)[i] if axis in summed)
            elif i not in along:
                wanted[i] = _free(_spec(value)[i], next(out), summed)
        yield from _moved(value, wanted)
    yield from _reduced(result, summed)


def _free(has: Axes, result: Axes, summed: Axes) -> Axes:
    """The axes that a free dimension is wanted with: the result's, before it is scattered."""
    return tuple(axis for axis in has if axis in result and axis not in summed)


def _reduction(graph: Graph, op: Operation) -> Iterator[Collective]:
    spec = _spec(graph.values[op.inputs[0]])
    over = tuple(axis for i in op.params.get("axes", ()) for axis in spec[i])
    for v in op.outputs:
        yield from _reduced(graph.values[v], over)


def _is_aligned(op: Operation) -> bool:
    return op.primitive in CHEAP or op.primitive in EXPENSIVE


def _aligned(graph: Graph, op: Operation) -> Iterator[Collective]:
    """Element-wise operations have every operand cut as their result is."""
    result = graph.values[op.outputs[0]]
    for value in (graph.values[v] for v in op.inputs):
        if value.shape == result.shape:
            yield from _moved(value, _spec(result))


def _named(kind: str) -> _Rule:
    """A collective that the program itself asks for, inside of ``shard_map``."""

    def rule(graph: Graph, op: Operation) -> Iterator[Collective]:
        sides = (op.outputs, op.inputs)[kind == "reduce-scatter"]
        for v in sides:
            yield Collective(kind, graph.values[v].bytes, op.params.get("devices", 1))

    return rule


_ALL_REDUCE = frozenset(
    "psum psum_invariant psum_start psum_invariant_start unreduced_psum unreduced_psum_start"
    " unreduced_pmax unreduced_pmin pmax pmin".split()
)
_ALL_GATHER = frozenset(
    "all_gather all_gather_invariant all_gather_reduced all_gather_start all_gather_reduced_start"
    " pbroadcast pbroadcast_start pbroadcast_dynamic".split()
)
_REDUCE_SCATTER = frozenset(
    "reduce_scatter psum_scatter reduce_scatter_start unreduced_reduce_scatter"
    " unreduced_reduce_scatter_start".split()
)
_ALL_TO_ALL = frozenset(
    "all_to_all all_to_all_start ragged_all_to_all ppermute ppermute_start psend".split()
)
_ARRIVALS = frozenset(
    "psum_done all_gather_done pbroadcast_done reduce_scatter_done all_to_all_done ppermute_done"
    " precv".split()
)

COLLECTIVES = _ALL_REDUCE | _ALL_GATHER | _REDUCE_SCATTER | _ALL_TO_ALL | _ARRIVALS
"""Primitives with which a program itself asks other devices; what arrives was sent before."""

_RULES: dict[str, _Rule] = {
    "dot_general": _dot,
    RESHARD: _aligned,
    **dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod argmax argmin".split(), _reduction
    ),
    **dict.fromkeys(_ALL_REDUCE, _named("all-reduce")),
    **dict.fromkeys(_ALL_GATHER, _named("all-gather")),
    **dict.fromkeys(_REDUCE_SCATTER, _named("reduce-scatter")),
    **dict.fromkeys(_ALL_TO_ALL, _named("all-to-all")),
}
