"""What to say of a plan, or of a budget, that is refused: what came, why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jdelta._src import _jax
from jdelta._src.backends.backend import Backend
from jdelta._src.decision import Decision
from jdelta._src.errors import BudgetError, TraceError
from jdelta._src.estimate.memory import Timeline
from jdelta._src.hlo.measure import Measurement
from jdelta._src.program.graph import labels
from jdelta._src.residuals.residual import Residual
from jdelta._src.search.candidate import CompiledCandidate
from jdelta._src.sizes import format_array, format_bytes, format_some


def not_there(names: Sequence[str], away: Mapping[str, int], measurement: Measurement) -> str:
    """What to say where the program keeps on the device what the plan puts on the host.

    Args:
        names: What is not on the host.
        away: From what should be there to bytes.
        measurement: Of the program.
    """
    return (
        f"The plan puts {format_bytes(sum(away.values()))} on the host, but the compiled program "
        f"holds {format_bytes(measurement.host)} there: the compiler keeps {format_some(names, 5)} "
        "on the device. Take these out of pin=."
    )


def wrong_order(fetches: Sequence[str]) -> str:
    """What to say where the compiler does not surely fetch the rows that it was asked for."""
    return (
        f"The compiled program reads {', '.join(fetches[:3])} back from the host in the wrong "
        "order, or in one that its text does not tell, so gradients might be wrong. Upgrade "
        "jaxlib, set jax_optimization_level back, or pin nothing to the host."
    )


def too_small(
    bound: int,
    floor: CompiledCandidate,
    least: int,
    residuals: Sequence[Residual],
    backend: Backend,
) -> BudgetError:
    """The error of a budget below the floor.

    Args:
        bound: The budget, bytes.
        floor: Everything recomputed, compiled.
        least: The least compiled peak of any plan, that of the floor or below it, bytes.
        residuals: Residuals of the step.
        backend: Compiler and devices of the target.
    """
    decisions = floor.decisions or {}
    inside = (r for r in residuals if not r.region_input and decisions[r.name] is Decision.SAVE)
    kept = sum(r.bytes for r in inside)
    few = f" but {format_bytes(kept)}" if kept else ""
    nested = f", {len(floor.levels)} that enter regions among them," if floor.levels else ""
    host = floor.measurement.host
    away = f" and {format_bytes(host)} on the host" if host else ""
    if files := floor.emission.spilled.bytes:
        away += f" or in files ({format_bytes(files)})"
    return BudgetError(
        f"The budget of {format_bytes(bound)} is below the floor: with every residual recomputed"
        f"{few}{nested}{away} the step still needs {format_bytes(floor.peak)} per device"
        f"{_largest(floor.emission.timeline)}. Raise the budget to {_floor(least, floor)}, "
        "donate the state (donate_argnums), make the batch smaller, or mark smaller regions with "
        f"jdelta.remat.{_merged(floor, residuals, backend)}",
        floor=least,
    )


def _floor(least: int, floor: CompiledCandidate) -> str:
    """What to raise a budget to."""
    if least == floor.peak:
        return "the floor"
    return f"the {format_bytes(least)} that another plan of it takes"


def above_plain(
    bound: int,
    plain: CompiledCandidate,
    floor: CompiledCandidate,
    residuals: Sequence[Residual],
    backend: Backend,
) -> BudgetError:
    """The error of a budget below the plain step, which takes less than everything recomputed.

    Args:
        bound: The budget, bytes.
        plain: The plain step, compiled.
        floor: Everything recomputed, compiled.
        residuals: Residuals of the step.
        backend: Compiler and devices of the target.
    """
    return BudgetError(
        f"The budget of {format_bytes(bound)} is below the floor: the step as it is needs "
        f"{format_bytes(plain.peak)} per device{_largest(plain.emission.timeline)}, and with every "
        f"residual recomputed {format_bytes(floor.peak)}, which is no less. Raise the budget to "
        "the floor, donate the state (donate_argnums), make the batch smaller, or mark smaller "
        f"regions with jdelta.remat.{_merged(floor, residuals, backend)}",
        floor=plain.peak,
    )


def grown(bound: int, known: CompiledCandidate, plan: CompiledCandidate) -> BudgetError:
    """The error of a plan that takes more than when it was measured, and more than the budget.

    Args:
        bound: The budget, bytes.
        known: The plan, its measurement from disk.
        plan: The plan, compiled once more.
    """
    return BudgetError(
        f"Compiled once more, the plan takes {format_bytes(plan.peak)}, over the budget of "
        f"{format_bytes(bound)}; an earlier process measured {format_bytes(known.peak)}. The "
        "compiler tunes programs for attached devices, each time anew. Plan again: the new figure "
        "is kept."
    )


def nothing_kept(bound: int, plain: CompiledCandidate, uncut: str) -> BudgetError | TraceError:
    """The error of a budget below a step of which nothing can be decided.

    Args:
        bound: The budget, bytes.
        plain: The step, compiled.
        uncut: Why it has no regions; empty where it keeps nothing for a backward pass.
    """
    measured = plain.measurement
    parts = {
        "arguments": measured.arguments,
        "results": measured.outputs - measured.aliased,
        "temporaries": measured.temporaries,
    }
    shares = ", ".join(f"{part} {format_bytes(size)}" for part, size in parts.items())
    needed = (
        f"The budget of {format_bytes(bound)} is below the {format_bytes(plain.peak)} per device "
        f"that the step needs ({shares}){_largest(plain.emission.timeline)}."
    )
    if uncut:
        return TraceError(f"{needed} {uncut}", floor=plain.peak)
    return BudgetError(
        f"{needed} It keeps nothing for "
        "a backward pass, so there is nothing to recompute or to move: raise the budget, donate "
        "what the step returns anew (donate_argnums), or give it less at once (a smaller batch, "
        "or a jax.lax.map with batch_size=).",
        floor=plain.peak,
    )


def _merged(floor: CompiledCandidate, residuals: Sequence[Residual], backend: Backend) -> str:
    """What to do about a compiler that merges recompute with what it repeats."""
    undone = set(floor.measurement.undone)
    kept = sorted((r for r in residuals if r.name in undone), key=lambda r: -r.bytes)
    if not kept:
        return ""
    names = format_some([r.name for r in kept], 3)
    said = f" The compiler keeps {format_bytes(sum(r.bytes for r in kept))} all the same ({names})"
    if not backend.tolerances.undoes_recompute:
        return (
            f"{said}: it takes their recompute for what it repeats, and undoes it. Run the layers "
            "under jax.lax.scan, where the two are apart."
        )
    return (
        f"{said}: before jax 0.12 XLA for CPUs undoes recompute outside of loops. Upgrade jax, run "
        "the layers under jax.lax.scan, spill to files (spill=), or plan for the accelerator that "
        "is to train (target='tpu:v5e')."
    )


def _largest(timeline: Timeline) -> str:
    """What is alive at the simulated peak, and what its operation takes itself, for messages."""
    values, names = timeline.graph.values, labels(timeline.graph)
    rows = [
        f"{names[v]} {format_array(values[v].dtype, values[v].shape)} "
        f"{format_bytes(values[v].bytes)}"
        for v in timeline.alive(timeline.peak_index)[:4]
    ]
    if timeline.peak_workspace:
        rows.insert(0, _itself(timeline))
    return f"; the largest temporaries then are {', '.join(rows)}" if rows else ""


def _itself(timeline: Timeline) -> str:
    """What the operation at the peak takes for itself."""
    op = timeline.graph.operations[timeline.peak_index]
    line = _jax.line_of(op.equation)
    place = f" at {line}" if line else ""
    return f"{format_bytes(timeline.peak_workspace)} that {op.primitive}{place} takes for itself"
