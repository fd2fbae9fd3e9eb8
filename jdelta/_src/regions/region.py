"""Regions, and the session that tells them what to do while tracing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jdelta._src import _jax
from jdelta._src._jax.region_primitive import cotangent_primitive, region_primitive
from jdelta._src.errors import TraceError
from jdelta._src.program.hlo_names import mark
from jdelta._src.program.names import RegionName, add_names, scope_path
from jdelta._src.regions.cut import Cuts
from jdelta._src.regions.modules import ClosedOver, Weight, module_paths, with_modules
from jdelta._src.regions.random_bits import with_written_bits


@runtime_checkable
class RegionPolicy(Protocol):
    """What a region needs of a plan: a ``jax.checkpoint`` policy, and how to emit the region."""

    @property
    def writes_bits(self) -> bool:
        """Whether random bits are to be written to memory before they are read."""
        ...

    def __call__(self, prim: Any, /, *avals: Any, **params: Any) -> Any: ...

    def prevents_cse(self, region: str) -> bool:
        """Whether recompute in ``region`` must be shielded from CSE."""
        ...

    def check_before_jvp(self, region: str) -> None:
        """Refuse to decide about a region of which only the plan knows what is differentiated."""
        ...

    def check_reaches(self, block: str) -> None:
        """Refuse to be the policy of a ``jax.checkpoint`` with no region in it: see ``_look``."""
        ...


@dataclass(frozen=True)
class Grouping:
    """How loops over layers are run (``layer_groups.py``), and a step is cut (``cut.py``).

    Attributes:
        layers: How many layers one iteration runs.
        nested: Whether these are a loop in the loop, under one more ``jax.checkpoint`` that keeps
            what enters the first of them; else each is a region of its own.
        cuts: Where a step in which nothing is marked is cut into regions.
        states: How many of the states that a long loop carries are kept at a time, the others
            computed again from those (``long_loops.py``); 0 for what enters each iteration.
        pieces: In how many pieces of tokens, at most, the head of the model and its loss are
            computed (``head_pieces.py``); 0 for all tokens at once.
    """

    layers: int
    nested: bool = False
    cuts: Cuts = Cuts.AT_ONCE
    states: int = 0
    pieces: int = 0

    @property
    def is_foretold(self) -> bool:
        """Whether simulated peaks of the loops, run so, are believed."""
        return not self.nested and not self.states


AS_WRITTEN = Grouping(1)


class MarkedError(BaseException):
    """The user marked a region: raised in a session that is to find them.

    Not an ``Exception``, since it passes through the user's own code.
    """


class Session:
    """One trace of a step: recording (no policy), or emitting a plan (its policy).

    A region that is not a Flax module has only its function's name; its calls are told apart by
    counting them in the order of the trace, which is the same on every trace and every process.
    A session is used for one trace only: it is part of JAX's trace cache keys by identity.

    Attributes:
        policy: What every region of the step is to do; None records the plain step.
        aliases: From a region's name while tracing to its name in the plan. Traces that JAX
            throws away (``nn.scan`` makes one) count calls too, so the two may differ; they have
            no name in the plan.
        automatic: Whether the step has no marks, so that its regions are found in the program.
        grouping: How its loops over layers are to be run.
        outside: Whether what does not depend on the arguments of a differentiated function is
            computed outside of it, since some of it leaves the function by a closure.
        until_marked: Whether it ends where the user has marked a region.
        arguments: The modules of the step's arguments.
        called: Names of the regions called so far, while tracing.
        loops: How many loops with regions in them were traced so far.
        gradients: How many functions were differentiated so far.
        derivatives: For each differentiated region its JVP with names, and how many of the inputs
            of that are no tangents.
        reached: For each region that cotangents come back to the numbers of its results with one.
        partly: Names of the regions of which some inexact argument is not differentiated.
    """

    def __init__(
        self,
        policy: RegionPolicy | None = None,
        aliases: Mapping[str, str] | None = None,
        *,
        automatic: bool = False,
        grouping: Grouping = AS_WRITTEN,
        outside: bool = False,
        until_marked: bool = False,
    ):
        self.policy = policy
        self.aliases = aliases or {}
        self.automatic = automatic
        self.grouping = grouping
        self.outside = outside
        self.until_marked = until_marked
        self.arguments = ClosedOver()
        self.called: set[str] = set()
        self.loops = 0
        self.gradients = 0
        self.derivatives: dict[str, tuple[Any, int]] = {}
        self.reached: defaultdict[str, set[int]] = defaultdict(set)
        self.partly: set[str] = set()
        self._calls: Counter[str] = Counter()

    def weights(self, values: Sequence[Any]) -> list[Weight | None]:
        """For each value what weight of the step's arguments it is."""
        return [self.arguments[value] for value in values]

    def region(self, base: str) -> tuple[str, RegionPolicy | None]:
        """The name of the next call of region ``base``, and the policy that it is to follow.

        None where the plan has no such call: it left nothing in the step that was recorded, as
        ``jax.eval_shape`` of a gradient leaves nothing, and will leave nothing in this one
        (``passes/emit.py`` looks).
        """
        traced = f"{base}#{self._calls[base]}"
        self._calls[base] += 1
        self.called.add(traced)
        planned = not self.aliases or traced in self.aliases
        return self.aliases.get(traced, traced), self.policy if planned else None


