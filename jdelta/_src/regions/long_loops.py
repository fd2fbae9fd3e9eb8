"""Long loops differentiated from few states: what a loop over time needs where nothing else fits.

A loop keeps what enters each of its iterations, at least: 10,000 states of 1 MiB are 10 GiB. Here
it keeps as many as it is told at a time, and runs again what is between them, by the schedule with
the fewest steps (``regions/binomial.py``). The backward pass is a loop over the iterations from the
last to the first. Each takes the last state kept before it, keeps some on the way, and is
differentiated by itself: what one iteration makes is in memory only then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr
from jdelta._src.program.hlo_names import mark
from jdelta._src.regions.binomial import Binomial, Turn
from jdelta._src.regions.region import Session, inside_region

LONG = 64
"""Iterations from which on a loop is long: one over time. Models have fewer layers."""

SCOPE = mark("from few states")
"""The scope of a backward pass that runs iterations again."""


def is_from_few_states(loop: Eqn) -> bool:
    """Whether a loop is the backward pass of a long one, which runs iterations again."""
    return loop.primitive.name == "scan" and SCOPE in _jax.name_stack(loop)


@dataclass(frozen=True)
class LongLoop:
    """How a long loop is run.

    Attributes:
        length: Its iterations.
        is_reversed: Whether the last row comes first.
        kept: States that are kept at a time, the first one too.
    """

    length: int
    is_reversed: bool
    kept: int

    @functools.cached_property
    def turns(self) -> tuple[Turn, ...]:
        """What is done before each iteration is differentiated, the last one first."""
        return Binomial(self.length, self.kept).turns

    def row(self, step: Any) -> Any:
        """The row of an iteration."""
        return self.length - 1 - step if self.is_reversed else step

    def slots(self) -> np.ndarray[Any, Any]:
        """Where the forward pass keeps what enters each iteration, by row.

        What is not kept goes to one slot more, ``kept``.
        """
        slots = np.full(self.length, self.kept, np.int32)
        slots[0] = 0
        for step, slot in self.turns[0].keep:
            slots[step] = slot
        return slots[::-1] if self.is_reversed else slots

    def table(self) -> list[np.ndarray[Any, Any]]:
        """What the backward pass does for each iteration, by row.

        The iteration; the slot of the state that is begun from, and before which iteration that
        was the state; and which states it keeps: the number of the first, and of the one after.
        """
        first, *others = self.turns
        last = int(self.slots()[self.row(first.step)])  # what enters the last one is there
        lines = [(first.step, last, first.step, 0, 0)]
        for turn in others:
            before = lines[-1][-1]
            lines.append((turn.step, turn.slot, turn.begin, before, before + len(turn.keep)))
        lines.sort(key=lambda line: self.row(line[0]))
        return list(np.array(lines, np.int32).T)

    def keeps(self) -> list[np.ndarray[Any, Any]]:
        """Before which iterations the backward pass keeps states, and in which slots."""
        pairs = [pair for turn in self.turns[1:] for pair in turn.keep]
        return list(np.array(pairs or [(0, 0)], np.int32).T)


def from_few_states(
    scan: Callable[..., Any], f: Callable[..., Any], init: Any, xs: Any, loop: LongLoop
) -> tuple[Any, Any] | None:
    """The results of ``lax.scan``, differentiated from few states.

    Args:
        scan: The plain ``lax.scan``.
        f: The body, as there, like what follows.
        init: The carry before the first iteration.
        xs: What each iteration has a row of.
        loop: How it is run.

    Returns:
        None where the loop cannot be run so: something in it must happen once, it differentiates
        something itself, or its rows are on the host.
    """
    if any(_jax.on_host(jax.typeof(x)) for x in jax.tree.leaves(xs)):
        return None
    trial = Session()
    row = jax.eval_shape(lambda xs: jax.tree.map(lambda x: x[0], xs), xs)
    with inside_region(), _jax.session_context(trial):
        carry, stacks = jax.eval_shape(functools.partial(scan, f, length=loop.length), init, xs)
        types = jax.tree.leaves(carry)

        def flat(carry: Any, row: Any) -> list[Any]:
            carry, results = f(carry, row)
            return [*map(as_carried, jax.tree.leaves(carry), types), *jax.tree.leaves(results)]

        closed, _ = _jax.stage(flat, carry, row)
    if trial.gradients or _jax.happens_once(_jax.open_jaxpr(closed)):
        return None
    consts = _jax.consts_of(closed)
    begin = [jnp.asarray(x) for x in jax.tree.leaves(jax.tree.map(as_carried, init, carry))]
    run = _Run(_jax.hoist_consts(closed), len(consts), len(begin), loop, scan)
    ends, rows = run.split(run.differentiable()(*consts, *begin, *jax.tree.leaves(xs)))
    return jax.tree.unflatten(jax.tree.structure(carry), ends), jax.tree.unflatten(
        jax.tree.structure(stacks), rows
    )


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Moving:
    """Which arguments have a derivative: ``(True, False)``."""

    args: tuple[bool, ...]


@dataclass(frozen=True)
class _Run:
    """A loop that is run, forward and backward; its values are flat lists.

    Attributes:
        body: What an iteration computes of constants, the carry and a row of each stack: the next
            carry, and a row of each result.
        n_consts: Number of the constants.
        n_carry: Number of the values that it carries.
        loop: How it is run.
        scan: The plain ``lax.scan``.
    """

    body: Jaxpr
    n_consts: int
    n_carry: int
    loop: LongLoop
    scan: Callable[..., Any]

    def differentiable(self) -> Callable[..., list[Any]]:
        """The function of constants, the first carry and stacks that gives the results."""

        @jax.custom_vjp
        def results(*args: Any) -> list[Any]:
            return self.plain(*args)

        def forward(*args: Any) -> tuple[list[Any], Any]:
            values = [arg.value for arg in args]
            moving = tuple(arg.perturbed and _is_real(arg.value) for arg in args)
            outputs, slots = self.forward(values)
            return outputs, (slots, values, _Moving(moving))

        def backward(kept: Any, cotangents: list[Any]) -> tuple[Any, ...]:
            slots, values, moving = kept
            with inside_region(), jax.named_scope(SCOPE):
                return self.backward(slots, values, moving.args, cotangents)

        results.defvjp(forward, backward, symbolic_zeros=True)
        return results

    def plain(self, *args: Any) -> list[Any]:
        """The results where nothing is differentiated."""
        consts, carry, rows = self.parts(args)

        def step(carry: Any, row: Any) -> Any:
            return self.split(_jax.evaluate(self.body, *consts, *carry, *row))

        length, is_reversed = self.loop.length, self.loop.is_reversed
        carry, stacks = self.scan(step, carry, rows, length, is_reversed)
        return [*carry, *stacks]

    def forward(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results, and the states that are kept."""
        consts, carry, rows = self.parts(args)
        slots = [jnp.broadcast_to(x, (self.loop.kept + 1, *x.shape)) for x in carry]

        def step(state: Any, at: Any) -> Any:
            (carry, slots), (slot, row) = state, at
            slots = _put(slots, slot, carry)
            carry, results = self.split(_jax.evaluate(self.body, *consts, *carry, *row))
            return (carry, slots), results

        each = (jnp.asarray(self.loop.slots()), rows)
        length, is_reversed = self.loop.length, self.loop.is_reversed
        (carry, slots), stacks = self.scan(step, (carry, slots), each, length, is_reversed)
        return [*carry, *stacks], slots

    def backward(
        self,
        slots: list[Any],
        args: Sequence[Any],
        moving: Sequence[bool],
        cotangents: Sequence[Any],
    ) -> tuple[Any, ...]:
        """The cotangents of the arguments; None for those without.

        Args:
            slots: The states kept by the forward pass.
            args: Constants, the first carry and stacks.
            moving: Which of them have a derivative.
            cotangents: Those of the results.
        """
        consts, carry, rows = self.parts(args)
        of_consts, _, of_rows = self.parts(moving)
        which = [*of_consts, *map(_is_real, carry), *of_rows]
        ends, stacks = self.split(cotangents)
        places, numbers = map(jnp.asarray, self.loop.keeps())

        def rerun(step: Any, carry: Any) -> Any:
            row = _at(rows, self.loop.row(step))
            return self.split(_jax.evaluate(self.body, *consts, *carry, *row))[0]

        def keep(number: Any, state: Any) -> Any:
            carry, begin, slots = state
            carry = lax.fori_loop(begin, places[number], rerun, carry)
            return carry, places[number], _put(slots, numbers[number], carry)

        def turn(state: Any, at: Any) -> Any:
            slots, ends, sums = state
            (step, slot, begin, first, last), row, of_results = at
            carry, begin, slots = lax.fori_loop(first, last, keep, (_at(slots, slot), begin, slots))
            carry = lax.fori_loop(begin, step, rerun, carry)
            pulled = self._pulled([*consts, *carry, *row], which, ends, of_results)
            added, ends, of_row = map(_present, self.parts(pulled))
            sums = [a + b for a, b in zip(sums, added, strict=True)]
            return (slots, ends, sums), of_row

        table = tuple(map(jnp.asarray, self.loop.table()))
        begun = (
            slots,
            [_filled(c, x) for c, x in zip(ends, carry, strict=True) if _is_real(x)],
            [jnp.zeros_like(x) for x, w in zip(consts, of_consts, strict=True) if w],
        )
        each = (table, rows, [None if _is_zero(stack) else stack for stack in stacks])
        backwards = not self.loop.is_reversed
        (_, ends, sums), stacked = self.scan(turn, begun, each, self.loop.length, backwards)
        values = iter([*sums, *ends, *stacked])
        return tuple(next(values) if w else None for w in which)

    def _pulled(
        self, args: Sequence[Any], which: Sequence[bool], ends: Sequence[Any], stacks: Sequence[Any]
    ) -> list[Any]:
        """The cotangents of one iteration's arguments; None for those without.

        Args:
            args: Constants, carry and rows.
            which: The arguments that have one.
            ends: The cotangents of the real values of the next carry.
            stacks: Those of the results; None for zeros.
        """

        def real_results(*args: Any) -> list[Any]:
            return list(filter(_is_real, _jax.evaluate(self.body, *args)))

        moving = [i for i, w in enumerate(which) if w]
        of_moving = _jax.of_some(real_results, args, moving)
        shapes = self.body.out_avals[self.n_carry :]
        rows = [_filled(c, s) for c, s in zip(stacks, shapes, strict=True) if _is_real(s)]
        _, pull = jax.vjp(of_moving, *(args[i] for i in moving))
        pulled = iter(pull([*ends, *rows]))
        return [next(pulled) if w else None for w in which]

    def parts(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Of what there is for each argument: constants, carry and stacks."""
        begin, end = self.n_consts, self.n_consts + self.n_carry
        return list(values[:begin]), list(values[begin:end]), list(values[end:])

    def split(self, results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Of what there is for each result: the carry, and what is stacked."""
        return list(results[: self.n_carry]), list(results[self.n_carry :])


def as_carried(x: Any, like: Any) -> Any:
    """A value of the carry in the type that the loop carries it in."""
    kind = jax.typeof(x)
    is_same = kind.dtype == like.dtype and not getattr(kind, "weak_type", False)
    return x if is_same else lax.convert_element_type(x, like.dtype)


def _is_real(value: Any) -> bool:
    """Whether a value, or its type, has a derivative."""
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero) or cotangent.dtype == jax.dtypes.float0


def _filled(cotangent: Any, like: Any) -> Any:
    """A cotangent as an array."""
    if cotangent is None or _is_zero(cotangent):
        return jnp.zeros(like.shape, like.dtype)
    return cotangent


def _present(values: Sequence[Any]) -> list[Any]:
    return [x for x in values if x is not None]


def _at(stacks: Sequence[Any], index: Any) -> list[Any]:
    return [lax.dynamic_index_in_dim(x, index, keepdims=False) for x in stacks]


def _put(stacks: Sequence[Any], index: Any, rows: Sequence[Any]) -> list[Any]:
    return [
        lax.dynamic_update_index_in_dim(x, row, index, 0)
        for x, row in zip(stacks, rows, strict=True)
    ]
