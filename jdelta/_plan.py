"""``jdelta.plan`` and what it returns: the only file that knows the whole pipeline."""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, overload

import jax

from jdelta import _file, _reordered
from jdelta._budget import format_bytes, parse_budget, parse_host_budget
from jdelta._call import Call, Static, call_of, described, several
from jdelta._candidate import Found
from jdelta._cost import program_seconds
from jdelta._decision import Decision
from jdelta._emit import Step
from jdelta._errors import BudgetError, PlanMismatchError, SpillError, TargetError
from jdelta._explain import Explanation, explain
from jdelta._export import export
from jdelta._files import to_files
from jdelta._layers import Planning
from jdelta._measure import Measurement
from jdelta._overlap import Overlap
from jdelta._picture import Picture, picture
from jdelta._planned import PlannedStep, compiled
from jdelta._policy import Policy
from jdelta._region import Grouping
from jdelta._report import page
from jdelta._residual import Residual
from jdelta._solution import Outcome
from jdelta._solver import Knapsack, Milp, Solver
from jdelta._spill import Spill, SpillRates, Store, agreed_rates, require_platform
from jdelta._table import format_table, rows, summary
from jdelta._target import Target, is_on_host, resolve
from jdelta._trace import Trace, trace
from jdelta._ways import Way

MARGIN = 0.05
"""Share of a target's memory left to allocator and runtime when no budget is given."""

Pins: TypeAlias = Mapping[str, Decision | str] | Callable[..., Any]

_NO_PLANS: Mapping[str, Any] = MappingProxyType({})
_NO_PINS: Pins = MappingProxyType({})
_SOLVERS: Mapping[str, Solver] = {"knapsack": Knapsack(), "milp": Milp()}


