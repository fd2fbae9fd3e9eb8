"""Steps that are planned when they are called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jdelta._call import Call, call_of, several
from jdelta._errors import PlanMismatchError
from jdelta._plan import Plan
from jdelta._planned import PlannedStep, refuse_tracers


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
    _make: Callable[..., Plan] = field(repr=False)

    def jit(self, *, donate_argnums: int | Sequence[int] | None = None) -> Callable[..., Any]:
        """The step, planned at the first call with each new set of shapes.

        Args:
            donate_argnums: As in ``jax.jit``; default: those given to ``jdelta.plan``.
        """
        donate = {} if donate_argnums is None else {"donate_argnums": several(donate_argnums)}
        options = {**self.options, **donate}
        make = functools.partial(self._make, self.step_fn, self.budget, **options)
        return _Deferred(functools.partial(call_of, self.step_fn, options["static"]), make)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refused: there are no decisions yet."""
        raise PlanMismatchError(
            "This plan has no arguments yet, so it cannot serve as a policy. Give jdelta.plan the "
            "step's arguments (arrays or jax.ShapeDtypeStruct), or use the function that .jit() "
            "of this plan returns."
        )


class _Deferred:
    """Plans a step once for each set of shapes it is called with."""

    def __init__(self, call_of: Callable[..., Call], plan_of: Callable[[Call], Plan]):
        self._call_of = call_of
        self._plan_of = plan_of
        self._steps: dict[Any, PlannedStep] = {}
        self.plans: list[Plan] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call_of(args, kwargs)
        if call.key not in self._steps:
            refuse_tracers(call)  # before minutes of planning
            plan = self._plan_of(call)
            self.plans.append(plan)
            self._steps[call.key] = plan.jit()
        return self._steps[call.key].run(call)
