"""Regions found in the program itself: for a step in which nothing is marked with ``jdelta.remat``.

While such a step is traced, every function that it differentiates is staged first, cut into units
(``_segments.py``), and evaluated again with each unit as a region. The bodies of large loops are
cut likewise. So everything else sees a step that was marked by hand.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdelta import _jax
from jdelta._jax import Eqn, Jaxpr, Var
from jdelta._naming import scope_path
from jdelta._primitives import MATMULS
from jdelta._region import Session, inside_region, is_inside, region
from jdelta._segments import bytes_held, segments

LOOP_SHARE = 0.2
"""Part of what a program holds from which on a loop's body is cut, and is no part of a unit."""

SMALL = 1 / 256
"""Part of what the largest unit holds below which a unit is left alone."""


@contextlib.contextmanager
def tracing(session: Session) -> Generator[None]:
    """Trace a step for a session, finding its regions if the session asks for it."""
    rewriting = _jax.differentiating(with_regions) if session.automatic else None
    with _jax.session_context(session), rewriting or contextlib.nullcontext():
        yield


def with_regions(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its units as regions; the outermost differentiated one only."""
    session: Session | None = _jax.current_session()
    if session is None or not session.automatic or is_inside():
        return fun

    @functools.wraps(fun)
    def rewritten(*args: Any) -> Any:
        static: list[Any] = []

        def arrays_only(*args: Any) -> list[Any]:
            leaves, tree = jax.tree.flatten(fun(*args))
            static[:] = [tree, [None if _jax.is_array(x) else (x,) for x in leaves]]
            return [x for x in leaves if _jax.is_array(x)]

        with inside_region():
            closed, _ = _jax.stage(arrays_only, *args)
        arrays = iter(_evaluate(_jax.inline(closed), jax.tree.leaves(args), 1))
        tree, others = static
        return jax.tree.unflatten(tree, [x[0] if x else next(arrays) for x in others])

    return rewritten


def _evaluate(program: Jaxpr, args: Sequence[Any], trips: int) -> list[Any]:
    """Evaluate a program with its units as regions.

    Args:
        program: The program, calls inlined.
        args: Its arguments.
        trips: How often it runs in the loop that it is the body of.
    """
    inner = _jax.open_jaxpr(program)
    env: _jax.Env = dict(zip(inner.constvars, _jax.consts_of(program), strict=True))
    env.update(zip(inner.invars, args, strict=True))
    units = list(_units(inner.eqns, program, trips))
    held = [sum(map(bytes_held, inner.eqns[unit.start : unit.stop])) for unit in units]
    for unit, size in zip(units, held, strict=True):
        eqns = inner.eqns[unit.start : unit.stop]
        if len(eqns) == 1 and eqns[0].primitive.name == "scan" and size > LOOP_SHARE * sum(held):
            env.update(zip(eqns[0].outvars, _loop(eqns[0], env), strict=True))
        else:
            later = _read_later(inner, unit.stop)
            _unit(eqns, later, env, marked=size > SMALL * max(held))
    return _jax.read(env, inner.outvars)


def _units(eqns: Sequence[Eqn], program: Jaxpr, trips: int) -> Iterator[range]:
    """Segments of a program; a large loop is one by itself."""
    whole = sum(map(bytes_held, eqns))
    loops = [
        i
        for i, eqn in enumerate(eqns)
        if eqn.primitive.name == "scan" and bytes_held(eqn) > LOOP_SHARE * whole
    ]
    begin = 0
    for end in (*loops, len(eqns)):
        part = _jax.part(program, range(begin, end))
        yield from (range(begin + s.start, begin + s.stop) for s in segments(part, trips) if s)
        if end < len(eqns):
            yield range(end, end + 1)
        begin = end + 1


def _read_later(inner: Jaxpr, stop: int) -> set[Var]:
    read = {v for eqn in inner.eqns[stop:] for v in eqn.invars if _jax.is_var(v)}
    return read | {v for v in inner.outvars if _jax.is_var(v)}


def _unit(eqns: Sequence[Eqn], later: set[Var], env: _jax.Env, *, marked: bool) -> None:
    """Evaluate a run of equations, as a region if it is ``marked``.

    What leaves a region is differentiable: integers and keys are computed beside it.
    """
    out = [v for eqn in eqns for v in eqn.outvars if _jax.is_var(v) and v in later]
    moving = [v for v in out if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    others = [v for v in out if v not in set(moving)]
    if marked and moving:
        program = _jax.program_of(eqns, moving)
        run = region(functools.partial(_jax.evaluate, program), _scope(eqns))
        env.update(zip(moving, run(*_jax.read(env, program.jaxpr.invars)), strict=True))
    else:
        others = out
    program = _jax.program_of(eqns, others)
    inputs = _jax.read(env, program.jaxpr.invars)
    if moving is not others and marked:
        inputs = [lax.stop_gradient(x) for x in inputs]
    env.update(zip(others, _jax.evaluate(program, *inputs), strict=True))


def _loop(eqn: Eqn, env: _jax.Env) -> list[Any]:
    """Evaluate a ``scan`` whose body has its units as regions."""
    body, length = _jax.inline(eqn.params["jaxpr"]), eqn.params["length"]
    n_consts, n_carry = _jax.scan_counts(eqn.params)
    inputs = _jax.read(env, eqn.invars)
    consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]

    def step(carry: Any, rows: Any) -> Any:
        outputs = _evaluate(body, [*consts, *carry, *rows], length)
        return outputs[:n_carry], outputs[n_carry:]

    reverse, unroll = eqn.params["reverse"], eqn.params["unroll"]
    rows = inputs[n_consts + n_carry :]
    carry, stacked = lax.scan(step, carry, rows, length=length, reverse=reverse, unroll=unroll)
    return [*carry, *stacked]


def _scope(eqns: Sequence[Eqn]) -> str:
    """The module that a unit is in, by the scopes of its products; else ``unit``."""
    products = [eqn for eqn in eqns if eqn.primitive.name in MATMULS]
    paths = [scope_path(_jax.name_stack(eqn)) for eqn in products or eqns]
    shared = math.inf
    for path in paths:
        same = (a == b for a, b in zip(path, paths[0], strict=False))
        shared = min(shared, sum(1 for _ in _while_true(same)))
    return "/".join(paths[0][: int(shared)]) or "unit"


def _while_true(marks: Iterator[bool]) -> Iterator[bool]:
    for mark in marks:
        if not mark:
            return
        yield mark
