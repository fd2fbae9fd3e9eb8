"""Weight updates tied into the backward pass: each runs as soon as its gradient is final.

The order of a program's equations says nothing to XLA; what depends on what does. So where an
update should have run, its results and the value that the backward pass goes on with pass a barrier
together: what comes after cannot start before, and what the update has freed is free by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from jdelta import _jax
from jdelta._jax import Eqn, Jaxpr, Var
from jdelta._order.problem import Problem, Tensor
from jdelta._order.segments import CORE, branches
from jdelta._order.tails import early

LEAST = 1 / 256
"""Part of all results that an update must make to be worth a tie."""


@dataclass(frozen=True)
class Tie:
    """What passes a barrier together.

    Attributes:
        place: Index of the equation, in the new order, after which it stands.
        results: What the updates make.
        onward: What the rest of the program goes on with.
    """

    place: int
    results: tuple[Var, ...]
    onward: tuple[Var, ...]


def updated_early(closed: Jaxpr) -> Callable[..., list[Any]] | None:
    """The program with its updates tied into its backward pass; None if it has none to tie.

    Args:
        closed: The program, calls inlined.
    """
    inner = _jax.open_jaxpr(closed)
    problem = problem_of(inner)
    order = early(problem, problem.program)
    eqns = [inner.eqns[i] for i in order]
    branch = branches(problem)
    ties = _ties(eqns, [branch[i] for i in order], inner.outvars)
    if not ties:
        return None
    program = _jax.rebuild(closed, eqns, inner.outvars)
    after = {tie.place: _barrier(tie) for tie in ties}
    return lambda *args: _jax.evaluate_with(program, args, {}, after)


def problem_of(inner: Jaxpr) -> Problem:
    made: dict[Var, int] = {v: i for i, eqn in enumerate(inner.eqns) for v in eqn.outvars}
    users: dict[Var, list[int]] = {v: [] for v in made}
    before: list[tuple[int, ...]] = []
    effect = None
    for i, eqn in enumerate(inner.eqns):
        reads = {v for v in eqn.invars if _jax.is_var(v) and v in made}
        waits = {made[v] for v in reads}
        if eqn.effects:
            waits |= set() if effect is None else {effect}
            effect = i
        before.append(tuple(sorted(waits)))
        for v in reads:
            users[v].append(i)
    outs = set(v for v in inner.outvars if _jax.is_var(v))
    return Problem(
        tuple(before),
        tuple(Tensor(_jax.bytes_of(v), made[v], tuple(users[v]), v in outs) for v in made if _jax.is_var(v)),
    )


def _ties(eqns: Sequence[Eqn], branch: Sequence[int], outvars: Sequence[Any]) -> list[Tie]:
    outs = {v for v in outvars if _jax.is_var(v)}
    total = sum(map(_jax.bytes_of, outs))
    last_read: dict[Var, int] = {}
    for i, eqn in enumerate(eqns):
        if branch[i] == CORE:
            last_read.update((v, i) for v in eqn.invars if _jax.is_var(v))
    ties: list[Tie] = []
    start = 0  # of the core equations since the last tie's anchor
    recent: list[Var] = []
    results: list[Var] = []
    for i, eqn in enumerate(eqns):
        if branch[i] == CORE:
            if results:
                ties.append(Tie(i - 1, tuple(results), tuple(v for v in recent if last_read.get(v, -1) >= i)))
                results = []
                recent = []
            recent += [v for v in eqn.outvars if _jax.is_var(v)]
            recent = [v for v in recent if last_read.get(v, -1) > i]
        else:
            results += [v for v in eqn.outvars if v in outs and _jax.bytes_of(v) >= LEAST * total]
    return [t for t in ties if t.onward and t.results]


def _barrier(tie: Tie) -> Callable[[_jax.Env], None]:
    def pass_together(env: _jax.Env) -> None:
        names = (*tie.results, *tie.onward)
        env.update(zip(names, lax.optimization_barrier(tuple(env[v] for v in names)), strict=True))

    return pass_together
