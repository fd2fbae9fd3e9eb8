"""Every contact with parts of JAX that move between versions.

Tested on jax 0.10, 0.11 and 0.12. In 0.12 ``Jaxpr`` and ``ClosedJaxpr`` became one class; the
helpers below hide which of the two is in hand, so that no other file needs to know. What is below
jaxprs is the business of ``_shardy.py``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives
from jax.interpreters import partial_eval

Array: TypeAlias = jax.Array | np.ndarray[Any, Any] | np.generic
Jaxpr: TypeAlias = Any
Eqn: TypeAlias = Any
Var: TypeAlias = Any
Atom: TypeAlias = Any

REGION = "jdelta_region"
"""Name of the primitive that a region is while nothing has differentiated it."""

COTANGENT = "jdelta_cotangent"
"""Name of the identity on the tangents that leave a region while a step is recorded."""

DEBUG = frozenset({"debug_callback", "debug_print"})
"""What ``jax.debug`` calls."""

CALLS = frozenset(
    f"pjit jit closed_call core_call eval_jaxpr remat remat2 checkpoint {REGION}".split()
)
"""Primitives whose body may be inlined without changing a value or any of its derivatives."""

session_context: Any = jax.make_user_context(None)
"""Ambient object of the running trace. JAX keys its trace caches by it: no stale trace is used."""

new_var: Callable[[Any], Var] = core.gensym()


def current_session() -> Any:
    """The object that the innermost ``with session_context(...)`` was entered with, or None."""
    return session_context.value


class Hook:
    """A function of JAX's in whose place another can be put, for all threads.

    What is put there has to leave alone what is not traced for a session of its own.
    """

    def __init__(self, plain: Callable[..., Any], put: Callable[[Callable[..., Any]], None]):
        self._plain = plain
        self._put = put
        self._others: list[Callable[..., Any]] = []
        self._lock = threading.Lock()
        functools.update_wrapper(self, plain)

    @contextlib.contextmanager
    def replaced(self, other: Callable[..., Any]) -> Generator[None]:
        """While open, JAX calls ``other``; its first argument is what JAX would have called."""
        with self._lock:
            self._others.append(other)
            self._put(self)
        try:
            yield
        finally:
            with self._lock:
                self._others.remove(other)
                if not self._others:
                    self._put(self._plain)

    def __call__(self, *args: Any, **options: Any) -> Any:
        for other in self._others[-1:]:  # another thread may be taking it out
            return other(self._plain, *args, **options)
        return self._plain(*args, **options)


def _put_vjp(vjp: Callable[..., Any]) -> None:
    inspect.unwrap(jax.value_and_grad).__globals__["vjp"] = vjp
    jax.vjp = vjp


def _put_scan(scan: Callable[..., Any]) -> None:
    jax.lax.scan = scan


VJP = Hook(jax.vjp, _put_vjp)
"""What ``jax.grad`` and its like call, each in their own module."""

SCAN = Hook(jax.lax.scan, _put_scan)


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


def is_var(atom: Atom) -> bool:
    """Whether an atom is a variable that something reads or writes, not a literal."""
    return not isinstance(atom, (core.Literal, core.DropVar))


def bytes_of(var: Var) -> int:
    """Bytes of a value; zero for keys and tokens."""
    dtype = getattr(var.aval, "dtype", None)
    return var.aval.size * dtype.itemsize if isinstance(dtype, np.dtype) else 0


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with its constants as variables."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Jaxpr) -> list[Any]:
    """Constants of a closed jaxpr; of an open one, none."""
    return list(getattr(jaxpr, "consts", ()))


def rebuild(
    jaxpr: Jaxpr,
    eqns: Sequence[Eqn],
    outvars: Sequence[Atom],
    new_consts: Mapping[Var, Any] = MappingProxyType({}),
    invars: Sequence[Var] | None = None,
) -> Jaxpr:
    """A closed jaxpr like ``jaxpr`` with other equations, outputs, inputs and further constants."""
    inner = open_jaxpr(jaxpr)
    raw = core.Jaxpr(
        [*inner.constvars, *new_consts],
        list(inner.invars if invars is None else invars),
        list(outvars),
        list(eqns),
        inner.effects,
        inner.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(raw, [*consts_of(jaxpr), *new_consts.values()])


def with_outputs(jaxpr: Jaxpr, used: Sequence[bool]) -> Jaxpr:
    """A closed jaxpr with some of its outputs only, and without what they do not depend on."""
    inner, _ = partial_eval.dce_jaxpr(open_jaxpr(jaxpr), list(used), instantiate=True)
    return core.ClosedJaxpr(inner, consts_of(jaxpr))


def evaluate(closed: Jaxpr, *args: Any) -> list[Any]:
    """Evaluate a closed jaxpr."""
    return core.jaxpr_as_fun(closed)(*args)


Env: TypeAlias = dict[Var, Any]


def evaluate_with(
    closed: Jaxpr,
    args: Sequence[Any],
    instead: Mapping[int, Callable[[Env], Sequence[Any]]],
    after: Mapping[int, Callable[[Env], None]],
) -> list[Any]:
    """Evaluate a closed jaxpr, some of its equations in another way.

    Args:
        closed: The program.
        args: Its arguments.
        instead: From the index of an equation to what gives its results in its place.
        after: From the index of an equation to what is done after it: it may change values.
    """
    inner = open_jaxpr(closed)
    env: Env = dict(zip(inner.constvars, consts_of(closed), strict=True))
    env.update(zip(inner.invars, args, strict=True))
    for index, eqn in enumerate(inner.eqns):
        if index in instead:
            env.update(zip(eqn.outvars, instead[index](env), strict=True))
        else:
            one = single(eqn)
            results = evaluate(one, *read(env, open_jaxpr(one).invars))
            env.update(zip(open_jaxpr(one).outvars, results, strict=True))
        if index in after:
            after[index](env)
    return read(env, inner.outvars)


def read(env: Mapping[Var, Any], atoms: Sequence[Atom]) -> list[Any]:
    """The values of atoms."""
    return [env[a] if is_var(a) else a.val for a in atoms]


def is_call(eqn: Eqn) -> bool:
    """Whether the body of an equation can stand for it, in values and in derivatives."""
    return eqn.primitive.name in CALLS or _is_checkpoint(eqn)


def _is_checkpoint(eqn: Eqn) -> bool:
    """Whether the equation is a ``jax.checkpoint`` made with ``jax_remat3`` on."""
    return type(eqn.params.get("_prim")).__name__ == "RematTraced"


def subjaxpr(eqn: Eqn) -> Jaxpr:
    """The single body of a call-like equation."""
    if _is_checkpoint(eqn):
        return eqn.params["_prim"].jaxpr
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def subjaxprs(eqn: Eqn) -> Iterator[Jaxpr]:
    """All jaxprs in the parameters of an equation."""
    if _is_checkpoint(eqn):
        yield subjaxpr(eqn)
    for value in eqn.params.values():
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(leaf, "eqns"):
                yield leaf


BODIES = CALLS | frozenset(
    "scan while cond shard_map custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)
"""Primitives whose bodies are programs like the one they are in."""


def with_bodies(eqn: Eqn, change: Callable[[Jaxpr], Jaxpr]) -> Eqn:
    """The equation with its bodies changed."""
    if eqn.primitive.name not in BODIES:
        return eqn

    def changed(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and any(hasattr(v, "eqns") for v in value):
            return type(value)(map(changed, value))
        return change(value) if hasattr(value, "eqns") else value

    params = {name: changed(value) for name, value in eqn.params.items()}
    eqn = eqn.replace(params=params)
    effects = {effect for body in subjaxprs(eqn) for effect in body.effects}
    return eqn.replace(effects=eqn.effects | effects)


def with_equations(jaxpr: Jaxpr, eqns: Sequence[Eqn]) -> Jaxpr:
    """The jaxpr, closed or open as it is, with other equations."""
    inner = open_jaxpr(jaxpr)
    debug_info = inner.debug_info.with_unknown_names()
    effects = inner.effects.union(*(eqn.effects for eqn in eqns))
    variables = list(inner.constvars), list(inner.invars), list(inner.outvars)
    raw = core.Jaxpr(*variables, list(eqns), effects, debug_info)
    consts = consts_of(jaxpr)
    closed = hasattr(jaxpr, "jaxpr") and len(consts) == len(inner.constvars)
    return core.ClosedJaxpr(raw, consts) if closed else raw


def equations(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """All equations of a program, those of its bodies included."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in subjaxprs(eqn) if eqn.primitive.name in BODIES else ():
            yield from equations(body)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a ``scan`` are constants, and how many are the carry's; the rest is xs."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def may_inline(eqn: Eqn) -> bool:
    """Whether the equation is a call that can be replaced by its body."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    placed = any(type(s).__name__ != "UnspecifiedValue" for s in shardings)
    return is_call(eqn) and not placed and not eqn.effects


def manual_axes(eqn: Eqn) -> Sequence[str]:
    """The mesh axes that a ``shard_map`` maps over."""
    return tuple(eqn.params["newly_manual_axes"])


def varying_axes(x: Any) -> frozenset[str]:
    """The axes of a ``shard_map`` that a value varies over, where it checks that."""
    return jax.typeof(x).mat.varying


def is_shielded(eqn: Eqn) -> bool:
    """Whether the equation recomputes behind a barrier against CSE."""
    return bool(eqn.params.get("differentiated")) and bool(eqn.params.get("prevent_cse"))


def label(eqn: Eqn) -> str:
    """What to call an equation in names: the function of a custom rule, else the primitive."""
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        info = getattr(open_jaxpr(subjaxpr(eqn)), "debug_info", None)
        return getattr(info, "func_name", eqn.primitive.name)
    return eqn.primitive.name


def checkpointed(
    fun: Callable[..., Any], policy: Callable[..., Any], *, prevent_cse: bool
) -> Callable[..., Any]:
    """``jax.checkpoint``, the same whether ``jax_remat3`` is on or off.

    With it on, ``jax.checkpoint`` looks for names before JVP, where a region has none yet (and jax
    0.10 ignores policies). The primitive that it binds with the flag off is there in both cases.
    """

    def call(*args: Any) -> Any:
        closed, tree = stage(fun, *args)
        results = primitives.remat_p.bind(
            *consts_of(closed),
            *jax.tree.leaves(args),
            jaxpr=open_jaxpr(hoist_consts(closed)),
            prevent_cse=prevent_cse,
            differentiated=False,
            policy=policy,
        )
        return jax.tree.unflatten(tree, results)

    return call


def name_stack(eqn: Eqn) -> str:
    """The scopes an equation was traced under, transformations included, joined by slashes."""
    return str(eqn.source_info.name_stack)


def in_scope(eqn: Eqn, scope: str) -> Eqn:
    """An equation as if it was traced under one more scope."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(scope)))


