"""Loops in which one iteration runs several layers, so that these may have decisions of their own.

What a loop keeps of its body it keeps of every iteration: under ``lax.scan`` all layers are decided
alike. With some layers in an iteration every second (third, ...) layer is a region of its own. The
loop over half of the layers reads the same stacked weights, viewed in another shape; two loops, one
for each half, would need copies of them.

Layers that are in no loop when compiled (``unroll=True``, the rest of a loop that runs several in
an iteration) are evaluated one after the other, each with regions of its own: recompute in them has
to be shielded from CSE, and they may have decisions of their own too.

Where even what enters each layer does not fit, the layers of an iteration are a loop of their own,
of which only what enters the first is kept: nested checkpoints, for one more forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdelta._src import _jax
from jdelta._src.program.names import RegionName
from jdelta._src.regions.long_loops import LONG, LongLoop, as_carried, from_few_states
from jdelta._src.regions.region import RegionPolicy, Session, is_inside


def grouped(
    scan: Callable[..., Any],
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    **options: Any,
) -> Any:
    """``lax.scan`` with as many layers in an iteration as the session says, where that works.

    Args:
        scan: The plain ``lax.scan``.
        f: As there, like all that follows.
        init: The carry before the first layer.
        xs: What each layer has a row of.
        length: Number of layers; default: that of the rows.
        reverse: Whether the last layer comes first.
        unroll: Any but 1 leaves the loop as it is, but for layers that are in none when compiled.
        **options: Other arguments of ``lax.scan``.
    """
    session: Session | None = _jax.current_session()
    plain = functools.partial(scan, f, init, xs, length, reverse, unroll, **options)
    if session is None or is_inside():
        return plain()
    regions = len(session.called)
    count = len(jax.tree.leaves(xs)[0]) if length is None else length
    states = session.grouping.states
    if states and count >= LONG:
        loop = LongLoop(count, reverse, min(states, count))
        if (results := from_few_states(scan, f, init, xs, loop)) is not None:
            return results
    looped = _looped(count, unroll)
    if looped < count and (carried := _carried_by(plain, session)) is not None:
        inside, outside = _parts(xs, looped, count, reverse)
        carry, stacks = jax.tree.map(as_carried, init, carried), list[Any]()
        if looped:
            carry, ys = scan(f, carry, inside, looped, reverse, unroll, **options)
            stacks.append(ys)
            session.loops += len(session.called) > regions
        rows = _unstacked(outside, count - looped)
        carry, ys = _in_turn(f, carry, rows.__getitem__, len(rows), reverse)
        stacks.insert(0 if reverse else len(stacks), ys)
        return carry, jax.tree.map(lambda *ys: jnp.concatenate(ys), *stacks)
    if (
        unroll == 1
        and count > session.grouping.layers > 1
        and count % session.grouping.layers == 0
        and not any(_jax.on_host(jax.typeof(x)) for x in jax.tree.leaves(xs))  # TPUs reshape none
        and _is_stack(f, init, xs, session)
    ):
        views = jax.tree.map(lambda x: _split(x, session.grouping.layers), xs)
        several = _several(functools.partial(scan, **options), f, reverse, session)
        length = count // session.grouping.layers
        carry, ys = scan(several, init, views, length, reverse, **options)
        results = carry, jax.tree.map(lambda y: jnp.reshape(y, (count, *y.shape[2:])), ys)
    else:
        results = plain()
    session.loops += len(session.called) > regions
    return results


def _looped(count: int, unroll: int | bool) -> int:
    """How many layers are in a loop when compiled: a loop of one iteration is none."""
    together = (count if unroll else 1) if isinstance(unroll, bool) else unroll
    trips = count // max(1, together)
    return trips * together if trips > 1 else 0


def _carried_by(plain: Callable[[], Any], session: Session) -> Any:
    """What a loop carries in the end, if regions run in it; else None."""
    trial = Session(automatic=session.automatic)
    with _jax.session_context(trial):
        carried, _ = jax.eval_shape(plain)
    return carried if trial.called else None


def _parts(xs: Any, looped: int, count: int, reverse: bool) -> tuple[Any, Any]:
    """The rows of the layers in a loop and of those after it."""
    rest = count - looped
    inside, outside = (rest, count), (0, rest)
    if not reverse:
        inside, outside = (0, looped), (looped, count)

    def part(bounds: tuple[int, int]) -> Any:
        if bounds == (0, count):
            return xs
        return jax.tree.map(lambda x: lax.slice_in_dim(x, *bounds), xs)

    return part(inside), part(outside)


def _unstacked(rows: Any, count: int) -> list[Any]:
    """Each layer's rows. The gradient of a split is one stack; those of slices were ``count``."""

    def one_by_one(x: Any) -> list[Any]:
        if jnp.issubdtype(x.dtype, jnp.inexact) and not _jax.on_host(jax.typeof(x)):
            return [lax.squeeze(part, [0]) for part in lax.split(x, [1] * count)]
        return [lax.index_in_dim(x, i, keepdims=False) for i in range(count)]

    leaves, tree = jax.tree.flatten(rows)
    parts = [one_by_one(jnp.asarray(x)) for x in leaves]
    return [jax.tree.unflatten(tree, [part[i] for part in parts]) for i in range(count)]