@dataclass(frozen=True)
class Plan:
    """What becomes of every residual of a training step, and the checked result of compiling it.

    A plan made with ``per_layer=False`` is a ``jax.checkpoint`` policy: pass it as ``policy=`` to
    ``jdelta.remat``, ``jax.checkpoint``, ``nn.remat`` or ``nnx.remat`` around units marked with
    ``jdelta.remat``. It is immutable and hashable; plans made by equal decisions for the same
    program are equal.

    Attributes:
        policy: The decisions as a policy; None when the plain step fits the budget.
        residuals: The step's residuals, in the order of the forward pass.
        budget: Bound on the peak per device of the whole compiled step, bytes.
        predicted_peak: Peak predicted before this plan was compiled, bytes per device.
        compiled_peak: Peak of the compiled program (arguments, results and temporaries, less
            aliasing), bytes per device, as the target's compiler gives it; on a CPU with it what is
            in memory on its way to files.
        host_bytes: Bytes in pinned host memory in the compiled program: what is offloaded, and
            arguments and results that live there.
        spill_bytes: Bytes per device that a step holds in files at once.
        spill_written: Bytes per device that a step writes to files; in loops around the gradient
            that is more.
        overlap: What the compiled schedule hides of the transfers, by the target's rates.
        floor: Least peak that recomputing everything reaches, bytes; that of the plain step where
            the plain step fits.
        ceiling: Peak of the plain step, bytes.
        estimates: Which of ``floor`` and ``ceiling`` are predictions, since finding the plan took
            no compile of theirs. The floor in a ``BudgetError`` is always compiled.
        overhead: Predicted seconds that recompute, and transfers as far as the compiled schedule
            exposes them, add to a step.
        step_seconds: Predicted seconds of the plain step.
        result: How the search ended, and what to do about it.
        compiles: Programs compiled to find the plan (those known from the disk cache included).
        target: Name of the target.
        donate_argnums: Arguments whose buffers the results may take, as compiled.
        static: Arguments that are constants of the program, by number or name.
        arguments: Path, dtype and shape of each array among the others.
        fingerprint: Digest of the plain program the plan was made for.
        spill: Where spilled values go; None if there is no such place.
        spill_rates: Bytes per second written and read there when the plan was made.
        aliases: From regions' names while tracing to their names here.
        grouping: How the planned loops over layers are run. With several layers in an iteration
            these have decisions of their own (every second, every third...), or are under one
            more checkpoint (``nested``).
        undone: Names of residuals that the compiled program keeps though the plan recomputes them,
            or computes again though the plan keeps them; found by the marks that named values have
            in its text.
        updates_moved: Bytes by which the compiled peak is lower because weight updates run inside
            the backward loops; 0 where they stay where they are.
    """

    policy: Policy | None
    residuals: tuple[Residual, ...] = field(repr=False)
    budget: int
    predicted_peak: int
    compiled_peak: int
    host_bytes: int
    spill_bytes: int
    spill_written: int
    overlap: Overlap = field(repr=False)
    floor: int
    ceiling: int
    estimates: tuple[str, ...]
    overhead: float
    step_seconds: float
    result: str
    compiles: int
    target: str
    donate_argnums: tuple[int, ...]
    static: Static = field(repr=False)
    arguments: tuple[str, ...] = field(repr=False)
    fingerprint: str
    spill: Spill | None
    spill_rates: SpillRates | None
    aliases: tuple[tuple[str, str], ...] = field(repr=False)
    grouping: Grouping
    undone: tuple[str, ...]
    updates_moved: int
    _step: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    _call: Call | None = field(default=None, repr=False, compare=False)
    _compiled: Any = field(default=None, repr=False, compare=False)
    _store: Store | None = field(default=None, repr=False, compare=False)

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """From the name of each residual to its decision."""
        policy = self.policy
        if policy is None:
            return MappingProxyType({r.name: Decision.SAVE for r in self.residuals})
        return MappingProxyType({r.name: policy.decision(r.name) for r in self.residuals})

    @property
    def overhead_share(self) -> float:
        """Predicted overhead as a part of the plain step."""
        return self.overhead / self.step_seconds if self.step_seconds else 0.0

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """What ``jax.checkpoint`` is to do with the results of an equation."""
        if self.policy is None:
            return jax.checkpoint_policies.everything_saveable(prim, *avals, **params)
        if self.policy.spilled:
            raise SpillError(
                f"The plan spills {len(self.policy.spilled)} values, which a jax.checkpoint policy "
                "cannot do. Use plan.jit or jdelta.jit, or plan without spill=."
            )
        return self.policy(prim, *avals, **params)

    @property
    def writes_bits(self) -> bool:
        """Whether random bits are to be written to memory before they are read."""
        return self.policy is not None and self.policy.writes_bits

    def check_before_jvp(self, region: str) -> None:
        """Refuse to decide about a region of which only the plan knows what is differentiated.

        Raises:
            PlanMismatchError: Other values than the planned ones might have their names.
        """
        if self.policy is not None:
            self.policy.check_before_jvp(region)

    def prevents_cse(self, region: str) -> bool:
        """Whether recompute in ``region`` must be shielded from CSE: true outside of loops."""
        return self.policy is None or self.policy.prevents_cse(region)

    @functools.cached_property
    def store(self) -> Store | None:
        """What the step spills to when it runs; None if nothing can be spilled."""
        if self.policy is None or self.spill is None:
            return None
        return self._store or Store(self.spill)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step; compiled now if its figures came from the disk cache.

        Raises:
            PlanMismatchError: The plan was loaded from a file; ``jit`` compiles it.
        """
        if self._compiled is not None:
            return self._compiled
        if self._call is None:
            raise PlanMismatchError(
                "A plan loaded from a file has no compiled step. Give the step to "
                "plan.jit(step_fn) and call the result."
            )
        return compiled(self, self._call, self.donate_argnums)

    def jit(
        self,
        step_fn: Callable[..., Any] | None = None,
        *,
        donate_argnums: int | Sequence[int] | None = None,
    ) -> PlannedStep:
        """The step under this plan, like ``jax.jit(step_fn)``.

        Args:
            step_fn: The step, for a plan that was loaded from a file; default: the step that was
                planned.
            donate_argnums: As in ``jax.jit``; default: as planned, which needs no new compilation.

        Returns:
            A function with the signature of the step, for arguments of the planned shapes.

        Raises:
            TargetError: The plan was made ahead of time for devices that are not here.
            PlanMismatchError: A loaded plan without ``step_fn``; and, when the result is called,
                arguments or a program that the plan was not made for.
            BudgetError: With other donation than planned the step is over the budget.
        """
        fun = step_fn or self._step
        if fun is None:
            raise PlanMismatchError(
                "A plan loaded from a file does not contain the step: call plan.jit(step_fn)."
            )
        if ":" in self.target:
            raise TargetError(
                f"The plan was made ahead of time for {self.target}, which cannot run here. Save "
                "it with plan.save(path), or plan without target= on the machine that trains."
            )
        donate = self.donate_argnums if donate_argnums is None else several(donate_argnums)
        planned = self._call if fun is self._step else None
        ready = self._compiled if planned and donate == self.donate_argnums else None
        static = planned.static if planned else None
        return PlannedStep(self, fun, donate, static, ready)

    def save(self, path: str) -> None:
        """Write the plan to ``path`` as JSON, to be read by ``jdelta.load``."""
        _file.save(self, path)

    def explain(self, name: str) -> tuple[Explanation, ...]:
        """Why the plan decides as it does about a residual, and what would change that.

        Args:
            name: The name of a residual, or a pattern such as ``"h/mlp/*"``.

        Returns:
            One explanation for residuals that are alike.

        Raises:
            PlanMismatchError: No residual has such a name.
        """
        return explain(self, name)

    def export(self, form: str) -> str:
        """The plan in the words of another library, as far as values have the user's own names.

        Args:
            form: ``"jax"`` (``save_and_offload_only_these_names``), ``"maxtext"``, ``"levanter"``
                or ``"axlearn"``.

        Returns:
            Text; what that library will compute again though the plan keeps it is in comments.

        Raises:
            ValueError: No such form.
            PlanMismatchError: The plan cannot be said in its words.
        """
        return export(self, form)

    def report(self, path: str, *, others: Mapping[str, Plan] = _NO_PLANS) -> None:
        """Write one self-contained HTML page: figures, pictures, every residual.

        A plan that transfers is compiled once more if its figures came from the disk cache. A plan
        that was loaded from a file has no step, so the pictures of the step are left out.

        Args:
            path: File to write.
            others: Further plans to compare it with (hand policies, other budgets), by name.
        """
        shown = picture(self, self._call) if self._call is not None else None
        Path(path).write_text(page(self, shown, others), encoding="utf-8")

    def picture(self) -> Picture:
        """What pictures of the plan show, as records: for ``jdelta.plot``, or one's own drawing.

        Raises:
            PlanMismatchError: The plan was loaded from a file, so it has no step.
        """
        if self._call is None:
            raise PlanMismatchError(
                "A plan loaded from a file has no step to make a picture of. Plan the step again; "
                "that takes no compile while the measurements are cached."
            )
        return picture(self, self._call)

    def _repr_html_(self) -> str:
        """What a notebook shows: the page without pictures of the step."""
        content = html.escape(page(self, None, {}))
        return f'<iframe srcdoc="{content}" style="width:100%;height:32rem;border:0"></iframe>'

    def __str__(self) -> str:
        """The plan's table, and its figures for the whole step."""
        return f"{format_table(rows(self.residuals, self.decisions))}\n\n{summary(self)}"