@functools.cache
def _name_jaxpr() -> Jaxpr:
    """A program of one ``checkpoint_name``, as a template, whatever ``jax_remat3`` says."""
    bind = functools.partial(primitives.name_p.bind, name="")
    return open_jaxpr(jax.make_jaxpr(bind)(np.float32(0)))


def _name_equation() -> Eqn:
    return _name_jaxpr().eqns[0]


def answer(
    policy: Callable[..., Any], primitive: str, avals: Sequence[Any], params: Mapping[str, Any]
) -> str:
    """What a ``jax.checkpoint`` policy says of an equation: "save", "offload" or "recompute".

    Args:
        policy: The policy.
        primitive: Name of the primitive.
        avals: Shapes of its operands.
        params: Its parameters.
    """
    asked = getattr(primitives, f"{primitive.replace('-', '_')}_p", None)
    asked = SimpleNamespace(name=primitive) if asked is None else asked
    said = policy(asked, *avals, **params)
    kinds = {"bool": "save" if said else "recompute", "SaveableType": "save"}
    return {**kinds, "Offloadable": "offload"}.get(type(said).__name__, "recompute")


def named_value(eqn: Eqn) -> str | None:
    """The name that a ``checkpoint_name`` equation gives; None for any other equation."""
    if eqn.primitive is primitives.name_p:
        return eqn.params["name"]
    given = eqn.params.get("_prim")  # with jax_remat3 on
    is_name = type(given).__name__ in ("CheckpointName", "CheckpointNameFwd")
    return given.name if is_name else None


