"""The head of a model and its loss evaluated in pieces of tokens, with their derivatives.

Logits, ``[batch, length, vocabulary]``, are often the largest array of a step, and recompute makes
them no smaller. Where the loss is a sum over tokens, what it is summed of needs them only piece by
piece (``head_axes.py``). Its derivative does too: the sum's own cotangent is one number, and what
it multiplies is known before it is. So the forward pass computes a piece of the loss and at once
its derivatives with regard to the hidden states and the weights; the backward pass multiplies them
by that number. Nothing is computed twice; the weights are read once for each piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr
from jdelta._src.errors import TraceError
from jdelta._src.regions.head_axes import Head, head_of
from jdelta._src.regions.region import inside_region

NAME = "head_in_pieces"
"""What the function with the derivative of its own is called, for the equation to be told by."""


def is_in_pieces(eqn: Eqn) -> bool:
    """Whether an equation is a head in pieces."""
    return eqn.primitive.name == "custom_vjp_call" and _jax.label(eqn).endswith(NAME)


def in_pieces(program: Jaxpr, most: int, left: Callable[[Eqn], bool] = _jax.nothing) -> Jaxpr:
    """A program with its heads in pieces, at most so many; the program itself if it has none.

    Args:
        program: The function that is differentiated, calls inlined.
        most: Pieces at most.
        left: Which calls were not inlined.
    """
    head = head_of(program, most)
    if head is None:
        return program
    inner = _jax.open_jaxpr(program)
    rest = [eqn for i, eqn in enumerate(inner.eqns) if i not in head.eqns]
    results = {*head.sums, *(v for v, _ in head.rows)}
    behind = set(_jax.dependents(rest, results))

    def run(*args: Any) -> list[Any]:
        env: _jax.Env = dict(zip(inner.constvars, _jax.consts_of(program), strict=True))
        env.update(zip(inner.invars, args, strict=True))
        for i, eqn in enumerate(rest):
            if i not in behind:
                _jax.run(eqn, env)
        operands = _jax.read(env, [*head.sliced, *head.consts])
        env.update(zip((*head.sums, *(v for v, _ in head.rows)), _run(head, operands), strict=True))
        for i in sorted(behind):
            _jax.run(rest[i], env)
        return _jax.read(env, inner.outvars)

    return in_pieces(_jax.inline(_jax.retraced(program, run), left), most, left)


def _run(head: Head, operands: Sequence[Any]) -> list[Any]:
    """The results of a head: its sums, then its rows."""
    work = _Work(head)

    def head_in_pieces(*args: Any) -> list[Any]:
        with inside_region():
            return work.results(args)

    results = jax.custom_vjp(head_in_pieces)

    def forward(*args: Any) -> tuple[list[Any], Any]:
        values = [arg.value for arg in args]
        moving = [arg.perturbed and jnp.issubdtype(arg.value.dtype, jnp.inexact) for arg in args]
        with inside_region():
            return work.with_derivatives(values, moving)

    results.defvjp(forward, work.multiplied, symbolic_zeros=True)
    return results(*operands)


@dataclass(frozen=True)
class _Work:
    """What is computed for a head.

    Attributes:
        head: The head.
    """

    head: Head

    def results(self, args: Sequence[Any]) -> list[Any]:
        """The sums and rows, where nothing is differentiated."""

        def step(number: Any, results: list[Any]) -> list[Any]:
            return self._added(
                results, _jax.evaluate(self.head.piece, *self._of(args, number)), number
            )

        return self._ended(lax.fori_loop(0, self.head.pieces, step, self._begun()))

    def with_derivatives(
        self, args: Sequence[Any], moving: Sequence[bool]
    ) -> tuple[list[Any], list[Any]]:
        """The results, and the derivatives of the sum that has some; None for other arguments."""
        head, count = self.head, len(self.head.sliced)
        which = [i for i, is_moving in enumerate(moving) if is_moving]

        def step(state: Any, number: Any) -> Any:
            results, derivatives = state
            own = self._of(args, number)

            def total_and_outputs(*args: Any) -> tuple[Any, list[Any]]:
                outputs = _jax.evaluate(head.piece, *args)
                return outputs[head.moving], outputs

            of_moving = _jax.of_some(total_and_outputs, own, which)
            total, pull, outputs = jax.vjp(of_moving, *(own[i] for i in which), has_aux=True)
            added = pull(jnp.ones_like(total))
            derivatives = [
                self._put(old, new, head.axes[i], number)
                if i < count
                else old + new.astype(old.dtype)
                for i, old, new in zip(which, derivatives, added, strict=True)
            ]
            return (self._added(results, outputs, number), derivatives), None

        begun = [
            jnp.zeros(args[i].shape, args[i].dtype if i < count else _wide(args[i].dtype))
            for i in which
        ]
        numbers = jnp.arange(head.pieces)
        (results, derivatives), _ = lax.scan(step, (self._begun(), begun), numbers)
        known = dict(zip(which, derivatives, strict=True))
        kept = [known[i].astype(args[i].dtype) if i in known else None for i in range(len(args))]
        return self._ended(results), kept

    def multiplied(self, kept: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        """The cotangents of the arguments.

        Raises:
            TraceError: A result of single tokens, or another sum, has a cotangent.
        """
        own = cotangents[self.head.moving]
        for i, cotangent in enumerate(cotangents):
            is_zero = isinstance(cotangent, SymbolicZero) or cotangent.dtype == jax.dtypes.float0
            if i != self.head.moving and not is_zero:
                raise TraceError("The loss is no sum over tokens: the head stays whole.")
        if isinstance(own, SymbolicZero):
            return tuple(None for _ in kept)
        return tuple(None if x is None else x * own.astype(x.dtype) for x in kept)

    def _of(self, args: Sequence[Any], number: Any) -> list[Any]:
        """The arguments of one piece."""
        count, axes, pieces = len(self.head.sliced), self.head.axes, self.head.pieces
        parts = [
            lax.dynamic_slice_in_dim(x, number * (x.shape[a] // pieces), x.shape[a] // pieces, a)
            for x, a in zip(args[:count], axes, strict=True)
        ]
        return [*parts, *args[count:]]

    def _begun(self) -> list[Any]:
        """The results before the first piece; sums in a type wide enough to add to."""
        sums = [jnp.zeros(v.aval.shape, _wide(v.aval.dtype)) for v in self.head.sums]
        return [*sums, *(jnp.zeros(v.aval.shape, v.aval.dtype) for v, _ in self.head.rows)]

    def _ended(self, results: Sequence[Any]) -> list[Any]:
        """The results after the last piece, in their own types."""
        types = [v.aval.dtype for v in (*self.head.sums, *(v for v, _ in self.head.rows))]
        return [x.astype(dtype) for x, dtype in zip(results, types, strict=True)]

    def _added(self, results: Sequence[Any], parts: Sequence[Any], number: Any) -> list[Any]:
        """The results with those of one more piece."""
        count = len(self.head.sums)
        pairs = zip(results[:count], parts[:count], strict=True)
        sums = [total + part.astype(total.dtype) for total, part in pairs]
        axes = [axis for _, axis in self.head.rows]
        rows = [
            self._put(old, new, axis, number)
            for old, new, axis in zip(results[count:], parts[count:], axes, strict=True)
        ]
        return [*sums, *rows]

    def _put(self, array: Any, part: Any, axis: int, number: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(array, part, number * part.shape[axis], axis)


def _wide(dtype: Any) -> Any:
    """The type that sums, and derivatives of weights, of a type are added up in."""
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.promote_types(dtype, jnp.float32) if is_inexact else dtype
