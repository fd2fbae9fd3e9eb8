"""A plan written into the step: the step traced under a policy, simulated, lowered for a target."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdelta._src.backends.backend import Options
from jdelta._src.backends.target import Target, is_on_host
from jdelta._src.errors import OffloadError, PlanMismatchError
from jdelta._src.estimate.buffers import Compiler
from jdelta._src.estimate.memory import Timeline, timeline
from jdelta._src.passes.pooled_gradients import with_own_zeros
from jdelta._src.passes.program import Context, Pass, Program
from jdelta._src.passes.recompute import with_recompute
from jdelta._src.passes.recompute_after_forward import with_forward_first
from jdelta._src.passes.rounding import without_harmful_rounding
from jdelta._src.passes.spill import spilled
from jdelta._src.passes.spill_record import Emitted
from jdelta._src.passes.stacked_weights import with_rows_read_in_turn
from jdelta._src.passes.timed_transfers import timed
from jdelta._src.passes.weight_updates import with_updates_in_loops
from jdelta._src.program.graph import Graph, graph_of
from jdelta._src.program.hlo_names import NOTHING, Computed
from jdelta._src.program.loop_nest import walk
from jdelta._src.program.names import RegionName, names_in
from jdelta._src.regions.find import tracing
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.region import AS_WRITTEN, Grouping, Session
from jdelta._src.regions.trace import Recorded
from jdelta._src.sizes import format_some
from jdelta._src.spill import Store


@dataclass(frozen=True)
class Step:
    """A training step as the planner handles it.

    Attributes:
        fun: The user's step, never edited.
        args: Its arguments, as shapes placed on the target, or concrete.
        donate: Argument numbers whose buffers the results may take.
        target: What it is compiled for.
        aliases: From regions' names while tracing to their names in plans.
        automatic: Whether its regions are found in the program.
        grouping: How its loops over layers are to be run.
        store: Where spilled values go.
        updates_in_loops: Whether weight updates are to run inside the backward loops.
        outside: Whether what does not depend on the arguments of a differentiated function is
            computed outside of it.
        out_shardings: Where its results are to be, as in ``jax.jit``.
        recorded: Its program as it was recorded; None where plans are not made of it.
        names: What the user calls each of ``args``, for messages; empty where that is not known.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    target: Target
    aliases: Mapping[str, str]
    automatic: bool = False
    grouping: Grouping = AS_WRITTEN
    store: Store | None = None
    updates_in_loops: bool = False
    outside: bool = False
    out_shardings: Any = None
    recorded: Recorded | None = None
    names: tuple[str, ...] = ()

    def jitted(self, fun: Callable[..., Any]) -> Any:
        """A function of the step's arguments with its results, as it is to be compiled."""
        places = {} if self.out_shardings is None else {"out_shardings": self.out_shardings}
        return jax.jit(fun, donate_argnums=self.donate, **places)


@dataclass(frozen=True)
class Emission:
    """A step under a policy (None: the plain step), not compiled yet.

    Attributes:
        policy: The policy.
        timeline: Simulated live temporaries.
        lower: Lowers the program for the target.
        options: Options of XLA to compile it with.
        simulated: Simulated peak of the whole program, arguments and results included, bytes per
            device.
        spilled: What it writes to files.
        pool: Bytes of device memory beside the program's: on a CPU, those on their way to files.
        computed: The values that the policy decides about, by how often they are computed.
        names: All names in the program, those of values that nothing reads included: what a loop
            computes alike in each iteration JAX computes once before it, and keeps what is made
            of it, whatever the policy says.
        is_written: Whether the policy was written into the recorded program; else JAX
            differentiated the step under it.
    """

    policy: Policy | None
    timeline: Timeline
    lower: Callable[[], jax.stages.Lowered]
    options: Mapping[str, str | bool]
    simulated: int
    spilled: Emitted
    pool: int = 0
    computed: Computed = NOTHING
    names: frozenset[str] = frozenset()
    is_written: bool = False


