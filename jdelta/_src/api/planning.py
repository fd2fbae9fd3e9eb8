"""``jdelta.plan``: the only file that knows the whole pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Any, TypeAlias, overload

import jax
import numpy as np

from jdelta._src.api.collector import collecting_seldom
from jdelta._src.api.deferred import DeferredPlan
from jdelta._src.api.job import Job, Terms
from jdelta._src.api.plan import Plan
from jdelta._src.api.progress import showing
from jdelta._src.backends.target import Target, is_on_host, resolve
from jdelta._src.decision import Decision
from jdelta._src.errors import ArgumentError, BudgetError
from jdelta._src.passes.emit import Step
from jdelta._src.passes.spill_record import check_handlers
from jdelta._src.plan.call import Call, call_of, described
from jdelta._src.plan.record import Answer, Figures, ProgramIdentity, Question, SearchRecord
from jdelta._src.plan.user_step import OPTIONS, Jitted, check_kind, check_options, jitted
from jdelta._src.regions.region import AS_WRITTEN, Grouping
from jdelta._src.regions.trace import Trace, own_errors_only, trace
from jdelta._src.residuals.file_link import to_files
from jdelta._src.residuals.links import Link
from jdelta._src.residuals.residual import Residual
from jdelta._src.search import updates_in_loops
from jdelta._src.search.advice import hint
from jdelta._src.search.gate import Limits, verify
from jdelta._src.search.groupings import Planning
from jdelta._src.search.history import History
from jdelta._src.search.search import executable
from jdelta._src.search.summary import summary
from jdelta._src.sizes import format_bytes, parse_budget, parse_host_budget
from jdelta._src.solver import DEFAULT_SOLVER, SOLVERS, Solver, solver_name
from jdelta._src.spill import Spill, SpillRates, Store, rates_of
from jdelta._src.versions import versions

_LOG = logging.getLogger(__name__)

MARGIN = 0.05
"""Share of a target's memory left to allocator and runtime when no budget is given."""

Pins: TypeAlias = Mapping[str, Decision | str] | Callable[..., Any]

_NO_PINS: Pins = MappingProxyType({})

_KINDS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "target": ("a name such as 'cuda:h100'", (str, NoneType)),
    "solver": ("a name or a solver", (str, Solver)),
    "host_budget": ("bytes, as for the budget", (numbers.Real, str, jax.Array, NoneType)),
    "pin": ("a mapping from names to decisions, or a policy", (Mapping, Callable)),
    "per_layer": ("True or False", (bool, np.bool_)),
    "spill": ("a directory or a jdelta.Spill", (str, os.PathLike, Spill, NoneType)),
    "reorder": ("True or False", (bool, np.bool_)),
    "history": ("a jdelta.History", (History, NoneType)),
    "progress": ("True or False", (bool, np.bool_)),
}
"""What each of jdelta's own options takes."""

_OPTIONS = (*OPTIONS, *_KINDS)