def plain(eqn: Eqn) -> Eqn:
    """The equation; a ``checkpoint_name`` made with ``jax_remat3`` on as it is made with it off."""
    name = named_value(eqn)
    if name is None or eqn.primitive is primitives.name_p:
        return eqn
    return eqn.replace(primitive=primitives.name_p, params={"name": name})


def name_equation(source: Var, target: Var, name: str, like: Eqn) -> Eqn:
    """``target = checkpoint_name(source, name)``, at the source line of ``like``."""
    return _from_template(_name_equation(), [source], target, like, name=name)


def renamed(eqn: Eqn, name: str) -> Eqn:
    """A ``checkpoint_name`` equation with another name."""
    return eqn.replace(params={**eqn.params, "name": name})


@functools.cache
def _barrier_equation() -> Eqn:
    barrier = jax.make_jaxpr(jax.lax.optimization_barrier)(np.float32(0))
    return open_jaxpr(barrier).eqns[0]


def barrier_equation(source: Var, target: Var, like: Eqn) -> Eqn:
    """``target = optimization_barrier(source)``, at the source line of ``like``."""
    return _from_template(_barrier_equation(), [source], target, like)


def is_complex(var: Var) -> bool:
    """Whether a variable holds complex numbers."""
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, np.complexfloating)


