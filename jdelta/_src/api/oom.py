"""Why a step runs out of memory, and what would bring it under."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jdelta._src.api.plan import Plan
from jdelta._src.api.planning import plan, traced_on
from jdelta._src.backends.platforms import backend_of
from jdelta._src.errors import BudgetError, TraceError
from jdelta._src.estimate.buffers import Compiler
from jdelta._src.estimate.memory import Timeline, timeline
from jdelta._src.passes.emit import Step, fixed_bytes, local_bytes
from jdelta._src.plan.call import Call, call_of
from jdelta._src.plan.user_step import OPTIONS, jitted
from jdelta._src.program.graph import labels
from jdelta._src.regions.region import AS_WRITTEN
from jdelta._src.regions.trace import Trace
from jdelta._src.report.rows import NUMBERED
from jdelta._src.report.terminal import WIDTH, aligned
from jdelta._src.search.advice import donation
from jdelta._src.sizes import format_array, format_bytes, format_seconds, parse_budget

_SHOWN = 12

_NOTHING_TO_DO = "The plain step fits: nothing has to be done."


@dataclass(frozen=True)
class Alive:
    """Buffers alive at the peak that are alike.

    Attributes:
        what: "argument" or "temporary".
        name: Path in the arguments; name of the residual, or what makes the temporary, ``*`` for
            the number of alike regions.
        shape: Dtype and shape of each; "arrays" for arguments of several.
        count: How many there are.
        bytes: Bytes of all of them on one device.
    """

    what: str
    name: str
    shape: str
    count: int
    bytes: int


@dataclass(frozen=True)
class OutOfMemory:
    """What a step needs, what needs it, and what can be done.

    Attributes:
        target: Name of the target.
        memory: Bytes per device that a program can use there.
        budget: Bytes per device that the step is to fit in: the budget asked for, of a share of the
            plain step's peak what it comes to; ``memory`` where none was asked for.
        needed: Peak of the plain step, bytes per device.
        estimated: Whether ``needed`` is a prediction: planning did not have to compile that step.
        alive: What is alive at its peak, largest first.
        plan: A plan within the memory; None where there is none.
        floor: Least peak that planning reaches, bytes per device; None where it was not needed.
        remedies: What would bring the step under, in words.
    """

    target: str
    memory: int
    budget: int
    needed: int
    estimated: bool
    alive: tuple[Alive, ...]
    plan: Plan | None
    floor: int | None
    remedies: tuple[str, ...]

    def __repr__(self) -> str:
        """The report in a line."""
        needed, memory = map(format_bytes, (self.needed, self.memory))
        return f"<jdelta.OutOfMemory: {needed} needed of {memory} on {self.target}>"

    def __str__(self) -> str:
        """The report as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        verdict = "does not fit" if self.needed > self.budget else "fits"
        memory = f"{self.target} has {format_bytes(self.memory)} for a program"
        budget = f"the budget is {format_bytes(self.budget)}, and "
        room = memory if self.budget == self.memory else budget + memory
        yield from textwrap.wrap(
            f"The plain step needs {format_bytes(self.needed)} per device"
            f"{' (predicted)' * self.estimated} and {verdict}: {room}.",
            WIDTH,
        )
        if self.needed > self.memory:
            devices = backend_of(self.target.partition(":")[0]).devices
            yield from textwrap.wrap(devices.memory_reason(), WIDTH)
        yield ""
        head = ("at the peak", "what", "count", "shape", "bytes")
        shown = self.alive[:_SHOWN]
        body = [(a.name, a.what, str(a.count), a.shape, format_bytes(a.bytes)) for a in shown]
        yield from aligned(head, body)
        yield ""
        for remedy in self.remedies:
            yield from textwrap.wrap(f"- {remedy}", WIDTH, subsequent_indent="  ")


