"""The interpreter: a program evaluated equation by equation, each handed to a hook.

A pass that changes what a program computes with gives a hook, which evaluates the equations that
the pass is about in its own way and leaves the others to ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jax._src import source_info_util
from jax.extend import core

from jdelta._src._jax.jaxprs import Eqn, Jaxpr, consts_of, jaxpr_of, open_jaxpr
from jdelta._src._jax.values import Atom, Var, is_var

Env: TypeAlias = dict[Var, Any]
"""The values of variables while a program is evaluated."""

Hook: TypeAlias = Callable[[int, Eqn, Env], None]
"""Evaluates one equation, given its index: reads its operands, and puts its results there."""


def evaluate(closed: Jaxpr, *args: Any) -> list[Any]:
    """Evaluate a closed jaxpr."""
    return core.jaxpr_as_fun(closed)(*args)


def interpret(closed: Jaxpr, args: Sequence[Any], hook: Hook) -> list[Any]:
    """Evaluate a closed jaxpr, each of its equations by a hook.

    Args:
        closed: The program.
        args: Its arguments; what stands for a value is one too, if the hook knows it.
        hook: Evaluates an equation.
    """
    inner = open_jaxpr(closed)
    env: Env = dict(zip(inner.constvars, consts_of(closed), strict=True))
    env.update(zip(inner.invars, args, strict=True))
    for index, eqn in enumerate(inner.eqns):
        hook(index, eqn, env)
    return read(env, inner.outvars)


def run(eqn: Eqn, env: Env, value_of: Callable[[Any], Any] = lambda value: value) -> None:
    """Evaluate an equation as it stands.

    Args:
        eqn: The equation.
        env: Where its operands are, and its results go.
        value_of: From what stands for an operand to its value.
    """
    at: Any = eqn
    params = eqn.primitive.get_bind_params(eqn.params)
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    place = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    with place, at.ctx.manager:
        results = eqn.primitive.bind(*map(value_of, read(env, eqn.invars)), **params)
    write(env, eqn, results if eqn.primitive.multiple_results else [results])


def read(env: Mapping[Var, Any], atoms: Sequence[Atom]) -> list[Any]:
    """The values of atoms."""
    return [env[a] if is_var(a) else a.val for a in atoms]


def write(env: Env, eqn: Eqn, results: Sequence[Any]) -> None:
    """Put the results of an equation into the environment."""
    env.update(zip(eqn.outvars, results, strict=True))


def retraced(closed: Jaxpr, fun: Callable[..., Sequence[Any]]) -> Jaxpr:
    """The program of a function that takes the flat arguments of another program."""
    return jaxpr_of(fun, *closed.in_avals)