def _in_turn(
    f: Callable[..., Any], carry: Any, row: Callable[[int], Any], count: int, reverse: bool
) -> tuple[Any, Any]:
    """Run layers one after the other, in no loop; ``row`` gives what each of them has."""
    outputs: list[Any] = [None] * count
    for i in reversed(range(count)) if reverse else range(count):
        carry, outputs[i] = f(carry, row(i))
    return carry, jax.tree.map(lambda *ys: jnp.stack(ys), *outputs)


def _is_stack(f: Callable[..., Any], init: Any, xs: Any, session: Session) -> bool:
    """Whether regions run in the loop's own body, and the gradient is taken outside of it.

    A loop over micro-batches keeps nothing from one to the next: there is nothing to decide. In one
    with something that has to happen once, layers must not be computed again together.
    """
    trial = Session(automatic=session.automatic)

    def one(carry: Any, xs: Any) -> Any:
        return f(carry, jax.tree.map(lambda x: x[0], xs))

    with _jax.session_context(trial):
        body, _ = _jax.stage(one, init, xs)
    nested = trial.loops or trial.gradients or _jax.happens_once(_jax.open_jaxpr(body))
    return bool(trial.called) and not nested


def _several(
    scan: Callable[..., Any], f: Callable[..., Any], reverse: bool, session: Session
) -> Callable[..., Any]:
    """The body of a loop that runs several layers in an iteration."""
    count, policy = session.grouping.layers, session.policy

    def nested(carry: Any, rows: Any) -> Any:
        return scan(f, carry, rows, count, reverse)

    def in_turn(carry: Any, rows: Any) -> Any:
        def row(i: int) -> Any:
            return jax.tree.map(lambda x: lax.index_in_dim(x, i, keepdims=False), rows)

        return _in_turn(f, carry, row, count, reverse)

    if not session.grouping.nested:
        return in_turn
    if policy is None:
        return nested
    planned = _WithoutInputs(policy, frozenset(session.aliases.values()))
    return _jax.checkpointed(nested, planned, prevent_cse=False)


@dataclass(frozen=True)
class _WithoutInputs:
    """A plan's policy, but that what enters a region is not kept.

    Attributes:
        policy: The policy.
        regions: What the plan has decided about. There may be others, of which nothing is left in
            the step (``Session.region``).
    """

    policy: RegionPolicy
    regions: frozenset[str]

    def __call__(self, prim: Any, /, *avals: Any, **params: Any) -> Any:
        name = params.get("name")
        if isinstance(name, RegionName) and (name.is_input or name.region not in self.regions):
            return False
        return self.policy(prim, *avals, **params)


def _split(x: Any, count: int) -> Any:
    return jnp.reshape(x, (len(x) // count, count, *x.shape[1:]))
