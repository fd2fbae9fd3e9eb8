"""Plans made for a TPU without compiling for it, steps traced under them, other questions."""

import dataclasses
import math

from jdelta._src.backends.target import resolve
from jdelta._src.backends.tpu import TPU
from jdelta._src.regions.find import tracing
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.region import AS_WRITTEN, Session
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.items import items_of
from jdelta._src.residuals.pins import NO_PINS
from jdelta._src.residuals.residual import residuals
from jdelta._src.solver import Knapsack


def planned(step, share, *args, grouping=AS_WRITTEN):
    """The step's regions, and decisions that keep `share` of all residual bytes."""
    target = resolve("tpu:v5e:2x2")
    step_trace = trace(step, *args, grouping=grouping)
    priced = [r for region in step_trace.regions for r in residuals(region, target)]
    items = items_of(priced, target, 0.0, NO_PINS)
    capacity = share * sum(item.bytes for item in items.problem.items if item.needed)
    problem = dataclasses.replace(items.problem, capacity=capacity)
    return step_trace, items.decisions(Knapsack().solve(problem).decisions)


def decided(step, decide, *args):
    """The step's regions, and what becomes of each residual, as `decide` says for each of them."""
    target = resolve("tpu:v5e:2x2")
    step_trace = trace(step, *args)
    priced = [r for region in step_trace.regions for r in residuals(region, target)]
    items = items_of(priced, target, math.inf, NO_PINS)
    return step_trace, priced, items.decisions([decide(i, r) for i, r in enumerate(priced)])


def asking(plan, **other):
    """The plan as if something else had been asked: ``asking(plan, budget=1 << 20)``."""
    return dataclasses.replace(plan, question=dataclasses.replace(plan.question, **other))


def under(step_trace, decisions, fun):
    """`fun` with its regions following the decisions."""
    policy = Policy.of(decisions, step_trace.loops, TPU, together=step_trace.together)

    def run(*args):
        session = Session(
            policy, step_trace.aliases, automatic=step_trace.automatic, grouping=step_trace.grouping
        )
        with tracing(session, *args):
            return fun(*args)

    return run
