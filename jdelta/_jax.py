"""Every contact with parts of JAX that move between versions.

Tested on jax 0.10, 0.11 and 0.12. In 0.12 ``Jaxpr`` and ``ClosedJaxpr`` became one class; the
helpers below hide which of the two is in hand, so that no other file needs to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

Array: TypeAlias = jax.Array | np.ndarray[Any, Any] | np.generic
Jaxpr: TypeAlias = Any
Eqn: TypeAlias = Any
Var: TypeAlias = Any
Atom: TypeAlias = Any

CALLS = frozenset("pjit jit closed_call core_call eval_jaxpr remat remat2 checkpoint".split())
"""Primitives whose body may be inlined without changing a value or any of its derivatives."""

session_context: Any = jax.make_user_context(None)
"""Ambient object of the running trace. JAX keys its trace caches by it: no stale trace is used."""

new_var: Callable[[Any], Var] = core.gensym()


def current_session() -> Any:
    """The object that the innermost ``with session_context(...)`` was entered with, or None."""
    return session_context.value


def stage(fun: Callable[..., Any], *args: Any) -> tuple[Jaxpr, Any]:
    """Trace ``fun`` to a closed jaxpr and its output tree; closed-over tracers become consts."""
    return_tree: list[Any] = []

    def flat(*xs: Any) -> Any:
        leaves, tree = jax.tree.flatten(fun(*xs))
        return_tree.append(tree)
        return leaves

    closed = jax.make_jaxpr(flat)(*args)
    return closed, return_tree[-1]


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array (or tracer), and not a Python value that stays static."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_symbolic_zero(tangent: Any) -> bool:
    """Whether a tangent given to a custom JVP rule is known to be zero."""
    return isinstance(tangent, SymbolicZero)


def is_var(atom: Atom) -> bool:
    """Whether an atom is a variable that something reads or writes, not a literal."""
    return not isinstance(atom, (core.Literal, core.DropVar))


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with its constants as variables."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Jaxpr) -> list[Any]:
    """Constants of a closed jaxpr; of an open one, none."""
    return list(getattr(jaxpr, "consts", ()))


def rebuild(
    jaxpr: Jaxpr, eqns: Sequence[Eqn], outvars: Sequence[Atom], new_consts: dict[Var, Any]
) -> Jaxpr:
    """A closed jaxpr like ``jaxpr`` with other equations, outputs and further constants."""
    inner = open_jaxpr(jaxpr)
    raw = core.Jaxpr(
        [*inner.constvars, *new_consts],
        list(inner.invars),
        list(outvars),
        list(eqns),
        inner.effects,
        inner.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(raw, [*consts_of(jaxpr), *new_consts.values()])


def evaluate(closed: Jaxpr, *args: Any) -> list[Any]:
    """Evaluate a closed jaxpr."""
    return core.jaxpr_as_fun(closed)(*args)


def subjaxpr(eqn: Eqn) -> Jaxpr:
    """The single body of a call-like equation."""
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def subjaxprs(eqn: Eqn) -> Iterator[Jaxpr]:
    """All jaxprs in the parameters of an equation."""
    for value in eqn.params.values():
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(leaf, "eqns"):
                yield leaf


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """How many inputs of a ``scan`` are constants, and how many are the carry's; the rest is xs."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def may_inline(eqn: Eqn) -> bool:
    """Whether the equation is a call that can be replaced by its body."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    placed = any(type(s).__name__ != "UnspecifiedValue" for s in shardings)
    return eqn.primitive.name in CALLS and not placed and not eqn.effects


def is_shielded(eqn: Eqn) -> bool:
    """Whether the equation recomputes behind a barrier against CSE."""
    return bool(eqn.params.get("differentiated")) and bool(eqn.params.get("prevent_cse"))


def label(eqn: Eqn) -> str:
    """What to call an equation in names: the function of a custom rule, else the primitive."""
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        info = getattr(open_jaxpr(subjaxpr(eqn)), "debug_info", None)
        return getattr(info, "func_name", eqn.primitive.name)
    return eqn.primitive.name


def name_stack(eqn: Eqn) -> str:
    """The scopes an equation was traced under, transformations included, joined by slashes."""
    return str(eqn.source_info.name_stack)


@functools.cache
def _name_equation() -> Eqn:
    """An equation made by ``checkpoint_name``, as a template."""
    closed = jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(np.float32(0))
    return open_jaxpr(closed).eqns[0]


def named_value(eqn: Eqn) -> str | None:
    """The name that a ``checkpoint_name`` equation gives; None for any other equation."""
    is_name = eqn.primitive is _name_equation().primitive
    return eqn.params["name"] if is_name else None


def name_equation(source: Var, target: Var, name: str, like: Eqn) -> Eqn:
    """``target = checkpoint_name(source, name)``, at the source line of ``like``."""
    template = _name_equation()
    return like.replace(
        primitive=template.primitive,
        params={**template.params, "name": name},
        invars=[source],
        outvars=[target],
        effects=template.effects,
    )


def hoist_consts(closed: Jaxpr) -> Jaxpr:
    """The closed jaxpr with its constants turned into leading inputs."""
    inner = open_jaxpr(closed)
    raw = core.Jaxpr(
        [],
        [*inner.constvars, *inner.invars],
        list(inner.outvars),
        list(inner.eqns),
        inner.effects,
        inner.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(raw, [])
