"""Files as a memory at run time: tensors leave in the forward pass, and return in the backward."""

from jdelta._src.spill.adapter import Adapter as Adapter
from jdelta._src.spill.errors import named_errors as named_errors
from jdelta._src.spill.ops import read as read
from jdelta._src.spill.ops import write as write
from jdelta._src.spill.options import Spill as Spill
from jdelta._src.spill.rates import SpillRates as SpillRates
from jdelta._src.spill.rates import rates_of as rates_of
from jdelta._src.spill.store import Counters as Counters
from jdelta._src.spill.store import Store as Store
from jdelta._src.spill.trial import try_out as try_out
