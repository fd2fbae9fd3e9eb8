"""One equation at a time: what its parameters say, and new ones made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.core import unmapped_aval
from jax._src.lax import windowed_reductions

from jdelta._src._jax.interpreter import evaluate
from jdelta._src._jax.jaxprs import Eqn, Jaxpr, jaxpr_of, open_jaxpr, rebuild
from jdelta._src._jax.values import Atom, Var, has_explicit_axes, is_var, new_var

REGION = "jdelta_region"
"""Name of the primitive that a region is while nothing has differentiated it."""

COTANGENT = "jdelta_cotangent"
"""Name of the identity on the tangents that leave a region while a step is recorded."""

DEBUG = frozenset({"debug_callback", "debug_print"})
"""What ``jax.debug`` calls."""


def name_stack(eqn: Eqn) -> str:
    """The scopes an equation was traced under, transformations included, joined by slashes."""
    return _joined(eqn.source_info.name_stack)


@functools.lru_cache(maxsize=1 << 14)
def _joined(stack: Any) -> str:
    """A name stack in words; equations of equal layers share few."""
    return str(stack)


def is_backward(eqn: Eqn) -> bool:
    """Whether differentiation in reverse made the equation."""
    return "transpose(" in name_stack(eqn)


def is_differentiated(eqn: Eqn) -> bool:
    """Whether the equation is part of what is differentiated, or of its derivative."""
    return "jvp(" in name_stack(eqn)


def is_backward_of_backward(eqn: Eqn) -> bool:
    """Whether differentiation in reverse of what it had made already made the equation."""
    return name_stack(eqn).count("transpose(") > 1


def within(eqn: Eqn, call: Eqn) -> Eqn:
    """An equation of a call's body in the scopes of the call, where it does not say so itself."""
    outer, inner = name_stack(call), name_stack(eqn)
    if not outer or f"{inner}/".startswith(f"{outer}/") or is_backward(eqn):
        return eqn
    info = eqn.source_info
    stack = call.source_info.name_stack + info.name_stack
    return eqn.replace(source_info=info.replace(name_stack=stack))


def in_scopes(eqn: Eqn, *scopes: str) -> Eqn:
    """An equation as if it was traced under more scopes, from the outermost."""
    info = eqn.source_info
    stack = functools.reduce(lambda stack, scope: stack.extend(scope), scopes, info.name_stack)
    return eqn.replace(source_info=info.replace(name_stack=stack))


def with_scopes(eqn: Eqn, rename: Callable[[str], str]) -> Eqn:
    """An equation as if the scopes it was traced under had other names."""
    info = eqn.source_info
    scopes = info.name_stack.stack
    renamed = tuple(type(scope)(rename(scope.name)) for scope in scopes)
    if renamed == tuple(scopes):
        return eqn
    return eqn.replace(source_info=info.replace(name_stack=type(info.name_stack)(renamed)))


def in_fresh_variables(eqn: Eqn, became: dict[Var, Var]) -> Eqn:
    """An equation of other variables.

    Args:
        eqn: The equation.
        became: From variables to those in their place. New ones for its results are added.
    """
    results = [new_var(v.aval) if is_var(v) else v for v in eqn.outvars]
    operands = [became.get(v, v) if is_var(v) else v for v in eqn.invars]
    became.update((v, new) for v, new in zip(eqn.outvars, results, strict=True) if is_var(v))
    return eqn.replace(invars=operands, outvars=results)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a ``scan`` are constants, and how many are the carry's; the rest is xs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.11
    return len(consts), len(carry)


def manual_axes(eqn: Eqn) -> Sequence[str]:
    """The mesh axes that a ``shard_map`` maps over."""
    return tuple(eqn.params["newly_manual_axes"])


def from_template(
    template: Eqn, sources: Sequence[Atom], targets: Sequence[Var], like: Eqn, /, **params: Any
) -> Eqn:
    """The equation ``template`` for other variables, at the source line of ``like``."""
    return like.replace(
        primitive=template.primitive,
        params={**template.params, **params},
        invars=list(sources),
        outvars=list(targets),
        effects=template.effects,
    )


def with_barriers(closed: Jaxpr, after: Mapping[int, Sequence[Sequence[Var]]]) -> Jaxpr:
    """A program in which what comes later reads some values from behind barriers.

    Args:
        closed: The program.
        after: From the index of an equation to the barriers after it, each with the values that
            share it.
    """
    behind: dict[Var, Var] = {}

    def now(atoms: Sequence[Atom]) -> list[Atom]:
        return [behind.get(atom, atom) if is_var(atom) else atom for atom in atoms]

    inner, eqns = open_jaxpr(closed), list[Eqn]()
    for index, eqn in enumerate(inner.eqns):
        eqns.append(eqn.replace(invars=now(eqn.invars)))
        for values in after.get(index, ()):
            results = [new_var(v.aval) for v in values]
            eqns.append(from_template(_barrier_equation(), now(values), results, eqn))
            behind.update(zip(values, results, strict=True))
    return rebuild(closed, eqns, now(inner.outvars))


@functools.cache
def _barrier_equation() -> Eqn:
    barrier = jaxpr_of(jax.lax.optimization_barrier, np.float32(0))
    return open_jaxpr(barrier).eqns[0]