@overload
def plan(
    step_fn: Callable[..., Any],
    budget: int | float | str | None = None,
    *,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    solver: str | Solver = "knapsack",
    host_budget: int | str | None = None,
    pin: Pins = _NO_PINS,
    per_layer: bool = True,
    spill: str | Spill | None = None,
    reorder: bool = False,
) -> DeferredPlan: ...
@overload
def plan(
    step_fn: Callable[..., Any],
    budget: int | float | str | None,
    first: Any,
    /,
    *args: Any,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    solver: str | Solver = "knapsack",
    host_budget: int | str | None = None,
    pin: Pins = _NO_PINS,
    per_layer: bool = True,
    spill: str | Spill | None = None,
    reorder: bool = False,
) -> Plan: ...
def plan(
    step_fn: Callable[..., Any],
    budget: int | float | str | None = None,
    *args: Any,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    solver: str | Solver = "knapsack",
    host_budget: int | str | None = None,
    pin: Pins = _NO_PINS,
    per_layer: bool = True,
    spill: str | Spill | None = None,
    reorder: bool = False,
) -> Plan | DeferredPlan:
    """Plan a training step to a memory budget, compile it under the plan and check it.

    Args:
        step_fn: Any function that ``jax.jit`` accepts and that takes a gradient inside. Its units
            of recompute are those marked by ``jdelta.remat``; if none is, they are found in the
            program. It is not edited.
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
        donate_argnums: As in ``jax.jit``; donated arguments count once in the peak.
        static_argnums: As in ``jax.jit``.
        static_argnames: As in ``jax.jit``.
        solver: ``"knapsack"`` (DELTA's heuristic), ``"milp"`` (exact, HiGHS), or a solver object.
        host_budget: Bound on the bytes per device that the plan offloads to pinned host memory, 0
            for no offload; default: the host memory of the target, as far as it is known, shared by
            the devices of a process, less arguments that live there.
        pin: Decisions taken by hand: from a pattern of residual names (``"h/mlp/*"``) to
            ``"save"``, ``"offload"`` or ``"recompute"``. One layer of a scan is then decided like
            the others. Or a ``jax.checkpoint`` policy, which then decides everything: so a policy
            written by hand is compiled, checked and shown like a plan.
        per_layer: Whether layers of a scan may be decided differently where that pays. The planned
            loop then runs several layers in an iteration, which ``plan.jit`` can do, but no plan
            used as a mere policy: False where the plan is to be one.
        spill: A directory for values that neither device nor host have room for, or a
            ``jdelta.Spill``: they are written to files there in the forward pass, and read back
            ahead of their use. Only ``plan.jit`` and ``jdelta.jit`` can do that.
        reorder: Whether weight updates may be moved into the backward loops, where no gradient of
            all layers is there at once. Done only if the compiled peak is lower for it, and only in
            what ``plan.jit`` runs. Compiles about twice as many programs.

    Returns:
        A ``Plan``; without ``args`` a ``DeferredPlan``.

    Raises:
        BudgetError: The budget is malformed, above the target's memory, or below the floor; or more
            is pinned to the host than ``host_budget``.
        TraceError: The step takes no gradient, or none through what is marked.
        TargetError: The target is unknown or its compiler is not installed.
        OffloadError: The compiled program does not offload what was planned.
        PlanMismatchError: A pattern of ``pin`` fits nothing.
        SpillError: Nothing can be spilled on the target, or to the directory.

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
    options: dict[str, Any] = {
        "target": target,
        "donate_argnums": several(donate_argnums),
        "static": (*several(static_argnums), *several(static_argnames)),
        "solver": _solver(solver),
        "host_budget": host_budget,
        "pin": pin,
        "per_layer": per_layer,
        "spill": None if spill is None else Spill.of(spill),
        "reorder": reorder,
    }
    if budget is not None:
        parse_budget(budget)
    if not args:
        return DeferredPlan(step_fn, budget, options)
    call = call_of(step_fn, options["static"], args, {})
    return _plan(step_fn, budget, call, **options)


def jit(
    step_fn: Callable[..., Any], *, budget: int | float | str | None = None, **options: Any
) -> Callable[..., Any]:
    """``jax.jit`` within a memory budget: plans at the first call, and again for new shapes.

    Args:
        step_fn: As in ``jdelta.plan``.
        budget: As in ``jdelta.plan``.
        **options: The other keyword arguments of ``jdelta.plan``.

    Returns:
        A function with the signature of the step. Its ``plans`` lists the plans made so far.

    Raises:
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
    return plan(step_fn, budget, **options).jit()