@overload
def plan(
    step_fn: Callable[..., Any],
    budget: int | float | str | None = None,
    *,
    target: str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    solver: str | Solver = DEFAULT_SOLVER,
    host_budget: int | str | None = None,
    pin: Pins = _NO_PINS,
    per_layer: bool = True,
    spill: str | Spill | None = None,
    reorder: bool = False,
    history: History | None = None,
    progress: bool = True,
) -> DeferredPlan: ...
@overload
def plan(
    step_fn: Callable[..., Any],
    budget: int | float | str | None,
    first: Any,
    /,
    *args: Any,
    target: str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    solver: str | Solver = DEFAULT_SOLVER,
    host_budget: int | str | None = None,
    pin: Pins = _NO_PINS,
    per_layer: bool = True,
    spill: str | Spill | None = None,
    reorder: bool = False,
    history: History | None = None,
    progress: bool = True,
    **named: Any,
) -> Plan: ...
def plan(
    step_fn: Callable[..., Any],
    budget: int | float | str | None = None,
    *args: Any,
    target: str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    solver: str | Solver = DEFAULT_SOLVER,
    host_budget: int | str | None = None,
    pin: Pins = _NO_PINS,
    per_layer: bool = True,
    spill: str | Spill | None = None,
    reorder: bool = False,
    history: History | None = None,
    progress: bool = True,
    **named: Any,
) -> Plan | DeferredPlan:
    """Plan a training step to a memory budget, compile it under the plan and check it.

    Args:
        step_fn: Any function that ``jax.jit`` accepts. Where it takes a gradient inside, its
            regions are those marked by ``jdelta.remat``; if no gradient goes through any, regions
            are found in the program. A function without a gradient (evaluation, prefill) has
            nothing to decide: it fits the budget as it is, or not. It is not edited.
        budget: Bound on the peak per device of the whole compiled step: bytes (``int``), a size
            (``"14GiB"``, ``"14GB"``), or a share of the plain step's compiled peak (``0.5``,
            ``"50%"``). Default: the target's memory less 5 %.
        *args: Arguments of the step: arrays or ``jax.ShapeDtypeStruct``, on one device or with
            ``NamedSharding``, and NNX objects as in ``nnx.jit``. For devices that are not here give
            the shapes shardings over a ``jax.sharding.AbstractMesh``: the target's devices take
            their places in it. Without any arguments, planning is put off until the result's
            ``jit`` is called.
        target: Default: the devices the arguments live on. Ahead of time: ``"tpu:v5e:2x2"``,
            ``"tpu:v5p:2x2x1"``, ``"tpu:v6e:4x4"``, ``"cuda:h100"``, ``"cuda:a100"``,
            ``"cuda:b200"``.
        donate_argnums: As in ``jax.jit``; donated arguments count once in the peak. What is not
            given of these six is taken over from a step that ``jax.jit``, ``nnx.jit`` or
            ``eqx.filter_jit`` has made (of ``nnx.jit`` but for shardings).
        donate_argnames: As in ``jax.jit``.
        static_argnums: As in ``jax.jit``.
        static_argnames: As in ``jax.jit``.
        in_shardings: As in ``jax.jit``: of what is given by position and not static.
        out_shardings: As in ``jax.jit``.
        solver: ``"knapsack"`` (DELTA's heuristic), ``"milp"`` (exact, HiGHS), or a solver object.
        host_budget: Bound on the bytes per device that the plan offloads to pinned host memory, 0
            for no offload; default: the host memory of the target, as far as it is known, shared by
            the devices of a process, less arguments that live there.
        pin: Decisions taken by hand: from the name of a residual as plans print it, the user's own
            ``checkpoint_name`` of it, or a pattern of names (``"h/mlp/*"``), to ``"save"``,
            ``"offload"``, ``"spill"`` or ``"recompute"``; the last that fits counts. What nothing
            in the backward pass reads is not moved, and a pattern that fits nothing else is an
            error. One layer of a scan is then decided like the others. Or a ``jax.checkpoint``
            policy, which then decides everything: so a policy written by hand is compiled, checked
            and shown like a plan.
        per_layer: Whether loops, and the head of the model, may be run otherwise than they are
            written where that pays: layers of a scan decided differently, several in an iteration;
            few states of a long loop kept; the logits made in pieces of tokens. ``plan.jit`` can do
            that, but no plan used as a mere policy: False where the plan is to be one.
        spill: A directory for values that neither device nor host have room for, or a
            ``jdelta.Spill``: they are written to files there in the forward pass, and read back
            ahead of their use. Only ``plan.jit`` and ``jdelta.jit`` can do that.
        reorder: Whether weight updates may be moved into the backward loops, where no gradient of
            all layers is there at once. Done only if the compiled peak is lower for it, and only in
            what ``plan.jit`` runs. Compiles about twice as many programs.
        history: What plans of the same step with other budgets have learnt, a ``jdelta.History()``
            that is given to each of them: a plan that was found for a smaller budget is not missed
            then. Default: the plan depends on the other arguments alone.
        progress: Whether a line says meanwhile what is done: on a terminal (standard error) and in
            a notebook, gone at the end. Elsewhere nothing is shown. The logger ``jdelta`` is told
            the same at INFO, whatever this says.
        **named: Arguments of the step that are given by name.

    Returns:
        A ``Plan``; without ``args`` a ``DeferredPlan``.

    Raises:
        ArgumentError: An option is not known, or an argument of the step is nothing to trace.
        BudgetError: The budget is malformed, above the target's memory, or below the floor; or more
            is pinned to the host than ``host_budget``.
        TraceError: JAX traces the step, but not cut into regions.
        TargetError: The target is unknown or its compiler is not installed.
        OffloadError: The compiled program does not offload what was planned, or a pattern of
            ``pin`` offloads nothing.
        PlanMismatchError: A pattern of ``pin`` fits nothing, or the processes of a job do not plan
            alike. If planning fails on one of them, the others raise the same error.
        SpillError: Nothing can be spilled on the target, or to the directory, or by a pattern of
            ``pin``.

    Example:
        >>> import jax, jax.numpy as jnp, jdelta
        >>> def loss(w, x):
        ...     layer = lambda x, w: (x + jnp.tanh(x @ w), None)
        ...     return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)
        >>> step = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)
        >>> w = jax.ShapeDtypeStruct((8, 128, 128), jnp.float32)
        >>> x = jax.ShapeDtypeStruct((4096, 128), jnp.float32)
        >>> plan = jdelta.plan(step, 0.6, w, x)
        >>> plan.compiled_peak <= plan.budget < plan.ceiling
        True
        >>> sorted({decision.value for decision in plan.decisions.values()})
        ['recompute', 'save']
    """
    step = jitted(
        step_fn,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
    )
    options: dict[str, Any] = {
        "target": target,
        "solver": solver,
        "host_budget": host_budget,
        "pin": pin,
        "per_layer": per_layer,
        "spill": spill,
        "reorder": reorder,
        "history": history,
        "progress": progress,
    }
    check_options(step, named, _OPTIONS)
    for option, (expected, kinds) in _KINDS.items():
        check_kind(step, option, options[option], kinds, expected)
    options["solver"] = _solver(solver)
    options["spill"] = None if spill is None else Spill.of(spill)
    if budget is not None:
        parse_budget(budget)
    if not args and not named:
        return DeferredPlan(step_fn, budget, options, step, _plan)
    return _plan(step, budget, call_of(step, args, named), **options)


