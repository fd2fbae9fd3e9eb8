"""Steps that are planned when they are called."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

from jdelta._src.api.plan import Plan
from jdelta._src.errors import PlanMismatchError
from jdelta._src.plan.call import Call, call_of
from jdelta._src.plan.planned_step import PlannedStep, refuse_tracers
from jdelta._src.plan.user_step import Jitted, together


@dataclass(frozen=True)
class DeferredPlan:
    """A plan without arguments yet: made when the function that ``jit`` returns is first called.

    Attributes:
        step_fn: The step.
        budget: As given to ``jdelta.plan``.
        options: The other arguments of ``jdelta.plan``.
    """

    step_fn: Callable[..., Any]
    budget: int | float | str | None
    options: Mapping[str, Any] = field(hash=False)
    _step: Jitted = field(hash=False, repr=False)
    _make: Callable[..., Plan] = field(repr=False)

    def __repr__(self) -> str:
        """The plan in a line."""
        return f"<jdelta.DeferredPlan: {self._step.name}, {_asked(self.budget, self.options)}>"

    def jit(
        self,
        *,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Sequence[str] | None = None,
    ) -> Callable[..., Any]:
        """The step, planned at the first call with each new set of shapes.

        Args:
            donate_argnums: As in ``jax.jit``; default: those given to ``jdelta.plan``.
            donate_argnames: As in ``jax.jit``; default likewise.
        """
        donated = together(donate_argnums, donate_argnames)
        donate = self._step.donate if donated is None else self._step.normal("donate", donated)
        step = replace(self._step, donate=donate)
        plan_of = functools.partial(self._make, step, self.budget, **self.options)
        deferred = _Deferred(step, plan_of, _asked(self.budget, self.options))
        return functools.update_wrapper(deferred, self.step_fn, updated=())

    def __call__(self, /, *_: Any, **__: Any) -> Any:
        """Refused: there are no decisions yet."""
        raise PlanMismatchError(
            "This plan has no arguments yet, so it cannot serve as a policy. Give jdelta.plan the "
            "step's arguments (arrays or jax.ShapeDtypeStruct), or use the function that .jit() "
            "of this plan returns."
        )


def _asked(budget: int | float | str | None, options: Mapping[str, Any]) -> str:
    """What is asked of a plan, in short: ``budget '14GiB' on tpu:v5e:2x2``."""
    target = options.get("target")
    what = "all memory but 5 %" if budget is None else f"budget {budget!r}"
    return f"{what} on {target}" if target else what


class _Deferred:
    """Plans a step once for each set of shapes it is called with."""

    def __init__(self, step: Jitted, plan_of: Callable[[Call], Plan], asked: str):
        self._step = step
        self._asked = asked
        self._plan_of = plan_of
        self._steps: dict[Any, PlannedStep] = {}
        self._planning = threading.RLock()  # so that several threads make one plan
        self.plans: list[Plan] = []

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = call_of(self._step, args, kwargs)
        step = self._steps.get(call.key) or self._planned(call)
        return step.run(call)

    def _planned(self, call: Call) -> PlannedStep:
        """The step under a plan for a call; made by the first thread that asks for it."""
        with self._planning:
            if call.key not in self._steps:
                refuse_tracers(call)  # before minutes of planning
                plan = self._plan_of(call)
                self.plans.append(plan)
                self._steps[call.key] = plan.jit()
            return self._steps[call.key]

    def __repr__(self) -> str:
        count = len(self.plans)
        plans = f"{count} plan{'' if count == 1 else 's'} made"
        return f"<jdelta.jit step: {self._step.name}, {self._asked}, {plans}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method's step, where it stands in a class."""
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a step under jdelta.jit has no {name!r}: it is planned when it is called. "
            "jdelta.plan(step, budget, *args) plans it before, and its `compiled` is the program."
        )
