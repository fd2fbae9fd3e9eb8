"""Programs while they are rewritten: their equations by number, and loops with what they carry."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jdelta._src import _jax
from jdelta._src._jax import Atom, Eqn, Jaxpr, Var

_ADDED = -1
"""In the place of the index of an equation that was added."""


class Equations:
    """The equations of a program while they are rewritten; indices stay what they are.

    Attributes:
        eqns: The equations; None where one has become a part of another.
        same: From what nothing makes any more to what is read in its place.
    """

    def __init__(self, eqns: Iterable[Eqn]):
        self._original = list(eqns)
        self.eqns: list[Eqn | None] = list(self._original)
        self.same: dict[Var, Atom] = {}
        self._after: dict[int, list[Eqn]] = {}

    def __getitem__(self, index: int) -> Eqn:
        eqn = self.eqns[index]
        assert eqn is not None
        return eqn

    def add(self, index: int, eqn: Eqn) -> None:
        """Add an equation right after another."""
        self._after.setdefault(index, []).append(eqn)
        for v in _jax.variables(eqn):
            self._readers[v].append(_ADDED)

    def together(self, indices: Sequence[int], eqn: Eqn) -> bool:
        """Put one equation in the place of some, where what it reads is there and is not read yet.

        Returns:
            Whether there is such a place.
        """
        first, last = indices[0], indices[-1]
        for index in indices:
            self.eqns[index] = None
        places = range(first, last)
        stood = (other for i in places for other in (self.eqns[i], *self._after.get(i, ())))
        between = [other for other in stood if other is not None]
        if not any(set(eqn.invars).intersection(other.outvars) for other in between):
            self.eqns[first] = eqn
        elif not any(set(eqn.outvars).intersection(_jax.variables(other)) for other in between):
            self.eqns[last] = eqn
        else:
            return False
        return True

    def replace_loop(self, index: int, loop: Loop, body: Equations) -> None:
        """Put a loop in the place of an equation, its body made of other equations."""
        self.eqns[index], through = loop.equation(body)
        self.same |= through

    def now(self, atoms: Iterable[Atom]) -> list[Atom]:
        """What is read in the place of some atoms."""
        now: list[Atom] = []
        for atom in atoms:
            while _jax.is_var(atom) and atom in self.same:
                atom = self.same[atom]
            now.append(atom)
        return now

    def result(self) -> list[Eqn]:
        """The equations, in order."""
        return [
            eqn.replace(invars=self.now(eqn.invars)) if self.same else eqn
            for index, here in enumerate(self.eqns)
            for eqn in (here, *self._after.get(index, ()))
            if eqn is not None
        ]

    def is_read_outside(self, value: Var, inside: Collection[int]) -> bool:
        """Whether an equation other than some reads a value."""
        return any(index not in inside for index in self._readers[value])

    @functools.cached_property
    def _readers(self) -> defaultdict[Var, list[int]]:
        """From a value to the equations that read it; those put together are still at theirs."""
        readers = defaultdict[Var, list[int]](list)
        for index, eqn in enumerate(self._original):
            for v in _jax.variables(eqn):
                readers[v].append(index)
        return readers


@dataclass
class Loop:
    """A ``scan`` that is rewritten.

    Attributes:
        eqn: The equation.
        body: Its body, calls inlined.
        consts: Its constants, by what stands for them in the body.
        carry: What it begins with, by the same.
        xs: What it has rows of, by the same.
        results: What the body makes: carry, and rows.
        outvars: What the loop makes of them.
    """

    eqn: Eqn
    body: Jaxpr
    consts: dict[Var, Atom]
    carry: dict[Var, Atom]
    xs: dict[Var, Atom]
    results: list[Atom]
    outvars: list[Var]

    @classmethod
    def at(cls, index: int, eqns: Equations) -> Loop:
        """The loop that an equation is."""
        eqn = eqns[index]
        body = _jax.inline(eqn.params["jaxpr"])
        inner = _jax.open_jaxpr(body)
        n_consts, n_carry = _jax.scan_counts(eqn.params)
        operands = list(zip(inner.invars, eqns.now(eqn.invars), strict=True))
        rows = n_consts + n_carry
        return cls(
            eqn,
            body,
            dict(operands[:n_consts]),
            dict(operands[n_consts:rows]),
            dict(operands[rows:]),
            list(inner.outvars),
            list(eqn.outvars),
        )

    @property
    def length(self) -> int:
        """How many iterations it has."""
        return self.eqn.params["length"]

    def equations(self) -> Equations:
        """Those of its body."""
        return Equations(_jax.open_jaxpr(self.body).eqns)

    @functools.cached_property
    def values(self) -> set[Var]:
        """What its body makes."""
        return {v for eqn in _jax.open_jaxpr(self.body).eqns for v in eqn.outvars}

    @property
    def is_reversed(self) -> bool:
        """Whether it begins with the last rows."""
        return self.eqn.params["reverse"]

    def same_as(
        self, other: Loop, outside: set[Var], known_as: Callable[[Var], Var]
    ) -> dict[Var, Var]:
        """From variables of this body to those of the other that are the same values.

        Args:
            other: The other loop.
            outside: Values around the other that stand for themselves.
            known_as: From a variable around this loop to that around the other which it is.
        """
        consts = {outer: v for v, outer in other.consts.items() if _jax.is_var(outer)}
        consts |= {v: v for v in outside}
        rows: dict[Atom, Atom] = {outer: v for v, outer in other.xs.items() if _jax.is_var(outer)}
        n_carry = len(other.carry)
        rows |= dict(zip(other.outvars[n_carry:], other.results[n_carry:], strict=True))
        same: dict[Var, Var] = {}
        for mine, known in ((self.consts, consts), (self.xs, rows)):
            read = ((v, known.get(known_as(o))) for v, o in mine.items() if _jax.is_var(o))
            same |= {v: u for v, u in read if u is not None and _jax.is_var(u)}
        return same

    def cotangents(self, same: Mapping[Var, Atom]) -> set[Var]:
        """What comes into a backward loop from the one after it, and is made in it."""
        return {*self.carry, *(v for v in self.xs if v not in same), *self.values}

    def handed(
        self, other: Loop, value: Var, source: Var, handed_on: Callable[[Var, Var], Var]
    ) -> Var:
        """A new variable of this body that is a value of the other's, or of what is around that.

        Args:
            other: The other loop.
            value: The value.
            source: What it is, or is a copy of.
            handed_on: From what is around the other loop to the same around this one.
        """

        def around(atom: Atom) -> Atom:
            return handed_on(atom, atom) if _jax.is_var(atom) else atom

        fresh = _jax.new_var(value.aval)
        if value in other.consts:
            self.consts[fresh] = around(other.consts[value])
        elif value in other.xs:
            self.xs[fresh] = around(other.xs[value])
        elif source not in other.carry and source not in other.values:
            self.consts[fresh] = handed_on(value, source)
        else:
            # It is made where the other results of the loop are.
            self.xs[fresh] = handed_on(other.stack_of(value), other.outvars[0])
        return fresh

    def stack_of(self, value: Var) -> Var:
        """What the loop stacks of a value of its body."""
        stacks = zip(self.results, self.outvars, strict=True)
        rows = itertools.islice(stacks, len(self.carry), None)
        known = next((stack for result, stack in rows if result is value), None)
        if known is not None:
            return known
        stack = _jax.new_var(_jax.stacked(value.aval, self.length))
        self.results.append(value)
        self.outvars.append(stack)
        return stack

    def equation(self, eqns: Equations) -> tuple[Eqn, Mapping[Var, Atom]]:
        """The loop, its body made of other equations; and what it only hands through."""
        invars = [*self.consts, *self.carry, *self.xs]
        body = _jax.rebuild(self.body, eqns.result(), eqns.now(self.results), invars=invars)
        operands = [*self.consts.values(), *self.carry.values(), *self.xs.values()]
        return _jax.scan_equation(
            self.eqn, body, operands, self.outvars, consts=len(self.consts), carry=len(self.carry)
        )
