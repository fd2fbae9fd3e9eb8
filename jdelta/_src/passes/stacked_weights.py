"""Rows that loops with several layers in an iteration read: which, and when.

An iteration that runs several layers takes its own part of each row of the stacked weights. The
backward loop needs these parts again, and JAX has the forward loop stack them for it: a copy of all
weights. Here the backward loop reads the rows that the forward loop has read, and takes its parts.

XLA:GPU copies all rows of an iteration at its start, and puts off gradients of weights to its end:
both hold what one layer needs as often as an iteration has layers. Here a layer of a backward loop
reads its rows, and begins, when the layers after it are through, gradients of weights included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdelta._src import _jax
from jdelta._src._jax import Env, Eqn, Jaxpr, Var
from jdelta._src.passes.program import Context, Program
from jdelta._src.program.hlo_names import RECOMPUTE
from jdelta._src.program.names import RegionName
from jdelta._src.program.scan import Scan

_TAKES = frozenset({"slice", "squeeze", "reshape"})
"""Primitives that take a part of a row."""

Reader = Callable[[Any], Any]
"""Reads a row, given the number of the iteration."""


def with_rows_read_in_turn(program: Program, _: Context) -> Program:
    """The program with the rows of its loops read as said above."""
    flat = program.flat

    def run(*args: Any) -> list[Any]:
        return list(map(_materialised, _jax.interpret(flat, args, _run)))

    return program.evaluated(run)


def _run(_: int, eqn: Eqn, env: Env) -> None:
    """Evaluate one equation."""
    if eqn.primitive.name == "scan":
        _jax.write(env, eqn, _loop(eqn, _jax.read(env, eqn.invars)))
    else:
        _jax.run(eqn, env, _materialised)


@dataclass(frozen=True)
class _Parts:
    """Stands for a stack of parts of the rows of another stack.

    Attributes:
        rows: The other stack.
        part: The program from one of its rows to the part.
    """

    rows: Any
    part: Jaxpr


def _materialised(value: Any) -> Any:
    if not isinstance(value, _Parts):
        return value
    return jax.vmap(lambda row: _jax.evaluate(value.part, row)[0])(value.rows)


def _loop(eqn: Eqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a loop; stacks of parts of its rows are not made."""
    loop = Scan.of(eqn, inputs)
    consts = list(map(_materialised, loop.consts))
    parts = [_part(loop, v) for v in loop.stacked(loop.body)]
    stacks = [x.rows if isinstance(x, _Parts) else x for x in loop.xs]
    alike = list({id(x): x for x in stacks}.values())  # each crosses into the loop once
    places = [next(i for i, x in enumerate(alike) if x is stack) for stack in stacks]
    regions = _regions(_jax.open_jaxpr(loop.body).eqns) if _jax.is_backward(eqn) else ()
    waits = len({*regions} - {""}) > 1
    crossing = [None if waits and not _jax.on_host(jax.typeof(x)) else x for x in alike]

    def step(carry: Any, xs: Any) -> Any:
        index, rows = xs

        def reader(x: Any, place: int) -> Reader:
            def read(index: Any) -> Any:
                row = rows[place]
                if row is None:
                    row = lax.dynamic_index_in_dim(alike[place], index, keepdims=False)
                return _jax.evaluate(x.part, row)[0] if isinstance(x, _Parts) else row

            return read

        readers = [reader(x, place) for x, place in zip(loop.xs, places, strict=True)]
        outputs = _body(loop.body, [*consts, *carry], readers, index, regions if waits else ())
        ys = outputs[loop.n_carry :]
        return outputs[: loop.n_carry], [y for y, p in zip(ys, parts, strict=True) if p is None]

    index = jnp.arange(loop.length) if waits else None
    carry, stacked = loop.scan(step, list(map(_materialised, loop.carry)), (index, crossing))
    ys = iter(stacked)
    return [*carry, *(p or next(ys) for p in parts)]


def _body(
    body: Jaxpr,
    inputs: Sequence[Any],
    readers: Sequence[Reader],
    index: Any,
    regions: Sequence[str],
) -> list[Any]:
    """Evaluate the body of a loop.

    Args:
        body: The body.
        inputs: Its first inputs.
        readers: Read the others, rows.
        index: The number of the iteration.
        regions: For each equation its region, if each is to begin when those before it are through.
    """
    inner = _jax.open_jaxpr(body)
    rows = dict(zip(inner.invars[len(inputs) :], readers, strict=True))
    last = _last_uses(inner)
    begun: set[str] = set()

    def unread(wanted: Sequence[Any]) -> Env:
        """The rows among some atoms that have not been read before."""
        first = dict.fromkeys(v for v in wanted if _jax.is_var(v) and v in rows)
        return {v: rows.pop(v)(index) for v in first}

    def run(i: int, eqn: Eqn, env: Env) -> None:
        nonlocal index
        if regions and regions[i] not in begun and not rows.keys().isdisjoint(_variables(eqn)):
            begun.add(regions[i])
            before = (v for e in inner.eqns[:i] for v in e.outvars)
            alive = [v for v in before if last.get(v, -1) >= i and _may_wait(env[v])]
            *values, index = lax.optimization_barrier((*(env[v] for v in alive), index))
            env.update(zip(alive, values, strict=True))
        env.update(unread(eqn.invars))
        _run(i, eqn, env)

    results = _jax.interpret(body, [*inputs, *(None for _ in readers)], run)
    handed_on = unread(inner.outvars)
    return [
        _materialised(handed_on[v] if _jax.is_var(v) and v in handed_on else x)
        for v, x in zip(inner.outvars, results, strict=True)
    ]


def _may_wait(value: Any) -> bool:
    return not isinstance(value, _Parts) and not _jax.on_host(jax.typeof(value))


def _variables(eqn: Eqn) -> set[Var]:
    return {v for v in eqn.invars if _jax.is_var(v)}


def _last_uses(inner: Jaxpr) -> Mapping[Var, int]:
    """The number of the equation that is the last to read each variable; results come after all."""
    last = {v: i for i, eqn in enumerate(inner.eqns) for v in _variables(eqn)}
    return last | {v: len(inner.eqns) for v in inner.outvars if _jax.is_var(v)}


def _regions(eqns: Sequence[Eqn]) -> list[str]:
    """The region that each equation of a backward loop is in.

    Of what is computed again that is the region of the next name; gradients follow, up to what is
    computed again for the next region.
    """
    names: list[str | None] = []
    region = ""
    for eqn in reversed(eqns):
        name = _jax.named_value(eqn)
        region = name.region if isinstance(name, RegionName) else region
        names.append(region if RECOMPUTE in _jax.name_stack(eqn) else None)
    regions: list[str] = []
    region = ""
    for name in reversed(names):
        region = region if name is None else name
        regions.append(region)
    return regions


def _part(loop: Scan, stacked: Any) -> _Parts | None:
    """What stands for a result of a body, if it is nothing but a part of a row."""
    inner = _jax.open_jaxpr(loop.body)
    makers = {v: eqn for eqn in inner.eqns for v in eqn.outvars}
    chain: list[Eqn] = []
    value = stacked
    while _jax.is_var(value) and value in makers and makers[value].primitive.name in _TAKES:
        chain.insert(0, makers[value])
        value = chain[0].invars[0]
    rows = dict(zip(inner.invars[loop.n_consts + loop.n_carry :], loop.xs, strict=True))
    if not chain or not _jax.is_var(value) or value not in rows or isinstance(rows[value], _Parts):
        return None
    return _Parts(rows[value], _jax.program_of(chain, [stacked]))
