"""Plan a JAX training step to a memory budget: save, offload, spill or recompute what it makes."""

import logging

from jdelta._src.api.deferred import DeferredPlan as DeferredPlan
from jdelta._src.api.frontier import Frontier as Frontier
from jdelta._src.api.frontier import frontier as frontier
from jdelta._src.api.largest import Largest as Largest
from jdelta._src.api.largest import largest as largest
from jdelta._src.api.oom import OutOfMemory as OutOfMemory
from jdelta._src.api.oom import explain_oom as explain_oom
from jdelta._src.api.plan import Plan as Plan
from jdelta._src.api.plan import load as load
from jdelta._src.api.planning import jit as jit
from jdelta._src.api.planning import plan as plan
from jdelta._src.api.schedule import Placement as Placement
from jdelta._src.api.schedule import Schedule as Schedule
from jdelta._src.api.schedule import schedule as schedule
from jdelta._src.backends.target import Target as Target
from jdelta._src.decision import Decision as Decision
from jdelta._src.errors import ArgumentError as ArgumentError
from jdelta._src.errors import BudgetError as BudgetError
from jdelta._src.errors import JdeltaError as JdeltaError
from jdelta._src.errors import OffloadError as OffloadError
from jdelta._src.errors import PlanMismatchError as PlanMismatchError
from jdelta._src.errors import SpillError as SpillError
from jdelta._src.errors import TargetError as TargetError
from jdelta._src.errors import TraceError as TraceError
from jdelta._src.plan.spill_watch import SpillDriftWarning as SpillDriftWarning
from jdelta._src.regions.remat import remat as remat
from jdelta._src.report.endurance import Endurance as Endurance
from jdelta._src.report.endurance import endurance as endurance
from jdelta._src.report.explain import Explanation as Explanation
from jdelta._src.report.rok import RokPoint as RokPoint
from jdelta._src.residuals.residual import Residual as Residual
from jdelta._src.search.history import History as History
from jdelta._src.solver import Knapsack as Knapsack
from jdelta._src.solver import Milp as Milp
from jdelta._src.spill import Spill as Spill
from jdelta._src.versions import __version__ as __version__

logging.getLogger("jdelta").addHandler(logging.NullHandler())