def explain_oom(
    step_fn: Callable[..., Any],
    *args: Any,
    budget: int | float | str | None = None,
    target: str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    **options: Any,
) -> OutOfMemory:
    """Say what is alive at the peak of a step, and what would make it fit.

    The step is planned to the budget, or to the target's memory (less 5 %); it is compiled, but not
    run.

    Args:
        step_fn: As in ``jdelta.plan``.
        *args: Arguments of the step, or their shapes.
        budget: What the step is to fit in, as in ``jdelta.plan``.
        target: As in ``jdelta.plan``.
        donate_argnums: As in ``jax.jit``.
        **options: Other arguments of ``jdelta.plan``.

    Raises:
        JdeltaError: What ``jdelta.plan`` raises, but that no plan fits.
    """
    bound = None if budget is None else parse_budget(budget)
    told: dict[str, Any] = {"donate_argnums": donate_argnums, **options}
    asked = jitted(step_fn, **{name: told[name] for name in OPTIONS if name in told})
    own = {name: told.pop(name) for name in tuple(told) if name in asked.parameters}
    where, call, traced = traced_on(target, call_of(asked, args, own))
    step = Step(call.fun, call.args, call.donated(asked.donate), where, {}, names=call.names)
    step_trace = traced(AS_WRITTEN)
    line = timeline(step_trace.graph, Compiler(where.backend))
    predicted = line.peak + fixed_bytes(step_trace.graph, step)
    fitting_plan, refused = None, None
    try:
        told["target"] = target
        fitting_plan = plan(step_fn, budget, *args, **own, **told)
    except (BudgetError, TraceError) as error:
        if error.floor is None:
            raise
        refused = error
    known = _compiled_plain(fitting_plan, refused)
    needed, floor = known or predicted, refused and refused.floor
    room = where.memory
    if bound is not None:
        planned = fitting_plan or (refused if isinstance(refused, BudgetError) else None)
        room = bound.bytes or (planned and planned.budget) or round((bound.share or 0.0) * needed)
    alive = [*_arguments(call), *_temporaries(line, step_trace)]
    remedies = [] if needed > room else [_NOTHING_TO_DO]
    if to_donate := donation(step_trace.graph, step, needed):
        remedies.append(f"Donate {to_donate}.")
    remedies += _ways_to_fit(fitting_plan, floor, room, step_trace.uncut)
    return OutOfMemory(
        target=where.name,
        memory=where.memory,
        budget=room,
        needed=needed,
        estimated=known is None,
        alive=tuple(sorted(alive, key=lambda a: -a.bytes)),
        plan=fitting_plan,
        floor=floor,
        remedies=tuple(remedies),
    )


def _arguments(call: Call) -> list[Alive]:
    """Arguments, each by its own parts: ``state.params``."""
    leaves: dict[str, list[Any]] = {}
    for name, arg in zip(call.names, call.args, strict=True):
        for path, leaf in jax.tree.leaves_with_path(arg):
            leaves.setdefault(f"{name}{jax.tree_util.keystr(path[:1])}", []).append(leaf)
    return [
        Alive(
            "argument",
            name,
            "arrays" if len(parts) > 1 else _shape(parts[0]),
            len(parts),
            sum(map(local_bytes, parts)),
        )
        for name, parts in leaves.items()
    ]


def _temporaries(line: Timeline, step_trace: Trace) -> list[Alive]:
    """Buffers alive at the simulated peak, those that are made alike together.

    With what the operation that runs then takes for itself.
    """
    values, names = line.graph.values, labels(line.graph, step_trace.plan_name)
    alive = line.alive(line.peak_index)
    count = Counter((_alike(names[v]), values[v]) for v in alive)
    rows = [Alive("temporary", name, _shape(v), n, n * v.bytes) for (name, v), n in count.items()]
    if line.peak_workspace:
        maker = line.graph.operations[line.peak_index].primitive
        rows.append(Alive("temporary", maker, "workspace", 1, line.peak_workspace))
    return rows


def _shape(array: Any) -> str:
    if not hasattr(array, "shape"):
        array = jax.typeof(array)
    return format_array(array.dtype, array.shape)


def _alike(name: str) -> str:
    """A name without the numbers of what it is in."""
    where, slash, last = name.rpartition("/")
    return NUMBERED.sub("*", where) + slash + last


def _compiled_plain(
    fitting_plan: Plan | None, refused: BudgetError | TraceError | None
) -> int | None:
    """Compiled peak of the plain step, where planning compiled it."""
    if fitting_plan is not None:
        return None if "ceiling" in fitting_plan.search.estimates else fitting_plan.ceiling
    return refused.ceiling if isinstance(refused, BudgetError) else None


def _ways_to_fit(
    fitting_plan: Plan | None, floor: int | None, room: int, uncut: str
) -> Iterator[str]:
    """What planning reaches, and what to do where that is not enough."""
    if fitting_plan is not None and fitting_plan.policy is not None:
        donated = fitting_plan.question.donate_argnums
        donate = f", donate_argnums={donated}" if donated else ""
        yield (
            f"jdelta.jit(step_fn, budget={fitting_plan.budget}{donate}) fits with a compiled peak "
            f"of {format_bytes(fitting_plan.compiled_peak)}, for "
            f"{format_seconds(fitting_plan.overhead)} more a step "
            f"({fitting_plan.overhead_share:.1%}, predicted)."
        )
    if floor is not None:
        yield from (uncut,) if uncut else ()
        yield (
            f"No plan fits: the least that planning reaches is {format_bytes(floor, up=True)}. "
            f"Make the batch smaller, or spread the step over {max(2, math.ceil(floor / room))} "
            "or more devices (what is alike on each of them is not divided)."
        )