@functools.cache
def _complex_equations(dtype: Any) -> Sequence[Eqn]:
    """Equations that take a complex value apart and put it together, as templates."""

    def again(x: Any) -> Any:
        return jax.lax.complex(jax.lax.real(x), jax.lax.imag(x))

    return open_jaxpr(jax.make_jaxpr(again)(np.zeros((), dtype))).eqns


def part_equations(source: Var, like: Eqn) -> list[Eqn]:
    """The real and the imaginary part of a complex value, at the source line of ``like``."""
    parts = _complex_equations(source.aval.dtype)[:2]
    avals = [source.aval.update(dtype=part.outvars[0].aval.dtype) for part in parts]
    return [
        _from_template(part, [source], new_var(aval), like)
        for part, aval in zip(parts, avals, strict=True)
    ]


def complex_equation(parts: Sequence[Var], target: Var, like: Eqn) -> Eqn:
    """``target = complex(*parts)``, at the source line of ``like``."""
    return _from_template(_complex_equations(target.aval.dtype)[2], parts, target, like)


def _from_template(
    template: Eqn, sources: Sequence[Var], target: Var, like: Eqn, **params: Any
) -> Eqn:
    """The equation ``template`` for other variables, at the source line of ``like``."""
    return like.replace(
        primitive=template.primitive,
        params={**template.params, **params},
        invars=list(sources),
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


def inline(closed: Jaxpr) -> Jaxpr:
    """The program with its calls replaced by their bodies, shielded recompute left as it is."""
    eqns: list[Eqn] = []
    became: dict[Var, Atom] = {}
    new_consts: dict[Var, Any] = {}

    def now(atom: Atom) -> Atom:
        return became.get(atom, atom) if is_var(atom) else atom

    def visit(inner: Sequence[Eqn]) -> None:
        for eqn in inner:
            if may_inline(eqn) and not is_shielded(eqn):
                call(eqn)
                continue
            outvars = [new_var(v.aval) if is_var(v) else v for v in eqn.outvars]
            eqns.append(plain(eqn).replace(invars=[now(v) for v in eqn.invars], outvars=outvars))
            became.update(zip(eqn.outvars, outvars, strict=True))

    def call(eqn: Eqn) -> None:
        body = subjaxpr(eqn)
        inner = open_jaxpr(body)
        for var, value in zip(inner.constvars, consts_of(body), strict=True):
            became[var] = new_var(var.aval)
            new_consts[became[var]] = value
        became.update(zip(inner.invars, map(now, eqn.invars), strict=True))
        visit(inner.eqns)
        became.update(zip(eqn.outvars, map(now, inner.outvars), strict=True))

    inner = open_jaxpr(closed)
    visit(inner.eqns)
    return rebuild(closed, eqns, [now(v) for v in inner.outvars], new_consts)


def single(eqn: Eqn) -> Jaxpr:
    """A program of one equation: its inputs are the equation's variables, each once."""
    return program_of([eqn], [v for v in eqn.outvars if is_var(v)])


def program_of(eqns: Sequence[Eqn], outvars: Sequence[Var]) -> Jaxpr:
    """A program of equations, those left out that its results do not depend on.

    Args:
        eqns: The equations, in order.
        outvars: The results; without any all equations stay.

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
    made = {v for eqn in kept for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in kept for v in eqn.invars if is_var(v) and v not in made)
    effects = {effect for eqn in kept for effect in eqn.effects}
    names = _name_jaxpr().debug_info.with_unknown_names()
    return core.ClosedJaxpr(core.Jaxpr([], list(read), list(outvars), kept, effects, names), [])


def on_host(aval: Any) -> bool:
    """Whether a value lives in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def has_explicit_axes(aval: Any) -> bool:
    """Whether the type of a value says how it is cut over the axes of a mesh."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and jax.sharding.AxisType.Explicit in (mesh.axis_types or ())
