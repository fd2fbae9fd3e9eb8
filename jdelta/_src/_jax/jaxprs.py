"""Programs: traced, taken apart and put together.

In jax 0.11 ``Jaxpr`` and ``ClosedJaxpr`` became one class. What is below hides which of them is in
hand, so that no other file needs to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import partial_eval

from jdelta._src._jax.effects import effects_of
from jdelta._src._jax.values import Atom, Var, is_var


class Eqn(Protocol):
    """One equation of a program: ``c:f32[8,64] = tanh b``.

    Attributes:
        primitive: What it computes: ``tanh``.
        invars: What it reads.
        outvars: The variables that it makes.
        params: The primitive's parameters: ``{"accuracy": None}``.
        effects: What it does beside that.
        source_info: Where in the user's code it comes from, and under which names.
    """

    @property
    def primitive(self) -> Any: ...

    @property
    def invars(self) -> Sequence[Atom]: ...

    @property
    def outvars(self) -> Sequence[Var]: ...

    @property
    def params(self) -> dict[str, Any]: ...

    @property
    def effects(self) -> Any: ...

    @property
    def source_info(self) -> Any: ...

    def replace(self, **changes: Any) -> Eqn:
        """The equation with other attributes."""
        ...


class Jaxpr(Protocol):
    """A program, closed or open: ``{ lambda ; a:f32[8] . let b:f32[8] = sin a in (b,) }``.

    What an open one holds, ``open_jaxpr`` gives of both.

    Attributes:
        eqns: Its equations, in order.
        constvars: Variables that stand for its constants.
        invars: The variables that it is given.
        outvars: Its results.
        in_avals: Types of what it is given.
        out_avals: Types of its results.
        effects: What it does beside giving results.
        debug_info: The function that it was traced from.
    """

    @property
    def eqns(self) -> Sequence[Eqn]: ...

    @property
    def constvars(self) -> Sequence[Var]: ...

    @property
    def invars(self) -> Sequence[Var]: ...

    @property
    def outvars(self) -> Sequence[Atom]: ...

    @property
    def in_avals(self) -> Sequence[Any]: ...

    @property
    def out_avals(self) -> Sequence[Any]: ...

    @property
    def effects(self) -> Any: ...

    @property
    def debug_info(self) -> Any: ...


# JAX's own constructors ask for its own classes; what jdelta hands them is known by its protocol.
_jaxpr: Callable[..., Any] = core.Jaxpr
_closed: Callable[..., Any] = core.ClosedJaxpr


def _open(
    constvars: Sequence[Var],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[Eqn],
    debug_info: Any,
) -> Any:
    """An open program, which says of itself what it does and whether JAX has to lower its level."""
    return _jaxpr(
        list(constvars),
        list(invars),
        list(outvars),
        list(eqns),
        effects_of([*constvars, *invars], eqns),
        debug_info,
        is_high=any(map(is_high, eqns)),
    )


def is_high(eqn: Eqn) -> bool:
    """Whether JAX makes other equations of one before it lowers them (jax 0.12)."""
    prim: Any = eqn.primitive
    if "is_high" in vars(prim) or type(prim).is_high is not core.Primitive.is_high:
        return bool(prim.is_high(*(atom.aval for atom in eqn.invars), **eqn.params))
    return any(getattr(param, "is_high", False) is True for param in eqn.params.values())


def jaxpr_of(fun: Callable[..., Any], *args: Any) -> Jaxpr:
    """The closed program of a function."""
    program: Any = jax.make_jaxpr(fun)(*args)
    return program


def stage(fun: Callable[..., Any], *args: Any) -> tuple[Jaxpr, Any]:
    """Trace ``fun`` to a closed jaxpr and its output tree; closed-over tracers become consts."""
    return_tree: list[Any] = []

    def flat(*xs: Any) -> Any:
        leaves, tree = jax.tree.flatten(fun(*xs))
        return_tree.append(tree)
        return leaves

    closed = jaxpr_of(flat, *args)
    return closed, return_tree[-1]


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with its constants as variables."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def closed_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr as a closed one; an open one has no constants."""
    return jaxpr if hasattr(jaxpr, "jaxpr") else _closed(jaxpr, [])


def function_name(jaxpr: Jaxpr) -> str:
    """The function that a program was traced from; empty where it is not known."""
    info = getattr(open_jaxpr(jaxpr), "debug_info", None)
    name = getattr(info, "func_name", "") or ""
    return name.strip("<>")


