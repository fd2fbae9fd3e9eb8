"""Steps under a plan: compiled for a call, and refused where the plan is for another program."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.core import Tracer

from jdelta._src import _jax
from jdelta._src.backends.target import resolve_planned
from jdelta._src.errors import ArgumentError, BudgetError, PlanMismatchError
from jdelta._src.hlo.measure import Measurement, measure
from jdelta._src.passes.emit import Step, emit
from jdelta._src.passes.spill_record import check_handlers, check_spilled
from jdelta._src.plan.call import Call, arguments_of, call_of, described, difference
from jdelta._src.plan.record import PlanRecord
from jdelta._src.plan.spill_watch import Drift
from jdelta._src.plan.user_step import Arguments, Jitted, jitted
from jdelta._src.regions.trace import Trace, own_errors_only, trace
from jdelta._src.sizes import format_bytes, format_some
from jdelta._src.spill import named_errors
from jdelta._src.versions import other_versions

_LOG = logging.getLogger(__name__)


class PlannedStep:
    """A step under a plan, for arguments of the planned shapes."""

    def __init__(
        self,
        plan: PlanRecord,
        step: Jitted,
        static: Any,
        ready: Any,
    ):
        self.plan = plan
        self._step = step
        self._static = static
        self._compiled = ready
        self._drift: Drift | None = None
        self._refs = tuple(": ref " in line for line in plan.program.arguments)
        functools.update_wrapper(self, step.fun, updated=())

    def __repr__(self) -> str:
        return f"<jdelta step: {self._step.name} under {self.plan!r}>"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(call_of(self._step, args, kwargs))

    def run(self, call: Call) -> Any:
        """Run the step for a call that is taken apart already."""
        if self._static is not None and call.static != self._static:
            raise PlanMismatchError(
                f"The step was planned for other static arguments: {self._static}, not "
                f"{call.static}. Plan again for these, or use jdelta.jit, which does."
            )
        if self._compiled is None:
            planned = _checked(self.plan, call)
            self._compiled = compiled(self.plan, planned, self._step.donate)
            self._static = call.static
        if getattr(jax.config, "jax_disable_jit", False):  # nothing compiled is called then
            return call.finish(call.fun(*call.args))
        if any(self._refs) and self._refs != _refs_in(call):  # a compiled step writes what it gets
            _checked(self.plan, call)
        try:
            results = self._results(call.args)
        except (TypeError, ValueError, RuntimeError) as error:
            refuse_tracers(call)
            _check_alive(call, error)
            if isinstance(error, RuntimeError):
                raise
            _checked(self.plan, call)
            raise PlanMismatchError(
                "The step was planned for other arguments than it was called with. Plan again for "
                f"these, or use jdelta.jit, which does. JAX says: {error}"
            ) from error
        return call.finish(results)

    def _results(self, args: Any) -> Any:
        """What the compiled step gives; of a step that spills, once it is there without an error.

        Raises:
            SpillError: Something could not be written or read.
        """
        if not self.plan.figures.spill_written:
            return self._compiled(*args)
        store, rates = self.plan.store, self.plan.figures.spill_rates
        assert store is not None
        assert rates is not None
        begin = time.perf_counter()
        with named_errors(), store.execution():
            results = jax.block_until_ready(self._compiled(*args))
        self._drift = self._drift or Drift(store.spill, rates)
        self._drift.add(time.perf_counter() - begin)
        return results


def refuse_tracers(call: Call) -> None:
    """Say what to do about a call whose arguments JAX is tracing.

    Raises:
        PlanMismatchError: It is one.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(call.args)):
        raise PlanMismatchError(
            "A planned step is compiled: jax.jit, jax.grad and jax.vmap cannot take it apart. Call "
            "it with arrays, or plan the function that is jitted around it."
        )


def _refs_in(call: Call) -> tuple[bool, ...]:
    """Which of a call's leaves are mutable refs."""
    return tuple(map(_jax.is_ref, jax.tree.leaves(call.args)))


def _check_alive(call: Call, error: Exception) -> None:
    """Say which argument of a failed call is there no more.

    Raises:
        ArgumentError: There is one.
    """
    for name, arg in zip(call.names, call.args, strict=True):
        for path, leaf in jax.tree.leaves_with_path(arg):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ArgumentError(
                    f"The argument {name}{jax.tree_util.keystr(path)} is there no more: it was "
                    "donated to an earlier call, or deleted. Go on with what the step returned in "
                    "its place, or do not donate it."
                ) from error


