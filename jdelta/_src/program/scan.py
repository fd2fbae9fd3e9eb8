"""A ``scan`` equation taken apart, to be evaluated with another body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var, transfers
from jdelta._src.program.primitives import MATMULS


@dataclass(frozen=True)
class Scan:
    """A ``scan`` and its operands."""

    body: Jaxpr
    n_consts: int
    n_carry: int
    length: int
    reverse: bool
    unroll: int
    consts: list[Any]
    carry: list[Any]
    xs: list[Any]

    @classmethod
    def of(cls, eqn: Eqn, inputs: Sequence[Any]) -> Scan:
        n_consts, n_carry = _jax.scan_counts(eqn.params)
        return cls(
            body=_jax.inline(eqn.params["jaxpr"]),
            n_consts=n_consts,
            n_carry=n_carry,
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
            consts=list(inputs[:n_consts]),
            carry=list(inputs[n_consts : n_consts + n_carry]),
            xs=list(inputs[n_consts + n_carry :]),
        )

    def fetched(self) -> tuple[Jaxpr, list[bool]]:
        """The body taking rows fetched already, and which of its rows those are."""
        return transfers.with_fetched_inputs(self.body, self.n_consts + self.n_carry)

    def stacked(self, body: Jaxpr) -> list[Any]:
        """What the body stacks."""
        return list(_jax.open_jaxpr(body).outvars[self.n_carry :])

    def scan(self, step: Any, state: Any, rows: Any) -> Any:
        """Run the loop over another body."""
        return lax.scan(
            step, state, rows, length=self.length, reverse=self.reverse, unroll=self.unroll
        )


def operands_on_path(body: Jaxpr, n_consts: int, n_carry: int) -> set[Var]:
    """Operands of products between the carry that comes in and the carry that goes out."""
    inner = _jax.open_jaxpr(body)
    begun = set(inner.invars[n_consts : n_consts + n_carry])
    for index in _jax.dependents(inner.eqns, begun):
        begun.update(inner.eqns[index].outvars)
    needed = {v for v in inner.outvars[:n_carry] if _jax.is_var(v)}
    operands: set[Var] = set()
    for eqn in reversed(inner.eqns):
        if not needed.isdisjoint(eqn.outvars):
            read = {v for v in eqn.invars if _jax.is_var(v)}
            needed |= read
            operands |= read if eqn.primitive.name in MATMULS else set()
    return begun & needed & operands