def consts_of(jaxpr: Jaxpr) -> list[Any]:
    """Constants of a closed jaxpr; of an open one, none."""
    return list(getattr(jaxpr, "consts", ()))


def leaked(jaxpr: Jaxpr) -> Any:
    """A value of another trace that has got into a program, if there is one."""
    return next((c for c in consts_of(jaxpr) if isinstance(c, Tracer)), None)


def rebuild(
    jaxpr: Jaxpr,
    eqns: Sequence[Eqn],
    outvars: Sequence[Atom],
    new_consts: Mapping[Var, Any] = MappingProxyType({}),
    invars: Sequence[Var] | None = None,
) -> Jaxpr:
    """A closed jaxpr like ``jaxpr`` with other equations, outputs, inputs and further constants."""
    inner = open_jaxpr(jaxpr)
    raw = _open(
        [*inner.constvars, *new_consts],
        inner.invars if invars is None else invars,
        outvars,
        eqns,
        inner.debug_info.with_unknown_names(),
    )
    return _closed(raw, [*consts_of(jaxpr), *new_consts.values()])


def with_equations(jaxpr: Jaxpr, eqns: Sequence[Eqn]) -> Jaxpr:
    """The jaxpr, closed or open as it is, with other equations."""
    inner = open_jaxpr(jaxpr)
    names = inner.debug_info.with_unknown_names()
    raw = _open(inner.constvars, inner.invars, inner.outvars, eqns, names)
    consts = consts_of(jaxpr)
    closed = hasattr(jaxpr, "jaxpr") and len(consts) == len(inner.constvars)
    return _closed(raw, consts) if closed else raw


def with_outputs(jaxpr: Jaxpr, used: Sequence[bool]) -> Jaxpr:
    """A closed jaxpr with some of its outputs only, and without what they do not depend on."""
    full_jaxpr: Any = open_jaxpr(jaxpr)
    inner, _ = partial_eval.dce_jaxpr(full_jaxpr, list(used), instantiate=True)
    return _closed(inner, consts_of(jaxpr))


def dependents(eqns: Sequence[Eqn], values: Iterable[Any]) -> Iterator[int]:
    """Which equations are computed from some of these values, as they are in order."""
    reached = set(values)
    for index, eqn in enumerate(eqns):
        if any(is_var(v) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
            yield index


def hoist_consts(closed: Jaxpr) -> Jaxpr:
    """The closed jaxpr with its constants turned into leading inputs."""
    inner = open_jaxpr(closed)
    names = inner.debug_info.with_unknown_names()
    raw = _open([], [*inner.constvars, *inner.invars], inner.outvars, inner.eqns, names)
    return _closed(raw, [])


def variables(eqn: Eqn) -> list[Var]:
    """The variables that an equation reads."""
    return [v for v in eqn.invars if is_var(v)]


def single(eqn: Eqn) -> Jaxpr:
    """A program of one equation: its inputs are the equation's variables, each once."""
    return program_of([eqn], [v for v in eqn.outvars if is_var(v)])


def program_of(eqns: Sequence[Eqn], outvars: Sequence[Var]) -> Jaxpr:
    """A program of equations, those left out that its results do not depend on.

    Args:
        eqns: The equations, in order.
        outvars: The results; without any all equations stay. What has effects stays.

    Returns:
        A closed jaxpr; its inputs are the variables that the equations read but do not make.
    """
    kept: list[Eqn] = list(eqns)
    if outvars:
        needed, kept = set(outvars), []
        for eqn in reversed(eqns):
            if eqn.effects or not needed.isdisjoint(eqn.outvars):
                kept.append(eqn)
                needed.update(v for v in eqn.invars if is_var(v))
        kept.reverse()
    computed = {v for eqn in kept for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in kept for v in eqn.invars if is_var(v) and v not in computed)
    return _closed(_open([], list(read), outvars, kept, _of_no_function()), [])


def body_of(eqns: Sequence[Eqn], invars: Sequence[Var], outvars: Sequence[Atom]) -> Jaxpr:
    """An open program of equations that is given some variables and makes others."""
    return _open([], invars, outvars, eqns, _of_no_function())


@functools.cache
def _of_no_function() -> Any:
    """What to say of the function that a program was traced from, where there is none."""
    return open_jaxpr(jaxpr_of(lambda: ())).debug_info.with_unknown_names()
