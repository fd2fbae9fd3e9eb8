"""Programs inside of equations: calls, loops and custom rules, and calls replaced by their bodies.

A new kind of equation with a program inside belongs in ``CALLS`` or ``BODIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import primitives

from jdelta._src._jax.checkpoint import is_shielded, plain, remat3_body
from jdelta._src._jax.effects import effects_of, effects_on, happens_once
from jdelta._src._jax.equation import DEBUG, REGION, within
from jdelta._src._jax.jaxprs import (
    Eqn,
    Jaxpr,
    closed_jaxpr,
    consts_of,
    open_jaxpr,
    rebuild,
    with_equations,
)
from jdelta._src._jax.places import at_call
from jdelta._src._jax.values import Atom, Var, is_var, new_var

CALLS = frozenset(f"jit closed_call eval_jaxpr remat2 {REGION}".split())
"""Primitives whose body may be inlined without changing a value or any of its derivatives."""

BODIES = CALLS | frozenset("scan while cond shard_map custom_jvp_call custom_vjp_call".split())
"""Primitives whose bodies are programs like the one they are in."""


def is_call(eqn: Eqn) -> bool:
    """Whether the body of an equation can stand for it, in values and in derivatives."""
    return eqn.primitive.name in CALLS or remat3_body(eqn) is not None


def may_inline(eqn: Eqn) -> bool:
    """Whether the equation is a call that can be replaced by its body."""
    if not is_call(eqn):
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(type(s).__name__ == "UnspecifiedValue" for s in shardings)


def subjaxpr(eqn: Eqn) -> Jaxpr:
    """The single body of a call-like equation."""
    body = remat3_body(eqn)
    if body is not None:
        return body
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def subjaxprs(eqn: Eqn) -> Iterator[Jaxpr]:
    """All jaxprs in the parameters of an equation."""
    body = remat3_body(eqn)
    if body is not None:
        yield body
    yield from programs_in(eqn.params)


def programs_in(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """All jaxprs among the parameters of an equation, or in a tuple there."""
    return (value for value in values_in(params) if hasattr(value, "eqns"))


def values_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """The parameters of an equation, those in a tuple one by one."""
    for value in params.values():
        yield from value if isinstance(value, (tuple, list)) else (value,)


def with_bodies(eqn: Eqn, change: Callable[[Jaxpr], Jaxpr]) -> Eqn:
    """The equation with its bodies changed."""
    if eqn.primitive.name not in BODIES:
        return eqn

    def changed(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and any(hasattr(v, "eqns") for v in value):
            return type(value)(map(changed, value))
        body: Any = value
        return change(body) if hasattr(body, "eqns") else body

    params = {name: changed(value) for name, value in eqn.params.items()}
    eqn = eqn.replace(params=params)
    return eqn.replace(effects=eqn.effects | effects_of((), map(open_jaxpr, subjaxprs(eqn))))


def with_replaced(
    program: Jaxpr, is_meant: Callable[[Eqn], bool], replacement: Callable[[Eqn], Sequence[Eqn]]
) -> Jaxpr:
    """A program with others in the place of some equations, in the programs inside of it too.

    Args:
        program: The program.
        is_meant: Whether an equation is to be replaced.
        replacement: What takes its place.

    Returns:
        The program; itself if no equation is meant.
    """
    if not any(map(is_meant, equations(program))):
        return program

    def inside(body: Jaxpr) -> Jaxpr:
        return with_replaced(body, is_meant, replacement)

    eqns: list[Eqn] = []
    for eqn in open_jaxpr(program).eqns:
        eqns += replacement(eqn) if is_meant(eqn) else [with_bodies(eqn, inside)]
    return with_equations(program, eqns)


def without_debugging(eqns: Sequence[Eqn]) -> list[Eqn]:
    """The equations without calls of ``jax.debug``, in the programs inside of them too."""

    def quiet(body: Jaxpr) -> Jaxpr:
        return with_equations(body, without_debugging(open_jaxpr(body).eqns))

    return [
        with_bodies(eqn, quiet) if eqn.effects else eqn
        for eqn in eqns
        if eqn.primitive.name not in DEBUG
    ]


def equations(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """All equations of a program, those of its bodies included."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in subjaxprs(eqn) if eqn.primitive.name in BODIES else ():
            yield from equations(body)


def first_once(jaxpr: Jaxpr) -> Eqn | None:
    """The first equation of a program, or of a body in it, that must not be computed again."""
    for eqn in filter(happens_once, open_jaxpr(jaxpr).eqns):
        inside = (first_once(body) for body in subjaxprs(eqn))
        return next((inner for inner in inside if inner is not None), eqn)
    return None


def label(eqn: Eqn) -> str:
    """What to call an equation in names: the function of a custom rule, else the primitive."""
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        info = getattr(open_jaxpr(subjaxpr(eqn)), "debug_info", None)
        return getattr(info, "func_name", eqn.primitive.name)
    return eqn.primitive.name


def is_checkpoint(eqn: Eqn) -> bool:
    """Whether the equation is a ``jax.checkpoint`` that nothing has differentiated."""
    is_remat = eqn.primitive is primitives.remat_p and not eqn.params["differentiated"]
    return is_remat or remat3_body(eqn) is not None


def nothing(_: Eqn) -> bool:
    """That no equation is meant."""
    return False


def inline(closed: Jaxpr, left: Callable[[Eqn], bool] = nothing) -> Jaxpr:
    """The program with its calls replaced by their bodies, shielded recompute left as it is.

    Args:
        closed: The program.
        left: Which calls are left as they are too.

    Returns:
        A closed program: the one that is given where there is nothing to replace.
    """

    def is_replaced(eqn: Eqn) -> bool:
        return may_inline(eqn) and not is_shielded(eqn) and not left(eqn)

    if not any(is_replaced(e) or plain(e) is not e for e in open_jaxpr(closed).eqns):
        return closed_jaxpr(closed)
    eqns: list[Eqn] = []
    became: dict[Var, Atom] = {}
    new_consts: dict[Var, Any] = {}

    def now(atom: Atom) -> Atom:
        return became.get(atom, atom) if is_var(atom) else atom

    def visit(inner: Sequence[Eqn]) -> None:
        for eqn in inner:
            if is_replaced(eqn):
                call(eqn)
                continue
            outvars = [new_var(v.aval) if is_var(v) else v for v in eqn.outvars]
            invars, effects = [now(v) for v in eqn.invars], effects_on(eqn, became)
            eqns.append(plain(eqn).replace(invars=invars, outvars=outvars, effects=effects))
            became.update(zip(eqn.outvars, outvars, strict=True))

    def call(eqn: Eqn) -> None:
        body = subjaxpr(eqn)
        inner = open_jaxpr(body)
        for var, value in zip(inner.constvars, consts_of(body), strict=True):
            became[var] = new_var(var.aval)
            new_consts[became[var]] = value
        became.update(zip(inner.invars, map(now, eqn.invars), strict=True))
        visit([at_call(within(e, eqn), eqn) for e in inner.eqns])
        became.update(zip(eqn.outvars, map(now, inner.outvars), strict=True))

    inner = open_jaxpr(closed)
    visit(inner.eqns)
    return rebuild(closed, eqns, [now(v) for v in inner.outvars], new_consts)
