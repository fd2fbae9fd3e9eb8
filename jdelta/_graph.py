"""A staged program as a flat graph of operations on sized values, calls inlined, loops nested.

Everything that is computed *about* a program (lifetimes, peaks, costs, residuals) is computed on
this graph, so that no other analysis needs to know what a jaxpr looks like.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdelta import _jax
from jdelta._jax import Atom, Eqn, Jaxpr, Var
from jdelta._naming import scope_path

BARRIER = "optimization_barrier"
"""Reads values and hands them on as they are, hidden from optimisation across it."""

TRANSFER = "transfer"
"""Copies a value between device and host memory."""

_WRAPPERS = _jax.CALLS | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


@dataclass(frozen=True)
class Value:
    """A value of the program: what it is, not where it is stored.

    Attributes:
        shape: Its shape, unsharded.
        dtype: Name of its dtype; ``key<…>`` for PRNG keys.
        bytes: Bytes on one device, without padding; zero for values in host memory.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Operation:
    """One equation.

    Attributes:
        primitive: Name of the JAX primitive; ``TRANSFER`` for copies from and to the host.
        inputs: Indices into ``Graph.values``; literals are left out, but for those of a ``scan``
            and of a barrier.
        outputs: Indices into ``Graph.values``.
        params: Parameters of the equation.
        body: Body of a loop, as a graph of its own; None for everything else.
        trips: How often ``body`` runs; 1 without a body.
        name: The name that a ``name`` equation gives; None for everything else.
        backward: Whether it was made by transposition, so belongs to a backward pass.
        differentiated: Whether it is part of what the step differentiates, or of its derivative.
        scope: Module scopes it was traced under.
        times: How often it runs; more than one where its loop was unfolded around it.
    """

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any]
    body: Graph | None = None
    trips: int = 1
    name: str | None = None
    backward: bool = False
    differentiated: bool = False
    scope: tuple[str, ...] = ()
    times: int = 1


@dataclass
class Graph:
    """A program: values, and operations in program order.

    Attributes:
        values: All values; operations refer to them by index.
        operations: The operations, each after what it reads.
        inputs: Values given from outside, constants first.
        outputs: Values handed out; None where an output is a literal.
    """

    values: list[Value] = field(default_factory=list[Value])
    operations: list[Operation] = field(default_factory=list[Operation])
    inputs: list[int] = field(default_factory=list[int])
    outputs: list[int | None] = field(default_factory=list[int | None])

    def producers(self) -> dict[int, int]:
        """From each computed value to the index of the operation that makes it."""
        return {v: i for i, op in enumerate(self.operations) for v in op.outputs}


def value_of(aval: Any, shard: Callable[[Any], Sequence[int]] | None = None) -> Value:
    """Size of an abstract value; ``shard`` gives its shape on one device."""
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return Value((), "token", 0)
    local = tuple(shard(aval)) if shard else shape
    size = 0 if _jax.on_host(aval) else math.prod(local) * _itemsize(dtype)
    return Value(shape, str(dtype), size)


