"""A staged program as a flat graph of operations on sized values, calls inlined, loops nested.

Everything that is computed *about* a program (lifetimes, peaks, costs, residuals) is computed on
this graph, so that no other analysis needs to know what a jaxpr looks like.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdelta._src import _jax
from jdelta._src._jax import Atom, Eqn, Jaxpr, Var, transfers
from jdelta._src._jax.sharding import UNSHARDED, Shardings, Spec, local_shape
from jdelta._src.program.hlo_names import RECOMPUTE
from jdelta._src.program.names import scope_path
from jdelta._src.program.primitives import VIEWS

BARRIER = "optimization_barrier"
"""Reads values and hands them on as they are, hidden from optimisation across it."""

TRANSFER = "transfer"
"""Copies a value between device and host memory."""

RESHARD = "reshard"
"""Cuts a value over other mesh axes; where it stays as it is, ``sharding_constraint`` is a view."""

PART = "mesh_cast"
"""Reads a part of a value as a value: what one device has of it (or back), or a row of a stack."""

_CONSTRAINTS = frozenset({"sharding_constraint", "reshard"})

_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})


@dataclass(frozen=True)
class Value:
    """A value of the program: what it is, not where it is stored.

    Attributes:
        shape: Its shape, unsharded; in a ``shard_map`` that of the part there.
        dtype: Name of its dtype; ``key<…>`` for PRNG keys.
        bytes: Bytes on one device, without padding; zero for values in host memory.
        spec: For each dimension the mesh axes it is sharded over; empty when it is not sharded.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    spec: Spec = ()

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of the part that one device has."""
        return local_shape(self.shape, self.spec)


@dataclass(frozen=True)
class Operation:
    """One equation.

    Attributes:
        primitive: Name of the JAX primitive; ``TRANSFER`` for copies from and to the host.
        inputs: Indices into ``Graph.values``; literals are left out, but for those of a loop and of
            a barrier.
        outputs: Indices into ``Graph.values``.
        params: Parameters of the equation.
        body: Body of a loop or largest branch of a ``cond``, as a graph of its own; None for
            everything else.
        others: The other branches of a ``cond``.
        has_effects: Whether it does something beside giving its results.
        equation: The equation itself; None for what stands for no equation.
        trips: How often ``body`` runs; 1 without a body.
        name: The name that a ``name`` equation gives; None for everything else.
        backward: Whether it was made by transposition, so belongs to a backward pass.
        differentiated: Whether it is part of what the step differentiates, or of its derivative.
        recomputed: Whether it computes again what was dropped.
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
    recomputed: bool = False
    scope: tuple[str, ...] = ()
    times: int = 1
    others: tuple[Graph, ...] = ()
    has_effects: bool = False
    equation: Eqn | None = field(default=None, repr=False, compare=False)

    @property
    def bodies(self) -> tuple[Graph, ...]:
        """The body and the other branches."""
        return () if self.body is None else (self.body, *self.others)


@dataclass
class Graph:
    """A program: values, and operations in program order.

    Attributes:
        values: All values; operations refer to them by index.
        operations: The operations, each after what it reads.
        inputs: Values given from outside, in the order of the program's arguments.
        outputs: Values handed out; None where an output is a literal.
        constants: Arrays that the program holds itself, those of calls in it too.
    """

    values: list[Value] = field(default_factory=list[Value])
    operations: list[Operation] = field(default_factory=list[Operation])
    inputs: list[int] = field(default_factory=list[int])
    outputs: list[int | None] = field(default_factory=list[int | None])
    constants: list[int] = field(default_factory=list[int])

    @property
    def initial_values(self) -> tuple[int, ...]:
        """What is there before the first operation: constants and inputs."""
        return (*self.constants, *self.inputs)

    def buffers(self) -> list[int]:
        """For each value the one that it is a view of, or itself."""
        buffer = list(range(len(self.values)))
        for op in self.operations:
            if op.primitive in VIEWS and op.inputs:
                buffer[op.outputs[0]] = buffer[op.inputs[0]]
        return buffer

    def producers(self) -> dict[int, int]:
        """From each computed value to the index of the operation that makes it."""
        return {v: i for i, op in enumerate(self.operations) for v in op.outputs}


