"""Regions found in the program itself: for a step in which nothing is marked with ``jdelta.remat``.

While such a step is traced, every function that it differentiates is staged first, cut into parts
(``cut.py``), and evaluated again with each part as a region. The bodies of large loops, and
branches that multiply, are cut likewise. What the user put a ``jax.checkpoint`` around
(``nn.remat``, ``nnx.remat``) is a region as it is. So everything else sees a step that was marked
by hand. What has to happen once (an ``io_callback``, a write to a mutable ref) is in no region: it
stays where it is, between regions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var
from jdelta._src.program.scan import Scan
from jdelta._src.regions.cut import (
    SMALL,
    Cuts,
    bytes_held,
    cut_into_regions,
    has_products,
    loss_begins,
)
from jdelta._src.regions.head_pieces import in_pieces, is_in_pieces
from jdelta._src.regions.layer_groups import grouped
from jdelta._src.regions.modules import ClosedOver, Weight, module_paths, with_modules
from jdelta._src.regions.region import Session, inside_region, is_inside, region
from jdelta._src.regions.region_names import UNNAMED, Named, named

LOOP_SHARE = 0.2
"""Part of what a program holds from which on a loop's body is cut, and is no part of a region."""


@contextlib.contextmanager
def tracing(session: Session, *args: Any) -> Generator[None]:
    """Trace a step for a session: its regions found and its loops grouped, if the session says.

    Args:
        session: The session.
        *args: The step's arguments as they are traced, which tell the modules of those weights
            that a differentiated function closes over.
    """
    with (
        _jax.session_context(session),
        _jax.VJP.replaced(_differentiated),
        _jax.LINEARIZE.replaced(_differentiated),
        _jax.SCAN.replaced(grouped),
    ):
        session.arguments = ClosedOver(args)
        try:
            yield
        finally:
            session.arguments = ClosedOver()  # holds no tracers after their trace


def _differentiated(
    vjp: Callable[..., Any], fun: Callable[..., Any], *primals: Any, **options: Any
) -> Any:
    session: Session | None = _jax.current_session()
    if session is not None:
        session.gradients += 1
    return vjp(with_regions(fun), *primals, **options)