def _itemsize(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        impl = getattr(dtype, "_impl", None)
        return 4 * math.prod(getattr(impl, "key_shape", (2,)))
    return np.dtype(dtype).itemsize


def graph_of(
    jaxpr: Jaxpr,
    shard: Callable[[Any], Sequence[int]] | None = None,
    *,
    unfold_loops: bool = False,
) -> Graph:
    """The flat graph of a jaxpr, without what no output depends on.

    Args:
        jaxpr: The program.
        shard: Gives the shape of an abstract value on one device; default: as it is.
        unfold_loops: Put the operations of ``scan`` bodies once into the graph itself, with
            ``times`` set, instead of into a graph of their own: for questions of dependence.
    """
    builder = _Builder(shard, unfold_loops)
    inner = _jax.open_jaxpr(jaxpr)
    env: dict[Var, int] = {}
    for var in (*inner.constvars, *inner.invars):
        env[var] = builder.value(var.aval)
        builder.graph.inputs.append(env[var])
    builder.run(inner.eqns, env, _Place())
    builder.graph.outputs = [builder.read(env, v) for v in inner.outvars]
    return _without_dead_code(builder.graph)


@dataclass(frozen=True)
class _Place:
    """Where in the program an equation stands: what its name stack, and those around it, say."""

    backward: bool = False
    differentiated: bool = False
    scope: tuple[str, ...] = ()

    def below(self, eqn: Eqn) -> _Place:
        stack = _jax.name_stack(eqn)
        path = scope_path(stack)  # of an inlined body: sometimes whole, sometimes relative
        return _Place(
            self.backward or "transpose(" in stack,
            self.differentiated or "jvp(" in stack,
            path if path[: len(self.scope)] == self.scope else (*self.scope, *path),
        )


class _Builder:
    def __init__(self, shard: Callable[[Any], Sequence[int]] | None, unfold_loops: bool):
        self.graph = Graph()
        self.shard = shard
        self.unfold_loops = unfold_loops
        self.times = 1

    def value(self, aval: Any) -> int:
        self.graph.values.append(value_of(aval, self.shard))
        return len(self.graph.values) - 1

    @staticmethod
    def read(env: Mapping[Var, int | None], atom: Atom) -> int | None:
        return env[atom] if _jax.is_var(atom) else None

    def run(self, eqns: Sequence[Eqn], env: dict[Var, Any], around: _Place) -> None:
        for eqn in eqns:
            place = around.below(eqn)
            if eqn.primitive.name in _WRAPPERS and any(True for _ in _jax.subjaxprs(eqn)):
                self._inline(eqn, env, place)
            elif self.unfold_loops and eqn.primitive.name == "scan":
                self.times *= eqn.params["length"]
                self._inline(eqn, env, place)
                self.times //= max(1, eqn.params["length"])
            else:
                self._operation(eqn, env, place)

    def _inline(self, eqn: Eqn, env: dict[Var, Any], place: _Place) -> None:
        inner = _jax.open_jaxpr(_jax.subjaxpr(eqn))
        inputs = [self.read(env, a) for a in eqn.invars]
        if _jax.is_shielded(eqn):
            inputs = self._barrier(inputs, place)
        local: dict[Var, Any] = {v: self.value(v.aval) for v in inner.constvars}
        self.graph.inputs += local.values()
        local |= dict(zip(inner.invars, inputs, strict=True))
        self.run(inner.eqns, local, place)
        for outer, atom in zip(eqn.outvars, inner.outvars, strict=True):
            env[outer] = self.read(local, atom)

    def _barrier(self, inputs: Sequence[int | None], place: _Place) -> list[int | None]:
        """What a shielded recompute starts from: written to memory, whatever it is."""
        read = [v for v in inputs if v is not None]
        made = {v: len(self.graph.values) + i for i, v in enumerate(dict.fromkeys(read))}
        self.graph.values += [self.graph.values[v] for v in made]
        barrier = Operation(BARRIER, tuple(made), tuple(made.values()), {}, backward=place.backward)
        self.graph.operations.append(barrier)
        return [None if v is None else made[v] for v in inputs]

    def _operation(self, eqn: Eqn, env: dict[Var, Any], place: _Place) -> None:
        inputs = [self.read(env, a) for a in eqn.invars]
        if eqn.primitive.name in ("scan", BARRIER):  # each stands beside what it becomes
            inputs = [
                self.value(a.aval) if v is None else v
                for v, a in zip(inputs, eqn.invars, strict=True)
            ]
        outputs: list[int] = []
        for var in eqn.outvars:
            env[var] = self.value(var.aval)
            outputs.append(env[var])
        body, trips = _loop(eqn, self.shard)
        self.graph.operations.append(
            Operation(
                primitive=TRANSFER if _jax.is_transfer(eqn) else eqn.primitive.name,
                inputs=tuple(v for v in inputs if v is not None),
                outputs=tuple(outputs),
                params=eqn.params,
                body=body,
                trips=trips,
                name=_jax.named_value(eqn),
                backward=place.backward,
                differentiated=place.differentiated,
                scope=place.scope,
                times=self.times,
            )
        )


def _loop(eqn: Eqn, shard: Callable[[Any], Sequence[int]] | None) -> tuple[Graph | None, int]:
    """The body and trip count of a loop; a ``while`` counts once, a ``cond`` as its largest arm."""
    if eqn.primitive.name == "scan":
        return graph_of(eqn.params["jaxpr"], shard), eqn.params["length"]
    if eqn.primitive.name == "while":
        return graph_of(eqn.params["body_jaxpr"], shard), 1
    if eqn.primitive.name == "cond":
        arms = [graph_of(branch, shard) for branch in eqn.params["branches"]]
        return max(arms, key=lambda arm: len(arm.operations)), 1
    return None, 1


def _without_dead_code(graph: Graph) -> Graph:
    alive = {v for v in graph.outputs if v is not None}
    kept: list[Operation] = []
    for op in reversed(graph.operations):
        if alive.intersection(op.outputs) or op.primitive in ("debug_callback", "io_callback"):
            kept.append(op)
            alive.update(op.inputs)
    return dataclasses.replace(graph, operations=kept[::-1])