def labels(graph: Graph, rename: Callable[[Any], str] = str) -> dict[int, str]:
    """What to call each computed value: its name, else the scopes and primitive of its maker.

    What a loop stacks is called as in its body.

    Args:
        graph: The program.
        rename: From a name in it to what to call it.
    """
    by_maker: dict[int, str] = {}
    named: dict[int, str] = {}
    for op in graph.operations:
        own = "/".join((*op.scope, op.primitive))
        inside = labels(op.body, rename) if op.primitive == "scan" and op.body else {}
        body_outputs = op.body.outputs if inside and op.body else [None] * len(op.outputs)
        for v, o in zip(op.outputs, body_outputs, strict=True):
            by_maker[v] = own if o is None else inside.get(o, own)
        if op.name:  # of several names that a value has got, the first one
            name = named.get(op.inputs[0] if op.inputs else -1) or rename(op.name)
            named.update(dict.fromkeys((*op.inputs, *op.outputs), name))
    return by_maker | named


def value_of(aval: Any, spec: Spec = ()) -> Value:
    """Size of an abstract value that is sharded like this."""
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return Value((), "token", 0)
    name, itemsize = _of_dtype(dtype)
    size = 0 if _jax.on_host(aval) else math.prod(local_shape(shape, spec)) * itemsize
    return Value(shape, name, size, spec)


@functools.cache
def _of_dtype(dtype: Any) -> tuple[str, int]:
    """The name of a dtype, and the bytes of one element."""
    return str(dtype), _itemsize(dtype)


