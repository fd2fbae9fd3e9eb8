"""Solvers: from a problem to decisions."""

from jdelta._src.solver.base import Solver as Solver
from jdelta._src.solver.knapsack import Knapsack as Knapsack
from jdelta._src.solver.milp import Milp as Milp
from jdelta._src.solver.registry import DEFAULT_SOLVER as DEFAULT_SOLVER
from jdelta._src.solver.registry import SOLVERS as SOLVERS
from jdelta._src.solver.registry import solver_name as solver_name
