"""What a pass takes and gives: a program, and what it may read of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        staged: The step as a closed jaxpr.
        run: Computes the step's flat results from its flat arguments in another way than
            ``staged``; None where no pass asks for that.
        spilled: What the step writes to files, complete once ``run`` was traced.
    """

    staged: Jaxpr
    run: Callable[..., Sequence[Any]] | None = None
    spilled: Emitted = field(default_factory=Emitted)

    @functools.cached_property
    def jaxpr(self) -> Jaxpr:
        """The program, closed. ``run`` is traced only for a pass that looks at what it made."""
        return self.staged if self.run is None else _jax.retraced(self.staged, self.run)

    @functools.cached_property
    def flat(self) -> Jaxpr:
        """The program with calls inlined, backward regions left as ``remat`` equations."""
        return _jax.inline(self.jaxpr)

    def evaluate(self, *args: Any) -> Sequence[Any]:
        """The flat results of the step."""
        return self.run(*args) if self.run else _jax.evaluate(self.staged, *args)

    def rewritten(self, jaxpr: Jaxpr) -> Program:
        """The same step as another program."""
        return Program(jaxpr, spilled=self.spilled)

    def evaluated(self, run: Callable[..., Sequence[Any]]) -> Program:
        """The same step as a function computes it: ``run`` takes and gives flat values."""
        return Program(self.jaxpr, run, self.spilled)


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
