"""Solvers: from a problem to decisions."""

from jdelta._src.solver.base import Solver as Solver
from jdelta._src.solver.knapsack import Knapsack as Knapsack
from jdelta._src.solver.milp import Milp as Milp