@overload
def jit(
    step_fn: None = None, budget: int | float | str | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
@overload
def jit(
    step_fn: Callable[..., Any], budget: int | float | str | None = None, **options: Any
) -> Callable[..., Any]: ...
def jit(
    step_fn: Callable[..., Any] | None = None,
    budget: int | float | str | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """``jax.jit`` within a memory budget: plans at the first call, and again for new shapes.

    Args:
        step_fn: As in ``jdelta.plan``; a method too. None makes a decorator:
            ``@jdelta.jit(budget="14GiB")``.
        budget: As in ``jdelta.plan``.
        **options: The other options of ``jdelta.plan``.

    Returns:
        A function with the signature of the step. Its ``plans`` lists the plans made so far.

    Raises:
        ArgumentError: An option is not known, or names an argument that the step does not have.
        BudgetError: The budget is malformed.
        JdeltaError: When called, what ``jdelta.plan`` raises.

    Example:
        >>> import jax, jax.numpy as jnp, jdelta
        >>> def step(w, x):
        ...     grad = jax.grad(lambda w: jnp.sum(jnp.sin(jnp.exp(x @ w))))(w)
        ...     return w - 0.1 * grad
        >>> step = jdelta.jit(step, budget="64MiB", donate_argnums=0)
        >>> step(jnp.ones((8, 8)), jnp.ones((4, 8))).shape
        (8, 8)
        >>> len(step.plans)
        1
    """
    check_options(None, options, _OPTIONS)
    if budget is not None:
        parse_budget(budget)
    if step_fn is None:
        return functools.partial(jit, budget=budget, **options)
    if isinstance(step_fn, (classmethod, staticmethod)):
        method: Any = type(step_fn)
        return method(jit(step_fn.__func__, budget=budget, **options))
    return plan(step_fn, budget, **options).jit()


@collecting_seldom()
def _plan(
    asked: Jitted,
    budget: int | float | str | None,
    call: Call,
    *,
    target: str | None,
    progress: bool,
    **options: Any,
) -> Plan:
    try:
        with contextlib.ExitStack() as during:
            during.enter_context(showing(progress))
            where, placed, traced = traced_on(target, call)
            job = Job.of(where.devices(), ahead_of_time=where.ahead_of_time)
            during.enter_context(job.failing_together())
            plan = _plan_for(job, where, asked, budget, placed, traced, **options)
            decisions = sorted((name, decision.value) for name, decision in plan.decisions.items())
            job.check_alike(f"{plan.program.fingerprint} {plan.budget} {decisions}")
    except BudgetError as error:  # its message says all: where the search ended is of no use
        raise error.with_traceback(None) from error.__cause__
    return plan


def traced_on(target: str | None, call: Call) -> tuple[Target, Call, Callable[[Grouping], Trace]]:
    """The target, the call with shapes placed there, and what stages it, each grouping once."""
    where = resolve(target, call.placed)
    placed = call.abstract(where)

    @functools.cache
    def traced(grouping: Grouping) -> Trace:
        return trace(placed.fun, *placed.args, grouping=grouping, platform=where.platform)

    if call.may_have_own_mesh:
        with own_errors_only(placed.fun, placed.args, where.platform):
            mesh = traced(AS_WRITTEN).mesh
        if mesh:
            return traced_on(target, dataclasses.replace(call, own_mesh=mesh))
    return where, placed, traced


def _plan_for(
    job: Job,
    where: Target,
    asked: Jitted,
    budget: int | float | str | None,
    call: Call,
    traced: Callable[[Grouping], Trace],
    *,
    solver: Solver,
    host_budget: int | str | None,
    pin: Pins,
    per_layer: bool,
    spill: Spill | None,
    reorder: bool,
    history: History | None,
) -> Plan:
    bound = parse_budget(int(where.memory * (1 - MARGIN)) if budget is None else budget)
    if bound.bytes and bound.bytes > where.memory:
        raise BudgetError(
            f"The budget of {format_bytes(bound.bytes)} is above the {format_bytes(where.memory)} "
            f"that {where.name} has for a program. Leave it out to use what there is."
            + f" {where.backend.devices.memory_reason()}".rstrip()
        )
    if isinstance(pin, Mapping):
        pin = {_pattern(pattern): Decision(decision) for pattern, decision in pin.items()}
    placed, out_shardings = call.args, call.out_shardings
    donate = call.donated(asked.donate)
    store, rates = _spilling(spill, where)
    host_room = _host_capacity(host_budget, where, placed)
    terms = job.common(Terms(bound, host_room, where.rates, rates))
    bound, host_room, rates = terms.budget, terms.host_room, terms.spill
    where = dataclasses.replace(where, rates=terms.rates)

    def files(residuals: Sequence[Residual]) -> Link | None:
        return to_files(spill, rates, residuals, where) if spill and rates else None

    def step(step_trace: Trace) -> Step:
        return Step(
            call.fun,
            placed,
            donate,
            where,
            step_trace.aliases,
            step_trace.automatic,
            step_trace.grouping,
            store,
            outside=step_trace.outside,
            out_shardings=out_shardings,
            recorded=step_trace.recorded,
            names=call.names,
        )

    history = history or History()
    planning = Planning(traced, step, host_room, files, pin, solver, per_layer, history)
    with own_errors_only(call.fun, placed, where.platform):
        if reorder:
            plain = Step(call.fun, placed, donate, where, {}, out_shardings=out_shardings)
            chosen = updates_in_loops.result(planning, plain, bound)
        else:
            chosen = updates_in_loops.Result(*planning.result(bound))
    search, result = chosen.search, chosen.outcome
    chosen_trace = search.trace
    own = search.own_recompute()
    room = math.inf if spill is None or spill.limit_bytes is None else spill.limit_bytes
    verify(result.best, search.items.residuals, Limits(result.budget, host_room, room))
    best = result.best
    measurement = best.measurement
    return Plan(
        question=Question(
            budget=result.budget,
            target=where.name,
            donate_argnums=asked.donate,
            static=asked.static,
            solver=solver_name(solver),
            pins=_decided(search.items.pins.decisions),
            host_budget=None if math.isinf(host_room) else int(host_room),
            per_layer=bool(per_layer),
            spill=spill,
            reorder=bool(reorder),
        ),
        program=ProgramIdentity(
            step=asked.place,
            fingerprint=chosen_trace.fingerprint,
            arguments=described(call),
            versions=versions(),
        ),
        answer=Answer(
            policy=best.emission.policy,
            residuals=search.items.residuals,
            pinned=_decided(search.items.pinned),
            aliases=tuple(chosen_trace.aliases.items()),
            grouping=chosen_trace.grouping,
            updates_moved=chosen.saved,
        ),
        figures=Figures(
            predicted_peak=best.predicted,
            compiled_peak=best.peak,
            code_bytes=measurement.code,
            host_bytes=measurement.all_host,
            spill_bytes=best.emission.spilled.bytes,
            spill_written=best.emission.spilled.written,
            spill_rates=rates,
            overlap=measurement.overlap,
            overhead=max(0.0, best.overhead - own) if best.decisions is not None else 0.0,
            step_seconds=search.step_seconds + own,
            undone=measurement.undone,
        ),
        search=SearchRecord(
            floor=result.floor,
            ceiling=result.ceiling,
            estimates=result.estimates,
            result=summary(result, search.items, own),
            compiles=result.compiles,
            hint=hint(best, search.step, search.items.residuals),
        ),
        _step=asked,
        _call=call,
        _compiled=best.compiled,
        _compile=None if best.compiled else functools.partial(executable, search.step, result),
        _store=store,
        _solver=solver,
    )


def _decided(by_name: Mapping[str, Decision | str]) -> tuple[tuple[str, Decision], ...]:
    """Decisions by name as a record has them: ``(("h/mlp/*", Decision.SAVE),)``."""
    return tuple((name, Decision(decision)) for name, decision in by_name.items())


def _spilling(spill: Spill | None, target: Target) -> tuple[Store | None, SpillRates | None]:
    """The store that a step would spill to, and how fast it is."""
    if spill is None:
        return None, None
    calls = target.backend.spilling.by_callback
    check_handlers(target)
    _LOG.info("measuring how fast %s is", spill.path)
    return Store(spill, by_callback=calls), rates_of(spill)


def _host_capacity(host_budget: int | str | None, target: Target, placed: Any) -> float:
    if host_budget is None:
        taken = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(placed) if is_on_host(x))
        return max(0.0, (target.host_share(placed) or math.inf) - taken)
    return float(parse_host_budget(host_budget))


def _pattern(pattern: Any) -> str:
    if isinstance(pattern, str) and pattern:
        return pattern
    raise ArgumentError(f"pin: expected names of residuals or patterns, got {pattern!r}.")


def _solver(solver: str | Solver) -> Solver:
    if isinstance(solver, Solver):
        return solver
    if solver not in SOLVERS:
        raise ArgumentError(f"solver must be one of {sorted(SOLVERS)} or a Solver; got {solver!r}")
    return SOLVERS[solver]
