"""The interpreter: a program evaluated equation by equation, each handed to a hook.

A pass that changes what a program computes with gives a hook, which evaluates the equations that
the pass is about in its own way and leaves the others to ``run``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jax._src import core as internal
from jax._src import source_info_util
from jax._src.interpreters import partial_eval
from jax.extend import core

from jdelta._src._jax.effects import is_of_ref
from jdelta._src._jax.jaxprs import Eqn, Jaxpr, consts_of, is_high, jaxpr_of, open_jaxpr
from jdelta._src._jax.values import Atom, Var, is_var

Env: TypeAlias = dict[Var, Any]
"""The values of variables while a program is evaluated."""

Hook: TypeAlias = Callable[[int, Eqn, Env], None]
"""Evaluates one equation, given its index: reads its operands, and puts its results there."""


def evaluate(closed: Jaxpr, *args: Any) -> list[Any]:
    """Evaluate a closed jaxpr."""
    if _staging() is None:
        return core.jaxpr_as_fun(closed)(*args)
    return interpret(closed, args, lambda _, eqn, env: run(eqn, env))


def of_some(
    fun: Callable[..., Any], args: Sequence[Any], which: Sequence[int]
) -> Callable[..., Any]:
    """A function of some of the arguments of another, which has the others already.

    Args:
        fun: The other function.
        args: All of its arguments.
        which: The numbers of those that are given later: ``[0, 2]``.
    """

    def of(*some: Any) -> Any:
        full = list(args)
        for i, x in zip(which, some, strict=True):
            full[i] = x
        return fun(*full)

    return of


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
    operands = [*map(value_of, read(env, eqn.invars))]
    results = _staged(eqn, operands)
    write(env, eqn, _bound(eqn, operands) if results is None else results)


def _bound(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation as JAX computes, or traces, its primitive."""
    at: Any = eqn
    params = eqn.primitive.get_bind_params(eqn.params)
    place = source_info_util.user_context(eqn.source_info.traceback, name_stack=_scope(eqn))
    with place, at.ctx.manager:
        results = eqn.primitive.bind(*operands, **params)
    return results if eqn.primitive.multiple_results else [results]


def _scope(eqn: Eqn) -> Any:
    """The name stack of an equation where it is evaluated."""
    return source_info_util.current_name_stack() + eqn.source_info.name_stack


def _staging() -> Any:
    """What records equations if a function is being traced to a program, and nothing else.

    None where JAX lowers a program, and makes other equations of its own.
    """
    trace: Any = internal.trace_ctx.trace
    records = isinstance(trace, partial_eval.DynamicJaxprTrace) and not trace.requires_low
    return trace if records else None


def _staged(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any] | None:
    """The results of an equation that is recorded as it is.

    To bind its primitive gives the same at three times the price: its types are inferred again, and
    custom rules are traced again.

    Returns:
        None where it has to be bound: nothing is recorded, an operand is a constant or has another
        type than the equation was traced for, JAX makes other equations of it, or it is on a
        mutable ref.
    """
    trace, at = _staging(), eqn.source_info
    if trace is None or _becomes_others(eqn) or any(map(is_of_ref, eqn.effects)):
        return None
    tracers: list[Any] = []
    for atom, value in zip(eqn.invars, operands, strict=True):
        if not is_var(atom):
            literal: Any = atom
            tracers.append(partial_eval.DynamicJaxprTracer(trace, atom.aval, literal, at))
        elif _is_recorded(value, trace, atom.aval):
            tracers.append(value)
        else:
            return None
    types = [v.aval for v in eqn.outvars]
    is_inside = bool(source_info_util.current_name_stack())
    source: Any = at.replace(name_stack=_scope(eqn)) if is_inside else at
    context: Any = getattr(eqn, "ctx", None)
    return trace.emit_eqn(tracers, types, eqn.primitive, eqn.params, eqn.effects, source, context)


def _becomes_others(eqn: Eqn) -> bool:
    """Whether JAX may record other equations for one: a constant, or some of lower level."""
    return is_high(eqn) or eqn.primitive in partial_eval.const_fold_rules


def _is_recorded(value: Any, trace: Any, aval: Any) -> bool:
    """Whether a value of a type is one that is being recorded."""
    is_of_trace = getattr(value, "_trace", None) is trace
    return is_of_trace and (value.aval is aval or value.aval == aval)


def read(env: Mapping[Var, Any], atoms: Sequence[Atom]) -> list[Any]:
    """The values of atoms."""
    return [env[a] if is_var(a) else a.val for a in atoms]


def write(env: Env, eqn: Eqn, results: Sequence[Any]) -> None:
    """Put the results of an equation into the environment."""
    env.update(zip(eqn.outvars, results, strict=True))


def retraced(closed: Jaxpr, fun: Callable[..., Sequence[Any]]) -> Jaxpr:
    """The program of a function that takes the flat arguments of another program."""
    return jaxpr_of(fun, *closed.in_avals)
