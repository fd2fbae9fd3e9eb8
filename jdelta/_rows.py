"""Parts of rows that a loop hands to a later one: read from the rows themselves, not from copies.

An iteration that runs several layers takes its own part of each row of the stacked weights. The
backward loop needs these parts again, and JAX has the forward loop stack them for it: a copy of all
weights. Here the backward loop reads the rows that the forward loop has read, and takes its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jdelta import _jax
from jdelta._jax import Eqn, Jaxpr, Var
from jdelta._scan import Scan

_TAKES = frozenset({"slice", "squeeze", "reshape"})
"""Primitives that take a part of a row."""


def evaluate(program: Jaxpr, *args: Any) -> list[Any]:
    """Evaluate a program so that none of its loops stacks parts of rows that it was given."""
    inner = _jax.open_jaxpr(program)
    env: dict[Var, Any] = dict(zip(inner.constvars, _jax.consts_of(program), strict=True))
    env.update(zip(inner.invars, args, strict=True))
    for eqn in inner.eqns:
        if eqn.primitive.name == "scan":
            env.update(zip(eqn.outvars, _loop(eqn, _jax.read(env, eqn.invars)), strict=True))
        else:
            one = _jax.single(eqn)
            inputs = map(_whole, _jax.read(env, _jax.open_jaxpr(one).invars))
            env.update(zip(_jax.open_jaxpr(one).outvars, _jax.evaluate(one, *inputs), strict=True))
    return list(map(_whole, _jax.read(env, inner.outvars)))


@dataclass(frozen=True)
class _Parts:
    """Stands for a stack of parts of the rows of another stack.

    Attributes:
        rows: The other stack.
        part: The program from one of its rows to the part.
    """

    rows: Any
    part: Jaxpr


def _whole(value: Any) -> Any:
    if not isinstance(value, _Parts):
        return value
    return jax.vmap(lambda row: _jax.evaluate(value.part, row)[0])(value.rows)


def _loop(eqn: Eqn, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a loop; stacks of parts of its rows are not made."""
    loop = Scan.of(eqn, inputs)
    parts = [_part(loop, v) for v in loop.stacked(loop.body)]
    stacks = [x.rows if isinstance(x, _Parts) else x for x in loop.xs]
    alike = list({id(x): x for x in stacks}.values())  # each crosses into the loop once
    places = [next(i for i, x in enumerate(alike) if x is stack) for stack in stacks]

    def step(carry: Any, rows: Sequence[Any]) -> Any:
        own = [
            _jax.evaluate(x.part, rows[i])[0] if isinstance(x, _Parts) else rows[i]
            for x, i in zip(loop.xs, places, strict=True)
        ]
        outputs = evaluate(loop.body, *map(_whole, loop.consts), *carry, *own)
        ys = outputs[loop.n_carry :]
        return outputs[: loop.n_carry], [y for y, p in zip(ys, parts, strict=True) if p is None]

    carry, made = loop.scan(step, list(map(_whole, loop.carry)), alike)
    ys = iter(made)
    return [*carry, *(p or next(ys) for p in parts)]


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