def copy_equation(source: Var, like: Eqn, *, to_host: bool) -> Eqn:
    """A copy of a value between device and host memory, at the source line of ``like``."""
    template = _copy(source.aval, to_host=to_host)
    return from_template(template, [source], [new_var(template.outvars[0].aval)], like)


@functools.lru_cache(maxsize=256)
def _copy(aval: Any, *, to_host: bool) -> Eqn:
    space = jax.memory.Space.Host if to_host else jax.memory.Space.Device
    return open_jaxpr(jaxpr_of(lambda x: jax.device_put(x, space), aval)).eqns[0]


def rounding_equation(source: Var, target: Var, like: Eqn) -> Eqn:
    """A real value rounded to as many bits as its type has, at the source line of ``like``."""
    return from_template(_rounding(source.aval), [source], [target], like)


@functools.lru_cache(maxsize=256)
def _rounding(aval: Any) -> Eqn:
    bits = jax.numpy.finfo(aval.dtype)
    return open_jaxpr(
        jaxpr_of(lambda x: jax.lax.reduce_precision(x, bits.nexp, bits.nmant), aval)
    ).eqns[0]


def scattered_into_own_zeros(eqn: Eqn) -> list[Eqn]:
    """The gradient of a pooled maximum or minimum, its zeros made of a zero behind a barrier.

    Args:
        eqn: A ``select_and_scatter_add``.

    Returns:
        The barrier, and what takes the place of the equation; where its types say how it is cut
        over devices, the equation as it is.
    """
    params = dict(eqn.params)
    select = params.pop("select_prim").bind

    def scattered(source: Any, operand: Any) -> Any:
        zero = jax.lax.optimization_barrier(np.zeros((), operand.dtype))
        scatter: Any = getattr(windowed_reductions, "_select_and_scatter")  # noqa: B009
        return scatter(
            operand, select, **params, source=source, init_value=zero, scatter=jax.lax.add
        )

    avals = [v.aval for v in eqn.invars]
    if any(has_explicit_axes(aval) or aval.mat.varying for aval in avals):
        return [eqn]
    barrier, scatter = open_jaxpr(jaxpr_of(scattered, *avals)).eqns
    zero = new_var(barrier.outvars[0].aval)
    source, operand = eqn.invars
    return [
        from_template(barrier, barrier.invars, [zero], eqn),
        from_template(scatter, [operand, source, zero], eqn.outvars, eqn),
    ]


def stacked(aval: Any, count: int) -> Any:
    """The type of so many values of a type, stacked."""
    return unmapped_aval(count, 0, aval)


def scan_equation(
    like: Eqn,
    body: Jaxpr,
    operands: Sequence[Atom],
    results: Sequence[Var],
    *,
    consts: int,
    carry: int,
) -> tuple[Eqn, dict[Var, Atom]]:
    """A ``scan`` like another one, but over another body.

    Args:
        like: The other one: its length, its direction, its line in the user's code.
        body: The body, closed.
        operands: Constants, what is carried, what it has rows of.
        results: What is carried, and rows.
        consts: How many of the operands are constants.
        carry: How many of the operands are carried.
    """
    options = {name: like.params[name] for name in ("length", "reverse", "unroll")}

    def run(*flat: Any) -> list[Any]:
        def step(state: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outputs = evaluate(body, *flat[:consts], *state, *rows)
            return outputs[:carry], outputs[carry:]

        rows = list(flat[consts + carry :])
        last, stacks = jax.lax.scan(step, list(flat[consts : consts + carry]), rows, **options)
        return [*last, *stacks]

    inner = open_jaxpr(jaxpr_of(run, *(atom.aval for atom in operands)))
    (template,) = inner.eqns
    operand_of = dict(zip(inner.invars, operands, strict=True))
    result_of: dict[Var, Var] = {}
    through: dict[Var, Atom] = {}
    for v, result in zip(inner.outvars, results, strict=True):
        if not is_var(v) or v in operand_of or v in result_of:
            through[result] = v if not is_var(v) else operand_of.get(v) or result_of[v]
        else:
            result_of[v] = result
    targets = [result_of.get(v) or new_var(v.aval) for v in template.outvars]
    return from_template(template, [operand_of[v] for v in template.invars], targets, like), through


def part_equations(source: Var, like: Eqn) -> list[Eqn]:
    """The real and the imaginary part of a complex value, at the source line of ``like``."""
    parts = _complex_equations(source.aval.dtype)[:2]
    avals = [source.aval.update(dtype=part.outvars[0].aval.dtype) for part in parts]
    return [
        from_template(part, [source], [new_var(aval)], like)
        for part, aval in zip(parts, avals, strict=True)
    ]


def complex_equation(parts: Sequence[Var], target: Var, like: Eqn) -> Eqn:
    """``target = complex(*parts)``, at the source line of ``like``."""
    return from_template(_complex_equations(target.aval.dtype)[2], parts, [target], like)


@functools.cache
def _complex_equations(dtype: Any) -> Sequence[Eqn]:
    """Equations that take a complex value apart and put it together, as templates."""

    def rebuilt(x: Any) -> Any:
        return jax.lax.complex(jax.lax.real(x), jax.lax.imag(x))

    return open_jaxpr(jaxpr_of(rebuilt, np.zeros((), dtype))).eqns