def emit(step: Step, policy: Policy | None) -> Emission:
    """Trace a step under a policy.

    Raises:
        PlanMismatchError: The step does not contain all the names that the policy decides about.
        OffloadError: JAX cannot differentiate the step with what the policy puts on the host.
    """
    backend = step.target.backend
    staged = _staged(step, policy)
    program, context = staged.program, _context(step, policy)
    for rewrite in passes_of(step, policy):
        program = rewrite(program, context)

    @functools.cache
    def traced() -> jax.stages.Traced:
        if program is staged.program:
            return staged.traced()
        return _retraced(step, program, staged.results)

    jaxpr = program.jaxpr if program.run is None else traced().jaxpr
    graph = graph_of(jaxpr, context.shardings(jaxpr))
    computed = _computed(graph, policy, staged.names) if policy is not None else NOTHING

    def lower() -> jax.stages.Lowered:
        return traced().lower(lowering_platforms=(backend.platform,))

    temporaries = timeline(graph, Compiler(backend))
    pool = min(program.spilled.bytes, step.store.spill.pool_bytes) if step.store else 0
    pool = 0 if backend.devices.have_own_memory else pool
    simulated = temporaries.peak + fixed_bytes(graph, step) + pool
    options = _options(step.target, policy, simulated)
    return Emission(
        policy,
        temporaries,
        lower,
        options,
        simulated,
        program.spilled,
        pool,
        computed,
        staged.names,
        staged.is_written,
    )


class _Staged(NamedTuple):
    """A step under a policy, before any other pass.

    Attributes:
        program: The program.
        names: All names in it, those of values that nothing reads included.
        results: The tree of its results.
        traced: What lowers it.
        is_written: Whether the policy was written into the recorded program.
    """

    program: Program
    names: frozenset[str]
    results: Any
    traced: Callable[[], jax.stages.Traced]
    is_written: bool = False


def _staged(step: Step, policy: Policy | None) -> _Staged:
    """The step under a policy: written into its recorded program, or traced under it by JAX."""
    recorded = step.recorded
    written = with_recompute(recorded.program, policy) if recorded and policy else None
    if recorded and written:
        program = Program(written)
        traced = functools.partial(_retraced, step, program, recorded.results)
        return _Staged(program, recorded.names, recorded.results, traced, is_written=True)
    if policy and policy.levels:
        raise PlanMismatchError(
            "What enters the plan's regions is computed again from earlier regions, and this "
            "program cannot be written so. Plan it again."
        )
    # The user's own program JAX traces once, however often it is asked for.
    planned = _traced(step.jitted(_under(step, policy) if policy else step.fun), step, policy)
    results = jax.tree.structure(planned.out_info)
    return _Staged(Program(planned.jaxpr), names_in(planned.jaxpr), results, lambda: planned)


def passes_of(step: Step, policy: Policy | None) -> list[Pass]:
    """What rewrites a step under a policy, in order."""
    passes: list[Pass] = []
    if policy is not None:
        if step.grouping.layers > 1:
            passes.append(with_rows_read_in_turn)
        if step.store is not None:
            passes.append(spilled)
        passes += [without_harmful_rounding, with_own_zeros, with_forward_first]
        if not policy.is_by_hand:
            passes.append(timed)
    if step.updates_in_loops:
        passes.append(with_updates_in_loops)
    return passes


def _context(step: Step, policy: Policy | None) -> Context:
    """What passes read of a step under a policy."""
    context = Context(
        step.target.backend,
        step.target.rates,
        arguments=tuple(jax.tree.leaves(step.args)),
        donated=_donated_leaves(step),
        store=step.store,
    )
    if policy is None:
        return context
    offloads = bool(policy.offloaded)
    return replace(context, offloads=offloads, least=policy.least, is_spilled=policy.spills)


def _under(step: Step, policy: Policy) -> Callable[..., Any]:
    """The step's function, traced under a policy."""

    @functools.wraps(step.fun)
    def planned(*args: Any) -> Any:
        session = Session(
            policy,
            step.aliases,
            automatic=step.automatic,
            grouping=step.grouping,
            outside=step.outside,
        )
        with tracing(session, *args):
            return step.fun(*args)

    return planned


