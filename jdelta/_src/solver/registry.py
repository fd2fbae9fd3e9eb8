"""The solvers that have a name."""

from collections.abc import Mapping
from types import MappingProxyType

from jdelta._src.solver.base import Solver
from jdelta._src.solver.knapsack import Knapsack
from jdelta._src.solver.milp import Milp

DEFAULT_SOLVER = "knapsack"
"""The name of the solver that decides if none is asked for."""

SOLVERS: Mapping[str, Solver] = MappingProxyType({DEFAULT_SOLVER: Knapsack(), "milp": Milp()})


def solver_name(solver: Solver) -> str:
    """What a file calls a solver: ``"milp"``; of one that has no name its ``repr``."""
    named = (name for name, known in SOLVERS.items() if known == solver)
    return next(named, repr(solver))
