"""What enters regions and is dropped: how far back it is computed again from, and what is held.

A part of a backward pass that computes again what enters its region goes back through the equations
of earlier regions to what is there. On the way it makes what enters these, and may hold some of it
for the parts that follow. That is the nested recompute of Beaumont et al. 2019 ("Optimal
checkpointing for heterogeneous chains"): run forward to the last of some regions, hold what enters
one of them on the way, then do the same with those after it, and with those before it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from jdelta._src import _jax
from jdelta._src._jax import Var
from jdelta._src.program.names import RegionName
from jdelta._src.program.rewriting import Equations


class DroppedInputs:
    """What enters the regions of a forward pass, some of it dropped.

    Attributes:
        results: From a dropped value to the result of a backward part that stands for it: the part
            has made it again, and holds it for those after it.
    """

    def __init__(
        self,
        forward: Equations,
        levels: Mapping[str, int],
        kept: Collection[str],
        *,
        is_apart: bool,
    ):
        """Look at a forward pass.

        Args:
            forward: Its equations.
            levels: From the name of each dropped input to its level: see ``Policy.levels``.
            kept: Names of what is kept.
            is_apart: Whether there are no others among the equations: they are a loop's body.
        """
        self.results: dict[Var, Var] = {}
        self._makers: dict[Var, int] = {}
        self._regions: dict[Var, str] = {}
        self._levels: dict[Var, int] = {}
        self._available: dict[Var, Var] = {}
        for number, eqn in enumerate(forward.eqns):
            if eqn is None or _jax.is_backward(eqn):
                continue
            if not is_apart and not _jax.is_differentiated(eqn):
                continue
            self._makers.update(dict.fromkeys(eqn.outvars, number))
            name = _jax.named_value(eqn)
            if not isinstance(name, RegionName) or not _jax.variables(eqn):
                continue
            (value,), (named,) = eqn.invars, eqn.outvars
            if name in levels:
                self._levels[value] = levels[name]
                self._regions[value] = name.region
            elif name in kept:
                self._available[named] = self._available[value] = named
            elif name.is_input:
                self._available.setdefault(value, value)

    def enters(self, value: Var) -> bool:
        """Whether a value enters a region and is dropped."""
        return value in self._levels

    def maker(self, value: Var) -> int | None:
        """The number of the equation that makes a value in the forward pass."""
        return self._makers.get(value)

    def available(self, value: Var) -> Var | None:
        """What is read for a value that need not be computed again; None where it has to be.

        Args:
            value: One that is dropped, or that such a one is computed from.
        """
        if value in self.results:
            return self.results[value]
        if value in self._available:
            return self._available[value]
        return None if value in self._makers else value

    def to_hold(self, recomputed: Sequence[Var], region: str) -> list[Var]:
        """What a part holds for those after it.

        It enters an earlier region and has no larger level than what enters regions after that.

        Args:
            recomputed: What the part has computed again, in order.
            region: The region that the part is of.
        """
        values: list[Var] = []
        least = math.inf
        for value in reversed([v for v in recomputed if v in self._levels]):
            if self._levels[value] <= least and self._regions[value] != region:
                values.append(value)
            least = min(least, self._levels[value])
        return values[::-1]
