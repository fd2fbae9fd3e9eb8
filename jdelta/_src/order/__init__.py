"""Order of operators and layout of memory, on plain records (ROAM, arXiv 2310.19295)."""

from jdelta._src.order.compiled import compiled_problem as compiled_problem
from jdelta._src.order.layout import arena as arena
from jdelta._src.order.layout import layout as layout
from jdelta._src.order.problem import Problem as Problem
from jdelta._src.order.problem import Tensor as Tensor
from jdelta._src.order.schedule import Arrangement as Arrangement
from jdelta._src.order.schedule import arrange as arrange
from jdelta._src.order.staged import places_taken as places_taken
from jdelta._src.order.staged import problem_of as problem_of
