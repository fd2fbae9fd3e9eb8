"""Solvers: from a problem to decisions."""

from jdelta._solver.base import Solver as Solver
from jdelta._solver.knapsack import Knapsack as Knapsack
from jdelta._solver.milp import Milp as Milp
