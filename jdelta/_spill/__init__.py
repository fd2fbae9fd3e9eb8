"""The SSD tier at run time: tensors leave memory in the forward pass and return in the backward."""

from jdelta._spill.ops import prefetch as prefetch
from jdelta._spill.ops import read as read
from jdelta._spill.ops import write as write
from jdelta._spill.options import Spill as Spill
from jdelta._spill.rates import SpillRates as SpillRates
from jdelta._spill.rates import measure_rates as measure_rates
from jdelta._spill.store import Store as Store