def _itemsize(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        impl = getattr(dtype, "_impl", None)
        return 4 * math.prod(getattr(impl, "key_shape", (2,)))
    return np.dtype(dtype).itemsize


def graph_of(
    jaxpr: Jaxpr,
    shardings: Shardings = UNSHARDED,
    *,
    unfold_loops: bool = False,
) -> Graph:
    """The flat graph of a jaxpr, without what no output depends on.

    Args:
        jaxpr: The program.
        shardings: How its values are sharded.
        unfold_loops: Put the operations of ``scan`` bodies and of the branches of a ``cond`` once
            into the graph itself, with ``times`` set, instead of into a graph of their own: for
            questions of dependence.
    """
    builder = _Builder(shardings, unfold_loops)
    inner = _jax.open_jaxpr(jaxpr)
    env: dict[Var, int] = {v: builder.value(v) for v in (*inner.constvars, *inner.invars)}
    builder.graph.constants += [env[v] for v in inner.constvars]
    builder.graph.inputs += [env[v] for v in inner.invars]
    builder.run(inner.eqns, env, _Place())
    builder.graph.outputs = [builder.read(env, v) for v in inner.outvars]
    return _without_dead_code(builder.graph)


@dataclass(frozen=True)
class _Place:
    """Where in the program an equation stands: what its name stack, and those around it, say."""

    backward: bool = False
    differentiated: bool = False
    recomputed: bool = False
    scope: tuple[str, ...] = ()

    def below(self, eqn: Eqn) -> _Place:
        stack = _jax.name_stack(eqn)
        path = scope_path(stack)  # of an inlined body: sometimes whole, sometimes relative
        return _Place(
            self.backward or _jax.is_backward(eqn),
            self.differentiated or _jax.is_differentiated(eqn),
            self.recomputed or RECOMPUTE in stack,
            path if path[: len(self.scope)] == self.scope else (*self.scope, *path),
        )


class _Builder:
    def __init__(self, shardings: Shardings, unfold_loops: bool):
        self.graph = Graph()
        self.shardings = shardings
        self.unfold_loops = unfold_loops
        self.times = 1
        self._places: dict[tuple[int, int], tuple[_Place, _Place, Eqn]] = {}

    def place(self, around: _Place, eqn: Eqn) -> _Place:
        """Where an equation stands: what its name stack says, asked once for each."""
        key = id(around), id(eqn.source_info.name_stack)
        if key not in self._places:  # what has these ids stays as long as they count
            self._places[key] = around.below(eqn), around, eqn
        return self._places[key][0]

    def value(self, atom: Atom) -> int:
        spec = self.shardings.specs.get(atom, ()) if _jax.is_var(atom) else ()
        self.graph.values.append(value_of(atom.aval, spec))
        return len(self.graph.values) - 1

    @staticmethod
    def read(env: Mapping[Var, int | None], atom: Atom) -> int | None:
        return env[atom] if _jax.is_var(atom) else None

    def run(self, eqns: Sequence[Eqn], env: dict[Var, Any], around: _Place) -> None:
        for eqn in map(_jax.plain, eqns):
            place = self.place(around, eqn)
            is_call = _jax.is_call(eqn) or eqn.primitive.name in _CUSTOM
            if is_call and any(True for _ in _jax.subjaxprs(eqn)):
                self._inline(eqn, env, place)
            elif eqn.primitive.name == "shard_map":
                self._shard_map(eqn, env, place)
            elif eqn.primitive.name == "scan" and (self.unfold_loops or eqn.params["length"] == 1):
                # A loop of one iteration is none when compiled.
                self.times *= eqn.params["length"]
                self._inline(eqn, env, place)
                self.times //= max(1, eqn.params["length"])
            elif self.unfold_loops and eqn.primitive.name == "cond":
                self._join(eqn, env, place)
            else:
                self._operation(eqn, env, place)

    def _inline(self, eqn: Eqn, env: dict[Var, Any], place: _Place) -> None:
        inputs = [self.read(env, a) for a in eqn.invars]
        if _jax.is_shielded(eqn):
            inputs = self._barrier(inputs, place)
        if eqn.primitive.name == "scan":
            rows = _jax.open_jaxpr(_jax.subjaxpr(eqn)).invars
            inputs = self._rows(inputs, rows, place)
        outputs = self._call(_jax.subjaxpr(eqn), inputs, place)
        env.update(zip(eqn.outvars, outputs, strict=True))

    def _call(self, body: Jaxpr, inputs: Sequence[int | None], place: _Place) -> list[int | None]:
        """Put the operations of a body into the graph."""
        inner = _jax.open_jaxpr(body)
        local: dict[Var, Any] = {v: self.value(v) for v in inner.constvars}
        self.graph.constants += local.values()
        local |= dict(zip(inner.invars, inputs, strict=True))
        self.run(inner.eqns, local, place)
        return [self.read(local, atom) for atom in inner.outvars]

    def _join(self, eqn: Eqn, env: dict[Var, Any], place: _Place) -> None:
        """Put all branches of a ``cond`` into the graph, and one of their results for another."""
        index, *inputs = [self.read(env, a) for a in eqn.invars]
        results = [self._call(branch, inputs, place) for branch in eqn.params["branches"]]
        for var, *alternatives in zip(eqn.outvars, *results, strict=True):
            env[var] = self.value(var)
            read = tuple(v for v in (index, *alternatives) if v is not None)
            join = Operation(
                eqn.primitive.name,
                read,
                (env[var],),
                eqn.params,
                backward=place.backward,
                differentiated=place.differentiated,
                recomputed=place.recomputed,
                scope=place.scope,
                times=self.times,
                equation=eqn,
            )
            self.graph.operations.append(join)

    def _shard_map(self, eqn: Eqn, env: dict[Var, Any], place: _Place) -> None:
        """The body, on parts; what goes in and out are the same bytes, seen as parts or whole."""
        inner = _jax.open_jaxpr(_jax.subjaxpr(eqn))
        local: dict[Var, Any] = {}
        for atom, var in zip(eqn.invars, inner.invars, strict=True):
            local[var] = self._part(self.read(env, atom), var, place)
        self.run(inner.eqns, local, place)
        for outer, atom in zip(eqn.outvars, inner.outvars, strict=True):
            env[outer] = self._part(self.read(local, atom), outer, place)

    def _rows(
        self, inputs: Sequence[int | None], invars: Sequence[Var], place: _Place
    ) -> list[int | None]:
        """What an unfolded loop reads: of a stack one row."""
        shapes = [None if v is None else self.graph.values[v].shape for v in inputs]
        return [
            v if shape is None or shape == var.aval.shape else self._part(v, var, place)
            for v, shape, var in zip(inputs, shapes, invars, strict=True)
        ]

    def _part(self, value: int | None, var: Var, place: _Place) -> int:
        part = self.value(var)
        read = () if value is None else (value,)
        cast = Operation(PART, read, (part,), {}, backward=place.backward)
        self.graph.operations.append(cast)
        return part

    def _barrier(self, inputs: Sequence[int | None], place: _Place) -> list[int | None]:
        """What a shielded recompute starts from: written to memory, whatever it is."""
        read = [v for v in inputs if v is not None]
        shielded = {v: len(self.graph.values) + i for i, v in enumerate(dict.fromkeys(read))}
        self.graph.values += [self.graph.values[v] for v in shielded]
        barrier = Operation(
            BARRIER, tuple(shielded), tuple(shielded.values()), {}, backward=place.backward
        )
        self.graph.operations.append(barrier)
        return [None if v is None else shielded[v] for v in inputs]

    def _operation(self, eqn: Eqn, env: dict[Var, Any], place: _Place) -> None:
        inputs = [self.read(env, a) for a in eqn.invars]
        if eqn.primitive.name in ("scan", "while", BARRIER):  # each stands beside what it becomes
            inputs = [
                self.value(a) if v is None else v for v, a in zip(inputs, eqn.invars, strict=True)
            ]
        outputs: list[int] = []
        for var in eqn.outvars:
            env[var] = self.value(var)
            outputs.append(env[var])
        bodies, trips = _bodies(eqn, self.shardings)
        self.graph.operations.append(
            Operation(
                primitive=self._primitive(eqn, inputs, outputs),
                inputs=tuple(v for v in inputs if v is not None),
                outputs=tuple(outputs),
                params=self._params(eqn),
                body=bodies[0] if bodies else None,
                others=tuple(bodies[1:]),
                trips=trips,
                name=_jax.named_value(eqn),
                backward=place.backward,
                differentiated=place.differentiated,
                recomputed=place.recomputed,
                scope=place.scope,
                times=self.times,
                has_effects=bool(eqn.effects),
                equation=eqn,
            )
        )

    def _primitive(self, eqn: Eqn, inputs: Sequence[int | None], outputs: Sequence[int]) -> str:
        if transfers.is_transfer(eqn):
            return TRANSFER
        if eqn.primitive.name not in _CONSTRAINTS or inputs[0] is None:
            return eqn.primitive.name
        before, after = (self.graph.values[v] for v in (inputs[0], outputs[0]))
        return "sharding_constraint" if before.spec == after.spec else RESHARD

    def _params(self, eqn: Eqn) -> Mapping[str, Any]:
        """The equation's parameters; of a collective also how many devices take part in it."""
        axes = eqn.params.get("axis_name", eqn.params.get("axes"))
        names: Sequence[Any] = axes if isinstance(axes, (tuple, list)) else (axes,)
        known = self.shardings.sizes
        counts = [known[name] for name in names if isinstance(name, str) and name in known]
        return {**eqn.params, "devices": math.prod(counts)} if counts else eqn.params


def _bodies(eqn: Eqn, shardings: Shardings) -> tuple[list[Graph], int]:
    """Body and trip count of a loop (a ``while`` counts once); branches, the largest one first."""
    if eqn.primitive.name == "scan":
        return [graph_of(eqn.params["jaxpr"], shardings)], eqn.params["length"]
    if eqn.primitive.name == "while":
        return [graph_of(eqn.params["body_jaxpr"], shardings)], 1
    if eqn.primitive.name == "cond":
        branches = [graph_of(branch, shardings) for branch in eqn.params["branches"]]
        return sorted(branches, key=lambda b: len(b.operations), reverse=True), 1
    return [], 1


def _without_dead_code(graph: Graph) -> Graph:
    alive = {v for v in graph.outputs if v is not None}
    kept: list[Operation] = []
    for op in reversed(graph.operations):
        if alive.intersection(op.outputs) or op.has_effects:
            kept.append(op)
            alive.update(op.inputs)
    return dataclasses.replace(graph, operations=kept[::-1])
