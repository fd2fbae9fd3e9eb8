"""Small training steps as people bring them, one table: `PROGRAMS`."""

from tests.programs import autodiff as autodiff
from tests.programs import control_flow as control_flow
from tests.programs import custom_rules as custom_rules
from tests.programs import dtypes as dtypes
from tests.programs import effects as effects
from tests.programs import layers as layers
from tests.programs import learning as learning
from tests.programs import modes as modes
from tests.programs import modules as modules
from tests.programs import networks as networks
from tests.programs import optimizers as optimizers
from tests.programs import random_bits as random_bits
from tests.programs import remat as remat
from tests.programs import sharded as sharded
from tests.programs.table import LARGE as LARGE
from tests.programs.table import PROGRAMS as PROGRAMS
from tests.programs.table import SMALL as SMALL
from tests.programs.table import Program as Program
from tests.programs.table import Refused as Refused
from tests.programs.table import unmarked as unmarked