_inside: ContextVar[bool] = ContextVar("_inside", default=False)
"""Whether a region is being traced: one inside another is part of the outer one."""


def is_inside() -> bool:
    """Whether what is being traced is part of a region already."""
    return _inside.get()


@contextlib.contextmanager
def inside_region() -> Generator[None]:
    """Trace something that is, or will be, a part of a region."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def region(
    fun: Callable[..., Any],
    base: str,
    policy: RegionPolicy | None = None,
    prevent_cse: bool | None = None,
    *,
    is_marked: bool = True,
) -> Callable[..., Any]:
    """Wrap a pure function so that its residuals carry names, and checkpoint it under a plan.

    Args:
        fun: A pure function of pytrees; leaves that are not arrays stay static.
        base: Name of the region.
        policy: The plan to follow; None follows the session's, if there is one.
        prevent_cse: As in ``jax.checkpoint``; None follows the plan.
        is_marked: Whether the user marked it; else it was found in the program.

    Returns:
        A function with the signature of ``fun`` and equal results and derivatives.
    """

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        session: Session | None = _jax.current_session()
        if is_marked and session is not None and session.until_marked:
            raise MarkedError
        if _inside.get():
            return fun(*args, **kwargs)
        name, planned = session.region(base) if session else (base, None)
        chosen = policy or planned
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if _jax.is_array(leaf)]
        paths = zip(leaves, module_paths((args, kwargs), depth=2), strict=True)
        weights = [Weight(path) for leaf, path in paths if _jax.is_array(leaf)]

        def call(*arrays: Any) -> Any:
            values = iter(arrays)
            filled = [next(values) if _jax.is_array(leaf) else leaf for leaf in leaves]
            args, kwargs = jax.tree.unflatten(tree, filled)
            return fun(*args, **kwargs)

        with inside_region():
            closed, out_tree = _jax.stage(call, *arrays)
        if once := _jax.first_once(closed):
            if session or chosen:  # else nothing is computed again
                raise _not_again(name, once)
            return jax.tree.unflatten(out_tree, _jax.evaluate(closed, *arrays))
        consts = _jax.consts_of(closed)
        weights = [*(session.weights(consts) if session else [None] * len(consts)), *weights]
        run: Callable[..., Any] = functools.partial(
            _bind,
            jaxpr=with_modules(_jax.hoist_consts(closed), weights),
            name=name,
            base=base,
            session=session,
            written=chosen is not None and chosen.writes_bits,
        )
        if chosen is not None:
            shield = chosen.prevents_cse(name) if prevent_cse is None else prevent_cse
            run = _jax.checkpointed(run, chosen, prevent_cse=shield)
        outputs = run(*consts, *arrays)
        return jax.tree.unflatten(out_tree, outputs)

    return wrapped


def _not_again(region: str, eqn: _jax.Eqn) -> TraceError:
    """The error of a region in which something has to happen once."""
    place, what = _jax.place_of(eqn), eqn.primitive.name
    return TraceError(
        f"The region {region.partition('#')[0]!r} has {what} in it"
        f"{f' at {place}' if place else ''}: that must happen once, and a region may be computed "
        "again. Move it out of the region (return what it needs, and do it there), or mark regions "
        "with jdelta.remat that leave it out."
    )


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    moving: Sequence[int],
    *,
    jaxpr: Any,
    name: str,
    base: str,
    session: Session | None,
    written: bool,
) -> tuple[Sequence[Any], Sequence[Any]]:
    """The derivative of a region, its residuals named.

    Args:
        primals: Arguments of the region.
        tangents: Their tangents, those that are not zero.
        moving: The numbers of the arguments that have one.
        jaxpr: The region.
        name: Its name.
        base: The name without the number of the call.
        session: What to tell about the derivative.
        written: Whether random bits are written to memory before they are read.
    """

    def jvp(xs: Sequence[Any], ts: Sequence[Any]) -> Any:
        of_moving = _jax.of_some(functools.partial(_jax.evaluate, jaxpr), xs, moving)
        return jax.jvp(of_moving, [xs[i] for i in moving], list(ts))

    with inside_region():  # what the forward rule of a custom_vjp differentiates is part of it
        closed, tree = _jax.stage(jvp, list(primals), list(tangents))
    once = _jax.first_once(closed)
    if once is not None and session:  # in the forward rule of a custom_vjp
        raise _not_again(name, once)
    tangent = [False] * len(primals) + [True] * len(tangents)
    named = add_names(closed, tangent, name, base)
    if session:
        session.derivatives[name] = named, len(primals)
        inexact = sum(jnp.issubdtype(x.dtype, jnp.inexact) for x in primals)
        session.partly.update([name] if len(moving) < inexact else [])
    program = with_written_bits(named) if written else named
    is_recorded = session is not None and session.policy is None
    scope = jax.named_scope(mark(name)) if is_recorded else contextlib.nullcontext()
    with scope:
        results, moved = jax.tree.unflatten(tree, _jax.evaluate(program, *primals, *tangents))
    if is_recorded:
        watched = functools.partial(_watched, session=session, name=name)
        moved = [
            t if t.dtype == jax.dtypes.float0 else watched(t, number=i) for i, t in enumerate(moved)
        ]
    return results, moved


def _shield(policy: Any, region: str) -> bool:
    """Whether a ``jax.checkpoint`` with this policy around a region is shielded from CSE there."""
    if plan := plan_in(policy):
        plan.check_before_jvp(region)
        return plan.prevents_cse(region)
    return True


def _look(policy: Any, body: Any) -> None:
    """Refuse a plan as the policy of a ``jax.checkpoint`` where it would decide nothing."""
    if not _jax.open_jaxpr(body).eqns or _has_region(body):
        return
    if plan := plan_in(policy):
        plan.check_reaches(_described(body))


def plan_in(policy: Any) -> RegionPolicy | None:
    """The plan that is a policy, or that a function calls which is one."""
    while isinstance(policy, functools.partial):
        policy = policy.func
    policy = policy.__self__ if inspect.ismethod(policy) else policy
    if isinstance(policy, RegionPolicy):
        return policy
    if not inspect.isfunction(policy):
        return None
    called = inspect.getclosurevars(policy)
    read = itertools.chain(called.nonlocals.values(), called.globals.values())
    return next((x for x in read if isinstance(x, RegionPolicy)), None)


def _has_region(body: Any) -> bool:
    return any(
        eqn.primitive.name == _jax.REGION
        or isinstance(_jax.named_value(eqn), RegionName)
        or any(map(_has_region, _jax.subjaxprs(eqn)))
        for eqn in _jax.open_jaxpr(body).eqns
    )


def _described(body: Any) -> str:
    """The scopes that a program is in, and where it was written."""
    eqns = _jax.open_jaxpr(body).eqns
    paths = [path for eqn in eqns if (path := scope_path(_jax.name_stack(eqn)))]
    alike = itertools.takewhile(lambda scopes: len(set(scopes)) == 1, zip(*paths, strict=False))
    scopes = "/".join(same[0] for same in alike)
    place = next(filter(None, map(_jax.place_of, _jax.equations(body))), "")
    return " at ".join(filter(None, (scopes, place))) or "what it was given for"


def _reached(session: Session, name: str, number: int) -> None:
    session.reached[name].add(number)


_bind = region_primitive(_jvp, _shield)
_watched = cotangent_primitive(_reached)
_jax.watch_checkpoints(_look)
