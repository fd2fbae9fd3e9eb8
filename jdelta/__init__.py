"""Plan a JAX training step to a memory budget: save, offload, spill or recompute what it makes.

    import jdelta

    plan = jdelta.plan(train_step, "14GiB", state, batch, donate_argnums=0)
    print(plan)                    # does it fit, what does it cost, what becomes of each value
    print(*plan.explain("h/*"))    # why, value by value; plan.decisions has them by name
    step = plan.jit()              # compiled already: state, loss = step(state, batch)
    plan.save("plan.json")         # and jdelta.load("plan.json").jit(train_step) elsewhere

Short form, which plans at the first call: ``step = jdelta.jit(train_step, budget="14GiB")``.
Devices need not be here: ``target="tpu:v5e:2x2"`` or ``"cuda:h100"``. A first plan takes as long as
a few compiles, for TPUs minutes; what the compiler said is kept in ``~/.cache/jdelta``. The same on
the command line: ``jdelta --help``.

Where to look: ``help(jdelta.plan)`` for all options; ``jdelta.Plan`` for what a plan has;
``jdelta.frontier`` for the price of memory; ``jdelta.largest`` for the largest batch;
``jdelta.explain_oom`` for a step that does not fit. ``jdelta.BudgetError.floor`` is the least peak
that was reached. Every error of jdelta's is a ``jdelta.JdeltaError``.
"""

import logging

import lazy_loader

from jdelta._src.versions import warn_of_namesake

# The names in `__init__.pyi`: a module that only marks regions loads no planner.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

logging.getLogger("jdelta").addHandler(logging.NullHandler())
warn_of_namesake()