def _checked(plan: PlanRecord, call: Call) -> Call:
    """A call with arguments that a plan was made for, over the mesh that it was made for.

    Raises:
        PlanMismatchError: They have other shapes, dtypes or shardings: says which. Or JAX is
            tracing them.
    """
    refuse_tracers(call)
    changed = _changed(plan, call)
    if changed and call.may_have_own_mesh:
        call = call.over_own_mesh()
        changed = _changed(plan, call)
    planned, came = arguments_of(plan.program.arguments), arguments_of(call.names)
    if changed and planned and not set(planned) & set(came):
        raise PlanMismatchError(
            f"The plan was made for {plan.program.step} with {format_some(planned, 4)}, but was "
            f"given {format_some(came, 4) or 'no arguments'}: this may be another step. Give the "
            "one that was planned, or plan this one."
        )
    if changed:
        raise PlanMismatchError(
            "The plan was made for arguments of other shapes, dtypes or shardings: "
            f"{changed}. Plan again for these, or use jdelta.jit, which does."
        )
    return call


def _changed(plan: PlanRecord, call: Call) -> str | None:
    placed = call.abstract(resolve_planned(plan.question.target, call.placed))
    return difference(plan.program.arguments, described(placed))


def recompiled(plan: PlanRecord, step_fn: Callable[..., Any], args: tuple[Any, ...]) -> Measurement:
    """What the compiler says today of a step under a plan.

    Args:
        plan: The plan; one that was loaded will do.
        step_fn: The step it was made for.
        args: Arguments of that step, or their shapes.

    Raises:
        PlanMismatchError: The plan was made for other arguments, or for another program.
    """
    step = replace(jitted(step_fn), static=plan.question.static)
    call = _checked(plan, call_of(step, args, {}))
    _, measurement, peak = _compiled(plan, call, plan.question.donate_argnums)
    return dataclasses.replace(measurement, peak=peak)


def compiled(plan: PlanRecord, call: Call, donate: Arguments) -> jax.stages.Compiled:
    """Compile a step under a plan and check it against the budget."""
    if plan.figures.spill_written:
        check_handlers(resolve_planned(plan.question.target, call.placed))
    program, _, peak = _compiled(plan, call, donate)
    if program is None or peak > plan.question.budget:
        others = other_versions(plan.program.versions)
        planned = plan.question.donate_argnums
        then = f"donate_argnums={planned}{f' and with {others}' if others else ''}"
        raise BudgetError(
            f"Compiled with donate_argnums={donate} the step needs "
            f"{format_bytes(peak)}, over the budget of {format_bytes(plan.question.budget)}. When "
            f"it was planned, with {then}, it took {format_bytes(plan.figures.compiled_peak)}. "
            "Plan it again."
        )
    return program


def _compiled(
    plan: PlanRecord, call: Call, donate: Arguments
) -> tuple[jax.stages.Compiled | None, Measurement, int]:
    """The program, what the compiler says of it, and its peak with what spilling holds beside."""
    step, _ = step_of(plan, call, donate)
    peak = format_bytes(plan.figures.compiled_peak)
    _LOG.info("compiling the step under its plan, %s planned", peak)
    with own_errors_only(step.fun, step.args, step.target.platform):
        emission = emit(step, plan.answer.policy)
        program, measurement = measure(
            emission.lower(),
            step.target,
            emission.options,
            computed=emission.computed,
            executable=True,
        )
    if program:
        check_spilled(plan.answer.residuals, plan.decisions, emission.spilled, measurement.files)
    return program, measurement, measurement.peak + emission.pool


def step_of(plan: PlanRecord, call: Call, donate: Arguments) -> tuple[Step, Trace]:
    """The step of a call, as the plan was made for it, and its plain program.

    Raises:
        PlanMismatchError: The plan was made for another program.
    """
    target = resolve_planned(plan.question.target, call.placed)
    call = call.abstract(target)
    answer = plan.answer
    step_trace = trace(call.fun, *call.args, grouping=answer.grouping, platform=target.platform)
    if step_trace.fingerprint != plan.program.fingerprint:
        raise PlanMismatchError(_other_program(plan, step_trace))
    step = Step(
        call.fun,
        call.args,
        call.donated(donate),
        target,
        dict(answer.aliases),
        step_trace.automatic,
        answer.grouping,
        plan.store,
        updates_in_loops=answer.updates_moved > 0,
        outside=step_trace.outside,
        out_shardings=call.out_shardings,
        recorded=step_trace.recorded,
    )
    return step, step_trace


def _other_program(plan: PlanRecord, step_trace: Trace) -> str:
    """What to say of a program that a plan was not made for."""
    planned, here = {r.region for r in plan.answer.residuals}, {r.name for r in step_trace.regions}
    differences = [
        f"{what} {', '.join(sorted(names)[:5])}"
        for what, names in (("it lacks", planned - here), ("it has", here - planned))
        if names
    ]
    others = other_versions(plan.program.versions)
    cause = f"the plan was made with {others}" if others else "jax and jaxlib are the same"
    return (
        f"The plan was made for program {plan.program.fingerprint}, "
        f"this is {step_trace.fingerprint}, of equal arguments: "
        f"{' and '.join(differences) or 'its regions have the same names'}. "
        f"The code, or a library that it uses, is another ({cause}). Plan this program."
    )