def load(path: str) -> Plan:
    """Read a plan written by ``Plan.save``.

    Raises:
        PlanMismatchError: The file is no plan, damaged, or of a version that is not understood.
    """
    return _file.load(path, Plan)


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

    def jit(self, *, donate_argnums: int | Sequence[int] | None = None) -> Callable[..., Any]:
        """The step, planned at the first call with each new set of shapes."""
        donate = {} if donate_argnums is None else {"donate_argnums": several(donate_argnums)}
        return _Deferred(self.step_fn, self.budget, {**self.options, **donate})

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refused: there are no decisions yet."""
        raise PlanMismatchError(
            "This plan has no arguments yet, so it cannot serve as a policy. Give jdelta.plan the "
            "step's arguments (arrays or jax.ShapeDtypeStruct), or use the function that .jit() "
            "of this plan returns."
        )


class _Deferred:
    """Plans a step once for each set of shapes it is called with."""

    def __init__(self, step_fn: Callable[..., Any], budget: Any, options: Mapping[str, Any]):
        self._call_of = functools.partial(call_of, step_fn, options["static"])
        self._plan_of = lambda call: _plan(step_fn, budget, call, **options)
        self._steps: dict[Any, PlannedStep] = {}
        self.plans: list[Plan] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call_of(args, kwargs)
        if call.key not in self._steps:
            plan = self._plan_of(call)
            self.plans.append(plan)
            self._steps[call.key] = plan.jit()
        return self._steps[call.key].run(call)


def _plan(
    step_fn: Callable[..., Any],
    budget: int | float | str | None,
    call: Call,
    *,
    target: str | None,
    donate_argnums: tuple[int, ...],
    static: Static,
    solver: Solver,
    host_budget: int | str | None,
    pin: Pins,
    per_layer: bool,
    spill: Spill | None,
    reorder: bool,
) -> Plan:
    where = resolve(target, call.args)
    bound = parse_budget(int(where.memory * (1 - MARGIN)) if budget is None else budget)
    if bound.bytes and bound.bytes > where.memory:
        raise BudgetError(
            f"The budget of {format_bytes(bound.bytes)} is above the {format_bytes(where.memory)} "
            f"that {where.name} has. Leave it out to use what there is."
        )
    call = call.abstract(where)
    placed = call.args
    donate = call.donated(donate_argnums)
    host_room = _host_capacity(host_budget, where, placed)
    store, rates = _spilling(spill, where)

    def files(residuals: Sequence[Residual]) -> Way | None:
        return to_files(spill, rates, residuals) if spill and rates else None

    def traced(grouping: Grouping) -> Trace:
        return trace(call.fun, *placed, grouping=grouping, platform=where.platform)

    def step(found: Trace) -> Step:
        aliases, automatic = found.aliases, found.automatic
        return Step(call.fun, placed, donate, where, aliases, automatic, found.grouping, store)

    planning = Planning(traced, step, host_room, files, pin, solver, per_layer)
    if reorder:
        plain = Step(call.fun, placed, donate, where, {})
        chosen = _reordered.result(planning, plain, bound)
    else:
        chosen = _reordered.Result(*planning.result(bound))
    search, result = chosen.search, chosen.found
    found, best = search.trace, result.best
    measurement: Measurement | None = best.measurement
    assert measurement is not None
    return Plan(
        policy=best.emission.policy,
        residuals=search.items.residuals,
        budget=result.budget,
        predicted_peak=best.predicted,
        compiled_peak=best.peak,
        host_bytes=measurement.all_host,
        spill_bytes=best.emission.spilled.bytes,
        spill_written=best.emission.spilled.written,
        overlap=measurement.overlap,
        floor=result.floor,
        ceiling=result.ceiling,
        estimates=result.estimates,
        overhead=best.overhead,
        step_seconds=program_seconds(found.graph, where.rates, where.platform),
        result=_result(result),
        compiles=result.compiles,
        target=where.name,
        donate_argnums=donate_argnums,
        static=static,
        arguments=described(placed),
        fingerprint=found.fingerprint,
        spill=spill,
        spill_rates=rates,
        aliases=tuple(found.aliases.items()),
        grouping=found.grouping,
        undone=measurement.undone,
        updates_moved=chosen.saved,
        _step=step_fn,
        _call=call,
        _compiled=best.compiled,
        _store=store,
    )


def _spilling(spill: Spill | None, target: Target) -> tuple[Store | None, SpillRates | None]:
    """The store that a step would spill to, and how fast it is."""
    if spill is None:
        return None, None
    require_platform(target.platform)
    rates = agreed_rates(spill)
    return Store(spill), rates


def _result(found: Found) -> str:
    if found.best.decisions is None:
        return "The plain step fits: nothing is rematerialised."
    return (found.best.outcome or Outcome.HEURISTIC).value


def _host_capacity(host_budget: int | str | None, target: Target, placed: Any) -> float:
    if host_budget is None:
        taken = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(placed) if is_on_host(x))
        return max(0.0, (target.host_share(placed) or math.inf) - taken)
    return float(parse_host_budget(host_budget))


def _solver(solver: str | Solver) -> Solver:
    if isinstance(solver, Solver):
        return solver
    if solver not in _SOLVERS:
        raise ValueError(f"solver must be one of {sorted(_SOLVERS)} or a Solver; got {solver!r}")
    return _SOLVERS[solver]