def _traced(planned: Any, step: Step, policy: Policy | None) -> jax.stages.Traced:
    try:
        return planned.trace(*step.args)
    except ValueError as error:
        if policy is None or not (policy.offloaded or policy.spilled):
            raise
        if "<host>" not in str(error):
            raise
        if "select_n" in str(error):
            raise OffloadError(
                "jax.vmap makes a cond with a marked region in it a choice between the values of "
                "its branches, and JAX cannot choose where some are on the host, or in files. Pin "
                "nothing there (host_budget=0, no spill=), or mark what has no cond around it."
            ) from error
        raise OffloadError(
            "The step differentiates in reverse what it has differentiated in reverse already, and "
            "JAX cannot transpose a copy to the host, nor to files. Pin nothing there "
            "(host_budget=0, no spill=), or take the outer derivative with jax.jvp: "
            "jax.jvp(jax.grad(f), (x,), (v,))."
        ) from error


def fixed_bytes(graph: Graph, step: Step) -> int:
    """Bytes of arguments and results, donated ones once."""
    inputs = sum(graph.values[v].bytes for v in graph.initial_values)
    outputs = sum(graph.values[v].bytes for v in graph.outputs if v is not None)
    leaves: list[Any] = jax.tree.leaves([step.args[i] for i in step.donate])
    donated = sum(map(local_bytes, leaves))
    return inputs + outputs - min(outputs, donated)


def _donated_leaves(step: Step) -> tuple[int, ...]:
    """Which of the flat arguments are donated."""
    counts = [len(jax.tree.leaves(arg)) for arg in step.args]
    return tuple(sum(counts[:i]) + leaf for i in step.donate for leaf in range(counts[i]))


def local_bytes(leaf: Any) -> int:
    """Bytes of an argument on one device; none for keys, what is no array, and on the host."""
    if not hasattr(leaf, "dtype") or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 0
    if is_on_host(leaf):
        return 0
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
    return math.prod(shape) * leaf.dtype.itemsize


def _retraced(step: Step, program: Program, results: Any) -> jax.stages.Traced:
    """The same step, evaluated as a program says; its results are a tree like ``results``."""

    @functools.wraps(step.fun)
    def planned(*args: Any) -> Any:
        return jax.tree.unflatten(results, program.evaluate(*jax.tree.leaves(args)))

    return step.jitted(planned).trace(*step.args)


def _options(target: Target, policy: Policy | None, needed: int) -> Options:
    """Options of XLA that make it do what the policy says, for this one program."""
    if policy is None or not policy.offloaded:
        return {}
    outside_loops, least = policy.offloads_outside_loops, policy.least
    return target.backend.offload_options(target.memory, needed, outside_loops, least)


def _computed(graph: Graph, policy: Policy, names: frozenset[str]) -> Computed:
    """How often the step computes what the policy decides about.

    Raises:
        PlanMismatchError: It does not compute all that the policy keeps, or has other regions.
    """
    ops = [op for op, _ in walk(graph) if op.name]
    regions = {op.name.region for op in ops if isinstance(op.name, RegionName)}
    if others := sorted(regions - {region for region, _ in policy.regions}):
        raise PlanMismatchError(
            f"The step has regions that were not there when it was planned: "
            f"{format_some(others, 5)}. A step must be the same each time that it is traced."
        )
    named = [(str(op.name), op.recomputed) for op in ops]
    computed_names = {name for name, _ in named}
    recomputed_names = {name for name, is_again in named if is_again}
    missing = sorted(policy.kept - names)
    if missing:
        raise PlanMismatchError(
            f"The step does not compute {len(missing)} of the values that the plan keeps: "
            f"{format_some(missing, 5)}. The plan was made for another program (or another version "
            "of JAX or Flax): plan this one again."
        )
    decided = policy.kept | policy.recomputed
    return Computed(policy.kept & (computed_names - recomputed_names), decided & recomputed_names)