def with_regions(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its parts as regions; the outermost differentiated one only.

    Where regions are marked, it is as it is, but for a head in pieces.
    """
    session: Session | None = _jax.current_session()
    if session is None or is_inside() or not (session.automatic or session.grouping.pieces):
        return fun

    @functools.wraps(fun)
    def rewritten(*args: Any) -> Any:
        static: list[Any] = []

        def arrays_only(*args: Any) -> list[Any]:
            leaves, tree = jax.tree.flatten(fun(*args))
            static[:] = [tree, [None if _jax.is_array(x) else (x,) for x in leaves]]
            return [x for x in leaves if _jax.is_array(x)]

        with inside_region() if session.automatic else contextlib.nullcontext():
            run = _jax.outside_of(arrays_only) if session.outside else arrays_only
            closed, _ = _jax.stage(run, *args)
        program = _jax.inline(closed, _is_marked)
        if session.grouping.pieces:
            program = in_pieces(program, session.grouping.pieces, _is_marked)
        leaves = jax.tree.leaves(args)
        if session.automatic:
            weights = [*session.weights(_jax.consts_of(program)), *_trained(args)]
            arrays = iter(_evaluate(with_modules(program, weights), leaves))
        else:
            arrays = iter(_jax.evaluate(program, *leaves))
        tree, others = static
        return jax.tree.unflatten(tree, [x[0] if x else next(arrays) for x in others])

    return rewritten


def _trained(args: Any) -> list[Weight]:
    """The weights that a function is differentiated with respect to."""
    return [Weight(path) for path in module_paths(args, depth=1)]


def _evaluate(
    program: Jaxpr, args: Sequence[Any], trips: int = 1, *, is_inner: bool = False
) -> list[Any]:
    """Evaluate a program with its parts as regions.

    Args:
        program: The program, calls inlined.
        args: Its arguments.
        trips: How often it runs in the loop around it.
        is_inner: Whether it is the body of a loop, or a branch.
    """
    inner = _jax.open_jaxpr(program)
    env: _jax.Env = dict(zip(inner.constvars, _jax.consts_of(program), strict=True))
    env.update(zip(inner.invars, args, strict=True))
    ends_in_loss = not is_inner and _is_loss(inner)
    begin = loss_begins(inner.eqns) if ends_in_loss else len(inner.eqns)
    parts = list(_parts(inner.eqns[:begin], trips, is_model=ends_in_loss))
    sizes = [sum(bytes_held(part.eqns)) for part in parts]
    least = SMALL * max(sizes, default=0.0)
    loops = [i for i, part in enumerate(parts) if part.is_cut and _is_scan(part.eqns[0])]
    runs = [i for i, part in enumerate(parts) if not part.is_apart]
    names = dict(zip(runs, named([parts[i].eqns for i in runs]), strict=True))
    marked = {i for i in runs if _is_marked(parts[i].eqns[0])}
    regions = {i for i in runs if sizes[i] > least} | marked
    if ends_in_loss and loops and runs and runs[-1] > loops[-1] and runs[-1] not in marked:
        regions.discard(runs[-1])  # its backward pass is next: what it makes is at hand
    parts += [_Part([eqn], is_apart=True) for eqn in inner.eqns[begin:]]
    done = 0
    for index, part in enumerate(parts):
        done += len(part.eqns)
        if part.is_cut:
            (eqn,) = part.eqns
            results = _loop(eqn, env) if _is_scan(eqn) else _branches(eqn, env, trips)
            env.update(zip(eqn.outvars, results, strict=True))
        else:
            one = names.get(index) or Named(UNNAMED, part.eqns)
            _evaluate_part(one, _read_later(inner, done), env, is_region=index in regions)
    return _jax.read(env, inner.outvars)


@dataclass(frozen=True)
class _Part:
    """A run of equations that can be a region, or an equation that is in none.

    Attributes:
        eqns: The equations, in order.
        is_cut: Whether it has parts of its own: a loop whose body is cut, or a choice of branches.
        is_apart: Whether it can be no region: such an equation, or what has to happen once.
    """

    eqns: Sequence[Eqn]
    is_cut: bool = False
    is_apart: bool = False


def _parts(eqns: Sequence[Eqn], trips: int, *, is_model: bool) -> Iterator[_Part]:
    """A program's parts, in order; ``is_model`` if they are all that is in front of a loss."""
    session: Session | None = _jax.current_session()
    best = session.grouping.cuts if session else Cuts.AT_ONCE
    sizes = bytes_held(eqns)
    large = LOOP_SHARE * sum(sizes)
    begin = 0
    for end, eqn in enumerate([*eqns, None]):
        is_cut = eqn is not None and _is_cut(eqn, is_large=sizes[end] > large)
        is_apart = eqn is None or is_cut or _jax.happens_once(eqn) or is_in_pieces(eqn)
        is_alone = eqn is None or is_apart or _is_marked(eqn)
        if is_alone and begin < end:
            is_whole = is_model and end - begin == len(eqns)
            for run in cut_into_regions(eqns[begin:end], trips, is_whole=is_whole, best=best):
                yield _Part(eqns[begin + run.start : begin + run.stop])
        if is_alone and eqn is not None:
            yield _Part([eqn], is_cut, is_apart)
        begin = end + 1 if is_alone else begin


def _is_scan(eqn: Eqn) -> bool:
    return eqn.primitive.name == "scan"


def _is_cut(eqn: Eqn, *, is_large: bool) -> bool:
    """Whether there are regions in an equation: in a loop, or in branches that multiply.

    What a region around branches computes again, a value for each of them, is all there at once.
    """
    if eqn.primitive.name == "cond":
        return any(map(_is_worth_cutting, eqn.params["branches"])) and not _jax.happens_once(eqn)
    return _is_scan(eqn) and (is_large or _has_checkpoints(eqn))


def _is_marked(eqn: Eqn) -> bool:
    """Whether the user marked a region: one of jdelta's, or a ``jax.checkpoint``.

    Not a ``jax.checkpoint`` around a loop of others.
    """
    if eqn.primitive.name == _jax.REGION:
        return True
    if not _jax.is_checkpoint(eqn) or _jax.happens_once(eqn):
        return False
    inside = _jax.equations(_jax.subjaxpr(eqn))
    return not any(map(_has_checkpoints, filter(_is_scan, inside)))


def _has_checkpoints(loop: Eqn) -> bool:
    return any(map(_jax.is_checkpoint, _jax.equations(loop.params["jaxpr"])))


def _is_worth_cutting(branch: Jaxpr) -> bool:
    """Whether a branch multiplies, or the user marked a region in it."""
    return any(has_products(e) or _jax.is_checkpoint(e) for e in _jax.equations(branch))


def _is_loss(inner: Jaxpr) -> bool:
    """Whether a program ends in what is differentiated, not in the middle of a model."""
    return bool(inner.outvars) and inner.outvars[0].aval.shape == ()


def _read_later(inner: Jaxpr, stop: int) -> set[Var]:
    read = {v for eqn in inner.eqns[stop:] for v in eqn.invars if _jax.is_var(v)}
    return read | {v for v in inner.outvars if _jax.is_var(v)}


def _evaluate_part(part: Named, later: set[Var], env: _jax.Env, *, is_region: bool) -> None:
    """Evaluate a run of equations, as a region if ``is_region``.

    What leaves a region is differentiable: integers and keys are computed beside it, of what leaves
    it where they can be, and nothing is printed a second time there.
    """
    eqns = part.eqns
    out = [v for eqn in eqns for v in eqn.outvars if _jax.is_var(v) and v in later]
    moving = [v for v in out if is_region and _jax.is_inexact(v)]
    if moving:
        program = _jax.inline(_jax.program_of(eqns, moving))
        run = region(functools.partial(_jax.evaluate, program), part.base, is_marked=False)
        inputs = _jax.read(env, _jax.open_jaxpr(program).invars)
        env.update(zip(moving, run(*inputs), strict=True))
        out = [v for v in out if v not in env]
    if out or not moving:
        if moving:
            others = (eqn for eqn in eqns if not all(v in moving for v in eqn.outvars))
            eqns = _jax.without_debugging(list(others))
        program = _jax.program_of(eqns, out)
        inputs = _jax.read(env, _jax.open_jaxpr(program).invars)
        inputs = [lax.stop_gradient(x) for x in inputs] if is_region else inputs
        env.update(zip(out, _jax.evaluate(program, *inputs), strict=True))


def _loop(eqn: Eqn, env: _jax.Env) -> list[Any]:
    """Evaluate a ``scan`` whose body has its parts as regions."""
    loop = Scan.of(eqn, _jax.read(env, eqn.invars))
    body = _jax.inline(eqn.params["jaxpr"], _is_marked)

    def step(carry: Any, rows: Any) -> Any:
        outputs = _evaluate(body, [*loop.consts, *carry, *rows], loop.length, is_inner=True)
        return outputs[: loop.n_carry], outputs[loop.n_carry :]

    carry, stacked = loop.scan(step, loop.carry, loop.xs)
    return [*carry, *stacked]


def _branches(eqn: Eqn, env: _jax.Env, trips: int) -> list[Any]:
    """Evaluate a ``cond`` whose branches have their parts as regions."""

    def run(branch: Jaxpr, *args: Any) -> list[Any]:
        if not _is_worth_cutting(branch):
            return _jax.evaluate(branch, *args)
        return _evaluate(_jax.inline(branch, _is_marked), args, trips, is_inner=True)

    index, *args = _jax.read(env, eqn.invars)
    return lax.switch(index, [functools.partial(run, b) for b in eqn.params["branches"]], *args)
