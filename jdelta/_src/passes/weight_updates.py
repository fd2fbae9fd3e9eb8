"""Weight updates moved into the backward loop: no gradient of all layers is ever there at once.

A loop over layers stacks the gradients of their weights, and what updates the weights reads the
stacks, so all gradients are in memory at the end of the loop. Where the update of a layer needs
nothing but its own gradient, rows of other stacks and scalars that are known before, it can run in
the iteration that makes the gradient. Stacks that are donated to results are carried and updated
row by row. With a global norm nothing can be moved: it needs all gradients.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jdelta._src import _jax
from jdelta._src._jax import Env, Eqn, Jaxpr, Var
from jdelta._src.passes.program import Context, Program
from jdelta._src.program.primitives import CHEAP, EXPENSIVE, RANDOM
from jdelta._src.program.scan import Scan

_ROW_BY_ROW = (CHEAP | EXPENSIVE | {"copy", "name", "stop_gradient", "reduce_precision"}) - (
    RANDOM | {"slice", "dynamic_slice", "pad", "rev", "split", "random_wrap", "random_unwrap"}
)
"""Element-wise: what they do to a stack they do to each of its rows."""


def with_updates_in_loops(program: Program, context: Context) -> Program:
    """The program with its weight updates inside its backward loops, where they can be moved."""
    flat = program.flat
    inner = _jax.open_jaxpr(flat)
    if inner.effects:
        return program
    readers = _Readers(inner)
    moved = [m for i, eqn in enumerate(inner.eqns) if (m := readers.moved(i, eqn))]
    order = readers.order(moved) if moved else None
    if order is None:
        return program
    places = _places(inner, context.donated)
    by_place = {order.index(m.loop): m for m in moved}
    reordered = _jax.with_equations(flat, [inner.eqns[i] for i in order])

    def run(index: int, eqn: Eqn, env: Env) -> None:
        if index in by_place:
            _run_loop(inner, by_place[index], places, env)
        else:
            _jax.run(eqn, env)

    return program.evaluated(lambda *args: _jax.interpret(reordered, args, run))


@dataclass(frozen=True)
class _Moved:
    """A backward loop and the updates that go into it.

    Attributes:
        loop: Index of its equation.
        updates: Indices of the equations that are moved, in order.
        gradients: What it stacks that nothing else reads.
        results: Results of the program that the updates make.
    """

    loop: int
    updates: tuple[int, ...]
    gradients: frozenset[Var]
    results: tuple[Var, ...]


class _Readers:
    """Who makes and who reads each value of a program."""

    def __init__(self, inner: Jaxpr):
        self._eqns: list[Eqn] = list(inner.eqns)
        self._inputs = {*inner.invars, *inner.constvars}
        self._results = {v for v in inner.outvars if _jax.is_var(v)}
        self._makers: dict[Var, int] = {v: i for i, e in enumerate(self._eqns) for v in e.outvars}
        self._readers: dict[Var, set[int]] = defaultdict(set)
        for i, eqn in enumerate(self._eqns):
            for v in filter(_jax.is_var, eqn.invars):
                self._readers[v].add(i)

    def moved(self, loop: int, eqn: Eqn) -> _Moved | None:
        """What can go into a loop, if it is one and anything can."""
        if eqn.primitive.name != "scan" or not eqn.params["reverse"]:
            return None
        carried = _jax.scan_counts(eqn.params)[1]
        stacked = {v for v in eqn.outvars[carried:] if _jax.is_var(v)}
        length = eqn.params["length"]
        updates = self._row_by_row(loop, stacked, length)
        gradients = self._pruned(updates, stacked)
        results = [v for i in sorted(updates) for v in self._eqns[i].outvars if v in self._results]
        if not gradients or not results:
            return None
        return _Moved(loop, tuple(sorted(updates)), frozenset(gradients), tuple(results))

    def _row_by_row(self, loop: int, stacked: set[Var], length: int) -> set[int]:
        """Equations that do the same to each row of stacks, with scalars known before the loop."""
        later, rows, chosen = {loop}, {*stacked}, set[int]()
        for i, eqn in enumerate(self._eqns):
            reads = _jax.variables(eqn)
            scalars = [v for v in reads if not v.aval.shape]
            others = [v for v in reads if v.aval.shape]
            waits = any(self._makers.get(v) in later for v in scalars)
            known = all(v in rows or v in self._inputs for v in others)
            if i != loop and not waits and known and _is_row_by_row(eqn, length):
                chosen.add(i)
                rows.update(eqn.outvars)
            if any(self._makers.get(v) in later for v in reads):
                later.add(i)
        return chosen

    def _pruned(self, updates: set[int], stacked: set[Var]) -> set[Var]:
        """Take out what something else reads, and what then lacks a gradient; the gradients left.

        What does not lead from a gradient to a result of the program stays where it is.
        """
        gradients = set(stacked)
        changed = True
        while changed:
            gradients -= {v for v in gradients if v in self._results or self._readers[v] - updates}
            out = {i for i in updates if not self._may_move(i, updates, gradients)}
            changed = bool(out)
            updates -= out
        used = {v for i in updates for v in self._eqns[i].invars if _jax.is_var(v)}
        return gradients & used

    def _may_move(self, index: int, updates: set[int], gradients: set[Var]) -> bool:
        """Whether an update reads rows of what is moved or given, and only updates read it."""
        eqn = self._eqns[index]
        results = [v for v in eqn.outvars if _jax.is_var(v)]
        rows = (v for v in eqn.invars if _jax.is_var(v) and v.aval.shape)
        has_rows = all(
            v in self._inputs or v in gradients or self._makers[v] in updates for v in rows
        )
        is_read = any(v in self._results or self._readers[v] for v in results)
        return has_rows and is_read and not any(self._readers[v] - updates for v in results)

    def order(self, moved: Sequence[_Moved]) -> list[int] | None:
        """The equations, those that are moved left out; None if two loops wait for each other."""
        loop_of = {i: m.loop for m in moved for i in m.updates}
        waits: dict[int, set[int]] = {}
        for i, eqn in enumerate(self._eqns):
            makers = (self._makers.get(v) for v in eqn.invars if _jax.is_var(v))
            before = {loop_of.get(p, p) for p in makers if p is not None}
            waits.setdefault(loop_of.get(i, i), set()).update(before - {loop_of.get(i, i)})
        after: dict[int, list[int]] = defaultdict(list)
        for i, before in waits.items():
            for p in before:
                after[p].append(i)
        ready = [i for i, before in waits.items() if not before]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            order.append(heapq.heappop(ready))
            for i in after[order[-1]]:
                waits[i].discard(order[-1])
                if not waits[i]:
                    heapq.heappush(ready, i)
        return order if len(order) == len(waits) else None


def _is_row_by_row(eqn: Eqn, length: int) -> bool:
    """Whether an equation does to each of ``length`` rows what it does to the stack."""
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {()}
    if len(shapes) != 1 or next(iter(shapes))[0] != length or _jax.is_call(eqn):
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        return len(eqn.invars) == 1 and not eqn.invars[0].aval.shape
    return eqn.primitive.name in _ROW_BY_ROW and bool(eqn.outvars[0].aval.shape)


def _places(inner: Jaxpr, donated: Sequence[int]) -> dict[Var, Var]:
    """From results to the donated inputs whose place they take, as JAX pairs them: first come."""
    waiting: dict[Any, deque[Var]] = defaultdict(deque)
    for i in donated:
        waiting[_type(inner.invars[i])].append(inner.invars[i])
    places: dict[Var, Var] = {}
    for v in inner.outvars:
        if _jax.is_var(v) and v not in places and waiting[_type(v)]:
            places[v] = waiting[_type(v)].popleft()
    return places


def _type(v: Var) -> Any:
    return v.aval.shape, v.aval.dtype


def _run_loop(inner: Jaxpr, moved: _Moved, places: Mapping[Var, Var], env: Env) -> None:
    """Run a loop with its updates inside, and put what they make into the environment."""
    eqn = inner.eqns[moved.loop]
    loop = Scan.of(eqn, eqn.invars)
    updates = [inner.eqns[i] for i in moved.updates]
    carried = {places[v]: v for v in moved.results if v in places}
    computed_values = {v for update in updates for v in update.outvars} | moved.gradients
    read = [v for update in updates for v in update.invars if _jax.is_var(v) and v.aval.shape]
    rows = [
        v for v in dict.fromkeys((*loop.xs, *read)) if v not in computed_values and v not in carried
    ]
    kept = [v for v in eqn.outvars[loop.n_carry :] if v not in moved.gradients]
    new = [v for v in moved.results if v not in places]

    def step(state: Any, xs: Any) -> Any:
        carry, stacks, index = state
        taken = [lax.dynamic_index_in_dim(s, index, keepdims=False) for s in stacks]
        local = dict(env)
        local.update(zip(rows, xs, strict=True))
        local.update(zip(carried, lax.optimization_barrier(taken), strict=True))
        inputs = [*_jax.read(env, loop.consts), *carry, *_jax.read(local, loop.xs)]
        results = _jax.evaluate(loop.body, *inputs)
        local.update(zip(eqn.outvars[loop.n_carry :], results[loop.n_carry :], strict=True))
        for update in updates:
            _run_row(update, local)
        stacks = [
            lax.dynamic_update_index_in_dim(s, local[v], index, 0)
            for s, v in zip(stacks, carried.values(), strict=True)
        ]
        made_rows = [local[v] for v in (*kept, *new)]
        return (results[: loop.n_carry], stacks, index - 1), made_rows

    start = _jax.read(env, loop.carry), [env[v] for v in carried], loop.length - 1
    (carry, stacks, _), outs = loop.scan(step, start, [env[v] for v in rows])
    env.update(zip(eqn.outvars[: loop.n_carry], carry, strict=True))
    env.update(zip(carried.values(), stacks, strict=True))
    env.update(zip((*kept, *new), outs, strict=True))


def _run_row(eqn: Eqn, env: Env) -> None:
    """Do to a row what an equation does to the stack."""
    inputs = _jax.read(env, eqn.invars)
    if eqn.primitive.name == "broadcast_in_dim":
        env[eqn.outvars[0]] = jax.numpy.broadcast_to(inputs[0], eqn.outvars[0].aval.shape[1:])
        return
    env[eqn.outvars[0]] = eqn.primitive.bind(*inputs, **eqn.params)
