"""``jdelta.schedule``: in which order a step's operators need the least memory, and how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jdelta._src import _jax
from jdelta._src._jax.sharding import shardings_of
from jdelta._src.backends.platforms import backend_of, platform_of
from jdelta._src.backends.target import is_on_host, resolve
from jdelta._src.estimate.buffers import Compiler
from jdelta._src.hlo.text import parse
from jdelta._src.order import (
    Problem,
    arena,
    arrange,
    compiled_problem,
    layout,
    places_taken,
    problem_of,
)
from jdelta._src.plan.call import Call, call_of
from jdelta._src.plan.user_step import jitted
from jdelta._src.program.graph import Graph, graph_of
from jdelta._src.sizes import format_bytes

_SHOWN = 8


@dataclass(frozen=True)
class Placement:
    """A tensor in memory.

    Attributes:
        operator: The operator that makes it.
        kind: Its dtype and shape; ``"inside"`` for what an operator takes while it runs.
        bytes: Its size.
        offset: Where it begins.
        first: Place in the order of the operator that makes it.
        last: Place of the last operator that needs it.
    """

    operator: str
    kind: str
    bytes: int
    offset: int
    first: int
    last: int


@dataclass(frozen=True)
class Schedule:
    """An order of a step's operators and a layout of what they make.

    Bytes are per device, and of what the step allocates itself: temporaries, and results that take
    no argument's place. They say what an allocator that follows the order would need; XLA follows
    its own (``jdelta.schedule`` of a compiled step says how far that is from the best).

    Attributes:
        operators: Names of the operators, in the order found.
        order: For each its place in program order.
        timeline: Bytes alive while each runs.
        peak: Most bytes alive at once.
        program_peak: The same in program order; for a compiled program, in the compiler's order.
        bound: Bytes that are alive at once in every order.
        arena: Bytes that the tensors take at their offsets.
        placements: The tensors.
        resident: Bytes of arguments, which stay whatever the order.
        allocated: Bytes that the compiler allocates for the same, for a compiled program.
    """

    operators: tuple[str, ...] = field(repr=False)
    order: tuple[int, ...] = field(repr=False)
    timeline: tuple[int, ...] = field(repr=False)
    peak: int
    program_peak: int
    bound: int
    arena: int
    placements: tuple[Placement, ...] = field(repr=False)
    resident: int
    allocated: int | None = None

    @property
    def at_peak(self) -> tuple[Placement, ...]:
        """What is alive at the peak, largest first."""
        place = self.timeline.index(self.peak) if self.timeline else 0
        alive = [p for p in self.placements if p.first <= place <= p.last]
        return tuple(sorted(alive, key=lambda p: -p.bytes))

    def __str__(self) -> str:
        """What sets the peak, and the figures."""
        return f"{_table(self)}\n\n{_figures(self)}"


def schedule(
    step_fn: Callable[..., Any] | jax.stages.Compiled,
    *args: Any,
    target: str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    fused: bool = True,
) -> Schedule:
    """Order the operators of a step so that their peak is low, and lay out what they make.

    After ROAM (arXiv 2310.19295); ``docs/internals/order.md`` has the method. Nothing is compiled
    or run.

    Args:
        step_fn: Any function that ``jax.jit`` accepts; or a step that is compiled, of which XLA's
            own order is compared with the best.
        *args: Arguments of the step, as for ``jdelta.plan``; none for a compiled one.
        target: As for ``jdelta.plan``.
        donate_argnums: As for ``jax.jit``: results take the place of these arguments.
        static_argnums: As for ``jax.jit``.
        static_argnames: As for ``jax.jit``.
        fused: Whether to model the fusion of the target's compiler; else each equation is an
            operator that writes its results in full, as frameworks do that run them one by one.

    Returns:
        The order and the layout.

    Raises:
        TargetError: The target is unknown or its compiler is not installed.
        TypeError: Arguments are given for a compiled step.
    """
    if isinstance(step_fn, jax.stages.Compiled):
        if args or target is not None:
            raise TypeError("a compiled step has its arguments and target: give no others")
        return _of_compiled(step_fn)
    step = jitted(
        step_fn,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
    call = call_of(step, args, {}).over_own_mesh()
    where = resolve(target, call.placed)
    call = call.abstract(where)
    graph, donated = _staged(call, call.donated(step.donate), where.platform)
    compiler = Compiler(where.backend) if fused else None
    problem = problem_of(graph, compiler, places_taken(graph, donated))
    return _schedule(problem, sum(graph.values[v].bytes for v in graph.initial_values))


def _staged(call: Call, donate: Sequence[int], platform: str) -> tuple[Graph, list[int]]:
    """The program of a call, and which of its inputs are donated."""
    closed = _jax.jaxpr_of(call.fun, *call.args)
    graph = graph_of(closed, shardings_of(closed, call.args, platform))
    counts = [len(jax.tree.leaves(arg)) for arg in call.args]
    inputs = iter(graph.inputs)
    leaves = [[next(inputs) for _ in range(count)] for count in counts]
    pairs = (zip(leaves[i], jax.tree.leaves(call.args[i]), strict=True) for i in donate)
    return graph, [v for part in pairs for v, leaf in part if not is_on_host(leaf)]


def _of_compiled(compiled: jax.stages.Compiled) -> Schedule:
    stats: Any = compiled.memory_analysis()
    result = of_text(compiled.as_text() or "", stats.argument_size_in_bytes)
    return dataclasses.replace(result, allocated=_allocated(stats, _counts_on_chip(compiled)))


def of_text(text: str, resident: int) -> Schedule:
    """The schedule of a compiled program by its text; `resident` are the bytes of its arguments."""
    problem, argument_bytes = compiled_problem(parse(text))
    return _schedule(problem, resident, argument_bytes)


def _allocated(stats: Any, counts_on_chip: bool) -> int:
    """Bytes of temporaries and of results in no argument's place.

    Where temporaries count what stays on the chip, the peak does not.
    """
    own = stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = stats.temp_size_in_bytes + own
    if not counts_on_chip:
        return total
    peak = getattr(stats, "total_allocation_bytes", 0) or stats.peak_memory_in_bytes
    return min(total, peak - stats.argument_size_in_bytes)


def _counts_on_chip(compiled: jax.stages.Compiled) -> bool:
    """Whether the temporaries do, by the devices of its arguments and results, if it has some."""
    placed = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platforms = {platform_of(device) for s in placed for device in s.device_set}
    return any(backend_of(platform).reading.counts_on_chip for platform in platforms)


def _schedule(problem: Problem, resident: int, argument_bytes: int = 0) -> Schedule:
    """Orders and lays out; tensors of `argument_bytes` are arguments and not allocated."""
    arrangement = arrange(problem)
    first, last = problem.lives(arrangement.order)
    offsets = layout(problem.bytes, first, last)
    placements = tuple(
        Placement(problem.names[t.maker], t.name, t.bytes, int(offset), int(begin), int(end))
        for t, offset, begin, end in zip(problem.tensors, offsets, first, last, strict=True)
        if t.bytes
    )
    return Schedule(
        operators=tuple(problem.names[i] for i in arrangement.order),
        order=arrangement.order,
        timeline=tuple((problem.timeline(arrangement.order) - argument_bytes).tolist()),
        peak=arrangement.peak - argument_bytes,
        program_peak=problem.peak(problem.program) - argument_bytes,
        bound=arrangement.bound - argument_bytes,
        arena=arena(problem.bytes, offsets) - argument_bytes,
        placements=placements,
        resident=resident,
    )


def _table(result: Schedule) -> str:
    """The largest tensors alive at the peak."""
    alive = result.at_peak
    shown = [f"{format_bytes(p.bytes):>12}  {p.kind:<36}  {p.operator}" for p in alive[:_SHOWN]]
    lines = [f"{'alive at the peak':<52}made by", *shown]
    rest = sum(p.bytes for p in alive[_SHOWN:])
    if rest:
        lines.append(f"{format_bytes(rest):>12}  in {len(alive) - _SHOWN} others")
    return "\n".join(lines)


def _figures(result: Schedule) -> str:
    lines = {
        "operators": f"{len(result.order)}",
        "peak": f"{format_bytes(result.peak)} ({format_bytes(result.program_peak)} in the order "
        f"given; no order needs less than {format_bytes(result.bound)})",
        "arena": f"{format_bytes(result.arena)}, "
        f"{_percent(result.arena, result.peak)} over the peak",
        "arguments": format_bytes(result.resident),
    }
    if result.allocated is not None:
        lines["allocated"] = (
            f"{format_bytes(result.allocated)}, "
            f"{_percent(result.allocated, result.program_peak)} "
            "over what the compiler's order needs"
        )
    return "\n".join(f"{label:<14}{text}" for label, text in lines.items())


def _percent(total: int, part: int) -> str:
    return f"{100 * (total / part - 1) if part else 0:.1f} %"
