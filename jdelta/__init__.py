"""Plan a JAX training step to a memory budget: save, offload, spill or recompute what it makes."""

import logging

import lazy_loader

from jdelta._src.versions import warn_of_namesake

# The names in `__init__.pyi`: a module that only marks regions loads no planner.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

logging.getLogger("jdelta").addHandler(logging.NullHandler())
warn_of_namesake()
