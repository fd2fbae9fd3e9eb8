"""What a pass takes and gives: a program, and what it may read of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from jdelta._src import _jax
from jdelta._src._jax import Jaxpr
from jdelta._src._jax.sharding import Shardings, shardings_of
from jdelta._src.backends.backend import Backend
from jdelta._src.backends.chips import Rates
from jdelta._src.passes.spill_record import Emitted
from jdelta._src.program.names import RegionName
from jdelta._src.spill import Store


@dataclass(frozen=True)
class Program:
    """A staged step under a policy, as far as passes have rewritten it.

    Attributes:
        jaxpr: The program, closed.
        spilled: What it writes to files.
    """

    jaxpr: Jaxpr
    spilled: Emitted = field(default_factory=Emitted)

    def flat(self) -> Jaxpr:
        """Its jaxpr with calls inlined, backward regions left as ``remat`` equations."""
        return _jax.inline(self.jaxpr)

    def rewritten(self, jaxpr: Jaxpr) -> Program:
        """The same step as another program."""
        return replace(self, jaxpr=jaxpr)

    def evaluated(self, run: Callable[..., Sequence[Any]]) -> Program:
        """The same step as a function computes it: ``run`` takes and gives flat values."""
        return self.rewritten(_jax.retraced(self.jaxpr, run))


def _nothing_is_spilled(_: RegionName) -> bool:
    return False


@dataclass(frozen=True)
class Context:
    """What passes read of the step and its policy.

    Attributes:
        backend: The compiler that the program is for.
        rates: Rates of the target.
        arguments: The flat arguments of the step, as shapes placed on the target; empty where none
            of them is cut over devices.
        donated: Which of them are donated: ``(0, 1)``.
        offloads: Whether the policy puts anything on the host.
        least: Whether the least memory matters more than hiding transfers.
        store: Where spilled values go.
        is_spilled: Whether the policy spills the value of a name.
    """

    backend: Backend
    rates: Rates
    arguments: tuple[Any, ...] = ()
    donated: tuple[int, ...] = ()
    offloads: bool = False
    least: bool = False
    store: Store | None = None
    is_spilled: Callable[[RegionName], bool] = _nothing_is_spilled

    def shardings(self, jaxpr: Jaxpr) -> Shardings:
        """How the values of a program with the step's arguments are cut over devices."""
        return shardings_of(jaxpr, self.arguments, self.backend.platform)


Pass: TypeAlias = Callable[[Program, Context], Program]
"""Rewrites a program; one that has nothing to do gives the program that it was given."""
